"""Files that are there whole or not at all, after a kill and after a power failure too.

A file is written beside its place, forced to the disk (fsync) and renamed; then the directory, which holds the new
name, is forced too.

Files that others may have put in place of ours are opened with ``open_regular``: opening a FIFO would block for ever,
and a device has no end.

Imports nothing of ours. Anyone may import it.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

CANNOT = (errno.EINVAL, errno.EBADF, errno.ENOTSUP)
"""What the system says where fsync is not to be had."""
NOT_REGULAR = "it is not a regular file"


FILE_TYPES = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a directory",
}
JSON_LIMIT = 64 * 2**20
"""Largest JSON file that ``read_json`` reads by default, in bytes."""


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a regular file, or a link to one, for reading. Raises OSError for anything else, and never blocks."""
    require_regular(os.stat(path), path)  # noqa: PTH116 (opening a device may already do something)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(descriptor, "rb")
    try:
        require_regular(os.fstat(descriptor), path)
    except OSError:
        file.close()
        raise
    return file


def require_regular(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    """Raise OSError where ``status`` is not that of a regular file."""
    if not stat.S_ISREG(status.st_mode):
        kind = FILE_TYPES.get(stat.S_IFMT(status.st_mode), "not a file")
        raise OSError(errno.EINVAL, f"it is {kind}; expected a regular file", os.fspath(path))


def open_descriptor(path: str | Path, flags: int, *, folder: int | None = None) -> int:
    """``os.open`` for a regular file only: waits for no FIFO, and follows no symbolic link in the last component.

    ``folder``: the descriptor of the directory that ``path`` is relative to. Raises OSError for anything else that is
    there, with what it is.
    """
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
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


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """The bytes of a regular file. Raises OSError where there are more than ``limit``."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(min(size, limit) + 1)
    if max(size, len(content)) > limit:
        raise OSError(
            errno.EFBIG, f"it has {size:,} bytes; expected at most {limit:,}", os.fspath(path)
        )
    return content


def open_text(path: str | os.PathLike[str]) -> io.TextIOWrapper:
    """``open_regular`` for a text in UTF-8; ends of lines are read as \\n."""
    return io.TextIOWrapper(open_regular(path), encoding="utf-8")


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a regular file. Raises OSError, or UnicodeDecodeError where it is not UTF-8."""
    with open_text(path) as file:
        return file.read()


def read_json(path: str | os.PathLike[str], limit: int = JSON_LIMIT) -> Any:
    """The value in a JSON file. Raises OSError where the file cannot be read, ValueError where it is not JSON."""
    try:
        return json.loads(read_regular(path, limit).decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


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
    """The SHA-256 of a regular file."""
    with open_regular(path) as file:
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
