"""The routers' load-balancing loss, derived by hand."""

from __future__ import annotations

import pytest
import torch

from taut.losses.router import slopes


def test_two_routers_of_two_experts_and_one_expert_a_token() -> None:
    """Four tokens, k = 1. Router 0 sends three to expert 0 and one to expert 1; router 1 sends two to each:

        f_0 = (3/4, 1/4)   f_1 = (1/2, 1/2)   mean: (5/8, 3/8)

    The probabilities add up to (3, 1) and (2, 2), so P_0 = (3/4, 1/4), P_1 = (1/2, 1/2), their mean (5/8, 3/8).

        pooled:     2 (5/8 5/8 + 3/8 3/8) = 2 * 34/64 = 1.0625
        per layer:  2 (9/16 + 1/16) + 2 (1/4 + 1/4) = 1.25 + 1 = 2.25

    With k = 2 the second is divided by 2; the first is not.
    """
    count_LE = torch.tensor([[3.0, 1.0], [2.0, 2.0]], dtype=torch.float64)
    prob_LE = torch.tensor([[3.0, 1.0], [2.0, 2.0]], dtype=torch.float64)
    pooled = float((slopes(count_LE, 4, 1, "pooled", 0.5) * prob_LE).sum())
    assert pooled == pytest.approx(0.5 * 1.0625, rel=1e-12)
    per_layer = float((slopes(count_LE, 4, 1, "per_layer", 0.5) * prob_LE).sum())
    assert per_layer == pytest.approx(0.5 * 2.25, rel=1e-12)
    halved = float((slopes(count_LE, 4, 2, "per_layer", 0.5) * prob_LE).sum())
    assert halved == pytest.approx(0.25 * 2.25, rel=1e-12)
