"""The output directory of a run: what is where, who may write to it, and what state it is in.

    out/resolved.json    the configuration in force, decisions included; its presence makes a directory a run
    out/events.jsonl     what happened
    out/checkpoints/     training state: step-000200/ and so on, and ``latest``, a text file that names the newest
    out/model/           the result, in Hugging Face format; with LoRA also out/adapter/, or that alone
    out/best/            the best model so far, where asked for
    out/.lock            locked by the kernel while a process writes to the run; nothing if no process has it

``require_usable`` only looks, so that it can be called before anything is loaded; ``claim`` writes. A checkpoint is
complete if it has a name of its own: it is written under another and renamed (taut/train/checkpoint.py).

No torch here. May be imported by checkpoint and what is above it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import IO, Annotated, Any, Self

import pydantic
from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from taut.config import configclass, first_problem, home_path
from taut.errors import OutputError
from taut.io import files

MARK = "resolved.json"
"""The file by which a directory is known to be a run of taut's."""
EVENTS = "events.jsonl"
CHECKPOINTS = "checkpoints"
LATEST = "latest"
"""In checkpoints/: names the newest complete one."""
META = "meta.json"
"""In a checkpoint: what it is of."""
MODEL, ADAPTER, BEST, CRITIC = "model", "adapter", "best", "critic"
LOCK = ".lock"
LOOK, LOOKS = 0.01, 10
"""Seconds that looking who has the lock may take, and how often one who wants it waits so long."""
HELD = (errno.EWOULDBLOCK, errno.EACCES)
"""What the system says of a lock that another process has."""
WRITTEN = (MODEL, ADAPTER, BEST, CRITIC, CHECKPOINTS, EVENTS, "tensorboard", "wandb", MARK)
"""What a run writes, and so what ``overwrite`` removes: the mark last, so that what a kill leaves is still a run."""


@configclass
class SaveConfig:
    """What a run saves when it ends."""

    merged: bool = True
    """Merge a LoRA adapter and save the whole model in out/model, next to the adapter in out/adapter. false: save only
    the adapter, in out/adapter (and out/best); `taut merge` makes the model later."""

    @property
    def result(self) -> str:
        """The directory in ``out`` that a finished run has."""
        return MODEL if self.merged else ADAPTER


def require_usable(out: Path, *, resume: bool, overwrite: bool, inputs: Sequence[str] = ()) -> None:
    """Raise OutputError unless the run may be written to ``out``. Writes nothing.

    ``inputs``: what the run reads; overwriting must not delete it.
    """
    if resume and overwrite:
        raise OutputError("resume=true and overwrite=true contradict each other; keep one")
    if out.exists() and not out.is_dir():
        raise OutputError(f"out={out} is a file; expected a directory; name another")
    _require_writable(out)
    if not out.is_dir() or all(map(_is_of_no_account, out.iterdir())):
        return
    if (overwrite or resume) and not (out / MARK).is_file():
        raise OutputError(
            f"out={out} holds files that are not a taut run (no {MARK}); "
            f"{'overwrite=true deletes' if overwrite else 'resume=true goes on with'} only runs; "
            "name another directory"
        )
    for path in inputs if overwrite else ():
        if _would_go(home_path(path).resolve(), out.resolve()):
            raise OutputError(
                f"overwrite=true would delete {path}, which this run reads and which lies in out={out}; "
                "name another out"
            )
    if not (resume or overwrite):
        raise OutputError(
            f"out={out} exists and is not empty; name another directory, or say resume=true to go on or "
            "overwrite=true to replace it"
        )


def claim(out: Path, resolved: Mapping[str, Any], *, overwrite: bool) -> None:
    """Make the directory, an overwritten run's files gone, and write the configuration into it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        files.clear_leftovers(out, WRITTEN)
        for name in WRITTEN if overwrite else ():
            _remove(out / name)
        files.write_text(out / MARK, json.dumps(resolved, indent=1) + "\n")
    except OSError as error:
        raise OutputError(
            f"out={out} cannot be written: {error.strerror}; see to that, or name another"
        ) from error


def _is_date(text: str) -> str:
    date.fromisoformat(text)
    return text


class _Identity(TypedDict):
    """As far as a resume relies on it."""

    __pydantic_config__ = pydantic.ConfigDict(extra="allow")  # type: ignore[misc]  # pydantic's way
    config: dict[str, Any]


class _Resolved(TypedDict, total=False):
    """What ``claim`` writes, as far as it is read back by key. ``method`` and ``config`` are checked by taut resume."""

    __pydantic_config__ = pydantic.ConfigDict(extra="allow")  # type: ignore[misc]  # pydantic's way
    num_steps: Annotated[int, Field(ge=0)]
    day: Annotated[str, AfterValidator(_is_date)]
    identity: _Identity


def read_resolved(out: Path) -> dict[str, Any]:
    """What ``claim`` wrote. Raises OutputError where ``out`` is no run, or where it cannot be read."""
    path = out / MARK
    found: Any
    try:
        found = files.read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise OutputError(
            f"{out} is not a taut run (no {MARK}); expected the out of one; 'taut runs DIR' lists those in DIR"
        ) from None
    except OSError as error:
        raise OutputError(
            f"{path} cannot be read: {error.strerror}; expected what the run wrote; see to its permissions"
        ) from error
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise OutputError(
            f"{path} is damaged: it is no JSON object; expected what the run wrote; bring it back from a copy"
        )
    try:
        return dict(pydantic.TypeAdapter(_Resolved).validate_python(found, strict=True))
    except pydantic.ValidationError as error:
        raise OutputError(
            f"{path} is damaged: {first_problem(error)}; expected what the run wrote; bring it back from a copy"
        ) from error


class Lock:
    """Keeps other processes out of a run, from ``take`` until the block ends or the process does, however it ends."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.trouble: str | None = None
        """Why other processes are not kept out, if they are not: not every file system can lock."""
        self._file: IO[str] | None = None

    @property
    def is_taken(self) -> bool:
        return self._file is not None

    def take(self) -> None:
        """Take the lock, unless it is taken. Raises OutputError where another process has it."""
        if self.is_taken:
            return
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            number = files.open_descriptor(self.out / LOCK, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            self._file = os.fdopen(number, "a+", encoding="utf-8")
        except OSError as error:
            raise OutputError(
                f"out={self.out} cannot be written: {LOCK}: {error.strerror}; see to that, or name another"
            ) from error
        try:
            _lock(self._file)
        except OSError as error:
            if error.errno in HELD:
                found = _owner(self._file)
                self._file.close()
                self._file = None
                raise OutputError(
                    f"out={self.out} is being written by {found}; expected no other run in it; wait for that one, "
                    "stop it, or name another out"
                ) from None
            self.trouble = f"{self.out} cannot be locked ({error.strerror}): a second run in it would not be noticed"
        try:
            _sign(self._file, f"process {os.getpid()} on {socket.gethostname()}\n")
        except OSError as error:
            raise OutputError(
                f"out={self.out} cannot be written: {error.strerror}; free some room, or name another"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with suppress(OSError):  # the name says nothing once the lock is gone
                _sign(self._file, "")
            self._file.close()


def owner(out: Path) -> str | None:
    """Which process is writing to the run right now, as ``process 12 on host``; None where there is none."""
    try:
        file = os.fdopen(files.open_descriptor(out / LOCK, os.O_RDONLY), encoding="utf-8")
    except OSError:
        return None
    with file:
        try:  # shared, so that those who look do not take each other for a writer
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return _owner(file) if error.errno in HELD else None
    return None


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    found = [path.parent for path in folder.glob(f"step-*/{META}")]
    named = [path for path in found if re.fullmatch(r"step-\d{6,}", path.name)]
    return sorted(named, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was taken, by its name."""
    return int(checkpoint.name.removeprefix("step-"))


def _lock(file: IO[str]) -> None:
    """Lock a file for this process alone. Somebody who only looks (``owner``) is waited for."""
    for left in reversed(range(LOOKS)):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in HELD or not left:
                raise
        time.sleep(LOOK)


def _sign(file: IO[str], text: str) -> None:
    file.truncate(0)
    os.write(file.fileno(), text.encode())  # past Python's buffer: what fails is not tried again


def _owner(file: IO[str]) -> str:
    file.seek(0)
    return file.read().strip() or "another process"


def _would_go(path: Path, out: Path) -> bool:
    """Whether overwriting ``out`` would delete ``path`` or something in it. Files of others in ``out`` stay."""
    return any(path == out or path.is_relative_to(out / name) for name in WRITTEN)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        files.remove_directory(path)
    else:
        path.unlink(missing_ok=True)


def _is_of_no_account(path: Path) -> bool:
    """What a run that was killed as it began leaves."""
    return path.name == LOCK or files.is_leftover(path, WRITTEN)


def _require_writable(out: Path) -> None:
    place = out.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise OutputError(f"out={out} cannot be made: {place} is a file; name another directory")
    if not os.access(place, os.W_OK | os.X_OK):
        raise OutputError(f"out={out} cannot be written: no permission in {place}; name another")
