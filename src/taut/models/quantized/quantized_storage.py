"""A quantized weight as a row of bytes: the constants of its format, then the codes (``Format``).

A quantized layer has one parameter, that row. Each of several ranks keeps a part of it, cut at any byte, and FSDP
gathers the row where the layer runs. A product widens its weight first (``cpu_matmul.linear_from_stored``), so
activations are not rounded, as LLM.int8 would, and no packed sample has a part in another's numbers. bitsandbytes' own
layers are not used: on some CPUs their forward changes the stored bytes as soon as a model is evaluated, and it
rewrites biases.

How a model is read with such layers is quantized_layers.py.
"""

from __future__ import annotations

import copy
import math
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

from taut.errors import ModelError
from taut.models.cpu.cpu_matmul import linear_from_stored
from taut.models.experts import narrow

BLOCK, NESTED_BLOCK = 64, 256
"""Weights under one maximum in nf4, and maxima under one of theirs."""

NF4_HALF_GAP, NESTED_LOSS = 0.155, 0.01
"""Half the largest distance of two values of nf4 (0.152), and what 8 bits take of a maximum, relative to the largest
around it."""

INT8_HALF_STEP, HALF_LOSS = 0.51 / 127, 2**-10
"""Half a step of int8, and the loss of float16, through which bitsandbytes quantizes to int8."""

Kind = Literal["nf4", "fp4", "int8"]


@dataclass(frozen=True, slots=True)
class Format:
    """How a weight lies in a row of bytes, whose length is a multiple of 4."""

    kind: Kind
    shape: tuple[int, int]
    """Of the weight: outputs, inputs."""
    is_nested: bool = True
    """Whether the maxima of 4-bit blocks are quantized to 8 bits themselves."""

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
        """Whether no block has numbers of two rows of the weight, so that rows can be quantized apart."""
        return self.kind == "int8" or self.shape[1] % BLOCK == 0

    @property
    def bytes_of_a_row(self) -> tuple[int, int]:
        """The maxima's and the codes' bytes of one row of the weight, where it has whole blocks."""
        columns = self.shape[1]
        return (4, columns) if self.kind == "int8" else (4 * columns // BLOCK, columns // 2)

    def quantize(self, weight: Tensor) -> Tensor:
        """The row of a weight."""
        return self.row_of(*self.codes_of(weight))

    @torch.no_grad()
    def codes_of(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The maxima (float32) of a weight, or of some rows of it, and its codes."""
        from bitsandbytes import functional

        if weight.shape[-1] != self.shape[1]:
            raise ModelError(
                f"found a weight of {list(weight.shape)} to quantize; expected {list(self.shape)}, or rows of it, as "
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
        quantize: Any = functional.quantize_blockwise
        rounded, state = quantize(largest - offset, blocksize=NESTED_BLOCK)
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
            values = nested_values(row.device)[largest.int()]
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
def nested_values(device: torch.device) -> Tensor:
    """The 256 values by which maxima of blocks are quantized."""
    from bitsandbytes import functional

    make: Any = functional.create_dynamic_map
    with _disable_current_modes():
        # what is kept has contents, also where it was asked for on fake tensors
        values: Tensor = make().to(device)
    return values


class QuantizedLinear(nn.Linear):
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
    """A hook of state dicts by which the library reads of a tensor what this rank quantizes of it."""
    for key, layout in module.formats.items():
        parameter = module._parameters[key]
        if not parameter.is_meta:
            continue
        shape, wide = parameter.shape, (*parameter.shape[:-1], *layout.shape)
        read: Any = torch.empty(shape, dtype=parameter.dtype, device="meta")
        # A rank without experts reads them all: the library puts together no empty list of them.
        is_in_parts = getattr(module, "is_read_in_rows", num_own(parameter) > 0)
        if is_in_parts and hasattr(parameter, "full_tensor"):
            read = divided_like(parameter, torch.empty(wide, device="meta"), wide)
        state[f"{prefix}{key}"] = read


def num_own(parameter: Any) -> int:
    """The length of this rank's part of a parameter."""
    return len(getattr(parameter, "_local_tensor", parameter))


def divided_like(parameter: Any, part: Tensor, shape: tuple[int, ...]) -> Any:
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


def quantize_experts(module: nn.Module, kind: Kind) -> None:
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
                f"quantize={kind}: found experts of {rows} x {columns} numbers; expected a multiple of {BLOCK}; take "
                "the key out"
            )
        layout = Format(kind, (rows, columns))
        empty = torch.empty(count, layout.num_bytes, dtype=torch.uint8, device="meta")
        module._parameters[key] = nn.Parameter(empty, requires_grad=False)
        experts.formats[key], experts.wide_sizes[key] = layout, parameter.numel()
    experts.register_state_dict_post_hook(_as_read)
    experts.forward = MethodType(_experts_forward, module)


def stacked_experts(name: str, module: nn.Module) -> list[str]:
    """The tensors of all experts [E, ...] in the module of this name, if it is one of experts."""
    own = module._parameters.items() if "experts" in name.split(".") else ()
    return [key for key, p in own if p is not None and p.ndim == 3 and p.is_floating_point()]


@dataclass(frozen=True, slots=True)
class Stored:
    """The format of weights that are numbers of fewer bits."""

    shape: tuple[int, ...]
    """Of the weight of an expert."""

    def widen(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """The weights in ``dtype``."""
        return rows.to(dtype)


def widen_experts(module: nn.Module, keys: Sequence[str]) -> None:
    """Let a module of experts compute with these tensors, which are narrow, as with wide ones."""
    experts: Any = module
    experts.formats = {key: Stored(experts._parameters[key].shape[1:]) for key in keys}
    experts.factors = {}
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
    layout: Format | Stored,
    rows: Tensor,
    dtype: torch.dtype,
    factors: tuple[Tensor, Tensor, float] | None,
) -> Tensor:
    """The numbers of all experts. ``factors``: an adapter's two matrices for each, and the scale of their product,
    which is added to codes in ``dtype``, to numbers in the adapter's dtype, as peft does.
    """
    if factors is None:
        return layout.widen(rows, dtype)
    left, right, scale = factors
    within = left.dtype if isinstance(layout, Stored) else dtype
    with torch.autocast(rows.device.type, enabled=False):
        wide = layout.widen(rows, within)
        return torch.baddbmm(wide, left.to(within), right.to(within), alpha=scale).to(dtype)


@contextmanager
def experts_as_numbers(model: nn.Module) -> Iterator[None]:
    """Inside, experts that are quantized or narrow have the shapes of their numbers in float32, and no contents: peft
    makes adapters by them.
    """
    kept: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for module in model.modules():
            for key in getattr(module, "formats", {}) if hasattr(module, "factors") else ():
                rows, experts = module._parameters[key], cast(Any, module)
                assert rows is not None, "its size is known"
                kept.append((module, key, rows))
                shape = (rows.shape[0], *experts.formats[key].shape)
                empty = torch.empty((), device=rows.device).expand(shape)
                module._parameters[key] = nn.Parameter(empty, requires_grad=False)
        yield
    finally:
        for module, key, parameter in kept:
            parameter.requires_grad_(False)  # peft has frozen it by the name
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


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    """Names and modules of linear layers whose weight is a row of bytes."""
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            yield name, module


def quantized_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and modules of experts whose weights are rows of bytes, one for each expert."""
    for name, module in model.named_modules():
        if "wide_sizes" in vars(module):
            yield name, module


def names_of_rows(model: nn.Module) -> list[str]:
    """The parameters that are rows of bytes."""
    layers = [f"{name}.weight" for name, _ in quantized_layers(model)]
    experts = [
        f"{name}.{key}" for name, module in quantized_experts(model) for key in module.formats
    ]
    return layers + experts


@torch.no_grad()
def error_of(layout: Format, row: Tensor, source: Tensor) -> float:
    """The largest error of the weights that a whole ``row`` stands for, relative to the largest that its format makes
    of the ``source``: half the distance of neighboring values of nf4, with what the block's maximum loses in 8 bits;
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


def wide_weights(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of ``model``, or some of it, in which quantized weights are the numbers that they stand for, in
    float32.
    """
    wide = dict(state)
    for name, module in model.named_modules():
        for key, layout in getattr(module, "formats", {}).items():
            if f"{name}.{key}" not in wide:
                continue
            numbers = layout.widen(wide[f"{name}.{key}"], torch.float32)
            if isinstance(module, QuantizedLinear):
                numbers = module.in_checkpoint(numbers).contiguous()
            wide[f"{name}.{key}"] = numbers
    return wide
