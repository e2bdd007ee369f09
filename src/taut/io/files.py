"""Atomic writes: after a kill or a power failure a file is there whole or as it was before.

A file is written next to its place, forced to the disk (fsync) and renamed; then the directory, which holds the new
name, is forced too.

Files that somebody else may have replaced are opened with ``open_regular``: opening a FIFO would block for ever, and a
device has no end.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import resource
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

CANNOT = (errno.EINVAL, errno.EBADF, errno.ENOTSUP)
"""Error numbers of a file system that has no fsync."""
NOT_REGULAR = "it is not a regular file"
FILE_TYPES = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a directory",
}
OPEN_FILES = 2**16
"""Limit of open files that a process of a run asks for: some programs close all that they may have, one by one."""
JSON_LIMIT = 64 * 2**20
"""Largest JSON file that ``read_json`` reads by default, in bytes."""


def allow_open_files() -> None:
    """Raise this process's limit of open files as far as its user may, up to ``OPEN_FILES``: a connection to each other
    rank is one, and a shard of the data has several.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(OPEN_FILES, hard % 2**63)  # no limit is -1
    if soft % 2**63 < wanted:
        with suppress(OSError, ValueError):  # a system that allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def home_path(text: str | os.PathLike[str]) -> Path:
    """The path of a text; ``~`` is the user's home. ``~name`` is an ordinary file name, so that it does not reveal
    whether a user exists, or where their home is.
    """
    path = Path(text)
    return path.expanduser() if path.parts[:1] == ("~",) else path


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
    """Raise OSError unless ``status`` is of a regular file."""
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
    """The bytes of a regular file. Raises OSError if there are more than ``limit``."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(min(size, limit) + 1)
    if max(size, len(content)) > limit:
        raise OSError(
            errno.EFBIG, f"it has {size:,} bytes; expected at most {limit:,}", os.fspath(path)
        )
    return content


def open_text(path: str | os.PathLike[str]) -> io.TextIOWrapper:
    """``open_regular`` for UTF-8 text; line ends are read as \\n."""
    return io.TextIOWrapper(open_regular(path), encoding="utf-8")


def read_text(path: str | os.PathLike[str], limit: int = JSON_LIMIT) -> str:
    """The text of a regular file. Raises OSError, and UnicodeDecodeError if it is not UTF-8."""
    return io.TextIOWrapper(io.BytesIO(read_regular(path, limit)), encoding="utf-8").read()


def read_json(path: str | os.PathLike[str], limit: int = JSON_LIMIT) -> Any:
    """The value in a JSON file. Raises OSError if the file cannot be read, ValueError if it is not JSON."""
    try:
        return json.loads(read_regular(path, limit).decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_text(path: Path, text: str) -> None:
    """Write a file whole, or leave it as it was."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole, or leave it as it was."""
    with replacing(path) as partial, partial.open("xb") as file:
        file.write(content)


@contextmanager
def writing(path: Path) -> Iterator[TextIO]:
    """A text file to write bit by bit; it takes its place when the block ends without an exception."""
    with replacing(path) as partial, partial.open("x", encoding="utf-8") as file:
        yield file


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write a file that takes the place ``path`` when the block ends; an exception leaves nothing of it."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        yield partial
        sync(partial)
        partial.replace(path)
        sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def replace_directory(partial: Path, directory: Path) -> None:
    """Put a complete directory in its place; a half-written one is never there.

    Between the two renames there is none: ``clear_leftovers`` puts the previous one back.
    """
    # the new one is on disk before the old one goes
    sync_tree(partial)
    old = directory.with_name(f".{directory.name}.old")
    remove(old)
    if directory.exists():
        directory.rename(old)
    partial.rename(directory)
    sync(directory.parent)
    with suppress(OSError):
        remove(old)


@contextmanager
def replacing_directory(directory: Path) -> Iterator[Path]:
    """An empty directory to write to. It replaces ``directory`` when the block ends; if the block raises, nothing is
    replaced and nothing is left.
    """
    partial = directory.with_name(f".{directory.name}.partial")
    remove(partial)
    try:
        partial.mkdir(parents=True)
        yield partial
        replace_directory(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def clear_leftovers(folder: Path, names: Collection[str] | None = None) -> None:
    """Remove what killed writers left in a folder, and put back a directory that was about to be replaced.

    ``names``: the files and directories whose leftovers are removed; without it, all in the folder.
    """
    for path in list(folder.iterdir()):
        if not is_leftover(path, names):
            continue
        place = folder / path.name.removeprefix(".").removesuffix(".old")
        if path.suffix == ".old" and not place.exists() and not path.is_symlink():
            path.rename(place)
        else:
            remove(path)


def is_leftover(path: Path, names: Collection[str] | None = None) -> bool:
    """Whether the name is one that a killed writer leaves."""
    match = re.fullmatch(r"\.(.+?)(\.gone)?\.(partial|old)", path.name)
    return match is not None and (names is None or match[1] in names)


def sync(path: Path) -> None:
    """Force a file's content, or a directory's entries, to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:  # some network file systems cannot do it for a directory
        if not (error.errno in CANNOT and path.is_dir()):
            raise
    finally:
        os.close(number)


def sync_tree(directory: Path) -> None:
    """Force a directory and its contents to the disk."""
    for path in directory.rglob("*"):
        sync(path)
    sync(directory)


def free_space(path: Path) -> int:
    """Bytes free for this user in a folder, or where it will be."""
    place = next(place for place in (path, *path.absolute().parents) if place.is_dir())
    return shutil.disk_usage(place).free


def digest(path: Path) -> str:
    """The SHA-256 of a regular file."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def source_digest() -> str:
    """A digest of taut's own source: two checkouts may have one version."""
    root, found = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root)} {digest(path)}\n".encode())
    return found.hexdigest()


def first_damaged(directory: Path, digests: Iterable[tuple[str, str]]) -> str:
    """Describe the first file that is missing or changed; empty if none is. ``digests``: name and SHA-256."""
    for name, expected in digests:
        if not (directory / name).is_file():
            return f"{directory / name} is missing"
        if digest(directory / name) != expected:
            return f"{directory / name} is damaged: its SHA-256 is not the one noted when it was written"
    return ""


def remove_directory(directory: Path) -> None:
    """Remove a directory, renamed first, so that a half-removed one never looks whole."""
    old = directory.with_name(f".{directory.name}.gone.partial")
    remove(old)
    directory.rename(old)
    with suppress(OSError):
        remove(old)


def remove(path: Path) -> None:
    """Remove a file, a directory with its contents, or a link, which is not followed; or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def links_out(path: Path, root: Path) -> Iterator[Path]:
    """The symbolic links at or below a path that lead out of ``root``. None of them is followed."""
    below = () if path.is_symlink() else os.walk(path)
    names = (Path(folder, name) for folder, *both in below for name in chain(*both))
    for link in filter(Path.is_symlink, chain([path], names)):
        if not Path(os.path.realpath(link)).is_relative_to(root.resolve()):
            yield link
