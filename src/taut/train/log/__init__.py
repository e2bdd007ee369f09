"""What is reported of a run, and where to."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Protocol, Self

from pydantic import Field

from taut.config import configclass
from taut.errors import ConfigError, install_extra, redacted_in
from taut.train.log.events import KINDS, Event, EventLog, Kind, ReportLost, all_events, read_events


@configclass
class LogConfig:
    """Where a run's events go besides ``events.jsonl``, which is always written."""

    console: bool = True
    """Report on the terminal: the decisions taken, progress, warnings, a summary."""
    every: Annotated[int, Field(ge=1)] = 1
    """Steps between two lines of progress where the output is no terminal."""
    tensorboard: bool = False
    """Write TensorBoard scalars to out/tensorboard."""
    wandb: str | None = None
    """Weights & Biases project to report to; needs the extra wandb."""

    def __post_init__(self) -> None:
        if self.wandb is not None and find_spec("wandb") is None:
            raise ConfigError(
                f"found log.wandb={self.wandb}, but the package wandb is not installed; "
                f"expected it beside taut; {install_extra('wandb')}; or leave log.wandb out"
            )


# --------------------------------------------------------------------------------------------------
# What happened in a run: one stream of events, written to ``events.jsonl`` and shown where the user likes.
#
#     with RunLog.open(out, run.log) as log:
#         log.emit("start", num_steps=100, decisions=[("attention", "reference", "no CUDA device")])
#         log.emit("step", step=1, loss=2.3, ...)
#
# Every sink is given the same events. A report that can no longer be written (console, TensorBoard, W&B) does not end
# the run: it is dropped, with a warning event to the others. ``events.jsonl`` is the record; a run that cannot write
# it ends, and one that finds it deleted writes it again, with a warning. Fields the console knows: ``num_steps`` and
# ``decisions`` of a start; the contract's fields of a step and ``memory_bytes``; ``name``, ``outcome``, ``value`` and
# ``detail`` of checks and warnings; ``from_step`` of a resume; ``tokens``, ``tokens_before`` and ``reason`` of a
# budget; ``path`` of a checkpoint; the rest is shown as it comes.
#
# No torch here. May be imported by run, loop and what is above them.

__all__ = [
    "Event",
    "EventLog",
    "Kind",
    "LogConfig",
    "ReportLost",
    "RunLog",
    "Sink",
    "all_events",
    "read_events",
]


class Sink(Protocol):
    """Takes events. Raises ReportLost, once, where the run can do without it and it cannot be written."""

    def __call__(self, event: Event) -> None: ...

    def close(self) -> None: ...


class RunLog:
    """Hands every event to every sink."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)
        self._record = next((sink for sink in sinks if isinstance(sink, EventLog)), None)

    @classmethod
    def open(cls, out: Path, config: LogConfig, *, is_writer: bool = True) -> Self:
        """The sinks of a run that is written to ``out``; none on ranks that do not write."""
        if not is_writer:
            return cls([])
        record = EventLog(out / "events.jsonl")
        sinks: list[Sink] = []
        if config.tensorboard:
            from taut.train.log.tensorboard import TensorBoard

            sinks.append(TensorBoard(out / "tensorboard"))
        if config.wandb is not None:
            from taut.train.log.wandb import WeightsAndBiases

            sinks.append(WeightsAndBiases(config.wandb, out))
        if config.console:
            from taut.train.log.console import ConsoleReport

            sinks.append(ConsoleReport(config.every))
        return cls(
            [*sinks, record]
        )  # last, so that a warning about a report precedes the end of the run

    def emit(self, kind: Kind, **fields: Any) -> None:
        """Tell every sink that something happened."""
        assert kind in KINDS, f"unknown kind of event: {kind}"
        restored = None if self._record is None else self._record.restore()
        if restored is not None:
            self.emit("warning", name="log", detail=restored)
        event = redacted_in({"kind": kind, "time": time.time(), **fields})
        for sink in tuple(self._sinks):
            try:
                sink(event)
            except ReportLost as lost:
                self._sinks.remove(sink)
                self.emit("warning", name="log", detail=str(lost))
                sink.close()

    def close(self) -> None:
        with ExitStack() as stack:  # all of them, whichever fails
            for sink in self._sinks:
                stack.callback(sink.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
