"""Quantised weights under adapters (QLoRA, arXiv:2305.14314), through bitsandbytes and the library's integration of it.

    nf4     4 bits a weight: the nearest of 16 values, times the largest weight of its block of 64; those maxima are
            quantised to 8 bits themselves (double quantisation): 4.13 bits in all
    int8    8 bits a weight: a multiple of 1/127 of the largest weight of its row (LLM.int8, arXiv:2208.07339)

Linear layers of the decoder are quantised, and the experts that are one tensor, each by itself; embedding, head, norms,
routers, scalar heads and vision towers are stored as ``frozen`` says. Each tensor is quantised as the library reads it,
so the whole model is never in memory.

A quantised layer has one parameter, a row of bytes: the constants of its format, then the codes (``Format``). Each of
several ranks keeps a part of the row, cut at any byte, and FSDP gathers the row where the layer runs. Each reads and
quantises some rows of the weight, and all exchange maxima and codes, so the bytes are those of one process. Of experts
each reads and quantises its own. A weight whose blocks cross rows, or which the library makes of other tensors, is read
and quantised whole by every rank.

A product widens its weight first (``products.linear_from_stored``), so activations are not rounded, as LLM.int8 would,
and no packed sample has a part in another's numbers. bitsandbytes' own layers are not used: on some CPUs their forward
changes the stored bytes as soon as a model is evaluated, and it rewrites biases.

A base that comes quantised is read as it is where bitsandbytes wrote it; other formats do not train, and are refused by
name. Where nothing trains, those of ``WIDENED`` are read as the numbers they stand for.

bitsandbytes is imported in this file only, and only for a quantised base; peft imports it where it is installed.
"""

from __future__ import annotations

import copy
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import MethodType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.distributed.sharding_utils import DtensorShardOperation
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from taut import extras
from taut.errors import ConfigError, ModelError
from taut.models import architecture
from taut.models.experts import narrow
from taut.models.products import linear_from_stored

Quantise = Literal["nf4", "int8"]
BLOCK, NESTED_BLOCK = 64, 256
"""Weights under one maximum in nf4, and maxima under one of theirs."""
NF4_HALF_GAP, NESTED_LOSS = 0.155, 0.01
"""Half the largest distance of two values of nf4 (0.152), and what 8 bits take of a maximum, relative to the largest
around it."""
INT8_HALF_STEP, HALF_LOSS = 0.51 / 127, 2**-10
"""Half a step of int8, and the loss of float16, through which bitsandbytes quantises to int8."""
TRAINABLE = ("bitsandbytes",)
"""The formats in which a base may come quantised."""
DEQUANTISED = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}
"""Formats in which models are published that were never otherwise -> transformers' settings that widen them."""
WIDENED = (*DEQUANTISED, "compressed-tensors")
"""Formats that transformers reads as plain weights where it is asked to."""
_OUTSIDE = (
    r".*\b(?:visual|vision_tower|vision_model|multi_modal_projector|connector|merger)",
    r"(?!.*\.\d+\.).*",  # in no numbered layer: head, scalar head
)
"""Regular expressions for the modules that are not quantised."""


# -- before reading


def quiet_import() -> None:
    """Silence what bitsandbytes logs when it is imported: which optional kernels it lacks."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def require_package(needed_by: str) -> None:
    """Raise ConfigError where bitsandbytes is missing. ``needed_by``: the setting that asks for it."""
    extras.require("quant", needed_by)
    quiet_import()


def _quantisation(config: PreTrainedConfig) -> dict[str, Any]:
    """The settings by which a checkpoint's weights are quantised; empty: they are not."""
    parts = (config, config.get_text_config())  # the library asks both
    settings: Any = next((s for p in parts if (s := getattr(p, "quantization_config", None))), {})
    values: dict[str, Any] = settings if isinstance(settings, dict) else settings.to_dict()
    return values


def format_of(config: PreTrainedConfig) -> str | None:
    """The format in which a checkpoint's weights are quantised; None: they are not."""
    values = _quantisation(config)
    if not values:
        return None
    method = str(values.get("quant_method", "unknown")).rpartition(".")[2].lower()
    names = ("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit", "bits_and_bytes")
    if method in names or values.get("load_in_4bit") or values.get("load_in_8bit"):
        return "bitsandbytes"
    return method


def bits_of(config: PreTrainedConfig) -> int:
    """Bits of the narrowest weight of a checkpoint that comes quantised."""
    values = _quantisation(config)
    match format_of(config):
        case "bitsandbytes":
            return 8 if values.get("load_in_8bit") else 4
        case "compressed-tensors":
            groups = (values.get("config_groups") or {}).values()
            weights = [group.get("weights") for group in groups if isinstance(group, dict)]
            return min((int(of["num_bits"]) for of in weights if of), default=16)
        case "fp8" | "mxfp4" as found:
            return {"fp8": 8, "mxfp4": 4}[found]
    return int(values.get("bits") or values.get("w_bit") or 4)


def ask_for_numbers(config: PreTrainedConfig, needed_by: str) -> None:
    """Let the library read a checkpoint's weights as the numbers they stand for, where it can. ``needed_by``: the
    setting that names the model.
    """
    found = format_of(config)
    if found not in WIDENED:
        return
    if found == "compressed-tensors":
        extras.require("compressed", needed_by)
    config.quantization_config = {**_quantisation(config), "dequantize": True}


def require_trainable(
    path: str, config: PreTrainedConfig, how: Quantise | None, *, adapts: bool
) -> bool:
    """Whether the checkpoint comes quantised. Raises for a format that cannot train, for one that would be quantised
    twice, and for a run without adapters.
    """
    found = format_of(config)
    if found is None:
        return False
    if found not in TRAINABLE:
        remedy = "start from the model it was made from; quantise=nf4 makes that small"
        if found in DEQUANTISED:
            make = (
                f"from_pretrained(..., quantization_config={DEQUANTISED[found]}(dequantize=True))"
            )
            remedy = f"save it in bfloat16 first: transformers' {make}, then save_pretrained"
        raise ModelError(
            f"model={path} comes quantised as {found}, which does not train; expected weights that are not quantised, "
            f"or quantised by {' or '.join(TRAINABLE)}; {remedy}"
        )
    if how is not None:
        raise ConfigError(
            f"quantise={how} and model={path} comes quantised already; expected one of the two; take the key out"
        )
    if not adapts:
        raise ModelError(
            f"model={path} comes quantised, and rounded weights cannot be updated; expected adapters next to them: set "
            "lora.rank, or start from the model it was made from"
        )
    return True


def settings_of(how: Quantise, compute: torch.dtype, whole: Sequence[str]) -> BitsAndBytesConfig:
    """The library's settings. ``whole``: the ends of names of modules that are trained whole."""
    skipped = [*_OUTSIDE, *(rf"(?:.*\.)?{re.escape(name)}" for name in whole)]
    make: Any = BitsAndBytesConfig
    settings: BitsAndBytesConfig = make(
        load_in_4bit=how == "nf4",
        load_in_8bit=how == "int8",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
        llm_int8_skip_modules=skipped,
    )
    return settings


# -- the row of bytes

Kind = Literal["nf4", "fp4", "int8"]


@dataclass(frozen=True, slots=True)
class Format:
    """How a weight lies in a row of bytes, whose length is a multiple of 4."""

    kind: Kind
    shape: tuple[int, int]
    """Of the weight: outputs, inputs."""
    is_nested: bool = True
    """Whether the maxima of 4-bit blocks are quantised to 8 bits themselves."""

    @property
    def parts(self) -> dict[str, tuple[torch.dtype, int]]:
        """Name -> dtype and number of elements. Those of float32 come first, at multiples of 4 bytes."""
        rows, columns = self.shape
        if self.kind == "int8":
            return {"SCB": (torch.float32, rows), "weight": (torch.int8, rows * columns)}
        num_blocks = -(-rows * columns // BLOCK)
        codes = (torch.uint8, -(-rows * columns // 2))
        if not self.is_nested:
            return {"absmax": (torch.float32, num_blocks), "weight": codes}
        return {
            "nested_offset": (torch.float32, 1),
            "nested_absmax": (torch.float32, -(-num_blocks // NESTED_BLOCK)),
            "absmax": (torch.uint8, num_blocks),
            "weight": codes,
        }

    @property
    def num_bytes(self) -> int:
        """The length of the row."""
        return sum(self._sizes)

    @property
    def _sizes(self) -> list[int]:
        """Bytes of each part, and of what fills the row."""
        sizes = [dtype.itemsize * count for dtype, count in self.parts.values()]
        return [*sizes, -sum(sizes) % 4]

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The row that holds these parts."""
        flat = []
        for name, (dtype, count) in self.parts.items():
            part = tensors[name].contiguous().view(-1).view(torch.uint8)
            if part.numel() != dtype.itemsize * count:
                raise ModelError(
                    f"found {part.numel():,} bytes of {name} in a weight of {list(self.shape)}; expected "
                    f"{dtype.itemsize * count:,}, as {self.kind} has by config.json; copy the model's files again"
                )
            flat.append(part)
        flat.append(part.new_zeros(self._sizes[-1]))
        return torch.cat(flat)

    def unpack(self, row: Tensor) -> dict[str, Tensor]:
        """The parts that a row (or each of several [..., bytes]) holds; they share its memory."""
        flat = zip(self.parts.items(), torch.split(row, self._sizes, -1)[:-1], strict=True)
        return {name: part.view(dtype) for (name, (dtype, _)), part in flat}

    @property
    def has_blocks_in_rows(self) -> bool:
        """Whether no block has numbers of two rows of the weight, so that rows can be quantised apart."""
        return self.kind == "int8" or self.shape[1] % BLOCK == 0

    @property
    def bytes_of_a_row(self) -> tuple[int, int]:
        """The maxima's and the codes' bytes of one row of the weight, where it has whole blocks."""
        columns = self.shape[1]
        return (4, columns) if self.kind == "int8" else (4 * columns // BLOCK, columns // 2)

    def quantise(self, weight: Tensor) -> Tensor:
        """The row of a weight."""
        return self.row_of(*self.codes_of(weight))

    @torch.no_grad()
    def codes_of(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The maxima (float32) of a weight, or of some rows of it, and its codes."""
        from bitsandbytes import functional

        if weight.shape[-1] != self.shape[1]:
            raise ModelError(
                f"found a weight of {list(weight.shape)} to quantise; expected {list(self.shape)}, or rows of it, as "
                "config.json says; copy the model's files again"
            )
        if self.kind == "int8":
            codes, largest, _ = functional.int8_vectorwise_quant(weight.to(torch.float16))
            return largest, codes
        codes, state = functional.quantize_4bit(
            weight.contiguous(), blocksize=BLOCK, quant_type=self.kind
        )
        return state.absmax, codes

    @torch.no_grad()
    def row_of(self, largest: Tensor, codes: Tensor) -> Tensor:
        """The row of a weight with these maxima and codes."""
        from bitsandbytes import functional

        if self.kind == "int8":
            return self.pack({"SCB": largest, "weight": codes})
        if not self.is_nested:
            return self.pack({"absmax": largest, "weight": codes})
        offset = largest.mean()
        quantise: Any = functional.quantize_blockwise
        rounded, state = quantise(largest - offset, blocksize=NESTED_BLOCK)
        constants = {"nested_offset": offset, "nested_absmax": state.absmax}
        return self.pack({**constants, "absmax": rounded, "weight": codes})

    def widen(self, row: Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers that a row (or each of several [..., bytes]) stands for, in ``dtype``."""
        shape = (*row.shape[:-1], *self.shape)
        parts = self.unpack(row)
        if self.kind == "int8":
            scale = parts["SCB"] / 127  # one a row
            wide: Tensor = parts["weight"].view(shape) * scale.unsqueeze(-1)
            return wide.to(dtype)
        if row.is_meta:
            return row.new_empty(shape, dtype=dtype)
        from bitsandbytes import functional

        largest = parts["absmax"]
        if self.is_nested:
            around = parts["nested_absmax"].repeat_interleave(NESTED_BLOCK, -1)
            values = _nested_values(row.device)[largest.int()]
            largest = values * around[..., : largest.shape[-1]] + parts["nested_offset"]
        # As one row: 0.50.2 gives wrong numbers on a CPU for rows that are not a multiple of a block.
        make_state: Any = functional.QuantState
        state = make_state(
            absmax=largest.reshape(-1),
            shape=torch.Size([math.prod(shape)]),
            blocksize=BLOCK,
            quant_type=self.kind,
            dtype=dtype,
        )
        wide = functional.dequantize_4bit(parts["weight"].reshape(-1, 1), state)
        return wide.view(shape)


@cache
def _nested_values(device: torch.device) -> Tensor:
    """The 256 values by which maxima of blocks are quantised."""
    from bitsandbytes import functional

    make: Any = functional.create_dynamic_map
    with (
        _disable_current_modes()
    ):  # what is kept has contents, also where it was asked for on fake tensors
        values: Tensor = make().to(device)
    return values


class QuantisedLinear(nn.Linear):
    """A frozen linear layer whose weight is a row of bytes."""

    def __init__(
        self, linear: nn.Linear, kind: Kind, *, is_nested: bool = True, is_transposed: bool = False
    ) -> None:
        """``linear``: a layer without contents (on the meta device). ``is_transposed``: checkpoints have the weight as
        [inputs, outputs].
        """
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.format = Format(kind, (linear.out_features, linear.in_features), is_nested)
        self.formats = {"weight": self.format}
        self.is_transposed = is_transposed
        self.is_read_in_rows = False
        """Whether each rank reads some rows of the weight."""
        self.bias = linear.bias
        row = torch.empty(self.format.num_bytes, dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(row, requires_grad=False)
        register: Any = self.register_state_dict_post_hook
        register(_as_read)

    def forward(self, x: Tensor) -> Tensor:
        return linear_from_stored(x, self.weight, self.bias, self.format.widen)

    def in_checkpoint(self, wide: Tensor) -> Tensor:
        """A weight of the layer as checkpoints have it, and back."""
        return wide.T if self.is_transposed else wide


def _as_read(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """A hook of state dicts by which the library reads of a tensor what this rank quantises of it."""
    for key, layout in module.formats.items():
        parameter = module._parameters[key]
        if not parameter.is_meta:
            continue
        shape, wide = parameter.shape, (*parameter.shape[:-1], *layout.shape)
        read: Any = torch.empty(shape, dtype=parameter.dtype, device="meta")
        # A rank without experts reads them all: the library puts together no empty list of them.
        is_in_parts = getattr(module, "is_read_in_rows", _num_own(parameter) > 0)
        if is_in_parts and hasattr(parameter, "full_tensor"):
            read = _divided_like(parameter, torch.empty(wide, device="meta"), wide)
        state[f"{prefix}{key}"] = read


def _num_own(parameter: Any) -> int:
    """The length of this rank's part of a parameter."""
    return len(getattr(parameter, "_local_tensor", parameter))


def _divided_like(parameter: Any, part: Tensor, shape: tuple[int, ...]) -> Any:
    """The tensor of this shape of which this rank has a part, divided as the parameter is. On the meta device the part
    does not count.
    """
    from torch.distributed.tensor import DTensor

    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=strides,
    )


# -- mixtures of experts


def quantise_experts(module: nn.Module, kind: Kind) -> None:
    """Let a module without contents have rows of bytes in place of each tensor of all experts [E, ...], a row for each
    expert. They are widened for as long as the module computes, and once more in the backward pass.
    """
    experts: Any = module
    experts.formats, experts.wide_sizes, experts.factors = {}, {}, {}
    for key, parameter in list(module._parameters.items()):
        if parameter is None or parameter.ndim != 3:
            continue
        count, rows, columns = parameter.shape
        if rows * columns % BLOCK:
            raise ModelError(
                f"quantise={kind}: found experts of {rows} x {columns} numbers; expected a multiple of {BLOCK}; take "
                "the key out"
            )
        layout = Format(kind, (rows, columns))
        empty = torch.empty(count, layout.num_bytes, dtype=torch.uint8, device="meta")
        module._parameters[key] = nn.Parameter(empty, requires_grad=False)
        experts.formats[key], experts.wide_sizes[key] = layout, parameter.numel()
    experts.register_state_dict_post_hook(_as_read)
    experts.forward = MethodType(_experts_forward, module)


def _experts_forward(self: Any, hidden: Tensor, *rest: Any, **keywords: Any) -> Tensor:
    """The library's own forward with wide weights."""
    device, dtype = hidden.device.type, hidden.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    wide: dict[str, Tensor] = {}
    again: dict[int, Callable[[], Tensor]] = {}
    for key, layout in self.formats.items():
        rows, factors = self._parameters[key].detach(), self.factors.get(key)
        wide[key] = _adapted(layout, rows, dtype, factors)
        if factors is not None:
            factors = (factors[0].detach(), factors[1].detach(), factors[2])
        again[wide[key].untyped_storage()._cdata] = partial(_adapted, layout, rows, dtype, factors)
    module = copy.copy(self)
    module.__dict__["_parameters"] = {**self._parameters, **wide}
    with _saved_as_rows(again):
        result: Tensor = narrow(module, hidden, *rest, **keywords)
    return result


def _adapted(
    layout: Format, rows: Tensor, dtype: torch.dtype, factors: tuple[Tensor, Tensor, float] | None
) -> Tensor:
    """The numbers of all experts. ``factors``: an adapter's two matrices for each, and the scale of their product."""
    wide = layout.widen(rows, dtype)
    if factors is None:
        return wide
    left, right, scale = factors
    return torch.baddbmm(wide, left.to(dtype), right.to(dtype), alpha=scale)


@contextmanager
def experts_as_numbers(model: nn.Module) -> Iterator[None]:
    """Inside, quantised experts have the shapes of their numbers in float32, and no contents: peft makes adapters by
    them.
    """
    kept: list[tuple[nn.Module, str, nn.Parameter | None]] = []
    try:
        for module in model.modules():
            for key in getattr(module, "wide_sizes", {}):
                rows, experts = module._parameters[key], cast(Any, module)
                assert rows is not None, "its size is known"
                kept.append((module, key, rows))
                shape = (rows.shape[0], *experts.formats[key].shape)
                empty = torch.empty((), device=rows.device).expand(shape)
                module._parameters[key] = nn.Parameter(empty, requires_grad=False)
        yield
    finally:
        for module, key, parameter in kept:
            module._parameters[key] = parameter


@dataclass(frozen=True, slots=True)
class _View:
    """A view of a tensor that can be made again."""

    make: Callable[[], Tensor]
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


@contextmanager
def _saved_as_rows(again: Mapping[int, Callable[[], Tensor]]) -> Iterator[None]:
    """Inside, what autograd saves of these storages is made again in the backward pass. ``again``: a storage -> what
    makes its tensor. All else is saved as it would be outside, by the hooks of recomputation for one.
    """
    outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def pack(tensor: Tensor) -> Any:
        make = again.get(tensor.untyped_storage()._cdata)
        if make is not None:
            return _View(make, tensor.shape, tensor.stride(), tensor.storage_offset())
        return tensor.detach() if outer is None else outer[0](tensor)

    def unpack(saved: Any) -> Any:
        if isinstance(saved, _View):
            return saved.make().as_strided(saved.size, saved.stride, saved.offset)
        return saved if outer is None else outer[1](saved)

    with saved_tensors_hooks(pack, unpack):
        yield


# -- while reading


@contextmanager
def reading_rows() -> Iterator[None]:
    """Inside, the library's quantisers for bitsandbytes make layers of this file."""
    kinds: Any = AUTO_QUANTIZER_MAPPING
    before = {f"bitsandbytes_{bits}": kinds[f"bitsandbytes_{bits}"] for bits in ("4bit", "8bit")}
    problems: list[ModelError] = []
    report = problems.append  # not the list: the library copies what reads a weight
    kinds.update({name: _with_rows(quantiser, report) for name, quantiser in before.items()})
    try:
        yield
    except RuntimeError as error:  # "We encountered some issues"
        raise problems[0] if problems else error from error
    finally:
        kinds.update(before)


def _with_rows(quantiser: Any, report: Callable[[ModelError], None]) -> type:
    """A class of quantisers like ``quantiser``, for layers of this file. ``report`` takes what they refuse."""

    class WithRows(quantiser):  # type: ignore[misc]  # a class that is a value
        quantized_element_size: Any = None  # a row counts its bytes

        def _process_model_before_weight_loading(
            self, model: PreTrainedModel, **settings: Any
        ) -> None:
            super()._process_model_before_weight_loading(model, **settings)
            values: Any = self.quantization_config
            kind: Any = "int8" if values.load_in_8bit else values.bnb_4bit_quant_type
            in_routers = set() if self.pre_quantized else _in_routers(model)
            made = _made_while_reading(model)
            for name, module in list(model.named_modules()):
                made_of = getattr(module, "source_cls", None)  # of layers that the library replaced
                if made_of is None or not isinstance(module, nn.Linear):
                    continue
                layer: nn.Linear
                if id(module) in in_routers:
                    inputs, outputs = module.in_features, module.out_features
                    layer = nn.Linear(inputs, outputs, module.bias is not None, device="meta")
                else:
                    layer = QuantisedLinear(
                        module,
                        kind,
                        is_nested=values.bnb_4bit_use_double_quant,
                        is_transposed=made_of is Conv1D,
                    )
                    layer.is_read_in_rows = (
                        not (self.pre_quantized or layer.is_transposed)
                        and layer.format.has_blocks_in_rows
                        and not any(part in f"{name}.weight" for part in made)
                    )
                model.set_submodule(name, layer)
            if not self.pre_quantized:
                _quantise_all_experts(model, kind)

        def param_needs_quantization(
            self, model: PreTrainedModel, name: str, **settings: Any
        ) -> bool:
            place, _, key = name.rpartition(".")
            return key in getattr(model.get_submodule(place), "formats", {})

        def get_quantize_ops(self) -> ConversionOps:
            return _Quantise(report)

        def get_load_operations(self) -> dict[str, Any]:
            return {"deserialize": partial(_Repack, report)}

    return WithRows


def _made_while_reading(model: PreTrainedModel) -> set[str]:
    """Parts of the names of tensors that the library makes of others, in the files of some models of this class."""
    transforms = get_model_conversion_mapping(model)
    converters = [made for made in transforms if isinstance(made, WeightConverter)]
    return {
        pattern.rpartition("\\1")[2].strip(".^$")
        for made in converters
        for pattern in made.target_patterns
    }


def _in_routers(model: PreTrainedModel) -> set[int]:
    """The ids of modules that choose experts, which stay in float32."""
    layers = architecture.layers(model)
    routers = (router for layer in layers for router in architecture.routers(layer))
    return {id(module) for router in routers for module in router.modules()}


def _quantise_all_experts(model: PreTrainedModel, kind: Kind) -> None:
    """Raises ModelError where experts would stay as they are."""
    num_experts = architecture.num_experts(architecture.text_config(model))
    layers = nn.ModuleList(architecture.layers(model))
    for name, module in layers.named_modules():
        if name.split(".")[-1] == "experts":
            quantise_experts(module, kind)
    for name, parameter in layers.named_parameters():
        if num_experts and parameter.ndim == 3 and parameter.shape[0] == num_experts:
            raise ModelError(
                f"quantise={kind}: found the experts {name} in {type(model).__name__}; expected them in a module named "
                "experts; take the key out: they are stored in float32 then"
            )


def _part_of(parameter: Any, row: Tensor) -> nn.Parameter:
    """The part of a row that this rank keeps."""
    if hasattr(parameter, "full_tensor"):
        part = DtensorShardOperation(parameter).shard_tensor(row)
        assert part is not None, "what is one tensor has a slice for each rank"
        row = part.clone()  # without the memory of the rest
    return nn.Parameter(row, requires_grad=False)


class _Quantise(ConversionOps):
    """A weight, or what this rank read of it -> this rank's part of its row, or the rows of its experts."""

    def __init__(self, report: Callable[[ModelError], None]) -> None:
        self.report = report

    def convert(
        self, input_dict: dict[str, Any], *_: Any, model: Any = None, **__: Any
    ) -> dict[str, Any]:
        rows = {}
        for name, found in input_dict.items():
            place, _dot, key = name.rpartition(".")
            module = model.get_submodule(place)
            weight = found[0] if isinstance(found, list) else found
            try:
                rows[name] = _row_in(module, key, weight)
            except ModelError as error:
                self.report(error)
                raise
        return rows


def _row_in(module: Any, key: str, weight: Tensor) -> nn.Parameter:
    """The parameter that a quantised weight of a module is on this rank."""
    parameter, layout = module._parameters[key], module.formats[key]
    if not isinstance(module, QuantisedLinear):
        num_own = _num_own(parameter)
        made = torch.empty(num_own, layout.num_bytes, dtype=torch.uint8, device=weight.device)
        for row, expert in zip(made, weight[:num_own], strict=True):
            row.copy_(layout.quantise(expert))
        return nn.Parameter(made, requires_grad=False)
    if module.is_read_in_rows and hasattr(parameter, "full_tensor"):
        return _part_of(parameter, _quantised_together(layout, weight, parameter))
    return _part_of(parameter, layout.quantise(module.in_checkpoint(weight)))


@torch.no_grad()
def _quantised_together(layout: Format, some: Tensor, parameter: Any) -> Tensor:
    """The row of a weight of which each rank has read some rows."""
    mesh = parameter.device_mesh
    axis = mesh.ndim - 1  # the others have replicas
    length = -(-layout.shape[0] // mesh.size(axis))
    expected = len(range(layout.shape[0])[mesh.get_local_rank(axis) * length :][:length])
    if len(some) != expected:
        raise ModelError(
            f"found {len(some)} rows as this rank's part of a weight of {list(layout.shape)}; expected {expected}, as "
            "config.json says; copy the model's files again"
        )
    widths = layout.bytes_of_a_row
    found = layout.codes_of(some) if len(some) else (some, some)
    flat = (part.contiguous().view(torch.uint8) for part in found)
    own = torch.cat([part.view(len(some), n) for part, n in zip(flat, widths, strict=True)], 1)
    whole = _divided_like(parameter, own, (layout.shape[0], sum(widths))).full_tensor()
    largest, codes = whole.split(widths, 1)
    return layout.row_of(largest.contiguous().view(torch.float32).view(-1), codes)


class _Repack(ConversionOps):
    """The tensors that bitsandbytes stores of a weight -> this rank's part of its row."""

    def __init__(self, report: Callable[[ModelError], None], hf_quantizer: Any) -> None:
        self.report = report
        self.hf_quantizer = hf_quantizer  # by which the library knows not to convert what it reads

    def convert(
        self,
        input_dict: dict[str, Any],
        *_: Any,
        model: Any = None,
        full_layer_name: str = "",
        **__: Any,
    ) -> dict[str, Any]:
        if len(input_dict) == 1:  # a weight that is not quantised
            return input_dict
        tensors = {
            name: found[0] if isinstance(found, list) else found
            for name, found in input_dict.items()
        }
        layer = model.get_submodule(full_layer_name.rpartition(".")[0])
        try:
            if layer.format.kind != "int8":
                tensors = _unpacked(tensors, layer.format, full_layer_name)
            row = layer.format.pack(tensors)
        except ModelError as error:
            self.report(error)
            raise
        return {"weight": _part_of(layer.weight, row)}


def _unpacked(tensors: Mapping[str, Tensor], expected: Format, name: str) -> dict[str, Tensor]:
    """The parts of a 4-bit weight by the names of ``Format.parts``. Raises for blocks of another size, or other values,
    than bitsandbytes writes by itself.
    """
    from bitsandbytes import functional

    codes = tensors["weight"]
    constants = {key: tensor for key, tensor in tensors.items() if key != "weight"}
    state = functional.QuantState.from_dict(constants, device=codes.device)
    found: dict[str, Any] = {
        "type": state.quant_type,
        "nested": state.nested,
        "block": state.blocksize,
    }
    wanted: dict[str, Any] = {"type": expected.kind, "nested": expected.is_nested, "block": BLOCK}
    if expected.is_nested and state.nested:
        values = _nested_values(codes.device)
        is_usual = torch.equal(state.state2.code.float(), values)
        found |= {"nested block": state.state2.blocksize, "usual values": is_usual}
        wanted |= {"nested block": NESTED_BLOCK, "usual values": True}
    found["shape"], wanted["shape"] = list(state.shape), list(expected.shape)
    if found != wanted:
        raise ModelError(
            f"{name} comes quantised by bitsandbytes with {_listed(found)}; expected {_listed(wanted)}; start from the "
            "model it was made from, with quantise=nf4"
        )
    parts = {"absmax": state.absmax, "weight": codes}
    if state.nested:
        parts |= {"nested_offset": state.offset, "nested_absmax": state.state2.absmax}
    return parts


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


# -- after reading


def require_inside(model: PreTrainedModel) -> None:
    """Refuse a model of which more was quantised than linear layers of the decoder."""
    inside = {id(module) for module in architecture.layers(model).modules()}
    for name, module in quantised_layers(model):
        if id(module) not in inside:
            raise ModelError(
                f"{name} of {type(model).__name__} was quantised; expected linear layers of the decoder only; "
                "please report the model"
            )


def quantised_layers(model: nn.Module) -> Iterator[tuple[str, QuantisedLinear]]:
    """Names and modules of linear layers whose weight is a row of bytes."""
    for name, module in model.named_modules():
        if isinstance(module, QuantisedLinear):
            yield name, module


def quantised_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and modules of experts whose weights are rows of bytes, one for each expert."""
    for name, module in model.named_modules():
        if "wide_sizes" in vars(module):
            yield name, module


def names_of_rows(model: nn.Module) -> list[str]:
    """The parameters that are rows of bytes."""
    layers = [f"{name}.weight" for name, _ in quantised_layers(model)]
    experts = [
        f"{name}.{key}" for name, module in quantised_experts(model) for key in module.formats
    ]
    return layers + experts


@torch.no_grad()
def error_of(layout: Format, row: Tensor, source: Tensor) -> float:
    """The largest error of the weights that a whole ``row`` stands for, relative to the largest that its format makes
    of the ``source``: half the distance of neighbouring values of nf4, with what the block's maximum loses in 8 bits;
    half a step of int8.
    """
    wide, source = layout.widen(row, torch.float32).cpu(), source.float()
    if wide.shape != source.shape:
        return torch.inf
    error = (wide - source).abs()
    if layout.kind != "int8":
        error, source = (_in_blocks(tensor.reshape(1, -1), BLOCK) for tensor in (error, source))
        largest = source.abs().amax(-1)
        around = _in_blocks(largest[None], NESTED_BLOCK).amax(-1, keepdim=True)
        around = around.expand(-1, NESTED_BLOCK).reshape(-1)[: len(largest)]
        allowed = (NF4_HALF_GAP * largest + NESTED_LOSS * around)[:, None]
    else:
        allowed = INT8_HALF_STEP * source.abs().amax(1, keepdim=True) + HALF_LOSS * source.abs()
    ratio = error / allowed.clamp_min(torch.finfo(torch.float32).tiny)
    return float(ratio.max().nan_to_num(nan=torch.inf))


def _in_blocks(row: Tensor, size: int) -> Tensor:
    """[1, n] -> [blocks, size], with zeros at the end."""
    return nn.functional.pad(row, (0, -row.shape[1] % size)).view(-1, size)


def pretend(
    model: PreTrainedModel, how: Quantise, whole: Sequence[str], *, has_experts: bool
) -> None:
    """Give a model without contents (on the meta device) the layers of a quantised one, for a plan. ``has_experts``:
    its experts are quantised too.
    """
    names = {id(module): name for name, module in model.named_modules()}
    in_routers = _in_routers(model)
    for module in list(architecture.layers(model).modules()):
        name = names[id(module)]
        is_whole = any(f".{kept}." in f".{name}." for kept in whole)
        if type(module) is nn.Linear and not is_whole and id(module) not in in_routers:
            model.set_submodule(name, QuantisedLinear(module, how))
    if has_experts:
        _quantise_all_experts(model, how)


def pretended(config: PreTrainedConfig) -> Quantise | None:
    """How the linear layers of a checkpoint that comes quantised are stored, for a plan."""
    if format_of(config) != "bitsandbytes":
        return None
    return "nf4" if _quantisation(config).get("load_in_4bit") else "int8"


def wide_weights(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of ``model``, or some of it, in which quantised weights are the numbers that they stand for, in
    float32.
    """
    wide = dict(state)
    for name, module in model.named_modules():
        for key, layout in getattr(module, "formats", {}).items():
            if f"{name}.{key}" not in wide:
                continue
            numbers = layout.widen(wide[f"{name}.{key}"], torch.float32)
            if isinstance(module, QuantisedLinear):
                numbers = module.in_checkpoint(numbers).contiguous()
            wide[f"{name}.{key}"] = numbers
    return wide
