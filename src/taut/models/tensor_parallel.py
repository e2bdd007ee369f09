"""Tensor parallelism: several ranks compute the layers of one micro-batch together (Megatron-LM, arXiv:1909.08053).

Each rank has a part of the attention heads and of the MLP. Query, key, value, gate and up projections are divided by
their outputs, the output and down projections by their inputs; what these return is summed over the ranks. Embedding,
norms and head are whole, and each rank computes all of them. The plan, its forwards and its collectives are the
library's. It is put on before FSDP and before any weight is read, so each rank reads its own part of the files.

Adapters are whole on every rank (``divide_adapters``). Next to a layer that is divided by outputs a rank computes its
own outputs of B A x; next to one that is divided by inputs, its inputs' share of A x, which is summed. Gradients of A
and B are whole again.

A module that the plan leaves out is whole, and each rank computes all of it. So are fused experts: the plan would give
a rank two stretches of rows of each, of the gate's and of the up projection's, and the parts that a checkpoint is made
of are single boxes. A model whose plan divides no layer, or divides one in a way that is not in ``STYLES``, is refused:
what is summed wrongly shows only in the numbers.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from taut.errors import ModelError
from taut.io import capabilities
from taut.models import architecture
from taut.models.cpu import cpu_matmul

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

STYLES = (
    *("colwise", "rowwise", "replicated_with_grad_allreduce"),
    *("colwise_gather_output", "rowwise_split_input", "local_params"),
)
"""The library's ways to divide a module. tests/invariants/test_meshes.py holds them to one process's numbers."""
RULES = {
    "gpt_oss": {
        **{f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.self_attn.sinks": "colwise",
        "model.layers.*.self_attn": "local_params",
    }
}
"""Model type -> rules that the library's plan lacks."""
KEY = "parallel.tensor"


class Division(NamedTuple):
    """How a linear layer is divided; its attribute ``division``."""

    mesh: DeviceMesh
    style: str
    """The library's: colwise, by its outputs; rowwise, by its inputs. Others take and give whole tensors."""


def divide_layers(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Divide the layers of a model on the meta device among the ranks of ``mesh``. Raises ModelError where the library
    has no such plan for it, or its heads cannot be divided.
    """
    capabilities.require("tensor parallelism", KEY)
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    library: Any = model
    # the library's plan, without experts, for modules inside the layers
    rules = {**(library.tp_plan or {}), **RULES.get(model.config.model_type, {})}
    experts = tuple(name for name, style in rules.items() if style == "moe_tp_experts")
    rules = {name: style for name, style in rules.items() if not name.startswith(experts)}
    inside = {id(module) for layer in architecture.layers(model) for module in layer.modules()}
    modules = dict(model.named_modules())

    def is_inside(name: str) -> bool:
        return id(modules[name if name in modules else name.rpartition(".")[0]]) in inside

    expanded = library._expand_parallel_plan(rules).items()
    plan: dict[str, str] = {name: style for name, style in expanded if is_inside(name)}
    # a plan that taut knows, and heads that can be divided
    unknown = sorted(set(plan.values()) - set(STYLES))
    if unknown or not any(style.startswith(("colwise", "rowwise")) for style in plan.values()):
        found = f"divides a module by {unknown[0]}" if unknown else "divides none of its layers"
        raise ModelError(
            f"{KEY}: the library's plan for {model.config.model_type} {found}; expected one of {', '.join(STYLES)}; "
            f"take {KEY} out: FSDP shards this model all the same"
        )
    config: Any = architecture.text_config(model)
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None)
        if heads is not None and heads % mesh.size():
            raise ModelError(
                f"{KEY}={mesh.size()}, and config.json has {key}={heads}; expected a divisor of that; choose another "
                "number"
            )
    apply_tensor_parallelism(model, mesh, plan)
    for name, style in plan.items():
        layer: Any = modules.get(name)
        if hasattr(layer, "out_features"):
            layer.division = Division(mesh, style)


def divide_adapters(model: nn.Module) -> None:
    """Let the adapters of divided layers compute this rank's part."""
    for module in model.modules():
        if not hasattr(module, "lora_A"):
            continue
        adapted: Any = module
        division = getattr(adapted.get_base_layer(), "division", None)
        if division is None:
            continue
        mesh, style = division
        (adapter,) = adapted.lora_A
        if style == "colwise":
            up = adapted.lora_B[adapter]
            up.forward = partial(_own_outputs, up, mesh)
        if style == "rowwise":
            down = adapted.lora_A[adapter]
            down.forward = partial(_sum_of_inputs, down, mesh)


def _own_outputs(layer: nn.Linear, mesh: DeviceMesh, x: Tensor) -> Tensor:
    """This rank's outputs of a whole layer on a whole input."""
    weight = _Part.apply(layer.weight, mesh, 0)  # type: ignore[no-untyped-call]
    return cpu_matmul.linear(_GradientSum.apply(x, mesh), weight)  # type: ignore[no-untyped-call]


def _sum_of_inputs(layer: nn.Linear, mesh: DeviceMesh, x: Tensor) -> Tensor:
    """All outputs of a whole layer, of whose input each rank has a part."""
    weight = _Part.apply(layer.weight, mesh, 1)  # type: ignore[no-untyped-call]
    summed: Tensor = _Sum.apply(cpu_matmul.linear(x, weight), mesh)  # type: ignore[no-untyped-call]
    return summed


class _Part(torch.autograd.Function):
    """This rank's part of a tensor along an axis; the gradient is the whole tensor's."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, mesh: DeviceMesh, axis: int) -> Tensor:
        ctx.mesh, ctx.axis, ctx.shape = mesh, axis, whole.shape
        return torch.chunk(whole, mesh.size(), axis)[mesh.get_local_rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        whole = grad.new_zeros(ctx.shape)
        torch.chunk(whole, ctx.mesh.size(), ctx.axis)[ctx.mesh.get_local_rank()].copy_(grad)
        dist.all_reduce(whole, group=ctx.mesh.get_group())
        return whole, None, None


class _GradientSum(torch.autograd.Function):
    """The input; its gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        whole = grad.clone()
        dist.all_reduce(whole, group=ctx.mesh.get_group())
        return whole, None


class _Sum(torch.autograd.Function):
    """The sum over the ranks; each has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        whole = x.clone()
        dist.all_reduce(whole, group=mesh.get_group())
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
