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
from collections.abc import Iterable, Sequence
from dataclasses import asdict, field
from pathlib import Path
from typing import Any

from taut.config import configclass, user_path, written
from taut.errors import OutputError
from taut.io.console import one_line
from taut.run.states import RunState, states_in
from taut.train.log.events import to_json
from taut.train.run_dir import MARK

DEFAULT = Path("runs")
OPTIONAL = ("held-out", "best", "differs")
"""Columns that are left out where no run has anything in them."""
NOT_COMPARED = ("out", "resume", "overwrite", "log.", "check")
"""Beginnings of keys that do not change what is learned."""
MAX_SETTINGS = 4
"""Settings in a cell."""


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


def runs(directories: Sequence[str | os.PathLike[str]]) -> list[RunState]:
    """Every run in the directories, newest first; without directories, in the ones that ``taut runs`` searches. Raises
    OutputError if a directory cannot be read.
    """
    return states_in(_places(directories))


def table(states: Iterable[RunState], now: float) -> str:
    """The runs, one per line. Columns in which no run has anything but are only of some runs are left out."""
    states = list(states)
    head = (
        "run",
        "method",
        "state",
        "step",
        "loss",
        "reward",
        *OPTIONAL,
        "checkpoint",
        "wrote",
        "",
    )
    differs = [_short(settings) for settings in differing(states)]
    rows = [head, *(_row(state, some, now) for state, some in zip(states, differs, strict=True))]
    kept = [
        n for n, name in enumerate(head) if name not in OPTIONAL or any(row[n] for row in rows[1:])
    ]
    rows = [tuple(row[n] for n in kept) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "".join(f"{line}\n" for line in lines)


def differing(states: Sequence[RunState]) -> list[dict[str, Any]]:
    """Of each run the settings that another run of its method has otherwise; {} where the method has one run."""
    values: dict[tuple[str | None, str], set[str]] = {}
    for state in states:
        for key, value in state.settings.items():
            values.setdefault((state.method, key), set()).add(json.dumps(value, sort_keys=True))
    return [
        {
            key: value
            for key, value in state.settings.items()
            if len(values[state.method, key]) > 1 and not key.startswith(NOT_COMPARED)
        }
        for state in states
    ]


def _short(settings: dict[str, Any]) -> str:
    """Some settings in a cell: ``learning_rate=1e-4 rank=16``."""
    parts = [f"{key.rpartition('.')[2]}={written(value)}" for key, value in settings.items()]
    more = len(parts) - MAX_SETTINGS
    return one_line(" ".join(parts[:MAX_SETTINGS])) + (f" and {more} more" if more > 0 else "")


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
        "" if state.loss is None else f"{state.loss:.4f}",
        "" if state.reward is None else f"{state.reward:.3f}",
        "" if state.held_out is None else f"{state.held_out:.4f}",
        ""
        if state.best is None
        else one_line("{metric} {value:.4g} at {step}".format(**state.best)),
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
