"""The `rollout` log event (generation statistics, rewards, sample completions), and the monitors of rollouts: when a
run warns and when it stops.

    rewards      completions without a reward (an error of the reward, the environment or the engine, or a reward that
                 does not apply), by share; rollouts in which no completion has one
    logprobs     the engine's against the trainer's own, of the same tokens: mean |difference|, effective sample size
    ends         the share of completions that end by themselves, against that of the first rollouts
    signal       rollouts in which no group's rewards differ, with a critic none at all: nothing is learned
    prefix_cache tokens that the engine in this process computed again for want of room (said once in a run)
    dropped      the share of answers that are cut and left out of training (shaping.overlong=drop)
    values       the critic's values against the range of the returns of recent rollouts
    updates      where several updates train on a rollout, KL(old || policy) and the share of clipped tokens; entropy
                 against that of the first updates, as long as answers are not good: a policy that has learned its
                 task has lost its entropy too. Means of the last ``RECENT`` updates are compared with the limits

Each of the last three only warns: once, and again after the number has been down to half of its limit (entropy: up to
twice).

The state of the monitors goes into checkpoints. All numbers are in events.jsonl; monitors compare them with limits.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, pstdev
from typing import Any, ClassVar, NotRequired

import numpy as np
from typing_extensions import TypedDict

from taut.data.rows.messages import named
from taut.errors import CheckFailed
from taut.inference.engine import Engine
from taut.inference.vllm import ServerEngine
from taut.rl.advantages import TrainSample
from taut.rl.rollout import Group, Rollout
from taut.rl.sampler import Trajectory
from taut.rl.settings import ENVIRONMENT_COLUMN, RolloutConfig, RolloutMonitorConfig
from taut.train.trainer import StepReport, Trainer

BEGINNING = 3
"""Number of first rollouts, or updates, that later ones are compared with."""
RECENT = 5
"""Number of last rollouts, or updates, that are averaged for that."""
WARN_SILENT = 3
"""Number of rollouts in a row without a signal after which the monitor warns."""
GOOD = 0.7
"""Answers are good where their mean reward is this far from the worst to the best that any answer has had."""
SHOWN = 3
"""Number of errors in a message."""
DRIFT, LOW, HIGH = "old/kl_k1", "clip/low", "clip/high"
"""Metrics of the loss: KL(old || policy), by k1, because in k3 a single token that has become likely outweighs
thousands; shares of tokens clipped from below and from above."""
EXACT, ESTIMATE = "entropy", "entropy_estimate"
"""Metrics of the loss: the policy's entropy, where it is computed, and its estimate."""
DIFFERENCE, EFFECTIVE, WEIGHT = "engine/difference", "engine/effective", "engine/weight"
"""Metrics of the loss: mean |difference| of logprobs; effective sample size of the correction's weights by number of
tokens; their mean."""


def rollout_event(
    rollout: Rollout,
    samples: Sequence[TrainSample],
    metrics: Mapping[str, float],
    version: int,
    config: RolloutConfig,
    *,
    is_judged: bool,
) -> dict[str, Any]:
    """Return the fields of the event; groups that were left out count. ``samples``: the groups to train on.
    ``metrics``: of the credit. ``version``: of the weights that train.
    """
    trajectories = [one for group in rollout.all_groups for one in group.trajectories]
    whole = [trajectory for trajectory in trajectories if trajectory.error is None]
    failures = [trajectory.failure for trajectory in trajectories if trajectory.failure]
    event: dict[str, Any] = {}
    if is_judged:
        # the mean of each part of the reward where it applies, and the number of answers that it could not judge
        scores = [
            pair for trajectory in trajectories for pair in trajectory.reward_result.parts.items()
        ]
        values: dict[str, list[float]] = {}
        for name, score in scores:
            if score.value is not None:
                values.setdefault(name, []).append(score.value)
        means = {f"reward/{name}": fmean(of_part) for name, of_part in values.items()}
        num_unjudged = Counter(name for name, score in scores if score.unjudged is not None)
        rewards = [trajectory.reward for trajectory in trajectories if trajectory.has_reward]
        if rewards:
            event |= {"reward": fmean(rewards), "reward_std": pstdev(rewards)}
            event |= {"reward_min": min(rewards), "reward_max": max(rewards)}
        event |= means | {f"reward/{name}_unjudged": float(n) for name, n in num_unjudged.items()}
        event["groups_with_signal"] = sum(sample.has_signal for sample in samples)
        event["left_out"] = len(rollout.left_out)
        event["without_reward"] = len(trajectories) - len(rewards) - len(failures)
        event["rewarded"] = len(rewards)
    # its size, and the time it took
    event["groups"] = len(rollout.all_groups)
    event["completions"] = len(trajectories)
    event["errors"] = len(failures)
    if rollout.from_data:
        event["from_data"] = len(rollout.from_data)
    event["seconds_generating"] = rollout.seconds_generating
    event["seconds_judging"] = rollout.seconds_judging
    event |= metrics
    if whole:
        lengths = [trajectory.num_sampled for trajectory in whole]
        event["stopped"] = fmean(trajectory.finish_reason == "stop" for trajectory in whole)
        event["tokens_mean"], event["tokens_max"] = fmean(lengths), max(lengths)
    staleness = [version - int(v) for trajectory in whole for v in trajectory.version_N[:1]]
    if staleness:
        event["staleness_mean"], event["staleness_max"] = fmean(staleness), max(staleness)
    # what the sources of rollouts did
    if rollout.oversampled is not None:
        event["oversample_dropped"] = rollout.oversampled.num_groups
        event["oversample_tokens_mean"] = rollout.oversampled.num_tokens
    if config.difficulty_filter:
        event["difficulty_replaced"] = rollout.num_replaced
    if config.lag:
        event["draws"], event["stale_groups"] = list(rollout.draws), rollout.num_stale
    if config.environment.is_on and whole:
        event["turns_mean"] = fmean(trajectory.num_turns for trajectory in whole)
        event["calls"] = sum(trajectory.num_calls for trajectory in whole)
        event["malformed_calls"] = sum(trajectory.num_malformed_calls for trajectory in whole)
    if rollout.lost[0]:
        event["prefix_recomputed"], event["prefix_gib"] = rollout.lost[0], rollout.lost[1] / 2**30
    if config.fork.is_on and whole:
        new = [trajectory.num_sampled - trajectory.num_inherited for trajectory in whole]
        event["fork_distinct"] = fmean(count > 0 for count in new)
        event["fork_new_tokens"] = sum(new) / sum(trajectory.num_sampled for trajectory in whole)
    # of each environment, and of agents
    for name in config.environment.by_row:
        of_it = [t for t in trajectories if t.row.columns.get(ENVIRONMENT_COLUMN) == name]
        scored = [t.reward for t in of_it if t.has_reward]
        event[f"environment/{name}/share"] = len(of_it) / len(trajectories)
        event[f"environment/{name}/errors"] = sum(t.failure is not None for t in of_it)
        if scored:
            event[f"environment/{name}/reward"] = fmean(scored)
        if of_it:
            event[f"environment/{name}/turns_mean"] = fmean(t.num_turns for t in of_it)
    of_agents = [t for t in whole if config.environment.is_agent(t.row.columns)]
    if of_agents:
        event["paths_mean"] = fmean(1 + len(trajectory.branches) for trajectory in of_agents)
        event["conversations"] = sum(trajectory.num_conversations for trajectory in of_agents)
        event["edited_histories"] = sum(trajectory.num_edited for trajectory in of_agents)
    if failures:
        event["first_error"] = failures[0]
    event["samples"] = [logged(trajectory, samples) for trajectory in best_and_worst(rollout)]
    return event


def push_event(engine: Engine | None) -> dict[str, Any]:
    """Return the fields about the last push of weights; of several servers the worst numbers."""
    if not isinstance(engine, ServerEngine) or engine.sync is None or not engine.sync.proofs:
        return {}
    proofs = engine.sync.proofs
    event: dict[str, Any] = {
        "push_seconds": max(proof.seconds for proof in proofs),
        "push_bytes": proofs[0].num_bytes,
        "push_equal": min(proof.num_equal for proof in proofs),
        "push_unread": max(len(proof.unread) for proof in proofs),
        "push_error": max(proof.largest_error for proof in proofs),
        "push_change": max(proof.largest_change for proof in proofs),
        "server_restarts": engine.sync.restarts,
        "servers": len(engine.pool.in_use),
    }
    if left_out := engine.pool.take_left_out():
        event["servers_left_out"] = left_out
    return event


def best_and_worst(rollout: Rollout) -> list[Trajectory]:
    """Return the best and the worst trajectory of the group whose rewards differ most; none if none has a reward."""
    by_reward = [sorted(g.trajectories, key=lambda t: -t.reward) for g in rollout.rewarded]
    if not by_reward:
        return []
    chosen = max(by_reward, key=lambda group: group[0].reward - group[-1].reward)
    return [chosen[0], chosen[-1]] if len(chosen) > 1 else chosen


def logged(trajectory: Trajectory, samples: Sequence[TrainSample]) -> dict[str, Any]:
    """Return a trajectory as a field of the event, token by token, with its advantages in ``samples``."""
    streams = {s.id: s.streams for train_sample in samples for s in train_sample.tree.samples}
    advantage_N = streams.get(trajectory.name, {}).get("advantage_N")
    return {
        "id": trajectory.name,
        "text": trajectory.text,
        "messages": named(trajectory.messages) if trajectory.num_turns > 1 else [],
        "references": list(trajectory.row.references),
        "finish_reason": trajectory.finish_reason,
        "reward": trajectory.reward,
        "rewards": {name: score.value for name, score in trajectory.reward_result.parts.items()},
        "version": int(trajectory.version_N[0]) if trajectory.version_N.size else None,
        "ids": trajectory.ids_T[trajectory.sampled_at_N].tolist(),
        "logp": np.round(trajectory.logp_N, 4).tolist(),
        "advantage": None if advantage_N is None else np.round(advantage_N, 4).tolist(),
    }


# -- monitors


class RolloutMonitorState(TypedDict):
    """The state of RolloutMonitor; older checkpoints lack some keys."""

    last: NotRequired[dict[str, list[float]]]
    first_entropy: NotRequired[list[float]]
    extremes: NotRequired[list[float]]
    first: list[float]
    recent: list[float]
    silent: int
    unrewarded: NotRequired[int]
    has_signal: NotRequired[bool]
    told: list[str]


@dataclass
class RolloutMonitor:
    """The monitor of one run, with its state."""

    config: RolloutMonitorConfig
    section: str = "grpo"
    """The method's own section of the configuration, for the keys that warnings name."""
    ends_remedy: str = "lower optim.learning_rate"
    """The remedy where the policy ends fewer of its answers, in keys that the method has."""
    first: list[float] = field(default_factory=list)
    """Shares of completions that end, of the first rollouts."""
    recent: list[float] = field(default_factory=list)
    """Shares of completions that end, of the last rollouts."""
    silent: int = 0
    """Number of rollouts in a row without a signal."""
    unrewarded: int = 0
    """Number of rollouts in a row without a single reward."""
    has_signal: bool = False
    """Whether any rollout had a signal."""
    warned: set[str] = field(default_factory=set)
    """Names of the warnings that hold, which are not repeated."""
    last: dict[str, list[float]] = field(default_factory=dict)
    """Last numbers of each monitor of updates, of the returns and of the mean reward; at most ``RECENT`` of each."""
    extremes: list[float] = field(default_factory=list)
    """The worst and the best reward of any answer; empty before the first."""
    first_entropy: list[float] = field(default_factory=list)
    """Entropy of the first updates."""

    def require_rewards(self, groups: Sequence[Group], step: int) -> None:
        """Raise CheckFailed where too many completions have no reward because of an error, or where none has had one
        for ``max_unrewarded`` rollouts.
        """
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        errors = [trajectory.failure for trajectory in trajectories if trajectory.failure]
        shown = "; ".join(errors[:SHOWN])
        has_rewards = any(trajectory.has_reward for trajectory in trajectories)
        problem = ""
        if len(errors) > self.config.max_errors * len(trajectories):
            problem = (
                f"{len(errors)} of {len(trajectories)} completions have no reward because of an error; expected at "
                f"most {self.config.max_errors:.0%} (rollout_monitor.max_errors); nothing was updated; {shown}"
            )
        elif self.unrewarded + 1 >= self.config.max_unrewarded and not has_rewards:
            problem = (
                f"in {self.unrewarded + 1} rollouts in a row no completion has a reward: "
                f"{shown or 'no reward applies to them'}; expected rewards that apply to these rows; nothing was "
                "updated; `taut check` asks right answers (rollout_monitor.max_unrewarded)"
            )
        if problem:
            raise CheckFailed(f"step {step}: {problem}")

    def look(self, step: int, fields: Mapping[str, Any], emit: Callable[..., None]) -> None:
        """Warn about a rollout, whose event has these fields. Raises CheckFailed where nothing has been learned for
        long; then the state stays as it was.
        """
        warn = partial(self._warn, step=step, emit=emit)
        # completions without a reward
        total = fields["completions"]
        rewarded = fields.get("rewarded", total - fields["errors"])
        why = fields.get("first_error") or "no reward applies to them"
        if not rewarded:
            self.unrewarded += 1
            detail = (
                f"none of {total} completions has a reward: {why}; nothing of this rollout is learned; at "
                f"{self.config.max_unrewarded} such rollouts in a row the run stops (rollout_monitor.max_unrewarded)"
            )
            emit("warning", name="unrewarded", step=step, detail=detail)
            return
        self.unrewarded = 0
        lost = fields.get("prefix_recomputed", 0)
        detail = (
            f"{lost:,} tokens of earlier turns had no room among the kept keys and values and were computed again; "
            f"{fields.get('prefix_gib', 0):.3g} GiB hold all; raise rollout.local.prefix_cache_gib"
        )
        warn("prefix_cache", detail, is_bad=lost > 0, is_over=False)
        detail = (
            f"{total - rewarded} of {total} completions have no reward ({why}) and are not learned from; the mean "
            f"reward is over the other {rewarded}; return a number for every completion "
            "(rollout_monitor.warn_unrewarded)"
        )
        warn("unrewarded", detail, is_bad=total - rewarded > self.config.warn_unrewarded * total)

        # rollouts without a signal
        silent = 0 if fields.get("groups_with_signal", 1) else self.silent + 1
        self.has_signal = self.has_signal or not silent
        most = self.config.max_without_signal
        if most and silent >= most:
            raise CheckFailed(
                f"step {step}: in the last {silent} rollouts no group has rewards that differ (their mean is "
                f"{fields['reward']:g}); expected right and wrong answers to one prompt; take easier or harder prompts "
                "(rollout_monitor.max_without_signal)"
            )
        self.silent = silent
        if silent == WARN_SILENT:
            detail = (
                f"in the last {silent} rollouts the rewards of every group were equal (the last mean is "
                f"{fields['reward']:g}), so rewards teach nothing; take easier or harder prompts, a larger rollout.n, "
                "or rewards that tell answers apart"
            )
            if most:
                detail += f"; at {most} in a row the run stops (rollout_monitor.max_without_signal)"
            emit("warning", name="equal_rewards", step=step, detail=detail)
        if fields["errors"]:
            detail = f"{fields['errors']} completions have no reward because of an error; {fields['first_error']}"
            emit("warning", name="rewards", step=step, detail=detail)

        # completions that end by themselves, and those that are cut
        if len(self.first) < BEGINNING:
            self.first.append(float(fields["stopped"]))
        else:
            self.recent = [*self.recent, float(fields["stopped"])][-RECENT:]
            before, now = sum(self.first) / len(self.first), sum(self.recent) / len(self.recent)
            detail = (
                f"{now:.0%} of the last completions ended by themselves, {before:.0%} of the first: the policy learns "
                f"to run on; raise rollout.max_new_tokens if they need it, else {self.ends_remedy}"
            )
            has_fallen = now < before - self.config.warn_stop_drop
            warn("stops", detail, is_bad=len(self.recent) == RECENT and has_fallen)
        if "reward" in fields:
            self._recent("reward", fields["reward"])
            every = [*self.extremes, fields["reward_min"], fields["reward_max"]]
            self.extremes = [min(every), max(every)]
        share, limit = fields.get("dropped", 0.0), self.config.warn_dropped
        detail = (
            f"{share:.0%} of the answers are cut and left out of training by shaping.overlong=drop; expected at most "
            f"{limit:.0%} (rollout_monitor.warn_dropped); raise rollout.max_new_tokens, or set shaping.overlong=keep"
        )
        warn("dropped", detail, is_bad=share > limit, is_over=share <= limit / 2)
        if "value_low" in fields:
            self._look_at_values(fields, warn)

    def _look_at_values(self, fields: Mapping[str, Any], warn: Callable[..., None]) -> None:
        """Compare the critic's values with returns; before ``RECENT`` rollouts it has learned nothing."""
        lows = self._recent("return_min", fields["return_min"])
        highs = self._recent("return_max", fields["return_max"])
        if len(lows) < RECENT:
            return
        least, most = min(0.0, *lows), max(0.0, *highs)
        margin = self.config.warn_values * (most - least)
        low, high = fields["value_low"], fields["value_high"]
        detail = (
            f"the critic's values go from {low:.3g} to {high:.3g}, and the returns of the last {len(lows)} rollouts "
            f"from {min(lows):.3g} to {max(highs):.3g}; expected values near the returns "
            "(rollout_monitor.warn_values); lower critic.learning_rate, or raise critic.warmup_steps"
        )
        outside = max(least - low, high - most)
        is_bad = margin > 0 and outside > margin
        warn("values", detail, is_bad=is_bad, is_over=outside <= margin / 2)

    def _look_at_update(self, report: StepReport, emit: Callable[..., None]) -> None:
        """Warn of a policy that leaves the one that answered, of clipped tokens, and of entropy that is lost."""
        config, metrics = self.config, report.metrics
        warn = partial(self._warn, step=report.step, emit=emit)
        less = "lower optim.learning_rate, or train less on each rollout (rollout.minibatches, rollout.epochs)"
        # distance from the policy that answered, and clipped tokens
        if DRIFT in metrics:
            drift, limit = fmean(self._recent("drift", metrics[DRIFT])), config.warn_kl
            detail = (
                f"the policy is {drift:.2g} nats a token away from the one that answered (KL, mean of the last "
                f"updates); expected at most {limit:g} (rollout_monitor.warn_kl); {less}"
            )
            warn("drift", detail, is_bad=drift > limit, is_over=drift <= limit / 2)
        if LOW in metrics:
            clipped = fmean(self._recent("clipped", metrics[LOW] + metrics[HIGH]))
            limit = config.warn_clipped
            detail = (
                f"{clipped:.0%} of the tokens have a ratio outside the clip range (mean of the last updates); "
                f"expected at most {limit:.0%} (rollout_monitor.warn_clipped); {less}"
            )
            warn("clipped", detail, is_bad=clipped > limit, is_over=clipped <= limit / 2)
        if ESTIMATE not in metrics:
            return
        # entropy against that of the first updates
        entropy = metrics.get(EXACT, metrics[ESTIMATE])
        if len(self.first_entropy) < BEGINNING:
            self.first_entropy.append(entropy)
            return
        before, now = fmean(self.first_entropy), fmean(self._recent("entropy", entropy))
        if not self.extremes:
            return
        reward, (worst, best) = fmean(self.last["reward"]), self.extremes
        detail = (
            f"the entropy has fallen from {before:.2g} to {now:.2g} nats a token, and the mean reward is {reward:.3g} "
            f"where answers had up to {best:.3g}; expected at least {config.warn_entropy:.0%} of the entropy "
            "(rollout_monitor.warn_entropy): the answers to a prompt become alike before they are good, and "
            "nothing is learned from equal answers; lower optim.learning_rate, or raise rollout.temperature"
        )
        limit, is_good = config.warn_entropy * before, reward >= worst + GOOD * (best - worst)
        warn("entropy", detail, is_bad=now < limit and not is_good, is_over=now >= 2 * limit)

    def _recent(self, name: str, value: float) -> list[float]:
        """The last ``RECENT`` numbers of a name, this one included."""
        self.last[name] = [*self.last.get(name, []), value][-RECENT:]
        return self.last[name]

    def _warn(
        self,
        name: str,
        detail: str,
        step: int,
        emit: Callable[..., None],
        *,
        is_bad: bool,
        is_over: bool | None = None,
    ) -> None:
        """Emit a warning if a number is bad, and not again before it ``is_over``: by default, is not bad."""
        if not is_bad if is_over is None else is_over:
            self.warned.discard(name)
        elif is_bad and name not in self.warned:
            self.warned.add(name)
            emit("warning", name=name, step=step, detail=detail)

    def __call__(self, report: StepReport, trainer: Trainer) -> None:
        """A monitor of the loop: the engine's logprobs against the trainer's, and how an update changes the policy."""
        self._look_at_engine(report, trainer)
        self._look_at_update(report, trainer.emit)

    def _look_at_engine(self, report: StepReport, trainer: Trainer) -> None:
        difference = report.metrics.get(DIFFERENCE)
        if difference is None:
            return
        if not difference <= self.config.max_logprob_difference:
            raise CheckFailed(
                f"step {report.step}: engine and trainer differ by {difference:.3g} nats a token in logprobs; "
                f"expected at most {self.config.max_logprob_difference:g} (rollout_monitor.max_logprob_difference); "
                "nothing was updated; give the engine this model in this precision, or lower rollout.lag"
            )
        effective, weight = (report.metrics.get(name, 1.0) for name in (EFFECTIVE, WEIGHT))
        for name, is_bad, detail in (
            (
                "engine",
                difference > self.config.warn_logprob_difference,
                f"logprobs differ by {difference:.3g} nats a token",
            ),
            (
                "effective",
                min(effective, weight) < self.config.warn_effective_size,
                f"the weights of tokens have a mean of {weight:.2f} and an effective sample size of {effective:.0%} "
                f"of the tokens; expected at least {self.config.warn_effective_size:g} of both "
                "(rollout_monitor.warn_effective_size); products over an answer fade with its length: "
                f"{self.section}.rollout_correction_level=geometric or token does not",
            ),
        ):
            if is_bad and name not in self.warned:
                self.warned.add(name)
                detail = f"engine and trainer: {detail}"
                trainer.emit("warning", name=f"rollout_{name}", step=report.step, detail=detail)

    remembered: ClassVar[Any] = RolloutMonitorState

    def remember(self) -> dict[str, Any]:
        names = RolloutMonitorState.__annotations__.keys() - {"told"}
        kept = {name: copy.deepcopy(value) for name, value in vars(self).items() if name in names}
        return {**kept, "told": sorted(self.warned)}

    def recall(self, remembered: Mapping[str, Any]) -> None:
        kept = copy.deepcopy(dict(remembered))
        fresh = RolloutMonitor(self.config, self.section, self.ends_remedy, has_signal=True)
        fresh.warned = set(kept.pop("told"))
        vars(self).update(vars(fresh) | kept)  # older checkpoints lack some
