"""The ways a tuned model fails to stop, each planted: taut's model stops, the planted one does not (so that the fault
matters here), and taut refuses or reports it.

A tiny model learns 32 chats ("cat 3" -> "cat cat cat") in 80 steps; answers are sampled at temperature 1 by the
library's ``generate`` with what the saved directory says, and by taut's engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.chat_runs import decisions, events, sft, write_rows
from tests.helpers.tiny_models import save_tiny
from tests.helpers.tiny_tokenizers import SPECIALS, save_tokenizer, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import taut
from taut.commands import verify
from taut.commands.settings import Verify
from taut.config import from_mapping
from taut.data.render import render
from taut.data.render.render import Renderer
from taut.data.rows.messages import read_conversation
from taut.errors import DataError, ModelError
from taut.inference.factory import open_engine
from taut.inference.settings import ModelUse, Sampling
from taut.models.load import quiet_library
from taut.run import inputs as run_module
from taut.run import setup as build_module
from taut.types import Prompt, Sample

WORDS = ("cat", "dog", "bird", "house", "sky", "red", "big", "blue")
CHATS = [(f"{word} {count}", " ".join([word] * count)) for word in WORDS for count in range(1, 5)]
LONG = [(f"{word} 20", " ".join([word] * 20)) for word in WORDS]
MOST = 32
"""Tokens an answer may have; the longest right one has 10."""
TRAINING: dict[str, Any] = {
    "steps": 80,
    "stop_check__prompts": 16,
    "dtype": "float32",
    "optim__learning_rate": 5e-3,
    "batch__samples_per_step": 16,
}
FOREIGN = "<|endoftext|>"


class Answers(NamedTuple):
    """Of the sampled answers, the shares that ended by themselves, and that were right."""

    ended: float
    right: float


def rows_of(chats: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": ask},
                {"role": "assistant", "content": answer},
            ]
        }
        for ask, answer in chats
    ]


def sampled(model: Path, chats: list[tuple[str, str]] = CHATS, num: int = 8) -> Answers:
    """What the library's generate gives with the directory's own tokenizer and generation_config."""
    with quiet_library():
        loaded: Any = AutoModelForCausalLM.from_pretrained(model).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    stops = np.atleast_1d(loaded.generation_config.eos_token_id)
    torch.manual_seed(0)
    ended, right = [], []
    for answers, prompt in of_equal_length(tokenizer, chats):
        out = loaded.generate(prompt, do_sample=True, max_new_tokens=MOST, num_return_sequences=num)
        for row, ids in enumerate(out[:, prompt.shape[1] :]):
            ended.append(bool(np.isin(ids.numpy(), stops).any()))
            text = tokenizer.decode(ids, skip_special_tokens=True)
            right.append(text == answers[row // num])
    return Answers(float(np.mean(ended)), float(np.mean(right)))


def of_equal_length(
    tokenizer: Any, chats: list[tuple[str, str]]
) -> Iterator[tuple[list[str], torch.Tensor]]:
    """The answers and prompts of chats, those of equally long prompts together: nothing is padded."""
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": ask}], add_generation_prompt=True, return_dict=False
        )
        for ask, _ in chats
    ]
    for num_tokens in sorted(set(map(len, prompts))):
        mine = [at for at, ids in enumerate(prompts) if len(ids) == num_tokens]
        yield [chats[at][1] for at in mine], torch.tensor([prompts[at] for at in mine])


def ended_in_engine(model: Path, chats: list[tuple[str, str]] = CHATS, num: int = 8) -> float:
    """The share of answers that end by themselves in taut's engine."""
    use = ModelUse(model=str(model), device="cpu", dtype="float32")
    with open_engine(use) as opened:
        prompts = [
            Prompt(ask, opened.renderer.prompt_ids([{"role": "user", "content": ask}]))
            for ask, _ in chats
        ]
        sampling = Sampling(max_new_tokens=MOST, n=num)
        found = opened.engine.generate(prompts, sampling)
    return float(np.mean([completion.finish_reason == "stop" for completion in found]))


def save_base(directory: Path, *, eos: str = FOREIGN, pad: str = FOREIGN, **options: Any) -> Path:
    """A model that knows nothing yet, whose files name ``eos``."""
    tokenizer = tiny_tokenizer("chatml", eos=eos)
    tokenizer.pad_token = pad
    options = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.05} | options
    eos_id = tokenizer.convert_tokens_to_ids(eos)
    save_tiny("qwen2", directory, tokenizer, sharpen=False, eos_token_id=eos_id, **options)
    return directory


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "train.jsonl", rows_of(CHATS))


@pytest.mark.slow
def test_a_pad_that_is_the_end_does_not_unteach_it(
    train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Class 7. Planted: the end is no target, as where pads are masked by their id."""
    base = save_base(tmp_path / "base", eos="<|im_end|>", pad="<|im_end|>")
    result = sft(base, train, tmp_path / "good", **TRAINING)
    good = sampled(result.model)
    assert good.ended >= 0.99
    assert ended_in_engine(result.model) >= 0.99
    tokenizer = AutoTokenizer.from_pretrained(result.model)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id

    whole = Renderer._sample

    def masked(self: Renderer, name: str, ids: list[int], target_at: Any, *more: Any) -> Sample:
        pad = self.tokenizer.pad_token_id
        return whole(self, name, ids, [at for at in target_at if ids[at] != pad], *more)

    monkeypatch.setattr(Renderer, "_sample", masked)
    cache = {"data__cache": str(tmp_path / "planted-cache")}
    with pytest.raises(DataError, match="none of 32 samples has a token that ends an answer"):
        sft(base, train, tmp_path / "refused", **TRAINING, **cache)
    monkeypatch.setattr(run_module, "_taught_ends", lambda *_: [])
    planted = sft(base, train, tmp_path / "planted", check="off", **TRAINING, **cache)
    assert sampled(planted.model).ended < 0.1
    assert not is_reported(result)


def is_reported(result: taut.Result) -> bool:
    """Whether the run's own sampling at its end told that the model may not stop."""
    assert result.stops is not None
    return not result.stops.is_enough


def test_the_template_may_end_turns_with_another_token_than_the_files_name(
    train: Path, tmp_path: Path
) -> None:
    """Class 8. Planted: the saved files name the base model's end again."""
    base = save_base(tmp_path / "base")
    result = sft(base, train, tmp_path / "out", **TRAINING)
    good = sampled(result.model)
    assert good.ended >= 0.99
    assert good.right >= 0.9
    end, text = (tiny_tokenizer().convert_tokens_to_ids(t) for t in ("<|im_end|>", FOREIGN))
    assert GenerationConfig.from_pretrained(result.model).eos_token_id == [end, text]
    assert decisions(tmp_path / "out")["stop"][0] == f"<|im_end|> {FOREIGN}"
    check = from_mapping(Verify, {"model": str(result.model), "device": "cpu"})
    assert verify.run(check) == 0

    for name in ("generation_config.json", "config.json"):
        settings = json.loads((result.model / name).read_text())
        (result.model / name).write_text(json.dumps(settings | {"eos_token_id": text}))
    assert sampled(result.model).ended < 0.1
    assert verify.run(check) == 1
    assert ended_in_engine(result.model) >= 0.99  # its stop set comes from the template


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_an_end_that_was_never_trained_is_trained_beside_adapters(
    is_tied: bool, train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F4, third cause. Planted: the row stays frozen, one of many alike."""
    base = pretrained(tmp_path, tie_word_embeddings=is_tied)
    lora = TRAINING | {"lora__rank": 8, "optim__learning_rate": 1e-2}
    result = sft(base, train, tmp_path / "good", **lora)
    tables = "model.embed_tokens" if is_tied else "model.embed_tokens and lm_head"
    value, reason = decisions(tmp_path / "good")["lora.train_token_rows"]
    assert value == f"1 of {tables}"
    assert "<|im_end|>: never trained, in the embedding it is 0.000 of a row's norm from" in reason
    assert sampled(result.model).ended >= 0.99
    assert ended_in_engine(result.model) >= 0.99

    never = lora | {"lora__train_token_rows": "never"}
    with pytest.raises(
        ModelError, match=r"<\|im_end\|>: never trained.*set lora.train_token_rows=auto"
    ):
        sft(base, train, tmp_path / "refused", **never)
    with pytest.raises(ModelError, match=r"never trained.* out of freeze"):
        sft(base, train, tmp_path / "frozen", **TRAINING, freeze=["*embed_tokens*"])
    monkeypatch.setattr(build_module, "require_trained", lambda *_: None)
    # Among 64 tokens it may end by chance: the tokens that are drawn depend on the place of the rows.
    few = never | {"stop_check__max_new_tokens": 24}
    planted = sft(base, train, tmp_path / "planted", check="off", **few)
    monkeypatch.undo()
    more = {"steps": 1, "dtype": "float32"}
    with pytest.raises(ModelError, match=r"with lora.adapter, merge it into its model first"):
        sft(base, train, tmp_path / "on", lora__adapter=str(tmp_path / "planted/adapter"), **more)
    again = sft(base, train, tmp_path / "on", lora__adapter=str(tmp_path / "good/adapter"), **more)
    assert sampled(again.model).ended >= 0.99
    assert is_reported(planted)
    assert not is_reported(result)
    assert sampled(planted.model).right < 0.1  # it ends late and by chance, if at all


def pretrained(place: Path, **options: Any) -> Path:
    """A model that knows the answers as plain text; the special tokens it never saw have one row, as in real ones."""
    fresh = save_base(place / "fresh", **options)
    texts = write_rows(
        place / "texts.jsonl", [{"text": f"{ask}\n{answer}"} for ask, answer in CHATS]
    )
    base = sft(fresh, texts, place / "pretraining", **TRAINING | {"steps": 60}).model
    tokenizer = tiny_tokenizer("chatml", eos=FOREIGN)
    unseen = tokenizer.convert_tokens_to_ids([token for token in SPECIALS if token != FOREIGN])
    weights = load_file(base / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            weights[name][unseen] = weights[name][unseen].mean(0)
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(tokenizer, base)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(base)
    return base


@pytest.fixture(scope="module")
def long_too(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("long") / "train.jsonl", rows_of(CHATS + LONG))


@pytest.mark.slow
def test_a_cut_row_teaches_no_end(
    long_too: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Class 9. Planted: the last token of a cut row is made an end; the model then stops where the limit was."""
    base = save_base(tmp_path / "base")
    cut = TRAINING | {"data__too_long": "truncate", "data__max_length": longest_chat() + 2}
    result = sft(base, long_too, tmp_path / "good", **cut)
    assert decisions(tmp_path / "good")["stop.taught"][0] == "32 of 40 samples"
    assert len(events(tmp_path / "good", "start")[0]["cut"]) == len(LONG)
    assert sampled(result.model).ended >= 0.99
    short = shortened(result.model)

    whole = render._slice

    def forged(sample: Sample, name: str, start: int, stop: int) -> Sample:
        found = whole(sample, name, start, stop)
        found.ids_T[-1] = tiny_tokenizer().convert_tokens_to_ids("<|im_end|>")
        return found

    monkeypatch.setattr(render, "_slice", forged)
    cache = {"data__cache": str(tmp_path / "planted-cache")}
    planted = sft(base, long_too, tmp_path / "planted", **cut, **cache)
    assert shortened(planted.model) >= 0.9
    assert short <= 0.1
    assert "stop.taught" not in decisions(tmp_path / "planted")  # a forged end looks like one


def longest_chat() -> int:
    """Tokens of the longest of CHATS."""
    renderer = Renderer(tiny_tokenizer())
    rows = [read_conversation(row["messages"], "chat") for row in rows_of(CHATS)]
    return max(sample.num_tokens for samples in renderer.render_all(rows) for sample in samples)


def shortened(model: Path) -> float:
    """The share of answers to the long questions that end and are too short."""
    with quiet_library():
        loaded: Any = AutoModelForCausalLM.from_pretrained(model).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    early = []
    for answers, prompt in of_equal_length(tokenizer, LONG):
        out = loaded.generate(prompt, do_sample=False, max_new_tokens=MOST)
        for answer, ids in zip(answers, out[:, prompt.shape[1] :], strict=True):
            text = tokenizer.decode(ids, skip_special_tokens=True)
            has_ended = bool((ids == tokenizer.eos_token_id).any())
            early.append(has_ended and answer.startswith(text) and text != answer)
    return float(np.mean(early))


def test_data_whose_every_end_is_cut_is_refused(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "train.jsonl", rows_of(LONG))
    base = save_base(tmp_path / "base")
    with pytest.raises(DataError, match=r"none of 8 samples .*8 were cut.*raise data.max_length"):
        sft(
            base, data, tmp_path / "out", data__too_long="truncate", data__max_length=longest_chat()
        )


@pytest.mark.parametrize("plant", ["text", "opening"])
def test_an_id_that_must_not_end_an_answer_is_left_out(plant: str, tmp_path: Path) -> None:
    """config.json names a letter of another vocabulary, or what opens a turn: no answer is cut there."""
    data = write_rows(tmp_path / "train.jsonl", rows_of(CHATS))
    base = save_base(tmp_path / "base")
    tokenizer = tiny_tokenizer()
    index = tokenizer.convert_tokens_to_ids({"text": "c", "opening": "<|im_start|>"}[plant])
    GenerationConfig(eos_token_id=[index]).save_pretrained(base)
    result = sft(base, data, tmp_path / "out", **TRAINING | {"steps": 1})
    assert index not in GenerationConfig.from_pretrained(result.model).eos_token_id
    assert "left out" in decisions(tmp_path / "out")["stop"][1]
