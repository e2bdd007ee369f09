"""A model and its tokenizer -> one GGUF file, proven by reading it back.

Architectures: llama, mistral, qwen2, qwen3, whose graphs in llama.cpp are the library's own. llama.cpp rotates pairs of
neighbours where the library rotates halves, so the rows of llama's query and key projections change places. Tied
embeddings are written once. Norms, biases and RoPE's factors are float32, matrices ``dtype``.

RoPE: default, linear, llama3 (as factors, rope_freqs.weight). What the format or llama.cpp's graph has no place for is
refused by name: other RoPE, sliding windows, another activation, biases the graph does not read.

The proof, before the file takes its name: every tensor is there once and none besides, equals the model's (f32 exactly;
bf16 and f16 exactly as torch rounds; q8_0 within ``quantisation_bound``), and every key has the value given.

May import errors, anatomy, load and ``gguf_vocabulary``. The command line's export imports it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch
from gguf import (
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    MODEL_TENSOR,
    TENSOR_NAMES,
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
    Keys,
    LlamaFileType,
    RopeScalingType,
    get_tensor_name_map,
)
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from taut.errors import CheckFailed, ModelError, OutputError
from taut.models import anatomy
from taut.models.gguf_vocabulary import REMEDY, Metadata, Value

Dtype: TypeAlias = Literal["f32", "f16", "bf16", "q8_0"]
Matrix: TypeAlias = NDArray[np.float32]

BLOCK: Final = 32
"""Numbers of a row that share a scale in q8_0."""
_TYPES: Final = {
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
_ROUNDED: Final = {
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_ARCHITECTURES: Final = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
}
"""The library's model_type -> llama.cpp's architecture."""
_BIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "mistral": (),
    "qwen2": ("q_proj", "k_proj", "v_proj"),
    "qwen3": (),
}
"""The biases that llama.cpp's graph of the architecture reads."""
_FREQUENCIES: Final = f"{TENSOR_NAMES[MODEL_TENSOR.ROPE_FREQS]}.weight"


@dataclass(frozen=True)
class Written:
    """What was written and proven."""

    path: Path
    num_tensors: int
    num_bytes: int
    largest_error: float
    """Of a weight as stored, in units of the largest of its tensor: 0 but for q8_0."""


def require_convertible(config: PreTrainedConfig) -> None:
    """Raise ModelError for what cannot be carried over; looks at the configuration only."""
    text: Any = config.get_text_config()
    kind = str(config.model_type)
    if anatomy.takes_pictures(config):
        raise ModelError(
            f"model_type is {kind}, a vision-language model, whose tower this file would not have; expected a language "
            f"model alone; {REMEDY}"
        )
    if kind not in _ARCHITECTURES:
        raise ModelError(
            f"model_type is {kind}; expected one of {', '.join(_ARCHITECTURES)}, the architectures whose conversion is "
            f"proven here; {REMEDY}"
        )
    layers = set(getattr(text, "layer_types", None) or ["full_attention"])
    window = getattr(text, "sliding_window", None)
    is_windowed = layers != {"full_attention"} or (kind == "mistral" and window is not None)
    if is_windowed and (window is None or window < text.max_position_embeddings):
        raise ModelError(
            f"attention has a sliding window of {window} tokens; expected none, since llama.cpp's graph of {kind} has "
            "none; set max_position_embeddings in config.json to the window: up to there they are the same"
        )
    if text.hidden_act != "silu":
        raise ModelError(
            f"hidden_act is {text.hidden_act}; expected silu, the one of llama.cpp's graph of {kind}"
        )
    rope = text.rope_parameters
    if rope["rope_type"] not in ("default", "linear", "llama3"):
        raise ModelError(
            f"RoPE is scaled by {rope['rope_type']}; expected default, linear or llama3, whose numbers are proven "
            f"here; {REMEDY}"
        )
    if float(rope.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError(f"RoPE turns a part of each head; expected all of it; {REMEDY}")


def architecture_metadata(config: PreTrainedConfig, dtype: Dtype, name: str) -> Metadata:
    """The general.* keys and those of the architecture."""
    text: Any = config.get_text_config()
    arch = MODEL_ARCH_NAMES[_ARCHITECTURES[config.model_type]]
    rope, head_dim = text.rope_parameters, _head_dim(text)
    metadata: Metadata = {
        Keys.General.TYPE: "model",
        Keys.General.NAME: name,
        Keys.General.FILE_TYPE: int(_TYPES[dtype][1]),
        Keys.General.QUANTIZATION_VERSION: 2,
    }
    of_architecture: Metadata = {
        Keys.LLM.VOCAB_SIZE: int(text.vocab_size),
        Keys.LLM.CONTEXT_LENGTH: int(text.max_position_embeddings),
        Keys.LLM.EMBEDDING_LENGTH: int(text.hidden_size),
        Keys.LLM.BLOCK_COUNT: int(text.num_hidden_layers),
        Keys.LLM.FEED_FORWARD_LENGTH: int(text.intermediate_size),
        Keys.Attention.HEAD_COUNT: int(text.num_attention_heads),
        Keys.Attention.HEAD_COUNT_KV: int(text.num_key_value_heads),
        Keys.Attention.KEY_LENGTH: head_dim,
        Keys.Attention.VALUE_LENGTH: head_dim,
        Keys.Attention.LAYERNORM_RMS_EPS: float(text.rms_norm_eps),
        Keys.Rope.DIMENSION_COUNT: head_dim,
        Keys.Rope.FREQ_BASE: float(rope["rope_theta"]),
    }
    if rope["rope_type"] == "linear":
        of_architecture[Keys.Rope.SCALING_TYPE] = str(RopeScalingType.LINEAR.value)
        of_architecture[Keys.Rope.SCALING_FACTOR] = float(rope["factor"])
    return metadata | {key.format(arch=arch): value for key, value in of_architecture.items()}


def write_gguf(model: PreTrainedModel, metadata: Metadata, dtype: Dtype, path: Path) -> Written:
    """Write ``path``, beside its place at first, and prove it.

    ``metadata``: ``architecture_metadata`` and ``vocabulary`` of the model. Raises CheckFailed where what is read back
    is not what was to be written.
    """
    config = model.config
    tensors = {name: (source, tensor) for name, source, tensor in _named_tensors(model)}
    stored = {name: _type_of(name, tensor, dtype) for name, (_, tensor) in tensors.items()}
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        writer = GGUFWriter(partial, MODEL_ARCH_NAMES[_ARCHITECTURES[config.model_type]])
        for key, value in metadata.items():
            _add(writer, key, value)
        for name, (source, tensor) in tensors.items():
            numbers = quantize(_permuted(config, source, _numbers(tensor)), stored[name])
            writer.add_tensor(name, numbers, raw_dtype=stored[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        largest = _prove(partial, config, metadata, tensors, stored)
        partial.replace(path)
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written: {error}; expected room and permission for the file"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return Written(path, len(tensors), path.stat().st_size, largest)


def _head_dim(text: Any) -> int:
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _named_tensors(model: PreTrainedModel) -> Iterator[tuple[str, str, Tensor]]:
    """(name in the file, name in the model, tensor), every one of the model's once."""
    config: Any = model.config
    names = get_tensor_name_map(_ARCHITECTURES[config.model_type], config.num_hidden_layers)
    for source, tensor in model.state_dict().items():
        if source == "lm_head.weight" and config.tie_word_embeddings:
            continue  # llama.cpp takes the embedding where there is no output.weight
        name = names.get_name(source, try_suffixes=(".weight", ".bias"))
        module = source.removesuffix(".bias").rpartition(".")[2]
        if name is None or (source.endswith(".bias") and module not in _BIASES[config.model_type]):
            raise ModelError(
                f"the weight {source} has no place in llama.cpp's graph of {config.model_type}; expected none "
                f"such; {REMEDY}"
            )
        yield name, source, tensor
    if config.rope_parameters["rope_type"] == "llama3":
        yield _FREQUENCIES, _FREQUENCIES, _frequency_factors(config)


def _frequency_factors(config: Any) -> Tensor:
    """By what llama3's scaling divides each of RoPE's frequencies."""
    rope, dim = config.rope_parameters, _head_dim(config)
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    factors: Tensor = 1.0 / ((1.0 - kept) / rope["factor"] + kept)
    return factors


def _permuted(config: Any, source: str, numbers: Matrix, *, is_inverse: bool = False) -> Matrix:
    """Rows of llama's query and key projections: halves of a head to pairs of neighbours."""
    module = source.rpartition(".")[0].rpartition(".")[2]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    if _ARCHITECTURES[config.model_type] is not MODEL_ARCH.LLAMA or module not in heads:
        return numbers
    pairs = (-1, 2) if is_inverse else (2, -1)
    split = numbers.reshape(heads[module], *pairs, *numbers.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(numbers.shape))


def _numbers(tensor: Tensor) -> Matrix:
    numbers: Matrix = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
    return numbers


def _type_of(name: str, tensor: Tensor, dtype: Dtype) -> GGMLQuantizationType:
    """How a tensor is stored: what has one axis is float32, as llama.cpp's kernels want it."""
    largest = float(tensor.abs().max())
    if not math.isfinite(largest):
        raise ModelError(f"{name} has numbers that are not finite; expected a sound model")
    if tensor.ndim == 1:
        return GGMLQuantizationType.F32
    if dtype == "q8_0" and tensor.shape[-1] % BLOCK:
        raise ModelError(
            f"{name} has rows of {tensor.shape[-1]} numbers; expected a multiple of {BLOCK} for dtype=q8_0; "
            "set dtype=f16 or dtype=bf16"
        )
    if dtype == "f16" and largest > np.finfo(np.float16).max:
        raise ModelError(
            f"{name} has a number of size {largest:.3g}; expected at most 65504 for dtype=f16; set dtype=bf16"
        )
    return _TYPES[dtype][0]


def _add(writer: GGUFWriter, key: str, value: Value) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
        return
    kinds = {
        str: GGUFValueType.STRING,
        bool: GGUFValueType.BOOL,
        int: GGUFValueType.UINT32,
        float: GGUFValueType.FLOAT32,
    }
    writer.add_key_value(key, value, kinds[type(value)])


def _prove(
    path: Path,
    config: Any,
    metadata: Metadata,
    tensors: Mapping[str, tuple[str, Tensor]],
    stored: Mapping[str, GGMLQuantizationType],
) -> float:
    """Read the file back; the largest error of a weight relative to its tensor's largest."""
    reader = GGUFReader(path)
    for key, value in metadata.items():
        found = reader.fields[key].contents() if key in reader.fields else None
        if found != (float(np.float32(value)) if isinstance(value, float) else value):
            raise _failed(key, f"the value {str(found)[:80]}", str(value)[:80])
    names = sorted(tensor.name for tensor in reader.tensors)
    if names != sorted(tensors):
        odd = sorted(set(names) ^ set(tensors)) or names
        raise _failed(odd[0], f"{len(names)} tensors", f"{len(tensors)}, each once")
    largest = 0.0
    for tensor in reader.tensors:
        source, original = tensors[tensor.name]
        kind = stored[tensor.name]
        wanted = _numbers(original.to(_ROUNDED.get(kind, torch.float32)))
        if tensor.tensor_type != kind:
            raise _failed(tensor.name, tensor.tensor_type.name, kind.name)
        found = dequantize(tensor.data, kind).reshape(wanted.shape)
        error = np.abs(_permuted(config, source, found, is_inverse=True) - wanted)
        is_quantised = kind == GGMLQuantizationType.Q8_0
        if not (error <= (quantisation_bound(wanted) if is_quantised else 0.0)).all():
            raise _failed(tensor.name, f"an error of {error.max():.3g}", "no more than rounding")
        largest = max(largest, float(error.max() / (np.abs(wanted).max() or 1.0)))
    return largest


def quantisation_bound(wanted: Matrix) -> Matrix:
    """q8_0's largest error: half a step of the block, a step being its largest number / 127, and what a scale in
    half precision adds at 127 steps (127 * 2^-11 of a step; 127 * 2^-25 where the scale is subnormal)."""
    blocks = np.abs(wanted).reshape(-1, BLOCK).max(axis=1) / np.float32(127)
    bound = blocks * np.float32(0.5 + 127 * 2.0**-11 + 1e-4) + np.float32(127 * 2.0**-25)
    return np.repeat(bound, BLOCK).reshape(wanted.shape).astype(np.float32)


def _failed(place: str, found: str, expected: str) -> CheckFailed:
    return CheckFailed(
        f"the file reads back with {found} at {place}; expected {expected}; it was not kept: check the "
        "disk and export again"
    )
