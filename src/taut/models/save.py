"""What describes a model's pictures, carried from the model that was loaded to what is saved: the files as they are.

But for a chat template among them: the library prefers one there to chat_template.jinja, where the template in use is
saved. May import errors and models.anatomy.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from taut.errors import OutputError
from taut.io import files
from taut.models import architecture
from taut.models.architecture import has_head
from taut.models.load import quiet_library
from taut.models.lora import plain_model

FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def find_processor(model: nn.Module) -> dict[str, Path]:
    """Name -> file, of the model that was loaded; nothing for one that takes no pictures. Asked once when a hub model
    is loaded, it is answered from the library's cache ever after.
    """
    inner = architecture.unwrap(model)
    if not architecture.takes_pictures(inner.config):
        return {}
    origin = str(inner.name_or_path)
    found: dict[str, Path] = {}
    for name in FILES:
        file = cached_file(
            origin,
            name,
            revision=getattr(inner.config, "_commit_hash", None),
            _raise_exceptions_for_missing_entries=False,
        )
        if file is not None:
            found[name] = Path(file)
    if not found:
        raise OutputError(
            f"{origin} has no {FILES[0]} any more, which says how pictures are scaled and cut; expected it beside "
            "config.json; put it back"
        )
    return found


def copy_processor(model: nn.Module, directory: Path, *, has_template: bool) -> None:
    """Write into ``directory`` what the library needs to make pictures ready for ``model``. ``has_template``: whether
    the directory has a chat template of its own.
    """
    for name, file in find_processor(model).items():
        said = files.read_json(file)
        if has_template and said.pop("chat_template", None) is not None:
            text = json.dumps(said, indent=2, ensure_ascii=False) + "\n"
            (directory / name).write_text(text, encoding="utf-8")
        else:
            (directory / name).write_bytes(file.read_bytes())


# --------------------------------------------------------------------------------------------------
# A trained model -> a model directory in Hugging Face format that stops where it should in any
# server.
#
# The stop set goes into generation_config exactly as it was derived (``data.stops``); its first, the
# turn end, becomes eos of tokenizer and config; the template in use is saved with the tokenizer. The
# pad token is never the turn end where another candidate exists: tools that mask pads by id would
# unteach it. An adapter is merged. A reward model's pad ends no answer at all, since the library reads its score
# before the pads. What describes a model's pictures is copied from the model that was loaded. The directory is written
# beside its place and renamed, and the tokenizer is read back first.
#
# May import errors and models.{anatomy,lora,processor_files}. Only the rank that writes calls it.

_PADS = (
    "<pad>",
    "[PAD]",
    "<|pad|>",
    "<|padding|>",
    "<|endoftext|>",
    "<|finetune_right_pad_id|>",
    "<|end_of_text|>",
)
"""Pad tokens of well-known vocabularies, taken where the tokenizer names none that can be used."""
_MANY = 1000
"""Entries from which on a tokenizer's part is its vocabulary or its merges: never changed, so that a copy shares it."""
_PROBE = "Stop, then: say it again (12 x 3.5 = 42)!\n\n  naïve 東京 def f(x):\treturn x\n"


@contextmanager
def saving(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    *,
    stop_ids: Sequence[int],
    template: str | None,
    dtype: torch.dtype,
    state_dict: Mapping[str, Tensor] | None = None,
) -> Iterator[Path]:
    """Write model, tokenizer and template; the complete directory is in hand before it takes the place of
    ``directory``. What the block writes there belongs to the model; where the block raises, nothing is replaced.

    ``stop_ids``: the whole stop set, the turn end first. ``template``: the chat template in use, None for
    plain text. ``dtype``: of the saved weights (``load.checkpoint_dtype`` of the model this one
    started from). ``state_dict``: the full weights under ``model``'s names, where ``model`` holds
    shards.
    """
    directory = Path(directory)
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    served = serving_tokenizer(tokenizer, stop_ids, template, has_scalar=not has_head(model))
    with torch.no_grad(), quiet_library():
        plain = plain_model(model, state_dict)
        nn.Module.to(plain, dtype=dtype)
        _set_dtype(plain.config, dtype)
        _set_stops(plain, served, stop_ids)
        try:
            partial.mkdir(parents=True)
            plain.save_pretrained(partial)
            served.save_pretrained(partial)
            copy_processor(model, partial, has_template=template is not None)
            _require_same_ids(served, partial)
            make_readable(partial)
            del plain  # the block may load the model again
            yield partial
            files.replace_directory(partial, directory)
        except (OSError, SafetensorError) as error:
            raise OutputError(
                f"{directory} cannot be written: {error}; expected room and permission for the "
                "model"
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def serving_tokenizer(
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: Sequence[int],
    template: str | None,
    *,
    has_scalar: bool = False,
) -> PreTrainedTokenizerBase:
    """A copy with the template in use, whose eos is the turn end and whose pad is not.

    ``has_scalar``: for a reward model, which the library reads at the last token that is not the pad; so the pad ends
    no answer, or there is none.
    """
    parts = [value for value in vars(tokenizer).values() if isinstance(value, list | dict)]
    served = copy.deepcopy(tokenizer, {id(part): part for part in parts if len(part) > _MANY})
    if template is not None:
        served.chat_template = template
    if stop_ids:
        served.eos_token = _token(served, stop_ids[0])
    served.pad_token = (
        _unread_pad(served, {*stop_ids, tokenizer.eos_token_id})
        if has_scalar
        else _pad_token(served)
    )
    return served


def _token(tokenizer: PreTrainedTokenizerBase, number: int) -> str:
    token = tokenizer.convert_ids_to_tokens(number)
    assert isinstance(token, str), f"id {number} is no token"
    return token


def _pad_token(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The tokenizer's own pad; if that is the turn end or missing, another; the turn end if there
    is none.
    """
    if tokenizer.pad_token is not None and tokenizer.pad_token_id != tokenizer.eos_token_id:
        return str(tokenizer.pad_token)
    vocabulary = tokenizer.get_vocab()
    for token in (*_PADS, tokenizer.unk_token):
        if token in vocabulary and token != tokenizer.eos_token:
            return str(token)
    return None if tokenizer.eos_token is None else str(tokenizer.eos_token)


def _unread_pad(tokenizer: PreTrainedTokenizerBase, ends: Collection[int | None]) -> str | None:
    """A pad that nothing ends with: the tokenizer's own, a well-known one, or a special token made for padding."""
    vocabulary = tokenizer.get_vocab()
    named = [str(token) for token in tokenizer.all_special_tokens if "pad" in str(token)]
    own = [] if tokenizer.pad_token is None else [str(tokenizer.pad_token)]
    candidates = (*own, *_PADS, *named, tokenizer.unk_token)
    return next((t for t in candidates if t in vocabulary and vocabulary[t] not in ends), None)


def _set_dtype(config: PreTrainedConfig, dtype: torch.dtype) -> None:
    """In the configurations of a model's parts too, where the library leaves what was loaded."""
    for settings in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if isinstance(settings, PreTrainedConfig):
            settings.dtype = dtype


def _set_stops(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]
) -> None:
    """Stop set, pad and cache in config and generation_config."""
    config: Any = model.config
    for settings in {id(c): c for c in (config, config.get_text_config())}.values():
        settings.eos_token_id = stop_ids[0] if stop_ids else None
        settings.pad_token_id = tokenizer.pad_token_id
        if hasattr(settings, "use_cache"):
            settings.use_cache = True
    if not hasattr(model, "generation_config"):
        return  # a reward model does not generate
    model.generation_config = generation_to_save(model.generation_config, tokenizer, stop_ids)


def generation_to_save(
    generation: GenerationConfig | None,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: Sequence[int],
) -> GenerationConfig:
    """``generation`` itself, changed: the stop set and the pad in it, and no sampling settings that have no effect."""
    if generation is None:
        empty: Any = GenerationConfig  # has no types
        generation = empty()
    assert isinstance(generation, GenerationConfig)
    generation._from_model_config = False  # else the library derives it anew, with one stop
    generation.eos_token_id = list(stop_ids) or None
    generation.pad_token_id = tokenizer.pad_token_id
    if not generation.do_sample:
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "typical_p",
            "epsilon_cutoff",
            "eta_cutoff",
        ):
            setattr(generation, name, None)
    return generation


def _require_same_ids(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Users read the tokenizer with the class that config.json implies; it must give the ids
    trained on.
    """
    if "auto_map" in tokenizer.init_kwargs:
        return  # its code is not run without the user's leave
    reread = AutoTokenizer.from_pretrained(directory)
    probe = _PROBE + "".join(map(str, tokenizer.all_special_tokens))
    wanted = tokenizer.encode(probe, add_special_tokens=False)
    found = reread.encode(probe, add_special_tokens=False)
    if wanted != found:
        raise OutputError(
            f"the tokenizer saved to {directory.name} reads back as {type(reread).__name__} and "
            "gives other ids "
            f"({found[:5]}... for {wanted[:5]}...); load the base model's tokenizer with "
            "AutoTokenizer and save it again"
        )


def make_readable(directory: Path) -> None:
    """Give weights the permissions of the files beside them: safetensors lets only their owner read them, and a
    server may run as another.
    """
    plain = next(directory.glob("*config.json"))
    for weights in directory.glob("*.safetensors"):
        shutil.copymode(plain, weights)
