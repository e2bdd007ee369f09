"""TensorBoard, through its own writer: scalars ``train/*`` at steps, ``eval/*`` at evaluations, and tables of samples.

A resume tells TensorBoard to discard the steps after it. Loads tensorboard, never torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event as Record
from tensorboard.compat.proto.event_pb2 import SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from taut.errors import OutputError
from taut.train.log.events import Event, ReportLost, scalars
from taut.train.log.samples import COLUMNS, ShownSample

TEXT = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
"""Metadata with which TensorBoard's text view shows a tensor of strings as a table."""


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
            if event["kind"] == "resume":
                discard = SessionLog(status=SessionLog.START)
                record = Record(
                    wall_time=event["time"], step=event["from_step"] + 1, session_log=discard
                )
                self._writer.add_event(record)
            values = [
                Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(event).items()
            ]
            if values:
                record = Record(
                    wall_time=event["time"], step=event["step"], summary=Summary(value=values)
                )
                self._writer.add_event(record)
            if event["kind"] == "end":
                self._writer.flush()
        except OSError as error:
            raise ReportLost(f"TensorBoard's file cannot be written: {error.strerror}") from error

    def samples(self, step: int, rows: list[ShownSample]) -> None:
        """A table of texts, at the step."""
        table = as_markdown(rows)
        shape = [TensorShapeProto.Dim(size=size) for size in (len(table), len(COLUMNS))]
        tensor = TensorProto(
            dtype=DT_STRING,
            tensor_shape=TensorShapeProto(dim=shape),
            string_val=[
                cell.encode("utf-8", "backslashreplace") for cells in table for cell in cells
            ],
        )
        value = Summary.Value(tag="samples", metadata=TEXT, tensor=tensor)
        record = Record(wall_time=time.time(), step=step, summary=Summary(value=[value]))
        try:
            self._writer.add_event(record)
        except OSError as error:
            raise ReportLost(f"TensorBoard's file cannot be written: {error.strerror}") from error

    def close(self) -> None:
        with suppress(OSError):  # reported when the event came
            self._writer.close()


def as_markdown(rows: Iterable[ShownSample]) -> list[list[str]]:
    """Headings and rows of cells for viewers that read Markdown; indented texts are shown unchanged."""
    return [list(COLUMNS), *([_cell(value) for value in row] for row in rows)]


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "\n".join(f"    {line}" for line in str(value).splitlines()) or ""
