"""Temporary folders that belong to one process and do not outlive it for long.

    with TemporaryFolder("evaluate") as path: ...        # TMPDIR/taut-evaluate-x3k9d2ab, mode 0700

The name is random. The folder contains a file ``lock``, which the process keeps locked (flock), so that the kernel
releases it however the process ends. ``remove_abandoned`` removes the folders of killed processes. It runs when a
command or a training run starts, and when a process makes its first folder in a place.

The places are often open to every user (/tmp, /dev/shm), so nothing found there is trusted. A folder is removed only if
it is a real directory of this user, has such a name and the mode that ``TemporaryFolder`` gives, and contains a regular
file ``lock`` that no process holds. Each is opened relative to its directory's descriptor, without following a symbolic
link or waiting for a FIFO; nothing is truncated or created. Where the file system has no locks, nothing is removed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from taut.errors import OutputError
from taut.io import files

MEMORY = Path("/dev/shm")
"""A file system in memory, on Linux."""
ROOM = 16 * 2**20
"""Bytes that must be free in the default place."""
LOCK = "lock"
PRIVATE = 0o700
HELD = (errno.EWOULDBLOCK, errno.EACCES)
"""Error numbers for a lock that another process holds."""
_NAME = re.compile(r"taut-[a-z]+-[a-z0-9_]{8}")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_cleared: set[tuple[Path, int]] = set()
"""Places where this process has removed what was abandoned."""


class TemporaryFolder:
    """A folder for this process alone; ``close`` or the end of the block removes it."""

    def __init__(self, purpose: str, place: Path | None = None, mode: int = PRIVATE) -> None:
        """``place``: the parent directory, by default TMPDIR. ``mode``: wider only in a place that the user prepared.

        Raises OSError if it cannot be made in ``place``; OutputError if TMPDIR has no room.
        """
        place = _roomy_default() if place is None else place
        clear([place], mode)
        # another process may take a folder without a lock for an abandoned one
        while True:
            path = Path(tempfile.mkdtemp(prefix=f"taut-{purpose}-", dir=place))
            lock = _new_lock(path)
            if lock is not None:
                break
        self.path, self._lock = path, lock
        if mode != PRIVATE:
            path.chmod(mode)

    def close(self) -> None:
        with suppress(OSError), _directory(self.path) as folder:
            if folder is not None:
                _empty(folder)
            self.path.rmdir()
        os.close(self._lock)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _default() -> Path | None:
    """TMPDIR, or another place for temporary files; None if none can be written."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return None


def _roomy_default() -> Path:
    """``_default``. Raises OutputError unless there is room: some libraries report a full disk as an unrelated
    error."""
    place = _default()
    fault = "no folder for temporary files can be written; expected TMPDIR, /tmp or the current directory with room"
    if place is not None:
        free = shutil.disk_usage(place).free
        if free >= ROOM:
            return place
        fault = f"{place}, for temporary files, has {free:,} bytes free; expected at least {ROOM:,}"
    raise OutputError(f"{fault}; free some, or set TMPDIR to a folder on another disk")


def clear(places: Sequence[Path] | None = None, mode: int = PRIVATE) -> None:
    """``remove_abandoned`` in each place, once per process. By default the places that taut uses by default."""
    if places is None:
        default = _default()
        places = [MEMORY] if default is None else [default, MEMORY]
    for place in places:
        if (place, mode) not in _cleared:
            _cleared.add((place, mode))
            remove_abandoned(place, mode)


def remove_abandoned(place: Path, mode: int = PRIVATE) -> None:
    """Remove the temporary folders of this user's processes that ended without removing them."""
    with _directory(place, follow=True) as parent:
        if parent is None:
            return
        with os.scandir(parent) as entries:
            names = [entry.name for entry in entries if _NAME.fullmatch(entry.name)]
        for name in names:
            _remove_if_abandoned(parent, name, mode)


def _remove_if_abandoned(parent: int, name: str, mode: int) -> None:
    with _directory(name, parent) as folder:
        if folder is None:
            return
        status = os.fstat(folder)
        is_own = status.st_uid == os.geteuid()
        if not is_own or stat.S_IMODE(status.st_mode) & 0o777 not in (PRIVATE, mode):
            return
        try:
            lock = files.open_descriptor(LOCK, os.O_RDWR, folder=folder)
        except FileNotFoundError:  # killed before it made one, so empty, and anything else stays
            with suppress(OSError):
                os.rmdir(name, dir_fd=parent)
            return
        except OSError:
            return
        try:
            if os.fstat(lock).st_uid != os.geteuid():
                return
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _empty(folder)
            os.rmdir(name, dir_fd=parent)
        except OSError:  # in use, or the file system has no locks
            return
        finally:
            os.close(lock)


def _new_lock(path: Path) -> int | None:
    """The descriptor of a new folder's locked file; None if another process took the folder for an abandoned one."""
    lock = None
    try:
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except OSError as error:
        if lock is None:
            raise
        if error.errno in HELD:
            os.close(lock)
            return None
        return lock  # the file system has no locks, so no process can remove the folder, either
    if os.fstat(lock).st_nlink == 0:
        os.close(lock)
        return None
    return lock


@contextmanager
def _directory(
    path: Path | str, parent: int | None = None, *, follow: bool = False
) -> Iterator[int | None]:
    """A descriptor of a directory; None where there is none that may be read."""
    try:
        number = os.open(path, _DIRECTORY & ~(os.O_NOFOLLOW if follow else 0), dir_fd=parent)
    except OSError:
        number = None
    try:
        yield number
    finally:
        if number is not None:
            os.close(number)


def _empty(folder: int) -> None:
    """Remove what is in a folder, the lock last: until then another process would try again."""
    with os.scandir(folder) as entries:
        found = [
            (entry.name == LOCK, entry.name, entry.is_dir(follow_symlinks=False))
            for entry in entries
        ]
    for _, name, is_directory in sorted(found):
        if is_directory:
            shutil.rmtree(name, ignore_errors=True, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)
