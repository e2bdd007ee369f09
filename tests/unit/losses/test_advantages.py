"""Advantages against the exact gradient: of a policy of four actions every group can be listed, and so expectations are
sums.
"""

from __future__ import annotations

from functools import partial
from itertools import combinations, product
from math import comb

import pytest
import torch
from torch import Tensor

from taut.errors import ConfigError
from taut.losses.advantages import ESTIMATORS, Estimator, gae, pass_at_k, whiten

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


def expected(estimator: Estimator, reward: Tensor) -> Tensor:
    """The mean gradient of 1/n sum of A log pi over groups of n."""
    log_p = POLICY.log_softmax(0)
    weight_B = log_p.detach()[GROUPS].sum(1).exp()
    one = torch.zeros(SIZE, dtype=torch.int64)
    advantage_BG = torch.stack([estimator(reward[actions], one) for actions in GROUPS])
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
    found = expected(partial(pass_at_k, k=k), reward)
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
        assert not estimator(reward, torch.zeros(3).long()).any(), name


def test_values_by_hand() -> None:
    """Rewards 1, 0, 0, 1: mean 1/2, standard deviation (n - 1) sqrt(1/3)."""
    reward, one = torch.tensor([1.0, 0.0, 0.0, 1.0]).double(), torch.zeros(4).long()
    of = {name: estimator(reward, one)[0].item() for name, estimator in ESTIMATORS.items()}
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
    found = estimator(SOME, OF)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(
        estimator(SOME[order], OF[order]), found[order], rtol=1e-12, atol=1e-15
    )


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "reinforce_pp"])
def test_a_group_without_signal_has_exactly_none(name: str) -> None:
    """0.2 three times, whose mean is not quite 0.2; and a group of one."""
    found = ESTIMATORS[name](SOME, OF)
    assert found[:4].any()
    assert found[4:].tolist() == [0.0] * 4


@pytest.mark.parametrize("name", ESTIMATORS)
def test_rewards_that_are_all_alike(name: str) -> None:
    for reward in (0.0, 0.1):
        assert not ESTIMATORS[name](torch.full((6,), reward).double(), torch.arange(6) // 3).any()


def test_maxrl_refuses_a_negative_reward() -> None:
    with pytest.raises(ConfigError, match=r"found a reward of -0.4 with advantage=maxrl"):
        ESTIMATORS["maxrl"](REWARD, torch.zeros(4).long())


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
