"""What a step tells of engine and trainer, and of the critic; the controller of the divergence. By hand."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log

import pytest
import torch
from tests.helpers.preference_rows import plain_pairs

from taut.losses.policy import (
    SURROGATES,
    Bounds,
    Correction,
    Critic,
    PolicyGradient,
    adapted,
    effective_share,
    engine_metrics,
    entropy_coefs,
    explained_variance,
    largest_difference,
    value_cost,
    weights,
)
from taut.types import Packed, Scores

NAN = float("nan")
PACKED = plain_pairs([(3, 2)])
GAP = torch.tensor([log(3.0), 0.0, NAN, log(0.25), log(2.0)], dtype=torch.float64)
"""old - engine: of two answers, of three tokens and of two."""


def means(gap_N: torch.Tensor, how: Correction) -> dict[str, float]:
    found = engine_metrics(gap_N, PACKED, how)
    return {name: float(total) / float(count) for name, (total, count) in found.items()}


def test_weights() -> None:
    assert weights(GAP, PACKED, Correction("truncated")).tolist() == pytest.approx(
        [2, 1, 1, 0.25, 2]
    )
    floored = Correction("truncated", floor=0.5)
    assert weights(GAP, PACKED, floored).tolist() == pytest.approx([2, 1, 1, 0.5, 2])
    masked = Correction("masked", cap=2.5, floor=0.5)
    assert weights(GAP, PACKED, masked).tolist() == pytest.approx([0, 1, 1, 0, 2])
    whole = Correction("truncated", "sequence", cap=9.0)
    assert weights(GAP, PACKED, whole).tolist() == pytest.approx([3, 3, 3, 0.5, 0.5])
    dropped = Correction("masked", "sequence", cap=2.0)
    assert weights(GAP, PACKED, dropped).tolist() == pytest.approx([0, 0, 0, 0.5, 0.5])
    geometric = Correction("truncated", "geometric", cap=1.2)
    assert weights(GAP, PACKED, geometric).tolist() == pytest.approx([1.2] * 3 + [0.5**0.5] * 2)
    held = Correction("masked", "geometric", cap=2.0, floor=0.8)
    assert weights(GAP, PACKED, held).tolist() == pytest.approx([3 ** (1 / 3)] * 3 + [0] * 2)


def test_metrics_are_of_what_is_known() -> None:
    """Four tokens; e^d is 3, 1, 1/4, 2."""
    found = means(GAP, Correction())
    sizes = [log(3.0), 0.0, log(4.0), log(2.0)]
    assert found["engine/difference"] == pytest.approx(sum(sizes) / 4)
    assert found["engine/difference_square"] == pytest.approx(sum(x**2 for x in sizes) / 4)
    assert found["engine/far"] == pytest.approx(2 / 4)
    assert found["engine/kl_k1"] == pytest.approx(-log(3 * 2 / 4) / 4)
    assert found["engine/kl"] == pytest.approx((3 + 1 + 0.25 + 2 - 4 - log(1.5)) / 4)
    assert found["engine/weight"] == pytest.approx(6.25 / 4)
    assert effective_share(found) == pytest.approx(6.25**2 / (4 * (9 + 1 + 1 / 16 + 4)))
    assert "engine/corrected" not in found
    assert means(GAP, Correction("truncated"))["engine/corrected"] == pytest.approx(1 / 4)
    assert effective_share({}) is None
    assert effective_share({"engine/weight": 0.0, "engine/weight_square": 0.0}) == 0.0  # all masked


def test_a_veto_takes_out_every_token_of_its_sample() -> None:
    """The fourth token has a ratio of 1/4, below 0.3: it takes its whole answer out, also where the mean of the answer
    is within the bounds and where a cap held another of its tokens.
    """
    veto = Correction("truncated", cap=2.0, veto=0.3)
    assert weights(GAP, PACKED, veto)[3:].tolist() == [0.0] * 2
    assert (
        weights(GAP, PACKED, veto)[:3].tolist()
        == weights(GAP, PACKED, veto._replace(veto=0))[:3].tolist()
    )
    geometric = Correction("masked", "geometric", cap=9.0, floor=0.1, veto=0.3)
    assert weights(GAP, PACKED, geometric)[3:].tolist() == [0.0] * 2
    lower = weights(GAP, PACKED, veto._replace(veto=0.2))
    assert lower.tolist() == weights(GAP, PACKED, Correction("truncated")).tolist()
    found = means(GAP, veto)
    known = int((~GAP[3:].isnan()).sum())
    assert found["engine/vetoed"] == pytest.approx(known / 4)
    impossible = torch.tensor([0.0, float("-inf"), NAN, 0.0, 0.0], dtype=torch.float64)
    assert weights(impossible, PACKED, veto).tolist() == [0.0] * 3 + [1.0] * 2


def test_the_engine_as_the_old_policy() -> None:
    """The ratio is of policy to engine, and so is the difference that the monitor reads; the trainer's own logprobs at
    the start are not asked for."""
    logp_N = torch.tensor([-1.0, -0.9, -2.0, -0.5, -1.5], dtype=torch.float64, requires_grad=True)
    engine_N = logp_N.detach() - torch.tensor([0.1, -0.3, 0.0, 0.5, 0.0]).double()
    bypassed = PolicyGradient(is_fresh=False, has_engine_logp=True, is_bypassed=True)
    assert bypassed.needs == ("advantage_N", "engine_logp_N")
    found = bypassed(Scores(logp_N), rolled_out(engine_logp_N=engine_N))
    plain = PolicyGradient(is_fresh=False)(Scores(logp_N), rolled_out(old_logp_N=engine_N))
    grads = [torch.autograd.grad(x.terms["policy"], logp_N)[0] for x in (found, plain)]
    assert found.terms["policy"] == plain.terms["policy"] and torch.equal(*grads)
    for name in ("ratio", "old/kl", "clip/high", "entropy_estimate"):
        assert found.metrics[name][0] == plain.metrics[name][0], name
    assert float(found.metrics["engine/difference"][0]) == pytest.approx(0.9)
    assert found.largest["engine/largest"] == pytest.approx(0.5)
    with pytest.raises(AssertionError, match="ratios are of policy to engine already"):
        replace(bypassed, correction=Correction("masked", "geometric"))


def test_an_engine_that_knows_nothing() -> None:
    unknown = torch.full_like(GAP, NAN)
    assert weights(unknown, PACKED, Correction("truncated")).tolist() == [1.0] * 5
    found = engine_metrics(unknown, PACKED, Correction())
    assert {(float(total), float(count)) for total, count in found.values()} == {(0.0, 0.0)}


def rolled_out(**streams: torch.Tensor) -> Packed:
    return replace(PACKED, streams={"advantage_N": torch.ones(5).double(), **streams})


SURROGATES_OF_TOKENS = [name for name in SURROGATES if name != "gmpo"]


@pytest.mark.parametrize("is_fresh", [True, False])
@pytest.mark.parametrize("name", SURROGATES_OF_TOKENS)
def test_a_masked_token_has_no_gradient(name: str, is_fresh: bool) -> None:
    """Tokens 0 and 3 are masked: one of each answer. The others keep theirs, times their weight."""
    logp_N = torch.tensor([-1.0, -0.9, -2.0, -0.5, -1.5], dtype=torch.float64, requires_grad=True)
    old_N = logp_N.detach() + 0.01 * torch.tensor([1.0, -1.0, 0.5, -0.5, 1.0]).double()
    ratio_N = torch.tensor([3.0, 1.25, 1.0, 0.1, 0.75], dtype=torch.float64)
    trainer_N = logp_N.detach() if is_fresh else old_N
    packed = rolled_out(old_logp_N=old_N, engine_logp_N=trainer_N - ratio_N.log())
    plain = PolicyGradient(name, Bounds(0.2, 0.3), is_fresh=is_fresh, has_engine_logp=True)
    masked = replace(plain, correction=Correction("masked", "token", cap=2.0, floor=0.5))

    def gradient(loss: PolicyGradient) -> torch.Tensor:
        return torch.autograd.grad(loss(Scores(logp_N), packed).terms["policy"], logp_N)[0]

    found_N, plain_N = gradient(masked), gradient(plain)
    assert found_N[[0, 3]].tolist() == [0.0, 0.0]
    expected_N = ratio_N[[1, 2, 4]] * plain_N[[1, 2, 4]]
    assert plain_N.all()
    torch.testing.assert_close(found_N[[1, 2, 4]], expected_N, rtol=1e-12, atol=0)


def test_a_masked_token_keeps_its_part_in_the_ratio_of_gspo() -> None:
    """It is masked, not removed: as it drifts, the sample's ratio passes the bound, and the sample is clipped."""
    logp_N = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    engine_N = logp_N.detach() - torch.tensor([5.0, 0.0, 0.0, 0.0, 0.0]).double()
    how = Correction("masked", "token")
    loss = PolicyGradient(
        "gspo", Bounds(0.2, 0.2), is_fresh=False, has_engine_logp=True, correction=how
    )
    for drift, is_trained in ((0.1, True), (1.0, False)):
        old_N = logp_N.detach() - torch.tensor([drift, 0.0, 0.0, 0.0, 0.0]).double()
        # The engine is off by 5 nats of whatever the old policy says.
        packed = rolled_out(old_logp_N=old_N, engine_logp_N=engine_N + (old_N - logp_N.detach()))
        term = loss(Scores(logp_N), packed).terms["policy"]
        (found_N,) = torch.autograd.grad(term, logp_N)
        assert found_N[0] == 0
        assert found_N[1:3].ne(0).tolist() == [is_trained] * 2
        assert found_N[3:].all()


def test_gmpo_refuses_weights_of_tokens() -> None:
    how = Correction("masked", "token")
    with pytest.raises(AssertionError, match="gmpo with weights of tokens"):
        PolicyGradient("gmpo", Bounds(0.4, 0.4), has_engine_logp=True, correction=how)


def noise(size: int, spread: float = 0.02) -> tuple[Packed, torch.Tensor]:
    """Answers of ``size`` tokens by an honest engine, and old - engine of each token, with spread nats of noise.

    The mean of e^d over what the engine samples is 1, so d has the mean -spread^2 / 2.
    """
    random = torch.Generator().manual_seed(0)
    num_answers = 100 if size > 1000 else 2000
    drawn_N = torch.randn(num_answers * size, generator=random, dtype=torch.float64)
    row_N = torch.arange(num_answers).repeat_interleave(size)
    packed = replace(
        PACKED,
        row_N=row_N,
        weight_N=torch.ones(row_N.numel(), dtype=torch.float64),
        sample_ids=tuple(map(str, range(num_answers))),
    )
    return packed, spread * drawn_N - spread**2 / 2


def left(size: int, how: Correction) -> tuple[float, float]:
    """The mean weight and the effective sample size that a correction leaves."""
    packed, gap_N = noise(size)
    found = engine_metrics(gap_N, packed, how)
    means = {name: float(total) / float(count) for name, (total, count) in found.items()}
    share = effective_share(means)
    assert share is not None
    return means["engine/weight"], share


def test_a_product_fades_with_the_length_and_a_geometric_mean_does_not() -> None:
    """An honest engine, 0.02 nats of noise a token: exact values are 0.156 and 0.19 at 16,384 tokens."""
    product = Correction("masked", "sequence", cap=2.0)
    assert left(256, product) == pytest.approx((0.98, 0.91), abs=0.03)
    weight, effective = left(16384, product)
    assert 0.1 < weight < 0.2
    assert effective < 0.3
    geometric = Correction("masked", "geometric", cap=1.1, floor=0.9)
    for size in (16, 256, 16384):
        weight, effective = left(size, geometric)
        assert weight == pytest.approx(1.0, abs=1e-3)
        assert effective > 0.999


def test_the_largest_difference() -> None:
    engine_N = torch.tensor([-1.0, -2.0, NAN, -4.0, -0.5], dtype=torch.float64)
    scores = Scores(torch.tensor([-1.5, -2.0, -9.0, -3.0, -0.5], dtype=torch.float64))
    fresh = PolicyGradient(is_fresh=True, has_engine_logp=True)
    packed = rolled_out(engine_logp_N=engine_N)
    assert fresh(scores, packed).largest == {"engine/largest": torch.tensor(1.0)}
    # What updates have changed since is no difference of engines.
    old = rolled_out(engine_logp_N=engine_N, old_logp_N=engine_N + 0.25)
    assert replace(fresh, is_fresh=False)(scores, old).largest["engine/largest"] == 0.25
    assert largest_difference(torch.empty(0)) == 0.0


def test_a_token_that_the_engine_calls_impossible_is_no_large_number() -> None:
    difference_N = torch.tensor([0.0, float("inf"), NAN, 0.0, 0.0])
    found = means(difference_N, Correction())
    assert found["engine/difference"] == found["engine/difference_square"] == float("inf")
    assert largest_difference(difference_N) == float("inf")


def test_what_the_old_policy_is_told_apart_by() -> None:
    """Ratios 3/2, 1, 1/2, 1, 1/2 with advantages of 1 and, last, -1: one is held from above, one from below."""
    logp_N = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    ratio_N = torch.tensor([1.5, 1.0, 0.5, 1.0, 0.5], dtype=torch.float64)
    packed = rolled_out(old_logp_N=logp_N - ratio_N.log())
    packed.streams["advantage_N"][4] = -1.0
    found = PolicyGradient(is_fresh=False)(Scores(logp_N), packed).metrics
    of = {name: float(total) / float(count) for name, (total, count) in found.items()}
    assert of["ratio"] == pytest.approx(4.5 / 5)
    assert (of["clip/high"], of["clip/low"]) == (1 / 5, 1 / 5)
    assert of["old/kl_k1"] == pytest.approx(-log(1.5 * 0.25) / 5)
    assert of["old/kl"] == pytest.approx((4.5 - 5 - log(1.5 * 0.25)) / 5)
    assert (of["advantage/mean"], of["advantage/size"]) == (pytest.approx(3 / 5), 1.0)
    assert of["entropy_estimate"] == 1.0


@pytest.mark.parametrize("sampler", ["old", "engine", "engine, in part"])
def test_the_entropy_of_tokens_that_another_policy_drew(sampler: str) -> None:
    """Eight answers of one token, as often as the sampler draws them: 4, 2, 1 and 1 times of 8. The estimate is the
    policy's entropy to the last digits; unweighted it is the cross entropy.
    """
    drawn_N = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3])
    sampler_N = torch.tensor([4.0, 2.0, 1.0, 1.0]).double().div(8).log()[drawn_N]
    policy = torch.tensor([0.005, 0.005, 0.19, 0.8], dtype=torch.float64)
    entropy = -(policy * policy.log()).sum()
    cross = -policy.log()[drawn_N].mean()
    other_N = torch.full_like(sampler_N, -1.3)
    streams = {"advantage_N": torch.ones_like(sampler_N), "old_logp_N": sampler_N}
    if sampler != "old":
        streams |= {"old_logp_N": other_N, "engine_logp_N": sampler_N.clone()}
    if sampler == "engine, in part":
        streams["old_logp_N"][4:] = sampler_N[4:]
        streams["engine_logp_N"][4:] = NAN
    packed = replace(plain_pairs([(1, 1)] * 4), streams=streams)
    loss = PolicyGradient(is_fresh=False, has_engine_logp=sampler != "old")

    def told(loss: PolicyGradient) -> float:
        total, count = loss(Scores(policy.log()[drawn_N]), packed).metrics["entropy_estimate"]
        return float(total / count)

    assert float(entropy) < 0.6 < 3.0 < float(cross)
    assert told(loss) == pytest.approx(float(entropy), rel=1e-12)
    assert told(replace(loss, is_fresh=True)) == pytest.approx(float(cross), rel=1e-12)


def test_the_critic() -> None:
    """Returns 0 and 2, values 1 and 1 that were 0 and 1: held to 0.2 the first is 0.2, whose error is the smaller."""
    packed = replace(
        PACKED,
        read_values={
            "return": torch.tensor([0.0, 2.0]).double(),
            "value": torch.tensor([0.0, 0.5]).double(),
        },
    )
    scores = Scores(torch.empty(0), scalar_R=torch.tensor([1.0, 1.0]).double())
    total, found = value_cost(scores, packed, Critic(coef=1.0, clip=0.2))
    assert float(total) == pytest.approx(0.5 * (1.0 + 1.3**2))
    of = {name: float(value) / float(count) for name, (value, count) in found.items()}
    assert of["value/clipped"] == 0.5
    assert (of["value/mean"], of["value/error"], of["value/error_square"]) == (1.0, 0.0, 1.0)
    assert (of["return/mean"], of["return/square"]) == (1.0, 2.0)
    assert explained_variance(of) == pytest.approx(0.0)  # as good as the mean
    assert explained_variance({**of, "value/error": 1.0}) == 1.0  # off by a constant
    assert explained_variance({**of, "return/square": 1.0}) is None
    assert explained_variance({}) is None


def test_returns_that_differ_by_rounding_are_one() -> None:
    same_R = torch.full((333,), 0.7)
    scores = Scores(torch.empty(0), scalar_R=torch.linspace(0, 1, 333))
    packed = replace(PACKED, read_values={"return": same_R, "value": same_R})
    _, found = value_cost(scores, packed, Critic())
    assert explained_variance({name: float(a / b) for name, (a, b) in found.items()}) is None


def test_the_controller() -> None:
    """A tenth of the error, which counts for a fifth at most."""
    assert adapted(0.5, observed=2.2, target=2.0) == pytest.approx(0.5 * 1.01)
    assert adapted(0.5, observed=90.0, target=2.0) == pytest.approx(0.5 * 1.02)
    assert adapted(0.5, observed=-1.0, target=2.0) == pytest.approx(0.5 * 0.98)
    coef = 0.5
    for _ in range(200):  # a divergence that answers to the coefficient settles at the target
        coef = adapted(coef, observed=exp(-coef), target=exp(-1.0))
    assert coef == pytest.approx(1.0, abs=1e-3)


def test_an_adaptive_entropy_coefficient_is_that_of_each_sample() -> None:
    """0.1 of the first answer, 0.3 of the second: the sum of both bonuses, each as of a constant coefficient."""
    logp_N = torch.tensor([-1.0, -0.9, -2.0, -0.5, -1.5], dtype=torch.float64)
    entropy_N = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    packed = rolled_out()
    packed = replace(packed, values={"entropy_coef": torch.tensor([0.1, 0.3]).double()})
    loss = PolicyGradient(adapts_entropy=True)
    assert loss.needs_values == ("entropy_coef",) and loss.units["entropy"] == "token"
    found = loss(Scores(logp_N, entropy_N), packed)
    assert float(found.terms["entropy"]) == pytest.approx(-(0.1 * 6 + 0.3 * 9), rel=1e-7)
    assert found.metrics["entropy"][0] == 15.0


def test_the_entropy_coefficient_by_hand() -> None:
    """On at and below the target, off above; the state rises below the target only, and is never negative."""
    for observed, wanted in ((0.1, (0.01, 0.015)), (0.2, (0.01, 0.005)), (0.3, (0.0, 0.005))):
        found = entropy_coefs(0.01, observed=observed, target=0.2, step=0.005)
        assert found == pytest.approx(wanted)
    assert entropy_coefs(0.001, observed=0.3, target=0.2, step=0.005) == (0.0, 0.0)
