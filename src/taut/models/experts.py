"""A mixture of experts in bfloat16: routers compute in float32, experts in bfloat16.

A router chooses by small differences, and another choice is no rounding: it computes in float32 on hidden states of any
dtype, and gives its result in theirs.

The experts of a layer are single tensors. Their products are no operators of autocast, and would be in float32, the
dtype of the weights: so they are computed with weights and hidden states cast, as those of linear layers are. The casts
are kept for the backward pass; an engine makes them once (``precision.cast_once``).
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from taut.models import architecture
from taut.models.precision import cast_weight

GROUPED_MULTIPLE = 8
"""The grouped product takes rows of a multiple of 16 bytes."""


def widen_routers(model: nn.Module) -> None:
    """Let the routers of a model, whose weights are in float32, compute in it."""
    for layer in architecture.layers(model):
        for router in architecture.routers(layer):
            router.forward = MethodType(widen, router)


def widen(
    self: nn.Module,
    hidden: Tensor,
    *rest: Any,
    note: Callable[[Any], None] = lambda _: None,
    **keywords: Any,
) -> Any:
    """A router's own forward in the dtype of its weights. ``note`` is called with the result before it is narrowed."""
    dtype = next(self.parameters()).dtype
    with torch.autocast(hidden.device.type, enabled=False):
        wide = _cast((hidden, *rest), dtype)
        result = type(self).forward(self, *wide, **_cast(keywords, dtype))
        note(result)
    return _cast(result, hidden.dtype)


def narrow_experts(model: nn.Module) -> None:
    """Let the experts of a model compute in autocast's dtype, where it is on. Sizes that the grouped product does not
    take in bfloat16 are computed expert by expert.
    """
    for layer in architecture.layers(model):
        for name, module in layer.named_modules():
            stacked = [weight for weight in module.parameters(recurse=False) if weight.ndim == 3]
            if "experts" not in name.split(".") or not stacked:
                continue
            module.forward = MethodType(narrow, module)
            if any(size % GROUPED_MULTIPLE for weight in stacked for size in weight.shape[1:]):
                experts: Any = module
                experts.config._experts_implementation = "eager"


def narrow(self: nn.Module, hidden: Tensor, *rest: Any, **keywords: Any) -> Any:
    """A module's own forward in autocast's dtype, where it is on."""
    forward: Any = type(self).forward
    if not torch.is_autocast_enabled(hidden.device.type):
        return forward(self, hidden, *rest, **keywords)
    dtype = torch.get_autocast_dtype(hidden.device.type)
    inputs = _cast((hidden, *rest), dtype)
    return forward(_Narrowed(self, dtype), *inputs, **_cast(keywords, dtype))


class _Narrowed:
    """A module whose weights are read in another dtype."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.module, self.dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.module, name)
        is_weight = isinstance(value, Tensor) and value.is_floating_point()
        return cast_weight(value, self.dtype) if is_weight else value


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, value)
