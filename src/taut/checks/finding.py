"""What a check answers with: passed, failed or skipped, a number, the evidence, and what to do.

A check fails only on what would make the run wrong. What taut mends by itself, and what a user may want, passes: with
its number, and a note where people should know.

Imports nothing of ours. Every check imports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Outcome = Literal["passed", "failed", "skipped"]


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
    """Of a failure: the sample, the token, the layer, one a line."""
    remedy: str = ""
    """Of a failure: what to do."""
    notes: tuple[str, ...] = ()
    """What people should know although nothing is wrong, one a line."""

    def __post_init__(self) -> None:
        assert (self.outcome == "failed") == bool(self.remedy), (
            "failures, and they alone, say what to do"
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


def skipped(reason: str) -> Finding:
    """The question could not be asked, or has no meaning for this run."""
    return Finding("skipped", reason)
