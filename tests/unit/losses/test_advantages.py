"""Advantages against the exact gradient of a policy of four actions, whose groups can all be listed; shaping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from math import comb
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.sampled_outcomes import outcomes_of
from torch import Tensor

from taut.errors import ConfigError
from taut.losses.advantages import (
    ESTIMATORS,
    Estimator,
    Outcomes,
    Scale,
    by_turn,
    gae,
    length_cost,
    mean,
    pass_at_k,
    rloo,
    soft_overlong,
    stopped,
    unfinished,
    whiten,
)

SIZE = 4
POLICY = torch.tensor([0.3, -0.8, 0.5, -0.1], dtype=torch.float64, requires_grad=True)
REWARD = torch.tensor([0.2, 1.7, -0.4, 0.9], dtype=torch.float64)
SUCCESS = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
GROUPS = torch.tensor(list(product(range(4), repeat=SIZE)))
SOME = torch.tensor([0.1, 0.6, 0.3, 0.7, 0.2, 0.2, 0.2, 5.0], dtype=torch.float64)
OF = torch.tensor([4, 4, 4, 4, 9, 9, 9, -1])
"""A group with spread, one whose rewards are alike, one of one."""


def slope(value: Tensor) -> Tensor:
    return torch.autograd.grad(value, POLICY)[0]


def of_samples(estimator: Estimator, reward_S: Tensor, group_S: Tensor) -> Tensor:
    """Advantages of samples of one token each, without penalties."""
    nothing = [torch.zeros(1, dtype=torch.float64)] * reward_S.numel()
    return torch.cat(estimator(outcomes_of(reward_S, group_S), nothing))


def expected(estimator: Estimator, reward: Tensor) -> Tensor:
    """The mean gradient of 1/n sum of A log pi over groups of n."""
    log_p = POLICY.log_softmax(0)
    weight_B = log_p.detach()[GROUPS].sum(1).exp()
    one = torch.zeros(SIZE, dtype=torch.int64)
    advantage_BG = torch.stack([of_samples(estimator, reward[actions], one) for actions in GROUPS])
    return slope((weight_B[:, None] * advantage_BG * log_p[GROUPS]).sum() / SIZE)


def gradient_of_reward(reward: Tensor = REWARD) -> Tensor:
    return slope((POLICY.softmax(0) * reward).sum())


def test_rloo_is_unbiased() -> None:
    found = expected(ESTIMATORS["rloo"], REWARD)
    torch.testing.assert_close(found, gradient_of_reward(), rtol=1e-12, atol=1e-15)


def test_the_mean_is_shorter_by_one_in_n() -> None:
    """Its own reward is in the baseline."""
    found = expected(ESTIMATORS["mean"], REWARD)
    exact = gradient_of_reward() * (SIZE - 1) / SIZE
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ["group", "reinforce_pp", "reinforce_pp_baseline"])
def test_what_is_normalized_points_the_same_way(name: str) -> None:
    """Of success and failure the exact direction, of a length of its own; of other rewards it is biased, a little."""
    for reward, least in ((SUCCESS, 1.0), (REWARD, 0.97)):
        found, exact = expected(ESTIMATORS[name], reward), gradient_of_reward(reward)
        assert torch.cosine_similarity(found, exact, dim=0).item() >= least - 1e-12
    assert float((found - exact).norm()) > 0.05 * float(exact.norm())


def test_maxrl_has_the_gradient_of_the_truncated_likelihood() -> None:
    """Of log p = -sum over k of (1 - p)^k / k up to order n - 1; the whole series is log p."""
    p = (POLICY.softmax(0) * SUCCESS).sum()
    truncated = torch.stack([-((1 - p) ** k) / k for k in range(1, SIZE)]).sum()
    found = expected(ESTIMATORS["maxrl"], SUCCESS)
    torch.testing.assert_close(found, slope(truncated), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("reward", [SUCCESS, REWARD])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pass_at_k_has_the_gradient_of_the_best_of_k(k: int, reward: Tensor) -> None:
    """E max of k draws; of success and failure that is 1 - (1 - p)^k."""
    draws = torch.tensor(list(product(range(4), repeat=k)))
    best = reward[draws].amax(1)
    exact = slope((POLICY.log_softmax(0)[draws].sum(1).exp() * best).sum())
    found = expected(Estimator(partial(pass_at_k, k=k), rloo), reward)
    torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-14)


def test_pass_at_k_by_subsets() -> None:
    """n / C(n, k) sum over subsets with i of (max - max without i), ties included."""
    n, k = 6, 3
    reward = torch.tensor([0.3, 0.9, 0.3, -1.0, 0.9, 0.5], dtype=torch.float64)
    found = pass_at_k(reward, torch.zeros(n, dtype=torch.int64), k=k)
    values = reward.tolist()
    subsets = list(combinations(range(n), k))
    by_hand = [
        sum(
            max(values[j] for j in some) - max(values[j] for j in some if j != i)
            for some in subsets
            if i in some
        )
        * n
        / len(subsets)
        for i in range(n)
    ]
    assert found.tolist() == pytest.approx(by_hand, rel=1e-12)


def test_pass_at_k_of_large_groups() -> None:
    """More subsets than an int64 counts: with every other answer right, k that are all wrong are rare."""
    reward = torch.tensor([1.0, 0.0] * 34, dtype=torch.float64)
    found = pass_at_k(reward, torch.zeros(68, dtype=torch.int64), k=34)
    assert found.sum().item() == pytest.approx(68 * comb(34, 33) * 34 / comb(68, 34), rel=1e-9)


def test_what_differs_by_rounding_is_alike() -> None:
    reward = torch.tensor([0.1 + 0.2, 0.3, 0.3], dtype=torch.float64)
    for name, estimator in ESTIMATORS.items():
        assert not of_samples(estimator, reward, torch.zeros(3).long()).any(), name


def test_values_by_hand() -> None:
    """Rewards 1, 0, 0, 1: mean 1/2, standard deviation (n - 1) sqrt(1/3)."""
    reward, one = torch.tensor([1.0, 0.0, 0.0, 1.0]).double(), torch.zeros(4).long()
    of = {name: of_samples(made, reward, one)[0].item() for name, made in ESTIMATORS.items()}
    assert of["mean"] == 0.5
    assert of["rloo"] == pytest.approx(1 - 1 / 3)
    assert of["group"] == pytest.approx(0.5 / ((1 / 3) ** 0.5 + 1e-4))
    assert of["reinforce_pp"] == pytest.approx(0.5 / (1 / 3) ** 0.5)
    assert of["maxrl"] == 1.0
    assert of["pass_at_k"] == 0.0  # the best of four is 1 without it
    assert pass_at_k(reward, one, k=2)[0].item() == pytest.approx(4 / 6 * 2)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_no_estimator_knows_an_order(name: str) -> None:
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    estimator = ESTIMATORS[name]
    found = of_samples(estimator, SOME, OF)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(
        of_samples(estimator, SOME[order], OF[order]), found[order], rtol=1e-12, atol=1e-15
    )


@pytest.mark.parametrize("name", [name for name, it in ESTIMATORS.items() if not it.is_whitened])
def test_a_group_without_signal_has_exactly_none(name: str) -> None:
    """0.2 three times, whose mean is not quite 0.2; and a group of one."""
    found = of_samples(ESTIMATORS[name], SOME, OF)
    assert found[:4].any()
    assert found[4:].tolist() == [0.0] * 4


@pytest.mark.parametrize("name", ESTIMATORS)
def test_rewards_that_are_all_alike(name: str) -> None:
    for reward in (0.0, 0.1):
        alike_S, group_S = torch.full((6,), reward).double(), torch.arange(6) // 3
        assert not of_samples(ESTIMATORS[name], alike_S, group_S).any()


def test_maxrl_refuses_a_negative_reward() -> None:
    with pytest.raises(ConfigError, match=r"found a reward of -0.4 with advantage=maxrl"):
        of_samples(ESTIMATORS["maxrl"], REWARD, torch.zeros(4).long())


def no_penalties(sizes: Sequence[int]) -> list[Tensor]:
    return [torch.zeros(size, dtype=torch.float64) for size in sizes]


def test_whitening_over_tokens_by_hand() -> None:
    """Two groups: rewards 1 and 0 of 3 tokens and 1, then 1 and 1 of 1 token each.

    reinforce_pp           tokens 1 1 1 | 0 | 1 | 1: mean 5/6, variance (5 (1/6)^2 + (5/6)^2) / 5 = 1/6
    reinforce_pp_baseline  tokens 1/2 1/2 1/2 | -1/2 | 0 | 0: mean 1/6, variance (3/9 + 4/9 + 2/36) / 5 = 1/6
    """
    reward_S, group_S = torch.tensor([1.0, 0.0, 1.0, 1.0]).double(), torch.tensor([0, 0, 1, 1])
    deviation = (1 / 6) ** 0.5
    by_hand = {
        "reinforce_pp": [1 / 6, 1 / 6, 1 / 6, -5 / 6, 1 / 6, 1 / 6],
        "reinforce_pp_baseline": [1 / 3, 1 / 3, 1 / 3, -2 / 3, -1 / 6, -1 / 6],
    }
    for name, centered in by_hand.items():
        found = ESTIMATORS[name](
            outcomes_of(reward_S, group_S, [3, 1, 1, 1]), no_penalties([3, 1, 1, 1])
        )
        assert [one_N.numel() for one_N in found] == [3, 1, 1, 1]
        wanted = [x / deviation for x in centered]
        assert torch.cat(found).tolist() == pytest.approx(wanted, rel=1e-7), name


def test_each_token_is_charged_for_itself_and_those_after_it_by_hand() -> None:
    """One sample of reward 1 and penalties -1, -2 and one of reward 0 without: returns 1 - 3, 1 - 2 | 0; mean -1,
    variance (1 + 0 + 1) / 2.
    """
    reward_S, group_S = torch.tensor([1.0, 0.0]).double(), torch.tensor([0, 1])
    penalties = [torch.tensor([-1.0, -2.0]).double(), torch.zeros(1).double()]
    found = ESTIMATORS["reinforce_pp"](outcomes_of(reward_S, group_S, [2, 1]), penalties)
    assert torch.cat(found).tolist() == pytest.approx([-1.0, 0.0, 1.0], rel=1e-7)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_where_rewards_are_alike_a_penalty_keeps_its_size(name: str) -> None:
    """Penalties of at most 0.001 a token: their noise must not become advantages of size 1."""
    random = torch.Generator().manual_seed(0)
    penalties = [-0.001 * torch.rand(5, generator=random, dtype=torch.float64) for _ in range(6)]
    group_S = torch.arange(6) // 3
    found = ESTIMATORS[name](
        outcomes_of(torch.full((6,), 0.5).double(), group_S, [5] * 6), penalties
    )
    size = max(float(one_N.abs().max()) for one_N in found)
    assert 1e-5 < size < 0.005
    assert float(torch.cat(found).mean()) == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize("name", ["mean", "rloo"])
def test_for_a_linear_comparison_a_penalty_is_a_part_of_the_reward(name: str) -> None:
    random = torch.Generator().manual_seed(1)
    penalties = [torch.randn(3, generator=random, dtype=torch.float64) for _ in range(8)]
    estimator = ESTIMATORS[name]
    found = torch.stack(
        [one_N[0] for one_N in estimator(outcomes_of(SOME, OF, [3] * 8), penalties)]
    )
    total_S = SOME + torch.stack([penalty_N.sum() for penalty_N in penalties])
    torch.testing.assert_close(found, estimator.compare(total_S, OF), rtol=1e-12, atol=1e-15)


def test_a_penalty_is_not_divided_by_the_deviation_of_rewards() -> None:
    """Penalties -0.2 and -0.4, centered 0.1 and -0.1, whatever the rewards are."""
    penalties = [torch.tensor(sizes, dtype=torch.float64) for sizes in ([-0.2], [-0.3, -0.1])]
    estimator, one = ESTIMATORS["group"], torch.zeros(2).long()
    for rewards in ([0.0, 0.0], [1.0, 0.0], [1.0, 0.999]):
        reward_S = torch.tensor(rewards, dtype=torch.float64)
        first, second = estimator(outcomes_of(reward_S, one, [1, 2]), penalties)
        alone = estimator.compare(reward_S, one).tolist()
        assert first.tolist() == pytest.approx([alone[0] + 0.1], abs=1e-12)
        assert second.tolist() == pytest.approx([alone[1] - 0.1] * 2, abs=1e-12)


# -- rewards of turns

TURNS = torch.tensor([[0.4, -0.3], [0.9, 0.1], [-0.6, 0.2]], dtype=torch.float64)
"""Logits of a policy of two turns with two actions each: of the first turn, and of the second after each action."""
TURN_REWARD = ([0.5, -1.0], [[2.0, -0.5], [1.5, 0.3]])
"""Of the first turn by its action, of the second by both."""
PATH_REWARD = [[1.0, 0.2], [-0.7, 3.0]]


def turn_policy(ends_early: bool) -> tuple[Tensor, list[list[Tensor]], list[float], list[Any]]:
    """Logits; of every path the log-probability of each turn, the whole reward, and its turns. ``ends_early``: the
    first turn's action 1 ends the path."""
    logits = TURNS.clone().requires_grad_()
    log_p = logits.log_softmax(-1)
    logps, rewards, turns = [], [], []
    for a, b in product(range(2), range(2)):
        if ends_early and a:
            if not b:
                logps.append([log_p[0, a]])
                turns.append([(2, TURN_REWARD[0][a])])
                rewards.append(TURN_REWARD[0][a] + PATH_REWARD[a][b])
            continue
        logps.append([log_p[0, a], log_p[1 + a, b]])
        turns.append([(2, TURN_REWARD[0][a]), (1, TURN_REWARD[1][a][b])])
        rewards.append(TURN_REWARD[0][a] + TURN_REWARD[1][a][b] + PATH_REWARD[a][b])
    return logits, logps, rewards, turns


@pytest.mark.parametrize("ends_early", [False, True])
def test_the_gradient_by_turns_is_that_of_all_rewards(ends_early: bool) -> None:
    """Over all groups of three; rloo without a discount is unbiased, and with one it is not."""
    logits, logps, rewards, turns = turn_policy(ends_early)
    log_S = torch.stack([torch.stack(logp_U).sum() for logp_U in logps])
    (exact,) = torch.autograd.grad(
        (log_S.exp() * torch.tensor(rewards).double()).sum(), logits, retain_graph=True
    )
    for discount, is_exact in ((1.0, True), (0.5, False)):
        estimator = Estimator(rloo, rloo, assess=partial(by_turn, discount=discount))
        total = torch.zeros(()).double()
        for group in product(range(len(logps)), repeat=3):
            outcomes = outcomes_of(
                torch.tensor([rewards[i] for i in group]).double(),
                torch.zeros(3).long(),
                turns=[turns[i] for i in group],
            )
            weight = log_S.detach()[list(group)].sum().exp()
            for i, advantage_N in zip(group, estimator.assessed(outcomes), strict=True):
                of_turns = advantage_N[[1, 2][: len(logps[i])]]  # a turn's tokens have one
                total = total + weight / 3 * (of_turns * torch.stack(logps[i])).sum()
        (found,) = torch.autograd.grad(total, logits, retain_graph=True)
        assert torch.allclose(found, exact, rtol=1e-12, atol=1e-14) == is_exact


def by_turns(name: str, outcomes: Outcomes, discount: float) -> list[list[float]]:
    estimator = replace(ESTIMATORS[name], assess=partial(by_turn, discount=discount))
    return [advantage_N.tolist() for advantage_N in estimator.assessed(outcomes)]


def test_turns_by_hand() -> None:
    """Two paths of one prompt: turns of 2 and 1 tokens worth 1 and 0.5, and one of 3 tokens worth 0; the paths 2 and 1
    besides. Of mean, with a discount of 1/2: the paths +-1/2; first turns 1 + 0.5 / 2 and 0, so +-0.625; the second
    turn has 0.5, where the other path has ended, 0: +0.25.
    """
    reward_S = torch.tensor([3.5, 1.0]).double()
    outcomes = outcomes_of(
        reward_S, torch.zeros(2).long(), turns=[[(2, 1.0), (1, 0.5)], [(3, 0.0)]]
    )
    assert by_turns("mean", outcomes, 0.5) == [[1.125, 1.125, 0.75], [-1.125] * 3]
    first, second = by_turns("mean", outcomes, 1.0)
    assert first[:2] == [1.25] * 2 and second == [-1.25] * 3, "a first turn has the whole reward"
    # each by its own deviation of sqrt(1/2) and sqrt(1.5^2 / 2): 1 / sqrt 2 of both
    half = 0.5 / (0.5**0.5 + 1e-4) + 0.75 / (1.5 * 0.5**0.5 + 1e-4)
    assert by_turns("group", outcomes, 1.0)[0][0] == pytest.approx(half, rel=1e-12)


# -- several rewards


def test_each_reward_is_normalized_by_itself() -> None:
    """GDPO's example: two rewards of 0 or 1, two answers a prompt. By the sum, pairs worth (0, 1) and (0, 2) have the
    same advantages; here those of the second are larger, for both rewards say so.

    Groups of two: A_k is +-1/2 / sqrt(1/2) = +-sqrt(1/2) where the reward differs, else 0.
    """
    first = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 1.0]).double()
    second = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 1.0]).double()
    group_S = torch.arange(6) // 2
    parts, weights = {"a": first, "b": second, "logged": second}, {"b": 3.0, "logged": 0.0}
    outcomes = outcomes_of(first + 3 * second, group_S, [2] * 6, parts=parts, weights=weights)
    one = 0.5 / (0.5**0.5 + 1e-4)
    total_S = torch.tensor([-1.0, 1.0, -4.0, 4.0, -3.0, 3.0]).double() * one
    wanted = total_S / (total_S.std() + 1e-4)
    found = ESTIMATORS["gdpo"](outcomes, no_penalties([2] * 6))
    assert torch.stack(found)[:, 1].tolist() == pytest.approx(wanted.tolist(), rel=1e-12)


def test_a_reward_that_does_not_apply_is_compared_where_it_does() -> None:
    """The second reward has no value for the first answer: the other two are compared with each other."""
    none = float("nan")
    parts = {
        "a": torch.tensor([1.0, 0.0, 0.5]).double(),
        "b": torch.tensor([none, 0.0, 1.0]).double(),
    }
    outcomes = outcomes_of(
        torch.tensor([1.0, 0.0, 1.5]).double(), torch.zeros(3).long(), parts=parts
    )
    one, half = 0.5 / (0.5 + 1e-4), 0.5 / (0.5**0.5 + 1e-4)
    total_S = torch.tensor([one, -one - half, half], dtype=torch.float64)
    found = torch.cat(ESTIMATORS["gdpo"].assessed(outcomes))
    assert found.tolist() == pytest.approx((total_S / (total_S.std() + 1e-4)).tolist(), rel=1e-9)


# -- trees


def forest(*paths: str) -> Outcomes:
    """Answers to one prompt, letter by letter; capital letters were said by others. Rewards are 1, 2, 4, ..."""
    ids = [torch.tensor([0, *map(ord, path)]) for path in paths]
    at = [1 + torch.tensor([n for n, x in enumerate(path) if x.islower()]) for path in paths]
    reward_S = 2.0 ** torch.arange(len(paths)).double()
    outcomes = outcomes_of(reward_S, torch.zeros(len(paths)).long(), [at_N.numel() for at_N in at])
    return outcomes._replace(ids=ids, sampled_at=at)


def tree_of(outcomes: Outcomes) -> list[list[float]]:
    assessed = replace(ESTIMATORS["tree"], compare=mean).assessed(outcomes)
    return [advantage_N.tolist() for advantage_N in assessed]


def test_segments_by_hand() -> None:
    """Rewards 1, 2, 4, 8 with the mean 15/4. All begin with a; the first two go on with b (3/2), the others with c (6):
    -9/4 and 9/4. Then each alone: 1 - 3/2, 2 - 3/2, 4 - 6, 8 - 6. What others say is no target.
    """
    found = tree_of(forest("abXyy", "abXz", "acy", "aczzz"))
    assert found == [
        [0.0, -2.25, -0.5, -0.5],
        [0.0, -2.25, 0.5],
        [0.0, 2.25, -2.0],
        [0.0, 2.25, 2.0, 2.0, 2.0],
    ]
    assert tree_of(forest("aX", "aXb")) == [[0.0], [0.0, 0.5]], "one ends where another goes on"


def test_paths_of_one_sample_count_once() -> None:
    """Rewards 1 and 2. The first sample has two paths, which part after a: a and b have the mean of both samples, and
    x, y and the branch, with the tokens that are new in it, that of their sample.
    """
    outcomes = forest("abx", "aby")
    branch = torch.tensor([0, *map(ord, "acz")]), torch.tensor([2, 3])
    outcomes = outcomes._replace(length_S=torch.tensor([5, 3]), branches=[[branch], []])
    assert tree_of(outcomes) == [[0.0, 0.0, -0.5, -0.5, -0.5], [0.0, 0.0, 0.5]]


def leaves_with(outcomes: Outcomes, leaf: int, stop: int) -> list[int]:
    """The leaves that have the same first ``stop`` tokens."""
    ids = outcomes.ids
    return [
        other
        for other in range(len(ids))
        if outcomes.group_S[other] == outcomes.group_S[leaf]
        and ids[other][:stop].tolist() == ids[leaf][:stop].tolist()
        and ids[other].numel() >= stop
    ]


def test_a_tree_is_what_it_is_leaf_by_leaf_and_token_by_token() -> None:
    """Random forests: the value of a token's node less that of the node before, found by comparing all prefixes."""
    random = np.random.default_rng(0)
    for _ in range(20):
        words = ["".join(random.choice(list("abX"), int(random.integers(1, 7)))) for _ in range(9)]
        outcomes = forest(*(f"{word}c" for word in words))
        outcomes = outcomes._replace(group_S=torch.from_numpy(random.integers(0, 2, 9)))
        value_S = ESTIMATORS["group"].compare(outcomes.reward_S, outcomes.group_S)
        found = ESTIMATORS["tree"].assessed(outcomes)
        for leaf, at_N in enumerate(outcomes.sampled_at):
            for n, position in enumerate(at_N.tolist()):
                node = leaves_with(outcomes, leaf, position + 1)
                stop = position
                while stop and leaves_with(outcomes, leaf, stop) == node:
                    stop -= 1
                before = leaves_with(outcomes, leaf, stop)
                wanted = value_S[node].mean() - value_S[before].mean()
                assert float(found[leaf][n]) == pytest.approx(float(wanted), abs=1e-12)


def test_without_a_common_token_a_tree_is_a_group() -> None:
    found = torch.cat(ESTIMATORS["tree"].assessed(outcomes_of(SOME, OF)))
    torch.testing.assert_close(found, ESTIMATORS["group"].compare(SOME, OF), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bootstrap", [0.0, 0.8])
@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_gae_is_the_sum_of_discounted_differences(lam: float, bootstrap: float) -> None:
    """A_t = sum over l of (gamma lam)^l d_(t+l); of lam 1 what came less what was expected, of lam 0 one difference."""
    gamma, size = 0.9, 7
    random = torch.Generator().manual_seed(0)
    reward_N, value_N = torch.randn(2, size, generator=random, dtype=torch.float64)
    after_N = torch.cat([value_N[1:], torch.tensor([bootstrap], dtype=torch.float64)])
    d_N = reward_N + gamma * after_N - value_N
    found, return_N = gae(reward_N, value_N, bootstrap, gamma, lam)
    for t in range(size):
        power = torch.arange(size - t, dtype=torch.float64)
        expected_t = ((gamma * lam) ** power * d_N[t:]).sum()
        assert found[t].item() == pytest.approx(expected_t.item(), rel=1e-12)
    torch.testing.assert_close(return_N, found + value_N)
    if lam == 1.0:
        whole = sum(gamma**t * reward_N[t] for t in range(size)) + gamma**size * bootstrap
        assert return_N[0].item() == pytest.approx(float(whole), rel=1e-12)


def test_gae_of_nothing_and_of_one() -> None:
    none = torch.empty(0, dtype=torch.float64)
    assert gae(none, none, 0.0, 1.0, 0.95)[0].shape == (0,)
    advantage_N, return_N = gae(
        torch.ones(1).double(), torch.full((1,), 0.25).double(), 0.0, 1.0, 0.95
    )
    assert (advantage_N.item(), return_N.item()) == (0.75, 1.0)


def test_whiten() -> None:
    found = whiten(SOME)
    assert found.mean().item() == pytest.approx(0.0, abs=1e-15)
    assert found.std().item() == pytest.approx(1.0, abs=1e-7)
    assert whiten(torch.tensor([3.0])).tolist() == [0.0]


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
