"""``taut check``: find the faults of a run before it is trained.

    taut check RUN.toml [key=value ...] [--full] [--all] [--json]   a run, with the keys of ``taut sft``
    taut check --model DIR --data FILE                         a model and data, with the defaults

Prints failures and warnings, then one line that counts the checks that passed and, by reason, the checks that were not
asked for this run; with --all one row per check. Exit code 1 if a check failed; warnings do not change it. Nothing is
trained and nothing is written. ``--recipe``: see check_recipe.py; ``--cluster``: check_cluster.py.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from taut.checks import Part
from taut.checks.examine import CheckResult, Examination, examine
from taut.checks.rollouts import close
from taut.checks.session import Session
from taut.commands.settings import CheckOptions
from taut.config import load
from taut.errors import ConfigError
from taut.io.console import counted
from taut.io.terminal import Terminal
from taut.methods.method import RunConfig, class_of
from taut.run.setup import use_cpu_matmul
from taut.train import distributed

SCHEMA = "taut.check/2"
"""Version, raised whenever a field changes its meaning or disappears; docs/check.md describes the fields."""
STYLES = {"passed": "green", "warning": "bold yellow", "failed": "bold red", "skipped": "dim"}

MAX_REASONS = 3
"""Number of reasons that the summary gives for checks that were not asked."""


def main(path: Path | None, overrides: Sequence[str]) -> int:
    """The command; its exit code."""
    ours = [word for word in overrides if word.partition("=")[0].strip() in ("full", "all", "json")]
    rest = [word for word in overrides if word not in ours]
    return run(load(class_of(path, rest), path, rest), load(CheckOptions, None, ours))


def run(config: RunConfig, options: CheckOptions) -> int:
    """Print the findings; 1 if a check failed."""
    console = Terminal(width=None if sys.stdout.isatty() else 100)
    session = session_of(config)
    part: Part = "full" if options.full else "quick"
    if options.json:
        examination = _examine(session, part)
        found = as_json(examination, {"model": config.model})
        sys.stdout.write(json.dumps(found, allow_nan=False) + "\n")
        return 1 if examination.failures else 0
    console.lines([f"{config.model}, {part} part\n"])

    def show(result: CheckResult) -> None:
        is_finding = result.finding.outcome in ("failed", "warning")
        # what was not asked because of a failure, or was left out by name, is left to the end
        if (options.all or is_finding) and result.cause is None and not result.is_left_out:
            show_row(console, result)

    examination = _examine(session, part, show)
    show_rest(console, examination)
    more = "" if options.all else "; --all shows every check"
    style = STYLES["failed" if examination.failures else "passed"]
    console.print(Text(f"\n{summary(examination)}{more}", style))
    return 1 if examination.failures else 0


def show_rest(console: Console, examination: Examination) -> None:
    """Print the checks that were not asked because of a failure, and the checks that were left out by name."""
    num_not_asked = Counter(one.cause for one in examination.results if one.cause is not None)
    for cause, number in num_not_asked.items():
        text = f"\n{counted(number, 'checks')} not asked, since {cause} failed"
        console.print(Text(text, STYLES["skipped"]))
    # what ends an answer is said in any case
    ends = [each.finding for each in examination.results if each.name == "stop.set"]
    for finding in (finding for finding in ends if finding.outcome == "passed"):
        console.print(Text(f"\n{finding.says}", STYLES["skipped"]))
    left_out = [finding.name for finding in examination.results if finding.is_left_out]
    if left_out:
        text = f"\nleft out by name (checks.skip): {', '.join(left_out)}"
        console.print(Text(text, STYLES["warning"]))


def summary(examination: Examination) -> str:
    """``1 failed, 2 warnings, 44 passed, 30 not asked for this run (4: the model takes no pictures, ...) in 8.2 s``.
    Checks that a failure hides, or that were left out by name, are not among them.
    """
    parts = [f"{len(examination.failures)} failed"] if examination.failures else []
    parts += [counted(len(examination.warnings), "warnings")] if examination.warnings else []
    parts.append(f"{examination.count('passed')} passed")
    # checks that were not asked, by reason
    reasons = Counter(
        result.finding.says
        for result in examination.results
        if result.finding.outcome == "skipped" and result.cause is None and not result.is_left_out
    ).most_common()
    if reasons:
        listed = [f"{number}: {reason}" for reason, number in reasons[:MAX_REASONS]]
        num_others = sum(number for _, number in reasons[MAX_REASONS:])
        listed += [f"{num_others}: other reasons"] if num_others else []
        num_unasked = sum(number for _, number in reasons)
        parts.append(f"{num_unasked} not asked for this run ({', '.join(listed)})")
    return f"{', '.join(parts)} in {examination.seconds:.1f} s"


def show_row(console: Console, result: CheckResult) -> None:
    """A question and its answer, with evidence and remedy of a finding and the notes of a check that passed."""
    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    for width in (7, 21, 17):  # of outcome, name and number; the rest is for the text
        table.add_column(width=width, overflow="fold")
    table.add_column(overflow="fold")
    finding = result.finding
    style = STYLES[finding.outcome]
    # a whole number has no decimals, and one of a unit is singular
    number = ""
    if finding.number is not None and finding.outcome != "skipped":
        is_whole = float(finding.number).is_integer() and abs(finding.number) < 1e15
        digits = f"{finding.number:,.0f}" if is_whole else f"{finding.number:.3g}"
        number = f"{digits} {finding.unit.removesuffix('s') if digits == '1' else finding.unit}"
    table.add_row(
        Text(finding.outcome, style),
        Text(result.name, style if finding.remedy else "bold"),
        Text(number.rstrip()),
        Text(finding.says, style if finding.outcome != "passed" else ""),
    )
    lines = [Text(line, "dim") for line in (*finding.evidence, *finding.notes)]
    if finding.outcome == "failed":
        lines.insert(0, Text(result.question, "italic"))
    if finding.remedy:
        lines.append(Text(f"-> {finding.remedy}", "bold"))
    for line in lines:
        table.add_row("", "", "", line)
    console.print(table)


def as_json(examination: Examination, about: dict[str, Any]) -> dict[str, Any]:
    """The examination for programs. ``about``: its subject."""
    return {
        "schema": SCHEMA,
        "taut": version("taut"),
        **about,
        "part": examination.part,
        "outcome": "failed" if examination.failures else "passed",
        "seconds": round(examination.seconds, 3),
        "checks": [finding.as_fields() for finding in examination.results],
    }


def check(config: RunConfig, *, full: bool) -> Examination:
    """The library's ``taut.check``."""
    return _examine(session_of(config), "full" if full else "quick")


def _examine(
    session: Session, part: Part, follow: Callable[[CheckResult], None] = lambda _: None
) -> Examination:
    """Run the checks, and close what they opened."""
    try:
        return examine(session, part, follow=follow)
    finally:
        close(session)
        distributed.stop(session.ranks)


def session_of(config: RunConfig) -> Session:
    """A session on the configured run."""
    if distributed.world_size() > 1:
        raise ConfigError(
            "taut check was started on several ranks; expected one process; start it without torchrun, or with "
            "--cluster to compare machines"
        )
    ranks = distributed.start(config.device, replace(config.parallel, replicas=1, tensor=1))
    use_cpu_matmul(config, ranks)
    return Session(config, ranks)
