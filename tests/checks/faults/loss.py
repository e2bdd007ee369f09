"""Faults of the loss and its gradient, and of the weights and the head behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.checks.planting import Place, fault
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen2 import modeling_qwen2

from taut.checks.session import Session
from taut.data import batching
from taut.losses.supervised import CrossEntropy
from taut.models import scorer
from taut.run import setup
from taut.train import trainer as loop
from taut.types import Packed


def _loaded(place: Place, change: Callable[[PreTrainedModel], None]) -> None:
    """The model is changed as the library's loading might have."""
    load = setup.load_model

    def wrong(*args: Any, **keywords: Any) -> PreTrainedModel:
        model = load(*args, **keywords)
        change(model)
        return model

    place.patch.setattr(setup, "load_model", wrong)


def _mlp(place: Place, change: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
    """Each MLP's output is changed: ``change(module, input, output)``."""
    forward = modeling_qwen2.Qwen2MLP.forward
    place.patch.setattr(
        modeling_qwen2.Qwen2MLP, "forward", lambda self, x: change(self, x, forward(self, x))
    )


@fault("model.finite", says="layers.1.mlp.up_proj.weight")
def a_weight_that_is_not_a_number(place: Place, is_faulty: bool) -> Session:
    """One value of the checkpoint is NaN."""
    model = place.model()
    weights = load_file(model / "model.safetensors")
    if is_faulty:
        weights["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    return place.session(model)


@fault("model.finite", says="first in the output of model.layers.0")
def activations_that_overflow(place: Place, is_faulty: bool) -> Session:
    """Weights are finite and what they give is not: an exponential without a bound."""
    if is_faulty:
        _mlp(place, lambda _, x, given: given + torch.exp(1e3 * x.abs()))
    return place.session()


@fault("model.noise", says="layers.0.mlp")
def dropout_that_the_config_does_not_name(place: Place, is_faulty: bool) -> Session:
    """A layer drops values in training by a rate of its own."""
    if is_faulty:
        _mlp(place, lambda self, _, given: nn.functional.dropout(given, 0.2, self.training))
    return place.session()


@fault("model.noise", says="layers.0")
def layers_that_are_skipped_at_random(place: Place, is_faulty: bool) -> Session:
    """Stochastic depth: in training every other layer is left out, by chance."""
    if is_faulty:
        forward = modeling_qwen2.Qwen2DecoderLayer.forward
        drawn = iter([True, False, False, True] * 1000)

        def skipped(self: Any, hidden_states: Tensor, *args: Any, **keywords: Any) -> Tensor:
            if self.training and next(drawn):
                return hidden_states
            return forward(self, hidden_states, *args, **keywords)

        place.patch.setattr(modeling_qwen2.Qwen2DecoderLayer, "forward", skipped)
    return place.session()


@fault("model.noise", says="random numbers")
def noise_that_is_always_on(place: Place, is_faulty: bool) -> Session:
    """A layer adds noise in evaluation too."""
    if is_faulty:
        _mlp(place, lambda _, __, given: given + 0.1 * torch.randn_like(given))
    return place.session()


@fault("model.head", says="target")
def a_softcap_that_is_dropped(place: Place, is_faulty: bool) -> Session:
    """The chunked head forgets the softcap that the model's own head has."""
    if is_faulty:
        _chunked(place, softcap=None)
    return place.session(place.model("gemma2"))


@fault("model.head", says="gradient formed in the forward")
def a_target_read_one_row_late(place: Place, is_faulty: bool) -> Session:
    """The way that the run takes reads the next row's token; the other way is right."""
    if is_faulty:
        apply = scorer.LinearHead.apply

        def shifted(*args: Any) -> Any:
            *inputs, target_N, linear_N, teacher = args
            return apply(*inputs, target_N.roll(1), linear_N, teacher)

        place.patch.setattr(scorer.LinearHead, "apply", shifted)
    return place.session()


def _chunked(place: Place, **changes: Any) -> None:
    """The chunked head is given another description of the head."""
    init = scorer.Chunks.__init__

    def wrong(self: Any, *args: Any) -> None:
        init(self, *args)
        fields = {name: getattr(self.spec, name) for name in ("weight", "bias", "softcap", "rows")}
        self.spec = type(self.spec)(**{**fields, "scale": self.spec.scale, **changes})

    place.patch.setattr(scorer.Chunks, "__init__", wrong)


@fault("loss.head_gradient", says="with respect to the")
def a_derivative_without_the_softcap(place: Place, is_faulty: bool) -> Session:
    """The head's backward leaves out what the softcap does to the gradient."""
    if is_faulty:
        place.patch.setattr(scorer.Chunks, "to_raw", lambda self, grad, z: grad)
    return place.session(place.model("gemma2"))


@fault("loss.head_gradient", says="from that of log_softmax")
def a_derivative_without_the_scale(place: Place, is_faulty: bool) -> Session:
    """The head's backward leaves out the factor on the logits."""
    if is_faulty:
        place.patch.setattr(scorer.Chunks, "to_raw", lambda self, grad, z: grad)
    return place.session(place.model("granite"))


@fault("loss.dtype", says="layers.1.mlp.down_proj.weight is in bfloat16")
def a_submodule_in_bfloat16(place: Place, is_faulty: bool) -> Session:
    """What the optimizer updates is not in full precision."""
    if is_faulty:
        _loaded(place, lambda model: model.model.layers[1].mlp.down_proj.to(torch.bfloat16))
    return place.session(dtype="bfloat16")


@fault("loss.dtype", says="inv_freq has the digits of bfloat16")
def frequencies_in_bfloat16(place: Place, is_faulty: bool) -> Session:
    """RoPE's frequencies were rounded when the model was cast, and cast back."""

    def narrow(model: Any) -> None:
        buffer = model.model.rotary_emb.inv_freq
        buffer.copy_(buffer.to(torch.bfloat16))

    if is_faulty:
        _loaded(place, narrow)
    return place.session()


@fault("loss.dtype", says="mlp computes in bfloat16")
def a_layer_that_computes_in_bfloat16(place: Place, is_faulty: bool) -> Session:
    """A layer casts down and up again, as a fused kernel might."""

    def narrow(self: Any, x: Tensor, given: Tensor) -> Tensor:
        up = x.to(torch.bfloat16) @ self.up_proj.weight.to(torch.bfloat16).T
        return given + 1e-3 * up.mean(-1, keepdim=True).to(given.dtype)

    if is_faulty:
        _mlp(place, narrow)
    return place.session(dtype="float32")


@fault("loss.dtype", says="dtype=bfloat16 is not applied")
def autocast_that_is_switched_off(place: Place, is_faulty: bool) -> Session:
    """The model's forward leaves autocast, so that bfloat16 is asked for and not in use."""
    if is_faulty:
        for name in ("Qwen2Model", "Qwen2ForCausalLM"):
            kind = getattr(modeling_qwen2, name)
            forward = kind.forward

            def plain(self: Any, *args: Any, _forward: Any = forward, **keywords: Any) -> Any:
                with torch.autocast("cpu", enabled=False):
                    return _forward(self, *args, **keywords)

            place.patch.setattr(kind, "forward", plain)
        place.patch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    return place.session(dtype="bfloat16")


@fault("loss.tied", says="two tensors")
def a_head_that_is_no_longer_tied(place: Place, is_faulty: bool) -> Session:
    """Loading gave the head a copy of the embedding."""

    def part(model: Any) -> None:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())

    if is_faulty:
        _loaded(place, part)
    return place.session()


@fault("loss.tied", says="two tensors")
def adapters_on_a_head_that_is_no_longer_tied(place: Place, is_faulty: bool) -> Session:
    """The same under adapters, where one of the two trains by rows."""

    def part(model: Any) -> None:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())

    if is_faulty:
        _loaded(place, part)
    return place.session(lora__rank=4)


@fault("loss.adapter_start", says="lora_B.default.weight is not zero")
def an_adapter_that_starts_at_random(place: Place, is_faulty: bool) -> Session:
    """Both of an adapter's matrices are drawn at random."""
    if is_faulty:
        from peft.tuners.lora.layer import LoraLayer

        reset = LoraLayer.reset_lora_parameters

        def wrong(self: Any, name: str, *args: Any, **keywords: Any) -> None:
            reset(self, name, *args, **keywords)
            nn.init.normal_(self.lora_B[name].weight, std=0.05)

        place.patch.setattr(LoraLayer, "reset_lora_parameters", wrong)
    return place.session(lora__rank=4)


@fault("loss.reached", says="layers.0.mlp")
def a_layer_that_is_detached(place: Place, is_faulty: bool) -> Session:
    """A layer's output leaves the graph."""
    if is_faulty:
        _mlp(place, lambda self, x, given: given.detach())
    return place.session()


@fault("loss.reached", says="activation_checkpointing=false")
def adapters_that_are_cut_off(place: Place, is_faulty: bool) -> Session:
    """The layers run outside the graph, as under reentrant checkpointing of a frozen input: no adapter learns."""
    if is_faulty:
        forward = modeling_qwen2.Qwen2DecoderLayer.forward
        place.patch.setattr(modeling_qwen2.Qwen2DecoderLayer, "forward", torch.no_grad()(forward))
    return place.session(lora__rank=4, lora__train_token_rows="never")


@fault("loss.reached", says="exactly zero")
def a_branch_multiplied_by_zero(place: Place, is_faulty: bool) -> Session:
    """A gate of zero: the branch behind it is computed and counts for nothing."""
    if is_faulty:
        _mlp(place, lambda self, x, given: 0.0 * given)
    return place.session()


@fault("loss.gradient", says="not finite")
def a_derivative_that_is_infinite(place: Place, is_faulty: bool) -> Session:
    """The square root of zero: its value is fine, its derivative is not."""
    if is_faulty:
        _mlp(place, lambda self, x, given: given + (0.0 * x).sqrt())
    return place.session()


@fault("loss.linear", says="weight")
def weights_that_are_not_the_derivative(place: Place, is_faulty: bool) -> Session:
    """The gradient is formed from weights of 1/2 while the loss that is reported counts whole targets."""
    if is_faulty:
        place.patch.setattr(
            CrossEntropy,
            "linear_weights",
            lambda self, packed: {"cross_entropy": -0.5 * packed.weight_N},
        )
    return place.session()


@fault("loss.first", says="left out")
def a_micro_batch_that_is_lost(place: Place, is_faulty: bool) -> Session:
    """The last micro-batch of each step is never computed."""
    if is_faulty:
        some = loop.plan_microbatches
        place.patch.setattr(loop, "plan_microbatches", lambda *args: some(*args)[:-1])
    return place.session(batch__tokens_per_microbatch=64)


@fault("data.packing", says="other targets")
def targets_that_sharing_loses(place: Place, is_faulty: bool) -> Session:
    """A target that several samples have in a shared prefix is listed once."""
    if is_faulty:
        pack = batching.pack

        def once(*args: Any) -> Packed:
            packed = pack(*args)
            keys = list(zip(packed.predictor_N.tolist(), packed.target_N.tolist(), strict=True))
            kept = torch.tensor([key not in keys[:at] for at, key in enumerate(keys)])
            names = ("predictor_N", "target_N", "weight_N", "row_N")
            changed = {name: getattr(packed, name)[kept] for name in names}
            return type(packed)(**{**vars(packed), **changed})

        place.patch.setattr(batching, "pack", once)
    return place.session(data=place.data(_turns()))


def _turns() -> list[dict[str, Any]]:
    """Chats of two turns that share the first, its answer included."""
    begun = [
        {"role": "user", "content": "the cat ran over a big red house"},
        {"role": "assistant", "content": "then the dog saw some birds in the blue sky"},
    ]
    ends = ("a cat", "a dog", "the birds", "the red house", "the blue sky", "some cat")
    more = [
        [{"role": "user", "content": f"and {end}"}, {"role": "assistant", "content": end}]
        for end in ends
    ]
    return [{"messages": begun + two} for two in more]


@fault("loss.first", says="another count")
def a_mean_over_sequences(place: Place, is_faulty: bool) -> Session:
    """The loss is divided by the number of samples where it should be by that of targets."""
    if is_faulty:
        place.patch.setattr(loop, "count_units", lambda unit, packed: float(packed.num_samples))
    return place.session()


@fault("loss.splits", says="is taken over micro-batches")
def a_mean_of_means(place: Place, is_faulty: bool) -> Session:
    """Each micro-batch is divided by its own count."""
    if is_faulty:
        backward, denominators = loop.backward, loop.denominators
        num: list[int] = []

        def counted(loss: Any, microbatches: Any, *rest: Any) -> dict[str, float]:
            num.append(len(microbatches))
            return denominators(loss, microbatches, *rest)

        def own(trainer: Any, packed: Packed, scales: dict[str, float], *rest: Any) -> Any:
            share = 1.0 / (num[-1] * float(packed.weight_N.sum()))
            return backward(trainer, packed, dict.fromkeys(scales, share), *rest)

        place.patch.setattr(loop, "denominators", counted)
        place.patch.setattr(loop, "backward", own)
    return place.session()


@fault("loss.packed", says="attention=reference")
def a_kernel_whose_backward_is_wrong(place: Place, is_faulty: bool) -> Session:
    """The forward is exact; the gradient of the values is twice what it should be."""
    from taut.models import attention_backends

    if is_faulty:
        plain = attention_backends.BACKENDS["reference"]

        def twice(query: Tensor, key: Tensor, value: Tensor, layout: Any, call: Any) -> Tensor:
            return plain(query, key, 2.0 * value - value.detach(), layout, call)

        place.patch.setitem(attention_backends.BACKENDS, "reference", twice)
    return place.session()
