"""oneDNN's products are float32's, where they are taken, and what they are not taken for is left as it is."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from taut.models.precision import (
    MIN_ROWS,
    OneDnn,
    backward_context,
    compute_context,
    product_into,
    recompute_contexts,
)


class Seen(TorchDispatchMode):
    """Which operators ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def operands(rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, rows, 48), (64, 48), (64,))
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x, weight, bias


def is_taken(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    with OneDnn(), Seen() as seen:
        functional.linear(x, weight, bias)
    return "mkldnn::_linear_pointwise" in seen.names


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_product_is_float32s(has_bias: bool) -> None:
    x, weight, bias = operands(9)
    given = bias if has_bias else None
    with torch.no_grad():
        assert is_taken(x, weight, given)
        with OneDnn():
            found = torch.nn.Linear.forward(_module(weight, given), x)
    wanted = functional.linear(
        x.double(), weight.double(), None if given is None else bias.double()
    )
    assert found.shape == (1, 9, 64)
    assert float((found - wanted).abs().max()) < 1e-5


@pytest.mark.parametrize("rows", [9, 700])
@pytest.mark.parametrize("is_turned", [False, True])
def test_a_product_into_memory_that_is_there_is_float32s(rows: int, is_turned: bool) -> None:
    """The head's, with rows enough and without."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(rows, 256, generator=generator), torch.randn(256, 256)
    weight = weight.T if is_turned else weight
    out = torch.empty(rows + 3, 256)
    with Seen() as seen:
        product_into(out[:rows], x, weight)
    assert ("mkldnn::_linear_pointwise" in seen.names) is (rows == 700)
    assert float((out[:rows] - x.double() @ weight.double().T).abs().max()) < 1e-3


def _module(weight: Tensor, bias: Tensor | None) -> torch.nn.Linear:
    module = torch.nn.Linear(48, 64, bias=bias is not None)
    module.weight.data = weight
    if bias is not None:
        module.bias.data = bias
    return module


def test_all_else_is_left_alone() -> None:
    x, weight, _ = operands(9)
    assert not is_taken(x, weight)  # a gradient may be wanted
    with torch.no_grad():
        few, _, _ = operands(MIN_ROWS - 1)
        assert not is_taken(few, weight)
        assert not is_taken(x.double(), weight.double())
        assert not is_taken(x.bfloat16(), weight.bfloat16())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not is_taken(x, weight)
            with OneDnn():
                assert functional.linear(x, weight).dtype == torch.bfloat16


def linear_grads(dtype: torch.dtype, *, is_ours: bool) -> list[Tensor]:
    """The product of many rows, and the gradients of all that goes into it."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, up = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((1, 2500, 96), (128, 96), (128,), (1, 2500, 128))
    )
    leaves = [leaf.requires_grad_() for leaf in (x, weight, bias)]
    with OneDnn(takes_small=False) if is_ours else nullcontext():
        product = functional.linear(*leaves)
    assert ("_Linear" in type(product.grad_fn).__name__) == (is_ours and dtype == torch.float32)
    return [product.detach(), *torch.autograd.grad(product, leaves, up)]


def test_in_training_products_and_gradients_are_float32s_and_the_same_each_time() -> None:
    found, again = (linear_grads(torch.float32, is_ours=True) for _ in range(2))
    wanted = linear_grads(torch.float64, is_ours=True)
    for one, other, exact in zip(found, again, wanted, strict=True):
        assert torch.equal(one, other)
        assert float((one - exact).norm() / exact.norm()) < 2e-6
    with torch.no_grad(), OneDnn(takes_small=False):
        x, weight, bias = (torch.randn(s) for s in ((2500, 96), (128, 96), (128,)))
        product = functional.linear(x, weight, bias)
    with OneDnn(takes_small=False):
        with_gradient = functional.linear(x, weight.requires_grad_(), bias)
    assert torch.equal(product, with_gradient), "a reference and a policy agree to the last bit"


def test_a_small_product_in_training_is_left_alone() -> None:
    x, weight, bias = operands(9)
    with OneDnn(takes_small=False):
        product = functional.linear(x, weight.requires_grad_(), bias)
    assert "_Linear" not in type(product.grad_fn).__name__


def test_layers_computed_again_give_the_same_gradients() -> None:
    device = torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 512), nn.SiLU(), nn.Linear(512, 128))
    model[0].weight.requires_grad_(False)
    x = torch.randn(1100, 128, requires_grad=True)
    contexts = partial(recompute_contexts, torch.float32, device)
    leaves = [x, model[0].bias, model[2].weight]
    grads = []
    for is_again in (False, True):
        with compute_context(torch.float32, device):
            y = (
                checkpoint(model, x, use_reentrant=False, context_fn=contexts)
                if is_again
                else model(x)
            )
        with backward_context(torch.float32):
            grads.append(torch.autograd.grad(y.square().sum(), leaves))
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))
