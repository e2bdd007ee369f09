"""Monitors of rollouts: what is measured, when a run warns and when it stops.

    rewards      completions without a reward (an error of the reward, the environment or the engine, or a reward that
                 does not apply), by share; roll-outs in which no completion has one
    log-probs    the engine's against the trainer's own, of the same tokens: mean |difference|, effective sample size
    ends         the share of completions that end by themselves, against that of the first roll-outs
    signal       roll-outs in which no group's rewards differ, with a critic none at all: nothing is learned
    dropped      the share of answers that are cut and left out of training (shaping.overlong=drop)
    values       the critic's values against the range of the returns of recent roll-outs
    updates      where several updates train on a roll-out, KL(old || policy) and the share of clipped tokens; entropy
                 against that of the first updates, as long as answers are not good: a policy that has learned its
                 task has lost its entropy too. Means of the last ``RECENT`` updates are compared with the limits

Each of the last three only warns: once, and again after the number has been down to half of its limit (entropy: up to
twice).

What it remembers goes into checkpoints. Numbers are in events.jsonl whatever they are; this is about limits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Annotated, Any, ClassVar, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from taut.config import configclass
from taut.errors import CheckFailed
from taut.losses.policy import largest_difference
from taut.rl.rollout import Group
from taut.train.trainer import StepReport, Trainer

BEGINNING = 3
"""Roll-outs, or updates, that later ones are compared with."""
RECENT = 5
"""Roll-outs, or updates, that are averaged for that."""
WARN_SILENT = 3
"""Roll-outs in a row without a signal after which that is warned of."""
GOOD = 0.7
"""Answers are good where their mean reward is this far from the worst to the best that any answer has had."""
SHOWN = 3
"""Errors that a message names."""
DRIFT, LOW, HIGH = "old/kl_k1", "clip/low", "clip/high"
"""Metrics of the loss: KL(old || policy), by k1, because in k3 a single token that has become likely outweighs
thousands; shares of tokens clipped from below and from above."""
EXACT, ESTIMATE = "entropy", "entropy_estimate"
"""Metrics of the loss: the policy's entropy, where it is computed, and its estimate."""
DIFFERENCE, EFFECTIVE, WEIGHT = "engine/difference", "engine/effective", "engine/weight"
"""Metrics of the loss: mean |difference| of log-probs; effective sample size of the correction's weights by number of
tokens; their mean."""


@configclass
class RolloutMonitorConfig:
    """When a run that generates warns, and when it stops."""

    max_errors: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of a roll-out's completions that may be without a reward because of an error; with more the run stops."""
    warn_unrewarded: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Share of a roll-out's completions without a reward, for whatever reason, above which a warning is logged."""
    max_unrewarded: Annotated[int, Field(ge=1)] = 3
    """Roll-outs in a row without a single reward at which the run stops. The updates of those before it are skipped."""
    warn_logprob_difference: Annotated[float, Field(gt=0)] = 0.1
    """Mean difference (nats a token) between the engine's log-probs and the trainer's that is told,"""
    max_logprob_difference: Annotated[float, Field(gt=0)] = 0.5
    """and the one that stops the run before the update: the engine runs another model."""
    warn_effective_size: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Warn before the update when the weights of tokens by trainer over engine have a lower mean, or a lower effective
    sample size as a share of the tokens. An honest engine has 1 of both."""
    warn_stop_drop: Annotated[float, Field(ge=0, le=1)] = 0.1
    """How far the share of completions that end by themselves may fall below that of the first roll-outs untold."""
    max_without_signal: Annotated[int, Field(ge=0)] = 20
    """Roll-outs in a row without any signal after which the run stops; 0: never."""
    warn_kl: Annotated[float, Field(gt=0)] = 0.5
    """Warn when KL(old || policy), old being the policy that a roll-out began with, is larger: nats a token, mean of
    the last 5 updates."""
    warn_clipped: Annotated[float, Field(ge=0, le=1)] = 0.4
    """Warn when a larger share of the tokens has a ratio outside the clip range, mean of the last 5 updates."""
    warn_entropy: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Warn when the entropy of the last 5 updates is below this share of that of the first 3, and the mean reward is
    not yet near the best that answers get. 0 disables the warning."""
    warn_dropped: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Warn when shaping.overlong=drop leaves a larger share of a roll-out's answers out of training."""
    warn_values: Annotated[float, Field(gt=0)] = 0.5
    """Warn when the critic's values (their 5% and 95% quantiles) leave the range of the returns of the last 5 roll-outs
    by more than this times its width. 0, where a new critic begins, is part of the range."""


class RolloutMonitorState(TypedDict):
    """What RolloutMonitor remembers; older checkpoints lack some."""

    last: NotRequired[dict[str, list[float]]]
    first_entropy: NotRequired[list[float]]
    extremes: NotRequired[list[float]]
    first: list[float]
    recent: list[float]
    silent: int
    unrewarded: NotRequired[int]
    told: list[str]


@dataclass
class RolloutMonitor:
    """The watch over one run."""

    config: RolloutMonitorConfig
    section: str = "grpo"
    """The method's own section of the configuration, for the keys that warnings name."""
    ends_remedy: str = "lower optim.learning_rate"
    """What to do where the policy ends fewer of its answers, in keys that the method has."""
    first: list[float] = field(default_factory=list)
    """Shares of ends of the first roll-outs,"""
    recent: list[float] = field(default_factory=list)
    """and of the last."""
    silent: int = 0
    """Roll-outs in a row without a signal."""
    unrewarded: int = 0
    """Roll-outs in a row without a single reward."""
    told: set[str] = field(default_factory=set)
    """What is told once."""
    last: dict[str, list[float]] = field(default_factory=dict)
    """Last numbers of each monitor of updates, of the returns and of the mean reward; at most ``RECENT`` of each."""
    extremes: list[float] = field(default_factory=list)
    """The worst and the best reward of any answer; empty before the first."""
    first_entropy: list[float] = field(default_factory=list)
    """Entropy of the first updates."""

    def require_rewards(self, groups: Sequence[Group], step: int) -> None:
        """Raise CheckFailed where too many completions have no reward because of an error, or where none has had one
        for ``max_unrewarded`` roll-outs.
        """
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        errors = [trajectory.failure for trajectory in trajectories if trajectory.failure]
        shown = "; ".join(errors[:SHOWN])
        if len(errors) > self.config.max_errors * len(trajectories):
            raise CheckFailed(
                f"step {step}: {len(errors)} of {len(trajectories)} completions have no reward because of an error; "
                f"expected at most {self.config.max_errors:.0%} (rollout_monitor.max_errors); nothing was updated; "
                f"{shown}"
            )
        has_rewards = any(trajectory.has_reward for trajectory in trajectories)
        if self.unrewarded + 1 >= self.config.max_unrewarded and not has_rewards:
            raise CheckFailed(
                f"step {step}: in {self.unrewarded + 1} roll-outs in a row no completion has a reward: "
                f"{shown or 'no reward applies to them'}; expected rewards that apply to these rows; nothing was "
                "updated; `taut check` asks right answers (rollout_monitor.max_unrewarded)"
            )

    def look(self, step: int, fields: Mapping[str, Any], emit: Callable[..., None]) -> None:
        """Tell of a roll-out's numbers what is to be told. Raises CheckFailed where nothing has been learned for long;
        then nothing is remembered of it.
        """
        if not self._look_at_rewards(step, fields, emit):
            return
        silent = 0 if fields.get("groups_with_signal", 1) else self.silent + 1
        if self.config.max_without_signal and silent >= self.config.max_without_signal:
            raise CheckFailed(
                f"step {step}: in the last {silent} roll-outs no group has rewards that differ, so nothing is "
                f"learned (rewards are {fields['reward']:g} on average); expected some right and some wrong answers "
                "to one prompt; take easier or harder prompts, or a model that gets some right "
                "(rollout_monitor.max_without_signal)"
            )
        self.silent = silent
        if silent == WARN_SILENT:
            detail = (
                f"in the last {silent} roll-outs the rewards of every group were equal (the last mean is "
                f"{fields['reward']:g}), so rewards teach nothing; take easier or harder prompts, a larger rollout.n, "
                "or rewards that tell answers apart"
            )
            if self.config.max_without_signal:
                limit = self.config.max_without_signal
                detail += (
                    f"; at {limit} in a row the run stops (rollout_monitor.max_without_signal)"
                )
            emit("warning", name="equal_rewards", step=step, detail=detail)
        if fields["errors"]:
            detail = f"{fields['errors']} completions have no reward because of an error; {fields['first_error']}"
            emit("warning", name="rewards", step=step, detail=detail)
        self._look_at_ends(step, float(fields["stopped"]), emit)
        if "reward" in fields:
            self._recent("reward", fields["reward"])
            every = [*self.extremes, fields["reward_min"], fields["reward_max"]]
            self.extremes = [min(every), max(every)]
        self._look_at_dropped(step, fields, emit)
        self._look_at_values(step, fields, emit)

    def _look_at_rewards(
        self, step: int, fields: Mapping[str, Any], emit: Callable[..., None]
    ) -> bool:
        """Warn where completions have no reward. Returns whether any has one."""
        total = fields["completions"]
        rewarded = fields.get("rewarded", total - fields["errors"])
        why = fields.get("first_error") or "no reward applies to them"
        if not rewarded:
            self.unrewarded += 1
            detail = (
                f"none of {total} completions has a reward: {why}; nothing of this roll-out is learned; at "
                f"{self.config.max_unrewarded} such roll-outs in a row the run stops (rollout_monitor.max_unrewarded)"
            )
            emit("warning", name="unrewarded", step=step, detail=detail)
            return False
        self.unrewarded = 0
        detail = (
            f"{total - rewarded} of {total} completions have no reward ({why}) and are not learned from; the mean "
            f"reward is over the other {rewarded}; return a number for every completion "
            "(rollout_monitor.warn_unrewarded)"
        )
        is_bad = total - rewarded > self.config.warn_unrewarded * total
        self._warn("unrewarded", detail, step, emit, is_bad=is_bad, is_over=not is_bad)
        return True

    def _look_at_ends(self, step: int, share: float, emit: Callable[..., None]) -> None:
        if len(self.first) < BEGINNING:
            self.first.append(share)
            return
        self.recent = [*self.recent, share][-RECENT:]
        before, now = sum(self.first) / len(self.first), sum(self.recent) / len(self.recent)
        detail = (
            f"{now:.0%} of the last completions ended by themselves, {before:.0%} of the first: the policy learns "
            f"to run on; raise rollout.max_new_tokens if they need it, else {self.ends_remedy}"
        )
        is_bad = len(self.recent) == RECENT and now < before - self.config.warn_stop_drop
        self._warn("stops", detail, step, emit, is_bad=is_bad, is_over=not is_bad)

    def _look_at_dropped(
        self, step: int, fields: Mapping[str, Any], emit: Callable[..., None]
    ) -> None:
        share, limit = fields.get("dropped", 0.0), self.config.warn_dropped
        detail = (
            f"{share:.0%} of the answers are cut and left out of training by shaping.overlong=drop; expected at most "
            f"{limit:.0%} (rollout_monitor.warn_dropped); raise rollout.max_new_tokens, or set shaping.overlong=keep"
        )
        self._warn("dropped", detail, step, emit, is_bad=share > limit, is_over=share <= limit / 2)

    def _look_at_values(
        self, step: int, fields: Mapping[str, Any], emit: Callable[..., None]
    ) -> None:
        """Compare the critic's values with returns; before ``RECENT`` roll-outs it has learned nothing."""
        if "value_low" not in fields:
            return
        lows = self._recent("return_min", fields["return_min"])
        highs = self._recent("return_max", fields["return_max"])
        if len(lows) < RECENT:
            return
        least, most = min(0.0, *lows), max(0.0, *highs)
        margin = self.config.warn_values * (most - least)
        low, high = fields["value_low"], fields["value_high"]
        detail = (
            f"the critic's values go from {low:.3g} to {high:.3g}, and the returns of the last {len(lows)} roll-outs "
            f"from {min(lows):.3g} to {max(highs):.3g}; expected values near the returns "
            "(rollout_monitor.warn_values); lower critic.learning_rate, or raise critic.warmup_steps"
        )
        outside = max(least - low, high - most)
        is_bad, is_over = margin > 0 and outside > margin, outside <= margin / 2
        self._warn("values", detail, step, emit, is_bad=is_bad, is_over=is_over)

    def _look_at_update(self, report: StepReport, emit: Callable[..., None]) -> None:
        """Warn of a policy that leaves the one that answered, of clipped tokens, and of entropy that is lost."""
        config, metrics = self.config, report.metrics
        less = "lower optim.learning_rate, or train less on each roll-out (rollout.minibatches, rollout.epochs)"
        if DRIFT in metrics:
            drift, limit = fmean(self._recent("drift", metrics[DRIFT])), config.warn_kl
            detail = (
                f"the policy is {drift:.2g} nats a token away from the one that answered (KL, mean of the last "
                f"updates); expected at most {limit:g} (rollout_monitor.warn_kl); {less}"
            )
            is_bad, is_over = drift > limit, drift <= limit / 2
            self._warn("drift", detail, report.step, emit, is_bad=is_bad, is_over=is_over)
        if LOW in metrics:
            clipped = fmean(self._recent("clipped", metrics[LOW] + metrics[HIGH]))
            limit = config.warn_clipped
            detail = (
                f"{clipped:.0%} of the tokens have a ratio outside the clip range (mean of the last updates); "
                f"expected at most {limit:.0%} (rollout_monitor.warn_clipped); {less}"
            )
            is_bad, is_over = clipped > limit, clipped <= limit / 2
            self._warn("clipped", detail, report.step, emit, is_bad=is_bad, is_over=is_over)
        if ESTIMATE not in metrics:
            return
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
        is_bad, is_over = now < limit and not is_good, now >= 2 * limit
        self._warn("entropy", detail, report.step, emit, is_bad=is_bad, is_over=is_over)

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
        is_over: bool,
    ) -> None:
        """Emit a warning if a number is bad, and not again before it is over."""
        if is_over:
            self.told.discard(name)
        elif is_bad and name not in self.told:
            self.told.add(name)
            emit("warning", name=name, step=step, detail=detail)

    def __call__(self, report: StepReport, trainer: Trainer) -> None:
        """A monitor of the loop: the engine's log-probs against the trainer's, and how an update changes the policy."""
        self._look_at_engine(report, trainer)
        self._look_at_update(report, trainer.emit)

    def _look_at_engine(self, report: StepReport, trainer: Trainer) -> None:
        found = report.metrics.get(DIFFERENCE)
        if found is None:
            return
        own = [largest_difference(scores, packed) for packed, scores in report.scored]
        most = max(own, default=0.0)
        report.metrics["engine/largest"] = trainer.ranks.max([most])[0]
        if not found <= self.config.max_logprob_difference:
            raise CheckFailed(
                f"step {report.step}: the engine's log-probs differ from the trainer's by {found:.3g} nats a token on "
                f"average; expected at most {self.config.max_logprob_difference:g} "
                "(rollout_monitor.max_logprob_difference); nothing was updated; the engine runs another model, other "
                "weights or another precision, or with rollout.asynchronous the policy moves too fast"
            )
        effective, weight = (report.metrics.get(name, 1.0) for name in (EFFECTIVE, WEIGHT))
        for name, is_bad, detail in (
            (
                "engine",
                found > self.config.warn_logprob_difference,
                f"log-probs differ by {found:.3g} nats a token",
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
            if is_bad and name not in self.told:
                self.told.add(name)
                detail = f"engine and trainer: {detail}"
                trainer.emit("warning", name=f"rollout_{name}", step=report.step, detail=detail)

    remembered: ClassVar[Any] = RolloutMonitorState

    def remember(self) -> dict[str, Any]:
        return {
            "last": {name: list(values) for name, values in self.last.items()},
            "first_entropy": list(self.first_entropy),
            "extremes": list(self.extremes),
            "first": list(self.first),
            "recent": list(self.recent),
            "silent": self.silent,
            "unrewarded": self.unrewarded,
            "told": sorted(self.told),
        }

    def recall(self, remembered: Mapping[str, Any]) -> None:
        last = remembered.get("last", {})  # older checkpoints have none
        self.last = {name: list(values) for name, values in last.items()}
        self.first_entropy = list(remembered.get("first_entropy", ()))
        self.extremes = list(remembered.get("extremes", ()))
        self.first, self.recent = list(remembered["first"]), list(remembered["recent"])
        self.silent, self.told = int(remembered["silent"]), set(remembered["told"])
        self.unrewarded = int(remembered.get("unrewarded", 0))  # older checkpoints have none
