"""The log of a run: one stream of events, written to ``events.jsonl`` and shown where the user likes.

    with RunLog.open(out, run.log) as log:
        log.emit("start", num_steps=100, decisions=[("attention", "reference", "no CUDA device")])
        log.emit("step", step=1, loss=2.3, ...)

Every sink gets the same events, and those with a method ``samples`` also texts of some samples. A report that can no
longer be written (console, TensorBoard, W&B, trackio, the user's own) does not end the run: it is dropped, with a
warning event to the others. ``events.jsonl`` is the record: a run that cannot write it ends, and one whose file is
deleted writes it again, with a warning. No sink gets a secret of a URL, nor what a setting calls a key or a password.

No torch here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Protocol, Self, cast

from pydantic import Field

from taut.config import configclass
from taut.errors import ConfigError, redacted_in
from taut.extras import require
from taut.train.log.events import KINDS, Event, EventLog, Kind, ReportLost, all_events, read_events
from taut.train.log.own import OwnSink
from taut.train.log.samples import SampleSink, ShownSample, shown
from taut.train.run_dir import read_settings, report_id


@configclass
class TokenRecordConfig:
    """Which samples are recorded token by token, in out/tokens."""

    every: Annotated[int, Field(ge=0)] = 50
    """Steps between two records; those of the first and the last step, and of steps in which a monitor warns or stops
    the run, come in addition. 0: only those."""
    samples: Annotated[int, Field(ge=0)] = 8
    """Samples of a recorded step: half of them those with the lowest mean logprob, the others drawn. 0: none."""
    max_mib: Annotated[int, Field(ge=1)] = 256
    """Space that they may take on each rank. As it fills, steps are recorded more seldom."""


@configclass
class RolloutRecordConfig:
    """The record of all rollouts, in out/rollouts: prompts, tokens, logprobs, advantages and rewards."""

    max_gib: Annotated[float, Field(ge=0)] = 16.0
    """Space that they may take; later rollouts are then not recorded, and a warning says so. 0: records none."""


@configclass
class LogConfig:
    """Reports in addition to ``events.jsonl``, which is always written."""

    console: bool = True
    """Report on the terminal: decisions, progress, warnings, a summary."""
    every: Annotated[int, Field(ge=1)] = 1
    """Steps between progress lines where the output is no terminal."""
    tensorboard: bool = False
    """Write curves and samples for TensorBoard to out/tensorboard; needs the extra tensorboard."""
    wandb: str | None = None
    """Weights & Biases project to report to; needs the extra wandb."""
    utilisation_seconds: Annotated[float, Field(ge=0, le=86_400)] = 15.0
    """Seconds between two readings of how busy processors, disk and GPU are (the event utilisation). 0: none."""
    trackio: str | None = None
    """trackio project to report to; needs the extra trackio."""
    sinks: list[str] = field(default_factory=list)
    """Reports of your own, FILE.py:Class each (docs/reports.md)."""
    tokens: TokenRecordConfig = TokenRecordConfig()
    rollouts: RolloutRecordConfig = RolloutRecordConfig()

    def __post_init__(self) -> None:
        if self.tensorboard:
            require("tensorboard", "log.tensorboard=true")
        if self.wandb is not None:
            require("wandb", "log.wandb")
        if self.trackio is not None:
            require("trackio", "log.trackio")
        for spec in self.sinks:
            file, colon, name = spec.rpartition(":")
            if not (colon and file.endswith(".py") and name.isidentifier()):
                raise ConfigError(f"log.sinks has {spec!r}; expected FILE.py:Class; correct it")


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
    """Takes events. An optional one raises ReportLost, once, when it can no longer be written."""

    def __call__(self, event: Event) -> None: ...

    def close(self) -> None: ...


class RunLog:
    """Passes every event to every sink."""

    def __init__(self, sinks: Sequence[Sink] | None = None, own: Sequence[OwnSink] = ()) -> None:
        """``own``: sinks of the user's, which ``open`` adds on the rank that writes."""
        self._is_open = sinks is not None
        self._sinks = list(sinks or [])
        self._own = own

    def open(
        self, out: Path, config: LogConfig, *, is_writer: bool = True, listener: Sink | None = None
    ) -> Self:
        """Open the sinks of a run in ``out``; on ranks that do not write ``listener`` alone. No event can be emitted
        before.
        """
        assert not self._is_open, "a log is opened once"
        self._is_open = True
        if listener is not None:
            self._sinks.append(listener)
        if not is_writer:
            return self
        record, sinks = EventLog(out / "events.jsonl"), self._sinks
        if config.tensorboard:
            from taut.train.log.tensorboard import TensorBoard

            sinks.append(TensorBoard(out / "tensorboard"))
        if config.wandb is not None:
            from taut.train.log.wandb import WeightsAndBiases

            sinks.append(WeightsAndBiases(config.wandb, out, report_id(out), read_settings(out)))
        if config.trackio is not None:
            from taut.train.log.trackio import Trackio

            sinks.append(Trackio(config.trackio, out, report_id(out), read_settings(out)))
        for own in self._own:
            own.bind({"out": out, "settings": read_settings(out), "run_id": report_id(out)})
            sinks.append(own)
        if config.console:
            from taut.train.log.console import ConsoleReport

            sinks.append(ConsoleReport(config.every, out=out))
        sinks.append(record)  # last, so that a warning about a lost report precedes the end event
        return self

    def emit(self, kind: Kind, **fields: Any) -> None:
        """Send an event to every sink."""
        assert self._is_open, f"an event before the log is opened: {kind}"
        assert kind in KINDS, f"unknown kind of event: {kind}"
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
        """Show samples of a step to the sinks that take them."""
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
