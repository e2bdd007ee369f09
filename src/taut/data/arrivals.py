"""Rows that arrive while a run trains: of files in a directory that grows, or of an iterable.

    for arrived in FolderRows(source, settle=10.0, position=START): ...

yields rows, and None where there is none now; it ends where the stream does. ``position`` after a row is all that
another process needs to go on with the next one. It has the digest of the rows before it, so rows that are no longer
those that were read are refused, and never trained on in their place.

A file of a directory is taken once it is complete and all files before it, by name, have been taken. It is complete
when its name is that of a data file and it has not changed for ``settle`` seconds; a file with another name, or one
that begins with a dot or ``_``, is still being written. The file ``_SUCCESS`` says that no more files come. A file may
be removed once it is read. One that is written again, or that comes with a name before one that was taken, is a
DataError. Which files were taken is remembered as long as they are in the directory.

Does not know what rows mean, or that they are tokenised (``stream.py``).
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
from taut.data import formats
from taut.data.given_rows import require_json
from taut.data.sources import Source, canonical, fraction_of, open_source
from taut.errors import DataError, TautError, UserCodeError

SUCCESS = "_SUCCESS"
"""The file that says that no more files come, as Hadoop and Spark write it."""
T = TypeVar("T")
ROWS = "rows"
"""What the rows of an iterable are called: ``rows:17``."""


class Position(TypedDict):
    """How far a stream has been read."""

    file: str
    """The file that the last row is from; empty for an iterable, and before the first row."""
    rows: int
    """Rows that were read of this file, or of the iterable."""
    is_whole: bool
    """Whether the file has no more."""
    digest: str
    """Of these rows."""
    state: Any
    """What ``state_dict()`` of the iterable gave after them; None: it has none."""


START: Position = {"file": "", "rows": 0, "is_whole": True, "digest": "", "state": None}


class Taken(TypedDict):
    """The files that were taken, as far as later ones are compared with them."""

    stamps: dict[str, tuple[int, int]]
    """Of those still in the directory: size and time of last change."""
    form: tuple[str, list[str] | None] | None
    """Format and columns of the first; None: there was none yet."""


class Arrived(NamedTuple):
    """A row of a stream."""

    name: str
    """Of its file."""
    number: int
    """Its line or record."""
    record: Any


class Arrivals(Protocol):
    """The rows of a stream after a position."""

    @property
    def position(self) -> Position:
        """After the last row that was yielded."""

    @property
    def taken(self) -> Taken:
        """The files that were taken."""

    def __iter__(self) -> Iterator[Arrived | None]:
        """Rows; None where there is none now."""


def digest_with(digest: str, record: object) -> str:
    """The digest of rows with one more."""
    return hashlib.sha256(digest.encode() + canonical(record)).hexdigest()


class FolderRows:
    """The rows of a directory that grows, of its files in the order of their names."""

    def __init__(
        self, source: Source, settle: float, position: Position = START, taken: Taken | None = None
    ) -> None:
        self.source, self.settle = source, settle
        self.folder = home_path(source.path)
        self.position = position
        self.taken: Taken = taken or {"stamps": {}, "form": None}

    def __iter__(self) -> Iterator[Arrived | None]:
        while True:
            is_last = (self.folder / SUCCESS).exists()  # before the files: it is written after them
            is_idle = True
            for name in self._waiting():
                if not self._is_complete(name):
                    break
                is_idle = False
                yield from self._read(name)
            else:
                if is_last:
                    return
            if is_idle:
                yield None

    def _waiting(self) -> list[str]:
        """The files that are still to be read, by name. Raises DataError where one that was read is another now."""
        if not self.folder.is_dir():
            raise DataError(
                f"data.train: found no directory {self.source.path}; expected one whose files are a stream; make it, "
                "or correct the path"
            )
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
        last, stamps = self.position["file"], self.taken["stamps"]
        is_open = not self.position["is_whole"]
        for name in names:
            if name > last or (is_open and name == last):
                break
            if name not in stamps:
                raise DataError(
                    f"{self._path(name)} came after {self._path(last)} had been taken; expected names that ascend, "
                    "since rows are trained on in the order of names; rename it"
                )
            if self._stamp(name) not in (stamps[name], None):
                raise DataError(
                    f"{self._path(name)} was written again after it had been taken; expected it to stay as it was; "
                    "bring it back, or remove it, and write new rows to a new file"
                )
        present = set(names)
        self.taken["stamps"] = {name: stamps[name] for name in stamps if name in present}
        if is_open and last not in present:
            raise DataError(
                f"{self._path(last)} is gone, and {self.position['rows']:,} of its rows were read; expected it to stay "
                "until it is read; bring it back"
            )
        return [name for name in names if name > last or (is_open and name == last)]

    def _is_complete(self, name: str) -> bool:
        try:
            status = (self.folder / name).stat()
        except FileNotFoundError:  # removed since it was listed
            return False
        return time.time() - max(status.st_mtime, status.st_ctime) >= self.settle

    def _read(self, name: str) -> Iterator[Arrived]:
        """The rows of a file, after those that were read."""
        path = self._path(name)
        opened = open_source(replace(self.source, path=path, share=None))
        self._require_form(name)
        (stamp,) = opened.stamps
        self.taken["stamps"][name] = stamp.size, stamp.modified_ns
        records = opened.records()
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
                yield Arrived(path, number, record)

    def _require_form(self, name: str) -> None:
        """Raise DataError for a file of another format, or with other columns, than the first."""
        columns = formats.columns_of(self.folder / name, self._path(name))
        form = formats.format_of(name), columns
        first = self.taken["form"] = self.taken["form"] or form
        if tuple(first) == form or (first[0] == form[0] and columns is None):
            return
        what = (
            f"format {first[0]}" if first[0] != form[0] else f"columns {', '.join(first[1] or ())}"
        )
        found = form[0] if first[0] != form[0] else ", ".join(columns or ())
        raise DataError(
            f"{self._path(name)} has the {what.split()[0]} {found}; expected the {what} of the first file; write it so"
        )

    def _path(self, name: str) -> str:
        return f"{self.source.path.rstrip('/')}/{name}"

    def _stamp(self, name: str) -> tuple[int, int] | None:
        """Size and time of last change; None: the file was removed since it was listed."""
        try:
            status = (self.folder / name).stat()
        except FileNotFoundError:
            return None
        return status.st_size, status.st_mtime_ns


def _at(name: str, num_rows: int, digest: str, *, is_whole: bool) -> Position:
    return {"file": name, "rows": num_rows, "is_whole": is_whole, "digest": digest, "state": None}


def _next(records: formats.Records) -> tuple[int, Any] | DataError | None:
    """The next record, or its error, which is raised after the rows before it."""
    try:
        return next(records, None)
    except DataError as error:
        return error


class IterableRows:
    """The rows of an iterable.

    To begin after a position it is asked for by ``load_state_dict``, else by ``skip(n)``; else it begins anew, and its
    first rows are read and compared by their digest.
    """

    def __init__(self, iterable: Iterable[Any], position: Position = START) -> None:
        self.taken: Taken = {"stamps": {}, "form": None}
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

    def __iter__(self) -> Iterator[Arrived | None]:
        rows = self._asked(self._rows_after)
        while True:
            try:
                record = self._asked(lambda: next(rows))
            except StopIteration:
                return
            require_json(record, f"{ROWS}:{self._rows + 1} of data.train", "")
            self._rows, self._digest = self._rows + 1, digest_with(self._digest, record)
            yield Arrived(ROWS, self._rows, record)

    def _rows_after(self) -> Iterator[Any]:
        """The rows after the position where reading begins."""
        num_read, state = self._begin["rows"], self._begin["state"]
        rows: Iterator[Any]
        if num_read and state is not None and self._has_state:
            self.iterable.load_state_dict(state)
        elif num_read and hasattr(self.iterable, "skip"):
            self.iterable = self.iterable.skip(num_read)
        elif num_read:
            digest, rows = "", iter(self.iterable)
            for number in range(1, num_read + 1):
                if (record := next(rows, None)) is None:
                    raise DataError(
                        f"data.train: the iterable ends after {number - 1:,} rows, and {num_read:,} were read of it; "
                        "expected the same rows again, or skip(n), or state_dict and load_state_dict"
                    )
                digest = digest_with(digest, record)
            if digest != self._digest:
                raise DataError(
                    f"data.train: the first {num_read:,} rows of the iterable are not those that were read; expected "
                    "the same rows again, or skip(n), or state_dict and load_state_dict"
                )
            return rows
        rows = iter(self.iterable)
        return rows

    def _asked(self, ask: Callable[[], T]) -> T:
        """What the user's code answers. Raises UserCodeError where it fails."""
        try:
            return ask()
        except (StopIteration, TautError):
            raise
        except Exception as error:
            raise UserCodeError(
                f"{ROWS}:{self._rows + 1} of data.train: the iterable raised {type(error).__name__}: "
                f"{' '.join(str(error).split())[:200]}; expected a row; correct it"
            ) from error
