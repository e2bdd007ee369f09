"""A model directory before the library reads it: its files are files, and config.json asks for nothing absurd.

The library trusts both: it waits for ever at a FIFO in the place of a file, and builds a list of as many layers, or a
table of as many labels, as config.json names. What is refused here is refused before anything is allocated.

May import errors and durable. ``load.py`` imports it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging

from taut.config import user_path
from taut.errors import ModelError
from taut.io import files as durable
from taut.io import hub
from taut.models import architecture
from taut.models.heads import prove_head
from taut.vision import tower

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
"""Files by which the library finds the shards of weights. Others of such names are other programs'."""
MOST_LAYERS = 2_000
"""More than twice as many as the deepest published model has."""
MOST = 2**24
"""Of anything else that is counted: labels, experts, heads, positions of a learned table."""
LARGEST = 2**31 - 1
"""Largest token id, and largest context."""
SMALL = 2**20
"""A size that costs nothing, whatever the weights are."""
LAYERS = re.compile(r"(num|n)_(\w+_)?layers?|(encoder|decoder)_layers|depth")
COUNTS = re.compile(r"(num|n)_\w+")
SIZES = re.compile(
    r"((\w+_)?(hidden|intermediate|vocab)_size|head_dim|n_embd|n_inner|(num|n)_(\w+_)?heads?)"
)
"""Sizes of weights."""
CONTEXTS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
TOKEN_IDS = re.compile(r"(\w+_)?token_(id|ids|index)")
PARTS = re.compile(r"(text|vision|audio|decoder|encoder)_config|rope_(scaling|parameters)")
"""Keys whose values are tables."""


def require_readable(directory: Path, *, needs_weights: bool) -> None:
    """Raise ModelError for what the library could not read in bounded time and memory, or would misread."""
    for file in sorted(directory.iterdir()):
        _require_file(file)
    place = directory / "config.json"
    config = _read_table(place)
    for index in filter(Path.is_file, (directory / name for name in INDEXES)):
        files = _read_table(index).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
            raise _refusal(index, "weight_map is no table of file names")
        if odd := next((name for name in files.values() if Path(name).name != name), None):
            raise _refusal(index, f"it names the weights {odd[:100]!r}; expected files next to it")
    largest = None
    if needs_weights:
        weights = [file for kind in ("*.safetensors", "*.bin") for file in directory.glob(kind)]
        num_bytes = sum(file.stat().st_size for file in weights if file.is_file())
        largest = max(SMALL, 2 * num_bytes)  # a number takes at least 4 bits
    settings = {place: config}
    if (generation := directory / "generation_config.json").is_file():
        settings[generation] = _read_table(generation)
    for file, table in settings.items():
        for key, value in _items(table):
            if reason := _objection(key, value, largest):
                raise _refusal(file, f"found {key}={_shown(value)}; expected {reason}")


def _require_file(path: Path) -> None:
    if path.is_dir() or not path.exists():  # a link to nothing is as good as no file
        return
    try:
        durable.open_regular(path).close()
    except PermissionError:
        return  # it may be no file of the model's; the library says so of one that it reads
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read: {error.strerror or error}; copy the model again"
        ) from error


def _read_table(path: Path) -> dict[str, Any]:
    try:
        found = durable.read_json(path)
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read: {error.strerror or error}; copy the model again"
        ) from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON ({error}); copy it from the base model") from error
    if not isinstance(found, dict):
        raise _refusal(path, f"found a {type(found).__name__}; expected a JSON object")
    return found


def _items(table: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every key of a table and of the tables and lists in it, with its value."""
    left: list[tuple[str, Any]] = list(table.items())
    while left:
        key, value = left.pop()
        yield key, value
        if isinstance(value, dict):
            left.extend((str(name), item) for name, item in value.items())
        elif isinstance(value, list):
            left.extend((key, item) for item in value)


def _objection(key: str, value: Any, largest: int | None) -> str:
    """What a value should be, where it is not that; empty if it is."""
    if isinstance(value, float) and math.isnan(value):
        return "a number"
    if key == "architectures" and not isinstance(value, list | str | None):
        return "a list of names"
    if PARTS.fullmatch(key) and not isinstance(value, dict | None):
        return "a table"
    if TOKEN_IDS.fullmatch(key) and not isinstance(value, list | None):
        is_id = type(value) is int and abs(value) <= LARGEST
        return "" if is_id else f"a token id, at most {LARGEST:,}"
    if not isinstance(value, int) or isinstance(value, bool):
        return ""
    if key in CONTEXTS and not 0 < value <= LARGEST:
        return f"a length from 1 to {LARGEST:,}"
    if LAYERS.fullmatch(key) and not 0 <= value <= MOST_LAYERS:
        return f"at most {MOST_LAYERS:,} layers"
    if SIZES.fullmatch(key) and (value < 0 or (largest is not None and value > largest)):
        return f"a size of weights that have at most {largest:,} numbers" if largest else "a size"
    if COUNTS.fullmatch(key) and value > MOST:
        return f"at most {MOST:,}"
    return ""


def _shown(value: Any) -> str:
    """A number or text, short; a table or list may be nested too deeply to be written."""
    return str(value)[:40] if isinstance(value, int | float | str) else f"a {type(value).__name__}"


def _refusal(path: Path, reason: str) -> ModelError:
    return ModelError(f"{path}: {reason}; copy it from the base model")


# --------------------------------------------------------------------------------------------------
# What must be in force in a loaded model, whatever its head: float64 throughout where that was asked for, the
# attention asked for in the config of every submodule, no cache, no router auxiliary loss, no dropout.
#
# A vision tower has the library's own attention: pictures are not packed into the run of tokens, and one never sees
# another. The library can pass over each of these without a word, so each is set or proved here. May import errors and
# models.anatomy.

TOWER_ATTENTION = "sdpa"
_NOISY = re.compile(r"^(?!classifier).*(dropout|pdrop|layerdrop|jitter_noise)")


class Loading(NamedTuple):
    """How a model is loaded; see ``load_model``."""

    dtype: torch.dtype
    attention: str
    trust_remote_code: bool = False
    is_narrow: bool = False


def put_in_force(model: PreTrainedModel, how: Loading) -> None:
    """What the library leaves to be done, and proofs of what it was asked for."""
    if how.dtype == torch.float64:
        model.double()  # buffers too: from_pretrained leaves RoPE's frequencies in float32
    _switch_off(model)
    require_attention(model, how.attention)
    _require_no_dropout(model)


def asked_for(config: PreTrainedConfig, attention: str) -> str | dict[str, str]:
    """What the library is told, so that the language model has ``attention`` and a vision tower its own."""
    if not architecture.takes_pictures(config):
        return attention
    return {"text_config": attention, "vision_config": TOWER_ATTENTION}


def set_attention(model: PreTrainedModel, attention: str) -> None:
    """Put another attention in force in the language model."""
    asked: Any = asked_for(model.config, attention)
    model.set_attn_implementation(asked)


def require_attention(model: PreTrainedModel, attention: str) -> None:
    """Raise ModelError unless every submodule's config of the language model has ``attention`` in force."""
    for name, module in architecture.language_model(model).named_modules():
        config = getattr(module, "config", None)
        found = getattr(config, "_attn_implementation", None)
        if isinstance(config, PreTrainedConfig) and found != attention and not _is_vision(name):
            raise ModelError(
                f"{name or type(module).__name__} has the attention {found} in force; expected "
                f"{attention}: the "
                "model does not use the library's attention interface"
            )


def _switch_off(model: PreTrainedModel) -> None:
    """No cache and no router auxiliary loss, in the config of every submodule."""
    configs = {
        id(module.config): module.config for module in model.modules() if hasattr(module, "config")
    }
    for config in configs.values():
        for name in ("use_cache", "output_router_logits"):
            if getattr(config, name, False):
                setattr(config, name, False)


def _require_no_dropout(model: PreTrainedModel) -> None:
    """Noise inside the model would depend on how samples are packed: none is let through."""
    parts = {"config": architecture.text_config(model)}
    if architecture.takes_pictures(model.config):
        parts["config.vision_config"] = model.config.vision_config
    found = [
        (f"{part}.{name}", value)
        for part, config in parts.items()
        for name, value in config.to_dict().items()
        if _NOISY.search(name)
    ]
    found += [(name, m.p) for name, m in model.named_modules() if isinstance(m, nn.Dropout)]
    for name, value in found:
        if isinstance(value, float) and value > 0:
            raise ModelError(
                f"{name} is {value}; expected 0: taut has no noise inside a model, since it would "
                "depend on how samples are packed; set it to 0 in the model's config.json"
            )


def _is_vision(name: str) -> bool:
    return any(part in name for part in ("visual", "vision", "image", "audio"))


# --------------------------------------------------------------------------------------------------
# A model directory or hub name -> the model and its tokenizer, ready for taut's forward, or one
# line why not.
#
# What is in force after ``load_model``: parameters in float32 (float64 for float64; the dtype
# computed in where nothing is trained), the attention asked for in the config of every submodule, no
# cache, no router auxiliary loss, no dropout, eager experts in float64, and a head whose logits equal
# the model's own. A model with a vision tower is the library's image-text-to-text model, of a family that
# vision/towers.py knows; others are refused. What it deliberately does not do: choose the attention,
# wrap adapters, move weights between ranks, or initialise a weight the checkpoint lacks.
#
# Models with a scalar head are loaded by ``models/reward.py``, with the parts that are public here.
#
# May import errors, vision.towers and models.{anatomy,directory,heads,in_force,parts}. Run, checks and the command
# line import it.

_LIBRARY_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    ImportError,
    RuntimeError,
    AttributeError,
    TypeError,
    ArithmeticError,
    AssertionError,
    EOFError,
    UnpicklingError,
    SafetensorError,
    StrictDataclassError,
)
"""What the library raises for a directory it cannot read."""
_NUMBER = re.compile(r"\.\d+(?=\.)")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "tokenizer_config.json",
    "tekken.json",
)


def load_config(
    path: str, trust_remote_code: bool = False, *, needs_weights: bool = True
) -> PreTrainedConfig:
    """The model's configuration, before any weight is read. ``needs_weights``: whether they have to be there."""
    _require_model_directory(path, needs_weights=needs_weights)
    with one_line(path, "a configuration"):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    assert isinstance(config, PreTrainedConfig)
    return config


def inherited_ends(path: str, config: PreTrainedConfig) -> dict[int, str]:
    """The ids at which the model at ``path`` is said to stop -> the file that says so. Reads no weight."""
    ends: dict[int, str] = {}
    directory = Path(path)
    if not directory.is_dir() or (directory / "generation_config.json").is_file():
        with one_line(path, "a generation_config"):
            generation = _generation_config(path)
        named = None if generation is None else generation.eos_token_id
        ends = dict.fromkeys(_as_list(named), "generation_config.json")
    for settings in (config, config.get_text_config()):
        for index in _as_list(getattr(settings, "eos_token_id", None)):
            ends.setdefault(index, "config.json")
    return ends


def _generation_config(path: str) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        if Path(path).is_dir():
            raise
        return None  # a hub model without one


def _as_list(ids: int | list[int] | None) -> list[int]:
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else list(ids)


def load_model(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    trust_remote_code: bool = False,
    is_narrow: bool = False,
) -> PreTrainedModel:
    """The causal language model at ``path`` for computing in ``dtype``, in train mode, on
    ``device``.

    ``attention`` is the name it is registered under with the library's attention interface. ``is_narrow``: the
    parameters themselves are in ``dtype``, as inference wants them. Raises
    ModelError where the checkpoint is incomplete or something asked for is not in force.
    """
    config = load_config(path, trust_remote_code)
    require_language_model(path, config)
    how = Loading(dtype, attention, trust_remote_code, is_narrow)
    with one_line(path, "a causal language model"):
        model, report = read_weights(_auto(config), path, config, how)
    require_complete(path, report, model)
    put_in_force(model, how)
    prove_head(model)
    ready: PreTrainedModel = model.to(device).train()  # type: ignore[arg-type]  # a device
    return ready


def read_weights(
    auto: Any, path: str, config: PreTrainedConfig, how: Loading
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model of one of the library's automatic classes, and its report of what was not found."""
    options: dict[str, Any] = {}
    if how.dtype == torch.float64 and _has_experts(config):
        options["experts_implementation"] = "eager"
    model, report = auto.from_pretrained(
        path,
        config=config,
        dtype=how.dtype if how.is_narrow or how.dtype == torch.float64 else torch.float32,
        attn_implementation=asked_for(config, how.attention),
        trust_remote_code=how.trust_remote_code,
        weights_only=True,
        output_loading_info=True,
        **options,
    )
    return model, report


def is_reward_config(config: PreTrainedConfig) -> bool:
    """Whether the checkpoint says that it has a scalar head."""
    (kind,) = (getattr(config, "architectures", None) or [""])[:1]
    return str(kind).endswith(("ForSequenceClassification", "ForTokenClassification"))


def require_language_model(path: str, config: PreTrainedConfig, key: str = "model") -> None:
    """Refuse a reward model: its output head would be made up, or be the embedding. And unknown families."""
    if is_reward_config(config):
        raise ModelError(
            f"{key}={path} is a reward model ({(config.architectures or [''])[0]}), which has a scalar head and no "
            "output head; expected a causal language model; score with it (taut score), or name the model it was "
            "trained from"
        )
    require_family(path, config)


def require_family(path: str, config: PreTrainedConfig) -> None:
    """Refuse a model with a vision tower whose ways with pictures are not known."""
    if architecture.takes_pictures(config) and config.model_type not in tower.FAMILIES:
        raise ModelError(f"model={path}: {tower.unknown(config.model_type)}")


def _auto(config: PreTrainedConfig) -> Any:
    """The library's automatic class for a model with an output head."""
    return (
        AutoModelForImageTextToText if architecture.takes_pictures(config) else AutoModelForCausalLM
    )


def load_skeleton(
    path: str, config: PreTrainedConfig, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model's modules on the meta device: its architecture, and no weight."""
    require_language_model(path, config)
    build: Any = _auto(config).from_config
    with one_line(path, "a causal language model"), torch.device("meta"):
        skeleton: PreTrainedModel = build(config, trust_remote_code=trust_remote_code)
    return skeleton


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer at ``path``, of the class that its users will get."""
    if Path(path).is_dir() and not has_tokenizer(path):
        raise ModelError(
            f"{path} has no tokenizer; expected tokenizer.json beside config.json; copy it from "
            "the base model"
        )
    if Path(path).is_dir():
        require_file_itself(next(filter(Path.is_file, (Path(path) / name for name in _TOKENIZERS))))
    with one_line(path, "a tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def has_tokenizer(path: str) -> bool:
    """Whether a directory holds a tokenizer."""
    return any((Path(path) / name).is_file() for name in _TOKENIZERS)


def require_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer's chat template; needed for data made of messages only."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        raise ModelError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template, and the data is made "
            "of messages; "
            "name a file with one (data.template=FILE)"
        )
    return str(template)


def checkpoint_dtype(config: PreTrainedConfig) -> torch.dtype:
    """The dtype the checkpoint's weights were saved in, which a tuned model is saved in too.

    Read it from ``load_config``, before loading: a loaded model's config names the dtype it was
    loaded in. What a vision-language model's says of its parts may be another: of those they were made from.
    """
    dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if isinstance(dtype, torch.dtype) and not dtype.is_floating_point:
        raise ModelError(
            f"config.json says that the weights are {str(dtype).removeprefix('torch.')}; expected a floating-point "
            "dtype, such as bfloat16; copy config.json from the base model"
        )
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def freeze(model: nn.Module, patterns: list[str]) -> list[str]:
    """Stop training every parameter whose name matches one of ``patterns``; returns the names.

    A pattern is a part of a vision-language model (``parts.WORDS``), a glob over the whole name (``*.mlp.*``,
    ``model.embed_tokens.weight``) or, between slashes, a regular expression searched in it
    (``/layers\\.[0-3]\\./``). One that matches nothing is an error.
    """
    frozen: dict[str, nn.Parameter] = {}
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        matches = architecture.matching(model, pattern, list(parameters), "freeze")
        if not matches:
            raise ModelError(
                f"freeze pattern {pattern!r} matches no parameter; "
                f"{architecture.suggest(pattern, list(parameters))}"
            )
        frozen |= {name: parameters[name] for name in matches}
    for parameter in frozen.values():
        parameter.requires_grad_(False)
    if frozen and not any(parameter.requires_grad for parameter in parameters.values()):
        raise ModelError(f"freeze={patterns} leaves no parameter to train; name fewer")
    return list(frozen)


def context_length(config: PreTrainedConfig) -> int | None:
    """The longest sequence the model was made for; None where its config does not say."""
    text = config.get_text_config()
    for name in (
        "max_position_embeddings",
        "n_positions",
        "max_sequence_length",
        "seq_length",
    ):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _require_model_directory(path: str, *, needs_weights: bool) -> None:
    """Say what is wrong with a path before the library guesses."""
    user_path(path, "model")
    directory = Path(path)
    if not directory.exists():
        if _HUB_NAME.fullmatch(path):
            hub.settle()
            return
        raise ModelError(
            f"model={path} does not exist; expected a model directory or a hub name like org/name"
        )
    if not directory.is_dir():
        raise ModelError(
            f"model={path} is a file; expected a model directory; name the folder that holds "
            "config.json"
        )
    if not (directory / "config.json").is_file():
        if (directory / "adapter_config.json").is_file():
            raise ModelError(
                f"model={path} is an adapter; expected a model; make one of it (taut merge BASE {path} out=DIR), or "
                f"set model to its base and adapter={path} (lora.adapter to train it)"
            )
        near = f"; did you mean {directory / 'model'}?" if (directory / "model").is_dir() else ""
        raise ModelError(
            f"model={path} has no config.json; expected a model directory in Hugging Face format{near}"
        )
    require_readable(directory, needs_weights=needs_weights)
    if not needs_weights:
        return
    weights = next((name for name in _WEIGHTS if _has_weights(directory, name)), None)
    if weights is None:
        raise ModelError(
            f"model={path} has no weights; expected model.safetensors; copy them from the base "
            "model"
        )
    stem, _, suffix = weights.rpartition(".")
    for file in sorted(directory.glob(f"{stem}*.{suffix}")):
        require_file_itself(file)


def _has_weights(directory: Path, name: str) -> bool:
    return (directory / name).is_file() or (directory / f"{name}.index.json").is_file()


def require_file_itself(path: Path) -> None:
    """Refuse git-lfs's placeholder of a file."""
    if hub.is_pointer(path):
        raise ModelError(
            f"{path} is a git-lfs pointer of {path.stat().st_size} bytes; expected the file that it stands for; "
            f"fetch it: git -C {path.parent} lfs pull, or hf download"
        )


@contextmanager
def quiet_library() -> Iterator[None]:
    """The library's warnings and progress bars stay quiet."""
    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    library: Any = logging  # its switches have no types
    library.set_verbosity_error()
    library.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            library.enable_progress_bar()


@contextmanager
def one_line(path: str, wanted: str) -> Iterator[None]:
    """Turn what the library raises for a bad directory into one line."""
    try:
        with quiet_library():
            yield
    except _LIBRARY_ERRORS as error:
        if not Path(path).exists() and (reason := hub.explain(path, error)):
            raise ModelError(f"model={path}: {reason}") from error
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"model={path} cannot be loaded as {wanted}: {reason}") from error


def require_complete(path: str, report: dict[str, Any], model: PreTrainedModel) -> None:
    """Refuse a checkpoint that would leave weights at random, or whose config.json drops a part of it."""
    for kind, said in (
        ("missing_keys", "lacks"),
        ("mismatched_keys", "has the wrong shape for"),
    ):
        names = sorted(
            str(name[0] if isinstance(name, tuple) else name) for name in report.get(kind, ())
        )
        if names:
            raise ModelError(
                f"model={path} {said} {len(names)} weight(s), {names[0]} the first; expected a "
                "complete checkpoint; "
                "copy the files again"
            )
    if names := _dropped(model, report.get("unexpected_keys", ())):
        raise ModelError(
            f"model={path} has {len(names)} weight(s) that its config.json leaves out, {names[0]} the first; expected "
            "the config.json that they were saved with (num_hidden_layers, attention_bias and the like); copy it again"
        )
    if report.get("error_msgs"):
        raise ModelError(f"model={path} cannot be loaded: {report['error_msgs'][0]}")


def _dropped(model: PreTrainedModel, unexpected: Iterable[str]) -> list[str]:
    """Those of a checkpoint's unused tensors that the model should use: of a further layer or expert like those it has,
    or a further tensor of a module it has. Not of a value head, or of layers that predict further tokens.
    """
    own = model.state_dict().keys()
    numbered = {_NUMBER.sub(".N", name) for name in own}
    modules = {name.rpartition(".")[0] for name in own}
    text: Any = model.config.get_text_config()
    num_layers = getattr(text, "num_hidden_layers", 0)
    further = range(num_layers, num_layers + (getattr(text, "num_nextn_predict_layers", 0) or 0))
    return sorted(
        name
        for name in unexpected
        if (_NUMBER.sub(".N", name) in numbered or name.rpartition(".")[0] in modules)
        and not any(f".layers.{number}." in name for number in further)
    )


def _has_experts(config: PreTrainedConfig) -> bool:
    text = config.get_text_config()
    return any(
        getattr(text, name, None)
        for name in ("num_experts", "num_local_experts", "n_routed_experts")
    )
