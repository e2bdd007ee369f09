"""Asks the checks of a session, in the order of the registry, and keeps what they answer.

A check is left out where ``checks.skip`` names it. It is skipped, with the reason, where one it comes ``after`` has
failed, or was skipped for that (its answer would be the same fault once more), or where a part of the run it needs
cannot be made. With several ranks all of them ask alike, and one that fails fails for all.

May import checks and what they import. lifecycle, api and commands import it.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from taut.checks import CHECKS, Check, Part
from taut.checks.finding import Finding, Outcome, failed, skipped
from taut.checks.owned import Unavailable
from taut.checks.session import Session
from taut.errors import CheckFailed, ConfigError, OutOfMemory, TautError
from taut.run.setup import Built
from taut.train import random_state
from taut.train.log.events import plain

SHOWN = 3
"""Lines of evidence in the error that stops a run."""


class Answered(NamedTuple):
    """A check, and what it found."""

    name: str
    question: str
    finding: Finding
    seconds: float
    cause: str | None = None
    """The check whose failure kept this one from being asked."""
    is_left_out: bool = False
    """Whether ``checks.skip`` names it."""


@dataclass(frozen=True)
class Examination:
    """All that was asked."""

    part: Part
    answered: tuple[Answered, ...]

    @property
    def failures(self) -> list[Answered]:
        return [one for one in self.answered if one.finding.outcome == "failed"]

    @property
    def warnings(self) -> list[Answered]:
        return [one for one in self.answered if one.finding.outcome == "warning"]

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.answered)

    def count(self, outcome: Outcome) -> int:
        return sum(one.finding.outcome == outcome for one in self.answered)


def examine(
    session: Session,
    part: Part = "quick",
    only: Collection[str] | None = None,
    follow: Callable[[Answered], None] = lambda _: None,
) -> Examination:
    """Ask every check of ``part`` (full: all of them), or those named by ``only``. ``follow`` is told each answer.

    Raises ConfigError where ``checks.skip`` names no check.
    """
    left_out = session.run.checks.skip
    require_known(left_out)
    causes: dict[str, str] = {}
    answered = []
    state = random_state.capture(session.ranks.device)
    for name, check in CHECKS.items():
        if (part == "quick" and check.part == "full") or (only is not None and name not in only):
            continue
        began = time.perf_counter()
        cause = next((causes[before] for before in check.after if before in causes), None)
        if name in left_out:
            asked: tuple[Finding, str | None] = skipped("left out by name (checks.skip)"), None
        elif cause is not None:
            asked = skipped(f"{cause} failed"), cause
        else:
            asked = _ask(name, check, session)
        finding, missing = _together(session, asked[0]), asked[1]
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
        if name not in CHECKS:
            near = difflib.get_close_matches(name, CHECKS, 1)
            hint = f"did you mean {near[0]}?" if near else "docs/check.md lists them"
            raise ConfigError(
                f"checks.skip names the check {name!r}, and there is none; expected names such as rewards.gold; {hint}"
            )


def _ask(name: str, check: Check, session: Session) -> tuple[Finding, str | None]:
    """What is found; and where a part of the run is missing for it, the check that says why."""
    try:
        return check.ask(session), None
    except TautError as error:
        if isinstance(error, OutOfMemory) and session.ranks.size > 1:
            raise  # on this rank alone: the others wait inside the model, and torchrun ends them
        return _refused(error), None
    except Unavailable as missing:
        if missing.owner == name or missing.owner in session.run.checks.skip:
            return _refused(missing.error), None
        return skipped(f"without {missing.part}: {missing.owner} fails"), missing.owner


def _refused(error: TautError) -> Finding:
    """An error's own words: what was found, what was expected; what to do."""
    says, _, remedy = str(error).rpartition("; ")
    return failed(says or remedy, remedy=remedy)


def _together(session: Session, finding: Finding) -> Finding:
    """The ranks' findings as one: the first failure, else the first warning, else the first rank's."""
    every: list[Finding] = session.ranks.gather(finding)
    worst = [one for outcome in ("failed", "warning") for one in every if one.outcome == outcome]
    return (*worst, *every)[0]


def before_training(built: Built) -> Examination | None:
    """The quick part; None where it was turned off. Raises CheckFailed, so that nothing has been written."""
    if built.run.check == "off":
        return None
    examination = examine(Session.of(built))
    if examination.failures:
        raise CheckFailed(" | ".join(map(_told, examination.failures)))
    return examination


def _told(failure: Answered) -> str:
    finding = failure.finding
    evidence = f" ({'; '.join(finding.evidence[:SHOWN])})" if finding.evidence else ""
    return f"{failure.name}: {finding.says}{evidence}; {finding.remedy}"


def as_fields(one: Answered) -> dict[str, Any]:
    """For JSON: in its own types, a number that is not finite as a text, as in the run's log."""
    head = {"name": one.name, "question": one.question}
    fields = {**head, **one.finding.as_fields(), "seconds": round(one.seconds, 3)}
    return {key: plain(value) for key, value in (fields | {"cause": one.cause}).items()}
