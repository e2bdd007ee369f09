"""Layers with state whose state follows the layout: short convolutions and the gated delta rule of Qwen3-Next, Qwen3.5,
OLMo hybrid and LFM2.

The library's layers call a convolution and a delta rule that run over the whole micro-batch as one sample, and pass
them every keyword of the model's forward, ``taut_layout`` among them. ``install`` gives each such layer a forward in
which these two names stand for the functions of attention/recurrent.py. It does so only where ours compute what the
library's do (compared on a few numbers); without a layout the library's own run. A model with a layer whose state does
not follow the layout runs one sample at a time (models/self_test.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from taut.attention import recurrent
from taut.attention.layout import Layout

TOLERANCE = 1e-5
"""Largest difference from the library's function that is rounding, in float32, of numbers around 1."""


KINDS = {
    "GatedDeltaNet": ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"),
    "ShortConv": ("causal_conv1d_fn",),
}
"""How a layer's class name ends -> the library's functions through which all its state goes."""


def install(model: nn.Module) -> None:
    """Let the state of the model's layers follow the layout, where a layer allows it."""
    for module in model.modules():
        names = _names(module)
        if not names or "forward" in vars(module):
            continue
        forward: Any = inspect.unwrap(type(module).forward)
        code = forward.__code__
        # Without keywords of any name, as LFM2's in older versions of the library, no layout reaches it.
        if not code.co_flags & inspect.CO_VARKEYWORDS or not set(names) <= set(code.co_names):
            continue
        library = {name: forward.__globals__[name] for name in names}
        if all(_is_same(name, function) for name, function in library.items()):
            ours = {
                name: partial(_FUNCTIONS[name].ours, function) for name, function in library.items()
            }
            module.forward = MethodType(with_globals(forward, ours), module)


def with_globals(function: FunctionType, names: Mapping[str, Any]) -> FunctionType:
    """The function with globals of its own, in which ``names`` are others: nothing of the library's is changed for
    others.
    """
    return FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def follows_layout(module: nn.Module) -> bool:
    """Whether ``install`` let the module's state follow the layout."""
    replaced = getattr(vars(module).get("forward"), "__globals__", {})
    names = _names(module)
    return bool(names) and all(isinstance(replaced.get(name), partial) for name in names)


def _names(module: nn.Module) -> tuple[str, ...]:
    made_of = type(module).__name__
    return next((names for kind, names in KINDS.items() if made_of.endswith(kind)), ())


# -- in the place of the library's functions -------------------------------------------------------


def _convolution(
    library: Callable[..., Tensor],
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    taut_layout: Layout | None = None,
    **others: Any,
) -> Tensor:
    """[1, D, T] -> [1, D, T]."""
    if taut_layout is None:
        return library(hidden_states, weight, bias, activation=activation, **others)
    out_TD = recurrent.convolution(hidden_states[0].T, weight, bias, taut_layout)
    if activation is not None:
        out_TD = ACT2FN[activation](out_TD)
    return out_TD.T.unsqueeze(0).to(hidden_states.dtype)


def _delta_rule(
    library: Callable[..., tuple[Tensor, Tensor | None]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    taut_layout: Layout | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """q, k [1, T, H, K], v [1, T, H, V], g and beta [1, T, H] -> [1, T, H, V], and no state for a cache."""
    if taut_layout is None:
        return library(
            query,
            key,
            value,
            g=g,
            beta=beta,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            **others,
        )
    assert others.get("initial_state") is None, "a forward with a layout has no cache"
    out_THV = recurrent.gated_delta_rule(
        query[0], key[0], value[0], g[0], beta[0], taut_layout, normalize=use_qk_l2norm_in_kernel
    )
    return out_THV.unsqueeze(0), None


# -- whether they compute the same -----------------------------------------------------------------


@cache
def _is_same(name: str, library: Callable[..., Any]) -> bool:
    """Whether the library's function of this name computes what ours does; compared once for all layers."""
    # Unwrapped: the definition in PyTorch, whatever kernels are installed.
    return _FUNCTIONS[name].is_same(inspect.unwrap(library))


def _is_same_convolution(library: Any) -> bool:
    x = torch.linspace(-1, 1, 3 * 7).view(1, 3, 7).sin()
    weight, bias = torch.linspace(-0.5, 1, 12).view(3, 4), torch.linspace(0, 1, 3)
    return _agree(library, _convolution, x, weight, bias, activation="silu")


def _is_same_delta_rule(library: Any) -> bool:
    numbers = torch.linspace(0, 40, 5 * 4 * 8).view(1, 5, 4, 8)
    query, key, value = numbers.sin(), numbers.cos(), (2 * numbers).sin()
    g, beta = -numbers[..., 0] / 40, numbers[..., 1].cos().square()
    return _agree(
        lambda *args, **named: library(*args, **named)[0],
        lambda *args, **named: _delta_rule(*args, **named)[0],
        *(query, key, value, g, beta),
        use_qk_l2norm_in_kernel=True,
    )


def _agree(
    library: Callable[..., Tensor], ours: Callable[..., Tensor], *args: Tensor, **named: Any
) -> bool:
    """Whether both give the same on the tokens of one sample."""
    num_tokens = args[0].shape[2 if ours is _convolution else 1]
    layout = Layout(np.full(num_tokens, num_tokens))
    with torch.no_grad(), torch.device("cpu"):
        difference = library(*args, **named) - ours(library, *args, taut_layout=layout, **named)
    return float(difference.abs().max()) <= TOLERANCE


class _Function(NamedTuple):
    ours: Callable[..., Any]
    """Called with the library's function, then with its arguments."""
    is_same: Callable[[Any], bool]
    """Whether the library's function computes what ours does."""


_FUNCTIONS = {
    "causal_conv1d_fn": _Function(_convolution, _is_same_convolution),
    "torch_chunk_gated_delta_rule": _Function(_delta_rule, _is_same_delta_rule),
}
