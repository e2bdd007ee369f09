"""Faults of the run as it was built: what was asked and is not in force, steps, the disk, what is saved."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from tests.checks.planting import Place, fault
from tests.helpers.peft_adapters import KINDS, make
from torch import Tensor, nn
from transformers import PreTrainedModel

from taut.checks.session import Session
from taut.data.order import Cursor, Order
from taut.data.packing import PackPolicy
from taut.models import recompute, save
from taut.models.precision import ChosenDtype
from taut.models.settings import LoraConfig
from taut.run import setup
from taut.train import optim
from taut.train.settings import OptimConfig

# -- settings that are not applied


@fault("run.in_force", says="freeze *.mlp.*: asked frozen")
def freezing_that_names_and_does_not_freeze(place: Place, is_faulty: bool) -> Session:
    """The names are found and told, and the parameters train on."""
    if is_faulty:
        place.patch.setattr(setup, "freeze", lambda model, patterns: ["model.layers.0.mlp"])
    return place.session(freeze=["*.mlp.*"])


@fault(
    "run.in_force", says="activation_checkpointing: asked true in 2 layers, found false in 0 layers"
)
def checkpointing_that_no_layer_hears_of(place: Place, is_faulty: bool) -> Session:
    """The model takes the request and passes it on to nobody."""
    if is_faulty:
        place.patch.setattr(
            PreTrainedModel, "activation_checkpointing_enable", lambda *_, **__: None, raising=True
        )
    return place.session(activation_checkpointing=True)


@fault(
    "run.in_force",
    says="activation_checkpointing: asked selective in 2 layers, found false in 0 layers",
)
def selective_checkpointing_that_keeps_nothing(place: Place, is_faulty: bool) -> Session:
    """Every operator is computed again."""
    if is_faulty:
        place.patch.setattr(recompute, "_is_dear", lambda *_: False)
    return place.session(activation_checkpointing="selective")


@fault("run.in_force", says="router.aux_loss_coef: asked 0.1, pooled, found 0.01, pooled")
def a_routers_loss_with_another_coefficient(place: Place, is_faulty: bool) -> Session:
    """The step adds the loss as the model's own configuration has it."""
    make = setup.Trainer

    def other(*args: Any, **keys: Any) -> Any:
        return make(*args, **{**keys, "router": replace(keys["router"], aux_loss_coef=0.01)})

    if is_faulty:
        place.patch.setattr(setup, "Trainer", other)
    return place.session(place.model("qwen3_moe"), router__aux_loss_coef=0.1)


@fault("run.in_force", says="lora.alpha: asked a scale of 4")
def an_alpha_that_is_not_read(place: Place, is_faulty: bool) -> Session:
    """Adapters are made with the default scale."""
    make = setup.apply_lora

    def forgetful(model: PreTrainedModel, config: LoraConfig, *rest: Any) -> Any:
        return make(model, replace(config, alpha=None), *rest)

    if is_faulty:
        place.patch.setattr(setup, "apply_lora", forgetful)
    return place.session(lora__rank=2, lora__alpha=8.0)


@fault(
    "run.in_force",
    says="asked a scale of 0.5 and 2 and 4, found a scale of 2 (model.layers.0.self_attn",
)
def an_adapters_own_alphas_that_are_not_read(place: Place, is_faulty: bool) -> Session:
    """The adapter that the run goes on with has other alphas for some modules, and gets one for all."""
    make_adapted = setup.apply_lora
    base = place.model("llama", dtype=torch.float64)
    make(KINDS["alpha_pattern"], base, place.directory / "adapter")

    def forgetful(*given: Any) -> Any:
        model: Any = make_adapted(*given)
        model.peft_config["default"].alpha_pattern = {}
        for module in model.modules():
            if hasattr(module, "lora_A"):
                module.scaling["default"] = 2.0
        return model

    if is_faulty:
        place.patch.setattr(setup, "apply_lora", forgetful)
    return place.session(base, lora__adapter=str(place.directory / "adapter"))


@fault("run.in_force", says="not model.layers.0.mlp.down_proj")
def adapters_on_attention_alone(place: Place, is_faulty: bool) -> Session:
    """All linear modules were asked for, and the library's own short list is used."""
    make = setup.apply_lora

    def short(model: PreTrainedModel, config: LoraConfig, *rest: Any) -> Any:
        return make(model, replace(config, targets=["q_proj", "v_proj"]), *rest)

    if is_faulty:
        place.patch.setattr(setup, "apply_lora", short)
    return place.session(lora__rank=2)


@fault("run.in_force", says="optim.weight_decay: asked 0.1 on matrices")
def norms_that_decay(place: Place, is_faulty: bool) -> Session:
    """Weight decay is put on norms and biases too, and pulls them to zero."""
    make = optim.build_optimizer

    def everywhere(model: nn.Module, config: OptimConfig, *more: Any) -> torch.optim.AdamW:
        optimizer = make(model, config, *more)
        for group in optimizer.param_groups:
            group["weight_decay"] = config.weight_decay
        return optimizer

    if is_faulty:
        place.patch.setattr(setup, "build_optimizer", everywhere)
    return place.session(optim__weight_decay=0.1)


@fault("run.in_force", says="optim.beta2: asked 0.95, found 0.999")
def optimizer_settings_that_get_lost(place: Place, is_faulty: bool) -> Session:
    """The optimizer is made with its own defaults beside the learning rate."""
    make = optim.build_optimizer

    def plain(model: nn.Module, config: OptimConfig, *more: Any) -> torch.optim.AdamW:
        return make(model, OptimConfig(learning_rate=config.learning_rate), *more)

    if is_faulty:
        place.patch.setattr(setup, "build_optimizer", plain)
    return place.session(optim__beta2=0.95)


@fault("run.in_force", says="batch.share_prefixes: asked True, found False")
def sharing_that_is_dropped_without_a_word(place: Place, is_faulty: bool) -> Session:
    """Prefixes are computed again and again, and no decision says why."""
    if is_faulty:
        place.patch.setattr(setup, "build_policy", lambda *_, **__: (PackPolicy(False, 16), []))
    return place.session()


@fault("run.in_force", says="dtype: asked float64, found float32")
def a_dtype_that_is_not_used(place: Place, is_faulty: bool) -> Session:
    """float64 was asked for, and the model computes in float32."""
    other = ChosenDtype(torch.float32, "asked for by name")
    if is_faulty:
        place.patch.setattr(setup, "resolve_dtype", lambda requested, device: other)
    return place.session(dtype="float64")


@fault("run.in_force", says="noise.neftune_alpha: asked 5, found 0")
def noise_that_is_not_installed(place: Place, is_faulty: bool) -> Session:
    """NEFTune was asked for, and no hook adds it."""
    if is_faulty:
        place.patch.setattr(setup, "install_noise", lambda model, config, seed: None)
    return place.session(noise__neftune_alpha=5.0)


@fault("run.in_force", says="optim.clip_grad_norm: asked 0.5, found None")
def clipping_that_is_forgotten(place: Place, is_faulty: bool) -> Session:
    """The trainer is made without the largest norm."""
    make = setup.Trainer
    if is_faulty:
        place.patch.setattr(
            setup, "Trainer", lambda **parts: make(**{**parts, "clip_grad_norm": None})
        )
    return place.session(optim__clip_grad_norm=0.5)


# -- which samples a step has


@fault("run.steps", says="other samples when it is prepared again")
def an_order_without_a_seed(place: Place, is_faulty: bool) -> Session:
    """Each process shuffles in its own way, so a resumed run sees other samples."""
    make = Order._make_epoch
    random = np.random.default_rng()
    if is_faulty:
        place.patch.setattr(
            Order,
            "_make_epoch",
            lambda order, epoch: random.permutation(make(order, epoch)),
        )
    return place.session()


@fault("run.steps", says="after a resume step")
def a_resume_that_begins_a_step_late(place: Place, is_faulty: bool) -> Session:
    """Going on from a cursor skips the samples of a step."""

    def late(order: Order, cursor: Cursor, epochs: float | None) -> Order:
        return replace(order, origin=Cursor(cursor.step, cursor.samples + order.samples_per_step))

    if is_faulty:
        going_on = Order.continue_from
        place.patch.setattr(
            Order,
            "continue_from",
            lambda order, cursor, epochs: (
                late(order, cursor, epochs) if cursor.step else going_on(order, cursor, epochs)
            ),
        )
    return place.session()


@fault("run.steps", says="epochs=2.0 makes 4")
def epochs_that_are_cut_short(place: Place, is_faulty: bool) -> Session:
    """The last step of the second epoch is dropped."""
    if is_faulty:
        plain = Order.num_steps
        place.patch.setattr(Order, "num_steps", lambda order, n: plain(order, n) - (n > 1))
    return place.session(steps=None, epochs=2.0)


# -- out, and the disk


@fault("run.output", says="is a file")
def an_out_below_a_file(place: Place, is_faulty: bool) -> Session:
    """The directory cannot be made: there is a file where its parent should be."""
    out = place.directory / "runs" / "a"
    if is_faulty:
        out.parent.write_text("notes")
    return place.session(out=str(out))


@fault("run.output", says="holds files that are not a taut run")
def an_out_with_files_of_others(place: Place, is_faulty: bool) -> Session:
    """Overwriting is asked for in a directory that is not a run's."""
    out = place.directory / "notes"
    out.mkdir()
    if is_faulty:
        (out / "thesis.txt").write_text("the only copy")
    return place.session(out=str(out), overwrite=True)


class _Disk(NamedTuple):
    total: int
    used: int
    free: int


@fault("run.output", says="are needed at")
def a_disk_that_holds_no_checkpoint(place: Place, is_faulty: bool) -> Session:
    """The disk has less room than one checkpoint and the model take."""
    full, usage = _Disk(10**9, 10**9 - 10**6, 10**6), shutil.disk_usage

    def of_out(path: Path) -> object:
        return full if Path(path).is_relative_to(place.directory) else usage(path)

    if is_faulty:
        place.patch.setattr(shutil, "disk_usage", of_out)
    return place.session(out=str(place.directory / "out"), checkpoint__every=5)


# -- what is saved


@fault("run.saved", says="merge: a difference")
def a_merge_that_leaves_the_adapters_out(place: Place, is_faulty: bool) -> Session:
    """What is saved is the base model; training was for nothing."""
    if is_faulty:
        place.patch.setattr(LoraLinear, "merge", lambda *_, **__: None)
    return place.session(lora__rank=4)


@fault("run.saved", says="lm_head")
def a_head_that_is_tied_on_saving(place: Place, is_faulty: bool) -> Session:
    """Head and embedding, which are two, are made one as the merged model is written."""
    groups_of = save.plain_groups

    def tied(model: Any, *arguments: Any) -> Iterator[dict[str, Tensor]]:
        for group in groups_of(model, *arguments):
            if "lm_head.weight" in group:
                group["lm_head.weight"] = model.get_input_embeddings().weight.detach()
            yield group

    session = place.session(place.model("llama"), lora__rank=2)
    if is_faulty:
        place.patch.setattr(save, "plain_groups", tied)
    return session


@fault("run.saved", says="tensors, merged and reloaded")
def weights_that_are_rounded_on_the_way(place: Place, is_faulty: bool) -> Session:
    """The checkpoint was in float32, and what is saved has been through bfloat16."""
    groups_of = save.plain_groups

    def rounded(*arguments: Any) -> Iterator[dict[str, Tensor]]:
        for group in groups_of(*arguments):
            yield {name: tensor.bfloat16().float() for name, tensor in group.items()}

    session = place.session()
    if is_faulty:
        place.patch.setattr(save, "plain_groups", rounded)
    return session


@fault("run.usual", says="optim.weight_decay=10", part="quick", outcome="warning")
def a_weight_decay_in_percent(place: Place, is_faulty: bool) -> Session:
    """Ten percent, of which nothing would be left after some steps."""
    return place.session(optim__weight_decay=10.0 if is_faulty else 0.1)


@fault("run.usual", says="epochs=100", part="quick", outcome="warning")
def steps_that_go_round_a_hundred_times(place: Place, is_faulty: bool) -> Session:
    """The number of steps is that of a larger set of rows."""
    return place.session(steps=200 if is_faulty else 20)


@fault("run.usual", says="optim.learning_rate=1", part="quick", outcome="warning")
def a_learning_rate_without_its_exponent(place: Place, is_faulty: bool) -> Session:
    """1e-3 became 1."""
    return place.session(optim__learning_rate=1.0 if is_faulty else 1e-3)
