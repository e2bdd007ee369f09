"""Rows that arrive while a run trains: from files in a directory that grows, or from an iterable.

    for row in FolderRows(source, settle=10.0, position=START): ...

yields rows, and None where there is none now; it ends where the stream does. ``position`` after a row is all that
another process needs to continue with the next one. It has the digest of the rows before it: where those have changed,
the stream is refused.

A file of a directory is read once it is complete and all files before it, by name, have been read. It is complete when
its name is that of a data file and it has not changed for ``settle`` seconds; a file with another name, or with a name
that begins with a dot or ``_``, is still being written. The file ``_SUCCESS`` marks the end of the stream. A file may
be removed once it is read. A file that is written again, or that comes with a name before one that was read, is a
DataError; files that were read are remembered as long as they are in the directory.

Does not know what rows mean, or how they are tokenized (``stream.py``).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from typing_extensions import TypedDict

from taut.config import home_path
from taut.data.read import formats
from taut.data.read.in_memory import require_json
from taut.data.read.sources import canonical, fraction_of, open_source
from taut.data.settings import Source
from taut.errors import DataError, TautError, UserCodeError

SUCCESS = "_SUCCESS"
"""File that marks the end of the stream, as Hadoop and Spark write it."""
T = TypeVar("T")
ROWS = "rows"
"""Name of the rows of an iterable, as in ``rows:17``."""


class Position(TypedDict):
    """A position in a stream, after a row."""

    file: str
    """File of the last row; empty for an iterable, and before the first row."""
    rows: int
    """Number of rows that were read of this file, or of the iterable."""
    is_whole: bool
    """Whether the file has no more."""
    digest: str
    """Digest of these rows."""
    state: Any
    """Value of ``state_dict()`` of the iterable after them; None if it has no such method."""


START: Position = {"file": "", "rows": 0, "is_whole": True, "digest": "", "state": None}


class SeenFiles(TypedDict):
    """Files that were read, as far as later ones are compared with them."""

    stamps: dict[str, tuple[int, int]]
    """Size and time of last change of each that is still in the directory."""
    form: tuple[str, list[str] | None] | None
    """Format and columns of the first file; None before it."""


class StreamRow(NamedTuple):
    """A row of a stream."""

    name: str
    """Name of its file."""
    number: int
    """Line or record in the file."""
    record: Any


class StreamReader(Protocol):
    """Reads the rows of a stream after a position."""

    @property
    def position(self) -> Position:
        """The position after the last row that was yielded."""

    @property
    def seen(self) -> SeenFiles:
        """The files that were read."""

    def __iter__(self) -> Iterator[StreamRow | None]:
        """Rows; None where there is none now."""


def digest_with(digest: str, record: object) -> str:
    """The digest of rows, extended by one more."""
    return hashlib.sha256(digest.encode() + canonical(record)).hexdigest()


class FolderRows:
    """Reads the files of a directory that grows, in the order of their names."""

    def __init__(
        self,
        source: Source,
        settle: float,
        position: Position = START,
        seen: SeenFiles | None = None,
    ) -> None:
        self.source, self.settle = source, settle
        self.folder = home_path(source.path)
        self.position = position
        self.seen: SeenFiles = seen or {"stamps": {}, "form": None}

    def __iter__(self) -> Iterator[StreamRow | None]:
        while True:
            is_last = (self.folder / SUCCESS).exists()  # before the files: it is written after them
            is_idle = True
            for name in self._waiting():
                try:
                    status = (self.folder / name).stat()
                except FileNotFoundError:  # removed since it was listed
                    break
                if time.time() - max(status.st_mtime, status.st_ctime) < self.settle:
                    break
                is_idle = False
                yield from self._read(name)
            else:
                if is_last:
                    return
            if is_idle:
                yield None

    def _waiting(self) -> list[str]:
        """Names of the files to read, in order. Raises DataError where a file that was read has changed."""
        if not self.folder.is_dir():
            raise DataError(
                f"data.train: found no directory {self.source.path}; expected one whose files are a stream; make it, "
                "or correct the path"
            )
        # Names that do not begin with a dot or _ and end as those of data files.
        names = []
        for folder, folders, found in os.walk(self.folder):
            folders[:] = [name for name in folders if name[0] not in "._"]
            inside = [Path(folder, name).relative_to(self.folder).as_posix() for name in found]
            names += [
                name
                for name in inside
                if formats.suffix_of(name) is not None and Path(name).name[0] not in "._"
            ]
        names.sort()
        # Those before the position were read, and have to be as they were.
        last, stamps = self.position["file"], self.seen["stamps"]
        is_open = not self.position["is_whole"]
        for name in names:
            if name > last or (is_open and name == last):
                break
            fault = ""
            if name not in stamps:
                fault = (
                    f"came after {self._path(last)} had been taken; expected names that ascend, since rows are trained "
                    "on in the order of names; rename it"
                )
            elif self._stamp(name) not in (stamps[name], None):
                fault = (
                    "was written again after it had been taken; expected it to stay as it was; bring it back, or "
                    "remove it, and write new rows to a new file"
                )
            if fault:
                raise DataError(f"{self._path(name)} {fault}")
        present = set(names)
        self.seen["stamps"] = {name: stamps[name] for name in stamps if name in present}
        if is_open and last not in present:
            raise DataError(
                f"{self._path(last)} is gone, and {self.position['rows']:,} of its rows were read; expected it to stay "
                "until it is read; bring it back"
            )
        return [name for name in names if name > last or (is_open and name == last)]

    def _read(self, name: str) -> Iterator[StreamRow]:
        """The remaining rows of a file."""
        path = self._path(name)
        opened = open_source(replace(self.source, path=path, share=None))
        self._require_form(name)
        (stamp,) = opened.stamps
        self.seen["stamps"][name] = stamp.size, stamp.modified_ns
        records = opened.read_records()
        # Skip the rows that were read, if they are still the same.
        num_rows, digest = 0, ""
        if self.position["file"] == name:
            for _ in range(self.position["rows"]):
                if (read := next(records, None)) is None:
                    break
                num_rows, digest = num_rows + 1, digest_with(digest, read[1])
            if (num_rows, digest) != (self.position["rows"], self.position["digest"]):
                raise DataError(
                    f"{path}: its first {self.position['rows']:,} rows are not those that were read; expected a file "
                    "that stays as it is; bring it back"
                )
        # Read one row ahead: the position after the last row says that the file is whole.
        upcoming = _next(records)
        if upcoming is None:
            self.position = _at(name, num_rows, digest, is_whole=True)
        while upcoming is not None:
            if isinstance(upcoming, DataError):
                raise upcoming
            number, record = upcoming
            upcoming = _next(records)
            num_rows, digest = num_rows + 1, digest_with(digest, record)
            self.position = _at(name, num_rows, digest, is_whole=upcoming is None)
            share = self.source.share
            if share is None or share[0] <= fraction_of(record) < share[1]:
                yield StreamRow(path, number, record)

    def _require_form(self, name: str) -> None:
        """Raise DataError for a file with another format, or other columns, than the first."""
        columns = formats.columns_of(self.folder / name, self._path(name))
        form = formats.format_of(name), columns
        first = self.seen["form"] = self.seen["form"] or form
        if tuple(first) == form or (first[0] == form[0] and columns is None):
            return
        what, found, expected = "format", form[0], first[0]
        if found == expected:
            what, found = "columns", ", ".join(columns or ())
            expected = ", ".join(first[1] or ())
        raise DataError(
            f"{self._path(name)} has the {what} {found}; expected the {what} {expected} of the first file; write it so"
        )

    def _path(self, name: str) -> str:
        return f"{self.source.path.rstrip('/')}/{name}"

    def _stamp(self, name: str) -> tuple[int, int] | None:
        """Size and time of last change; None if the file was removed since it was listed."""
        try:
            status = (self.folder / name).stat()
        except FileNotFoundError:
            return None
        return status.st_size, status.st_mtime_ns


def _at(name: str, num_rows: int, digest: str, *, is_whole: bool) -> Position:
    return {"file": name, "rows": num_rows, "is_whole": is_whole, "digest": digest, "state": None}


def _next(records: formats.Records) -> tuple[int, Any] | DataError | None:
    """The next record or its error, which is raised after the rows before it."""
    try:
        return next(records, None)
    except DataError as error:
        return error


class IterableRows:
    """Reads the rows of an iterable.

    It is moved to a position by ``load_state_dict``, else by ``skip(n)``; else its first rows are read again, and
    compared by their digest.
    """

    def __init__(self, iterable: Iterable[Any], position: Position = START) -> None:
        self.seen: SeenFiles = {"stamps": {}, "form": None}
        self.iterable: Any = iterable
        self._begin, self._rows, self._digest = position, position["rows"], position["digest"]

    @property
    def position(self) -> Position:
        state = None
        if self._has_state:
            state = self._asked(self.iterable.state_dict)
            try:
                json.dumps(state)
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"data.train: state_dict() of the iterable holds what JSON does not: {error}; expected text, "
                    "numbers, lists and dicts with text as keys; convert it there and back"
                ) from None
        return {
            "file": "",
            "rows": self._rows,
            "is_whole": True,
            "digest": self._digest,
            "state": state,
        }

    @property
    def _has_state(self) -> bool:
        return all(hasattr(self.iterable, name) for name in ("state_dict", "load_state_dict"))

    def __iter__(self) -> Iterator[StreamRow | None]:
        rows = self._asked(self._rows_after)
        while True:
            try:
                record = self._asked(lambda: next(rows))
            except StopIteration:
                return
            require_json(record, f"{ROWS}:{self._rows + 1} of data.train", "")
            self._rows, self._digest = self._rows + 1, digest_with(self._digest, record)
            yield StreamRow(ROWS, self._rows, record)

    def _rows_after(self) -> Iterator[Any]:
        """The rows after the position at which reading begins."""
        num_read, state = self._begin["rows"], self._begin["state"]
        rows: Iterator[Any]
        if num_read and state is not None and self._has_state:
            self.iterable.load_state_dict(state)
        elif num_read and hasattr(self.iterable, "skip"):
            self.iterable = self.iterable.skip(num_read)
        elif num_read:
            # Read the first rows again, and compare them.
            number, digest, rows = 0, "", iter(self.iterable)
            while number < num_read and (record := next(rows, None)) is not None:
                number, digest = number + 1, digest_with(digest, record)
            fault = ""
            if number < num_read:
                fault = f"the iterable ends after {number:,} rows, and {num_read:,} were read of it"
            elif digest != self._digest:
                fault = f"the first {num_read:,} rows of the iterable are not those that were read"
            if fault:
                raise DataError(
                    f"data.train: {fault}; expected the same rows again, or skip(n), or state_dict and load_state_dict"
                )
            return rows
        rows = iter(self.iterable)
        return rows

    def _asked(self, ask: Callable[[], T]) -> T:
        """Call the user's code. Raises UserCodeError where it fails."""
        try:
            return ask()
        except (StopIteration, TautError):
            raise
        except Exception as error:
            raise UserCodeError(
                f"{ROWS}:{self._rows + 1} of data.train: the iterable raised {type(error).__name__}: "
                f"{' '.join(str(error).split())[:200]}; expected a row; correct it"
            ) from error
