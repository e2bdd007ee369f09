"""Custom sinks: classes of the user, named by ``log.sinks=["FILE.py:Class", ...]``, or functions of an event.

    class Class:
        def __init__(self, out, settings): ...      # before the first event
        def __call__(self, event): ...              # every event, a dict: kind, time, and the fields of its kind
        def samples(self, step, rows): ...          # optional: texts of some samples of a step
        def close(self): ...                        # optional: after the event ``end``

``__init__`` gets those of these arguments that it names: ``out`` (the run's directory, a Path), ``settings`` (the run's
configuration by dotted key) and ``run_id`` (one for every process of one ``out``). Events are those of events.jsonl.
Secrets in URLs, and settings named key, token or password, are hidden in all of them.

The file is executed before models are loaded; where that fails, ConfigError. An exception of the class ends that sink,
with a warning that names its line, and never the run. Only here does the log catch every exception.

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
from taut.io.user_code import UserCode, find_code, named_files
from taut.train.log.events import Event, ReportLost
from taut.train.log.samples import ShownSample
from taut.train.settings import SINK_ENTRY_POINTS

KEY = "log.sinks"
GIVEN = ("out", "settings", "run_id")
"""Arguments that ``__init__`` may name."""
SHOWN = 300
"""Characters of an exception's text in a warning."""


class CustomSink:
    """The user's class as a sink. The object is made at the first event."""

    def __init__(self, spec: str, code: UserCode) -> None:
        """Execute the file. Raises ConfigError."""
        self.spec, self._code = spec, code
        loaded = code.load()
        self._make: Callable[..., Any] = loaded if isinstance(loaded, type) else lambda: loaded
        self._takes = _taken(spec, self._make)
        self._values: Mapping[str, Any] | None = None
        self._sink: Any = None

    def bind(self, values: Mapping[str, Any]) -> None:
        """Set the values of GIVEN for the run that begins."""
        self._values = values

    def __call__(self, event: Event) -> None:
        self._guard(self._pass, event)

    def samples(self, step: int, rows: list[ShownSample]) -> None:
        if hasattr(self._sink, "samples"):
            self._guard(self._sink.samples, step, [row._asdict() for row in rows])

    def close(self) -> None:
        """Close the sink unless the event ``end`` has; also closes one that failed."""
        try:
            self._end()
        except ReportLost as lost:  # events.jsonl may be closed
            sys.stderr.write(f"taut: warning: {one_line(str(lost))}\n")

    def _pass(self, event: Event) -> None:
        if self._sink is None:
            assert self._values is not None, "a sink is bound to a run first"
            self._sink = self._make(**{name: self._values[name] for name in self._takes})
        self._sink(copy.deepcopy(event))  # the other sinks get the event too
        if event["kind"] == "end":  # so that what fails is recorded before the end
            self._end()

    def _end(self) -> None:
        sink, self._sink = self._sink, None
        if hasattr(sink, "close"):
            self._guard(sink.close)

    def _guard(self, call: Callable[..., Any], *arguments: Any) -> None:
        """Call the user's code. Any exception becomes ReportLost."""
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


def load_sinks(specs: Sequence[str]) -> list[CustomSink]:
    """Load the sinks of ``log.sinks``. Raises ConfigError."""
    return [CustomSink(spec, _read(spec)) for spec in specs]


def sink_files(specs: Sequence[str]) -> list[Path]:
    """Files of the sinks."""
    return [*named_files(specs), *(_read(spec).path for spec in specs if ":" not in spec)]


def _read(spec: str) -> UserCode:
    path = home_path(spec.rpartition(":")[0])
    code = find_code(spec, path, SINK_ENTRY_POINTS, f"{KEY} has {spec}", "class")
    assert code is not None, "LogConfig refuses any other name"
    return code


def _taken(spec: str, make: Callable[..., Any]) -> list[str]:
    """Names of GIVEN that the class takes."""
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
