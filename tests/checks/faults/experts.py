"""Faults of a mixture of experts."""

from __future__ import annotations

from typing import Any

from tests.checks.planting import Place, fault
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from taut.attention.decode import Decoding
from taut.checks.session import Session


@fault("engine.logps", says="engine and trainer differ")
def experts_chosen_otherwise_while_generating(place: Place, is_faulty: bool) -> Session:
    """New tokens go to other experts than the same tokens in training: class 20."""
    forward, attend = Qwen3MoeTopKRouter.forward, Decoding.attend
    is_decoding = [False]

    def marked(self: Decoding, *args: Any) -> Tensor:
        is_decoding[0] = True
        return attend(self, *args)

    def routed(self: Any, hidden_states: Tensor) -> Any:
        sign = -1 if is_decoding[0] else 1
        is_decoding[0] = False
        return forward(self, sign * hidden_states)

    if is_faulty:
        place.patch.setattr(Decoding, "attend", marked)
        place.patch.setattr(Qwen3MoeTopKRouter, "forward", routed)
    return place.session(place.model("qwen3_moe"))
