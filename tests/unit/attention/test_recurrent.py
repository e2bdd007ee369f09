"""State along the paths of a layout: by hand, against a loop over tokens, and against each path alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from taut.attention import recurrent
from taut.attention.layout import Layout

H, K, V = 4, 3, 5
TREE = [
    (0, 70, 200),
    (70, 100, 100),
    (100, 190, 200),
    (190, 200, 200),
    (200, 220, 220),
    (220, 285, 285),
]
"""(start, stop, reach): a prompt of 70 with branches of 30 and of 100, cut at 90; two samples of 20 and 65."""


def layout(segments: list[tuple[int, int, int]]) -> Layout:
    return Layout(np.concatenate([np.full(stop - start, reach) for start, stop, reach in segments]))


def alone(num_tokens: int) -> Layout:
    return layout([(0, num_tokens, num_tokens)])


def inputs(num_tokens: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Queries and keys of 2 heads, values of 4, log decays and betas."""
    generator = torch.Generator().manual_seed(num_tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(num_tokens, *shape, generator=generator, dtype=torch.float64)

    parts = draw(2, K), draw(2, K), draw(H, V), -draw(H).exp() / 3, draw(H).sigmoid()
    return tuple(part.to(dtype).requires_grad_() for part in parts)


def token_by_token(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
) -> Tensor:
    """The definition, one token after the other, of one sample."""

    def unit(x: Tensor) -> Tensor:
        scaled = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + recurrent.L2_EPS)
        return scaled.repeat_interleave(H // x.shape[1], dim=1)

    query, key = unit(query) / math.sqrt(K), unit(key)
    state, outs = torch.zeros(H, K, V, dtype=value.dtype), []
    for q, k, v, g, b in zip(query, key, value, decay, beta, strict=True):
        state = state * g.exp()[:, None, None]
        error = v - torch.einsum("hkv,hk->hv", state, k)
        state = state + torch.einsum("h,hk,hv->hkv", b, k, error)
        outs.append(torch.einsum("hkv,hk->hv", state, q))
    return torch.stack(outs)


def delta_rule(*parts: Tensor, layout: Layout) -> Tensor:
    return recurrent.gated_delta_rule(*parts, layout, normalize=True)


def gradients(run: Callable[..., Tensor], parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    out = run(*parts)
    return (out, *torch.autograd.grad((out * out.detach().cos()).sum(), parts))


def test_the_rule_by_hand() -> None:
    """One head, K = V = 1, no normalizing: S = g S + b k (v - g S k), o = q S.

    Token 1 with k = 2, v = 3, b = 1/2: S = 0 + 1/2 * 2 * 3 = 3, o = 1 * 3. Token 2 with exp(g) = 1/2, k = 1, v = 2,
    b = 1/4: S = 3/2 + 1/4 (2 - 3/2) = 13/8, o = 2 * 13/8.
    """
    column = torch.tensor([[[1.0]], [[2.0]]], dtype=torch.float64)
    key, value = column.flip(0), torch.tensor([[[3.0]], [[2.0]]], dtype=torch.float64)
    decay = torch.tensor([[0.0], [math.log(0.5)]], dtype=torch.float64)
    beta = torch.tensor([[0.5], [0.25]], dtype=torch.float64)
    out = recurrent.gated_delta_rule(column, key, value, decay, beta, alone(2), normalize=False)
    assert out.flatten().tolist() == pytest.approx([3.0, 3.25], abs=1e-15)


@pytest.mark.parametrize("num_tokens", [1, 5, 64, 65, 200])
def test_chunks_are_the_recurrence(num_tokens: int) -> None:
    parts = inputs(num_tokens)
    ours = gradients(lambda *some: delta_rule(*some, layout=alone(num_tokens)), parts)
    for mine, expected in zip(ours, gradients(token_by_token, parts), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)


def convolution(x: Tensor, weight: Tensor, bias: Tensor, layout: Layout) -> Tensor:
    return recurrent.convolution(x, weight, bias, layout)


@pytest.mark.parametrize("segments", [TREE, TREE[-2:], [(0, 2, 4), (2, 3, 3), (3, 4, 4)]])
def test_a_tree_is_each_of_its_paths_alone(segments: list[tuple[int, int, int]]) -> None:
    """Outputs at a path's own tokens, and gradients: the sum over paths of those alone, where each token's output
    counts once.
    """
    offset = segments[0][0]
    tree = layout([(a - offset, b - offset, reach - offset) for a, b, reach in segments])
    parts = inputs(tree.num_tokens)
    weights = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)

    def both(some: tuple[Tensor, ...], where: Layout) -> Tensor:
        convolved = convolution(some[2][..., 0], *weights, where)
        return torch.cat([delta_rule(*some, layout=where).flatten(1), convolved], dim=1)

    whole = both(parts, tree)
    expected = torch.zeros_like(whole)
    for segment, path in zip(tree.segments, tree.paths, strict=True):
        its_own = both(tuple(part[path] for part in parts), alone(path.size))
        rows = torch.arange(segment.start, segment.stop)
        expected = expected.index_copy(0, rows, its_own[-rows.numel() :])
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-12)
    factor = whole.detach().cos()
    for mine, theirs in zip(
        torch.autograd.grad((whole * factor).sum(), parts),
        torch.autograd.grad((expected * factor).sum(), parts),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_the_convolution_by_hand() -> None:
    """W = 2 with weights 10 and 1 (the token's own), bias 0.5: y = 10 x_before + x + 0.5. Tokens 1, 2; a branch 3 and a
    branch 4, both after 2; a sample 5.
    """
    x = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0]], dtype=torch.float64)
    weight, bias = torch.tensor([[10.0, 1.0]]).double(), torch.tensor([0.5]).double()
    tree = layout([(0, 2, 4), (2, 3, 3), (3, 4, 4), (4, 5, 5)])
    assert convolution(x, weight, bias, tree).flatten().tolist() == [1.5, 12.5, 23.5, 24.5, 5.5]


def test_it_computes_in_float32_also_under_autocast() -> None:
    parts = tuple(part.detach() for part in inputs(100, torch.float32))
    expected = delta_rule(*parts, layout=alone(100))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(delta_rule(*parts, layout=alone(100)), expected)
    narrow = tuple(part.bfloat16() for part in parts)
    assert delta_rule(*narrow, layout=alone(100)).dtype == torch.bfloat16
