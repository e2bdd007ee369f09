"""oneDNN's products are float32's, where they are taken, and what they are not taken for is left as it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from taut.models.products import MIN_ROWS, OneDnn


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
