"""From judged trajectories to the trees that are trained on, with the credit that each token gets.

    Credit        the base: what a method that learns from its own completions implements
    PolicyCredit  policy gradients: every sampled token gets its advantage

The credits of best-of-n, online DPO and GKD are in the files of those methods (src/taut/methods). The maths is in
losses/advantages.py. Sampled ids are trained on token for token.

Policy gradients:

    reward of a trajectory    the sum of its rewards, shaped (``ShapingConfig``)
    penalty of a token        -coef * (log pi - log ref), the divergence from the reference, where it is enabled
    advantage                 of both: of a trajectory, a turn or a segment compared with its group, or of a token by
                              the critic's values
    by a teacher              distill_coef * (log teacher - log pi) of each token, added to its advantage. Its mean
                              gradient is that of -KL(pi || teacher) of the token given its prefix. It is neither
                              compared nor summed over later tokens (a discount of 0), and has no baseline

With a critic, the reward of an environment's step belongs to the last sampled token of the turn that it answers,
and the rest of a trajectory's reward (what judges it as a whole, and shaping) to its last token. The state after
the last token has the value 0, whether the trajectory ended or was cut: the reward already judges the cut answer. TRL's
PPOTrainer, verl (compute_gae_advantage_return) and OpenRLHF (get_advantages_and_returns) do the same. With
``Gae.bootstraps_cut`` a cut trajectory is treated as one that goes on: the critic's value of the state after its
last token replaces that rest. Rewards of turns and penalties of tokens stay, because they were given for what was
sampled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, NamedTuple, NotRequired

import numpy as np
import torch
from pydantic import BeforeValidator
from torch import Tensor
from typing_extensions import TypedDict

from taut.errors import CheckFailed
from taut.losses import advantages as shaping
from taut.losses import policy
from taut.losses.advantages import Estimator, Outcomes, Scale, are_alike, by_sample, gae, whiten
from taut.losses.loss import Loss
from taut.rl.rollout import POLICY, REFERENCE, VALUE, Group, ModelScores, sample_of
from taut.rl.sampler import Trajectory
from taut.rl.settings import ShapingConfig
from taut.types import TEACHER_LOGP, FloatArray, Sample, Tree, Wants


class TrainSample(NamedTuple):
    """A group to train on: its trajectories as a tree, each token with its advantage."""

    version: int
    """The version of the oldest weights that sampled it."""
    tree: Tree
    has_signal: bool = True
    """Whether the group's rewards say which of its answers are better, or a teacher judges them."""

    @property
    def has_gradient(self) -> bool:
        """Whether an advantage is not 0."""
        streams = [sample.streams.get("advantage_N") for sample in self.tree.samples]
        return any(advantage_N is None or bool(advantage_N.any()) for advantage_N in streams)

    @classmethod
    def of(
        cls, pairs: Sequence[tuple[Trajectory, Sample]], *, is_atom: bool = False
    ) -> TrainSample:
        """Make a group's tree of its trajectories, each with its sample."""
        version = min(trajectory.version for trajectory, _ in pairs)
        return cls(version, Tree(tuple(sample for _, sample in pairs), is_atom))


class Credit:
    """The base of all credits: how a method learns from rewarded trajectories."""

    wants = Wants(logp=False)
    """Which scores of a rollout are computed before training on it: the policy's logprobs, the critic's values."""
    bootstraps_cut = False
    """Whether a trajectory that was cut also needs the critic's value after its last token."""
    good = 1.0
    """Reward of the better of two made-up answers (``dry_run_group``). The other has 1 less."""
    estimator: Estimator | None = None
    """The estimator of advantages from the rewards of a group, if there is one."""
    is_plain = True
    """Whether rewards are compared without shaping and without a penalty."""
    num_listed = 0
    """Number of likeliest tokens that a teacher lists at each target."""
    is_taught = False
    """Whether teachers have a part in the advantages."""
    needs_one = False
    """Whether a rollout without a useful group cannot be trained on."""
    takes_branches = False
    """Whether trajectories may have branches."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss

    def bare(self, groups: Sequence[Group]) -> list[Tree]:
        """The groups as trees without advantages, for the models that score them."""
        reads = {"has_reads": self.wants.scalar, "has_bootstrap": self.bootstraps_cut}
        return [
            Tree(tuple(sample_of(p, **reads) for t in group.trajectories for p in t.parts))
            for group in groups
        ]

    def scored(self, groups: Sequence[Group]) -> Sequence[Group]:
        """The groups whose scores ``assign`` needs: all, unless the loss does not compute some of them."""
        return groups

    def is_useful(self, group: Group) -> bool:
        """Whether anything can be learned from a group: its rewards differ."""
        return group.has_signal

    def require_usable(self, groups: Sequence[Group]) -> None:
        """Raise CheckFailed for a rollout that lacks what the credit reads."""

    def assign(
        self, groups: Sequence[Group], scores: ModelScores
    ) -> tuple[list[TrainSample], dict[str, float]]:
        """Return the samples to train on and metrics. All trajectories of ``groups`` have a reward."""
        raise NotImplementedError

    def learn(self, groups: Sequence[Group], metrics: Mapping[str, float]) -> None:
        """Update the state of the controllers after ``assign``, which gave these metrics."""

    remembered: ClassVar[Any] = None
    """The type of what ``remember`` returns."""

    def remember(self) -> Any:
        """The state of the controllers, as JSON-able values."""
        return None

    def recall(self, remembered: Any) -> None:
        """Restore the state."""


def as_tuple(value: Any) -> tuple[Any, ...]:
    """A JSON list in place of a tuple, for pydantic."""
    if type(value) is not list:
        raise ValueError("found something other than a list")
    return tuple(value)


# -- policy gradients

VALUE_RANGE = (0.05, 0.95)
"""Quantiles of a critic's values over the states of a rollout: ``value_low`` and ``value_high``."""


class Gae(NamedTuple):
    """Generalized advantage estimation: advantages from a critic's values."""

    gamma: float
    lam: float
    is_whitened: bool
    bootstraps_cut: bool = False
    """A trajectory that was cut gets the critic's value of the state after its last token instead of its reward."""


class KlPenalty(NamedTuple):
    """The divergence from the reference as a part of the reward."""

    coef: float
    target: float | None = None
    """The KL that an adaptive coefficient aims at, in nats a token; None: the coefficient is constant."""


class EntropyTarget(NamedTuple):
    """The entropy that an adaptive entropy coefficient keeps, in nats a token."""

    target: float
    step: float
    """Change of the coefficient per rollout."""
    initial: float = 0.0
    """The coefficient at first."""


class PolicyCreditState(TypedDict):
    """The state of PolicyCredit; older checkpoints lack some keys."""

    scale: Annotated[tuple[int, float, float], BeforeValidator(as_tuple)]
    coef: float
    entropy_coef: NotRequired[float]


class PolicyCredit(Credit):
    """Policy gradients."""

    def __init__(
        self,
        loss: Loss,
        estimate: Estimator | Gae,
        shaping: ShapingConfig,
        *,
        limit: int,
        temperature: float,
        has_old: bool,
        is_bypassed: bool = False,
        penalty: KlPenalty | None = None,
        entropy: EntropyTarget | None = None,
        reward_weights: Mapping[str, float] = MappingProxyType({}),
        needs_turn_rewards: bool = False,
        distill_coef: float = 0.0,
    ) -> None:
        """``limit``: tokens that a trajectory may have beyond its prompt. ``has_old``: the trainer's own logprobs at
        the start are a stream, because more than one step trains on a rollout. ``is_bypassed``: the engine's logprobs
        take their place. ``reward_weights``: of the rewards by name. ``needs_turn_rewards``: the estimator charges
        turns with their rewards. ``distill_coef``: of what teachers add to the advantages.
        """
        super().__init__(loss)
        self.estimate, self.shaping, self.limit = estimate, shaping, limit
        self.has_old, self.penalty = has_old and not is_bypassed, penalty
        self.is_bypassed, self.entropy = is_bypassed, entropy
        self.reward_weights, self.needs_turn_rewards = reward_weights, needs_turn_rewards
        self.distill_coef, self.is_taught = distill_coef, distill_coef > 0
        has_critic = isinstance(estimate, Gae)
        wants_logp = has_old or penalty is not None or self.is_taught
        self.wants = Wants(
            wants_logp and not is_bypassed, scalar=has_critic, temperature=temperature
        )
        self.bootstraps_cut = isinstance(estimate, Gae) and estimate.bootstraps_cut
        self.estimator = None if isinstance(estimate, Gae) else estimate
        self.is_plain = (
            isinstance(estimate, Estimator)
            and estimate.assess is by_sample
            and shaping == ShapingConfig()
            and penalty is None
            and not self.is_taught
        )
        is_alone = penalty is None and not self.is_taught
        self.takes_branches = not has_critic and not needs_turn_rewards and is_alone
        self._scale = Scale()
        self._coef = 0.0 if penalty is None else penalty.coef
        self._entropy_coef = 0.0 if entropy is None else entropy.initial

    def scored(self, groups: Sequence[Group]) -> Sequence[Group]:
        """All groups but those whose advantages are 0 whatever the scores, if the loss does not compute such samples.
        There the engine's logprobs stand in for the old policy's, and nothing reads them.
        """
        estimate = self.estimator
        if estimate is None or estimate.is_whitened or self.penalty is not None or self.is_taught:
            return groups
        trajectories, group_S = _numbered(groups)
        outcomes = self._outcomes(trajectories, group_S, *self._shaped(trajectories))
        assessed = zip(group_S.tolist(), estimate.assessed(outcomes), strict=True)
        useful = {number for number, advantage_N in assessed if advantage_N.any()}
        return [
            group
            for number, group in enumerate(groups)
            if number in useful
            or not all(self._is_silent(part) for t in group.trajectories for part in t.parts)
        ]

    def is_useful(self, group: Group) -> bool:
        """Whether its rewards, before shaping, give an advantage to a token."""
        estimate = self.estimator
        if estimate is None or estimate.assess is by_sample:
            return group.has_signal
        trajectories = group.rewarded
        if not trajectories:
            return False
        reward_S = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
        group_S = torch.zeros(reward_S.numel()).long()
        outcomes = self._outcomes(trajectories, group_S, Scale(), reward_S)
        return any(advantage_N.any() for advantage_N in estimate.assessed(outcomes))

    def require_usable(self, groups: Sequence[Group]) -> None:
        trajectories = [t for group in groups for t in group.trajectories]
        parts = [part for t in trajectories for part in t.parts]
        unknown = [part.name for part in parts if not np.isfinite(part.logp_N).all()]
        has_any = any(t.turn_rewards for t in trajectories)
        problem = ""
        if self.is_bypassed and unknown:
            problem = (
                f"old_logprobs=engine, and the engine gave no logprobs for {len(unknown)} completions, such as "
                f"{unknown[0]}; expected one of each sampled token; set old_logprobs=trainer"
            )
        elif self.needs_turn_rewards and groups and not has_any:
            problem = (
                "advantage_level=turn, and no turn of the rollout has a reward; expected one of each step, be it 0; "
                "return Step(reward=...), set steps.charge=true of a reward, or set advantage_level=trajectory"
            )
        if problem:
            raise CheckFailed(problem)

    def _outcomes(
        self,
        trajectories: Sequence[Trajectory],
        group_S: Tensor,
        scale: Scale,
        reward_S: Tensor,
    ) -> Outcomes:
        """Return the input of an estimator. ``scale``: the divisor of the rewards."""
        names = dict.fromkeys(name for t in trajectories for name in t.reward_result.parts)
        scores = [t.reward_result.parts for t in trajectories]
        parts = {
            name: torch.tensor(
                [
                    math.nan if name not in of or of[name].value is None else of[name].value
                    for of in scores
                ],
                dtype=torch.float64,
            )
            for name in names
        }
        turns = [turns_of(trajectory) for trajectory in trajectories]
        return Outcomes(
            reward_S=reward_S,
            group_S=group_S,
            length_S=torch.tensor([t.num_sampled for t in trajectories]),
            parts=parts,
            weights=self.reward_weights,
            turn_ends=[end_U for end_U, _ in turns],
            turn_rewards=[scale.scaled(reward_U) for _, reward_U in turns],
            ids=[torch.tensor(t.ids_T) for t in trajectories],
            sampled_at=[torch.tensor(t.sampled_at_N) for t in trajectories],
            branches=[
                [(torch.tensor(b.ids_T), torch.tensor(b.sampled_at_N)) for b in t.branches]
                for t in trajectories
            ],
            forks=[t.forks for t in trajectories],
        )

    def _is_silent(self, trajectory: Trajectory) -> bool:
        """Whether a trajectory without an advantage is left out by the loss."""
        streams = {"advantage_N": np.zeros(trajectory.sampled_at_N.size)}
        is_known = bool(np.isfinite(trajectory.logp_N).all())
        return is_known and self.loss.is_silent(replace(sample_of(trajectory), streams=streams))

    def assign(
        self, groups: Sequence[Group], scores: ModelScores
    ) -> tuple[list[TrainSample], dict[str, float]]:
        # Rewards, shaped, and the scores of each trajectory.
        trajectories, group_S = _numbered(groups)
        scale, reward_S = self._shaped(trajectories)

        def scores_of(part: Trajectory) -> dict[str, FloatArray]:
            # the engine's logprobs stand in for the old policy's where a group was not scored, or old_logprobs=engine
            return {POLICY: part.logp_N} | scores.get(part.name, {})

        scores_S = [scores_of(trajectory) for trajectory in trajectories]
        metrics: dict[str, float] = {}
        if self.shaping != ShapingConfig():
            metrics["reward_shaped"] = float(reward_S.mean())

        # The divergence from the reference as a penalty of each token, and the entropy.
        penalties = [torch.zeros(t.num_sampled, dtype=torch.float64) for t in trajectories]
        if self.penalty is not None:
            logps = [(_tensor(own[POLICY]), _tensor(own[REFERENCE])) for own in scores_S]
            penalties = [policy.penalty(old, reference, self._coef) for old, reference in logps]
            gap_N = torch.cat([old - reference for old, reference in logps])
            metrics["kl"] = float(policy.estimate(gap_N, "k1").mean())
            metrics["kl_k3"] = float(policy.estimate(gap_N, "k3").mean())
            metrics["kl_coef"] = self._coef
        values: dict[str, float] = {}
        if self.entropy is not None:
            # the mean of -logp of sampled tokens is an unbiased estimate of the entropy, in nats a token
            sampled = np.concatenate([part.logp_N for t in trajectories for part in t.parts])
            metrics["entropy_sampled"] = float(-np.nanmean(sampled))
            values["entropy_coef"] = self._entropy_coefs(metrics["entropy_sampled"])[0]
            metrics["entropy_coef"] = values["entropy_coef"]

        # Advantages: by the critic's values, or compared within groups.
        returns: Sequence[FloatArray | None] = [None] * len(trajectories)
        if isinstance(self.estimate, Gae):
            of_critic = [_tensor(own[VALUE]) for own in scores_S]
            advantages, returns, ranges = _by_critic(
                self.estimate, trajectories, reward_S, scale, penalties, of_critic
            )
            metrics |= ranges
            # Signal: the rewards of all trajectories differ; a single one is compared with the critic's value.
            differ = len(trajectories) == 1 or not are_alike(reward_S.tolist())
            has_signal = [differ] * len(groups)
        else:
            outcomes = self._outcomes(trajectories, group_S, scale, reward_S)
            estimated = self.estimate(outcomes, penalties)
            advantages = [advantage_N.numpy() for advantage_N in estimated]
            # Signal by the rewards alone: penalties always differ, so with them every group would seem to have one.
            assessed = zip(group_S.tolist(), self.estimate.assessed(outcomes), strict=True)
            useful = {number for number, advantage_N in assessed if advantage_N.any()}
            has_signal = [number in useful for number in range(len(groups))]
        if self.is_taught:  # a teacher judges each token (module docstring)
            taught = [self.distill_coef * (own[TEACHER_LOGP] - own[POLICY]) for own in scores_S]
            advantages = [own + more for own, more in zip(advantages, taught, strict=True)]
            has_signal = [True] * len(groups)

        # Samples: each path of a trajectory with its streams.
        samples_of: list[list[tuple[Trajectory, Sample]]] = [[] for _ in groups]
        num_learned = 0
        for number, trajectory, advantage_N, return_N in zip(
            group_S.tolist(), trajectories, advantages, returns, strict=True
        ):
            if trajectory.is_cut and self.shaping.overlong == "drop":
                continue
            num_learned += 1
            parts = trajectory.parts
            ends = np.cumsum([part.sampled_at_N.size for part in parts])
            for part, own_N in zip(parts, np.split(advantage_N, ends[:-1]), strict=True):
                own = scores_of(part)
                streams = {"advantage_N": own_N, "engine_logp_N": part.logp_N}
                if self.has_old:
                    streams[POLICY] = own[POLICY]
                if REFERENCE in own and self.penalty is None:
                    streams[REFERENCE] = own[REFERENCE]
                sample = replace(sample_of(part), streams=streams, values=values)
                if return_N is not None:
                    values_of = {"return": return_N, "value": own[VALUE][: return_N.size]}
                    sample = replace(
                        sample, read_at_R=sample.target_at_N - 1, read_values=values_of
                    )
                samples_of[number].append((part, sample))
        if not num_learned:
            raise CheckFailed(
                f"all {len(trajectories)} completions of a rollout were cut, and shaping.overlong=drop leaves those "
                "out; expected some that end; raise rollout.max_new_tokens, or set shaping.overlong=keep"
            )
        if self.shaping.overlong == "drop":
            metrics["dropped"] = 1.0 - num_learned / len(trajectories)

        # Trees: one for each group.
        train_samples = [
            TrainSample.of(pairs)._replace(has_signal=differ)
            for pairs, differ in zip(samples_of, has_signal, strict=True)
            if pairs
        ]
        return train_samples, metrics

    def learn(self, groups: Sequence[Group], metrics: Mapping[str, float]) -> None:
        self._scale, _ = self._shaped([t for group in groups for t in group.trajectories])
        if self.penalty is not None and self.penalty.target is not None:
            target = self.penalty.target
            self._coef = policy.adapted(self._coef, observed=metrics["kl"], target=target)
        if self.entropy is not None:
            self._entropy_coef = self._entropy_coefs(metrics["entropy_sampled"])[1]

    def _entropy_coefs(self, observed: float) -> tuple[float, float]:
        """The entropy coefficient of a rollout, and the state after it."""
        assert self.entropy is not None
        target, step, _ = self.entropy
        return policy.entropy_coefs(self._entropy_coef, observed=observed, target=target, step=step)

    remembered: ClassVar[Any] = PolicyCreditState

    def remember(self) -> dict[str, Any]:
        scale = self._scale
        return {
            "scale": [scale.count, scale.mean, scale.square],
            "coef": self._coef,
            "entropy_coef": self._entropy_coef,
        }

    def recall(self, remembered: Mapping[str, Any]) -> None:
        self._scale, self._coef = Scale(*remembered["scale"]), remembered["coef"]
        self._entropy_coef = remembered.get("entropy_coef", self._entropy_coef)

    def _shaped(self, trajectories: Sequence[Trajectory]) -> tuple[Scale, Tensor]:
        """The rewards after shaping, and the scale by which they were divided."""
        config, limit = self.shaping, self.limit
        reward_S = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
        # tokens beyond the prompt: an environment's too, as its limit counts them
        length_S = torch.tensor([int(t.ids_T.size - t.sampled_at_N[0]) for t in trajectories])
        if config.missing_eos_penalty:
            ends = [trajectory.finish_reason for trajectory in trajectories]
            reward_S = reward_S + shaping.unfinished(ends, config.missing_eos_penalty)
        if config.soft_overlong is not None:
            margin = config.soft_overlong
            reward_S = reward_S + shaping.soft_overlong(length_S, limit=limit, margin=margin)
        if config.length_penalty:
            reward_S = reward_S + shaping.length_cost(
                length_S, limit=limit, coef=config.length_penalty
            )
        if config.clip is not None:
            reward_S = reward_S.clamp(-config.clip, config.clip)
        if config.scale == "none":
            return self._scale, reward_S
        scale = (self._scale if config.scale == "running" else Scale()).merged(reward_S)
        return scale, scale.scaled(reward_S)


def _numbered(groups: Sequence[Group]) -> tuple[list[Trajectory], Tensor]:
    """The trajectories of all groups, and the number of each one's group."""
    trajectories = [t for group in groups for t in group.trajectories]
    numbers = [number for number, group in enumerate(groups) for _ in group.trajectories]
    return trajectories, torch.tensor(numbers)


def turns_of(trajectory: Trajectory) -> tuple[Tensor, Tensor]:
    """(turn_ends, turn_rewards) of Outcomes. A turn ends where others speak, and where a step was rewarded."""
    at_N, rewards = trajectory.sampled_at_N, dict[int, float]()
    for n in [*np.flatnonzero(np.diff(at_N) > 1).tolist(), at_N.size - 1]:
        rewards[n] = 0.0
    for n, reward in trajectory.turn_rewards:
        rewards[n] = rewards.get(n, 0.0) + reward
    ends = sorted(rewards)
    return torch.tensor(ends), torch.tensor([rewards[n] for n in ends], dtype=torch.float64)


def _by_critic(
    config: Gae,
    trajectories: Sequence[Trajectory],
    reward_S: Tensor,
    scale: Scale,
    penalties: Sequence[Tensor],
    values: Sequence[Tensor],
) -> tuple[list[FloatArray], list[FloatArray], dict[str, float]]:
    """(advantages, returns) of each trajectory's tokens, and two ranges: of the critic's values, and of the discounted
    sum of rewards from each token on, which reads no value of the critic.
    """
    # each trajectory: rewards of its turns, penalties of its tokens, the rest at its last token
    advantages: list[Tensor] = []
    returns: list[FloatArray] = []
    sums = []
    for trajectory, reward, penalty_N, value_R in zip(
        trajectories, reward_S.tolist(), penalties, values, strict=True
    ):
        size, turn_N = penalty_N.numel(), torch.zeros_like(penalty_N)
        for n, turn_reward in trajectory.turn_rewards:
            turn_N[n] += turn_reward
        turn_N = scale.scaled(turn_N)  # as the whole reward was
        reward_N, bootstrap = turn_N + penalty_N, 0.0
        if config.bootstraps_cut and trajectory.is_cut:
            bootstrap = float(value_R[size])
        else:
            reward_N[-1] += reward - float(turn_N.sum())
        advantage_N, return_N = gae(reward_N, value_R[:size], bootstrap, config.gamma, config.lam)
        advantages.append(advantage_N)
        returns.append(return_N.numpy())
        sums.append(gae(reward_N, torch.zeros_like(reward_N), 0.0, config.gamma, 1.0)[1])
    # over all of them: whitened advantages, and the ranges
    sizes = [advantage_N.numel() for advantage_N in advantages]
    if config.is_whitened:
        advantages = list(torch.split(whiten(torch.cat(advantages)), sizes))
    sum_N = torch.cat(sums)
    value_N = torch.cat([value_R[:size] for value_R, size in zip(values, sizes, strict=True)])
    low, high = np.quantile(value_N.numpy(), VALUE_RANGE).tolist()
    ranges = {
        "return_min": float(sum_N.min()),
        "return_max": float(sum_N.max()),
        "value_low": low,
        "value_high": high,
    }
    return [advantage_N.numpy() for advantage_N in advantages], returns, ranges


def _tensor(value: FloatArray) -> Tensor:
    return torch.from_numpy(np.asarray(value, dtype=np.float64))
