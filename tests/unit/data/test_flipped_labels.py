"""Suspected flips: the measured rates as bounds, on one rule; a rate that cannot be estimated is unknown."""

import numpy as np
import pytest
from numpy.typing import NDArray

from taut.data.label_noise import PairIds, _boost, _fit_lapse, _folds, find_flips

NUM = 1000


def shorter_is_better(num: int, seed: int) -> list[PairIds]:
    draw = np.random.default_rng(seed)
    pairs = []
    for index in range(num):
        lengths = np.sort(draw.choice(np.arange(5, 60), 2, replace=False))
        prompt, short, long = (draw.integers(0, 300, size) for size in (10, *lengths))
        pairs.append(PairIds(f"a:{index}", prompt, short, long))
    return pairs


def plant(pairs: list[PairIds], rate: float, seed: int) -> tuple[list[PairIds], NDArray[np.bool_]]:
    """Swap the answers of a share of the pairs; which ones."""
    is_flipped = np.random.default_rng(seed).random(len(pairs)) < rate
    flipped = [
        pair._replace(chosen=pair.rejected, rejected=pair.chosen) if flip else pair
        for pair, flip in zip(pairs, is_flipped, strict=True)
    ]
    return flipped, is_flipped


@pytest.mark.parametrize(
    ("rate", "recall", "is_notable", "is_alarming"),
    [(0.0, 0.0, False, False), (0.1, 0.9, True, False), (0.3, 0.5, True, True)],
)
def test_flips_are_found_and_clean_pairs_are_let_be(
    rate: float, recall: float, is_notable: bool, is_alarming: bool
) -> None:
    for seed in range(2):
        pairs, is_flipped = plant(shorter_is_better(NUM, seed), rate, seed)
        found = find_flips(pairs)
        assert found.rate == pytest.approx(is_flipped.mean(), abs=0.04)
        assert found.low <= is_flipped.mean() <= found.high
        places = {suspect.place for suspect in found.suspects}
        flipped = {pair.place for pair, flip in zip(pairs, is_flipped, strict=True) if flip}
        hits = len(places & flipped)
        assert hits >= recall * is_flipped.sum()
        assert len(places) - hits <= 0.01 * NUM
        assert (found.is_notable, found.is_alarming) == (is_notable, is_alarming)


def test_suspects_come_surest_first_and_the_same_each_time() -> None:
    pairs, _ = plant(shorter_is_better(400, 0), 0.1, 0)
    found = find_flips(pairs, seed=3)
    confidences = [suspect.confidence for suspect in found.suspects]
    assert confidences and confidences == sorted(confidences, reverse=True)
    assert min(confidences) >= 0.8
    assert find_flips(pairs, seed=3) == found


def test_labels_without_a_rule_cannot_be_told() -> None:
    pairs, _ = plant(shorter_is_better(NUM, 0), 0.5, 0)
    found = find_flips(pairs)
    assert found.rate is None and not found.suspects
    assert not found.is_notable and not found.is_alarming
    assert found.reason.startswith("no rule could be learned")
    few = find_flips(pairs[:99])
    assert few.rate is None and few.reason == "99 pairs are fewer than 100"


def test_nine_flipped_in_ten_read_as_the_opposite_rule() -> None:
    """The symmetric case: what is suspected are the labels left as they were."""
    pairs, is_flipped = plant(shorter_is_better(NUM, 0), 0.9, 0)
    found = find_flips(pairs)
    assert found.rate == pytest.approx(1 - is_flipped.mean(), abs=0.04)
    kept = {pair.place for pair, flip in zip(pairs, is_flipped, strict=True) if not flip}
    assert {suspect.place for suspect in found.suspects} <= kept


def test_no_pair_is_judged_by_a_model_that_saw_its_prompt() -> None:
    """The pairs of a prompt mark their better answers by an id of their own: who saw the prompt would know."""
    draw = np.random.default_rng(0)
    pairs = []
    for index in range(NUM):
        prompt, mark = index % 50, 200 + index % 50
        chosen, rejected = (draw.integers(100, 200, 8) for _ in range(2))
        pairs.append(
            PairIds(
                f"a:{index}",
                np.array([prompt]),
                np.append(chosen, mark),
                np.append(rejected, draw.integers(100, 200)),
            )
        )
    fold = _folds(pairs, seed=0)
    assert all(len(set(fold[prompt::50].tolist())) == 1 for prompt in range(50))
    assert set(fold.tolist()) == set(range(5))
    assert find_flips(pairs).rate is None


def test_where_all_prompts_are_one_pairs_of_the_same_answers_share_a_fold() -> None:
    pairs = [pair._replace(prompt=np.array([1])) for pair in shorter_is_better(200, 0)]
    opposite = [pair._replace(chosen=pair.rejected, rejected=pair.chosen) for pair in pairs]
    fold = _folds(pairs + opposite, seed=0)
    assert fold[:200].tolist() == fold[200:].tolist()
    assert find_flips(pairs).accuracy > 0.99


def test_an_empty_answer_is_read() -> None:
    pairs = shorter_is_better(200, 0)
    pairs[0] = pairs[0]._replace(chosen=np.empty(0, dtype=np.int64))
    assert find_flips(pairs).accuracy > 0.95


def test_boosting_takes_a_fifth_of_the_way_along_the_best_column() -> None:
    """Columns (1, 1) and (3, -1), target 1: products with it 2 and 2, squares 2 and 10. The first column explains
    2*2/2 = 2, the second 2*2/10; so w_0 = 0.2 * 2/2 after one step."""
    table = np.array([[1.0, 3.0], [1.0, -1.0]])
    weights = _boost(table.T @ table, table.sum(0))
    np.testing.assert_allclose(weights[0], [0.2, 0])
    np.testing.assert_allclose(table @ weights[-1], [1, 1], atol=1e-6)


def test_the_fit_finds_the_rate_of_its_own_model() -> None:
    draw = np.random.default_rng(0)
    sure = draw.exponential(1.0, 20_000)
    for rate in (0.0, 0.2):
        agrees = draw.random(sure.size) < rate + (1 - 2 * rate) / (1 + np.exp(-2 * sure))
        fit = _fit_lapse(np.where(agrees, sure, -sure))
        assert fit.low <= rate <= fit.high
        assert fit.high - fit.low < 0.08
