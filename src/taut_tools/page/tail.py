"""Read ``events.jsonl`` while it is written."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from taut.errors import DataError
from taut.io import files
from taut.train.log.events import Event, parse_event, unreadable

LONG = ("ids", "logp", "advantage", "sample_nll", "sample_ids")
"""Fields with an entry for each token or sample, which readers of the whole file skip."""
LONG_KINDS = (b'{"kind": "step"', b'{"kind": "rollout"')
_LONG_LIST = re.compile(rb'"(?:%s)": \[' % "|".join(LONG).encode())


class EventTail:
    """Reads a log while it is written: each ``read`` continues where the last one ended.

    Half a line at the end is left for the next ``read``. A file that was written again or replaced is read from its
    beginning, which ``num_begun`` counts.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_begun = 0
        """How often the file was read from its beginning."""
        self._inode, self._offset, self._num_lines = 0, 0, 0

    def read(self) -> Iterator[tuple[int, Event]]:
        """Read the appended lines: the offset of each, and its event without the lists of ``LONG``. Also events that a
        resume revokes (``stands``). Raises DataError for a line that is no event.
        """
        try:
            with files.open_regular(self.path) as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self.num_begun += 1
                    self._inode, self._offset, self._num_lines = status.st_ino, 0, 0
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    offset = self._offset
                    self._offset += len(line)
                    self._num_lines += 1
                    yield offset, _parse_short(f"{self.path}:{self._num_lines}", line)
        except OSError as error:
            raise unreadable(self.path, error) from error


def event_at(path: Path, offset: int) -> Event:
    """Read the event whose line begins at a byte."""
    try:
        with files.open_regular(path) as file:
            file.seek(offset)
            return parse_event(f"{path}, byte {offset}", file.readline())
    except OSError as error:
        raise unreadable(path, error) from error


def _parse_short(place: str, line: bytes) -> Event:
    """Parse an event; of steps and rollouts with the lists of ``LONG`` empty, which take longer to parse than to
    skip.
    """
    if not line.startswith(LONG_KINDS):
        return parse_event(place, line)
    parts, begin = [], 0
    for found in _LONG_LIST.finditer(line):
        end = _end_of_list(line, found.end())
        if end is not None and found.end() > begin:
            parts.append(line[begin : found.end()])
            begin = end
    try:
        return parse_event(place, b"".join([*parts, line[begin:]]))
    except DataError:
        return parse_event(place, line)  # lists of another kind


def _end_of_list(line: bytes, begin: int) -> int | None:
    """Position of the bracket that ends a list of numbers or texts, whose first entry begins at ``begin``."""
    if line[begin : begin + 1] != b'"':
        end = line.find(b"]", begin)
        return None if end < 0 else end
    quote = begin
    while (quote := line.find(b'"]', quote + 1)) > 0:
        before = line[begin:quote]
        if (len(before) - len(before.rstrip(b"\\"))) % 2 == 0:  # the quote is not escaped
            return quote + 1
    return None
