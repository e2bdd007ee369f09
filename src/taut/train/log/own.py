"""Sinks of the user's own: ``log.sinks=["FILE.py:Class", ...]``.

    class Class:
        def __init__(self, out, settings): ...      # before the first event
        def __call__(self, event): ...              # every event, a dict: kind, time, and the fields of its kind
        def samples(self, step, rows): ...          # optional: texts of some samples of a step
        def close(self): ...                        # optional: after the event ``end``

``__init__`` takes what it names of ``out`` (the run's directory, a Path), ``settings`` (the run's configuration by
dotted key) and ``run_id`` (the same for every process of one ``out``). Events are those of events.jsonl. Secrets of
URLs, and values of settings that are called key, token or password, are hidden in all of them.

The file is run before models are loaded: ConfigError where it cannot be. An exception of the class ends that sink, with
a warning that says where, and never the run. This is the one place of the log where any exception is caught.

No torch here.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from taut.config import home_path
from taut.errors import ConfigError
from taut.io.console import one_line
from taut.io.user_code import UserCode, read_user_code
from taut.train.log.events import Event, ReportLost
from taut.train.log.samples import ShownSample

KEY = "log.sinks"
GIVEN = ("out", "settings", "run_id")
"""What a class can take."""
SHOWN = 300
"""Characters of an exception's text in a warning."""


class OwnSink:
    """A class of the user's as a sink; the object is made when the first event comes."""

    def __init__(self, spec: str, code: UserCode) -> None:
        """Runs the file. Raises ConfigError."""
        self.spec, self._code = spec, code
        self._make: Callable[..., Any] = code.load()
        self._takes = _taken(spec, self._make)
        self._values: Mapping[str, Any] | None = None
        self._sink: Any = None

    def bind(self, values: Mapping[str, Any]) -> None:
        """Set what GIVEN names, of the run that begins."""
        self._values = values

    def __call__(self, event: Event) -> None:
        self._guard(self._pass, event)

    def samples(self, step: int, rows: list[ShownSample]) -> None:
        if hasattr(self._sink, "samples"):
            self._guard(self._sink.samples, step, [row._asdict() for row in rows])

    def close(self) -> None:
        """Close it where no event ``end`` did, or drop one that failed."""
        try:
            self._end()
        except ReportLost as lost:  # events.jsonl may be closed
            sys.stderr.write(f"taut: warning: {one_line(str(lost))}\n")

    def _pass(self, event: Event) -> None:
        if self._sink is None:
            assert self._values is not None, "a sink is bound to a run first"
            self._sink = self._make(**{name: self._values[name] for name in self._takes})
        self._sink(copy.deepcopy(event))  # the others get the same one
        if event["kind"] == "end":  # so that what fails is recorded before the end
            self._end()

    def _end(self) -> None:
        sink, self._sink = self._sink, None
        if hasattr(sink, "close"):
            self._guard(sink.close)

    def _guard(self, call: Callable[..., Any], *arguments: Any) -> None:
        """Call the user's code; whatever it raises is a ReportLost."""
        try:
            call(*arguments)
        except ReportLost:
            self._sink = None
            raise
        except (Exception, SystemExit) as error:
            self._sink = None
            what = " ".join(f"{type(error).__name__}: {error}".split())[:SHOWN]
            raise ReportLost(
                f"the sink {self.spec} ended: {what}{self._code.line_of(error)}"
            ) from error


def load_sinks(specs: Sequence[str]) -> list[OwnSink]:
    """The sinks of ``log.sinks``. Raises ConfigError."""
    return [
        OwnSink(spec, read_user_code(spec, sink_file(spec), f"{KEY} has {spec}", "class"))
        for spec in specs
    ]


def sink_file(spec: str) -> Path:
    """The file of a sink."""
    return home_path(spec.rpartition(":")[0])


def _taken(spec: str, make: Callable[..., Any]) -> list[str]:
    """The names of GIVEN that a class takes."""
    parameters = inspect.signature(make).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    wrong = [p.name for p in named if p.name not in GIVEN and p.default is p.empty]
    wrong += [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if wrong:
        raise ConfigError(
            f"{KEY} has {spec}, which takes {', '.join(wrong)}; expected some of {', '.join(GIVEN)}; give the others "
            "a default"
        )
    return [p.name for p in named if p.name in GIVEN]
