"""Faults that only training shows: schedules, updates, and what cannot be learned."""

from __future__ import annotations

from typing import Any

import torch
from tests.checks.planting import Place, fault
from torch import Tensor
from transformers.models.qwen2 import modeling_qwen2

from taut.checks.session import Session
from taut.run import setup


@fault("fit.schedule", says="step 1: 0")
def a_schedule_counted_from_zero(place: Place, is_faulty: bool) -> Session:
    """The warm-up gives the first step a rate of 0, so that it is thrown away."""
    if is_faulty:
        place.patch.setattr(
            setup, "learning_rate", lambda step, total, config: 1e-3 * (step - 1) / total
        )
    return place.session()


@fault("fit.schedule", says="of 20 steps")
def a_decay_that_ends_half_way(place: Place, is_faulty: bool) -> Session:
    """The schedule believes the run to be half as long."""
    if is_faulty:
        place.patch.setattr(
            setup,
            "learning_rate",
            lambda step, total, config: 1e-3 * max(0.0, 1 - 2 * (step - 1) / total),
        )
    return place.session()


@fault("fit.update", says="no weight changes")
def a_rate_below_rounding(place: Place, is_faulty: bool) -> Session:
    """A learning rate so small that float32 weights stay what they are."""
    return place.session(dtype="float32", optim__learning_rate=1e-30 if is_faulty else 1e-3)


@fault("fit.update", says="lower optim.learning_rate")
def a_rate_beyond_reason(place: Place, is_faulty: bool) -> Session:
    """A learning rate of 3: one step leaves nothing of the model."""
    return place.session(optim__learning_rate=3.0 if is_faulty else 1e-3)


@fault("fit.update", says="uphill")
def an_optimizer_that_maximizes(place: Place, is_faulty: bool) -> Session:
    """The optimizer adds the gradient."""
    if is_faulty:
        make = setup.build_optimizer

        def wrong(*args: Any) -> torch.optim.AdamW:
            optimizer = make(*args)
            for group in optimizer.param_groups:
                group["maximize"] = True
            return optimizer

        place.patch.setattr(setup, "build_optimizer", wrong)
    return place.session()


@fault("fit.overfit", says="freeze")
def a_freeze_that_leaves_one_norm(place: Place, is_faulty: bool) -> Session:
    """A pattern freezes everything but the first norm of the last layer."""
    rest = ["*proj*", "*embed*", "model.norm*", "*.layers.0.*", "*post_att*"]
    frozen = rest if is_faulty else ["*.layers.0.*"]
    return place.session(freeze=frozen)


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return -grads[0]


@fault("fit.overfit", says="not learned by heart")
def a_gradient_of_the_wrong_sign(place: Place, is_faulty: bool) -> Session:
    """The model's last norm hands the gradient back with its sign changed."""
    if is_faulty:
        forward = modeling_qwen2.Qwen2Model.forward

        def wrong(self: Any, *args: Any, **keywords: Any) -> Any:
            given = forward(self, *args, **keywords)
            given.last_hidden_state = _Reversed.apply(given.last_hidden_state)
            return given

        place.patch.setattr(modeling_qwen2.Qwen2Model, "forward", wrong)
    return place.session(freeze=["*embed*"])
