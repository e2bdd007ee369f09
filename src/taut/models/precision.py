"""Compute dtypes and the contexts that apply them.

    float32    parameters and arithmetic in float32
    bfloat16   float32 parameters (the masters that the optimizer updates); arithmetic under autocast on one device, and
               by weights that are gathered in bfloat16 where they are sharded (train/distributed.py)
    float64    parameters and arithmetic in float64, including the library's hidden casts to float32: RMSNorm, softmax
               and RoPE of most models compute in float32 by name; ``Wide`` turns those casts into float64

float64 is for verification: two layouts of the same samples agree to 1e-12 or better instead of 1e-8. Nothing here
changes a parameter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from taut.config import Decision
from taut.errors import ConfigError, ModelError

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
_CPU_BF16 = ("amx_bf16", "avx512_bf16", "sve_bf16", "bf16")
"""CPU capabilities for bf16 arithmetic, as torch names them."""
NARROW = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that ``Wide`` turns into float64."""
_casts: ContextVar[dict[Tensor, Tensor] | None] = ContextVar("casts", default=None)
"""Weight -> its cast, inside ``cast_once``."""


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
            raise no_bf16(torch.cuda.get_device_name(device))
    elif device.type == "cpu":
        capability = cpu_bf16()
        has_bf16 = capability is not None
        reason = f"the CPU has none of {', '.join(_CPU_BF16)}"
        if has_bf16:
            reason = f"the CPU has bf16 arithmetic ({capability})"
    if requested is not None:
        return ChosenDtype(DTYPES[requested], "asked for by name")
    return ChosenDtype(torch.bfloat16 if has_bf16 else torch.float32, reason)


def no_bf16(name: str) -> ModelError:
    """The error of bfloat16 on a GPU that is too old for it, as T4 and V100 are: the run and its plan refuse it."""
    text = (
        f"dtype=bfloat16: {name} has no bf16 arithmetic; expected float32 there; set dtype=float32"
    )
    return ModelError(text, code="no-bf16")


def cpu_bf16() -> str | None:
    """The CPU's capability for bf16 arithmetic."""
    return next((name for name in _CPU_BF16 if torch.cpu.get_capabilities().get(name)), None)


def use_arithmetic(
    dtype: torch.dtype, device: torch.device, *, tf32: bool, deterministic: bool
) -> list[Decision]:
    """Set PyTorch's own switches of this process, and say what they are. Raises ConfigError for TF32 without a CUDA
    device. Only what is asked for is set on other devices.
    """
    decisions = []
    if tf32 and (device.type != "cuda" or dtype == torch.float64):
        is_float64 = device.type == "cuda"
        found = "dtype=float64" if is_float64 else f"device={device.type}"
        raise ConfigError(
            f"tf32=true with {found}; expected products of float32 on a CUDA device; leave it out"
        )
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        reason = "float32 products keep 10 bits of their inputs" if tf32 else "not asked for"
        decisions.append(Decision("tf32", str(tf32).lower(), reason))
    if deterministic:
        # Read when cuBLAS starts, which is after this.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(mode=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        reason = "an operation that has no reproducible algorithm is refused with its name"
        decisions.append(Decision("deterministic", "true", reason))
    elif torch.are_deterministic_algorithms_enabled():
        reason = "not asked for, but set by this program, or by an earlier run in it"
        decisions.append(Decision("deterministic", "true", reason))
    return decisions


# -- contexts --------------------------------------------------------------------------------------


def compute_context(
    dtype: torch.dtype, device: torch.device, *, by_weights: bool = False
) -> AbstractContextManager[Any]:
    """The context of a forward pass: autocast for bfloat16, ``Wide`` for float64, none for float32. ``by_weights``: the
    weights themselves are in ``dtype`` while they are multiplied.
    """
    if dtype == torch.bfloat16 and not by_weights:
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return backward_context(dtype)


def backward_context(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """The context of a backward pass: ``Wide`` for float64, else none (autocast is for forwards only)."""
    if dtype == torch.float64:
        return Wide()  # type: ignore[no-untyped-call]  # torch: no types
    return nullcontext()


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
    token = _casts.set({})
    try:
        yield
    finally:
        _casts.reset(token)
        for parameter in frozen:
            parameter.requires_grad_(False)


def cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight in another dtype, for operators that autocast does not know; inside ``cast_once`` it is cast once."""
    casts = _casts.get()
    if casts is None or not isinstance(weight, nn.Parameter):
        return weight.to(dtype)
    if weight not in casts:
        casts[weight] = weight.to(dtype)
    return casts[weight]


class Wide(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch: no types
    """Turns every request for a narrower float dtype into float64. Graphs of compiled layers are widened when they are
    made (``compiled_layers``).
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in NARROW:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)
