"""From judged trajectories to the trees that are trained on, with the credit that each token gets.

    Credit        the base: what a method that learns from its own completions implements
    PolicyCredit  policy gradients: every sampled token gets its advantage

The credits of best-of-n, online DPO and GKD are in the files of those methods (src/taut/methods). The maths is in
losses/advantages.py. Sampled ids are trained on token for token.

Policy gradients:

    reward of a trajectory    the sum of its rewards, shaped (``ShapingConfig``)
    penalty of a token        -coef * (log pi - log ref), the divergence from the reference, where it is enabled
    advantage                 of both: of a trajectory compared with its group, or of a token by the critic's values

With a critic, the reward of an environment's step belongs to the last sampled token of the turn that it answers,
and the rest of a trajectory's reward (what judges it as a whole, and shaping) to its last token. The state after
the last token is worth 0, whether the trajectory ended or was cut: the reward already judges the cut answer. TRL's
PPOTrainer, verl (compute_gae_advantage_return) and OpenRLHF (get_advantages_and_returns) do the same. With
``Gae.bootstraps_cut`` a cut trajectory is treated as one that goes on: the critic's value of the state after its
last token replaces that rest. Rewards of turns and penalties of tokens stay, because they were given for what was
sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from pydantic import BeforeValidator, Field
from torch import Tensor
from typing_extensions import TypedDict

from taut.config import configclass
from taut.errors import CheckFailed, ConfigError
from taut.losses import Loss, policy
from taut.losses import advantages as shaping
from taut.losses.advantages import Estimator, Scale, are_alike, gae, whiten
from taut.rl.buffer_state import as_tuple
from taut.rl.rollout import POLICY, REFERENCE, VALUE, Asked, Group, Said, sample_of
from taut.rl.sampler import Trajectory
from taut.types import FloatArray, Sample, Tree


def judged_trajectories(groups: Sequence[Group], phase: int) -> list[Trajectory]:
    """The trajectories of a roll-out that have a reward, each with its name, group and verdict."""
    return [
        replace(
            trajectory,
            name=f"{trajectory.row.id}#{trajectory.index} of roll-out {phase + 1}",
            group=number,
            verdict=verdict,
        )
        for number, group in enumerate(groups)
        for trajectory, verdict in group.judged
    ]


class TrainSample(NamedTuple):
    """What is trained on: the trajectories of a group as a tree, with their streams and advantages."""

    version: int
    """The version of the oldest weights that sampled it."""
    tree: Tree


class Credited(NamedTuple):
    """What has come of a roll-out."""

    trees: list[Tree]
    with_signal: list[TrainSample]
    """Those of the trees from which something is learned."""
    metrics: dict[str, float]
    advantages: Mapping[str, FloatArray]
    """Of each path that is learned from."""
    learned: Any = None
    """For ``Credit.learn``."""
    num_told_apart: int | None = None
    """Groups of which rewards say something; None: of those with a signal alone."""

    @property
    def num_groups_with_signal(self) -> int:
        """Groups of whose rewards something is learned."""
        return len(self.with_signal) if self.num_told_apart is None else self.num_told_apart


class Credit:
    """The base of all kinds."""

    asked = Asked(policy=False, values=False, temperature=1.0)
    good = 1.0
    """A reward that something is learned from, where another answer has 1 less."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss

    def bare(self, paths: Sequence[Trajectory]) -> list[Tree]:
        """The paths, a tree for each group, as the models that score them see them."""
        reads = {"has_reads": self.asked.values, "has_bootstrap": self.asked.bootstrap}
        return _trees([(p.group, sample_of(p, p.name, **reads)) for p in paths])

    estimator: Estimator | None = None
    """How advantages are estimated from the rewards of a group, where they are."""
    is_plain = True
    """Whether rewards are compared as they are: neither shaped nor with a penalty."""
    needs_one = False
    """Whether there is nothing to train on without a group that is useful."""

    def is_useful(self, group: Group) -> bool:
        """Whether anything can be learned from a group: its rewards differ."""
        return group.has_signal

    def trees(self, paths: Sequence[Trajectory], said: Said) -> Credited:
        """What is trained on."""
        raise NotImplementedError

    def learn(self, given: Credited) -> None:
        """Take in what a roll-out has taught the controllers."""

    remembered: ClassVar[Any] = None
    """The type of what ``remember`` returns."""

    def remember(self) -> Any:
        """The state of the controllers, as JSON-able values."""
        return None

    def recall(self, remembered: Any) -> None:
        """Take it back."""


def credited(
    made: Sequence[tuple[Trajectory, Sample]],
    metrics: dict[str, float],
    advantages: Mapping[str, FloatArray],
    *,
    is_atom: bool = False,
) -> Credited:
    """Samples as trees, one a group. A tree whose advantages are all 0 has no signal."""
    trees = _trees([(path.group, sample) for path, sample in made], is_atom=is_atom)
    versions: dict[int, int] = {}
    for path, _ in made:
        versions[path.group] = min(path.version, versions.get(path.group, path.version))
    with_signal = [
        TrainSample(version, tree)
        for version, tree in zip(versions.values(), trees, strict=True)
        if any(bool(s.streams.get("advantage_N", np.ones(1)).any()) for s in tree.samples)
    ]
    return Credited(trees, with_signal, metrics, advantages)


def _trees(made: Sequence[tuple[int, Sample]], *, is_atom: bool = False) -> list[Tree]:
    by_group: dict[int, list[Sample]] = {}
    for group, sample in made:
        by_group.setdefault(group, []).append(sample)
    return [Tree(tuple(samples), is_atom) for samples in by_group.values()]


def by_group(paths: Sequence[Trajectory]) -> dict[int, list[Trajectory]]:
    """The trajectories of each group, by its number."""
    found: dict[int, list[Trajectory]] = {}
    for path in paths:
        found.setdefault(path.group, []).append(path)
    return found


# -- policy gradients

VALUE_RANGE = (0.05, 0.95)
"""Quantiles of a critic's values over the states of a roll-out: ``value_low`` and ``value_high``."""


@configclass
class ShapingConfig:
    """What is done to rewards before they are compared; in this order."""

    missing_eos_penalty: Annotated[float, Field(ge=0)] = 0.0
    """Taken off the reward of a completion that was cut before its end."""
    soft_overlong: Annotated[int, Field(ge=1)] | None = None
    """So many tokens before the limit a penalty begins, and falls to -1 there (DAPO). The limit is
    rollout.max_new_tokens; of an environment, whose paths have several turns, rollout.environment.max_tokens."""
    length_penalty: Annotated[float, Field(ge=0)] = 0.0
    """Taken off for a completion as long as that limit; in proportion for shorter ones."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """Rewards are held between minus this and this."""
    scale: Literal["none", "batch", "running"] = "none"
    """Divide rewards by their standard deviation: of the roll-out, or of all so far."""
    overlong: Literal["keep", "drop"] = "keep"
    """drop: completions that were cut are compared with the others, and not learned from (DAPO's overlong filter)."""

    def require_room(self, limit: int) -> None:
        """Raise ConfigError where the margin is longer than the completions."""
        if self.soft_overlong is not None and self.soft_overlong > limit:
            raise ConfigError(
                f"shaping.soft_overlong={self.soft_overlong} is longer than a completion may be, {limit} tokens; "
                "expected the part of it in which the penalty grows; lower it"
            )


class Gae(NamedTuple):
    """How a critic's values become advantages."""

    gamma: float
    lam: float
    is_whitened: bool
    bootstraps_cut: bool = False
    """A cut path gets the critic's value of the state after its last token in place of the path's reward."""


class KlPenalty(NamedTuple):
    """The divergence from the reference as a part of the reward."""

    coef: float
    target: float | None = None
    """What an adaptive coefficient aims at, in nats a token; None: it stays."""


class _Learned(NamedTuple):
    scale: Scale
    coef: float


@dataclass(frozen=True)
class Ways:
    """How rewards become advantages."""

    estimate: Estimator | Gae
    shaping: ShapingConfig
    limit: int
    """Tokens that a path may have beyond its prompt."""
    temperature: float
    has_old: bool
    """Whether the trainer's own log-probs at the start are a stream: more than one step trains on a roll-out."""
    penalty: KlPenalty | None = None

    @property
    def asked(self) -> Asked:
        return Asked(
            policy=self.has_old or self.penalty is not None,
            values=isinstance(self.estimate, Gae),
            temperature=self.temperature,
            bootstrap=isinstance(self.estimate, Gae) and self.estimate.bootstraps_cut,
        )


class PolicyCreditState(TypedDict):
    """What PolicyCredit remembers."""

    scale: Annotated[tuple[int, float, float], BeforeValidator(as_tuple)]
    coef: float


class PolicyCredit(Credit):
    """Policy gradients."""

    def __init__(self, loss: Loss, ways: Ways) -> None:
        super().__init__(loss)
        self.ways, self.asked = ways, ways.asked
        self.estimator = ways.estimate if isinstance(ways.estimate, Estimator) else None
        self.is_plain = ways.shaping == ShapingConfig() and ways.penalty is None
        self._scale = Scale()
        self._coef = 0.0 if ways.penalty is None else ways.penalty.coef

    def trees(self, paths: Sequence[Trajectory], said: Said) -> Credited:
        scale, reward_S = self._shaped(paths)
        penalties = [self._penalty(path, said[path.name]) for path in paths]
        if isinstance(self.ways.estimate, Gae):
            advantages, returns, of_critic = _by_critic(
                self.ways.estimate, paths, reward_S, scale, penalties, said
            )
        else:
            group_S = torch.tensor([path.group for path in paths])
            estimated = self.ways.estimate(reward_S, group_S, penalties)
            advantages = [advantage_N.numpy() for advantage_N in estimated]
            returns, of_critic = [None] * len(paths), {}
        given = dict(zip([path.name for path in paths], advantages, strict=True))
        made = [
            (path, self._sample(path, given[path.name], of, said[path.name]))
            for path, of in zip(paths, returns, strict=True)
            if not (path.is_cut and self.ways.shaping.overlong == "drop")
        ]
        if not made:
            raise CheckFailed(
                f"all {len(paths)} completions of a roll-out were cut, and shaping.overlong=drop leaves those out; "
                "expected some that end; raise rollout.max_new_tokens, or set shaping.overlong=keep"
            )
        metrics = self._metrics(reward_S, paths, said) | of_critic
        if self.ways.shaping.overlong == "drop":
            metrics["dropped"] = 1.0 - len(made) / len(paths)
        learned = {path.name: given[path.name] for path, _ in made}
        told_apart = self._told_apart(paths, reward_S) & {path.group for path, _ in made}
        return credited(made, metrics, learned)._replace(
            learned=_Learned(scale, self._next_coef(metrics)), num_told_apart=len(told_apart)
        )

    def _told_apart(self, paths: Sequence[Trajectory], reward_S: Tensor) -> set[int]:
        """Groups that have a signal by their rewards alone: what a critic expects, or a penalty takes off, is never all
        the same. With a critic all are compared with each other.
        """
        groups = [path.group for path in paths]
        if isinstance(self.ways.estimate, Gae):
            is_one = len(paths) == 1  # compared with what the critic expects alone
            return set(groups) if is_one or not are_alike(reward_S.tolist()) else set()
        compared = self.ways.estimate.compare(reward_S, torch.tensor(groups)).tolist()
        return {group for group, one in zip(groups, compared, strict=True) if one}

    def learn(self, given: Credited) -> None:
        self._scale, self._coef = given.learned

    remembered: ClassVar[Any] = PolicyCreditState

    def remember(self) -> dict[str, Any]:
        scale = self._scale
        return {"scale": [scale.count, scale.mean, scale.square], "coef": self._coef}

    def recall(self, remembered: Mapping[str, Any]) -> None:
        self._scale, self._coef = Scale(*remembered["scale"]), remembered["coef"]

    def _shaped(self, paths: Sequence[Trajectory]) -> tuple[Scale, Tensor]:
        """The rewards as they are compared, and what is known of their spread with them."""
        how, limit = self.ways.shaping, self.ways.limit
        reward_S = torch.tensor([path.reward for path in paths], dtype=torch.float64)
        length_S = torch.tensor([_length(path) for path in paths])
        if how.missing_eos_penalty:
            ends = [path.finish_reason for path in paths]
            reward_S = reward_S + shaping.unfinished(ends, how.missing_eos_penalty)
        if how.soft_overlong is not None:
            reward_S = reward_S + shaping.soft_overlong(
                length_S, limit=limit, margin=how.soft_overlong
            )
        if how.length_penalty:
            reward_S = reward_S + shaping.length_cost(
                length_S, limit=limit, coef=how.length_penalty
            )
        if how.clip is not None:
            reward_S = reward_S.clamp(-how.clip, how.clip)
        if how.scale == "none":
            return self._scale, reward_S
        scale = (self._scale if how.scale == "running" else Scale()).merged(reward_S)
        return scale, scale.scaled(reward_S)

    def _penalty(self, path: Trajectory, said: Mapping[str, FloatArray]) -> Tensor:
        """What is added to each token's reward, [N], for its divergence from the reference."""
        if self.ways.penalty is None:
            return torch.zeros(path.sampled_at_N.size, dtype=torch.float64)
        return policy.penalty(_tensor(said[POLICY]), _tensor(said[REFERENCE]), self._coef)

    def _sample(
        self,
        path: Trajectory,
        advantage_N: FloatArray,
        return_N: FloatArray | None,
        said: Mapping[str, FloatArray],
    ) -> Sample:
        streams = {"advantage_N": advantage_N, "engine_logp_N": path.logp_N}
        if self.ways.has_old:
            streams[POLICY] = said[POLICY]
        if REFERENCE in said and self.ways.penalty is None:
            streams[REFERENCE] = said[REFERENCE]
        sample = replace(sample_of(path, path.name, has_reads=False), streams=streams)
        if return_N is None:
            return sample
        values = {"return": return_N, "value": said[VALUE][: return_N.size]}
        return replace(sample, read_at_R=sample.target_at_N - 1, read_values=values)

    def _metrics(
        self, reward_S: Tensor, paths: Sequence[Trajectory], said: Said
    ) -> dict[str, float]:
        metrics = {}
        if self.ways.shaping != ShapingConfig():
            metrics["reward_shaped"] = float(reward_S.mean())
        if self.ways.penalty is not None:
            pairs = [(said[p.name][POLICY], said[p.name][REFERENCE]) for p in paths]
            gap_N = torch.cat([_tensor(own - reference) for own, reference in pairs])
            metrics["kl"] = float(policy.estimate(gap_N, "k1").mean())
            metrics["kl_k3"] = float(policy.estimate(gap_N, "k3").mean())
            metrics["kl_coef"] = self._coef
        return metrics

    def _next_coef(self, metrics: Mapping[str, float]) -> float:
        penalty = self.ways.penalty
        if penalty is None or penalty.target is None:
            return self._coef
        return policy.adapted(self._coef, observed=metrics["kl"], target=penalty.target)


def _by_critic(
    how: Gae,
    paths: Sequence[Trajectory],
    reward_S: Tensor,
    scale: Scale,
    penalties: Sequence[Tensor],
    said: Said,
) -> tuple[list[FloatArray], list[FloatArray | None], dict[str, float]]:
    """(advantages, returns) of each path's tokens, and the ranges of what the critic says and of what rewards come to:
    the discounted sum of the rewards from each token on, which no value of the critic has a part in.
    """
    advantages: list[Tensor] = []
    returns: list[FloatArray | None] = []
    values, sums = [], []
    for path, reward, penalty_N in zip(paths, reward_S.tolist(), penalties, strict=True):
        size, turn_N = penalty_N.numel(), torch.zeros_like(penalty_N)
        for n, turn_reward in path.turn_rewards:
            turn_N[n] += turn_reward
        turn_N = scale.scaled(turn_N)  # as the whole reward was
        reward_N = turn_N + penalty_N
        value_R, bootstrap = _tensor(said[path.name][VALUE]), 0.0
        if how.bootstraps_cut and path.is_cut:
            bootstrap = float(value_R[size])
        else:
            reward_N[-1] += reward - float(turn_N.sum())
        advantage_N, return_N = gae(reward_N, value_R[:size], bootstrap, how.gamma, how.lam)
        advantages.append(advantage_N)
        returns.append(return_N.numpy())
        values.append(value_R[:size])
        sums.append(gae(reward_N, torch.zeros_like(reward_N), 0.0, how.gamma, 1.0)[1])
    if how.is_whitened:
        sizes = [one.numel() for one in advantages]
        advantages = list(torch.split(whiten(torch.cat(advantages)), sizes))
    sum_N = torch.cat(sums)
    low, high = np.quantile(torch.cat(values).numpy(), VALUE_RANGE).tolist()
    ranges = {
        "return_min": float(sum_N.min()),
        "return_max": float(sum_N.max()),
        "value_low": low,
        "value_high": high,
    }
    return [one.numpy() for one in advantages], returns, ranges


def _length(path: Trajectory) -> int:
    """Tokens a path has beyond its prompt: an environment's too, as its limit counts them."""
    return int(path.ids_T.size - path.sampled_at_N[0])


def _tensor(value: FloatArray) -> Tensor:
    return torch.from_numpy(np.asarray(value, dtype=np.float64))
