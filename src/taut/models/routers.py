"""What the routers of a mixture of experts choose in a forward, for their load-balancing loss (taut/losses/router.py).

The routers, and which of their outputs are the logits, are those that transformers itself records for the loss; a model
whose module of the library has no such loss is refused. Logits are taken before they are narrowed
(``experts.widen``). Nothing is recorded outside ``recording``: not in the forwards of a reference or an engine, nor
where activation checkpointing runs a layer again. So what a layer's loss needs for its backward pass, the
probabilities, is kept and not computed again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from taut.config import configclass
from taut.errors import ModelError
from taut.losses.router import RouterLossKind
from taut.models import architecture
from taut.models.experts import widen


@configclass
class RouterConfig:
    """The load-balancing loss of a mixture of experts."""

    aux_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the routers' load-balancing loss (router_aux_loss_coef of transformers). 0: there is none. Adds a
    forward without gradient to each step, which counts the tokens of each expert."""
    aux_loss: RouterLossKind = "pooled"
    """pooled: of all layers together, as transformers; per_layer: the sum over layers of each one's, as Megatron-LM."""


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
