"""Shaping by hand."""

from __future__ import annotations

import pytest
import torch

from taut.losses.advantages import Scale, clip, length_cost, soft_overlong, stopped, unfinished


def test_what_did_not_stop_of_itself_loses() -> None:
    assert stopped(["stop", "length", "error"]).tolist() == [True, False, False]
    assert unfinished(["stop", "length"], 0.1).tolist() == [0.0, -0.1]


def test_soft_overlong() -> None:
    """Limit 100, margin 20: nothing up to 80, then a twentieth a token."""
    length_S = torch.tensor([1, 80, 81, 90, 100, 130])
    found = soft_overlong(length_S, limit=100, margin=20).tolist()
    assert found == pytest.approx([0.0, 0.0, -0.05, -0.5, -1.0, -1.0])


def test_length_costs_in_proportion() -> None:
    found = length_cost(torch.tensor([0, 50, 100]), limit=100, coef=0.4)
    assert found.tolist() == pytest.approx([0.0, -0.2, -0.4])


def test_clip() -> None:
    assert clip(torch.tensor([-9.0, 0.5, 9.0]), 2.0).tolist() == [-2.0, 0.5, 2.0]


def test_a_running_scale_is_that_of_all_rewards_at_once() -> None:
    """In any parts, an empty one and one of one included."""
    reward_S = 1e3 + torch.randn(50, generator=torch.Generator().manual_seed(0)).double()
    scale = Scale()
    for part in reward_S.split([1, 0, 20, 9, 20]):
        scale = scale.merged(part)
    assert scale.count == 50
    assert scale.mean == pytest.approx(reward_S.mean().item(), rel=1e-14)
    assert scale.deviation == pytest.approx(reward_S.std().item(), rel=1e-12)
    torch.testing.assert_close(scale.scaled(reward_S), reward_S / reward_S.std())


def test_rewards_without_spread_are_not_divided() -> None:
    same_S = torch.full((3,), 2.0).double()
    assert Scale().scaled(same_S).tolist() == [2.0] * 3
    assert Scale().merged(same_S).scaled(same_S).tolist() == [2.0] * 3


@pytest.mark.parametrize("reward_S", [[0.1] * 6, [0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2]])
def test_a_spread_of_rounding_divides_nothing(reward_S: list[float]) -> None:
    """Six tenths have a deviation of 1.5e-17."""
    given_S = torch.tensor(reward_S, dtype=torch.float64)
    scale = Scale().merged(given_S)
    assert scale.deviation > 0
    assert scale.scaled(given_S).tolist() == reward_S
