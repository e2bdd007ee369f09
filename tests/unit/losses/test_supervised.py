"""The loss of distillation: its sums, its weights, and what it asks for."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.tiny_samples import nested_family

from taut.data.packing import PackPolicy, pack
from taut.losses.supervised import DistillLoss
from taut.types import TOP_IDS, TOP_LOGP, Divergence, Scores, Wants

PACKED = pack(nested_family(97), PackPolicy(True, 1))
N = PACKED.num_targets


def scores() -> Scores:
    generator = torch.Generator().manual_seed(0)
    logp_N, divergence_N = torch.rand(2, N, generator=generator, dtype=torch.float64)
    return Scores((-logp_N).requires_grad_(), divergence_N=divergence_N.requires_grad_())


@pytest.mark.parametrize("sft_weight", [0.0, 0.3])
def test_the_sums_by_hand(sft_weight: float) -> None:
    loss, given = DistillLoss(divergence="js", temperature=2.0, sft_weight=sft_weight), scores()
    assert given.divergence_N is not None
    found = loss(given, PACKED)
    divergence = (PACKED.weight_N * given.divergence_N).sum()
    cross_entropy = -(PACKED.weight_N * given.logp_N).sum()
    expected = {"divergence": 4.0 * divergence, "cross_entropy": sft_weight * cross_entropy}
    assert set(found.terms) == set(loss.units) == set(expected if sft_weight else ["divergence"])
    for name, term in found.terms.items():
        torch.testing.assert_close(term, expected[name])
    total, count = found.metrics["divergence"]
    torch.testing.assert_close(total / count, divergence.detach() / PACKED.weight_N.sum())
    assert not found.metrics["cross_entropy"][0].requires_grad


@pytest.mark.parametrize("sft_weight", [0.0, 0.3])
def test_linear_weights_are_the_derivative(sft_weight: float) -> None:
    loss, given = DistillLoss(temperature=2.0, sft_weight=sft_weight), scores()
    assert given.divergence_N is not None
    weights = loss.linear_weights(PACKED)
    for name, term in loss(given, PACKED).terms.items():
        grads = torch.autograd.grad(
            term, [given.logp_N, given.divergence_N], materialize_grads=True
        )
        if not sft_weight:
            assert not grads[0].any(), "logp_N has no part in it"
        torch.testing.assert_close(torch.stack(grads)[-len(weights[name]) :], weights[name])


def test_what_it_asks_for() -> None:
    how = Divergence("reverse", 0.5, 1.0, "bucket")
    assert DistillLoss(divergence="reverse").wants == Wants(divergence=how)
    assert DistillLoss().needs == ()
    assert DistillLoss(is_listed=True).needs == (TOP_IDS, TOP_LOGP)
