"""The advantages that verl and OpenRLHF publish, written down again on padded tensors [B, L] with a response mask,
against ours.

    verl        core_algos.py: compute_reinforce_plus_plus_outcome_advantage (gamma 1), its _baseline_ form,
                compute_gae_advantage_return (before it whitens); torch_functional.py: masked_whiten
    OpenRLHF    experience_maker.py: compute_advantages_and_returns for group_norm

Both take penalties per token. Padding holds noise. In a path of several turns the mask leaves out what others said;
there verl's REINFORCE++ begins its return anew at each turn, so it is compared on paths of one turn. verl's
masked_whiten has 1e-8 below the root where we add it to the deviation: what is whitened agrees to 1e-6.

OpenRLHF's group_norm charges each token with the penalties from there on and subtracts no mean; ours charges an answer
with their sum, less the group's mean. The two are compared as differences between answers of one token each, in which
neither matters.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.helpers.sampled_outcomes import outcomes_of
from torch import Tensor

from taut.losses.advantages import ESTIMATORS, gae

ROUNDING = 1e-6
LENGTHS = (7, 1, 4, 12, 3, 9, 2, 5)
LONGEST = 16
GROUP = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])


def padded(values: list[Tensor], mask: Tensor) -> Tensor:
    noise = torch.full(mask.shape, 0.9, dtype=torch.float64)
    return noise.masked_scatter(mask.bool(), torch.cat(values))


def masks(gap: int = 0) -> Tensor:
    """The tokens of each row that were sampled; odd rows have ``gap`` tokens of others after every three."""
    mask = torch.zeros(len(LENGTHS), 2 * LONGEST, dtype=torch.float64)
    for row, length in enumerate(LENGTHS):
        at = torch.arange(length)
        mask[row, at + gap * (at // 3) * (row % 2)] = 1.0
    return mask


def drawn(seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    """Rewards of the samples, and the penalties of their tokens."""
    random = torch.Generator().manual_seed(seed)
    rewards = torch.randn(len(LENGTHS), generator=random, dtype=torch.float64)
    return rewards, [
        0.1 * torch.randn(length, generator=random, dtype=torch.float64) for length in LENGTHS
    ]


def token_level_rewards(reward_S: Tensor, penalties: list[Tensor], mask: Tensor) -> Tensor:
    """verl: scores at the last valid token, plus the penalty of each token; 0 elsewhere."""
    found = torch.zeros_like(mask).masked_scatter(mask.bool(), torch.cat(penalties))
    last = (mask * torch.arange(mask.shape[1])).argmax(1)
    found[torch.arange(mask.shape[0]), last] += reward_S
    return found


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    mean = (values * mask).sum() / (mask.sum() + 1e-8)
    variance = ((values - mean) ** 2 * mask).sum() / (mask.sum() + 1e-8)
    variance = variance * (mask.sum() / (mask.sum() - 1))
    return (values - mean) * torch.rsqrt(variance + 1e-8)


def reinforce_plus_plus(rewards: Tensor, mask: Tensor) -> Tensor:
    returns, running = torch.zeros_like(rewards), torch.zeros(rewards.shape[0]).double()
    for t in reversed(range(rewards.shape[1])):
        running = rewards[:, t] + running
        returns[:, t] = running
        running = running * mask[:, t]
    return masked_whiten(returns, mask)


def reinforce_plus_plus_baseline(rewards: Tensor, mask: Tensor) -> Tensor:
    scores = rewards.sum(-1)
    for group in GROUP.unique():
        scores[group == GROUP] -= scores[group == GROUP].mean()
    return masked_whiten(scores.unsqueeze(-1).tile([1, rewards.shape[1]]) * mask, mask)


@pytest.mark.parametrize("has_penalties", [False, True])
@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("reinforce_pp", reinforce_plus_plus),
        ("reinforce_pp_baseline", reinforce_plus_plus_baseline),
    ],
)
def test_reinforce_plus_plus_of_verl(name: str, theirs: object, has_penalties: bool) -> None:
    assert callable(theirs)
    reward_S, penalties = drawn()
    if not has_penalties:
        penalties = [torch.zeros_like(penalty_N) for penalty_N in penalties]
    mask = masks()
    wanted = theirs(token_level_rewards(reward_S, penalties, mask), mask)
    found = ESTIMATORS[name](outcomes_of(reward_S, GROUP, LENGTHS), penalties)
    for row, one_N in enumerate(found):
        torch.testing.assert_close(
            one_N, wanted[row][mask[row].bool()], rtol=ROUNDING, atol=ROUNDING
        )
    over_samples = [float(one_N[0]) for one_N in found]
    assert abs(np.mean(over_samples)) > 0.01, "of equal lengths tokens are samples"


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.99, 1.0), (0.9, 0.5)])
def test_gae_of_verl_with_turns_of_others_between(gamma: float, lam: float) -> None:
    """A reward and a penalty at each sampled token; what others said is skipped, and a path ends at a value of 0."""
    mask, (_, rewards) = masks(gap=2), drawn(1)
    values = [one_N.flip(0) + 0.5 for one_N in drawn(2)[1]]
    value, reward = padded(values, mask), padded(rewards, mask) * mask
    after = torch.zeros(len(LENGTHS), dtype=torch.float64)
    following, advantages = torch.zeros_like(after), torch.zeros_like(mask)
    for t in reversed(range(mask.shape[1])):
        delta = reward[:, t] + gamma * after - value[:, t]
        now = delta + gamma * lam * following
        after = value[:, t] * mask[:, t] + (1 - mask[:, t]) * after
        following = now * mask[:, t] + (1 - mask[:, t]) * following
        advantages[:, t] = following
    for row, (reward_N, value_N) in enumerate(zip(rewards, values, strict=True)):
        wanted_N = advantages[row][mask[row].bool()]
        advantage_N, return_N = gae(reward_N, value_N, 0.0, gamma, lam)
        torch.testing.assert_close(advantage_N, wanted_N, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(return_N, wanted_N + value_N, rtol=1e-12, atol=1e-12)


def test_group_norm_of_openrlhf_divides_rewards_and_not_penalties() -> None:
    """(r - m) / (s + 1e-9), then the penalties: the smallest deviation here is 0.3, where 1e-4 is 4e-4 of it."""
    reward_S, _ = drawn()
    penalties = [torch.full((1,), p, dtype=torch.float64) for p in np.linspace(-0.3, 0.2, 8)]
    found = torch.cat(ESTIMATORS["group"](outcomes_of(reward_S, GROUP), penalties))
    for group in GROUP.unique():
        rewards, charged = reward_S[group == GROUP], torch.cat(penalties)[group == GROUP]
        theirs = (rewards - rewards.mean()) / (rewards.std() + 1e-9) + charged
        ours = found[group == GROUP]
        torch.testing.assert_close(ours - ours[0], theirs - theirs[0], rtol=1e-3, atol=1e-12)
