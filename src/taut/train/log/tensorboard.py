"""Numbers of a run as TensorBoard scalars, through TensorBoard's own writer.

Writes ``train/*`` at steps and ``eval/*`` at evaluations. A resume tells TensorBoard to forget the steps after it.
Imported by ``taut.train.log`` where it is asked for; it loads tensorboard, never torch.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event as Record
from tensorboard.compat.proto.event_pb2 import SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from taut.errors import OutputError
from taut.train.log.events import Event, ReportLost
from taut.train.log.scalars import scalars


class TensorBoard:
    """A sink that writes scalars to a directory."""

    def __init__(self, directory: Path) -> None:
        try:
            self._writer = EventFileWriter(str(directory))
        except OSError as error:
            raise OutputError(
                f"cannot write {directory}: {error.strerror}; expected a place that may be written; "
                "choose another out, or log.tensorboard=false"
            ) from error

    def __call__(self, event: Event) -> None:
        try:
            self._write(event)
            if event["kind"] == "end":
                self._writer.flush()
        except OSError as error:
            raise ReportLost(f"TensorBoard's file cannot be written: {error.strerror}") from error

    def _write(self, event: Event) -> None:
        if event["kind"] == "resume":
            forget = SessionLog(status=SessionLog.START)
            step = event["from_step"] + 1
            self._writer.add_event(Record(wall_time=event["time"], step=step, session_log=forget))
        values = [
            Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(event).items()
        ]
        if values:
            summary = Summary(value=values)
            self._writer.add_event(
                Record(wall_time=event["time"], step=event["step"], summary=summary)
            )

    def close(self) -> None:
        with suppress(OSError):  # reported when the event came
            self._writer.close()
