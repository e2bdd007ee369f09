"""Advantages against the exact gradient of a policy of four actions, whose groups can all be listed; shaping."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import combinations, product
from math import comb

import pytest
import torch
from torch import Tensor

from taut.errors import ConfigError
from taut.losses.advantages import (
    ESTIMATORS,
    Estimator,
    Scale,
    gae,
    length_cost,
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
    return torch.cat(estimator(reward_S, group_S, nothing))


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
def test_what_is_normalised_points_the_same_way(name: str) -> None:
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
    for name, centred in by_hand.items():
        found = ESTIMATORS[name](reward_S, group_S, no_penalties([3, 1, 1, 1]))
        assert [one_N.numel() for one_N in found] == [3, 1, 1, 1]
        wanted = [x / deviation for x in centred]
        assert torch.cat(found).tolist() == pytest.approx(wanted, rel=1e-7), name


def test_each_token_is_charged_for_itself_and_those_after_it_by_hand() -> None:
    """One sample of reward 1 and penalties -1, -2 and one of reward 0 without: returns 1 - 3, 1 - 2 | 0; mean -1,
    variance (1 + 0 + 1) / 2.
    """
    reward_S, group_S = torch.tensor([1.0, 0.0]).double(), torch.tensor([0, 1])
    penalties = [torch.tensor([-1.0, -2.0]).double(), torch.zeros(1).double()]
    found = ESTIMATORS["reinforce_pp"](reward_S, group_S, penalties)
    assert torch.cat(found).tolist() == pytest.approx([-1.0, 0.0, 1.0], rel=1e-7)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_where_rewards_are_alike_a_penalty_keeps_its_size(name: str) -> None:
    """Penalties of at most 0.001 a token: their noise must not become advantages of size 1."""
    random = torch.Generator().manual_seed(0)
    penalties = [-0.001 * torch.rand(5, generator=random, dtype=torch.float64) for _ in range(6)]
    group_S = torch.arange(6) // 3
    found = ESTIMATORS[name](torch.full((6,), 0.5).double(), group_S, penalties)
    size = max(float(one_N.abs().max()) for one_N in found)
    assert 1e-5 < size < 0.005
    assert float(torch.cat(found).mean()) == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize("name", ["mean", "rloo"])
def test_for_a_linear_comparison_a_penalty_is_a_part_of_the_reward(name: str) -> None:
    random = torch.Generator().manual_seed(1)
    penalties = [torch.randn(3, generator=random, dtype=torch.float64) for _ in range(8)]
    estimator = ESTIMATORS[name]
    found = torch.stack([one_N[0] for one_N in estimator(SOME, OF, penalties)])
    total_S = SOME + torch.stack([penalty_N.sum() for penalty_N in penalties])
    torch.testing.assert_close(found, estimator.compare(total_S, OF), rtol=1e-12, atol=1e-15)


def test_a_penalty_is_not_divided_by_the_deviation_of_rewards() -> None:
    """Penalties -0.2 and -0.4, centred 0.1 and -0.1, whatever the rewards are."""
    penalties = [torch.tensor(sizes, dtype=torch.float64) for sizes in ([-0.2], [-0.3, -0.1])]
    estimator, one = ESTIMATORS["group"], torch.zeros(2).long()
    for rewards in ([0.0, 0.0], [1.0, 0.0], [1.0, 0.999]):
        reward_S = torch.tensor(rewards, dtype=torch.float64)
        first, second = estimator(reward_S, one, penalties)
        alone = estimator.compare(reward_S, one).tolist()
        assert first.tolist() == pytest.approx([alone[0] + 0.1], abs=1e-12)
        assert second.tolist() == pytest.approx([alone[1] - 0.1] * 2, abs=1e-12)


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
