"""A trained model -> a model directory in Hugging Face format that stops where it should in any server.

The stop set goes into generation_config exactly as it was derived (``render/stop_tokens.py``); its first id, the end of
turn, becomes eos of tokenizer and config; the template in use is saved with the tokenizer. The pad token is never the
end of turn where another candidate exists: tools that mask pads by id would unteach it. A reward model's pad ends no
answer at all, since the library reads its score before the pads. Adapters are merged. The files that describe a model's
pictures are copied from the model that was loaded, less a chat template in them: the library would prefer it to
chat_template.jinja, where the template in use is saved.

The directory is written next to its final place and renamed, and the tokenizer is read back first. Weights are merged
and written a layer at a time (``lora.plain_groups``, ``weight_files``). Only the rank that writes calls this.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from taut.errors import OutputError
from taut.io import files
from taut.models import architecture, weight_files
from taut.models.load import quiet_library
from taut.models.lora.merge import Whole, plain_groups, plain_skeleton

FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_PADS = (
    "<pad>",
    "[PAD]",
    "<|pad|>",
    "<|padding|>",
    "<|endoftext|>",
    "<|finetune_right_pad_id|>",
    "<|end_of_text|>",
)
"""Pad tokens of well-known vocabularies, used where the tokenizer names no usable one."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Settings without effect where nothing is sampled."""
_MANY = 1000
"""A tokenizer's lists and dictionaries with more entries are its vocabulary or merges: a copy shares them."""
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
    whole: Whole | None = None,
) -> Iterator[Path]:
    """Write model, tokenizer and template, and yield the complete directory before it replaces ``directory``. Files
    that the block writes there belong to the model; where the block raises, nothing is replaced.

    ``stop_ids``: the whole stop set, the end of turn first. ``template``: the chat template in use, None for plain
    text. ``dtype``: of the saved weights (``load.checkpoint_dtype`` of the model this one started from).
    ``whole``: gives the weights of ``model``, where it holds shards.
    """
    directory = Path(directory)
    served = serving_tokenizer(
        tokenizer, stop_ids, template, has_scalar=not architecture.has_head(model)
    )
    with torch.no_grad(), quiet_library():
        # the library's model, without contents, with the settings that a server reads
        plain: Any = plain_skeleton(model)
        nn.Module.to(plain, dtype=dtype)
        # and those of parts, where the library leaves the old dtype
        configs: list[Any] = [plain.config]
        configs += [getattr(plain.config, name, None) for name in plain.config.sub_configs]
        for config in configs:
            if isinstance(config, PreTrainedConfig):
                config.dtype = dtype
        parts: Any = (plain.config, plain.config.get_text_config())
        for settings in {id(part): part for part in parts}.values():
            settings.eos_token_id = stop_ids[0] if stop_ids else None
            settings.pad_token_id = served.pad_token_id
            if hasattr(settings, "use_cache"):
                settings.use_cache = True
        if hasattr(plain, "generation_config"):  # a reward model does not generate
            plain.generation_config = generation_to_save(plain.generation_config, served, stop_ids)
        try:
            # write next to the directory, and replace it when the block has ended
            with files.replacing_directory(directory) as partial:
                weight_files.save(plain, plain_groups(model, whole), partial)
                served.save_pretrained(partial)
                copy_processor(model, partial, has_template=template is not None)
                _require_same_ids(served, partial)
                make_readable(partial)
                yield partial
        except (OSError, SafetensorError) as error:
            raise OutputError(
                f"{directory} cannot be written: {error}; expected room and permission for the model"
            ) from error


def serving_tokenizer(
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: Sequence[int],
    template: str | None,
    *,
    has_scalar: bool = False,
) -> PreTrainedTokenizerBase:
    """A copy with the template in use, whose eos is the end of turn and whose pad is not.

    ``has_scalar``: for a reward model, which the library reads at the last token that is not the pad: the pad ends no
    answer, or there is none.
    """
    parts = [value for value in vars(tokenizer).values() if isinstance(value, list | dict)]
    served = copy.deepcopy(tokenizer, {id(part): part for part in parts if len(part) > _MANY})
    if template is not None:
        served.chat_template = template
    if stop_ids:
        eos_token = served.convert_ids_to_tokens(stop_ids[0])
        assert isinstance(eos_token, str), f"id {stop_ids[0]} is no token"
        served.eos_token = eos_token
    ends = {*stop_ids, tokenizer.eos_token_id}
    served.pad_token = _pad_token(served, ends, has_scalar=has_scalar)
    return served


def _pad_token(
    served: PreTrainedTokenizerBase, ends: set[int | None], *, has_scalar: bool
) -> str | None:
    """The tokenizer's own pad; where that is the end of turn or missing, another; the end of turn if there is none.

    A reward model's pad is none of the ids in ``ends``, or missing: the tokenizer's own, a well-known one, or a special
    token made for padding.
    """
    vocabulary, fallback = served.get_vocab(), None
    known = [served.pad_token, *_PADS]
    if has_scalar:
        known += [token for token in served.all_special_tokens if "pad" in str(token)]
    else:
        ends, fallback = {served.eos_token_id}, served.eos_token
    known.append(served.unk_token)
    allowed = (token for token in known if vocabulary.get(token) not in {*ends, None})
    pad = next(allowed, fallback)
    return None if pad is None else str(pad)


def generation_to_save(
    generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]
) -> GenerationConfig:
    """``generation`` itself with the stop set and the pad, and without sampling settings that have no effect."""
    if generation is None:
        empty: Any = GenerationConfig  # has no types
        generation = empty()
    assert isinstance(generation, GenerationConfig)
    generation._from_model_config = False  # else the library derives it again, with one stop
    generation.eos_token_id = list(stop_ids) or None
    generation.pad_token_id = tokenizer.pad_token_id
    if not generation.do_sample:
        for name in _SAMPLING:
            setattr(generation, name, None)
    return generation


def _require_same_ids(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Require that the tokenizer, read with the class that config.json implies, gives the ids of training."""
    if "auto_map" in tokenizer.init_kwargs:
        return  # its code runs only where the user allows it
    reread = AutoTokenizer.from_pretrained(directory)
    probe = _PROBE + "".join(map(str, tokenizer.all_special_tokens))
    expected = tokenizer.encode(probe, add_special_tokens=False)
    actual = reread.encode(probe, add_special_tokens=False)
    if expected != actual:
        raise OutputError(
            f"the tokenizer saved to {directory.name} reads back as {type(reread).__name__} and gives other ids "
            f"({actual[:5]}... for {expected[:5]}...); load the base model's with AutoTokenizer and save it again"
        )


def make_readable(directory: Path) -> None:
    """Give weights the permissions of config.json: safetensors lets only their owner read them, and a server may run
    as another user.
    """
    plain = next(directory.glob("*config.json"))
    for weights in directory.glob("*.safetensors"):
        shutil.copymode(plain, weights)


def find_processor(model: nn.Module) -> dict[str, Path]:
    """The processor's files of the model that was loaded, by name; empty for a model without pictures. After the first
    call for a hub model, the library's cache answers.
    """
    inner = architecture.unwrap(model)
    if not architecture.takes_pictures(inner.config):
        return {}
    origin = str(inner.name_or_path)
    processor: dict[str, Path] = {}
    for name in FILES:
        file = cached_file(
            origin,
            name,
            revision=getattr(inner.config, "_commit_hash", None),
            _raise_exceptions_for_missing_entries=False,
        )
        if file is not None:
            processor[name] = Path(file)
    if not processor:
        raise OutputError(
            f"{origin} has no {FILES[0]} any more, which says how pictures are scaled and cut; expected it next to "
            "config.json; put it back"
        )
    return processor


def copy_processor(model: nn.Module, directory: Path, *, has_template: bool) -> None:
    """Write the processor's files of ``model`` into ``directory``. ``has_template``: whether the directory has a chat
    template of its own.
    """
    for name, file in find_processor(model).items():
        settings = files.read_json(file)
        if has_template and settings.pop("chat_template", None) is not None:
            text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
            (directory / name).write_text(text, encoding="utf-8")
        else:
            (directory / name).write_bytes(file.read_bytes())
