"""Faults after which a model does not end its answers, or is not let to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.checks.faults.template import PLAIN, WORDS, rows_of, templated
from tests.checks.planting import Place, fault
from tests.helpers.tiny_models import save_tiny
from tests.helpers.tiny_tokenizers import CHATML, tiny_tokenizer

from taut.checks.session import Session
from taut.data.render.render import Renderer
from taut.types import Sample

END = "<|im_end|>"


def based(place: Place, template: str, rows: Any = PLAIN, **keys: Any) -> Session:
    """A session of a base model, whose eos and pad are <|endoftext|>, with a template given as a file."""
    tokenizer = tiny_tokenizer(None)
    model = save_tiny("llama", place.directory / "llama", tokenizer)
    return templated(place, template, rows, model=model, **keys)


def generating(place: Place, settings: Mapping[str, Any]) -> Session:
    """A session of a model with these settings in generation_config.json."""
    model = place.model()
    path = model / "generation_config.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps({**before, **settings}), encoding="utf-8")
    return place.session(model)


# -- stop.set


@fault("stop.set", says="no special token")
def turns_that_end_with_a_line_break(place: Place, is_faulty: bool) -> Session:
    """Headings in plain words and nothing at the end of an answer: there is nothing to stop at."""
    text = (
        "{% for message in messages %}{{ '### ' + message['role'] + ':\\n' + message['content'] }}"
        "{% if message['role'] == 'assistant' %}{{ 'END' }}{% endif %}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '### assistant:\\n' }}{% endif %}"
    )
    return templated(place, text.replace("END", "" if is_faulty else END))


@fault("stop.set", says="no special token")
def an_end_that_only_some_answers_have(place: Place, is_faulty: bool) -> Session:
    """The template ends the last user turn, and leaves the answer open."""
    open_ended = CHATML.replace(
        "'<|im_end|>\\n'", "('<|im_end|>\\n' if message['role'] == 'user' else '\\n')"
    )
    return templated(place, open_ended if is_faulty else CHATML)


# -- stop.targets


@fault("stop.targets", says="among its targets")
def pads_are_masked_by_id_and_pad_is_the_end(place: Place, is_faulty: bool) -> Session:
    """What collators do where pad = eos: the end of every answer is a pad to them."""
    made = Renderer._sample

    def masked(self: Renderer, name: str, ids: list[int], target_at: Any, *more: Any) -> Sample:
        pad = self.tokenizer.convert_tokens_to_ids(END)
        return made(self, name, ids, [at for at in target_at if ids[at] != pad], *more)

    if is_faulty:
        place.patch.setattr(Renderer, "_sample", masked)
    return place.session()


@fault("stop.targets", says="data.max_length")
def documents_that_are_all_cut(place: Place, is_faulty: bool) -> Session:
    """Long texts, each cut before the token that ends it: the model never sees one end."""
    rows = [{"text": f"{words}, " * 12} for words in WORDS]
    length = 16 if is_faulty else 200
    return place.session(data=place.data(rows), data__max_length=length, data__too_long="truncate")


# -- stop.saved


@fault("stop.saved", says="eos_token")
def a_template_that_begins_with_eos(place: Place, is_faulty: bool) -> Session:
    """eos is <|endoftext|> in training and the turn end once saved: a server's prompt begins with another token."""
    name = "eos_token" if is_faulty else "'<|endoftext|>'"
    return based(place, f"{{{{ {name} }}}}{CHATML}")


@fault("stop.saved", says="pad_token")
def a_template_that_writes_pad(place: Place, is_faulty: bool) -> Session:
    """Pad is the turn end in training, and another token once saved."""
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = END
    model = save_tiny("llama", place.directory / "llama", tokenizer)
    name = "pad_token" if is_faulty else f"'{END}'"
    text = CHATML.replace("{% for message", f"{{{{ {name} }}}}{{% for message", 1)
    return templated(place, text, model=model)


# -- stop.generation


@fault("stop.generation", says="early_stopping")
def settings_that_the_library_does_not_save(place: Place, is_faulty: bool) -> Session:
    """Flags of beam search without beams: read without a word, refused when the trained model is written."""
    return generating(place, {"early_stopping": True} if is_faulty else {})


@fault("stop.generation", says="suppress_tokens")
def an_end_that_is_suppressed(place: Place, is_faulty: bool) -> Session:
    """The turn end is among the tokens that are never generated."""
    end = tiny_tokenizer().convert_tokens_to_ids(END)
    return generating(place, {"suppress_tokens": [end if is_faulty else end + 1]})


@fault("stop.generation", says="min_new_tokens")
def answers_that_must_be_long(place: Place, is_faulty: bool) -> Session:
    """A least length that no answer of the data has."""
    return generating(place, {"min_new_tokens": 512 if is_faulty else 2})


# -- stop.rows


def _without_row(model: Path, index: int) -> Path:
    """The model with a row of zeros, as padding rows of a vocabulary are."""
    (path,) = model.glob("*.safetensors")
    tensors = load_file(path)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name][index] = 0.0
    save_file(tensors, path, metadata={"format": "pt"})
    return model


@fault("stop.rows", says="lora.train_token_rows")
def an_untrained_end_under_adapters(place: Place, is_faulty: bool) -> Session:
    """A base model's turn end was never trained, and adapters leave its row as it is."""
    model = _without_row(place.model(), tiny_tokenizer().convert_tokens_to_ids(END))
    return place.session(
        model, lora__rank=4, lora__train_token_rows="never" if is_faulty else "auto"
    )


@fault("stop.rows", says="freeze")
def an_untrained_end_in_a_frozen_head(place: Place, is_faulty: bool) -> Session:
    """The same with the head frozen."""
    model = _without_row(place.model("llama"), tiny_tokenizer().convert_tokens_to_ids(END))
    return place.session(model, freeze=["lm_head.weight" if is_faulty else "model.norm.weight"])


# -- stop.baseline


@fault("stop.baseline", says="<|eot_id|>")
def a_model_that_was_taught_another_end(place: Place, is_faulty: bool) -> Session:
    """A model tuned with another template ends with that one's token, which nothing names any more."""
    tokenizer = tiny_tokenizer()
    model = save_tiny("llama", place.directory / "llama", tokenizer, tie_word_embeddings=False)
    (path,) = model.glob("*.safetensors")
    tensors = load_file(path)
    stop, end = (int(tokenizer.convert_tokens_to_ids(name)) for name in ("!", "<|eot_id|>"))
    own = tensors["model.embed_tokens.weight"]
    own[stop] = 50 * torch.nn.functional.normalize(own[stop], dim=0)  # no layer moves it far
    if is_faulty:
        scale = tensors["model.norm.weight"]
        tensors["lm_head.weight"][end] = (
            2.5 * torch.nn.functional.normalize(own[stop], dim=0) / scale
        )
    save_file(tensors, path, metadata={"format": "pt"})
    rows = rows_of("user", "assistant")
    for row in rows:
        row["messages"][1]["content"] += "!"
    return place.session(model, place.data(rows))
