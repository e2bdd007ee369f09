"""Advantages from rewards, and the shaping of rewards by length and finish. Pure functions, no model.

An ``Estimator`` turns the rewards r of a rollout's samples into an advantage for each sampled token. With the groups
(the answers to one prompt, n of them, mean m, standard deviation s with n - 1), samples compare as follows:

    group                  (r - m) / (s + 1e-4)             GRPO, arXiv 2402.03300; 1e-4 as TRL has it
    mean                   r - m                            Dr. GRPO, arXiv 2503.20783: without the bias to groups of
                                                            little variance
    rloo                   r - (mean of the others') = n / (n - 1) (r - m)
                                                            RLOO, arXiv 2402.14740: unbiased
    reinforce_pp           r, whitened over tokens          REINFORCE++, arXiv 2501.03262: groups are not read
    reinforce_pp_baseline  r - m, whitened over tokens      its baseline form
    maxrl                  (r - m) / m; 0 where m is 0      MaxRL, arXiv 2602.02710: for rewards of 0 and 1 unbiased for
                                                            the likelihood of success, truncated at order n - 1 (r / m
                                                            alone: n, with more noise)
    pass_at_k              n / C(n, k) sum over the k-subsets I with the sample of (max of I - max of I without it)
                                                            PKPO, arXiv 2505.15201, s^(loo-1): unbiased for the expected
                                                            best of k, which is pass@k for rewards of 0 and 1
    gdpo                   x / (deviation of x over the rollout's samples + 1e-4), x = sum of w_k A_k
                                                            GDPO, arXiv 2601.05242, eq. 4 to 7: A_k is group's advantage
                                                            by the reward k alone, w_k the reward's weight. The mean of
                                                            x is 0 already
    tree                   V(node) - V(parent)              SPO's tree, arXiv 2505.23564, and TreeRL's local advantage,
                                                            2506.11902: by segments, below

Except with tree, every token of a sample has the sample's advantage. A group of one, or one whose rewards are all
equal, has exactly 0 and teaches nothing. (reinforce_pp compares across groups; there the rewards of the rollout must
differ.)

Credit by turns (``by_turn``), for environments that reward steps. With r_u the reward of turn u of a sample and R the
rest of its reward, which is of the whole path, the tokens of turn u have

    compare(R) + compare(G_u),    G_u = r_u + gamma G_(u+1)

and G_u is compared with the same turn's of the other samples, 0 where a path has ended. What the others get from turn
u on is independent of what is sampled in it, so with rloo and gamma 1 the gradient is unbiased for the sum of all
rewards, also where paths end early; and with rloo or mean the first turn has the advantage of the whole reward. MT-GRPO
(arXiv 2505.11821) charges turns in the same way: each turn's reward and the outcome, normalized apart.

Credit by segments of a tree (``tree``). Samples of a group that begin with the same tokens are paths of one tree: from
the first token in which two of them differ they have segments of their own. A segment's node has the mean value of the
leaves below it (one for each sample, of however many paths), and

    A of a segment's tokens = V(its node) - V(the node before),    V = mean over leaves of group's advantage

What all samples of a group have in common has 0, and where no two begin alike tree is group. Along a path the
advantages add up to the leaf's, segment by segment. A token that n leaves share is a target of each: its weight is n,
the mean over leaves is that of the expected gradient, and one forward computes all. Where paths were made to fork
(rl/forks.py) a segment ends, even if what they go on with begins alike.

"Whitened over tokens" is (x - mean) / deviation, both taken over all sampled tokens of the rollout, so a long sample
counts for more than a short one: the batch normalization of arXiv 2501.03262, and what verl (masked_whiten over the
response mask) and OpenRLHF (over the action mask) compute. The mean over tokens is not the mean over samples, so with
reinforce_pp_baseline a group whose rewards are all equal gets the offset that all tokens get.

Penalties p (the divergence from the reference, by token) are not part of r. Each estimator charges them without
scaling them:

    group, mean, reinforce_pp_baseline     (sum of p) - mean over the group
    rloo, maxrl, pass_at_k                 (sum of p) - mean over the rest of the group, which is unbiased
    reinforce_pp                           each token the sum of its own p and those after it

For mean and rloo this equals a reward of r + p. For group it keeps the meaning of the coefficient: if p were part of
the reward, the small differences of p in a group of equal rewards would be divided by their own deviation and become
advantages of size 1. OpenRLHF's group_norm normalizes the rewards alone, too. Whitening takes in p, as in verl and
OpenRLHF; where all rewards of the rollout are equal it only removes the mean.

``gae`` is for a critic (arXiv 1506.02438): one path's tokens, with d_t = r_t + gamma V_(t+1) - V_t,

    A_t = d_t + gamma lam A_(t+1),    return_t = A_t + V_t

Rewards are float64 and complete: over all ranks, before the rollout is cut into steps.

Shaping is applied to rewards before advantages are computed, from values [S] of the rollout's samples:

    unfinished      -penalty where a path did not stop on its own: by its finish_reason, no id is searched for
    soft_overlong   0 up to limit - margin tokens, then falling to -1 at the limit       DAPO, arXiv 2503.14476, eq. 13
    length_cost     -coef * length / limit

An overlong filter (DAPO) is no shaping: samples that were cut are left out of the step, and count in no denominator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from taut.errors import ConfigError
from taut.types import FinishReason

Compare: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(reward_S, group_S) -> advantage_S: float64 [S], int64 [S] of any numbers."""


class Outcomes(NamedTuple):
    """The samples of a rollout that have a reward: what an estimator of advantages reads. Lists have an entry for each
    sample; N counts its sampled tokens, U its turns.
    """

    reward_S: Tensor
    """float64 [S]: the reward, shaped."""
    group_S: Tensor
    """int64 [S]: the number of its prompt; the samples of a group are answers to one prompt."""
    length_S: Tensor
    """int64 [S]: number of sampled tokens; the sampled tokens of branches come last."""
    parts: Mapping[str, Tensor]
    """name -> float64 [S]: each reward before its weight; NaN where it does not apply."""
    weights: Mapping[str, float]
    """name -> weight of a reward in the sum; 1 for rewards that are not listed, such as an environment's."""
    turn_ends: Sequence[Tensor]
    """int64 [U]: for each turn the index among the sampled tokens of its last one; ascending, the last is N - 1."""
    turn_rewards: Sequence[Tensor]
    """float64 [U]: the environment's reward for each turn, 0 where it gave none. It is a part of ``reward_S``."""
    ids: Sequence[Tensor]
    """int64 [T]: prompt, sampled tokens and what others said between them."""
    sampled_at: Sequence[Tensor]
    """int64: ascending positions into ``ids`` of the sampled tokens."""
    branches: Sequence[Sequence[tuple[Tensor, Tensor]]]
    """Other paths of an agent that branches or begins anew: ids and sampled_at of each, with the sampled tokens that no
    earlier path of the sample has."""
    forks: Sequence[Sequence[int]]
    """Numbers of tokens that had been sampled when the sample's path forked, ascending."""


Assess: TypeAlias = Callable[[Compare, Outcomes], list[Tensor]]
"""(the function that compares rewards, the samples) -> advantage_N of each sample, by the rewards alone."""
ALIKE = 1e-12
"""Rewards that differ by no more count as equal: their parts are summed in any order, and rounding is no signal."""
EPSILON = 1e-4
NO_SPREAD = 1e-9
"""A deviation below this fraction of the mean (of 1 where that is smaller) is rounding."""


# -- comparing the samples of a group --------------------------------------------------------------


def are_alike(rewards: Sequence[float]) -> bool:
    """Whether all rewards are equal; true for one and for none."""
    return len(rewards) < 2 or max(rewards) - min(rewards) <= ALIKE


def group(reward_S: Tensor, group_S: Tensor) -> Tensor:
    """(r - m) / (s + 1e-4)"""
    count_S, centered_S = _centered(reward_S, group_S)
    square_S = _per_group(centered_S**2, group_S)
    deviation_S = (square_S / (count_S - 1).clamp(min=1)).sqrt()
    return centered_S / (deviation_S + EPSILON)


def mean(reward_S: Tensor, group_S: Tensor) -> Tensor:
    """r - m"""
    return _centered(reward_S, group_S)[1]


def rloo(reward_S: Tensor, group_S: Tensor) -> Tensor:
    """Each reward minus the mean of the other rewards in its group."""
    count_S, centered_S = _centered(reward_S, group_S)
    return centered_S * count_S / (count_S - 1).clamp(min=1)


def ungrouped(reward_S: Tensor, group_S: Tensor) -> Tensor:
    """r - the mean of the rollout"""
    return mean(reward_S, torch.zeros_like(group_S))


def maxrl(reward_S: Tensor, group_S: Tensor) -> Tensor:
    """(r - m) / m"""
    lowest = float(reward_S.min()) if reward_S.numel() else 0.0
    if lowest < 0:
        raise ConfigError(
            f"found a reward of {lowest:g} with advantage=maxrl, which divides by a group's mean; expected rewards of "
            "at least 0; shape them so, or name another estimator"
        )
    count_S, centered_S = _centered(reward_S, group_S)
    mean_S = _per_group(reward_S, group_S) / count_S
    return torch.where(mean_S > 0, centered_S / mean_S, 0.0)


def pass_at_k(reward_S: Tensor, group_S: Tensor, *, k: int) -> Tensor:
    """How much a sample raises the best of k; for a group smaller than k, k is its size. k = 1 is rloo.

    In ascending order, C(j, k - 2) subsets without i have the j-th as their best; i raises each by r_i - r_j where j is
    below i.
    """
    if k == 1:
        return rloo(reward_S, group_S)
    advantage_S = torch.zeros_like(reward_S)
    num_groups, index_S = _numbered(group_S)
    for number in range(num_groups):
        at = (index_S == number).nonzero().squeeze(1)
        size, best_of = at.numel(), min(k, at.numel())
        sorted_G, order = reward_S[at].sort()
        if are_alike(sorted_G.tolist()):
            continue
        # exact integers, of any size
        shares = [math.comb(j, best_of - 2) / math.comb(size, best_of) for j in range(size)]
        above_GG = (sorted_G[:, None] - sorted_G[None, :]).clamp(min=0)
        advantage_S[at[order]] = above_GG @ torch.tensor(shares, dtype=reward_S.dtype) * size
    return advantage_S


def _centered(reward_S: Tensor, group_S: Tensor) -> tuple[Tensor, Tensor]:
    """n and r - m, which is exactly 0 (free of rounding) in groups whose rewards are all equal."""
    count_S = _per_group(torch.ones_like(reward_S), group_S)
    centered_S = reward_S - _per_group(reward_S, group_S) / count_S
    num_groups, index_S = _numbered(group_S)
    extreme = reward_S.new_zeros(num_groups)
    most = extreme.scatter_reduce(0, index_S, reward_S, "amax", include_self=False)
    least = extreme.scatter_reduce(0, index_S, reward_S, "amin", include_self=False)
    return count_S, centered_S.masked_fill((most - least <= ALIKE)[index_S], 0.0)


def _per_group(value_S: Tensor, group_S: Tensor) -> Tensor:
    """The sum over each sample's group, [S]."""
    num_groups, index_S = _numbered(group_S)
    total = value_S.new_zeros(num_groups).index_add(0, index_S, value_S)
    return total.index_select(0, index_S)


def _numbered(group_S: Tensor) -> tuple[int, Tensor]:
    """The number of groups, and each sample's group as 0, 1, ..."""
    groups, index_S = torch.unique(group_S, return_inverse=True)
    return groups.numel(), index_S


# -- advantages of tokens --------------------------------------------------------------------------


def by_sample(compare: Compare, outcomes: Outcomes) -> list[Tensor]:
    """Every token of a sample has the advantage of the sample's reward."""
    compared_S = compare(outcomes.reward_S, outcomes.group_S)
    return [a.expand(n) for a, n in zip(compared_S, outcomes.length_S.tolist(), strict=True)]


def by_reward(compare: Compare, outcomes: Outcomes) -> list[Tensor]:
    """Each reward is compared by itself; their weighted sum is divided by its deviation over the samples: GDPO."""
    total_S = torch.zeros_like(outcomes.reward_S)
    for name, part_S in outcomes.parts.items():
        weight, is_known_S = outcomes.weights.get(name, 1.0), ~part_S.isnan()
        compared = compare(part_S[is_known_S], outcomes.group_S[is_known_S])
        total_S[is_known_S] += weight * compared
    advantage_S = total_S / (_deviation(total_S) + EPSILON)
    return [a.expand(n) for a, n in zip(advantage_S, outcomes.length_S.tolist(), strict=True)]


def by_turn(compare: Compare, outcomes: Outcomes, *, discount: float) -> list[Tensor]:
    """Give the tokens of a turn the advantage of its reward and of what follows it, plus the advantage of the path's
    other rewards.
    """
    total_S = torch.stack([reward_U.sum() for reward_U in outcomes.turn_rewards])
    of_path_S = compare(outcomes.reward_S - total_S, outcomes.group_S)
    most = max(reward_U.numel() for reward_U in outcomes.turn_rewards)
    return_SU = total_S.new_zeros(total_S.numel(), most)  # 0 where a path has ended
    for return_U, reward_U in zip(return_SU, outcomes.turn_rewards, strict=True):
        return_U[: reward_U.numel()] = reward_U
    for turn in range(return_SU.shape[1] - 2, -1, -1):
        return_SU[:, turn] += discount * return_SU[:, turn + 1]
    of_turn = [compare(return_S, outcomes.group_S) for return_S in return_SU.unbind(1)]
    advantage_SU = of_path_S[:, None] + torch.stack(of_turn, 1)
    return [
        advantage_U[: end_U.numel()].repeat_interleave(end_U.diff(prepend=end_U.new_tensor([-1])))
        for advantage_U, end_U in zip(advantage_SU, outcomes.turn_ends, strict=True)
    ]


def tree(compare: Compare, outcomes: Outcomes) -> list[Tensor]:
    """Give the tokens of a segment the value of its node minus the value of the node before."""
    # the paths of all samples, each with its advantages to be filled in, and the positions where they were made to fork
    value_S = compare(outcomes.reward_S, outcomes.group_S).tolist()
    paths = [
        (sample, ids_T, at_N, torch.zeros(at_N.numel(), dtype=torch.float64))
        for sample, own in enumerate(zip(outcomes.ids, outcomes.sampled_at, strict=True))
        for ids_T, at_N in (own, *outcomes.branches[sample])
    ]
    forks = [
        [int(at_N[number - 1]) + 1 for number in of_sample]
        for of_sample, at_N in zip(outcomes.forks, outcomes.sampled_at, strict=True)
    ]

    def mean_of(leaves: Sequence[int]) -> float:
        values = [value_S[sample] for sample in sorted({paths[leaf][0] for leaf in leaves})]
        return values[0] if are_alike(values) else math.fsum(values) / len(values)

    # each group is a tree of paths; a node is (its leaves, where its segment starts, value of the node before)
    groups: dict[int, list[int]] = {}
    for leaf, (sample, *_) in enumerate(paths):
        groups.setdefault(int(outcomes.group_S[sample]), []).append(leaf)
    for members in groups.values():
        nodes = [(members, 0, mean_of(members))]
        while nodes:
            # the segment ends where its leaves part, where one of them ends, or at a fork
            leaves, start, before = nodes.pop()
            value, first_T = mean_of(leaves), paths[leaves[0]][1]
            stop = min(paths[leaf][1].numel() for leaf in leaves)
            ahead = (fork for leaf in leaves for fork in forks[paths[leaf][0]] if fork > start)
            stop = min([stop, *ahead])
            for leaf in leaves[1:]:
                differs_T = paths[leaf][1][start:stop] != first_T[start:stop]
                stop = start + int(differs_T.int().argmax()) if differs_T.any() else stop
            # its tokens get V(node) - V(before); leaves that go on with the same token have a node together
            children: dict[int, list[int]] = {}
            for leaf in leaves:
                _, ids_T, at_N, advantage_N = paths[leaf]
                low, high = torch.searchsorted(at_N, torch.tensor([start, stop]))
                advantage_N[low:high] = value - before
                if stop < ids_T.numel():
                    children.setdefault(int(ids_T[stop]), []).append(leaf)
            nodes += [(child, stop, value) for child in children.values()]
    advantages: list[list[Tensor]] = [[] for _ in value_S]
    for sample, _, _, advantage_N in paths:
        advantages[sample].append(advantage_N)
    return [torch.cat(parts) for parts in advantages]


@dataclass(frozen=True)
class Estimator:
    """Rewards and penalties of a rollout -> the advantage of each token."""

    compare: Compare
    """Compute an advantage from a reward and the other rewards of its group."""
    charge: Compare | None
    """Compare the sum of a sample's penalties likewise. If None, each token has the sum of its own penalty and all
    later ones."""
    is_whitened: bool = False
    """Whether the result is then normalized over all tokens of the rollout to mean 0 and standard deviation 1."""
    assess: Assess = by_sample
    """Choice of the rewards to compare and of the tokens that get the result."""

    def assessed(self, outcomes: Outcomes) -> list[Tensor]:
        """advantage_N of each sample by the rewards alone, before whitening."""
        return self.assess(self.compare, outcomes)

    def __call__(self, outcomes: Outcomes, penalties: Sequence[Tensor]) -> list[Tensor]:
        """advantage_N of each sample. ``penalties``: [N] for each sample, 0 without penalties."""
        assessed = self.assessed(outcomes)
        if self.charge is None:
            charged = [penalty_N.flip(0).cumsum(0).flip(0) for penalty_N in penalties]
        else:
            total_S = torch.stack([penalty_N.sum() for penalty_N in penalties])
            charged_S = self.charge(total_S, outcomes.group_S)
            charged = [c.expand(p.numel()) for c, p in zip(charged_S, penalties, strict=True)]
        advantages = [a_N + c_N for a_N, c_N in zip(assessed, charged, strict=True)]
        if not self.is_whitened:
            return advantages
        advantage_N = torch.cat(advantages)
        if torch.cat(assessed).any():
            advantage_N = whiten(advantage_N)
        else:
            advantage_N = advantage_N - advantage_N.mean()
        return list(torch.split(advantage_N, [a.numel() for a in advantages]))


ESTIMATORS: dict[str, Estimator] = {
    "group": Estimator(group, mean),
    "mean": Estimator(mean, mean),
    "rloo": Estimator(rloo, rloo),
    "reinforce_pp": Estimator(ungrouped, None, is_whitened=True),
    "reinforce_pp_baseline": Estimator(mean, mean, is_whitened=True),
    "maxrl": Estimator(maxrl, rloo),
    "pass_at_k": Estimator(partial(pass_at_k, k=4), rloo),
    "gdpo": Estimator(group, mean, assess=by_reward),
    "tree": Estimator(group, mean, assess=tree),
}
"""name -> an estimator. Every entry is held to tests/unit/losses/test_advantages."""


def whiten(value: Tensor) -> Tensor:
    """(x - mean) / (standard deviation + 1e-8); 0 where all values are equal."""
    if _deviation(value) == 0:
        return torch.zeros_like(value)
    return (value - value.mean()) / (_deviation(value) + 1e-8)


def _deviation(value: Tensor) -> float:
    """The standard deviation with n - 1; exactly 0 for one value and for equal values."""
    if are_alike(value.tolist()):
        return 0.0
    return float(value.std())


def gae(
    reward_N: Tensor, value_N: Tensor, bootstrap: float, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """(advantage_N, return_N) of one path. ``value_N``: V of the state in which each token was chosen. ``bootstrap``: V
    of the state after the last token; 0 where ``reward_N`` contains the reward of the whole path.
    """
    rewards, values = reward_N.tolist(), value_N.tolist()
    advantages = [0.0] * len(rewards)
    next_value, next_advantage = bootstrap, 0.0
    for t in range(len(rewards) - 1, -1, -1):
        delta = rewards[t] + gamma * next_value - values[t]
        next_advantage = delta + gamma * lam * next_advantage
        advantages[t], next_value = next_advantage, values[t]
    advantage_N = torch.tensor(advantages, dtype=torch.float64)
    return advantage_N, advantage_N + value_N


# -- shaping of rewards ----------------------------------------------------------------------------


def stopped(finish_reasons: Sequence[FinishReason]) -> Tensor:
    """bool [S]: which paths stopped on their own."""
    return torch.tensor([reason == "stop" for reason in finish_reasons], dtype=torch.bool)


def unfinished(finish_reasons: Sequence[FinishReason], penalty: float) -> Tensor:
    """-penalty for each path that was cut, else 0."""
    return -penalty * (~stopped(finish_reasons)).double()


def soft_overlong(length_S: Tensor, *, limit: int, margin: int) -> Tensor:
    """The reward for lengths near the limit: 0 to -1."""
    over_S = (length_S.double() - (limit - margin)) / margin
    return -over_S.clamp(0.0, 1.0)


def length_cost(length_S: Tensor, *, limit: int, coef: float) -> Tensor:
    """The reward for lengths, proportional to them."""
    return -coef * length_S.double() / limit


@dataclass(frozen=True)
class Scale:
    """Running mean and deviation of rewards, merged rollout by rollout (Chan et al., 1979). Part of a checkpoint."""

    count: int = 0
    mean: float = 0.0
    square: float = 0.0
    """Sum of squared distances from the mean."""

    def merged(self, reward_S: Tensor) -> Scale:
        """The statistics with these rewards added."""
        count, mean = reward_S.numel(), float(reward_S.mean()) if reward_S.numel() else 0.0
        square = float(((reward_S - mean) ** 2).sum())
        total, gap = self.count + count, mean - self.mean
        if total == 0:
            return self
        return Scale(
            total,
            self.mean + gap * count / total,
            self.square + square + gap**2 * self.count * count / total,
        )

    @property
    def deviation(self) -> float:
        """The standard deviation, with count - 1; 0 for fewer than two rewards."""
        return math.sqrt(self.square / (self.count - 1)) if self.count > 1 else 0.0

    def scaled(self, reward_S: Tensor) -> Tensor:
        """The rewards divided by the deviation, unless that is 0 or rounding."""
        is_spread = self.deviation > NO_SPREAD * max(1.0, abs(self.mean))
        return reward_S / self.deviation if is_spread else reward_S
