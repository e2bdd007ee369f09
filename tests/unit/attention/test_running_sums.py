"""Running sums by products, as CUDA makes them with deterministic algorithms. tests/cuda_stand_in has whole runs."""

from __future__ import annotations

import pytest
import torch

from taut.attention import running_sums


@pytest.mark.parametrize("size", [1, 7, 8, 9, 64, 65, 600])
def test_sums_by_spans_are_cumulative_sums(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 + 2 + 3 ... by spans of 8: three levels from 65 on. Small whole numbers, so the sums are exact."""
    monkeypatch.setattr(running_sums, "SPAN", 8)
    x = torch.arange(3 * size, dtype=torch.float64).view(3, size).remainder(11)
    assert torch.equal(running_sums._by_spans(x), x.cumsum(-1))


def test_the_gradient_is_that_of_a_cumulative_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_sums, "SPAN", 4)
    x = torch.randn(2, 11, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(running_sums._by_spans, x)


def test_elsewhere_it_is_torchs_own() -> None:
    x = torch.randn(2, 1000)
    assert torch.equal(
        running_sums.running_sums(x, torch.float64), x.cumsum(-1, dtype=torch.float64)
    )
