"""What a check answers with: passed, a warning, failed or skipped; a number, the evidence, and what to do.

    failed    the run would be wrong: it does not start
    warning   the run is likely not what is meant, and only the user knows: it starts, and the finding is shown first
    passed    nothing is wrong; what taut mends by itself passes too, with a note
    skipped   the question does not apply to this run, or could not be asked

Imports nothing of ours. Every check imports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Outcome = Literal["passed", "warning", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer to one question."""

    outcome: Outcome
    says: str
    """One line: what was found; of a skipped check, why it was not asked."""
    number: float | None = None
    """What was measured."""
    unit: str = ""
    """Of the number: "nats", "tokens", "of 128 rows"."""
    evidence: tuple[str, ...] = ()
    """Of a failure or a warning: the sample, the token, the layer, one a line."""
    remedy: str = ""
    """Of a failure or a warning: what to do."""
    notes: tuple[str, ...] = ()
    """Details of an answer that asks nothing of the user, one a line."""

    def __post_init__(self) -> None:
        assert (self.outcome in ("failed", "warning")) == bool(self.remedy), (
            "failures and warnings, and they alone, say what to do"
        )

    def as_fields(self) -> dict[str, Any]:
        """For an event and for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def passed(
    says: str, number: float | None = None, unit: str = "", notes: tuple[str, ...] | list[str] = ()
) -> Finding:
    """Nothing is wrong."""
    return Finding("passed", says, number, unit, notes=tuple(notes))


def failed(
    says: str,
    *,
    remedy: str,
    number: float | None = None,
    unit: str = "",
    evidence: tuple[str, ...] | list[str] = (),
) -> Finding:
    """The run would be wrong."""
    return Finding("failed", says, number, unit, tuple(evidence), remedy)


def warned(
    says: str,
    *,
    remedy: str,
    number: float | None = None,
    unit: str = "",
    evidence: tuple[str, ...] | list[str] = (),
    notes: tuple[str, ...] | list[str] = (),
) -> Finding:
    """The run may start, and is likely not what is meant."""
    return Finding("warning", says, number, unit, tuple(evidence), remedy, tuple(notes))


def skipped(reason: str) -> Finding:
    """The question could not be asked, or has no meaning for this run."""
    return Finding("skipped", reason)
