"""Load a model, its configuration or its tokenizer from a directory or a hub name, or say in one line why not.

A model returned by ``load_model`` has parameters in float32 (float64 for float64; the compute dtype for inference), the
requested attention in the config of every submodule, no cache, no router auxiliary loss, no dropout, eager experts in
float64, and a head whose logits equal the model's own. The library can ignore each of these silently, so each is set
or verified here. A model with a vision tower is loaded as the library's image-text-to-text model; its tower keeps the
library's own attention, since pictures are not packed and one never attends to another.

A directory is examined before the library reads it: the library waits forever at a FIFO in place of a file, and
allocates as many layers or labels as config.json names. Such files are refused before anything is allocated.

This module does not choose the attention, add adapters, move weights between ranks, or initialize weights that the
checkpoint lacks. ``models/reward_model.py`` loads models with a scalar head through ``read_model``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate
from logging import ERROR
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import Transpose
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging

from taut.config import user_path
from taut.errors import ModelError, TautError
from taut.io import capabilities, extras, files, hub, progress
from taut.io.allocator import return_freed_memory
from taut.io.replaced import replaced
from taut.models import architecture
from taut.models.cpu import faster_layers
from taut.models.experts import narrow_experts, widen_routers
from taut.models.heads import check_head
from taut.models.layerwise import StreamedLayers
from taut.models.quantized import quantized_layers
from taut.models.quantized.frozen_storage import Storage, reading, store
from taut.vision import tower

TOWER_ATTENTION = "sdpa"
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "tokenizer_config.json",
    "tekken.json",
)
ShardLayers = Callable[[PreTrainedModel], AbstractContextManager[None]]
"""Divides a model's decoder layers among ranks."""
_NUMBER = re.compile(r"\.\d+(?=\.)")
_NOISE_KEY = re.compile(r"^(?!classifier).*(dropout|pdrop|layerdrop|jitter_noise)")


# -- models ----------------------------------------------------------------------------------------


def load_model(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    trust_remote_code: bool = False,
    is_narrow: bool = False,
    storage: Storage | None = None,
    shard: ShardLayers | None = None,
    streamed: StreamedLayers | None = None,
) -> PreTrainedModel:
    """The causal language model at ``path`` for computing in ``dtype``, in train mode, on ``device``.

    ``attention``: the name under which it is registered with the library's attention interface. ``is_narrow``: store
    the parameters themselves in ``dtype``, as inference does. ``storage``: how to store weights that do not train
    (``frozen_storage.store`` completes it). ``shard``: divides the decoder layers among ranks before any weight is
    read. ``streamed``: reads each decoder layer when it runs. Raises ModelError where the checkpoint is incomplete or a
    requested setting did not take effect.
    """
    num_bytes = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    progress.show(f"loading {path}" + (f", {num_bytes / 1e9:.1f} GB" if num_bytes else ""))
    config = load_config(path, trust_remote_code)
    require_language_model(path, config)
    model, _ = read_model(
        _auto_class(config),
        path,
        config,
        "a causal language model",
        dtype=dtype,
        device=device,
        attention=attention,
        trust_remote_code=trust_remote_code,
        is_narrow=is_narrow,
        storage=storage,
        shard=shard,
        streamed=streamed,
    )
    check_head(model)
    ready: PreTrainedModel = model.to(device).train()  # type: ignore[arg-type]  # a device
    return ready


def load_skeleton(
    path: str, config: PreTrainedConfig, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model's modules on the meta device: the architecture without weights."""
    require_language_model(path, config)
    build: Any = _auto_class(config).from_config
    with explain_load_errors(path, "a causal language model"), torch.device("meta"):
        skeleton: PreTrainedModel = build(config, trust_remote_code=trust_remote_code)
    faster_layers.install(skeleton)
    return skeleton


def read_model(
    auto_class: Any,
    path: str,
    config: PreTrainedConfig,
    wanted: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    trust_remote_code: bool,
    is_narrow: bool,
    storage: Storage | None,
    shard: ShardLayers | None,
    streamed: StreamedLayers | None,
    new_module: str = "",
) -> tuple[PreTrainedModel, bool]:
    """A complete model of one of the library's automatic classes on the CPU (a quantized one on ``device``), with every
    setting of the module docstring in effect; and whether the checkpoint lacks ``new_module``, the one module that may
    be missing.
    """
    is_float64 = dtype == torch.float64
    # quantization: asked for by the run, or that of the checkpoint
    quantizing: dict[str, Any] = {}
    how = None
    if storage is not None and storage.quantize is not None:
        how = storage.quantize
        quantizing = {
            "quantization_config": quantized_layers.settings_of(how, dtype, storage.whole)
        }
    comes_quantized = quantized_layers.format_of(config) is not None
    if comes_quantized:
        capabilities.require("a base that comes quantized", f"model={path}")
    if comes_quantized and storage is None and not is_narrow:
        raise ModelError(
            f"model={path} comes quantized; expected weights in full precision here, which only the base under "
            "adapters may lack; name the model it was made from"
        )
    is_quantized = bool(quantizing) or (comes_quantized and storage is not None)
    if comes_quantized and storage is None:
        quantized_layers.ask_for_numbers(config, f"model={path}")
    if is_quantized:
        extras.require("quant", f"model={path}" if comes_quantized else f"quantize={how}")
        quantized_layers.quiet_import()
        quantizing["device_map"] = {"": device}
    # read the weights by the library
    is_strict = refuses_grouped_experts(device)
    needs_eager = (is_float64 or is_strict) and architecture.num_experts(config.get_text_config())
    with (
        explain_load_errors(path, wanted),
        return_freed_memory(),
        torch.random.fork_rng(devices=[]),
        reading(storage),
        quantized_layers.reading_rows() if is_quantized else nullcontext(),
        _sharded_before_reading(shard),
        nullcontext() if streamed is None else streamed.reading_the_rest(),
    ):
        name, revision = hub.pinned(path)
        model, report = auto_class.from_pretrained(
            name,
            config=config,
            dtype=dtype if is_narrow or is_float64 else torch.float32,
            attn_implementation=_attention_setting(config, attention),
            trust_remote_code=trust_remote_code,
            weights_only=True,
            output_loading_info=True,
            **revision,
            **({"experts_implementation": "eager"} if needs_eager else {}),
            **quantizing,
        )
    if shard is not None:
        _copy_shards(model)
    # the checkpoint has every weight, but for a new module
    missing = {str(name) for name in report["missing_keys"]}
    is_new = f"{new_module}.weight" in missing
    if is_new:
        report["missing_keys"] = missing - {f"{new_module}.weight", f"{new_module}.bias"}
    _require_complete(path, model, report)
    if is_float64:
        model.double()  # buffers too: from_pretrained leaves RoPE's frequencies in float32
    # settings that training needs, and those that the library must have kept
    for module in model.modules():
        settings = getattr(module, "config", None)
        for name in ("use_cache", "output_router_logits"):
            if getattr(settings, name, False):
                setattr(settings, name, False)
    require_attention(model, attention)
    # no noise inside the model
    parts = {"config": architecture.text_config(model)}
    if architecture.takes_pictures(model.config):
        parts["config.vision_config"] = model.config.vision_config
    rates = [
        (f"{part}.{name}", value)
        for part, settings in parts.items()
        for name, value in settings.to_dict().items()
        if _NOISE_KEY.search(name)
    ]
    rates += [(name, m.p) for name, m in model.named_modules() if isinstance(m, nn.Dropout)]
    for name, value in rates:
        if isinstance(value, float) and value > 0:
            raise ModelError(
                f"{name} is {value}; expected 0: taut has no noise inside a model, since it would "
                "depend on how samples are packed; set it to 0 in the model's config.json"
            )
    # layers as taut computes and stores them
    faster_layers.install(model)
    if dtype == torch.bfloat16 and not is_narrow:
        widen_routers(model)
        narrow_experts(model)
    if storage is not None:
        if is_quantized:
            quantized_layers.require_inside(model)
        store(model, storage, widens_rows=shard is None or dtype != torch.bfloat16)
    if streamed is not None:
        streamed.attach(model, device)
    return model, is_new


def refuses_grouped_experts(device: torch.device) -> bool:
    """Whether the library's grouped product of experts is refused: it counts tokens by ``torch.histc``, which has no
    deterministic algorithm on CUDA.
    """
    return device.type == "cuda" and torch.are_deterministic_algorithms_enabled()


@contextmanager
def _sharded_before_reading(shard: ShardLayers | None) -> Iterator[None]:
    """Shard the decoder layers of a model that the library loads in this block, between their making on the meta device
    and the reading of weights: of a sharded tensor the library reads this rank's slice of the file.
    """
    if shard is None:
        yield
        return
    library: Any = PreTrainedModel
    converter: Any = Transpose
    # tests/unit/models/test_load.py holds that the library still calls it
    read, transpose = library._load_pretrained_model, converter.convert

    def read_slices(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        with shard(model):
            return read(model, *args, **kwargs)

    def transpose_part(self: Transpose, *args: Any, model: PreTrainedModel, **kwargs: Any) -> Any:
        return transpose(self, *args, model=_Parts(model), **kwargs)

    own_read = replaced(library, _load_pretrained_model=staticmethod(read_slices))
    with own_read, replaced(converter, convert=transpose_part):
        yield


class _Parts:
    """A sharded model, of whose parameters this rank's part is seen: the library transposes what has another shape than
    the parameter it is for, which a part always has.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def get_parameter(self, name: str) -> Tensor:
        parameter = self.model.get_parameter(name)
        part: Tensor = getattr(parameter, "_local_tensor", parameter)
        return part


@torch.no_grad()
def _copy_shards(model: nn.Module) -> None:
    """Give each shard memory of its own where it is a view of the whole tensor in the mapped file: what has the file's
    dtype is no copy yet.
    """
    for module in model.modules():
        for name, parameter in module._parameters.items():
            part: Any = None if parameter is None else getattr(parameter, "_local_tensor", None)
            if part is not None and part.untyped_storage().nbytes() > part.nbytes:
                assert parameter is not None
                module._parameters[name] = nn.Parameter(parameter.clone(), parameter.requires_grad)


def set_attention(model: PreTrainedModel, attention: str) -> None:
    """Switch the language model to another attention."""
    setting: Any = _attention_setting(model.config, attention)
    model.set_attn_implementation(setting)


def _attention_setting(config: PreTrainedConfig, attention: str) -> str | dict[str, str]:
    """The library's setting that gives the language model ``attention``, and a vision tower the library's own."""
    if not architecture.takes_pictures(config):
        return attention
    return {"text_config": attention, "vision_config": TOWER_ATTENTION}


def require_attention(model: PreTrainedModel, attention: str) -> None:
    """Raise ModelError unless the config of each of the language model's submodules has ``attention``."""
    for name, module in architecture.language_model(model).named_modules():
        config = getattr(module, "config", None)
        actual = getattr(config, "_attn_implementation", None)
        is_vision = any(part in name for part in ("visual", "vision", "image", "audio"))
        if isinstance(config, PreTrainedConfig) and actual != attention and not is_vision:
            raise ModelError(
                f"{name or type(module).__name__} uses the attention {actual}; expected {attention}: the model does "
                "not use the library's attention interface"
            )


def _require_complete(path: str, model: PreTrainedModel, report: dict[str, Any]) -> None:
    """Refuse a checkpoint that would leave weights at random, or whose config.json drops a part of it."""
    problems = []
    for kind, problem in (
        ("missing_keys", "lacks"),
        ("mismatched_keys", "has the wrong shape for"),
    ):
        names = sorted(
            str(name[0] if isinstance(name, tuple) else name) for name in report.get(kind, ())
        )
        if names:
            problems.append(
                f"{problem} {len(names)} weight(s), {names[0]} the first; expected a complete checkpoint; copy the "
                "files again"
            )
    # Dropped: a further layer or expert like those of the model, or a further tensor of a module of the model. A value
    # head and layers for multi-token prediction are not among them.
    known = model.state_dict().keys()
    numbered = {_NUMBER.sub(".N", name) for name in known}
    modules = {name.rpartition(".")[0] for name in known}
    text: Any = model.config.get_text_config()
    num_layers = getattr(text, "num_hidden_layers", 0)
    further = range(num_layers, num_layers + (getattr(text, "num_nextn_predict_layers", 0) or 0))
    names = sorted(
        name
        for name in report.get("unexpected_keys", ())
        if (_NUMBER.sub(".N", name) in numbered or name.rpartition(".")[0] in modules)
        and not any(f".layers.{number}." in name for number in further)
    )
    if names:
        problems.append(
            f"has {len(names)} weight(s) that its config.json leaves out, {names[0]} the first; expected the "
            "config.json that they were saved with; copy it again"
        )
    if report.get("error_msgs"):
        problems.append(f"cannot be loaded: {report['error_msgs'][0]}")
    if problems:
        raise ModelError(f"model={path} {problems[0]}")


_SHARE = re.compile(r"(\d+(?:\.\d+)?)%")


def freeze(model: nn.Module, patterns: list[str]) -> list[str]:
    """Stop training every parameter that ``patterns`` freeze; returns the names."""
    parameters = dict(model.named_parameters())
    frozen = frozen_names(model, patterns)
    for name in frozen:
        parameters[name].requires_grad_(False)
    if frozen and not any(parameter.requires_grad for parameter in parameters.values()):
        raise ModelError(f"freeze={patterns} leaves no parameter to train; name fewer")
    return frozen


def frozen_names(model: nn.Module, patterns: list[str]) -> list[str]:
    """The parameters that ``patterns`` freeze, one after the other; ``!PATTERN`` lets those train that it matches.

    A pattern is a part of a vision-language model (``architecture.PARTS``), a glob over the whole name (``*.mlp.*``,
    ``model.embed_tokens.weight``), a regular expression between slashes that is searched in it
    (``/layers\\.[0-3]\\./``), a slice of the decoder layers (``layers[:-2]``), or a share: ``90%`` are the first
    parameters, in the model's order, that have no more than that of all numbers. One that changes nothing is an error.
    """
    frozen: dict[str, None] = {}
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        # the parameters that it names
        wanted = pattern.removeprefix("!")
        if share := _SHARE.fullmatch(wanted):
            sizes = [parameter.numel() for parameter in parameters.values()]
            limit = int(sum(sizes) * (float(share[1]) / 100))
            count = sum(size <= limit for size in accumulate(sizes))
            matches = list(parameters)[:count]
        else:
            matches = architecture.match_pattern(model, wanted, list(parameters), "freeze")
        if wanted != pattern:
            matches = [name for name in matches if name in frozen]
        if not matches:
            what = "parameter" if wanted == pattern else "parameter that is frozen before it"
            raise ModelError(
                f"freeze pattern {pattern!r} matches no {what}; "
                f"{architecture.suggest(wanted, list(parameters))}"
            )
        # frozen, or let train again
        if wanted == pattern:
            frozen |= dict.fromkeys(matches)
        else:
            for name in matches:
                del frozen[name]
    return list(frozen)


@contextmanager
def quiet_library() -> Iterator[None]:
    """Silence the library's warnings and progress bars."""
    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    if level == ERROR and not has_bars:  # a block around this one silenced it
        yield
        return
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
def explain_load_errors(path: str, wanted: str) -> Iterator[None]:
    """Turn what the library raises for a bad directory into a ModelError of one line."""
    try:
        with quiet_library():
            yield
    except TautError:
        raise
    except Exception as error:  # a reader for each format, each with errors of its own
        if not Path(path).exists() and (reason := hub.explain(path, error)):
            raise ModelError(f"model={path}: {reason}") from error
        reason = " ".join(str(error).split())[:300]
        if isinstance(error, SafetensorError):
            reason += "; a file of its weights is cut or damaged; copy or fetch it again"
        raise ModelError(f"model={path} cannot be loaded as {wanted}: {reason}") from error


# -- configuration and tokenizer -------------------------------------------------------------------


def load_config(
    path: str, trust_remote_code: bool = False, *, needs_weights: bool = True
) -> PreTrainedConfig:
    """The model's configuration, before any weight is read. ``needs_weights``: require that weights are there."""
    user_path(path, "model")
    if Path(path).exists():
        _require_model_directory(path, needs_weights=needs_weights)
    elif hub.NAME.fullmatch(path) and path[0] != ".":
        hub.settle()
    else:
        raise ModelError(
            f"model={path} does not exist; expected a model directory, or a hub name like org/name or org/name@revision"
        )
    with explain_load_errors(path, "a configuration"):
        name, revision = hub.pinned(path)
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **revision)
    assert isinstance(config, PreTrainedConfig)
    config._commit_hash = revision.get("revision")  # the library knows the name, and writes none
    return config


def stop_ids_in_files(path: str, config: PreTrainedConfig) -> dict[int, str]:
    """Stop ids that the files at ``path`` name -> the file that names each. Reads no weights."""
    settings: list[tuple[Any, str]] = []
    directory = Path(path)
    if not directory.is_dir() or (directory / "generation_config.json").is_file():
        with explain_load_errors(path, "a generation_config"):
            name, revision = hub.pinned(path)
            try:
                generation = GenerationConfig.from_pretrained(name, **revision)
                settings.append((generation, "generation_config.json"))
            except OSError:  # a hub model may have none
                if directory.is_dir():
                    raise
    settings += [(config, "config.json"), (config.get_text_config(), "config.json")]
    ends: dict[int, str] = {}
    for source, file in settings:
        ids = getattr(source, "eos_token_id", None)
        for index in [ids] if isinstance(ids, int) else ids or []:
            ends.setdefault(index, file)
    return ends


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer at ``path``, of the class that users of the model will get."""
    if Path(path).is_dir():
        if not has_tokenizer(path):
            raise ModelError(
                f"{path} has no tokenizer; expected tokenizer.json next to config.json; copy it from "
                "the base model"
            )
        candidates = (Path(path) / name for name in TOKENIZER_FILES)
        require_file_itself(next(filter(Path.is_file, candidates)))
    else:
        hub.settle()
    with explain_load_errors(path, "a tokenizer"):
        name, revision = hub.pinned(path)
        tokenizer = AutoTokenizer.from_pretrained(
            name, trust_remote_code=trust_remote_code, **revision
        )
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def has_tokenizer(path: str) -> bool:
    """Whether a directory holds a tokenizer."""
    return any((Path(path) / name).is_file() for name in TOKENIZER_FILES)


def checkpoint_dtype(config: PreTrainedConfig) -> torch.dtype:
    """The dtype that the checkpoint's weights were saved in; a tuned model is saved in it too.

    Read it from ``load_config``, before loading: a loaded model's config names the dtype it was loaded in. The configs
    of a vision-language model's parts may name another dtype, that of the models they were made from.
    """
    dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if isinstance(dtype, torch.dtype) and not dtype.is_floating_point:
        raise ModelError(
            f"config.json says that the weights are {str(dtype).removeprefix('torch.')}; expected a floating-point "
            "dtype, such as bfloat16; copy config.json from the base model"
        )
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def context_length(config: PreTrainedConfig) -> int | None:
    """The longest sequence that the model supports; None where its config does not say."""
    lengths = (getattr(config.get_text_config(), name, None) for name in CONTEXT_KEYS)
    return next((n for n in lengths if isinstance(n, int) and n > 0), None)


def is_reward_config(config: PreTrainedConfig) -> bool:
    """Whether the checkpoint declares a scalar head."""
    (name,) = (getattr(config, "architectures", None) or [""])[:1]
    return str(name).endswith(("ForSequenceClassification", "ForTokenClassification"))


def require_language_model(path: str, config: PreTrainedConfig, key: str = "model") -> None:
    """Refuse unknown families, and reward models: the output head would be random, or the embedding."""
    if is_reward_config(config):
        raise ModelError(
            f"{key}={path} is a reward model ({(config.architectures or [''])[0]}); expected a causal language model; "
            "score with it (taut score), or name the model it was trained from"
        )
    require_family(path, config)


def require_family(path: str, config: PreTrainedConfig) -> None:
    """Refuse a vision-language model of a family that taut does not support."""
    if architecture.takes_pictures(config) and config.model_type not in tower.FAMILIES:
        raise ModelError(f"model={path}: {tower.unknown(config.model_type)}")


def _auto_class(config: PreTrainedConfig) -> Any:
    """The library's automatic class for a model with an output head."""
    return (
        AutoModelForImageTextToText if architecture.takes_pictures(config) else AutoModelForCausalLM
    )


# -- the directory, before the library reads it ----------------------------------------------------

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
"""Files by which the library finds the shards of weights. Others with such names belong to other programs."""
MAX_LAYERS = 2_000
"""More than twice as many as the deepest published model has."""
MAX_COUNT = 2**24
"""Limit on everything else that is counted: labels, experts, heads, positions of a learned table."""
MAX_ID = 2**31 - 1
"""Largest token id, and longest context."""
FREE_SIZE = 2**20
"""A size that is accepted whatever the weights are."""
LAYERS = re.compile(r"(num|n)_(\w+_)?layers?|(encoder|decoder)_layers|depth")
COUNTS = re.compile(r"(num|n)_\w+")
SIZES = re.compile(
    r"((\w+_)?(hidden|intermediate|vocab)_size|head_dim|n_embd|n_inner|(num|n)_(\w+_)?heads?)"
)
"""Sizes of weights."""
TOKEN_IDS = re.compile(r"(\w+_)?token_(id|ids|index)")
TABLES = re.compile(
    r"(text|vision|audio|decoder|encoder|quantization)_config|rope_(scaling|parameters)"
)
"""Keys whose values are tables."""


def require_file_itself(path: Path) -> None:
    """Refuse git-lfs's placeholder of a file."""
    if hub.is_pointer(path):
        raise ModelError(
            f"{path} is a git-lfs pointer of {path.stat().st_size} bytes; expected the file that it stands for; "
            f"fetch it: git -C {path.parent} lfs pull, or hf download"
        )


def _require_model_directory(path: str, *, needs_weights: bool) -> None:
    """Raise ModelError unless ``path`` is a directory with a model whose files the library can read in bounded time and
    memory, as they are meant.
    """
    directory = Path(path)
    problem = ""
    if not directory.is_dir():
        problem = "is a file; expected a model directory; name the folder that holds config.json"
    elif (directory / "config.json").is_file():
        pass
    elif (directory / "adapter_config.json").is_file():
        problem = (
            f"is an adapter; expected a model; make one of it (taut merge BASE {path} out=DIR), or set model to its "
            f"base and adapter={path} (lora.adapter to train it)"
        )
    else:
        near = f"; did you mean {directory / 'model'}?" if (directory / "model").is_dir() else ""
        problem = f"has no config.json; expected a model directory in Hugging Face format{near}"
    if problem:
        raise ModelError(f"model={path} {problem}")
    # nothing to wait for: no pipes, no devices
    for file in sorted(directory.iterdir()):
        if file.is_dir() or not file.exists():  # a dangling link counts as no file
            continue
        try:
            files.open_regular(file).close()
        except PermissionError:
            continue  # the model may not need it; the library reports one that it reads
        except OSError as error:
            raise _unreadable(file, error) from error
    # indexes name files of the directory alone
    place = directory / "config.json"
    settings = {place: _read_table(place)}
    for index in filter(Path.is_file, (directory / name for name in INDEXES)):
        shards = _read_table(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(v, str) for v in shards.values()):
            raise _refusal(index, "weight_map is no table of file names")
        if odd := next((name for name in shards.values() if Path(name).name != name), None):
            raise _refusal(index, f"it names the weights {odd[:100]!r}; expected files next to it")
    # sizes that the weights could have
    max_size = None
    if needs_weights:
        weights = [file for kind in ("*.safetensors", "*.bin") for file in directory.glob(kind)]
        num_bytes = sum(file.stat().st_size for file in weights if file.is_file())
        max_size = max(FREE_SIZE, 2 * num_bytes)  # a number takes at least 4 bits
    if (generation := directory / "generation_config.json").is_file():
        settings[generation] = _read_table(generation)
    for file, table in settings.items():
        entries: list[tuple[str, Any]] = list(table.items())
        while entries:  # of the tables and lists in it, too
            key, value = entries.pop()
            if isinstance(value, dict):
                entries.extend((str(name), item) for name, item in value.items())
            elif isinstance(value, list):
                entries.extend((key, item) for item in value)
            if expected := _expected_value(key, value, max_size):
                is_short = isinstance(value, int | float | str)  # tables can be nested too deeply
                shown = str(value)[:40] if is_short else f"a {type(value).__name__}"
                raise _refusal(file, f"found {key}={shown}; expected {expected}")
    if not needs_weights:
        return
    # weights that are the files themselves, and no pointers of git-lfs
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        name = f"{stem}.{suffix}"
        if (directory / name).is_file() or (directory / f"{name}.index.json").is_file():
            for file in sorted(directory.glob(f"{stem}*.{suffix}")):
                require_file_itself(file)
            return
    raise ModelError(
        f"model={path} has no weights; expected model.safetensors; copy them from the base model"
    )


def _read_table(path: Path) -> dict[str, Any]:
    """The JSON object in a file of the model."""
    try:
        table = files.read_json(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON ({error}); copy it from the base model") from error
    if not isinstance(table, dict):
        raise _refusal(path, f"found a {type(table).__name__}; expected a JSON object")
    return table


def _expected_value(key: str, value: Any, max_size: int | None) -> str:
    """Describe the expected value of a setting; empty where ``value`` is valid."""
    if isinstance(value, float) and math.isnan(value):
        return "a number"
    if key == "architectures" and not isinstance(value, list | str | None):
        return "a list of names"
    if TABLES.fullmatch(key) and not isinstance(value, dict | None):
        return "a table"
    if TOKEN_IDS.fullmatch(key) and not isinstance(value, list | None):
        is_id = type(value) is int and abs(value) <= MAX_ID
        return "" if is_id else f"a token id, at most {MAX_ID:,}"
    if not isinstance(value, int) or isinstance(value, bool):
        return ""
    if key in CONTEXT_KEYS and not 0 < value <= MAX_ID:
        return f"a length from 1 to {MAX_ID:,}"
    if LAYERS.fullmatch(key) and not 0 <= value <= MAX_LAYERS:
        return f"at most {MAX_LAYERS:,} layers"
    if SIZES.fullmatch(key) and (value < 0 or (max_size is not None and value > max_size)):
        return f"a size of weights that have at most {max_size:,} numbers" if max_size else "a size"
    if COUNTS.fullmatch(key) and value > MAX_COUNT:
        return f"at most {MAX_COUNT:,}"
    return ""


def _unreadable(path: Path, error: OSError) -> ModelError:
    return ModelError(f"{path} cannot be read: {error.strerror or error}; copy the model again")


def _refusal(path: Path, reason: str) -> ModelError:
    return ModelError(f"{path}: {reason}; copy it from the base model")
