"""``taut runs [DIR ...]``: the runs in some directories with their states, the most recently written first
(taut/run/states.py).

``taut resume`` continues an interrupted, stopped or died run: after its newest complete checkpoint, or from step 1.

Imports no torch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, field
from pathlib import Path
from typing import Any

from taut.config import configclass, user_path
from taut.errors import OutputError
from taut.io.console import one_line
from taut.io.notebook import html_table
from taut.run.states import RunState, differing, settings_in_words, states_in
from taut.train.log.events import to_json
from taut.train.run_dir import MARK

DEFAULT = Path("runs")
OPTIONAL = ("loss", "reward", "held-out", "best", "hours", "differs", "checkpoint")
"""Columns that are left out where no run has anything in them."""


@configclass
class Runs:
    """List the runs in directories."""

    directories: list[str] = field(default_factory=list)
    """Directories to search, three levels deep. Defaults to runs if it exists, else the current directory."""
    json: bool = False
    """Print a JSON array instead of a table."""


def run(config: Runs) -> int:
    """Print the runs."""
    places = _places(config.directories)
    states = runs(places)
    if config.json:
        listed = [
            {**asdict(state), "settings": differs, "resumes_after": state.resumes_after}
            for state, differs in zip(states, differing(states), strict=True)
        ]
        sys.stdout.write(json.dumps(to_json(listed), indent=1, ensure_ascii=False) + "\n")
    elif states:
        sys.stdout.write(table(states, time.time()))
    else:
        looked = ", ".join(map(str, places))
        sys.stdout.write(f"no runs in {looked}: no directory with a {MARK}\n")
    return 0


class RunList(list[RunState]):
    """Runs, newest first."""

    def frame(self) -> Any:
        """A pandas frame with a row for each run: its state, and a column for each setting in which runs of a method
        differ.
        """
        from pandas import DataFrame

        rows = []
        for state, differs in zip(self, differing(self), strict=True):
            fields = {**vars(state), "resumes_after": state.resumes_after, **differs}
            del fields["settings"]
            if state.best is not None:
                fields["best"] = state.best["value"]
            rows.append({key: str(v) if isinstance(v, Path) else v for key, v in fields.items()})
        return DataFrame(rows)

    def __repr__(self) -> str:
        return table(self, time.time()) if self else "[]"

    def _repr_html_(self) -> str:
        head, *rows = _cells(self, time.time())
        return html_table(f"{len(self)} runs", head, rows)


def runs(directories: Sequence[str | os.PathLike[str]]) -> RunList:
    """Every run in the directories, newest first; without directories, in the ones that ``taut runs`` searches. Raises
    OutputError if a directory cannot be read.
    """
    return RunList(states_in(_places(directories)))


def table(states: Sequence[RunState], now: float) -> str:
    """The runs, one per line."""
    rows = _cells(states, now)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "".join(f"{line}\n" for line in lines)


def _cells(states: Sequence[RunState], now: float) -> list[tuple[str, ...]]:
    """The head and a row for each run. Of OPTIONAL the columns in which no run has anything are left out."""
    head = (
        "run",
        "method",
        "state",
        "step",
        *OPTIONAL,
        "wrote",
        "",
    )
    differs = [settings_in_words(settings) for settings in differing(states)]
    rows = [head, *(_row(state, some, now) for state, some in zip(states, differs, strict=True))]
    kept = [
        n for n, name in enumerate(head) if name not in OPTIONAL or any(row[n] for row in rows[1:])
    ]
    return [tuple(row[n] for n in kept) for row in rows]


def _row(state: RunState, differs: str, now: float) -> tuple[str, ...]:
    after, resumes = state.resumes_after, ""
    if after is not None:
        resumes = f"resumes after step {after}" if after else "resumes from step 1"
    why = " ".join("; ".join(filter(None, [resumes, state.reason])).split())
    return (
        one_line(str(state.out)),
        one_line(state.method or ""),
        state.state,
        f"{state.step}/{'?' if state.num_steps is None else state.num_steps}",
        # with a policy gradient the loss is near 0 whatever is learned
        "" if state.loss is None or state.reward is not None else f"{state.loss:.4f}",
        "" if state.reward is None else f"{state.reward:.3f}",
        "" if state.held_out is None else f"{state.held_out:.4f}",
        ""
        if state.best is None
        else one_line("{metric} {value:.4g} at {step}".format(**state.best)),
        "" if state.seconds is None else f"{state.seconds / 3600:.2f}",
        differs,
        "" if state.checkpoint is None else one_line(state.checkpoint.name),
        _age(state.written, now),
        why,
    )


def _age(then: float, now: float) -> str:
    """The age as text, ``12 s ago``; a date after two days."""
    seconds = max(0.0, now - then)
    for name, length, count in (("s", 1, 120), ("min", 60, 120), ("h", 3600, 48)):
        if seconds < count * length:
            return f"{seconds // length:.0f} {name} ago"
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(then))


def _places(directories: Sequence[str | os.PathLike[str]]) -> list[Path]:
    if not directories:
        return [DEFAULT if DEFAULT.is_dir() else Path()]
    places = [user_path(os.fspath(directory), "directories") for directory in directories]
    for place in places:
        if not (place.is_dir() and os.access(place, os.R_OK | os.X_OK)):
            raise OutputError(
                f"found {str(place)!r}, which is no directory that can be read; expected one to look for runs in; "
                "name another"
            )
    return places
