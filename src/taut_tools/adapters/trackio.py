"""trackio: curves and tables of samples. Needs the extra ``trackio``; LogConfig checks that it is installed.

Where trackio writes is its own matter: a directory of the user's, a server or a Space, by its environment variables.
One ``out`` is one trackio run, however often it is resumed: trackio finds a run by its name, which ends with the id
that is kept in ``out``. trackio takes values of any step, so steps that a resumed run repeats have two points, which
are equal where the resumed run is the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from sqlite3 import Error as DatabaseError
from typing import Any

import trackio

from taut.errors import OutputError
from taut.train.log.events import Event, ReportLost, scalars
from taut.train.log.samples import COLUMNS, ShownSample

FAILURES = (OSError, ValueError, RuntimeError, DatabaseError)
"""Errors that trackio raises if it cannot write, is not logged in, or its server refuses."""


class Trackio:
    """A sink that reports to a project."""

    def __init__(self, project: str, out: Path, run_id: str, settings: Mapping[str, Any]) -> None:
        try:
            self._run = trackio.init(
                project=project,
                name=f"{out.name}-{run_id}",
                config=dict(settings),
                resume="allow",
                embed=False,
            )
        except FAILURES as error:
            reason = " ".join(str(error).split())[:200]
            raise OutputError(
                f"log.trackio={project}: {reason}; expected a project that may be written; correct it, or leave "
                "log.trackio out"
            ) from error

    def __call__(self, event: Event) -> None:
        values = scalars(event)
        if values:
            self._send(lambda: self._run.log(values, step=event["step"]))

    def samples(self, step: int, rows: list[ShownSample]) -> None:
        """A table, at the step."""
        table = trackio.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        self._send(lambda: self._run.log({"samples": table}, step=step))

    def _send(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except FAILURES as error:
            raise ReportLost(f"trackio takes no more: {error}") from error

    def close(self) -> None:
        self._run.finish()
