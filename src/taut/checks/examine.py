"""Asks the checks of a session in the order of ``CHECKS``, and collects their findings.

A check is left out if ``checks.skip`` names it. It is skipped, with the reason, if one it comes ``after`` failed or was
skipped for that (its answer would be the same fault again), or if a part of the run that it needs cannot be made. With
several ranks all of them ask alike, and a check that fails on one fails for all.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from taut.checks import CHECKS, OF_NODES, Check, Part
from taut.checks.cluster import Cluster
from taut.checks.registry import Finding, Outcome, failed, skipped, split_error
from taut.checks.session import Session, Unavailable
from taut.errors import CheckFailed, ConfigError, OutOfMemory, TautError
from taut.io.notebook import html_table
from taut.methods.method import RunConfig
from taut.run.setup import Built
from taut.train import random_state
from taut.train.distributed import Ranks
from taut.train.log.events import to_json


class Answered(NamedTuple):
    """A check and its finding."""

    name: str
    question: str
    finding: Finding
    seconds: float
    cause: str | None = None
    """The check whose failure kept this one from being asked."""
    is_left_out: bool = False
    """Whether ``checks.skip`` names it."""

    def as_fields(self) -> dict[str, Any]:
        """For JSON: in its own types; a number that is not finite is a text, as in the run's log."""
        head = {"name": self.name, "question": self.question}
        tail = {"seconds": round(self.seconds, 3), "cause": self.cause}
        fields = {**head, **self.finding.as_fields(), **tail}
        return {key: to_json(value) for key, value in fields.items()}


@dataclass(frozen=True)
class Examination:
    """All that was asked."""

    part: Part
    answered: tuple[Answered, ...]

    @property
    def failures(self) -> list[Answered]:
        return [answered for answered in self.answered if answered.finding.outcome == "failed"]

    @property
    def warnings(self) -> list[Answered]:
        return [answered for answered in self.answered if answered.finding.outcome == "warning"]

    @property
    def seconds(self) -> float:
        return sum(answered.seconds for answered in self.answered)

    def after(self, earlier: Examination) -> Examination:
        """Both, as one."""
        return replace(self, answered=earlier.answered + self.answered)

    def count(self, outcome: Outcome) -> int:
        return sum(answered.finding.outcome == outcome for answered in self.answered)

    def _repr_html_(self) -> str:
        """What failed, then warnings; the rest is counted."""
        counts = ", ".join(
            f"{self.count(o)} {o}" for o in ("failed", "warning", "passed", "skipped")
        )
        rows = [
            (one.finding.outcome, one.name, one.finding.says, one.finding.remedy)
            for one in (*self.failures, *self.warnings)
        ]
        columns = ("outcome", "check", "finding", "remedy") if rows else ()
        return html_table(f"checks: {counts} in {self.seconds:.1f} s", columns, rows)


def examine(
    session: Session | Cluster,
    part: Part = "quick",
    only: Collection[str] | None = None,
    follow: Callable[[Answered], None] = lambda _: None,
) -> Examination:
    """Ask every check of ``part`` (full: all of them), or those named by ``only``; of a Cluster those of nodes.
    ``follow`` is called with each answer.

    Raises ConfigError if ``checks.skip`` names no check.
    """
    left_out = session.run.checks.skip
    require_known(left_out)
    causes: dict[str, str] = {}
    answered = []
    state = random_state.capture(session.ranks.device)
    for name, check in (OF_NODES if isinstance(session, Cluster) else CHECKS).items():
        if (part == "quick" and check.part == "full") or (only is not None and name not in only):
            continue
        began = time.perf_counter()
        cause = next((causes[before] for before in check.after if before in causes), None)
        missing: str | None = None
        if name in left_out:
            finding = skipped("left out by name (checks.skip)")
        elif cause is not None:
            finding, missing = skipped(f"{cause} failed"), cause
        else:
            finding, missing = _ask(name, check, session)
        by_rank: list[Finding] = session.ranks.gather(finding)
        # the first of the worst stands for all
        finding = min(by_rank, key=lambda other: {"failed": 0, "warning": 1}.get(other.outcome, 2))
        if finding.outcome == "failed" or cause:
            causes[name] = cause or name
        seconds = time.perf_counter() - began
        answered.append(Answered(name, check.question, finding, seconds, missing, name in left_out))
        random_state.restore(state, session.ranks.device)
        follow(answered[-1])
    return Examination(part, tuple(answered))


def require_known(names: Sequence[str]) -> None:
    """Raise ConfigError for a name in ``checks.skip`` that no check has."""
    for name in names:
        if name not in CHECKS and name not in OF_NODES:
            near = difflib.get_close_matches(name, [*CHECKS, *OF_NODES], 1)
            hint = f"did you mean {near[0]}?" if near else "docs/check.md lists them"
            raise ConfigError(
                f"checks.skip names the check {name!r}, and there is none; expected names such as rewards.gold; {hint}"
            )


def _ask(name: str, check: Check, session: Session | Cluster) -> tuple[Finding, str | None]:
    """The finding; and if a part of the run is missing for it, the check that says why."""
    try:
        return check.ask(session), None
    except TautError as error:
        if isinstance(error, OutOfMemory) and session.ranks.size > 1:
            raise  # on this rank alone: the others wait inside the model, and torchrun ends them
        says, remedy = split_error(error)
    except Unavailable as missing:
        if missing.owner != name and missing.owner not in session.run.checks.skip:
            return skipped(f"without {missing.part}: {missing.owner} fails"), missing.owner
        says, remedy = split_error(missing.error)
    return failed(says, remedy=remedy), None


def before_training(built: Built) -> Examination | None:
    """The quick part; None if it was turned off. Raises CheckFailed, before anything has been written."""
    return None if built.run.check == "off" else _sound(examine(Session.of(built)))


def before_launch(run: RunConfig, ranks: Ranks) -> Examination | None:
    """The checks of nodes; None if checks are turned off, or all ranks are on one. Raises CheckFailed, before anything
    has been read. Every rank calls it.
    """
    if run.check == "off" or ranks.size == 1:
        return None
    cluster = Cluster(run, ranks)
    return None if len(cluster.nodes) == 1 else _sound(examine(cluster))


def _sound(examination: Examination) -> Examination:
    """The examination. Raises CheckFailed where a check failed."""
    failures = []
    for answered in examination.failures:
        shown = "; ".join(answered.finding.evidence[:3])
        evidence = f" ({shown})" if shown else ""
        failures.append(
            f"{answered.name}: {answered.finding.says}{evidence}; {answered.finding.remedy}"
        )
    if failures:
        raise CheckFailed(" | ".join(failures))
    return examination
