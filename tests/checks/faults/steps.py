"""Faults of a step: what is computed beside the model, counted otherwise, or left out on the way to the update."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from peft import LoraConfig
from tests.checks.planting import Place, fault
from torch import Tensor
from transformers.models.qwen2 import modeling_qwen2

from taut.attention.layout import Call, Layout
from taut.checks.session import Session
from taut.models import attention_backends
from taut.run import setup
from taut.train import distributed
from taut.train import trainer as loop
from taut.types import Packed


@fault("attention.calls", says="1 of 2 attention layers")
def a_layer_that_is_left_out(place: Place, is_faulty: bool) -> Session:
    """Given a layout, the model runs all layers but the last."""
    forward = modeling_qwen2.Qwen2DecoderLayer.forward

    def wrong(self: Any, hidden_states: Tensor, *args: Any, **keywords: Any) -> Any:
        is_last = self.self_attn.layer_idx == 1 and "taut_layout" in keywords
        return hidden_states if is_last else forward(self, hidden_states, *args, **keywords)

    if is_faulty:
        place.patch.setattr(modeling_qwen2.Qwen2DecoderLayer, "forward", wrong)
    return place.session(freeze=["*.layers.1.*"])


@fault("attention.packed", says="by the library")
def embeddings_that_are_scaled_twice(place: Place, is_faulty: bool) -> Session:
    """In the forward that trains the hidden states begin larger than in the library's."""
    forward = modeling_qwen2.Qwen2DecoderLayer.forward

    def wrong(self: Any, hidden_states: Tensor, *args: Any, **keywords: Any) -> Any:
        if self.self_attn.layer_idx == 0 and "taut_layout" in keywords:
            hidden_states = hidden_states * 1.5
        return forward(self, hidden_states, *args, **keywords)

    if is_faulty:
        place.patch.setattr(modeling_qwen2.Qwen2DecoderLayer, "forward", wrong)
    return place.session()


@fault("attention.packed", says="attention=reference")
def a_kernel_with_a_scale_of_its_own(place: Place, is_faulty: bool) -> Session:
    """The kernel divides by the root of a head's size, and the model asks for another scale."""
    plain = attention_backends.BACKENDS["reference"]

    def wrong(q: Tensor, k: Tensor, v: Tensor, layout: Layout, call: Call) -> Tensor:
        return plain(q, k, v, layout, replace(call, scale=q.shape[-1] ** -0.5))

    if is_faulty:
        place.patch.setitem(attention_backends.BACKENDS, "reference", wrong)
    return place.session(place.model("granite"))


@fault("loss.splits", says="the gradient of")
def a_gradient_divided_by_micro_batches(place: Place, is_faulty: bool) -> Session:
    """Accumulation divides by the number of micro-batches what was divided by the count of targets before."""
    if is_faulty:
        cut, summed = loop.plan_microbatches, loop.backward
        number = [1]

        def counted(*args: Any) -> list[Packed]:
            found = cut(*args)
            number[0] = len(found)
            return found

        def divided(trainer: Any, packed: Packed, scales: dict[str, float], *rest: Any) -> Any:
            return summed(trainer, packed, {k: v / number[0] for k, v in scales.items()}, *rest)

        place.patch.setattr(loop, "plan_microbatches", counted)
        place.patch.setattr(loop, "backward", divided)
    return place.session()


@fault("run.in_force", says="lora.rank: asked 2, found 8")
def rank_and_alpha_in_each_others_place(place: Place, is_faulty: bool) -> Session:
    """Adapters of rank 8 with an alpha of 2, where 2 and 8 were asked for."""
    if is_faulty:

        def swapped(**settings: Any) -> LoraConfig:
            rank, alpha = settings["r"], settings["lora_alpha"]
            return LoraConfig(**{**settings, "r": int(alpha), "lora_alpha": rank})

        place.patch.setattr("peft.LoraConfig", swapped)
    return place.session(lora__rank=2, lora__alpha=8.0)


@fault("run.in_force", says="optim.weight_decay: asked 0.1")
def weight_decay_that_is_forgotten(place: Place, is_faulty: bool) -> Session:
    """The optimizer is made without weight decay."""
    if is_faulty:
        make = setup.build_optimizer
        place.patch.setattr(
            setup,
            "build_optimizer",
            lambda scorer, config, *more: make(scorer, replace(config, weight_decay=0.0), *more),
        )
    return place.session(optim__weight_decay=0.1)


@fault("fit.update", says="optim.clip_grad_norm is not applied")
def clipping_that_clips_nothing(place: Place, is_faulty: bool) -> Session:
    """The norm is measured, and the gradient left as it is."""
    if is_faulty:
        clip = distributed.clip_gradients
        place.patch.setattr(distributed, "clip_gradients", lambda tensors, _: clip(tensors, None))
    return place.session(optim__clip_grad_norm=0.01)
