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

from taut.config import configclass, user_path
from taut.errors import OutputError
from taut.io.console import one_line
from taut.run.states import RunState, states_in
from taut.train.log.events import to_json
from taut.train.run_dir import MARK

DEFAULT = Path("runs")


@configclass
class Runs:
    """List the runs in directories."""

    directories: list[str] = field(default_factory=list)
    """Directories to search, three levels deep; default: runs, or else the current directory."""
    json: bool = False
    """Print a JSON array instead of a table."""


def run(config: Runs) -> int:
    """Print the runs."""
    places = _places(config.directories)
    states = runs(places)
    if config.json:
        listed = [{**asdict(state), "resumes_after": state.resumes_after} for state in states]
        sys.stdout.write(json.dumps(to_json(listed), indent=1, ensure_ascii=False) + "\n")
    elif states:
        sys.stdout.write(table(states, time.time()))
    else:
        looked = ", ".join(map(str, places))
        sys.stdout.write(f"no runs in {looked}: no directory with a {MARK}\n")
    return 0


def runs(directories: Sequence[str | os.PathLike[str]]) -> list[RunState]:
    """Every run in the directories (none: those that ``taut runs`` searches), newest first. Raises OutputError where a
    directory cannot be read.
    """
    return states_in(_places(directories))


def table(states: Iterable[RunState], now: float) -> str:
    """The runs, one per line."""
    head = ("run", "method", "state", "step", "loss", "reward", "checkpoint", "wrote", "")
    rows = [head, *(_row(state, now) for state in states)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "".join(f"{line}\n" for line in lines)


def _row(state: RunState, now: float) -> tuple[str, ...]:
    after = state.resumes_after
    resumes = (
        "" if after is None else f"resumes {f'after step {after}' if after else 'from step 1'}"
    )
    why = " ".join("; ".join(filter(None, [resumes, state.reason])).split())
    return (
        one_line(str(state.out)),
        one_line(state.method or ""),
        state.state,
        f"{state.step}/{'?' if state.num_steps is None else state.num_steps}",
        "" if state.loss is None else f"{state.loss:.4f}",
        "" if state.reward is None else f"{state.reward:.3f}",
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
