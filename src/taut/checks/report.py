"""An examination for people, in 100 columns: what failed and what is warned of, then one line that counts the rest; and
for programs, as JSON with a named schema.

Says nothing that is not in the examination. Commands import it.
"""

from __future__ import annotations

from collections import Counter
from importlib.metadata import version
from typing import Any, get_args

from rich.console import Console
from rich.table import Table
from rich.text import Text

from taut.checks.examine import Answered, Examination, as_fields
from taut.checks.finding import Finding, Outcome
from taut.io.console import counted

SCHEMA = "taut.check/2"
"""Raised whenever a field changes its meaning or goes; docs/check.md says what there is."""
STYLES = {"passed": "green", "warning": "bold yellow", "failed": "bold red", "skipped": "dim"}
FINDINGS = ("failed", "warning")
"""Outcomes that ask something of the user."""
WIDTHS = (7, 21, 17)
"""Of outcome, name and number; the rest is for what is said."""


def show_row(console: Console, one: Answered) -> None:
    """One question and its answer, with evidence and remedy of a finding and the notes of a check that passed. What was
    not asked because of a failure, or was left out by name, is left to the end.
    """
    if one.cause is not None or one.is_left_out:
        return
    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    for width in WIDTHS:
        table.add_column(width=width, overflow="fold")
    table.add_column(overflow="fold")
    finding = one.finding
    style = STYLES[finding.outcome]
    is_finding = finding.outcome in FINDINGS
    said = Text(finding.says, style if finding.outcome != "passed" else "")
    number = Text("" if finding.outcome == "skipped" else written(finding))
    name = Text(one.name, style if is_finding else "bold")
    table.add_row(Text(finding.outcome, style), name, number, said)
    if finding.outcome == "failed":
        table.add_row("", "", "", Text(one.question, "italic"))
    for line in (*finding.evidence, *finding.notes):
        table.add_row("", "", "", Text(line, "dim"))
    if finding.remedy:
        table.add_row("", "", "", Text(f"-> {finding.remedy}", "bold"))
    console.print(table)


def show_end(console: Console, examination: Examination, *, lists_all: bool) -> None:
    """How many checks there are of each outcome, and how to see those that were not shown."""
    num_asked = Counter(one.cause for one in examination.answered if one.cause is not None)
    for cause, number in num_asked.items():
        said = f"\n{counted(number, 'checks')} not asked, since {cause} failed"
        console.print(Text(said, STYLES["skipped"]))
    left_out = [one.name for one in examination.answered if one.is_left_out]
    if left_out:
        text = f"\nleft out by name (checks.skip): {', '.join(left_out)}"
        console.print(Text(text, STYLES["warning"]))
    style = STYLES["failed" if examination.failures else "passed"]
    hint = "" if lists_all else "; --all shows every check"
    said = f"{counts(examination)} in {examination.seconds:.1f} s{hint}"
    console.print(Text(f"\n{said}", style))


def counts(examination: Examination) -> str:
    """``1 failed, 2 warnings, 44 passed, 30 skipped``: findings only where there are any."""
    number = {outcome: examination.count(outcome) for outcome in get_args(Outcome)}
    found = [f"{number['failed']} failed"] if number["failed"] else []
    found += [counted(number["warning"], "warnings")] if number["warning"] else []
    found.append(f"{number['passed']} passed")
    found += [f"{number['skipped']} skipped"] if number["skipped"] else []
    return ", ".join(found)


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
