"""Adapters that start at a part of the weights that they adapt: PiSSA (arXiv:2404.02948) and OLoRA (2406.01775).

Other tools replace a weight W by the residual W - s B0 A0 and train s B A from B0, A0. Here W stays what it is, and the
layer adds the difference of the two products:

    y = W x + s (B A x - B0 A0 x)

The function and its gradients are the same. At the start both products are the same numbers, so the model is the base
to the last bit, whatever dtype W is stored in: the reference of DPO is the base. A0 and B0 are buffers: a checkpoint
holds them, so a resume does not depend on the decomposition. What is saved is a LoRA of twice the rank on the base,
[B, -B0] [A; A0], as peft converts it; it is loaded, merged and served as any other.

    pissa   the r largest singular values:  B0 = U sqrt(S / s), A0 = sqrt(S / s) V^T
    olora   the first r columns of Q and rows of R of W = Q R:  B0 = Q, A0 = R

``models.lora.adapters`` calls this. peft is not imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from taut.errors import ModelError
from taut.models.cpu import cpu_matmul

_A, _B, _INPUT = "start_A", "start_B", "start_input"


@torch.no_grad()
def install(model: nn.Module, init: str, iterations: int | None) -> None:
    """Let the new adapters of ``model`` start at a part of the weights. All ranks call it; the first one's numbers
    hold. ``iterations``: of a randomized decomposition; None: the exact one.
    """
    for name, module in model.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        layer: Any = module
        if hasattr(layer, "parameter_name"):
            raise ModelError(
                f"lora.init={init} with an adapter of the experts {name}; expected adapters of linear layers; name "
                "those in lora.targets, or take lora.init out"
            )
        # both matrices start at a part of the weight, the same on all ranks
        (adapter,) = layer.lora_A
        down, up = layer.lora_A[adapter], layer.lora_B[adapter]
        weight = layer.get_base_layer().weight
        if weight.is_meta:  # a plan: sizes are all that counts
            parts = down.weight.detach().clone(), up.weight.detach().clone()
        else:
            whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
            wide = whole.detach().to(down.weight.dtype)
            wide = wide.T if layer.fan_in_fan_out else wide
            parts = _parts(wide, init, down.out_features, layer.scaling[adapter], iterations, name)
            for part in parts if dist.is_initialized() else ():
                dist.broadcast(part, src=0)
            down.weight.copy_(parts[0])
            up.weight.copy_(parts[1])
        # the start is a buffer, whose product is subtracted
        layer.register_buffer(_A, parts[0])
        layer.register_buffer(_B, parts[1])
        if isinstance(layer.lora_dropout[adapter], nn.Dropout):
            layer.register_forward_pre_hook(_keep_input)
        down.forward = partial(_both_down, layer, down)
        up.forward = partial(_difference, layer, up)


def _parts(
    weight: Tensor, init: str, rank: int, scale: float, iterations: int | None, name: str
) -> tuple[Tensor, Tensor]:
    """A0 and B0 of a weight [out, in]."""
    if rank > min(weight.shape):
        raise ModelError(
            f"lora.rank={rank} with lora.init={init}: {name} is {weight.shape[0]} x {weight.shape[1]}, which has not "
            "as many singular values; lower lora.rank, or leave the layer out of lora.targets"
        )
    if init == "olora":
        columns, rows = torch.linalg.qr(weight)
        return rows[:rank].contiguous(), columns[:, :rank].contiguous()
    if iterations is None:
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
    else:
        left, values, transposed = torch.svd_lowrank(weight, rank, niter=iterations)
        right = transposed.T
    root = (values[:rank] / scale).sqrt()
    return (root[:, None] * right[:rank]).contiguous(), (left[:, :rank] * root).contiguous()


def _keep_input(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """The input of a layer before the dropout of its adapter, which the start does not have."""
    layer.__dict__[_INPUT] = inputs[0]


def _both_down(layer: Any, down: nn.Linear, x: Tensor) -> Tensor:
    """A x and A0 x, side by side."""
    start = getattr(layer, _A).to(down.weight.dtype)
    whole = layer.__dict__.pop(_INPUT, x)
    return torch.cat([cpu_matmul.linear(x, down.weight), cpu_matmul.linear(whole, start)], -1)


def _difference(layer: Any, up: nn.Linear, both: Tensor) -> Tensor:
    """B A x - B0 A0 x."""
    start = getattr(layer, _B).to(up.weight.dtype)
    trained, first = both.chunk(2, -1)
    return cpu_matmul.linear(trained, up.weight) - cpu_matmul.linear(first, start)


def is_installed(model: nn.Module) -> bool:
    """Whether adapters of the model start at a part of the weights."""
    return any(_A in module._buffers for module in model.modules())


def with_starts_joined(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict, of a model or of a layer, whose adapters have twice the rank and the product B A - B0 A0."""
    joined = {name: tensor for name, tensor in tensors.items() if _of_start(name) is None}
    for name, tensor in tensors.items():
        layer = _of_start(name)
        if layer is None:
            continue
        part = name[-1]
        (trained,) = [it for it in tensors if it.startswith(f"{layer}lora_{part}.")]
        is_down = part == "A"
        pair = [tensors[trained], tensor if is_down else -tensor]
        joined[trained] = torch.cat(pair, 0 if is_down else 1)
    return joined


def _of_start(name: str) -> str | None:
    """The layer whose start a tensor of this name is, with a dot at its end; None for other tensors."""
    layer, dot, last = name.rpartition(".")
    return f"{layer}{dot}" if last in (_A, _B) else None
