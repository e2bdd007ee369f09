"""Write a model and its tokenizer as one GGUF file for llama.cpp, verified by reading it back.

Architectures: llama, mistral, qwen2, qwen3, whose graphs in llama.cpp equal those of transformers. llama.cpp rotates
pairs of neighbors where transformers rotates halves, so the rows of llama's query and key projections change places.
Tied embeddings are written once. Norms, biases and RoPE's factors are float32, matrices ``dtype``. RoPE: default,
linear, llama3 (as factors, rope_freqs.weight). Other features are refused by name, as the format or llama.cpp's graph
has no place for them: other RoPE, sliding windows, another activation, biases that the graph does not read.

Verified before the file takes its name: every tensor is there once and no other, equals the model's (f32 exactly; bf16
and f16 exactly as torch rounds; q8_0 within its rounding), and every key has its value.

Tokenizer: llama.cpp identifies the way a text is cut before the merges by a name (tokenizer.ggml.pre). A table of
byte-level BPE tokenizers maps the steps in tokenizer.json to the name; other steps are refused, and shown.
Sentencepiece-like vocabularies are not converted: their scores are not in tokenizer.json. Token types: control for
added tokens that are special, user-defined for other added tokens, unused for rows of the embedding without a token
(written ``[PAD7]``, as llama.cpp's converter does), normal for the rest.

llama.cpp ends an answer at tokenizer.ggml.eos_token_id, eot_token_id, eom_token_id, and at tokens of well-known text,
whatever their type. The stop set goes into these keys; one that does not fit is refused.

A file that another program made of a model, quantized in any format that gguf widens, is read in the same way
(``open_gguf``). ``differences`` compares the keys that llama.cpp reads, and ``read_weights`` puts the weights into the
model.
"""

from __future__ import annotations

import json
import math
import mmap
import re
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from gguf import (
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    MODEL_TENSOR,
    TENSOR_NAMES,
    GGMLQuantizationType,
    GGUFValueType,
    GGUFWriter,
    Keys,
    LlamaFileType,
    RopeScalingType,
    TokenType,
    get_tensor_name_map,
)
from gguf.quants import dequantize, quant_shape_to_byte_shape, quantize
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.errors import CheckFailed, ModelError, OutputError
from taut.io import files
from taut.models import architecture
from taut_tools.export.settings import Dtype

Value: TypeAlias = str | bool | int | float | list[str] | list[int]
Metadata: TypeAlias = dict[str, Value]
"""Keys of a GGUF file. An int is written as uint32, a float as float32."""
Matrix: TypeAlias = NDArray[np.float32]
Placed: TypeAlias = dict[str, tuple[str, Tensor, GGMLQuantizationType]]
"""Name in the file -> (name in the model, tensor, format in the file)."""

REMEDY: Final = "convert it with llama.cpp's own convert_hf_to_gguf.py"


# -- the model -------------------------------------------------------------------------------------
BLOCK: Final = 32
"""Consecutive numbers of a row that share a scale in q8_0."""
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
"""transformers' model_type -> llama.cpp's architecture."""
_BIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "qwen2": ("q_proj", "k_proj", "v_proj"),
}
"""Biases that llama.cpp's graph of an architecture reads; no others are read."""
_FREQUENCIES: Final = f"{TENSOR_NAMES[MODEL_TENSOR.ROPE_FREQS]}.weight"


_KINDS: Final[Mapping[type, GGUFValueType]] = {
    str: GGUFValueType.STRING,
    bool: GGUFValueType.BOOL,
    int: GGUFValueType.UINT32,
    float: GGUFValueType.FLOAT32,
}


def require_convertible(config: PreTrainedConfig) -> None:
    """Raise ModelError for a configuration that cannot be converted."""
    text: Any = config.get_text_config()
    kind = str(config.model_type)
    if architecture.takes_pictures(config):
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
            f"attention has a sliding window of {window} tokens; expected none, as llama.cpp's {kind}; set "
            "max_position_embeddings in config.json to the window, up to which both agree"
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


def _architecture_metadata(config: PreTrainedConfig, dtype: Dtype, name: str) -> Metadata:
    """The general.* keys, and the keys of the architecture."""
    text: Any = config.get_text_config()
    arch = MODEL_ARCH_NAMES[_ARCHITECTURES[config.model_type]]
    rope = text.rope_parameters
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    metadata: Metadata = {
        Keys.General.TYPE: "model",
        Keys.General.NAME: name,
        Keys.General.FILE_TYPE: int(_TYPES[dtype][1]),
        Keys.General.QUANTIZATION_VERSION: 2,
    }
    templates: Metadata = {
        Keys.LLM.VOCAB_SIZE: int(text.vocab_size),
        Keys.LLM.CONTEXT_LENGTH: int(text.max_position_embeddings),
        Keys.LLM.EMBEDDING_LENGTH: int(text.hidden_size),
        Keys.LLM.BLOCK_COUNT: int(text.num_hidden_layers),
        Keys.LLM.FEED_FORWARD_LENGTH: int(text.intermediate_size),
        Keys.Attention.HEAD_COUNT: int(text.num_attention_heads),
        Keys.Attention.HEAD_COUNT_KV: int(text.num_key_value_heads),
        Keys.Attention.KEY_LENGTH: int(head_dim),
        Keys.Attention.VALUE_LENGTH: int(head_dim),
        Keys.Attention.LAYERNORM_RMS_EPS: float(text.rms_norm_eps),
        Keys.Rope.DIMENSION_COUNT: int(head_dim),
        Keys.Rope.FREQ_BASE: float(rope["rope_theta"]),
    }
    if rope["rope_type"] == "linear":
        templates[Keys.Rope.SCALING_TYPE] = str(RopeScalingType.LINEAR.value)
        templates[Keys.Rope.SCALING_FACTOR] = float(rope["factor"])
    return metadata | {key.format(arch=arch): value for key, value in templates.items()}


def write_gguf(
    model: PreTrainedModel, tokenizer_keys: Metadata, dtype: Dtype, path: Path
) -> tuple[int, float]:
    """Write ``path`` through a temporary file next to it, verified before it takes the name.

    ``tokenizer_keys`` come from ``vocabulary``. Returns the number of tensors, and the largest error of a stored weight
    relative to its tensor's largest (0 except for q8_0). Raises CheckFailed where the file reads back differently.
    """
    config: Any = model.config
    metadata = _architecture_metadata(config, dtype, path.stem) | tokenizer_keys
    tensors = _place_tensors(model, dtype)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(path) as partial:
            writer = GGUFWriter(partial, MODEL_ARCH_NAMES[_ARCHITECTURES[config.model_type]])
            for key, value in metadata.items():
                if isinstance(value, list):
                    writer.add_array(key, value)
                else:
                    writer.add_key_value(key, value, _KINDS[type(value)])
            for name, (source, tensor, kind) in tensors.items():
                numbers = quantize(_permuted(config, source, _numbers(tensor)), kind)
                writer.add_tensor(name, numbers, raw_dtype=kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            return len(tensors), _verify(partial, config, metadata, tensors)
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written: {error}; expected room and permission for the file"
        ) from error


def _place_tensors(model: PreTrainedModel, dtype: Dtype) -> Placed:
    """Name each tensor of the model once, with its format: float32 for vectors, as llama.cpp's kernels require."""
    # Find the place of each tensor in llama.cpp's graph.
    config: Any = model.config
    names = get_tensor_name_map(_ARCHITECTURES[config.model_type], config.num_hidden_layers)
    sources: dict[str, tuple[str, Tensor]] = {}
    for source, tensor in model.state_dict().items():
        if source == "lm_head.weight" and config.tie_word_embeddings:
            continue  # llama.cpp takes the embedding where there is no output.weight
        name = names.get_name(source, try_suffixes=(".weight", ".bias"))
        module = source.removesuffix(".bias").rpartition(".")[2]
        if name is None or (
            source.endswith(".bias") and module not in _BIASES.get(config.model_type, ())
        ):
            raise ModelError(
                f"the weight {source} has no place in llama.cpp's graph of {config.model_type}; expected none "
                f"such; {REMEDY}"
            )
        sources[name] = source, tensor
    if config.rope_parameters["rope_type"] == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        exponents = torch.arange(scaled.numel()) / scaled.numel()
        plain = 1.0 / config.rope_parameters["rope_theta"] ** exponents
        sources[_FREQUENCIES] = _FREQUENCIES, plain / scaled  # llama.cpp divides by these factors
    # Choose its format, and refuse numbers that do not fit.
    placed: Placed = {}
    for name, (source, tensor) in sources.items():
        largest = float(tensor.abs().max())
        if not math.isfinite(largest):
            raise ModelError(f"{name} has numbers that are not finite; expected a sound model")
        is_matrix = tensor.ndim > 1
        if is_matrix and dtype == "q8_0" and tensor.shape[-1] % BLOCK:
            raise ModelError(
                f"{name} has rows of {tensor.shape[-1]} numbers; expected a multiple of {BLOCK} for dtype=q8_0; "
                "set dtype=f16 or dtype=bf16"
            )
        if is_matrix and dtype == "f16" and largest > np.finfo(np.float16).max:
            raise ModelError(
                f"{name} has a number of size {largest:.3g}; expected at most 65504 for dtype=f16; set dtype=bf16"
            )
        placed[name] = source, tensor, _TYPES[dtype if is_matrix else "f32"][0]
    return placed


def _permuted(config: Any, source: str, numbers: Matrix, *, is_inverse: bool = False) -> Matrix:
    """Reorder the rows of llama's query and key projections: halves of a head to pairs of neighbors."""
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


def _verify(path: Path, config: Any, metadata: Metadata, tensors: Placed) -> float:
    """Read the file back and compare it; the largest error of a weight relative to its tensor's largest."""
    reader = open_gguf(path)
    for key, value in metadata.items():
        actual = reader.values.get(key)
        if actual != (float(np.float32(value)) if isinstance(value, float) else value):
            raise _failed(key, f"the value {str(actual)[:80]}", str(value)[:80])
    names = sorted(tensor.name for tensor in reader.tensors)
    if names != sorted(tensors):
        odd = sorted(set(names) ^ set(tensors)) or names
        raise _failed(odd[0], f"{len(names)} tensors", f"{len(tensors)}, each once")
    largest = 0.0
    for tensor in reader.tensors:
        source, original, kind = tensors[tensor.name]
        expected = _numbers(original.to(_ROUNDED.get(kind, torch.float32)))
        if tensor.tensor_type != kind:
            raise _failed(tensor.name, tensor.tensor_type.name, kind.name)
        stored = dequantize(tensor.data, kind).reshape(expected.shape)
        error = np.abs(_permuted(config, source, stored, is_inverse=True) - expected)
        bound: Any = 0.0
        if kind == GGMLQuantizationType.Q8_0:
            # Half a step of the block (a step is its largest number / 127), and the error of a scale in half precision
            # at 127 steps: 127 * 2^-11 of a step; 127 * 2^-25 where the scale is subnormal.
            steps = np.abs(expected).reshape(-1, BLOCK).max(axis=1) / np.float32(127)
            bounds = steps * np.float32(0.5 + 127 * 2.0**-11 + 1e-4) + np.float32(127 * 2.0**-25)
            bound = np.repeat(bounds, BLOCK).reshape(expected.shape).astype(np.float32)
        if not (error <= bound).all():
            raise _failed(tensor.name, f"an error of {error.max():.3g}", "no more than rounding")
        largest = max(largest, float(error.max() / (np.abs(expected).max() or 1.0)))
    return largest


def _failed(place: str, actual: str, expected: str) -> CheckFailed:
    return CheckFailed(
        f"the file reads back with {actual} at {place}; expected {expected}; it was not kept: check the "
        "disk and export again"
    )


# -- files of other programs ------------------------------------------------------------------------
_MAY_LACK: Final = (
    Keys.LLM.VOCAB_SIZE,
    Keys.Attention.KEY_LENGTH,
    Keys.Attention.VALUE_LENGTH,
    Keys.Rope.DIMENSION_COUNT,
)
"""Keys that follow from others if the heads divide the hidden size."""


MAX_ITEMS: Final = 2**24
"""Maximum items of an array; the largest vocabularies and their merges have a million."""
_CODES: Final = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""GGUFValueType of a number -> its code in ``struct``."""


class StoredTensor(NamedTuple):
    """A tensor of a file."""

    name: str
    tensor_type: GGMLQuantizationType
    shape: tuple[int, ...]
    data: NDArray[np.uint8]
    """Mapped bytes of the tensor."""


class GGUFFile(NamedTuple):
    """The keys and the tensors of a file."""

    values: dict[str, Any]
    tensors: list[StoredTensor]


def open_gguf(path: Path) -> GGUFFile:
    """Read the keys, and map the tensors. Every count is compared with the bytes of the file: a damaged or hostile file
    takes no more time and memory than a sound one of its size. Raises ModelError for a file that is not GGUF.
    """
    try:
        with files.open_regular(path) as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return _Reader(memoryview(content)).read()
    except (OSError, ValueError) as error:
        reason = " ".join((getattr(error, "strerror", None) or str(error)).split())[:200]
        raise ModelError(
            f"{path} cannot be read as GGUF ({reason}); expected a file that llama.cpp reads; check the path"
        ) from error


class _Reader:
    """Reads a file from its start. Raises ValueError for content that the format or llama.cpp does not know."""

    def __init__(self, content: memoryview) -> None:
        self.content, self.at = content, 0

    def read(self) -> GGUFFile:
        """Read the whole file."""
        # Header and keys.
        magic, version = bytes(self._take(4)), self._number("I")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"it begins with {magic!r}, version {version}; expected GGUF, 2 or 3")
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        values: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._text()
            if key in values:
                raise ValueError(f"the key {key[:60]!r} is there twice")
            values[key] = self._value(self._number("I"))
        # Tensors, which may neither overlap nor end after the file.
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = values.get(Keys.General.ALIGNMENT, 32)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"its alignment is {alignment!r:.60}")
        data = self.content[self.at + -self.at % alignment :]
        end, tensors = 0, {}
        for name, kind, shape, offset in sorted(infos, key=lambda info: info[3]):
            in_bytes = quant_shape_to_byte_shape(shape, kind)
            if name in tensors or offset < end:
                raise ValueError(f"the tensor {name[:60]!r} is there twice, or overlaps another")
            end = offset + math.prod(in_bytes)
            if end > len(data):
                raise ValueError(f"it breaks off within the tensor {name[:60]!r}")
            numbers = np.frombuffer(data[offset:end], np.uint8).reshape(in_bytes)
            tensors[name] = StoredTensor(name, kind, shape, numbers)
        return GGUFFile(values, list(tensors.values()))

    def _take(self, count: int) -> memoryview:
        if count > len(self.content) - self.at:
            raise ValueError(f"it breaks off: {count:,} bytes are announced at byte {self.at:,}")
        self.at += count
        return self.content[self.at - count : self.at]

    def _numbers(self, code: str, count: int) -> list[Any]:
        if not code:
            raise ValueError("a value has an unknown type")
        content = self._take(struct.calcsize(code) * count)
        return list(struct.unpack(f"<{count}{code}", content))

    def _number(self, code: str) -> int:
        return int(self._numbers(code, 1)[0])

    def _text(self) -> str:
        return str(self._take(self._number("Q")), "utf-8")

    def _value(self, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self._text()
        if kind != GGUFValueType.ARRAY:
            return self._numbers(_CODES.get(kind, ""), 1)[0]
        kind, count = self._number("I"), self._number("Q")
        if count > MAX_ITEMS:
            raise ValueError(f"an array has {count:,} items; expected at most {MAX_ITEMS:,}")
        if kind == GGUFValueType.STRING:
            return [self._text() for _ in range(count)]
        return self._numbers(_CODES.get(kind, ""), count)

    def _tensor_info(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        """Read name, format, shape and offset of a tensor."""
        name, num_dimensions = self._text(), self._number("I")
        if not 1 <= num_dimensions <= 4:  # llama.cpp's most
            raise ValueError(f"the tensor {name[:60]!r} has {num_dimensions} dimensions")
        shape = tuple(reversed(self._numbers("Q", num_dimensions)))
        return name, GGMLQuantizationType(self._number("I")), shape, self._number("Q")


def differences(file: GGUFFile, config: PreTrainedConfig, wanted: Metadata) -> dict[str, list[str]]:
    """Differences between a file's keys and the model's, by question. ``wanted`` comes from ``vocabulary``."""
    found, expected = (
        file.values.get(Keys.Tokenizer.CHAT_TEMPLATE),
        wanted.get(Keys.Tokenizer.CHAT_TEMPLATE),
    )
    other = "there is none" if found is None else "the chat template is another"
    stored = file.values.get(Keys.Tokenizer.LIST)
    stored = stored if isinstance(stored, list) else []
    return {
        "architecture": _other_shape(file, config),
        "template": [] if found == expected else [other],
        "tokenizer": _other_tokenizer(file, wanted, stored),
        "stop set": _missing_stops(file, wanted, stored),
    }


def _other_shape(file: GGUFFile, config: PreTrainedConfig) -> list[str]:
    """Keys of the architecture that differ."""
    text: Any = config.get_text_config()
    arch = MODEL_ARCH_NAMES[_ARCHITECTURES[config.model_type]]
    by_division = text.hidden_size // text.num_attention_heads
    is_split = getattr(text, "head_dim", None) in (None, by_division)
    may_lack = {key.format(arch=arch) for key in _MAY_LACK if is_split}
    expected = {
        key: value
        for key, value in _architecture_metadata(config, "f32", "").items()
        if not key.startswith("general.")
    }
    wrong: list[str] = []
    for key, value in {Keys.General.ARCHITECTURE: arch, **expected}.items():
        found = file.values.get(key)
        is_same = found == (float(np.float32(value)) if isinstance(value, float) else value)
        if not is_same and not (found is None and key in may_lack):
            wrong.append(f"{key} is {found!r:.60}, expected {value!r}")
    return wrong


def _other_tokenizer(file: GGUFFile, wanted: Metadata, stored: list[Any]) -> list[str]:
    """Keys of the tokenizer that differ, without its stops."""
    wrong = [
        f"{key} is {file.values.get(key)!r:.60}, expected {wanted[key]!r:.60}"
        for key in (Keys.Tokenizer.MODEL, Keys.Tokenizer.PRE, Keys.Tokenizer.ADD_BOS)
        if (file.values.get(key) or False) != wanted[key]
    ]
    if wanted[Keys.Tokenizer.ADD_BOS]:
        found, expected = file.values.get(Keys.Tokenizer.BOS_ID), wanted[Keys.Tokenizer.BOS_ID]
        wrong += [f"bos is {found!r:.60}, expected {expected}"] if found != expected else []
    tokens: Any = wanted[Keys.Tokenizer.LIST]
    types: Any = wanted[Keys.Tokenizer.TOKEN_TYPE]
    other = [
        index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind != TokenType.UNUSED and stored[index : index + 1] != [token]
    ]
    if other:
        first = other[0]
        wrong.append(
            f"{len(other)} tokens differ: {first} is {stored[first : first + 1]!r:.60}, expected {tokens[first]}"
        )
    if file.values.get(Keys.Tokenizer.MERGES) != wanted[Keys.Tokenizer.MERGES]:
        wrong.append("its merges are others")
    return wrong


def _missing_stops(file: GGUFFile, wanted: Metadata, stored: list[Any]) -> list[str]:
    """Stop tokens of the model at which llama.cpp does not end an answer."""
    keys = (Keys.Tokenizer.EOS_ID, *_FURTHER_STOPS)
    ends = {end for key in keys if type(end := file.values.get(key)) is int}
    ends |= {index for index, token in enumerate(stored) if token in ENDS_BY_TEXT}
    tokens: Any = wanted[Keys.Tokenizer.LIST]
    stops: list[Any] = [wanted[key] for key in keys if key in wanted]
    return [f"an answer does not end at {tokens[index]}" for index in stops if index not in ends]


def bits_of(file: GGUFFile) -> int:
    """Bits of a weight in the narrowest matrix, without scales: 4 for Q4_1 and for Q4_K."""
    names = [tensor.tensor_type.name for tensor in file.tensors if len(tensor.shape) > 1]
    return min((int(re.findall(r"\d+", name)[0]) for name in names), default=32)


@torch.no_grad()
def read_weights(file: GGUFFile, model: PreTrainedModel) -> str:
    """Replace a model's weights by those of a file; the number of tensors in each format, in words. Raises ModelError
    for a tensor that is missing, unknown to the model, or in a format that cannot be widened.
    """
    config: Any = model.config
    placed = _place_tensors(model, "f32")
    names = sorted(tensor.name for tensor in file.tensors)
    if names != sorted(placed):
        odd = sorted(set(names) ^ set(placed)) or names
        raise ModelError(
            f"the file has {len(names)} tensors, the model {len(placed)}; expected the same; the first that only one "
            f"of them has is {odd[0]}: was the file made from this model?"
        )
    for tensor in file.tensors:
        source, target, _ = placed[tensor.name]
        try:
            with np.errstate(all="ignore"):
                stored = dequantize(tensor.data, tensor.tensor_type).reshape(target.shape)
        except (NotImplementedError, ValueError) as error:
            raise ModelError(
                f"{tensor.name} is stored as {tensor.tensor_type.name}, of shape {list(tensor.shape)}; expected a "
                f"format that gguf widens, and {list(target.shape)}; ask a server that runs the file (engine=server)"
            ) from error
        if not np.isfinite(stored).all():
            raise ModelError(
                f"{tensor.name} has numbers that are not finite; expected a sound file"
            )
        numbers = torch.from_numpy(np.array(_permuted(config, source, stored, is_inverse=True)))
        if source == _FREQUENCIES and not torch.allclose(numbers, target.float(), rtol=1e-5):
            raise ModelError(
                f"{tensor.name} has other numbers than the model's RoPE; expected those"
            )
        target.copy_(numbers)
    kinds = Counter(tensor.tensor_type.name for tensor in file.tensors)
    return ", ".join(f"{number} in {name}" for name, number in kinds.most_common())


# -- the tokenizer ---------------------------------------------------------------------------------
_WORDS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS: Final[Mapping[tuple[tuple[str, ...], bool], str]] = {
    (("words",), False): "gpt-2",
    (("digits", "words"), False): "smollm",
    ((_WORDS + r"\p{N}" + _REST, "bytes"), False): "qwen2",
    ((_WORDS + r"\p{N}{1,3}" + _REST, "bytes"), True): "llama-bpe",
    ((_WORDS + r"\p{N}{1,3}" + _REST, "bytes"), False): "dbrx",
}
"""llama.cpp's name of a pre-tokenizer, by the steps that cut a text, and whether a word that is a token skips the
merges. Steps: ``digits`` cuts off each digit, ``words`` is GPT-2's pattern, ``bytes`` cuts no more; else a pattern."""
ENDS_BY_TEXT: Final = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|eom_id|> <|endoftext|> <|end_of_text|> <end_of_turn> "  # noqa: SIM905
    "</s> <EOT> _<EOT>".split()
)
"""Tokens at which llama.cpp ends an answer by their text (llama-vocab.cpp), in old versions too."""
_FURTHER_STOPS: Final = (Keys.Tokenizer.EOT_ID, Keys.Tokenizer.EOM_ID)
"""Keys of further tokens that end an answer, besides the end of a turn."""


def vocabulary(
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    stop_ids: Sequence[int],
    num_rows: int,
) -> Metadata:
    """The tokenizer.* keys. ``stop_ids`` begin with the end of turn; ``num_rows`` is the size of the embedding."""
    if not tokenizer.is_fast:
        raise ModelError(
            f"the tokenizer is a {type(tokenizer).__name__} without tokenizer.json; expected a fast tokenizer; {REMEDY}"
        )
    if not stop_ids:
        raise ModelError(
            "the tokenizer names no token that ends an answer; expected an eos token; set it in tokenizer_config.json"
        )
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens, types = _tokens(tokenizer, num_rows)
    merges = backend["model"]["merges"]
    metadata: Metadata = {
        Keys.Tokenizer.MODEL: "gpt2",
        Keys.Tokenizer.PRE: pre_tokenizer_name(backend),
        Keys.Tokenizer.LIST: tokens,
        Keys.Tokenizer.TOKEN_TYPE: types,
        Keys.Tokenizer.MERGES: [m if isinstance(m, str) else " ".join(m) for m in merges],
        Keys.Tokenizer.EOS_ID: int(stop_ids[0]),
    }
    # Stop tokens besides the end of turn that llama.cpp does not know by their text.
    names = {index: str(tokenizer.convert_ids_to_tokens(index)) for index in stop_ids[1:]}
    further = [index for index, name in names.items() if name not in ENDS_BY_TEXT]
    if len(further) > len(_FURTHER_STOPS):
        raise ModelError(
            f"the stop set has {', '.join(names[index] for index in further)} besides its end of turn; expected two at "
            "most, as llama.cpp has keys; remove others from eos_token_id in generation_config.json"
        )
    metadata |= {key: int(index) for key, index in zip(_FURTHER_STOPS, further, strict=False)}
    # Other special tokens, and those that llama.cpp puts around a text.
    bos = tokenizer.bos_token_id
    if bos is None:
        bos = getattr(config.get_text_config(), "bos_token_id", None)
    for key, index in (
        (Keys.Tokenizer.BOS_ID, bos),
        (Keys.Tokenizer.PAD_ID, tokenizer.pad_token_id),
        (Keys.Tokenizer.UNK_ID, tokenizer.unk_token_id),
    ):
        if index is not None:
            metadata[key] = int(index)
    plain, whole = (tokenizer.encode("a", add_special_tokens=added) for added in (False, True))
    if whole not in (plain, [bos, *plain]):
        raise ModelError(
            f"the tokenizer encodes 'a' as {whole}, and as {plain} without special tokens; expected at most bos in "
            f"front, since an eos after a prompt would end it; {REMEDY}"
        )
    metadata[Keys.Tokenizer.ADD_BOS] = whole != plain
    metadata[Keys.Tokenizer.ADD_EOS] = False
    metadata[Keys.Tokenizer.ADD_PREFIX] = False
    # Chat templates.
    template = tokenizer.chat_template
    templates = template if isinstance(template, dict) else {"default": template}
    others = sorted(name for name in templates if name != "default")
    if templates.get("default"):
        metadata[Keys.Tokenizer.CHAT_TEMPLATE] = str(templates["default"])
    for name in others:
        metadata[Keys.Tokenizer.CHAT_TEMPLATE_N.format(name=name)] = str(templates[name])
    if others:
        metadata[Keys.Tokenizer.CHAT_TEMPLATES] = others
    return metadata


def notes(tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> list[str]:
    """Differences between llama.cpp and this tokenizer or stop set that no key can express."""
    differences = []
    if json.loads(tokenizer.backend_tokenizer.to_str())["normalizer"]:
        differences.append(
            "llama.cpp does not bring text into Unicode's NFC form, as this tokenizer does: other ids where it is not"
        )
    known = tokenizer.get_vocab()
    others = sorted(text for text in ENDS_BY_TEXT if known.get(text, stop_ids[0]) not in stop_ids)
    if others:
        differences.append(f"llama.cpp also ends an answer at {', '.join(others)}, by its text")
    if tokenizer.chat_template is None:
        differences.append(
            "the tokenizer has no chat template: llama.cpp falls back to one of its own"
        )
    return differences


def pre_tokenizer_name(backend: Mapping[str, Any]) -> str:
    """llama.cpp's name for the pre-tokenizer of a tokenizer.json. Raises ModelError where it has none."""
    model, normalizer = backend["model"], backend["normalizer"]
    cut = backend["pre_tokenizer"] or {"type": "none"}
    steps = []  # in the words of PRE_TOKENIZERS; others as JSON
    for part in cut["pretokenizers"] if cut["type"] == "Sequence" else [cut]:
        kind = part["type"]
        if kind == "ByteLevel" and not part["add_prefix_space"]:
            steps.append("words" if part["use_regex"] else "bytes")
        elif kind == "Digits" and part["individual_digits"]:
            steps.append("digits")
        elif kind == "Split" and part["behavior"] == "Isolated" and not part["invert"]:
            steps.append(str(part["pattern"].get("Regex", part["pattern"])))
        else:
            steps.append(json.dumps(part))
    name = PRE_TOKENIZERS.get((tuple(steps), bool(model.get("ignore_merges"))))
    if model["type"] != "BPE":
        actual = model["type"]
    elif model.get("byte_fallback"):
        actual = "a sentencepiece-like BPE with byte fallback"
    elif normalizer is not None and normalizer != {"type": "NFC"}:
        actual = f"the normalizer {json.dumps(normalizer)}"
    elif any(model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix")):
        actual = "a BPE with marks on parts of words"
    elif name is None:
        actual = f"the pre-tokenizer {' then '.join(steps)}"
    else:
        return name
    known = ", ".join(sorted(set(PRE_TOKENIZERS.values())))
    raise ModelError(
        f"the tokenizer has {actual[:300]}; expected a byte-level BPE that cuts text like one of {known}, or llama.cpp "
        f"would give other ids; {REMEDY}"
    )


def _tokens(tokenizer: PreTrainedTokenizerBase, num_rows: int) -> tuple[list[str], list[int]]:
    """The text and the type of each row of the embedding."""
    texts = {index: text for text, index in tokenizer.get_vocab().items()}
    if max(texts) >= num_rows:
        raise ModelError(
            f"the tokenizer has id {max(texts)} and the embedding {num_rows} rows; expected a row for each token; "
            "copy the tokenizer of the base model"
        )
    added = tokenizer.added_tokens_decoder
    for token in added.values():
        if token.lstrip or token.rstrip or token.single_word:
            raise ModelError(
                f"the added token {token.content} takes white space next to it, or whole words only; expected one that "
                f"does not, since llama.cpp cannot; {REMEDY}"
            )
    tokens, types = [], []
    for row in range(num_rows):
        tokens.append(texts.get(row, f"[PAD{row}]"))
        if row not in texts:
            kind = TokenType.UNUSED
        elif row in added:
            kind = TokenType.CONTROL if added[row].special else TokenType.USER_DEFINED
        else:
            kind = TokenType.NORMAL
        types.append(int(kind))
    if len(set(tokens)) != num_rows:
        raise ModelError(
            "two rows of the vocabulary have one text; expected them to differ; copy the tokenizer of the base model"
        )
    return tokens, types
