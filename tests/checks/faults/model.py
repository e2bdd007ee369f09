"""Faults of the model directory and of what was asked to train."""

from __future__ import annotations

import json
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.checks.planting import Place, fault
from torch import Tensor
from torch.fx import GraphModule, Node

from taut.checks.session import Session
from taut.models import compiled_layers
from taut.models.cpu import faster_layers
from taut.models.quantized import quantized_storage


@fault("model.loads", says="lacks 1 weight")
def a_weight_that_is_missing(place: Place, is_faulty: bool) -> Session:
    """A checkpoint without one of its tensors: the library would draw it at random, with a warning."""
    model = place.model()
    if is_faulty:
        (path,) = model.glob("*.safetensors")
        tensors = load_file(path)
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, path, metadata={"format": "pt"})
    return place.session(model)


@fault("model.loads", says="varlen")
def a_kernel_that_is_not_to_be_had(place: Place, is_faulty: bool) -> Session:
    """Attention asked for by name that this machine has not."""
    return place.session(attention="varlen" if is_faulty else "reference")


@fault("model.loads", says="dropout")
def attention_dropout_in_the_config(place: Place, is_faulty: bool) -> Session:
    """Dropout inside attention: noise that would depend on what is packed with what."""
    model = place.model()
    path = model / "config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "attention_dropout": 0.1 if is_faulty else 0.0}))
    return place.session(model)


@fault("model.trains", says="lora.targets")
def adapters_on_modules_that_are_not_there(place: Place, is_faulty: bool) -> Session:
    """Names of another architecture's projections."""
    targets = ["query_key_value"] if is_faulty else ["q_proj"]
    return place.session(lora__rank=4, lora__targets=targets)


@fault("model.quantized", says="not those of the checkpoint")
def quantized_weights_of_another_row(place: Place, is_faulty: bool) -> Session:
    """Codes that are read in another order, as older versions of the libraries left them when they were moved."""
    if is_faulty:
        pack = quantized_storage.Format.pack

        def pack_shifted(self: quantized_storage.Format, parts: Mapping[str, Tensor]) -> Tensor:
            return pack(self, {**parts, "weight": parts["weight"].roll(64)})

        place.patch.setattr(quantized_storage.Format, "pack", pack_shifted)
    return place.session(lora__rank=4, quantize="nf4", dtype="float32")


@fault("model.quantized", says="expert 3 of model.layers.0.mlp.experts.down_proj")
def a_quantized_expert_with_the_codes_of_another(place: Place, is_faulty: bool) -> Session:
    """Rows of bytes, one for each expert, in another order than the experts."""
    if is_faulty:
        when_read(place, swap_experts("down_proj"))
    return place.session(_moe(place), lora__rank=4, quantize="nf4", dtype="float32")


@fault("model.weights", says="expert 0 of model.layers.1.mlp.experts.down_proj")
def experts_that_were_quantized_from_other_numbers(place: Place, is_faulty: bool) -> Session:
    """Weights that went through another rounding before they were quantized: within the steps of the format, and not
    the codes that the checkpoint gives.
    """
    if is_faulty:

        def quantize_again(model: Any) -> None:
            experts = model.get_submodule("model.layers.1.mlp.experts")
            if "formats" in vars(experts):  # else a model that is compared, in plain numbers
                layout, rows = experts.formats["down_proj"], experts.down_proj.data
                wide = layout.widen(rows[0], torch.float32)
                rows[0] = layout.quantize(wide * 1.001)

        when_read(place, quantize_again)
    return place.session(_moe(place), lora__rank=4, quantize="nf4", dtype="float32")


def when_read(place: Place, change: Callable[[Any], None]) -> None:
    """Change each model that was read, before anything is done with it."""
    install = faster_layers.install

    def install_changed(model: Any) -> None:
        change(model)
        install(model)

    place.patch.setattr(faster_layers, "install", install_changed)


def swap_experts(name: str) -> Callable[[Any], None]:
    """The third and the fourth expert of the first layer in each other's place."""

    def swap(model: Any) -> None:
        experts = model.get_parameter(f"model.layers.0.mlp.experts.{name}").data
        experts[[2, 3]] = experts[[3, 2]]

    return swap


def _moe(place: Place) -> Path:
    """Experts whose matrices are whole blocks of nf4."""
    return place.model("qwen3_moe", hidden_size=64, moe_intermediate_size=32)


@fault("model.weights", says="model.layers.1.mlp.up_proj.weight")
def rows_that_were_read_into_other_places(place: Place, is_faulty: bool) -> Session:
    """A tensor one row further than in the file, as where ranks cut it in the wrong place."""
    if is_faulty:

        def shift(model: Any) -> None:
            weight = model.get_parameter("model.layers.1.mlp.up_proj.weight")
            weight.data = weight.data.roll(1, 0)

        when_read(place, shift)
    return place.session()


@fault("model.weights", says="experts.2.gate_proj.weight")
def an_expert_with_the_numbers_of_another(place: Place, is_faulty: bool) -> Session:
    """Experts are separate in the files and one tensor in the model."""
    if is_faulty:
        when_read(place, swap_experts("gate_up_proj"))
    return place.session(place.model("qwen3_moe"))


@fault("model.trains", says="freeze")
def a_freeze_pattern_that_matches_nothing(place: Place, is_faulty: bool) -> Session:
    """A misspelled name would leave everything training."""
    return place.session(
        freeze=["model.embed_token.weight" if is_faulty else "model.embed_tokens.weight"]
    )


@fault("model.compiled", says="torch's compiler makes a mistake", part="quick")
def a_compiler_that_drops_a_residual(place: Place, is_faulty: bool) -> Session:
    """The first sum of each graph is its left side alone."""

    def compile_wrongly(graph: GraphModule, inputs: Sequence[Tensor]) -> Any:
        sums = [node for node in graph.graph.nodes if node.target in (operator.add, torch.add)]
        for node in sums:
            if all(isinstance(arg, Node) for arg in node.args):
                node.replace_all_uses_with(node.args[0])
                break
        graph.recompile()
        return graph.forward

    torch._dynamo.reset()
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not")
    place.patch.setattr(compiled_layers, "BACKEND", compile_wrongly if is_faulty else "eager")
    return place.session(compile=True)
