"""A mixture of experts: routers compute in float32, experts in bfloat16; routers recorded for the load-balancing loss.

A router chooses by small differences, and another choice is no rounding: it computes in float32 on hidden states of any
dtype, and gives its result in theirs.

The experts of a layer are single tensors. Their products are no operators of autocast, and would be in float32, the
dtype of the weights: so they are computed with weights and hidden states cast, as those of linear layers are. The casts
are kept for the backward pass; an engine makes them once (``precision.cast_once``).

For the load-balancing loss (taut/losses/router.py) ``RouterRecorder`` records the routers' choices in a forward. The
routers, and which of their outputs are the logits, are those that transformers itself records for the loss; a model
whose module of the library has no such loss is refused. Logits are taken before they are narrowed (``widen``). Nothing
is recorded outside ``recording``: not in the forwards of a reference or an engine, nor where activation checkpointing
runs a layer again. So what a layer's loss needs for its backward pass, the probabilities, is kept and not computed
again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from taut.errors import ModelError
from taut.models import architecture
from taut.models.precision import cast_weight
from taut.models.settings import RouterConfig

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


# -- routers recorded for the load-balancing loss


class RouterRecorder:
    """Records the routers of a model. ``shape``: [L, E], of L routers and E experts."""

    def __init__(self, model: nn.Module, coef: float) -> None:
        self.routers, self.index = _routers(model, coef)
        config: Any = architecture.text_config(model)
        self.top_k: int = config.num_experts_per_tok
        self.shape = (len(self.routers), architecture.num_experts(config))
        self._weight_T: Tensor | None = None
        self._prob_E: dict[int, Tensor] = {}
        self._count_E: dict[int, Tensor] = {}
        for number, router in enumerate(self.routers):
            router.forward = MethodType(partial(widen, note=partial(self._note, number)), router)

    @contextmanager
    def recording(self, weight_T: Tensor) -> Iterator[None]:
        """Record the forward inside the block, in which each token has a weight; ``sums`` has the result."""
        self._weight_T, self._prob_E, self._count_E = weight_T, {}, {}
        try:
            yield
        finally:
            self._weight_T = None

    def sums(self) -> tuple[Tensor, Tensor]:
        """The sums over tokens of the probabilities [L, E], with their gradient, and of the choices [L, E]."""
        found = [(self._prob_E[i], self._count_E[i]) for i in range(len(self.routers))]
        self._prob_E, self._count_E = {}, {}
        prob_E, count_E = zip(*found, strict=True)
        return torch.stack(prob_E), torch.stack(count_E)

    def _note(self, number: int, result: Any) -> None:
        if self._weight_T is None:
            return
        logits_TE = result[self.index].reshape(self._weight_T.numel(), -1)
        weight_T1 = self._weight_T.to(logits_TE)[:, None]
        # Inside the hooks of activation checkpointing these tensors would be computed again. No product: selective
        # checkpointing would keep it, and look for it when the layer runs again.
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            prob_TE = logits_TE.softmax(-1)
            self._prob_E[number] = (prob_TE * weight_T1).sum(0)
        with torch.no_grad():
            chosen = logits_TE.topk(self.top_k, dim=-1).indices
            self._count_E[number] = (
                torch.zeros_like(logits_TE).scatter_(1, chosen, 1.0).mul_(weight_T1).sum(0)
            )


def recorder_of(model: nn.Module, config: RouterConfig) -> RouterRecorder | None:
    """The recorder, where the loss is on."""
    return RouterRecorder(model, config.aux_loss_coef) if config.aux_loss_coef else None


def _routers(model: nn.Module, coef: float) -> tuple[list[nn.Module], int]:
    """The routers, in order, and the index of the logits among a router's outputs."""
    inner, text = architecture.unwrap(model), architecture.language_model(model)
    found: Any = (getattr(text, "_can_record_outputs", None) or {}).get("router_logits")
    has_loss = hasattr(sys.modules[type(inner).__module__], "load_balancing_loss_func")
    routers: list[nn.Module] = []
    if has_loss and hasattr(found, "target_class"):
        routers = [
            module
            for module in architecture.layers(model).modules()
            if isinstance(module, found.target_class) and not hasattr(module, "experts")
        ]
    if not routers:
        has_experts = architecture.num_experts(architecture.text_config(model))
        lacks = "for which transformers has no load-balancing loss"
        what = lacks if has_experts else "which has no routers"
        raise ModelError(
            f"router.aux_loss_coef={coef:g}: found {type(inner).__name__}, {what}; expected a mixture of experts such "
            "as Mixtral, Qwen3-MoE, OLMoE or gpt-oss; take the key out"
        )
    return routers, found.index
