"""The output directory of a run: its files, its lock, and whether a run may use it.

    out/resolved.json    the resolved configuration with all decisions; its presence makes a directory a run
    out/events.jsonl     the log of events
    out/checkpoints/     training state: step-000200/ and so on, and ``latest``, a text file with the newest one's name
    out/model/           the result in Hugging Face format; with LoRA also out/adapter/, or that alone
    out/model.unproven/  a complete result that could not be compared with the model in training; see the error
    out/best/            the best model so far, with eval.best
    out/tokens/          recorded tokens of some samples (taut/train/recorder.py)
    out/rollouts/        recorded trajectories
    out/report_id        id of the run in reports outside of ``out``
    out/.lock            locked by the kernel while a process writes to the run

``require_usable`` only reads, so that it can run before anything is loaded; ``claim`` writes. A checkpoint with its
final name is complete, since it is written under another name and renamed (taut/train/checkpoint.py).

No torch here.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import IO, Annotated, Any, Self

import pydantic
from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from taut.config import first_problem, home_path, user_path
from taut.errors import ConfigError, OutputError, redacted_in
from taut.io import files

MARK = "resolved.json"
"""The file that marks a directory as a run of taut."""
EVENTS = "events.jsonl"
CHECKPOINTS = "checkpoints"
LATEST = "latest"
"""In checkpoints/: the name of the newest complete one."""
META = "meta.json"
"""In a checkpoint: everything but the tensors."""
MODEL, ADAPTER, BEST, CRITIC = "model", "adapter", "best", "critic"
UNPROVEN = "model.unproven"
BEST_FILE = "best.json"
TOKENS, ROLLOUTS = "tokens", "rollouts"
VOCABULARY = "vocabulary.parquet"
"""In out/tokens: the bytes of each token, in the order of their ids."""
FINISHED = ("finished", "learned_nothing")
"""Outcomes of a complete run, whose model is saved."""
REPORT_ID = "report_id"
"""In ``out``: the id of the run in Weights & Biases, trackio and others, however often it is resumed."""
LOCK = ".lock"
WAIT, NUM_WAITS = 0.01, 10
"""Seconds that ``Lock`` waits for a reader (``owner``), and how often."""
HELD = (errno.EWOULDBLOCK, errno.EACCES)
"""The system's errors where another process has the lock."""
WRITTEN = (
    *(MODEL, ADAPTER, UNPROVEN, BEST, CRITIC, CHECKPOINTS, TOKENS, ROLLOUTS, EVENTS),
    *("tensorboard", "wandb", REPORT_ID, MARK),
)
"""Files of a run, which ``overwrite`` removes; the mark last, so that after a kill the rest is still a run."""


def out_of(out: str | None) -> Path:
    """The directory of a run that trains. Raises ConfigError where it is not set."""
    if out is None:
        raise ConfigError("out is not set; expected a directory; set out=DIR")
    return user_path(out, "out")


def require_usable(out: Path, *, resume: bool, overwrite: bool, inputs: Sequence[str] = ()) -> None:
    """Raise OutputError unless the run may be written to ``out``. Writes nothing.

    ``inputs``: paths that the run reads, which overwriting must not delete.
    """
    # a directory that can be made or written
    place = out.absolute()
    while not place.exists():
        place = place.parent
    problem = ""
    if resume and overwrite:
        problem = "resume=true and overwrite=true contradict each other; keep one"
    elif out.exists() and not out.is_dir():
        problem = f"out={out} is a file; expected a directory; name another"
    elif not place.is_dir():
        problem = f"out={out} cannot be made: {place} is a file; name another directory"
    elif not os.access(place, os.W_OK | os.X_OK):
        problem = f"out={out} cannot be written: no permission in {place}; name another"
    if problem:
        raise OutputError(problem)
    if not overwrite:
        require_no_links(out)

    # an empty one, but for leftovers of a run that was killed at its start
    if not out.is_dir() or all(
        path.name == LOCK or files.is_leftover(path, WRITTEN) for path in out.iterdir()
    ):
        return

    # a run, to resume or to overwrite, which deletes nothing that it reads
    whole = out.resolve()
    removed = [whole / name for name in WRITTEN]
    lost = [
        path
        for path in (inputs if overwrite else ())
        if (read := home_path(path).resolve()) == whole or any(map(read.is_relative_to, removed))
    ]
    if not (resume or overwrite):
        problem = (
            f"out={out} exists and is not empty; name another directory, or say resume=true to go on or "
            "overwrite=true to replace it"
        )
    elif not (out / MARK).is_file():
        takes = "overwrite=true deletes" if overwrite else "resume=true goes on with"
        problem = f"out={out} holds files that are not a taut run (no {MARK}); {takes} only runs; name another"
    elif lost:
        problem = f"overwrite=true would delete {lost[0]}, which this run reads, in out={out}; name another out"
    if problem:
        raise OutputError(problem)


def require_no_links(out: Path, names: Sequence[str] = WRITTEN) -> None:
    """Raise OutputError where one of the named files in ``out`` is a link that leads out of it: its target must not be
    read, written or removed.
    """
    if link := next((one for name in names for one in files.links_out(out / name, out)), None):
        raise OutputError(
            f"{link} is a link to {os.path.realpath(link)}, outside of {out}; expected a file of its own; move it there"
        )


def claim(out: Path, resolved: Mapping[str, Any], *, overwrite: bool) -> None:
    """Create the directory, remove an overwritten run's files, and write resolved.json, without secrets; its field
    ``redacted`` lists the keys that had some."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        files.clear_leftovers(out, WRITTEN)
        for name in WRITTEN if overwrite else ():
            _remove(out / name)
        before = json.loads(json.dumps(dict(dotted(resolved.get("config", {})))))
        after, content = redacted_in(before), redacted_in(dict(resolved))
        if hidden := [key for key in after if before[key] != after[key]]:
            content["redacted"] = hidden
        files.write_text(out / MARK, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise OutputError(
            f"out={out} cannot be written: {error.strerror}; see to that, or name another"
        ) from error


def _is_date(text: str) -> str:
    date.fromisoformat(text)
    return text


class _Identity(TypedDict):
    """Fields of an identity that a resume reads."""

    __pydantic_config__ = pydantic.ConfigDict(extra="allow")  # type: ignore[misc]  # pydantic's way
    config: dict[str, Any]


class _Resolved(TypedDict, total=False):
    """Fields of resolved.json that are read back by key; ``taut resume`` checks ``method`` and ``config``."""

    __pydantic_config__ = pydantic.ConfigDict(extra="allow")  # type: ignore[misc]  # pydantic's way
    num_steps: Annotated[int, Field(ge=0)]
    day: Annotated[str, AfterValidator(_is_date)]
    identity: _Identity
    redacted: list[str]


def read_resolved(out: Path) -> dict[str, Any]:
    """Read resolved.json. Raises OutputError where ``out`` is no run, or the file cannot be read."""
    path = out / MARK
    content: Any
    try:
        content = files.read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise OutputError(
            f"{out} is not a taut run (no {MARK}); expected the out of one; 'taut runs DIR' lists those in DIR"
        ) from None
    except OSError as error:
        raise OutputError(
            f"{path} cannot be read: {error.strerror}; expected what the run wrote; see to its permissions"
        ) from error
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise OutputError(
            f"{path} is damaged: it is no JSON object; expected what the run wrote; bring it back from a copy"
        )
    try:
        return dict(pydantic.TypeAdapter(_Resolved).validate_python(content, strict=True))
    except pydantic.ValidationError as error:
        raise OutputError(
            f"{path} is damaged: {first_problem(error)}; expected what the run wrote; bring it back from a copy"
        ) from error


def read_settings(out: Path) -> dict[str, Any]:
    """The configuration of the run by dotted key, without secrets, for reports outside of ``out``."""
    settings: dict[str, Any] = redacted_in(dict(dotted(read_resolved(out).get("config", {}))))
    return settings


def dotted(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings in a tree by dotted key."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def report_id(out: Path) -> str:
    """The id of the run in reports outside of ``out``, drawn at the first call."""
    path = out / REPORT_ID
    try:
        if not path.exists():
            files.write_bytes(path, f"{secrets.token_hex(4)}\n".encode())
        found = files.read_text(path).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OutputError(
            f"{path} cannot be written or read: {error}; expected eight hexadecimal digits; remove it"
        ) from error
    if not re.fullmatch(r"[0-9a-f]{8}", found):
        raise OutputError(
            f"{path} is damaged; expected eight hexadecimal digits; remove it to begin another run in reports"
        )
    return found


class Lock:
    """Keeps other processes out of a run, from ``take`` until the block or the process ends."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.trouble: str | None = None
        """Why the lock does not work: not every file system can lock. None: it works."""
        self._file: IO[str] | None = None

    @property
    def is_taken(self) -> bool:
        return self._file is not None

    def take(self) -> None:
        """Take the lock, unless this process has it. Raises OutputError if another process has it."""
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
                owner_name = _read_owner(self._file)
                self._file.close()
                self._file = None
                raise OutputError(
                    f"out={self.out} is being written by {owner_name}; expected no other run in it; wait for that one, "
                    "stop it, or name another out"
                ) from None
            self.trouble = f"{self.out} cannot be locked ({error.strerror}): a second run in it would go unnoticed"
        try:
            _write_owner(self._file, f"process {os.getpid()} on {socket.gethostname()}\n")
        except OSError as error:
            raise OutputError(
                f"out={self.out} cannot be written: {error.strerror}; free some room, or name another"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with suppress(OSError):  # the name does not matter without the lock
                _write_owner(self._file, "")
            self._file.close()


def owner(out: Path) -> str | None:
    """The process that writes to the run, as ``process 12 on host``; None without one."""
    try:
        file = os.fdopen(files.open_descriptor(out / LOCK, os.O_RDONLY), encoding="utf-8")
    except OSError:
        return None
    with file:
        try:  # shared, so that two readers do not take each other for a writer
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return _read_owner(file) if error.errno in HELD else None
    return None


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    folders = [path.parent for path in folder.glob(f"step-*/{META}")]
    named = [path for path in folders if re.fullmatch(r"step-\d{6,}", path.name)]
    return sorted(named, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint, from its name."""
    return int(checkpoint.name.removeprefix("step-"))


def _lock(file: IO[str]) -> None:
    """Lock a file exclusively, after waiting for readers (``owner``)."""
    for left in reversed(range(NUM_WAITS)):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in HELD or not left:
                raise
        time.sleep(WAIT)


def _write_owner(file: IO[str], text: str) -> None:
    file.truncate(0)
    os.write(file.fileno(), text.encode())  # unbuffered: a failed write is not retried


def _read_owner(file: IO[str]) -> str:
    file.seek(0)
    return file.read().strip() or "another process"


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        files.remove_directory(path)
    else:
        path.unlink(missing_ok=True)
