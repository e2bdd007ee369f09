"""Files that are there whole or not at all, after a kill and after a power failure too.

A file is written beside its place, forced to the disk (fsync) and renamed; then the directory, which holds the new
name, is forced too. Imports nothing of ours. Anyone may import it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

CANNOT = (errno.EINVAL, errno.EBADF, errno.ENOTSUP)
"""What the system says where fsync is not to be had."""
NOT_REGULAR = "it is not a regular file"


def open_regular(
    path: str | Path, flags: int, *, folder: int | None = None, follow: bool = False
) -> int:
    """``os.open`` for a regular file only: waits for no FIFO, and by default follows no symbolic link in the last
    component of ``path``.

    ``folder``: the descriptor of the directory that ``path`` is relative to. Raises OSError for anything else that is
    there, with what it is.
    """
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        number = os.open(path, flags, 0o666, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link", str(path)) from None
        if error.errno == errno.ENXIO:  # a FIFO without a reader, or a socket
            raise OSError(errno.ENXIO, NOT_REGULAR, str(path)) from None
        raise
    if stat.S_ISREG(os.fstat(number).st_mode):
        return number
    os.close(number)
    raise OSError(errno.EINVAL, NOT_REGULAR, str(path))


def write_text(path: Path, text: str) -> None:
    """The file with this content, or as it was before."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """The same."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    with partial.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync(path.parent)


@contextmanager
def writing(path: Path) -> Iterator[TextIO]:
    """A file to write to bit by bit, in its place once it is whole; what stops the writing leaves nothing."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        with partial.open("x", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def replace_directory(partial: Path, directory: Path) -> None:
    """Put a finished directory in its place; at no moment is a half-written one there.

    Between the two renames there is none: ``clear_leftovers`` brings the one before back.
    """
    sync_tree(partial)
    old = directory.with_name(f".{directory.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    partial.rename(directory)
    sync(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def clear_leftovers(folder: Path, names: Collection[str] | None = None) -> None:
    """Remove what killed writers left in a folder; a directory that was about to be replaced is put back.

    ``names``: of what was being written; None: the folder has nothing that is not ours.
    """
    for path in list(folder.iterdir()):
        if not is_leftover(path, names):
            continue
        place = folder / path.name.removeprefix(".").removesuffix(".old")
        if path.suffix == ".old" and not place.exists():
            path.rename(place)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def is_leftover(path: Path, names: Collection[str] | None = None) -> bool:
    """Whether a writer that was killed left this, by its name."""
    found = re.fullmatch(r"\.(.+?)(\.gone)?\.(partial|old)", path.name)
    return found is not None and (names is None or found[1] in names)


def sync(path: Path) -> None:
    """Force a file's content, or a directory's entries, to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:  # some file systems of networks cannot do it for a directory
        if not (error.errno in CANNOT and path.is_dir()):
            raise
    finally:
        os.close(number)


def sync_tree(directory: Path) -> None:
    """Force a directory and all that is in it to the disk."""
    for path in directory.rglob("*"):
        sync(path)
    sync(directory)


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def first_damaged(directory: Path, digests: Iterable[tuple[str, str]]) -> str:
    """Which of the files, given by name and SHA-256, is not as it was written; empty if all are."""
    for name, noted in digests:
        if not (directory / name).is_file():
            return f"{directory / name} is missing"
        if digest(directory / name) != noted:
            return f"{directory / name} is damaged: its SHA-256 is not the one noted when it was written"
    return ""


def remove_directory(directory: Path) -> None:
    """Take a directory's name away first, so that a half-removed one never looks whole."""
    old = directory.with_name(f".{directory.name}.gone.partial")
    shutil.rmtree(old, ignore_errors=True)
    directory.rename(old)
    shutil.rmtree(old, ignore_errors=True)
