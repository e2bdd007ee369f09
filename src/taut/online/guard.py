"""What is watched of roll-outs, and when a run is stopped for it.

    rewards      completions without a reward (an error of the reward, the environment or the engine, or a reward that
                 does not apply), by share; roll-outs in which no completion has one
    log-probs    the engine's against the trainer's own, of the same tokens: mean |difference|, effective sample size
    ends         the share of completions that end by themselves, against that of the first roll-outs
    signal       roll-outs in which no group's rewards differ, with a critic none at all: nothing is learned

What it remembers goes into checkpoints. Numbers are in events.jsonl whatever they are; this is about limits.

May import alarms, loop, config and errors. online.method and build use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from taut.config import configclass
from taut.errors import CheckFailed
from taut.loop import Job, StepReport
from taut.losses.correction import largest_difference
from taut.online.rollouts import Group

BEGINNING = 3
"""Roll-outs whose share of ends is what later ones are held against."""
RECENT = 5
"""Roll-outs that are averaged for that."""
WARN_SILENT = 3
"""Roll-outs in a row without a signal after which that is warned of."""
SHOWN = 3
"""Errors that a message names."""
DIFFERENCE, EFFECTIVE, WEIGHT = "engine/difference", "engine/effective", "engine/weight"
"""Metrics of the loss: mean |difference| of log-probs; effective sample size of the correction's weights by number of
tokens; their mean."""


@configclass
class GuardConfig:
    """When a run that generates warns, and when it stops."""

    max_errors: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of a roll-out's completions that may be without a reward because of an error; with more the run stops."""
    warn_unrewarded: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Share of a roll-out's completions without a reward, for whatever reason, above which a warning is logged."""
    max_unrewarded: Annotated[int, Field(ge=1)] = 3
    """Roll-outs in a row without a single reward at which the run stops. The updates of those before it are skipped."""
    warn_difference: Annotated[float, Field(gt=0)] = 0.1
    """Mean difference (nats a token) between the engine's log-probs and the trainer's that is told,"""
    max_difference: Annotated[float, Field(gt=0)] = 0.5
    """and the one that stops the run before the update: the engine runs another model."""
    warn_effective: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Warn before the update when the weights of tokens by trainer over engine have a lower mean, or a lower effective
    sample size as a share of the tokens. An honest engine has 1 of both."""
    warn_stops: Annotated[float, Field(ge=0, le=1)] = 0.1
    """How far the share of completions that end by themselves may fall below that of the first roll-outs untold."""
    max_silent: Annotated[int, Field(ge=0)] = 20
    """Roll-outs in a row without any signal after which the run stops; 0: never."""


@dataclass
class Guard:
    """The watch over one run."""

    config: GuardConfig
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

    def require_rewards(self, groups: Sequence[Group], step: int) -> None:
        """Raise CheckFailed where too many completions have no reward because of an error, or where none has had one
        for ``max_unrewarded`` roll-outs.
        """
        pairs = [
            pair for group in groups for pair in zip(group.episodes, group.verdicts, strict=True)
        ]
        errors = [
            f"{one.row.place}#{one.index}: {reason}"
            for one, said in pairs
            if (reason := one.error or said.error) is not None
        ]
        shown = "; ".join(errors[:SHOWN])
        if len(errors) > self.config.max_errors * len(pairs):
            raise CheckFailed(
                f"step {step}: {len(errors)} of {len(pairs)} completions have no reward because of an error; expected "
                f"at most {self.config.max_errors:.0%} (guard.max_errors); nothing was updated; {shown}"
            )
        if self.unrewarded + 1 >= self.config.max_unrewarded and not any(g.judged for g in groups):
            raise CheckFailed(
                f"step {step}: in {self.unrewarded + 1} roll-outs in a row no completion has a reward: "
                f"{shown or 'no reward applies to them'}; expected rewards that apply to these rows; nothing was "
                "updated; `taut check` asks right answers (guard.max_unrewarded)"
            )

    def look(self, step: int, fields: Mapping[str, Any], emit: Callable[..., None]) -> None:
        """Tell of a roll-out's numbers what is to be told. Raises CheckFailed where nothing has been learned for long;
        then nothing is remembered of it.
        """
        if not self._look_at_rewards(step, fields, emit):
            return
        silent = 0 if fields.get("groups_with_signal", 1) else self.silent + 1
        if self.config.max_silent and silent >= self.config.max_silent:
            raise CheckFailed(
                f"step {step}: in the last {silent} roll-outs no group has rewards that differ, so nothing is "
                f"learned (rewards are {fields['reward']:g} on average); expected some right and some wrong answers "
                "to one prompt; take easier or harder prompts, or a model that gets some right (guard.max_silent)"
            )
        self.silent = silent
        if silent == WARN_SILENT:
            detail = (
                f"in the last {silent} roll-outs the rewards of every group were equal (the last mean is "
                f"{fields['reward']:g}), so rewards teach nothing; take easier or harder prompts, a larger rollout.n, "
                "or rewards that tell answers apart"
            )
            if self.config.max_silent:
                detail += f"; at {self.config.max_silent} in a row the run stops (guard.max_silent)"
            emit("warning", name="equal_rewards", step=step, detail=detail)
        if fields["errors"]:
            detail = f"{fields['errors']} completions have no reward because of an error; {fields['first_error']}"
            emit("warning", name="rewards", step=step, detail=detail)
        self._look_at_ends(step, float(fields["stopped"]), emit)

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
                f"none of {total} completions has a reward: {why}; the updates of this roll-out are skipped; at "
                f"{self.config.max_unrewarded} such roll-outs in a row the run stops (guard.max_unrewarded)"
            )
            emit("warning", name="unrewarded", step=step, detail=detail)
            return False
        self.unrewarded = 0
        if total - rewarded <= self.config.warn_unrewarded * total:
            self.told.discard("unrewarded")
        elif "unrewarded" not in self.told:
            self.told.add("unrewarded")
            detail = (
                f"{total - rewarded} of {total} completions have no reward ({why}) and are not learned from; the mean "
                f"reward is over the other {rewarded}; return a number for every completion (guard.warn_unrewarded)"
            )
            emit("warning", name="unrewarded", step=step, detail=detail)
        return True

    def _look_at_ends(self, step: int, share: float, emit: Callable[..., None]) -> None:
        if len(self.first) < BEGINNING:
            self.first.append(share)
            return
        self.recent = [*self.recent, share][-RECENT:]
        before, now = sum(self.first) / len(self.first), sum(self.recent) / len(self.recent)
        if len(self.recent) < RECENT or now >= before - self.config.warn_stops:
            self.told.discard("stops")
            return
        if "stops" not in self.told:
            self.told.add("stops")
            detail = (
                f"{now:.0%} of the last completions ended by themselves, {before:.0%} of the first: the policy learns "
                f"to run on; raise rollout.max_new_tokens if they need it, else {self.ends_remedy}"
            )
            emit("warning", name="stops", step=step, detail=detail)

    def __call__(self, report: StepReport, job: Job) -> None:
        """An alarm of the loop: the engine's log-probs against the trainer's."""
        found = report.metrics.get(DIFFERENCE)
        if found is None:
            return
        own = [largest_difference(scores, packed) for packed, scores in report.scored]
        most = max(own, default=0.0)
        report.metrics["engine/largest"] = job.ranks.max([most])[0]
        if not found <= self.config.max_difference:
            raise CheckFailed(
                f"step {report.step}: the engine's log-probs differ from the trainer's by {found:.3g} nats a token on "
                f"average; expected at most {self.config.max_difference:g} (guard.max_difference); nothing was "
                "updated; the engine runs another model, other weights or another precision, or with rollout.ahead the "
                "policy moves too fast"
            )
        effective, weight = (report.metrics.get(name, 1.0) for name in (EFFECTIVE, WEIGHT))
        for name, is_bad, detail in (
            (
                "engine",
                found > self.config.warn_difference,
                f"log-probs differ by {found:.3g} nats a token",
            ),
            (
                "effective",
                min(effective, weight) < self.config.warn_effective,
                f"the weights of tokens have a mean of {weight:.2f} and an effective sample size of {effective:.0%} "
                f"of the tokens; expected at least {self.config.warn_effective:g} of both (guard.warn_effective); "
                f"products over an answer fade with its length: {self.section}.correction_level=geometric or token "
                "does not",
            ),
        ):
            if is_bad and name not in self.told:
                self.told.add(name)
                detail = f"engine and trainer: {detail}"
                job.emit("warning", name=f"rollout_{name}", step=report.step, detail=detail)

    def remember(self) -> dict[str, Any]:
        return {
            "first": list(self.first),
            "recent": list(self.recent),
            "silent": self.silent,
            "unrewarded": self.unrewarded,
            "told": sorted(self.told),
        }

    def recall(self, remembered: Mapping[str, Any]) -> None:
        self.first, self.recent = list(remembered["first"]), list(remembered["recent"])
        self.silent, self.told = int(remembered["silent"]), set(remembered["told"])
        self.unrewarded = int(remembered.get("unrewarded", 0))  # older checkpoints have none
