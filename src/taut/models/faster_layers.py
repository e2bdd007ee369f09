"""The same decoder layers with less work: norms, rotations and gates in few passes over memory, and a last layer that
computes only the rows that are read.

On a CPU an elementwise operation costs what its memory traffic costs, and the library's norm and rotation make 17
passes over a layer's hidden states where 8 are enough. ``install`` replaces them module by module, and only where the
replacement computes what the module does (compared on a few numbers); mixed dtypes, as under autocast, and norms
in 16 bit run as the library wrote them.

    norm        x * rsqrt(mean(x^2) + eps) * weight            (RMSNorm, arXiv:1910.07467)
    rotation    x * cos + rotate_half(x) * sin                 (RoPE, arXiv:2104.09864)
    gate        silu(gate(x)) * up(x), in an MLP               (SwiGLU, arXiv:2002.05202)

After the last layer's attention no token reads another, and the head reads only some tokens: those that predict a
target, and those with a scalar. ``Layout.rows_read`` names them; the last layer's attention may leave the others out,
and its MLP adds nothing to them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from taut.attention.layout import Layout
from taut.models import architecture, products
from taut.models.noise import KeyedDropout

ROTATION = "apply_rotary_pos_emb"
"""The library's name, in every family's module, of the function that rotates queries and keys."""


def install(model: PreTrainedModel) -> None:
    """Give the language model's layers their faster forms, and all linear layers the faster library for their products.
    Weights, names and what is saved do not change.
    """
    products.install(model)
    for module in architecture.language_model(model).modules():
        if _is_rms_norm(module):
            module.forward = MethodType(_norm_forward(type(module).forward), module)
        elif _is_gated(module):
            module.forward = MethodType(_gated_forward, module)
        elif (forward := _with_faster_rotation(module)) is not None:
            module.forward = MethodType(forward, module)
    _read_some_rows(model)


def restore_rotation(layer: nn.Module) -> None:
    """Give the attention of a layer the library's forward again. torch's compiler knows code by its function, and what
    ``install`` made of it has globals of its own in each module.
    """
    for module in layer.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, MethodType) and ROTATION in forward.__func__.__code__.co_names:
            del module.forward


# -- the norm --------------------------------------------------------------------------------------


def _is_rms_norm(module: nn.Module) -> bool:
    """Whether the module computes the norm of the module docstring, and nothing else."""
    weight, eps = getattr(module, "weight", None), _eps(module)
    if not type(module).__name__.endswith("RMSNorm") or eps is None:
        return False
    if not isinstance(weight, nn.Parameter) or weight.ndim != 1:
        return False
    small = torch.linspace(0.5, 1.5, 8)
    like = _like(module, weight=small, variance_epsilon=eps, eps=eps)
    x = torch.linspace(-3, 2, 32).view(1, 4, 8)
    return like is not None and _is_same(
        _RmsNorm.apply(x, small, eps),  # type: ignore[no-untyped-call]
        type(module).forward(like, x),
    )


def _eps(module: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


def _norm_forward(library: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A forward of a norm's module; ``library``: the one it has."""

    def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
        weight: Any = self.weight
        is_wide = weight.dtype in (torch.float32, torch.float64)
        if is_compiling() or hidden_states.dtype != weight.dtype or not is_wide:
            return library(self, hidden_states)  # which widens what is narrow
        eps = _eps(self)
        assert eps is not None, "a norm without it is not replaced"
        if not torch.is_grad_enabled():
            return _normed(hidden_states, weight, eps)[0]
        normed: Tensor = _RmsNorm.apply(hidden_states, weight, eps)  # type: ignore[no-untyped-call]
        return normed

    return forward


def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm over the last dimension, and each row's scale. Without gradients it has no autograd function around it:
    for the few rows of an engine that costs as much as the norm.
    """
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * scale).mul_(weight), scale


class _RmsNorm(torch.autograd.Function):
    """The norm over the last dimension; only the input and a number per row are kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, scale = _normed(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        product = (grad * x).flatten(0, -2)
        rows = scale.view(-1, 1)
        grad_weight = torch.mm(rows.T, product).squeeze(0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        share = torch.mv(product, weight).unsqueeze(1) * rows.pow(3).div_(x.shape[-1])
        grad_x = torch.mul(grad, weight, out=product.view(x.shape)).mul_(scale)
        grad_x.addcmul_(x, share.view(scale.shape), value=-1)
        return grad_x, grad_weight, None


# -- the rotation ----------------------------------------------------------------------------------


def _with_faster_rotation(module: nn.Module) -> Callable[..., Any] | None:
    """The module's forward with ``rotate`` for the library's rotation; None where it calls none, or another."""
    forward = _plain_forward(module)
    if forward is None or ROTATION not in forward.__code__.co_names:
        return None
    library = forward.__globals__.get(ROTATION)
    if not isinstance(library, FunctionType) or not _is_rotation(library):
        return None

    def rotate_both(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        is_plain = q.dtype == k.dtype == cos.dtype == sin.dtype and q.ndim == cos.ndim + 1
        if is_compiling() or not is_plain or q.shape[-1] != cos.shape[-1]:
            both: tuple[Tensor, Tensor] = library(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
            return both
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    # The module's own globals, but for this name: nothing of the library's is changed for others.
    return FunctionType(
        forward.__code__,
        {**forward.__globals__, ROTATION: rotate_both},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )


def _is_rotation(library: Callable[..., Any]) -> bool:
    """Whether the library's function computes the rotation of the module docstring."""
    code = library.__code__
    has_its_arguments = code.co_varnames[:5] == ("q", "k", "cos", "sin", "unsqueeze_dim")
    if not has_its_arguments or "rotate_half" not in code.co_names:
        return False
    q, k = (torch.linspace(-1, 2, heads * 3 * 8).view(1, heads, 3, 8) for heads in (2, 1))
    cos, sin = torch.linspace(-1, 1, 24).view(1, 3, 8), torch.linspace(1, -0.5, 24).view(1, 3, 8)
    theirs = library(q, k, cos, sin)
    return all(
        _is_same(rotate(x, cos.unsqueeze(1), sin.unsqueeze(1)), other)
        for x, other in zip((q, k), theirs, strict=True)
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` [..., T, K] rotated by ``cos`` and ``sin``, which broadcast to it and take no gradient."""
    if not torch.is_grad_enabled():
        return _rotated(x, cos, sin)
    rotated: Tensor = _Rotation.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return rotated


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        half = grad.shape[-1] // 2
        out = grad * cos
        out[..., :half].addcmul_(grad[..., half:], sin[..., half:])
        out[..., half:].addcmul_(grad[..., :half], sin[..., :half], value=-1)
        return out, None, None


def _plain_forward(module: nn.Module) -> Any:
    """The forward that the module's class was written with; None where it was wrapped or replaced since."""
    owner = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    forward = vars(owner)["forward"]
    if not isinstance(forward, FunctionType) or forward.__closure__ is not None:
        return None
    is_own = forward.__module__ == owner.__module__
    return forward if is_own and forward.__qualname__ == f"{owner.__qualname__}.forward" else None


def _like(module: nn.Module, **attributes: Any) -> Any:
    """A small stand-in for the module, which may be large or without numbers yet; None if the module's forward is not
    plain or reads something of the module that is not among the ``attributes``.
    """
    forward = _plain_forward(module)
    if forward is None:
        return None
    has = {*vars(module), *vars(type(module)), *module._parameters, *module._modules}
    read = {name for name in forward.__code__.co_names if name in has}
    return SimpleNamespace(**attributes) if read <= attributes.keys() else None


def _is_same(ours: Tensor, theirs: Tensor) -> bool:
    return ours.dtype == theirs.dtype and torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)


# -- the gate --------------------------------------------------------------------------------------


def _is_gated(module: nn.Module) -> bool:
    """Whether the module is an MLP with the gate of the module docstring, and nothing else."""
    act_fn = getattr(module, "act_fn", None)
    if not isinstance(act_fn, nn.SiLU | SiLUActivation):
        return False
    sizes = {"gate_proj": (4, 3), "up_proj": (4, 3), "down_proj": (3, 4)}
    if not all(isinstance(getattr(module, name, None), nn.Module) for name in sizes):
        return False
    layers = {
        name: partial(nn.functional.linear, weight=torch.linspace(-1, 2, 12).view(size))
        for name, size in sizes.items()
    }
    like = _like(module, act_fn=act_fn, **layers)
    x = torch.linspace(-1, 1, 6).view(1, 2, 3)
    return like is not None and _is_same(_gated_forward(like, x), type(module).forward(like, x))


def _gated_forward(self: Any, x: Tensor) -> Tensor:
    gate, up = self.gate_proj(x), self.up_proj(x)
    if is_compiling() or gate.dtype != up.dtype:
        gated = self.act_fn(gate) * up
    elif torch.is_grad_enabled():
        gated = _Gate.apply(gate, up)  # type: ignore[no-untyped-call]
    else:
        gated = self.act_fn(gate).mul_(up)
    out: Tensor = self.down_proj(gated)
    return out


class _Gate(torch.autograd.Function):
    """silu(gate) * up; the backward pass writes into what the forward pass has kept, so a second one is refused."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        act = nn.functional.silu(gate)
        if not any(ctx.needs_input_grad):
            return act.mul_(up)
        ctx.save_for_backward(gate, up, act)
        return act * up

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, act = ctx.saved_tensors
        grad_gate = None
        if ctx.needs_input_grad[0]:
            grad_gate = grad * up
            torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grad_gate, act.mul_(grad)


# -- the last layer --------------------------------------------------------------------------------


def _read_some_rows(model: PreTrainedModel) -> None:
    """Let the last layer compute only the rows that are read, where its MLP treats each row alone."""
    last = architecture.layers(model)[-1]
    mlp = getattr(last, "mlp", None)
    has_experts = architecture.num_experts(architecture.text_config(model)) > 0
    if has_experts or not type(mlp).__name__.endswith("MLP"):
        return
    assert isinstance(mlp, nn.Module)
    some = _SomeRows()
    last.register_forward_pre_hook(some.note, with_kwargs=True)
    mlp.register_forward_pre_hook(some.take)
    mlp.register_forward_hook(some.put_back)


class _SomeRows:
    """Hooks of the last layer and its MLP: rows in, rows out, zeros elsewhere."""

    def __init__(self) -> None:
        self.rows: Tensor | None = None
        self.num_tokens = 0

    def note(
        self, layer: nn.Module, args: Any, keywords: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        layout = keywords.get("taut_layout")
        if not isinstance(layout, Layout) or layout.rows_read is None:
            self.rows = None
            return None
        self.rows = layout.row_index
        return args, keywords | {"taut_layout": layout.of_last_layer}

    def take(self, mlp: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if is_compiling():
            return None
        if any(isinstance(module, KeyedDropout) for module in mlp.modules()):
            self.rows = None  # it draws by the token's place in the micro-batch
        if len(args) != 1:
            self.rows = None  # it reads more than the hidden states
        if self.rows is None:
            return None
        self.num_tokens = args[0].shape[1]
        return (args[0].index_select(1, self.rows),)

    def put_back(self, mlp: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor | None:
        if is_compiling() or self.rows is None:
            return None
        everywhere = out.new_zeros(out.shape[0], self.num_tokens, out.shape[2])
        return everywhere.index_copy(1, self.rows, out)
