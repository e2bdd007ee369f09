"""Contradictions, repeats, equal answers and lengths: small cases by hand."""

import numpy as np
import pytest

from taut.data import label_noise
from taut.data.label_noise import Earlier, Lengths, PairIds, PairReport, examine_pairs


def pair(place: str, prompt: str, chosen: str, rejected: str) -> PairIds:
    """A letter is a token."""
    return PairIds(
        place,
        *(np.array([ord(c) for c in text], dtype=np.int64) for text in (prompt, chosen, rejected)),
    )


def test_contradictions_repeats_and_equal_answers() -> None:
    report = examine_pairs(
        [
            pair("a:1", "p", "good", "bad"),
            pair("a:2", "p", "bad", "good"),  # contradicts the first
            pair("a:3", "q", "bad", "good"),  # another prompt
            pair("a:4", "p", "good", "bad"),  # repeats the first, contradicts the second
            pair("a:5", "p", "same", "same"),
            pair("a:6", "pg", "ood", "bad"),  # other ids, though they run together alike
        ]
    )
    assert report.num_pairs == 6
    assert report.identical == ("a:5",)
    assert report.repeats == (Earlier("a:4", "a:1"),)
    assert report.contradictions == (Earlier("a:2", "a:1"), Earlier("a:4", "a:2"))
    assert report.flips.num_pairs == 4, "the repeat and the equal answers are judged by nobody"
    assert report.flips.rate is None


def test_lengths() -> None:
    """Differences 2, -1, 0: their mean is 1/3, the root of their mean square sqrt(5/3)."""
    report = examine_pairs(
        [pair("a:1", "p", "aaa", "b"), pair("a:2", "q", "a", "bb"), pair("a:3", "r", "a", "b")]
    )
    lengths = report.lengths
    assert (lengths.num_longer, lengths.num_shorter, lengths.num_unequal) == (1, 1, 2)
    assert lengths.mean_difference == pytest.approx(1 / 3)
    assert lengths.correlation == pytest.approx((1 / 3) / np.sqrt(5 / 3))
    assert lengths.accuracy == 0.5
    assert Lengths(1, 4, 0.0, 0.0).accuracy == 0.8
    assert examine_pairs([]).lengths == Lengths(0, 0, 0.0, 0.0)
    assert Lengths(0, 0, 0.0, 0.0).accuracy == 0


def test_a_few_in_many_are_an_accident() -> None:
    def report(num_pairs: int) -> PairReport:
        return examine_pairs([pair(f"a:{n}", str(n), "a", "b") for n in range(num_pairs)])

    assert not report(10).is_many(4)
    assert report(500).is_many(5)
    assert not report(501).is_many(5)


def test_many_pairs_are_sampled_by_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_noise, "MOST_PAIRS", 150)
    pairs = [pair(f"a:{n}", str(n), "a" * (1 + n % 7), "b" * (9 + n % 5)) for n in range(400)]
    report = examine_pairs(pairs, seed=1)
    assert report.num_pairs == 400 and report.lengths.num_shorter == 400
    assert report.flips.num_pairs == 150
    assert report.flips.accuracy == 1.0 and report.flips.rate == 0.0
    assert examine_pairs(pairs, seed=1) == report
