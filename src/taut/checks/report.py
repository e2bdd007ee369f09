"""An examination for people, in 100 columns: failures and warnings, then one line that counts the rest; and for
programs, as JSON with a named schema.

Adds nothing to what is in the examination.
"""

from __future__ import annotations

from collections import Counter
from importlib.metadata import version
from typing import Any, get_args

from rich.console import Console
from rich.table import Table
from rich.text import Text

from taut.checks.examine import Answered, Examination
from taut.checks.registry import Outcome
from taut.io.console import counted

SCHEMA = "taut.check/2"
"""Raised whenever a field changes its meaning or goes; docs/check.md says what there is."""
STYLES = {"passed": "green", "warning": "bold yellow", "failed": "bold red", "skipped": "dim"}
FINDINGS = ("failed", "warning")
"""Outcomes that ask something of the user."""


def show_row(console: Console, answered: Answered) -> None:
    """One question and its answer, with evidence and remedy of a finding and the notes of a check that passed. What was
    not asked because of a failure, or was left out by name, is left to the end.
    """
    if answered.cause is not None or answered.is_left_out:
        return
    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    for width in (7, 21, 17):  # of outcome, name and number; the rest is for the text
        table.add_column(width=width, overflow="fold")
    table.add_column(overflow="fold")
    finding = answered.finding
    style = STYLES[finding.outcome]
    number = ""
    if finding.number is not None and finding.outcome != "skipped":
        is_whole = float(finding.number).is_integer() and abs(finding.number) < 1e15
        digits = f"{finding.number:,.0f}" if is_whole else f"{finding.number:.3g}"
        number = f"{digits} {finding.unit.removesuffix('s') if digits == '1' else finding.unit}"
    table.add_row(
        Text(finding.outcome, style),
        Text(answered.name, style if finding.outcome in FINDINGS else "bold"),
        Text(number.rstrip()),
        Text(finding.says, style if finding.outcome != "passed" else ""),
    )
    lines = [Text(line, "dim") for line in (*finding.evidence, *finding.notes)]
    if finding.outcome == "failed":
        lines.insert(0, Text(answered.question, "italic"))
    if finding.remedy:
        lines.append(Text(f"-> {finding.remedy}", "bold"))
    for line in lines:
        table.add_row("", "", "", line)
    console.print(table)


def show_end(console: Console, examination: Examination, *, lists_all: bool) -> None:
    """How many checks there are of each outcome, and how to see those that were not shown."""
    num_not_asked = Counter(one.cause for one in examination.answered if one.cause is not None)
    for cause, number in num_not_asked.items():
        text = f"\n{counted(number, 'checks')} not asked, since {cause} failed"
        console.print(Text(text, STYLES["skipped"]))
    left_out = [one.name for one in examination.answered if one.is_left_out]
    if left_out:
        text = f"\nleft out by name (checks.skip): {', '.join(left_out)}"
        console.print(Text(text, STYLES["warning"]))
    style = STYLES["failed" if examination.failures else "passed"]
    hint = "" if lists_all else "; --all shows every check"
    text = f"\n{counts(examination)} in {examination.seconds:.1f} s{hint}"
    console.print(Text(text, style))


def counts(examination: Examination) -> str:
    """``1 failed, 2 warnings, 44 passed, 30 skipped``: failures, warnings and skipped ones only if there are any."""
    number = {outcome: examination.count(outcome) for outcome in get_args(Outcome)}
    parts = [f"{number['failed']} failed"] if number["failed"] else []
    parts += [counted(number["warning"], "warnings")] if number["warning"] else []
    parts.append(f"{number['passed']} passed")
    parts += [f"{number['skipped']} skipped"] if number["skipped"] else []
    return ", ".join(parts)


def as_json(examination: Examination, about: dict[str, Any]) -> dict[str, Any]:
    """Everything, for programs. ``about``: what was examined."""
    return {
        "schema": SCHEMA,
        "taut": version("taut"),
        **about,
        "part": examination.part,
        "outcome": "failed" if examination.failures else "passed",
        "seconds": round(examination.seconds, 3),
        "checks": [one.as_fields() for one in examination.answered],
    }
