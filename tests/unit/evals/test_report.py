"""The numbers of a report, each worked out by hand in its test."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.refusals import ErrorCode, refused
from tests.helpers.scripted_engines import FakeEngine

from taut.config import from_mapping
from taut.data.rows.prompts import PromptRow
from taut.errors import DataError
from taut.evals.answers import answer, require_scorable
from taut.evals.report import Answer, Report, build_report, pass_ks, spaced
from taut.evals.settings import EvalSampling
from taut.evals.statistics import bootstrap_interval, mean, pass_at_k, wilson_interval
from taut.inference.settings import Sampling
from taut.rewards import RewardInput, Verifier
from taut.rewards.registry import Part
from taut.rewards.reward_set import RewardSet, open_rewards
from taut.rewards.settings import GradingConfig
from taut.types import FinishReason


def rows(count: int, reference: str = "fox") -> list[PromptRow]:
    return [
        PromptRow(
            f"q.jsonl:{k}", f"q.jsonl:{k}", np.array([1, 2]), f"q{k}", (reference,), "answer", {}
        )
        for k in range(1, count + 1)
    ]


def answers(
    said: Sequence[Sequence[str]], reward_set: RewardSet, reference: str = "fox"
) -> list[Answer]:
    """``said``: for each row, its completions."""
    table = {row.id: texts for row, texts in zip(rows(len(said), reference), said, strict=True)}
    ends: dict[str, FinishReason] = {"cut": "length", "lost": "error"}
    engine = FakeEngine(
        lambda name, index: table[name][index], lambda text: ends.get(text.split()[-1], "stop")
    )
    sampling = Sampling(n=len(said[0]))
    return answer(engine, rows(len(said), reference), sampling, reward_set)


def report(said: Sequence[Sequence[str]], *names: str, reference: str = "fox") -> Report:
    return build_report(answers(said, open_rewards(names), reference), names)


@pytest.mark.parametrize(
    ("hits", "trials", "low", "high"),
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (59, 177, 0.2681, 0.4057), (1, 1, 0.2065, 1)],
)
def test_wilson_interval(hits: int, trials: int, low: float, high: float) -> None:
    assert wilson_interval(hits, trials) == pytest.approx((low, high), abs=1e-4)


def test_an_interval_ends_at_0_and_1_exactly_where_nothing_or_everything_was_right() -> None:
    """Of 69 answers without a right one the formula's rounding would print 3.469e-18."""
    found = [(wilson_interval(0, n).low, wilson_interval(n, n).high) for n in range(1, 500)]
    assert set(found) == {(0.0, 1.0)}
    assert all(wilson_interval(1, n).low > 0 for n in range(2, 500))


def test_values_that_cancel_have_a_mean_of_0() -> None:
    """numpy's mean of these is 9.25e-18."""
    assert mean([0.1, 0.2, -0.3]) == 0.0
    assert mean([1e-20, 3e-20]) == pytest.approx(2e-20), "small values are no rounding"
    bounds = bootstrap_interval([0.1, 0.2, -0.3] * 7)
    assert all(bound == 0.0 or abs(bound) > 1e-6 for bound in bounds)


@given(st.integers(1, 300), st.floats(0, 1))
def test_an_interval_holds_its_rate_and_stays_between_0_and_1(trials: int, rate: float) -> None:
    low, high = wilson_interval(rate * trials, trials)
    assert 0 <= low <= rate + 1e-9
    assert rate - 1e-9 <= high <= 1


def test_the_bootstrap_of_many_values_is_the_normal_interval() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    low, high = bootstrap_interval(values.tolist())
    half = 1.96 * values.std() / math.sqrt(400)
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.03)
    assert bootstrap_interval(values.tolist()) == (low, high)


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_all_choices_with_a_right_one(
    num_samples: int, data: st.DataObject
) -> None:
    right = data.draw(st.integers(0, num_samples))
    k = data.draw(st.integers(1, num_samples))
    chosen = list(combinations([True] * right + [False] * (num_samples - right), k))
    expected = sum(any(choice) for choice in chosen) / len(chosen)
    assert pass_at_k(num_samples, right, k) == pytest.approx(expected)


def test_one_completion_each() -> None:
    """Two of four are right, three hold the reference, one is cut; lengths 2, 4, 3 and 3 tokens."""
    found = report([["fox"], ["a fox cut"], ["red fox"], ["The Fox."]], "exact_match", "contains")
    exact, holds = found.metrics
    assert (exact.mean, holds.mean, found.stopped.mean) == (0.5, 1.0, 0.75)
    assert (exact.low, exact.high) == pytest.approx(wilson_interval(2, 4))
    assert exact.interval == "wilson"
    assert (exact.num_scored, exact.num_not_applicable, exact.errors) == (4, 0, ())
    assert exact.pass_at == {}
    assert found.lengths is not None
    assert (found.lengths.mean, found.lengths.median, found.lengths.longest) == (3.0, 3.0, 4)
    assert found.lengths.histogram == ((1, 1, 0), (2, 2, 1), (3, 4, 3))
    assert (found.num_prompts, found.num_completions, found.failures) == (4, 4, ())
    assert found.values() == {"exact_match": 0.5, "contains": 1.0, "stopped": 0.75}
    assert json.loads(json.dumps(found.as_dict()))["metrics"][0]["mean"] == 0.5


def test_several_completions_each() -> None:
    """Of 4, prompt 1 has 1 right and prompt 2 has none: mean 1/8.

    pass@2 = (1 - C(3,2)/C(4,2)) / 2 = (1 - 3/6) / 2 = 1/4; pass@4 = (1 + 0) / 2.
    The interval is that of 2 trials, not of 8.
    """
    found = report([["fox", "x", "x", "x"], ["x", "x", "x", "x"]], "exact_match")
    (exact,) = found.metrics
    assert exact.mean == 0.125
    assert exact.pass_at == pytest.approx({2: 0.25, 4: 0.5})
    assert (exact.low, exact.high) == pytest.approx(wilson_interval(0.25, 2))
    assert found.values()["exact_match_pass_2"] == 0.25
    assert found.stopped.pass_at == {}


def test_which_k_are_reported() -> None:
    assert [pass_ks(n) for n in (0, 1, 2, 3, 6, 8)] == [[], [], [2], [2, 3], [2, 4, 6], [2, 4, 8]]


class Length(Verifier):
    def __call__(self, answered: RewardInput) -> float | None:
        if "bad" in answered.text:
            raise RuntimeError("no luck")
        return None if "skip" in answered.text else len(answered.text.split()) / 2


def test_errors_and_what_does_not_apply_are_counted_and_never_0() -> None:
    said = [["one two three"], ["skip"], ["bad"], ["one"]]
    reward_set = RewardSet([Part("length", Length(), 1.0, 1.0)], GradingConfig(), {})
    (metric,) = build_report(answers(said, reward_set), ["length"]).metrics
    assert metric.mean == 1.0
    assert (metric.num_scored, metric.num_not_applicable) == (2, 1)
    assert metric.errors == ("q.jsonl:3: RuntimeError: no luck",)
    assert metric.error_share == 0.25
    assert metric.interval == "bootstrap"
    assert (metric.low, metric.high) == (0.5, 1.5)


def test_what_the_engine_could_not_finish_is_scored_by_nobody() -> None:
    found = report([["fox", "lost"], ["lost", "lost"]], "exact_match")
    assert found.failures == (
        "q.jsonl:1#1: the server went away",
        "q.jsonl:2: the server went away",
        "q.jsonl:2#1: the server went away",
    )
    assert (found.metrics[0].mean, found.metrics[0].num_scored) == (1.0, 1)
    assert found.metrics[0].pass_at == {}
    assert found.stopped.num_scored == 1
    nothing = report([["lost"]], "exact_match")
    assert (nothing.metrics[0].mean, nothing.metrics[0].low, nothing.lengths) == (None, None, None)
    assert nothing.values() == {}


def test_samples_are_evenly_spaced_first_completions() -> None:
    made = answers([["a", "b"]] * 7, open_rewards(["exact_match"]))
    assert [a.row.id for a in spaced(made, 3)] == ["q.jsonl:1", "q.jsonl:4", "q.jsonl:7"]
    assert {a.completion.index for a in spaced(made, 30)} == {0}
    assert len(spaced(made, 30)) == 7
    assert spaced([], 3) == []


def test_answers_are_greedy_unless_a_temperature_is_set() -> None:
    assert EvalSampling().temperature == 0
    with refused(ErrorCode("temperature/n")):
        from_mapping(EvalSampling, {"n": 4})
    assert from_mapping(EvalSampling, {"n": 4, "temperature": 0.7}).n == 4


def test_references_no_reward_can_use_are_refused_before_anything_is_generated() -> None:
    reward_set = open_rewards(["exact_match", "numeric"])
    require_scorable(rows(3, "4"), reward_set, 0.0)
    require_scorable(rows(3), reward_set, 1.0)
    with pytest.raises(DataError, match=r"q\.jsonl:1: numeric: .*'fox' without a number.* 3 of 3"):
        require_scorable(rows(3), reward_set, 0.5)
