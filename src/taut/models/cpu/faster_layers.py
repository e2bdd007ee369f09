"""Layers with less work and equal results: norms, rotations and gates in few passes over memory, a last layer that
computes only the rows that are read, and a vision tower that computes all patches in one product and like windows in
one call.

On a CPU an elementwise operation costs what its memory traffic costs, and the library's norm and rotation make 17
passes over a layer's hidden states where 8 are enough. ``install`` replaces them module by module, and only where the
replacement computes what the module does (compared on a few numbers); mixed dtypes, as under autocast, and norms
in 16 bit run as the library wrote them.

    norm        x * rsqrt(mean(x^2) + eps) * weight            (RMSNorm, arXiv:1910.07467)
    rotation    x * cos + rotate_half(x) * sin                 (RoPE, arXiv:2104.09864)
    gate        silu(gate(x)) * up(x), in an MLP               (SwiGLU, arXiv:2002.05202)
    patches     a convolution whose stride is its kernel, as the product of its patches with the kernel
    windows     a tower's attention: those of one length are a batch; the library calls the kernel for each

After the last layer's attention no token reads another, and the head reads only some tokens: those that predict a
target, and those with a scalar. ``Layout.rows_read`` names them; the last layer's attention may leave the others out,
and its MLP adds nothing to them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import groupby
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from taut.attention.layout import Layout
from taut.models import architecture, recurrent_layers
from taut.models.cpu import cpu_matmul
from taut.models.noise import KeyedDropout

ROTATION = "apply_rotary_pos_emb"
"""The library's name, in every family's module, of the function that rotates queries and keys."""
TOWER_ROTATION = "apply_rotary_pos_emb_vision"
"""That of the function for a vision tower."""


def install(model: PreTrainedModel) -> None:
    """Give the layers of language model and vision tower their faster forms, all linear layers the faster library
    for their products, and layers with state those whose state follows the layout. Weights, names and what is saved
    do not change.
    """
    cpu_matmul.install(model)
    recurrent_layers.install(model)
    for module in model.modules():
        if "forward" in vars(module):  # the library's, where ranks compute a layer together
            continue
        if _is_rms_norm(module):
            module.forward = MethodType(_norm_forward(type(module).forward), module)
        elif _is_gated(module):
            module.forward = MethodType(_gated_forward, module)
        elif _is_patch_embedding(module):
            module.forward = MethodType(_patch_embedding_forward, module)
        elif (
            forward := _with_faster_rotation(module) or _with_batched_windows(module)
        ) is not None:
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

    return recurrent_layers.with_globals(forward, {ROTATION: rotate_both})


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


# -- a tower's patches ------------------------------------------------------------------------------


def _is_patch_embedding(module: nn.Module) -> bool:
    """Whether the module is a convolution that reads every pixel once: its windows lie side by side."""
    return (
        isinstance(module, nn.Conv2d | nn.Conv3d)
        and _plain_forward(module) in (nn.Conv2d.forward, nn.Conv3d.forward)
        and module.kernel_size == module.stride
        and module.groups == 1
        and {*module.dilation} == {1}
        and (module.padding == "valid" or {*module.padding} == {0})
    )


def _patch_embedding_forward(self: nn.Conv2d | nn.Conv3d, pixels: Tensor) -> Tensor:
    """The convolution as one product of all patches with the kernel."""
    num_images, _, *sides = pixels.shape
    grid = [side // size for side, size in zip(sides, self.kernel_size, strict=True)]
    for axis, (count, size) in enumerate(zip(grid, self.kernel_size, strict=True)):
        dim = 2 + 2 * axis
        pixels = pixels.narrow(dim, 0, count * size)  # what is left over is not read
        split = (*pixels.shape[:dim], count, size, *pixels.shape[dim + 1 :])
        pixels = pixels.view(split).movedim(dim, 1 + axis)
    # [images, *grid, channels, *kernel]
    patches = pixels.reshape(num_images * math.prod(grid), -1)
    out = cpu_matmul.linear(patches, self.weight.flatten(1), self.bias)
    return out.view(num_images, *grid, -1).movedim(-1, 1)


# -- a tower's attention ----------------------------------------------------------------------------


def _with_batched_windows(module: nn.Module) -> Callable[..., Any] | None:
    """The forward of a tower's attention with the windows of one length in one call; None where the module is none, or
    computes something else.
    """
    library = _plain_forward(module)
    if library is None or TOWER_ROTATION not in library.__code__.co_names:
        return None
    if not {"cu_seqlens", "position_embeddings"} <= {*library.__code__.co_varnames}:
        return None
    rotate_both = library.__globals__.get(TOWER_ROTATION)

    def forward(
        self: Any,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **keywords: Any,
    ) -> Tensor:
        if self.config._attn_implementation != "sdpa" or position_embeddings is None:
            out: Tensor = library(
                self, hidden_states, cu_seqlens, position_embeddings=position_embeddings, **keywords
            )
            return out
        # rows in the order of window lengths
        batches, order = _by_length(cu_seqlens.diff().tolist())
        cos, sin = position_embeddings
        if order is not None:
            index = torch.from_numpy(order).to(cos.device)
            back = index.argsort()
            hidden_states = _Reordered.apply(hidden_states, index, back)  # type: ignore[no-untyped-call]
            cos, sin = cos[index], sin[index]
        # rotated, attended to in batches of windows, and put back
        q, k, v = self.qkv(hidden_states).view(-1, 3, self.num_heads, cos.shape[-1]).unbind(1)
        if q.dtype == cos.dtype == sin.dtype:
            q, k = (rotate(x, cos.unsqueeze(1), sin.unsqueeze(1)) for x in (q, k))
        else:
            q, k = rotate_both(q, k, cos, sin)
        out = self.proj(_attend(q, k, v, batches, self.scaling).flatten(1))
        if order is not None:
            out = _Reordered.apply(out, back, index)  # type: ignore[no-untyped-call]
        return out

    return forward if _is_same_attention(module, forward, library) else None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, batches: list[tuple[int, int]], scale: float
) -> Tensor:
    """Attention within each window; all are [T, H, K], and ``batches`` as ``_by_length`` returns them."""
    num_rows = [length * count for length, count in batches]
    outs = []
    for (length, count), *qkv in zip(
        batches, *(torch.split(x, num_rows) for x in (q, k, v)), strict=True
    ):
        windows = (x.view(count, length, *x.shape[1:]).transpose(1, 2) for x in qkv)
        out = nn.functional.scaled_dot_product_attention(*windows, scale=scale)  # type: ignore[misc]
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs) if len(outs) > 1 else outs[0]


def _is_same_attention(
    module: nn.Module, ours: Callable[..., Tensor], library: Callable[..., Tensor]
) -> bool:
    like = _like(
        module,
        qkv=partial(nn.functional.linear, weight=torch.linspace(-1, 1.5, 24 * 8).view(24, 8).sin()),
        proj=partial(nn.functional.linear, weight=torch.linspace(-1, 2, 64).view(8, 8)),
        num_heads=2,
        num_key_value_groups=1,
        scaling=0.5,
        config=SimpleNamespace(_attn_implementation="sdpa"),
        attention_dropout=getattr(module, "attention_dropout", 0.0),
        training=True,
    )
    if like is None or like.attention_dropout:
        return False
    x = torch.linspace(-2, 2, 7 * 8).view(7, 8).cos()
    cos, sin = torch.linspace(-1, 1, 28).view(7, 4), torch.linspace(1, -0.5, 28).view(7, 4)
    bounds = torch.tensor([0, 2, 3, 5, 7])
    return _is_same(*(f(like, x, bounds, position_embeddings=(cos, sin)) for f in (ours, library)))


def _by_length(lengths: list[int]) -> tuple[list[tuple[int, int]], npt.NDArray[np.int64] | None]:
    """Length and number of the windows of each batch, and the rows in the order of the batches; None: as they are."""
    batches = [(length, len([*run])) for length, run in groupby(lengths)]
    if len(batches) == len({length for length, _ in batches}):
        return batches, None
    lengths_W = np.array(lengths)
    order_W = lengths_W.argsort(kind="stable")
    starts_W = lengths_W.cumsum() - lengths_W
    rows = [np.arange(starts_W[window], starts_W[window] + lengths[window]) for window in order_W]
    return sorted(Counter(lengths).items()), np.concatenate(rows)


class _Reordered(torch.autograd.Function):
    """The rows of ``x`` in another order, which ``back`` undoes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, order)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        return grad.index_select(0, back), None, None


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
