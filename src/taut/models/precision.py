"""Compute dtypes, the contexts that apply them, and oneDNN's matrix products for float32 on a CPU.

    float32    parameters and arithmetic in float32
    bfloat16   float32 parameters (the masters that the optimizer updates), arithmetic under autocast
    float64    parameters and arithmetic in float64, including the library's hidden casts to float32: RMSNorm, softmax
               and RoPE of most models compute in float32 by name; ``Wide`` turns those casts into float64

float64 is for verification: two layouts of the same samples agree to 1e-12 or better instead of 1e-8. Nothing here
changes a parameter.

PyTorch passes float32 products on a CPU to MKL. oneDNN, which is part of PyTorch too, takes half the time and less for
more than a few rows where MKL does not use the processor's widest instructions (on AMD's, for one), and the same
elsewhere. Both round as float32 does: measured on rows of 576 and 1,536 numbers, the mean distance from float64 is
2.3e-7 and 3.9e-7 for MKL, 3.3e-7 and 7.5e-7 for oneDNN. In training the rows are cut into blocks of few sizes, and the
rest is MKL's: oneDNN keeps half a megabyte for every shape it has met, and micro-batches come in many (0.8 GB after
1,440 shapes; nothing with blocks). Other dtypes and devices and autocast are left alone, and so are small products in
training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from taut.errors import ConfigError, ModelError

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
_CPU_BF16 = ("amx_bf16", "avx512_bf16", "sve_bf16", "bf16")
"""CPU capabilities for bf16 arithmetic, as torch names them."""
_NARROW = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class ChosenDtype:
    """The compute dtype of a run."""

    dtype: torch.dtype
    reason: str

    @property
    def parameters(self) -> torch.dtype:
        """The dtype of the parameters that the optimizer updates."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


def resolve_dtype(requested: str | None, device: torch.device) -> ChosenDtype:
    """The compute dtype for a run on ``device``: by default bfloat16 where the hardware has it, else float32."""
    if requested is not None and requested not in DTYPES:
        raise ConfigError(f"dtype={requested} is not known; expected one of {', '.join(DTYPES)}")
    has_bf16, reason = False, f"bf16 arithmetic of device type {device.type} is not known"
    if device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        reason = f"the GPU has {'' if has_bf16 else 'no '}bf16 arithmetic"
        if requested == "bfloat16" and not has_bf16:
            raise ModelError(f"dtype=bfloat16: {device} has no bf16 arithmetic; set dtype=float32")
    elif device.type == "cpu":
        capability = next((c for c in _CPU_BF16 if torch.cpu.get_capabilities().get(c)), None)
        has_bf16 = capability is not None
        reason = f"the CPU has none of {', '.join(_CPU_BF16)}"
        if has_bf16:
            reason = f"the CPU has bf16 arithmetic ({capability})"
    if requested is not None:
        return ChosenDtype(DTYPES[requested], "asked for by name")
    return ChosenDtype(torch.bfloat16 if has_bf16 else torch.float32, reason)


# -- contexts --------------------------------------------------------------------------------------


def compute_context(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Any]:
    """The context of a forward pass: autocast for bfloat16, ``Wide`` for float64, oneDNN for float32 on a CPU."""
    if dtype == torch.bfloat16:
        return torch.autocast(device.type, dtype=torch.bfloat16)
    if dtype == torch.float32 and device.type == "cpu":
        return OneDnn(takes_small=False)
    return backward_context(dtype)


def backward_context(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """The context of a backward pass: ``Wide`` for float64, else none (autocast is for forwards only)."""
    if dtype == torch.float64:
        return Wide()  # type: ignore[no-untyped-call]  # torch: no types
    return nullcontext()


def recompute_contexts(
    dtype: torch.dtype, device: torch.device
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of activation checkpointing: of a layer's forward, and of its recomputation, where torch restores
    autocast itself and ``backward_context`` is active.
    """
    recomputing = nullcontext() if dtype != torch.float32 else compute_context(dtype, device)
    return nullcontext(), recomputing


@contextmanager
def cast_once(model: nn.Module) -> Iterator[None]:
    """Inside autocast and without gradient: cast a frozen weight once, not at every call.

    Autocast keeps the cast only of parameters that require a gradient, so they all do inside the block. Sharded weights
    are gathered again at every call and are left alone.
    """
    frozen = [
        parameter
        for parameter in model.parameters()
        if not parameter.requires_grad
        and parameter.is_floating_point()
        and not hasattr(parameter, "full_tensor")
    ]
    assert not torch.is_grad_enabled(), "the graph would hold what is frozen"
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


class Wide(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch: no types
    """Turns every request for a narrower float dtype into float64."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in _NARROW:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


# -- oneDNN's products -----------------------------------------------------------------------------
MIN_ROWS = 4
"""With fewer rows, MKL's matrix-vector product is as fast."""
MIN_SIZE = 2**24
"""Rows times inputs times outputs: below this, oneDNN's overhead in Python exceeds its gain in training."""
BLOCKS = (4096, 2048, 1024, 512, 256)
"""Rows of oneDNN's products in training."""


class OneDnn(TorchFunctionMode):
    """Inside it, ``linear`` in float32 on a CPU is oneDNN's.

    ``takes_small``: all but the smallest products, without gradients: for engines. Otherwise large ones and their
    gradients, with the same bits where no gradient is wanted: for training.
    """

    def __init__(self, *, takes_small: bool = True) -> None:
        super().__init__()
        self.takes_small = takes_small

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not functional.linear or kwargs or not _is_ours(*args[:2]):
            return func(*args, **(kwargs or {}))
        x, weight, bias = (*args, None)[:3]
        if self.takes_small:
            if not torch.is_grad_enabled() and x.numel() >= MIN_ROWS * x.shape[-1]:
                return _product(x, weight, bias)
        elif x.numel() * weight.shape[0] >= MIN_SIZE:
            return _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return func(*args)


class _Linear(torch.autograd.Function):
    """x W^T + b with three products of oneDNN's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = _by_blocks(x.reshape(-1, x.shape[-1]), weight)
        if bias is not None:
            out += bias
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad = grad.reshape(-1, grad.shape[-1])
        grad_x = _by_blocks(grad, weight.T).view(x.shape) if needs_x else None
        grad_weight: Tensor | None = None
        if needs_weight:
            x = x.reshape(-1, x.shape[-1])
            assert x.shape[0], "a product of no rows is not taken"
            for rows, is_block in _blocks(x.shape[0]):
                left, right = grad[rows].T, x[rows]
                part = _product(left, right.T) if is_block else left @ right
                grad_weight = part if grad_weight is None else grad_weight.add_(part)
        return grad_x, grad_weight, grad.sum(0) if needs_bias else None


def product_into(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """out = x W^T as in training, for products that are no ``linear`` of the model."""
    if _is_ours(x, weight) and x.numel() * weight.shape[0] >= MIN_SIZE:
        _by_blocks(x, weight, out)
    else:
        torch.mm(x, weight.T, out=out)


def _by_blocks(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """x W^T"""
    if out is None:
        out = x.new_empty(x.shape[0], weight.shape[0])
    for rows, is_block in _blocks(x.shape[0]):
        if is_block:
            out[rows] = _product(x[rows], weight)
        else:
            torch.mm(x[rows], weight.T, out=out[rows])
    return out


def _blocks(num_rows: int) -> Iterator[tuple[slice, bool]]:
    """Consecutive slices of the rows, and whether the size of each is one of ``BLOCKS``."""
    at = 0
    for size in BLOCKS:
        while num_rows - at >= size:
            yield slice(at, at + size), True
            at += size
    if at < num_rows:
        yield slice(at, num_rows), False


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b"""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


def _is_ours(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and type(x) in (Tensor, nn.Parameter)
        and type(weight) in (Tensor, nn.Parameter)
        and not torch.is_autocast_enabled("cpu")
    )
