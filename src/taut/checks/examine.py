"""Ask the checks of a session in the order of ``CHECKS``, and collect their findings.

A check is left out if ``checks.skip`` names it. It is skipped, with the reason, if a check in its ``after`` failed or
was skipped for that (its answer would be the same fault again), or if a part of the run that it needs cannot be made.
With several ranks every rank asks the same checks, and a check that fails on one rank fails on all.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
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


class CheckResult(NamedTuple):
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
        """Fields for JSON, in JSON's own types; a non-finite number is a text, as in the run log."""
        head = {"name": self.name, "question": self.question}
        tail = {"seconds": round(self.seconds, 3), "cause": self.cause}
        fields = {**head, **self.finding.as_fields(), **tail}
        return {key: to_json(value) for key, value in fields.items()}


@dataclass(frozen=True)
class Examination:
    """All results."""

    part: Part
    results: tuple[CheckResult, ...]

    @property
    def failures(self) -> list[CheckResult]:
        return [result for result in self.results if result.finding.outcome == "failed"]

    @property
    def warnings(self) -> list[CheckResult]:
        return [result for result in self.results if result.finding.outcome == "warning"]

    @property
    def seconds(self) -> float:
        return sum(result.seconds for result in self.results)

    def as_events(self) -> list[dict[str, Any]]:
        """The fields of an event for each check."""
        return [
            {
                "name": result.name,
                "part": self.part,
                "outcome": result.finding.outcome,
                "value": result.finding.number,
                "unit": result.finding.unit,
                "detail": result.finding.says,
                "evidence": result.finding.evidence,
                "remedy": result.finding.remedy,
                "notes": result.finding.notes,
                "left_out": result.is_left_out,
                "seconds": result.seconds,
            }
            for result in self.results
        ]

    def count(self, outcome: Outcome) -> int:
        return sum(result.finding.outcome == outcome for result in self.results)

    @property
    def counts(self) -> str:
        """The numbers of results by outcome, as text."""
        return ", ".join(f"{self.count(o)} {o}" for o in ("failed", "warning", "passed", "skipped"))

    def __repr__(self) -> str:
        names = ", ".join(result.name for result in (*self.failures, *self.warnings))
        return f"Examination({self.part}: {self.counts}{': ' if names else ''}{names})"

    def _repr_html_(self) -> str:
        """Failures, then warnings, then a count of the rest."""
        rows = [
            (one.finding.outcome, one.name, one.finding.says, one.finding.remedy)
            for one in (*self.failures, *self.warnings)
        ]
        columns = ("outcome", "check", "finding", "remedy") if rows else ()
        return html_table(f"checks: {self.counts} in {self.seconds:.1f} s", columns, rows)


def examine(
    session: Session | Cluster,
    part: Part = "quick",
    only: Collection[str] | None = None,
    follow: Callable[[CheckResult], None] = lambda _: None,
) -> Examination:
    """Ask every check of ``part`` (full: all of them), or only the checks in ``only``; for a Cluster the checks of
    nodes. ``follow`` is called with each result. Raises ConfigError if ``checks.skip`` names an unknown check.
    """
    if isinstance(session, Session):
        session.part = part
    left_out = session.run.checks.skip
    require_known(left_out)
    causes: dict[str, str] = {}
    results = []
    state = random_state.capture(session.ranks.device)
    for name, check in (OF_NODES if isinstance(session, Cluster) else CHECKS).items():
        if (part == "quick" and check.part == "full") or (only is not None and name not in only):
            continue
        began = time.perf_counter()
        cause = next((causes[before] for before in check.after if before in causes), None)
        owner: str | None = None
        if name in left_out:
            finding = skipped("left out by name (checks.skip)")
        elif cause is not None:
            finding, owner = skipped(f"{cause} failed"), cause
        else:
            finding, owner = _ask(name, check, session)
        # a check that fails on one rank fails on all
        by_rank: list[Finding] = session.ranks.gather(finding)
        # the first of the worst findings
        finding = min(by_rank, key=lambda other: {"failed": 0, "warning": 1}.get(other.outcome, 2))
        if finding.outcome == "failed" or cause:
            causes[name] = cause or name
        seconds = time.perf_counter() - began
        results.append(CheckResult(name, check.question, finding, seconds, owner, name in left_out))
        random_state.restore(state, session.ranks.device)
        follow(results[-1])
    return Examination(part, tuple(results))


def require_known(names: Sequence[str]) -> None:
    """Raise ConfigError for an unknown name in ``checks.skip``."""
    for name in names:
        if name not in CHECKS and name not in OF_NODES:
            near = difflib.get_close_matches(name, [*CHECKS, *OF_NODES], 1)
            hint = f"did you mean {near[0]}?" if near else "docs/check.md lists them"
            raise ConfigError(
                f"checks.skip names the check {name!r}, and there is none; expected names such as rewards.gold; {hint}"
            )


def _ask(name: str, check: Check, session: Session | Cluster) -> tuple[Finding, str | None]:
    """Ask one check. Returns the finding and, if a part of the run is missing for it, the check that owns the part."""
    try:
        return check.ask(session), None
    except TautError as error:
        if isinstance(error, OutOfMemory) and session.ranks.size > 1:
            raise  # on this rank alone: the others wait inside the model, and torchrun ends them
        (says, remedy), code = split_error(error), error.code
    except Unavailable as missing:
        if missing.owner != name and missing.owner not in session.run.checks.skip:
            return skipped(f"without {missing.part}: {missing.owner} fails"), missing.owner
        (says, remedy), code = split_error(missing.error), getattr(missing.error, "code", "")
    return failed(says, remedy=remedy, code=code), None


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
    """Return the examination. Raises CheckFailed where a check failed."""
    failures = []
    for result in examination.failures:
        shown = "; ".join(result.finding.evidence[:3])
        evidence = f" ({shown})" if shown else ""
        failures.append(f"{result.name}: {result.finding.says}{evidence}; {result.finding.remedy}")
    if failures:
        raise CheckFailed(" | ".join(failures))
    return examination
