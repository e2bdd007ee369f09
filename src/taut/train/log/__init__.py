"""The log of a run: one stream of events, written to ``events.jsonl`` and shown where the user likes.

    with RunLog.open(out, run.log) as log:
        log.emit("start", num_steps=100, decisions=[("attention", "reference", "no CUDA device")])
        log.emit("step", step=1, loss=2.3, ...)

Every sink gets the same events, and those with a method ``samples`` also texts of some samples. A report that can no
longer be written (console, TensorBoard, W&B, trackio, the user's own) is dropped, with a warning event to the others;
the run continues. ``events.jsonl`` is the record: a run that cannot write it ends, and one whose file is
deleted writes it again, with a warning. Secrets in URLs, and settings named key,
token or password, are hidden from every sink.

No torch here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, Self, cast

from taut.config import Decision
from taut.errors import redacted_in
from taut.io import plugins
from taut.train.log.custom_sink import CustomSink
from taut.train.log.events import KINDS, Event, EventLog, Kind, ReportLost, all_events, read_events
from taut.train.log.samples import SampleSink, ShownSample, shown
from taut.train.run_dir import read_settings, report_id
from taut.train.settings import LogConfig

__all__ = [
    "Event",
    "EventLog",
    "Kind",
    "LogConfig",
    "ReportLost",
    "RunLog",
    "ShownSample",
    "Sink",
    "all_events",
    "read_events",
]


class Sink(Protocol):
    """Takes events. An optional sink raises ReportLost once it can no longer be written."""

    def __call__(self, event: Event) -> None: ...

    def close(self) -> None: ...


class RunLog:
    """Sends every event to every sink."""

    def __init__(
        self, sinks: Sequence[Sink] | None = None, custom: Sequence[CustomSink] = ()
    ) -> None:
        """``custom``: the user's sinks, which ``open`` adds on the writer."""
        self._is_open = sinks is not None
        self._sinks = list(sinks or [])
        self._custom = custom
        self._console: Any = None

    def decide(self, decisions: Sequence[Decision], out: Path, config: LogConfig) -> None:
        """Print decisions as soon as they are known, each once, where there is a console."""
        if config.console:
            from taut.train.log.console import ConsoleReport

            self._console = self._console or ConsoleReport(config.every, out=out)
            self._console.show_decisions(redacted_in({"decisions": [*decisions]})["decisions"])

    def open(
        self,
        out: Path,
        config: LogConfig,
        listeners: Sequence[Sink] = (),
        *,
        is_writer: bool = True,
    ) -> Self:
        """Open the sinks of a run in ``out``; on the ranks that do not write, ``listeners`` alone. Events can be
        emitted from then on.
        """
        assert not self._is_open, "a log is opened once"
        self._is_open = True
        self._sinks += listeners
        if not is_writer:
            return self
        # optional reports, then the record
        record, sinks = EventLog(out / "events.jsonl"), self._sinks
        if config.tensorboard:
            sinks.append(plugins.load(plugins.ADAPTERS, "tensorboard")(out / "tensorboard"))
        for name, project in (("wandb", config.wandb), ("trackio", config.trackio)):
            if project is not None:
                adapter = plugins.load(plugins.ADAPTERS, name)
                sinks.append(adapter(project, out, report_id(out), read_settings(out)))
        for sink in self._custom:
            sink.bind({"out": out, "settings": read_settings(out), "run_id": report_id(out)})
            sinks.append(sink)
        self.decide((), out, config)
        if self._console is not None:
            sinks.append(self._console)
        sinks.append(record)  # last, so that a warning about a lost report precedes the end event
        return self

    def emit(self, kind: Kind, **fields: Any) -> None:
        """Send an event to every sink."""
        assert self._is_open, f"an event before the log is opened: {kind}"
        assert kind in KINDS, f"unknown kind of event: {kind}"
        # a record that was deleted is written again first
        for record in [sink for sink in self._sinks if isinstance(sink, EventLog)]:
            if restored := record.restore():
                self.emit("warning", name="log", detail=restored)
        event = redacted_in({"kind": kind, "time": time.time(), **fields})
        for sink in tuple(self._sinks):
            try:
                sink(event)
            except ReportLost as lost:
                self._drop(sink, lost)

    def show(self, step: int, rows: Iterable[ShownSample]) -> None:
        """Send samples of a step to the sinks that take them."""
        sinks = [sink for sink in self._sinks if isinstance(sink, SampleSink)]
        table = [ShownSample(*redacted_in(row)) for row in shown(rows)] if sinks else []
        for sink in sinks:
            try:
                sink.samples(step, table)
            except ReportLost as lost:
                self._drop(cast(Sink, sink), lost)

    def _drop(self, sink: Sink, lost: ReportLost) -> None:
        self._sinks.remove(sink)
        self.emit("warning", name="log", detail=str(lost))
        sink.close()

    def close(self) -> None:
        with ExitStack() as stack:  # closes all, even if one fails
            for sink in self._sinks:
                stack.callback(sink.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
