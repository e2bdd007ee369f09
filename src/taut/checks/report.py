"""An examination for people, one row a question in 100 columns; and for programs, as JSON with a named schema.

Says nothing that is not in the examination. Commands import it.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from taut.checks.examine import Answered, Examination, as_fields
from taut.checks.finding import Finding

SCHEMA = "taut.check/1"
"""Raised whenever a field changes its meaning or goes; docs/check.md says what there is."""
STYLES = {"passed": "green", "failed": "bold red", "skipped": "yellow"}
WIDTHS = (7, 21, 17)
"""Of outcome, name and number; the rest is for what is said."""


def show_row(console: Console, one: Answered) -> None:
    """One question and its answer: evidence and remedy where it failed, notes where there are any. What was not asked
    because of a failure, or was left out by name, is left to the end.
    """
    if one.cause is not None or one.is_left_out:
        return
    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    for width in WIDTHS:
        table.add_column(width=width, overflow="fold")
    table.add_column(overflow="fold")
    finding = one.finding
    style = STYLES[finding.outcome]
    is_failed = finding.outcome == "failed"
    said = Text(finding.says, style if is_failed else "dim" if finding.outcome == "skipped" else "")
    number = Text("" if finding.outcome == "skipped" else written(finding))
    table.add_row(
        Text(finding.outcome, style), Text(one.name, style if is_failed else "bold"), number, said
    )
    if is_failed:
        table.add_row("", "", "", Text(one.question, "italic"))
    for line in (*finding.evidence, *finding.notes):
        table.add_row("", "", "", Text(line, "dim"))
    if finding.remedy:
        table.add_row("", "", "", Text(f"-> {finding.remedy}", "bold"))
    console.print(table)


def show_end(console: Console, examination: Examination) -> None:
    """What was not asked because of a failure, or was left out by name; how many passed, failed and were skipped."""
    causes = dict.fromkeys(one.cause for one in examination.answered if one.cause is not None)
    for cause in causes:
        names = [one.name for one in examination.answered if one.cause == cause]
        text = f"\nnot asked, since {cause} failed: {', '.join(names)}"
        console.print(Text(text, STYLES["skipped"]))
    left_out = [one.name for one in examination.answered if one.is_left_out]
    if left_out:
        text = f"\nleft out by name (checks.skip): {', '.join(left_out)}"
        console.print(Text(text, STYLES["skipped"]))
    counts = [
        f"{examination.count(outcome)} {outcome}" for outcome in ("passed", "failed", "skipped")
    ]
    style = STYLES["failed" if examination.failures else "passed"]
    console.print(Text(f"\n{', '.join(counts)} in {examination.seconds:.1f} s", style))


def written(finding: Finding) -> str:
    """The number with its unit."""
    if finding.number is None:
        return ""
    number = finding.number
    text = (
        f"{number:,.0f}" if float(number).is_integer() and abs(number) < 1e15 else f"{number:.3g}"
    )
    unit = finding.unit.removesuffix("s") if text == "1" else finding.unit
    return f"{text} {unit}".rstrip()


def as_json(examination: Examination, about: dict[str, Any]) -> dict[str, Any]:
    """Everything, for programs. ``about``: what was examined."""
    return {
        "schema": SCHEMA,
        "taut": version("taut"),
        **about,
        "part": examination.part,
        "outcome": "failed" if examination.failures else "passed",
        "seconds": round(examination.seconds, 3),
        "checks": [as_fields(one) for one in examination.answered],
    }
