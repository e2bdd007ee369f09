"""What every loss of the registry is held to, by being listed there.

Reference for all layouts: each group in a micro-batch of its own. Statistics of the whole step are gathered first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import pytest
import torch
from tests.helpers.preference_rows import (
    ROLLED_OUT,
    answers_for,
    groups_of,
    packs,
    random_scores,
    ready,
    scales,
    step_loss,
    step_metrics,
)
from tests.helpers.tiny_models import CARRIED, tiny_config, tiny_model
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from taut.data.packing import PackPolicy
from taut.losses.loss import Loss
from taut.losses.policy import SURROGATES, Bounds, PolicyGradient
from taut.losses.preference import VARIANTS, DpoLoss
from taut.losses.registry import LOSSES
from taut.models.attention_backends import PREFIX
from taut.models.heads import SharedCritic
from taut.models.precision import compute_context
from taut.models.scorer import Scorer
from taut.types import Packed, Sample, Scores

REFERENCE = PREFIX + "reference"
LIMIT = 1e-9
SHARE_ALL = PackPolicy(share_prefixes=True, min_saved_tokens=1)
EXTREMES = (1e4, -1e4, 3e6, -3e6)

Layout = Callable[[Sequence[Sequence[Sample]]], list[Packed]]
LAYOUTS: dict[str, Layout] = {
    "packed": lambda groups: [packs(groups)],
    "shared": lambda groups: [packs(groups, SHARE_ALL)],
    "another order": lambda groups: [packs([g[::-1] for g in groups[::-1]], SHARE_ALL)],
    "split, mixed": lambda groups: [packs(groups[2::-1], SHARE_ALL), packs(groups[3:])],
}
"""None cuts a group: that is an atom."""


CONSTANT_IN_PART = {
    "dpo_aot_unpaired",
    "policy_gspo_token",
    "policy_gspo_truncated",
    "policy_cispo",
    "policy_kl",
}
"""Their gradient is not the derivative of their value, on purpose: it is in tests/oracle, AOT's below."""


def scorer_for(loss: Loss, name: str = "llama") -> Scorer:
    if not loss.wants.scalar:
        return Scorer(tiny_model(name, attention=REFERENCE))
    if loss.wants.logp:
        model = tiny_model(name, attention=REFERENCE)
        critic = SharedCritic(model)
        torch.nn.init.normal_(critic.score.weight, generator=torch.Generator().manual_seed(0))
        return Scorer(model, critic=critic)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(
            tiny_config("qwen2", num_labels=1), attn_implementation=REFERENCE
        )
    model.config.use_cache = False
    return Scorer(model.to(torch.float64).train())


def measure(
    scorer: Scorer, loss: Loss, microbatches: list[Packed]
) -> tuple[float, dict[str, Tensor]]:
    """A step's loss and every gradient, micro-batch by micro-batch."""
    scorer.zero_grad()
    score = partial(scorer, wants=loss.wants)
    total = 0.0
    with compute_context(torch.float64, torch.device("cpu")):
        by = scales(loss, microbatches)
        for packed in ready(loss, microbatches, score):
            terms = loss(score(packed), packed).terms
            share = torch.stack([by[term] * value for term, value in terms.items()]).sum()
            share.backward()
            total += float(share.detach())
    named = scorer.named_parameters()
    return total, {name: p.grad.clone() for name, p in named if p.grad is not None}


def require_equal(
    found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]
) -> None:
    assert found[0] == pytest.approx(expected[0], rel=LIMIT)
    assert found[1].keys() == expected[1].keys()
    scale = max(float(grad.norm()) for grad in expected[1].values())
    assert scale > 1e-6
    for name, grad in expected[1].items():
        assert float((found[1][name] - grad).norm()) <= LIMIT * scale, name


@pytest.mark.parametrize("name", ["policy_fresh", "policy_gspo_fresh"])
def test_a_gradient_formed_in_the_forward_is_the_gradient(name: str) -> None:
    """Of a temperature, too."""
    loss = replace(LOSSES[name], temperature=0.7)  # type: ignore[call-arg]
    samples = answers_for(loss)
    scorer = scorer_for(loss)
    _, expected = measure(scorer, loss, alone(samples))
    scorer.zero_grad()
    (packed,) = LAYOUTS["shared"](groups_of(samples))
    linear = loss.linear_weights(packed)
    assert linear is not None
    with compute_context(torch.float64, torch.device("cpu")):
        scores = scorer(packed, scales(loss, [packed])["policy"] * linear["policy"], loss.wants)
        scores.linear_sum.backward()
    for parameter_name, parameter in scorer.named_parameters():
        if parameter_name in expected:
            gap = (parameter.grad - expected[parameter_name]).norm()
            assert float(gap) <= LIMIT * float(expected[parameter_name].norm()), parameter_name


def alone(samples: Sequence[Sample]) -> list[Packed]:
    return [packs([group]) for group in groups_of(samples)]


CASES = [("llama", name) for name in LOSSES] + [
    (name, "dpo_sigmoid") for name in CARRIED if name != "llama"
]


@pytest.mark.parametrize(("name", "loss"), CASES)
def test_every_layout_gives_the_same_loss_and_gradients(name: str, loss: str) -> None:
    samples = answers_for(LOSSES[loss])
    scorer = scorer_for(LOSSES[loss], name)
    expected = measure(scorer, LOSSES[loss], alone(samples))
    for layout in LAYOUTS.values():
        require_equal(measure(scorer, LOSSES[loss], layout(groups_of(samples))), expected)


@pytest.mark.parametrize("name", LOSSES)
def test_every_layout_gives_the_same_metrics(name: str) -> None:
    loss = LOSSES[name]
    samples = answers_for(loss)
    expected = step_metrics(loss, alone(samples), random_scores)
    assert bool(expected) == (name != "cross_entropy")
    for layout in LAYOUTS.values():
        found = step_metrics(loss, layout(groups_of(samples)), random_scores)
        assert found == pytest.approx(expected, rel=LIMIT, abs=LIMIT)


def leaf(loss: Loss, scores: Scores) -> tuple[Tensor, Callable[[Tensor], Scores]]:
    """What the loss is a function of, and the scores with that in place."""
    field = "scalar_R" if loss.wants.scalar else "logp_N"
    value: Tensor = getattr(scores, field)
    return value.detach().requires_grad_(), lambda x: scores._replace(**{field: x})


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in CONSTANT_IN_PART])
def test_the_gradient_is_the_derivative(name: str) -> None:
    """By finite differences, statistics held: they are constants; so is the old policy, where it is the policy."""
    loss = LOSSES[name]
    given = packs(groups_of(answers_for(loss)), SHARE_ALL)
    scores = random_scores(given)
    (packed,) = ready(loss, [given], random_scores)
    if isinstance(loss, PolicyGradient):
        loss, packed = with_old(loss, packed, scores)
    x, put = leaf(loss, scores)

    def terms(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(loss(put(x), packed).terms.values())

    assert torch.autograd.gradcheck(terms, (x,), eps=1e-6, atol=1e-7)


def with_old(loss: PolicyGradient, packed: Packed, scores: Scores) -> tuple[PolicyGradient, Packed]:
    """The same where the old policy is a stream, if it was the policy itself."""
    if not loss.is_fresh:
        return loss, packed
    streams = {**packed.streams, "old_logp_N": scores.logp_N.detach().clone()}
    return replace(loss, is_fresh=False), replace(packed, streams=streams)


def gradient(loss: Loss, packed: Packed, scores: Scores) -> dict[str, Tensor]:
    x = scores.logp_N.detach().requires_grad_()
    terms = loss(scores._replace(logp_N=x), packed).terms
    return {
        name: torch.autograd.grad(total, x, retain_graph=True)[0]
        for name, total in terms.items()
        if total.requires_grad
    }


POLICY = [name for name, loss in LOSSES.items() if isinstance(loss, PolicyGradient)]


@pytest.mark.parametrize("name", POLICY)
def test_the_first_update_of_a_roll_out_is_reinforce(name: str) -> None:
    """Ratios are 1: the same gradient where the old policy is a stream and where it is the policy, and, of a sample's
    one advantage, that of -A log pi; known before the forward where that is said.
    """
    loss = LOSSES[name]
    assert isinstance(loss, PolicyGradient)
    loss = replace(loss, is_fresh=True, is_bypassed=False)
    packed = packs(groups_of(answers_for(loss)), SHARE_ALL)
    of_S = torch.randn(packed.num_samples, generator=torch.Generator().manual_seed(0)).double()
    for advantage_N in (packed.streams["advantage_N"], of_S[packed.row_N]):
        given = replace(packed, streams={**packed.streams, "advantage_N": advantage_N})
        scores = random_scores(given)
        found = gradient(loss, given, scores)
        torch.testing.assert_close(found, gradient(*with_old(loss, given, scores), scores))
        linear = loss.linear_weights(given)
        if linear is not None:
            torch.testing.assert_close(linear, found, rtol=1e-12, atol=1e-15)
    plain = replace(loss, surrogate="reinforce", bounds=Bounds(0.2, 0.28))
    torch.testing.assert_close(found, gradient(plain, given, scores), rtol=1e-12, atol=1e-15)
    is_alone = loss.correction.kind == "none" and loss.units.keys() == {"policy"}
    assert (linear is not None) == is_alone


@pytest.mark.parametrize("variant", ["aot", "aot_unpaired"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_sorted_over_the_step_value_and_gradient_are_the_whole_steps(
    variant: Literal["aot", "aot_unpaired"], smoothing: float
) -> None:
    """Micro-batches against the sorted formula over all pairs at once, and against finite differences of it."""
    loss = DpoLoss(beta=0.7, loss=variant, label_smoothing=smoothing)
    microbatches = alone(answers_for(loss))
    sizes = [packed.num_targets for packed in microbatches]
    drawn = torch.cat([random_scores(packed).logp_N for packed in microbatches])
    logp_N = drawn.detach().requires_grad_()

    def of(logp_N: Tensor) -> Callable[[Packed], Scores]:
        parts = dict(zip(map(names, microbatches), logp_N.split(sizes), strict=True))
        return lambda packed: Scores(parts[names(packed)])

    def names(packed: Packed) -> tuple[str, ...]:
        return packed.sample_ids

    def at_once(logp_N: Tensor) -> Tensor:
        better, worse, reference = [], [], []
        for packed in microbatches:
            logp_S = packed.by_sample(packed.weight_N * of(logp_N)(packed).logp_N)
            ref_S = packed.by_sample(packed.weight_N * packed.streams["ref_logp_N"])
            ratio_S = logp_S - ref_S
            better.append(ratio_S[packed.better_P])
            worse.append(ratio_S[packed.worse_P])
            reference.append(ref_S[packed.better_P] - ref_S[packed.worse_P])
        r_w, r_l, b = torch.cat(better), torch.cat(worse), torch.cat(reference)
        if variant == "aot":
            gap = (r_w - r_l + b).sort().values - b.sort().values
        else:
            gap = r_w.sort().values - r_l.sort().values
        x = 0.7 * gap
        log_sigmoid = torch.nn.functional.logsigmoid
        return -((1 - smoothing) * log_sigmoid(x) + smoothing * log_sigmoid(-x)).mean()

    ours, theirs = step_loss(loss, microbatches, of(logp_N)), at_once(logp_N)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    (grad,) = torch.autograd.grad(ours, logp_N)
    (expected,) = torch.autograd.grad(theirs, logp_N)
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-14)
    assert torch.autograd.gradcheck(
        lambda x: step_loss(loss, microbatches, of(x)), (logp_N,), eps=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LOSSES)
def test_extreme_log_ratios_stay_finite(name: str, dtype: torch.dtype) -> None:
    """Each answer in turn far above and far below the reference, and all of them; scalars likewise; certainties."""
    loss = LOSSES[name]
    for extreme in EXTREMES:
        for row in (None, 0, 1, 4):
            given = packs(groups_of(answers_for(loss)))
            score = partial(extreme_scores, extreme, row, dtype)
            (packed,) = ready(loss, [given], score)
            x, put = leaf(loss, score(packed))
            found = loss(put(x), packed)
            total = torch.stack(list(found.terms.values())).sum()
            (grad,) = torch.autograd.grad(total, x)
            assert total.dtype == dtype
            assert torch.isfinite(total)
            assert torch.isfinite(grad).all()
            assert all(torch.isfinite(value) for value, _ in found.metrics.values())


def extreme_scores(extreme: float, row: int | None, dtype: torch.dtype, packed: Packed) -> Scores:
    """One sample, or all, so far from the reference. No log-probability is above 0: for a large ratio the sample is
    certain, and what the reference says of it is changed in place.
    """
    usual = random_scores(packed)
    assert usual.scalar_R is not None
    here_N = torch.ones_like(packed.row_N).bool() if row is None else packed.row_N == row
    here_R = torch.ones_like(packed.row_R).bool() if row is None else packed.row_R == row
    if extreme > 0:
        for name in ("ref_logp_N", *ROLLED_OUT):
            packed.streams[name][here_N] = -extreme
    return Scores(
        torch.where(here_N, min(extreme, 0.0), usual.logp_N).to(dtype),
        entropy_N=usual.entropy_N,
        scalar_R=torch.where(here_R, extreme, usual.scalar_R).to(dtype),
    )


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_declared_is_what_is_read(name: str) -> None:
    """A loss reads the streams and values it says, no others, and each of them; its terms are its units."""
    loss = LOSSES[name]
    given = packs(groups_of(answers_for(loss)))
    scores = random_scores(given)
    (packed,) = ready(loss, [given], random_scores)
    told = replace(
        packed,
        streams={key: packed.streams[key] for key in loss.needs},
        values={key: packed.values[key] for key in loss.needs_values},
    )
    entropy_N = scores.entropy_N if loss.wants.entropy else None
    asked = scores._replace(
        entropy_N=entropy_N,
        scalar_R=scores.scalar_R if loss.wants.scalar else None,
        logp_N=scores.logp_N if loss.wants.logp else scores.logp_N[:0],
    )
    found = loss(asked, told)
    assert found.terms.keys() == loss.units.keys()
    assert ("entropy" in found.metrics) == loss.wants.entropy
    assert all(not total.requires_grad for total, _ in found.metrics.values())
    for key in loss.needs:
        with pytest.raises(KeyError):
            loss(asked, replace(told, streams={k: v for k, v in told.streams.items() if k != key}))
    for key in set(loss.needs_values) - {"preference"}:  # which pack made pairs of
        with pytest.raises(KeyError):
            loss(asked, replace(told, values={k: v for k, v in told.values.items() if k != key}))
    if loss.observes:
        with pytest.raises(KeyError):
            loss(asked, replace(told, stats={}))
    assert set(loss.best_by) <= found.metrics.keys()


OF_PAIRS = [
    name for name, loss in LOSSES.items() if set(loss.units.values()) <= {"pair", "better_token"}
]


@pytest.mark.parametrize("name", OF_PAIRS)
def test_a_micro_batch_without_pairs_gives_nothing(name: str) -> None:
    """As on a rank that has fewer micro-batches than another: its sum over pairs is 0, with a gradient of 0."""
    loss = LOSSES[name]
    whole = packs(groups_of(answers_for(loss)))
    single = packs([answers_for(loss)[:1]])
    given = ready(loss, [whole, single], random_scores)[1]
    x, put = leaf(loss, random_scores(single))
    total = torch.stack(list(loss(put(x), given).terms.values())).sum()
    (grad,) = torch.autograd.grad(total, x)
    assert total.item() == 0
    assert not grad.any()


def test_all_surrogates_are_listed() -> None:
    made = [loss for loss in LOSSES.values() if isinstance(loss, PolicyGradient)]
    assert {loss.surrogate for loss in made if not loss.is_fresh} == SURROGATES.keys()


def test_all_variants_are_listed() -> None:
    listed = {
        name for loss in LOSSES.values() if isinstance(loss, DpoLoss) for name, _ in loss.terms
    }
    assert listed == set(VARIANTS)
