"""Sources of records: data files, one by one, by pattern or by directory, here or at an address; and data sets of
Hugging Face and ModelScope.

    for number, record in open_source(source).read_records(): ...

A number is a file and a line or record of it; ``OpenSource.place`` writes it as ``train.jsonl:17``. In a source of one
file it is the line. An error is a DataError that names file and line (``formats.py``). Files at an address are fetched
first (``taut.io.remote``), then read like any other file.

The digest of a source covers its bytes, so that a cache keyed by it cannot be stale. Each file also has a stamp. If it
has changed by the end of reading, DataError is raised, since the digest would name other content than was read.

``datasets`` is imported here, when needed, and used for Arrow only: its reader of JSON accepts NaN, and names a broken
row by its number among those that are not blank instead of its line.

Does not know what columns mean (``schema.py``).
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from taut.config import home_path, user_path
from taut.data.read import formats
from taut.data.read.formats import SUFFIXES, Records, first_line
from taut.data.settings import IS_PATTERN, ITERABLE, Source
from taut.data.store.cache import directory_of
from taut.errors import DataError, TautError
from taut.io import extras, files, hub, remote

IN_FILE = 2**40
"""A record's number is its file's, from 0, times this, plus its own in the file."""
COUNTED_BYTES = 2**32
"""Size of files up to which their lines are counted before they are read."""
IN_MEMORY = "rows:"
"""Prefix of the path of rows that were given as Python objects (in_memory.py): the name of their file follows."""
IN_MEMORY_FOLDER = "rows"
REMOTE_FOLDER = "files"
"""Folders of the cache: rows in memory, and fetched files."""
PRETOKENIZED = "taut-shards.json"
"""Name of the table of contents of a pretokenized directory (store/pretokenized.py)."""
HUB_FILE = re.compile(r"hf://datasets/[^/]+/[^/]+/.")
SPLIT_WORD = re.compile(
    r"(^|[^a-z])(train(ing)?|val(id(ation)?)?|dev|test(ing)?|eval(uation)?)([^a-z]|$)"
)
"""A name by which the files of a directory are splits of one Hugging Face data set."""


class Stamp(NamedTuple):
    """State of a file when its digest was computed."""

    path: Path
    size: int
    modified_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path, status: os.stat_result) -> Stamp:
        return cls(path, status.st_size, status.st_mtime_ns, status.st_ino)

    def change(self) -> str | None:
        """Description of how the file has changed since; None if it has not."""
        try:
            now = Stamp.of(self.path, self.path.stat())
        except OSError as error:
            return f"{self.path} is gone ({error.strerror})"
        if now.size != self.size:
            return f"{self.path} had {self.size:,} bytes and has {now.size:,}"
        return None if now == self else f"{self.path} was written again"


def changes(stamps: Iterable[Stamp]) -> list[str]:
    """Descriptions of how files have changed since their stamps, by size, time and inode; nothing is read."""
    return [change for stamp in stamps if (change := stamp.change()) is not None]


def place_of(names: Sequence[str], number: int) -> str:
    """The file and line of a record. ``names``: names of the source's files."""
    file, line = divmod(number, IN_FILE)
    return f"{names[file]}:{line}"


def number_of(names: Sequence[str], place: str) -> int:
    """The number of the record at a place: the inverse of ``place_of``."""
    name, _, line = place.rpartition(":")
    return names.index(name) * IN_FILE + int(line)


def full_place(names: Sequence[str], place: str) -> str:
    """The place of a sample with its file: ``place`` is its number in the source, ``17`` or ``17#2``."""
    number, mark, part = place.partition("#")
    return place_of(names, int(number)) + mark + part


def numbered(names: Sequence[str], seen: Counter[str]) -> tuple[str, ...]:
    """The names, numbered where one was ``seen`` before, so that all differ; they are counted in ``seen``."""
    seen.update(names)
    return tuple(name if seen[name] == 1 else f"{name}({seen[name]})" for name in names)


@dataclass(frozen=True)
class OpenSource:
    """A source that exists, with the digest of its content."""

    path: str
    """As configured."""
    digest: str
    """Digest of the content, and of the part that share and limit take."""
    stamps: tuple[Stamp, ...]
    """Stamp of each file that the digest covers."""
    _read: Callable[[bool], Records] = field(repr=False)
    """Read all records; where the argument is true, of JSONL files the lines."""
    names: tuple[str, ...]
    """Names of its files, or of the data set: sample ids begin with them."""
    has_lines: bool = False
    """Whether ``_read`` can read lines."""
    share: tuple[float, float] | None = None
    limit: int | None = None
    change: Change | None = None
    """Changes to the rows that are read."""
    note: str = ""
    """Remark on where it comes from."""
    is_first_look: bool = False
    """Whether only the first rows of what is taken are read."""
    is_part: bool = False
    """Whether it has only the first rows of a pretokenized source."""
    left_out: list[int] = field(default_factory=lambda: [0], compare=False)
    """Number of rows that the share left out when they were last read."""

    def place(self, number: int) -> str:
        """The file and line of a record."""
        return place_of(self.names, number)

    @property
    def num_bytes(self) -> int:
        """Size of its files."""
        return sum(stamp.size for stamp in self.stamps)

    @property
    def num_lines(self) -> int | None:
        """Number of lines, where all rows of plain files of lines are taken, and counting them takes no time."""
        is_plain = all(stamp.path.suffix in (".jsonl", ".ndjson") for stamp in self.stamps)
        if not (self.has_lines and is_plain and self.num_bytes < COUNTED_BYTES) or self.share:
            return None
        num_lines = 0
        for stamp in self.stamps:
            try:
                with stamp.path.open("rb") as file:
                    parts = iter(partial(file.read, 2**20), b"")
                    num_lines += sum(part.count(b"\n") for part in parts)
            except OSError:  # which is an error of reading its rows
                return None
        return min(num_lines, self.limit or num_lines)

    def first_look(self, num_rows: int) -> OpenSource:
        """The first rows of what is taken."""
        limit = min(num_rows, self.limit or num_rows)
        note = "for a first look: taut tokenize, with the same keys, reads all"
        return replace(
            self,
            digest=f"{self.digest}:first={limit}",
            limit=limit,
            note="; ".join(filter(None, [self.note, note])),
            is_first_look=limit != self.limit,
        )

    @property
    def taken(self) -> str:
        """Description of share, limit and note; empty where the whole source is read."""
        num_left_out = f" (it left out {self.left_out[0]:,} rows)" if self.left_out[0] else ""
        words = (
            [f"share {self.share[0]:g} to {self.share[1]:g}{num_left_out}"] if self.share else []
        )
        words += [f"at most {self.limit:,} rows"] if self.limit else []
        return ", ".join(words + ([self.note] if self.note else []))

    def read_records(self, *, strict: bool = True, as_lines: bool = False) -> Records:
        """The numbered records that share and limit take, changed as the source says.

        ``strict=False``: the DataError of a line of JSONL that cannot be read is yielded in the record's place; other
        formats raise it. ``as_lines``: each record as a line of JSON without its end; of unchanged JSONL these are the
        file's own bytes. Raises DataError where the files are not what the digest covers.
        """
        is_own_line = as_lines and self.has_lines and self.change is None
        self.require_unchanged()
        self.left_out[0] = num_taken = 0
        try:
            for number, record in self._read(is_own_line):
                # Share: by the content of the unchanged record. One that cannot be read is in each share.
                if self.share:
                    whole = formats.record_of(record, "") if is_own_line else record
                    is_inside = isinstance(whole, DataError) or (
                        self.share[0] <= fraction_of(whole) < self.share[1]
                    )
                    if not is_inside:
                        self.left_out[0] += 1
                        continue
                # Changes, then the error or the line in place of the record.
                if self.change is not None and not isinstance(record, DataError):
                    try:
                        record = self.change.of(record)
                    except ValueError as error:
                        record = DataError(f"{self.place(number)}: {error}")
                if strict and isinstance(record, DataError):
                    raise record
                if as_lines and not is_own_line:
                    record = formats.as_line(record, self.place(number))
                yield number, record
                num_taken += 1
                if num_taken == self.limit:
                    break
            if self.left_out[0] and not num_taken:
                raise DataError(
                    f"{self.path}: none of its {self.left_out[0]:,} rows lies in share={list(self.share or ())}; "
                    "expected some; widen the share"
                )
        except (DataError, OSError) as error:
            self.require_unchanged()  # another process may have cut the file
            if isinstance(error, DataError):
                raise
            raise DataError(
                f"{self.path}: cannot be read: {error.strerror or error}; expected a readable file"
            ) from None
        self.require_unchanged()

    def require_unchanged(self) -> None:
        if changed := changes(self.stamps):
            raise DataError(
                f"{self.path}: the data changed while they were read: {changed[0]}; expected them to stay as they "
                "are; begin again when they are written"
            )


class Change(NamedTuple):
    """Changes of a source to its rows."""

    replace: Mapping[str, str]
    prepend: Mapping[str, str]
    append: Mapping[str, str]

    def of(self, record: Any) -> Any:
        """Replace texts of a record, then add the texts before and after its columns. Raises ValueError for a column
        that has no text.
        """
        record = with_texts(record, self.replace)
        for name in dict.fromkeys((*self.prepend, *self.append)):
            text = record.get(name) if isinstance(record, dict) else None
            if not isinstance(text, str):
                key = "prepend" if name in self.prepend else "append"
                raise ValueError(
                    f"{key} names the column {name}, and it is {text!r:.60}; expected a text; correct the {key} of it"
                )
            record[name] = f"{self.prepend.get(name, '')}{text}{self.append.get(name, '')}"
        return record


def with_texts(value: Any, texts: Mapping[str, str]) -> Any:
    """Replace texts in a record, or in a value of it, one after the other; names of columns stay."""
    if isinstance(value, str):
        for old, new in texts.items():
            value = value.replace(old, new)
    elif isinstance(value, Mapping):
        return {key: with_texts(inner, texts) for key, inner in value.items()}
    elif isinstance(value, list):
        return [with_texts(inner, texts) for inner in value]
    return value


def fraction_of(record: object) -> float:
    """A number in [0, 1), equal for equal records: the first 52 bits of the SHA-256 of the record as JSON with sorted
    keys. Bytes, such as pictures in parquet files, count by their own SHA-256.
    """
    head = hashlib.sha256(canonical(record)).digest()[:8]
    return (int.from_bytes(head) >> 12) / 2**52


def canonical(record: object) -> bytes:
    """A record as JSON with sorted keys: equal for equal records."""

    def written(value: object) -> str:
        return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else str(value)

    text = json.dumps(
        record, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=written
    )
    return text.encode("utf-8", "surrogatepass")


def open_source(source: Source) -> OpenSource:
    """Find a source and hash its content. Files at an address are fetched first. Nothing is parsed."""
    scheme = remote.scheme_of(source.path)
    if scheme == "ms":
        opened = _open_data_set(source, Path(source.path))
    elif is_address(source.path):
        _require_no_split(source)
        folder = directory_of(None) / REMOTE_FOLDER
        fetched = remote.fetch(source.path, folder, SUFFIXES)
        opened = replace(_open_files(source, fetched.files), note=fetched.note)
    elif source.path.startswith(IN_MEMORY):
        _require_no_split(source)
        kept = directory_of(None) / IN_MEMORY_FOLDER / source.path.removeprefix(IN_MEMORY)
        if not kept.is_file():
            raise DataError(
                f"data: the rows of {source.path} are not in {kept.parent}; expected the file that they were written "
                "to; set TAUT_CACHE as it was then, or give them again from Python"
            )
        opened = _open_files(source, [("rows", kept)])
    else:
        opened = _open_local(source)
    # What changes the rows, or takes a part of them, belongs to the digest.
    change = Change(source.replace or {}, source.prepend or {}, source.append or {})
    if any(change):
        words = (f":{key}={json.dumps(texts)}" for key, texts in change._asdict().items() if texts)
        digest = opened.digest + "".join(words)
        opened = replace(opened, digest=digest, change=change)
    # Name the files by where they were, for a resume that finds them in another place.
    if source.known_as is not None:
        here, there = (_folder(path).rstrip("/") for path in (source.path, source.known_as))
        is_one = opened.names == (source.path,)
        moved = (there + name.removeprefix(here) for name in opened.names)
        opened = replace(
            opened, path=source.known_as, names=(source.known_as,) if is_one else tuple(moved)
        )
    if source.share is None and source.limit is None:
        return opened
    digest = f"{opened.digest}:share={source.share}:limit={source.limit}"
    share = None if source.share is None else (source.share[0], source.share[1])
    return replace(opened, digest=digest, share=share, limit=source.limit)


def _folder(path: str) -> str:
    """The directory that a path names, or that a pattern begins with."""
    sign = IS_PATTERN.search(path)
    return path if sign is None else path[: path.rfind("/", 0, sign.start()) + 1]


def is_address(path: str) -> bool:
    """Whether a source is files at an address, rather than a path, pattern or name of a data set."""
    scheme = remote.scheme_of(path)
    return scheme not in (None, "ms") and (scheme != "hf" or HUB_FILE.match(path) is not None)


def _open_local(source: Source) -> OpenSource:
    path = user_path(source.path, "data")
    if (path / PRETOKENIZED).is_file():
        raise DataError(
            f"data: {source.path} was tokenized ahead; expected rows here; name the file or directory that has them"
        )
    if path.is_file():
        _require_no_split(source)
        return _open_files(source, [(source.path, path)])
    # A directory of data files, unless it is a Hugging Face data set. Opening a pipe in it would block.
    if path.is_dir():
        _require_regular(path)
    is_library = any(getattr(source, key) is not None for key in ("split", "name", "revision"))
    if path.is_dir() and not is_library and (found := _plain_files(source.path, path)):
        return _open_files(source, found)
    # A pattern.
    if not path.is_dir() and IS_PATTERN.search(source.path):
        _require_no_split(source)
        text = str(home_path(source.path))
        names = sorted(glob.glob(text, recursive=True))  # noqa: PTH207 (of a path that may be absolute)
        matched = [match for match in names if Path(match).is_file()]
        if not matched:
            raise DataError(
                f"data: no file matches {source.path}; expected at least one in {Path.cwd()}; correct the pattern"
            )
        return _open_files(source, [(match, Path(match)) for match in matched])
    # A Hugging Face data set. Where a directory ``owner`` exists here, owner/name is a mistyped path.
    parts = source.path.split("/")
    is_name = len(parts) == 2 and all(parts) and source.path[0] not in ".~"
    is_name = is_name and formats.suffix_of(source.path) is None and not Path(parts[0]).exists()
    if path.is_dir() or is_name or source.path.startswith("hf://"):
        return _open_data_set(source, path)
    hint = ""
    if re.fullmatch(r"0?\.\d+", source.path):
        hint = "; a part of a file is { path = ..., share = [0.9, 1] }"
    elif "," in source.path:
        hint = '; several are a list, as in ["a.jsonl", "b.jsonl"]'
    raise DataError(
        f"found no file or directory {source.path}; expected a {', '.join(formats.FORMATS)} file, a pattern, a "
        f"directory, an address, or owner/name of the hub; check the path{hint}"
    )


def _require_no_split(source: Source) -> None:
    for key in ("split", "name", "revision"):
        if getattr(source, key) is not None:
            raise DataError(
                f"data: {key} is set for the file {source.path}; expected it for data sets of Hugging Face and "
                "ModelScope only"
            )


def _plain_files(name: str, directory: Path) -> list[tuple[str, Path]]:
    """The data files below a directory, sorted; none for a Hugging Face data set, which was saved as one, has a card,
    or has files named as splits.
    """
    found = []
    for folder, folders, names in os.walk(directory):
        folders[:] = sorted(name for name in folders if name[0] not in "._")
        found += [Path(folder, name) for name in sorted(names) if name[0] not in "._"]
    # What the library writes or reads beside the rows; or files that are named as splits.
    marks = ("state.json", "dataset_dict.json", "dataset_info.json", *CARDS)
    inside = [path.relative_to(directory) for path in found]
    if any((directory / mark).exists() for mark in marks):
        return []
    data = [path for path in inside if formats.suffix_of(path) is not None]
    if any(SPLIT_WORD.search(path.as_posix().lower()) for path in data):
        return []
    # A file that looks like rows and cannot be read as such.
    for path in inside if data else []:
        if formats.suffix_of(path) is None and path.suffix.lower() in (
            ".txt",
            ".gz",
            ".zst",
            ".bz2",
            ".xz",
            ".zip",
        ):
            raise DataError(
                f"data: {directory / path} is among the data files of {name}; expected one of {', '.join(SUFFIXES)}; "
                "move it elsewhere, or name a pattern"
            )
    return [(f"{name.rstrip('/')}/{path.as_posix()}", directory / path) for path in data]


def _open_files(source: Source, found: Sequence[tuple[str, Path]]) -> OpenSource:
    """Open a source of files. ``found``: name and path of each."""
    for name, path in found:
        if formats.suffix_of(path) is None:
            is_table = path.suffix.lower() in (".xlsx", ".xls", ".ods", ".pkl", ".pickle")
            remedy = "save it as CSV or parquet" if is_table else "rename it"
            raise DataError(
                f"data: {name} ends in {path.suffix!r}; expected one of {', '.join(SUFFIXES)}; {remedy}"
            )
    (first, first_path), kind = found[0], formats.format_of(found[0][1])
    if other := next((name for name, path in found if formats.format_of(path) != kind), None):
        raise DataError(
            f"data: {source.path} has {first} and {other}; expected files of one format; name a pattern for each"
        )
    digest, stamps = _digest([path for _, path in found])
    # What would be read as other rows than the user means.
    for name, path in found:
        if hub.is_pointer(path):
            raise DataError(
                f"data: {name} is a git-lfs pointer; expected the file that it stands for; fetch it: git lfs pull, "
                "or hf download --repo-type dataset"
            )
    if len(found) > 1 and (columns := formats.columns_of(first_path, first)) is not None:
        for name, path in found[1:]:
            others = formats.columns_of(path, name)
            if others is not None and others != columns:
                odd = sorted(set(columns) ^ set(others))
                raise DataError(
                    f"data: {first} and {name} differ in the column {(odd or columns)[0]!r}; expected files with the "
                    "same columns; name a source for each"
                )

    def read(as_lines: bool) -> Records:
        for index, (name, path) in enumerate(found):
            for number, record in formats.read_records(path, name, as_lines=as_lines):
                yield index * IN_FILE + number, record

    suffix = formats.suffix_of(first_path) if len(found) == 1 else f"{len(found)} {kind}"
    names = tuple(name for name, _ in found)
    return OpenSource(
        source.path, f"{suffix}:{digest}", stamps, read, names, has_lines=kind == ".jsonl"
    )


def folder_of(source: Source, named: str | None, key: str) -> str:
    """The folder of relative paths of images: ``named`` by the setting ``key``; else the folder of the data."""
    if named is not None:
        return str(user_path(named, key).absolute())
    if remote.scheme_of(source.path) or source.path.startswith((IN_MEMORY, ITERABLE)):
        return str(Path.cwd())
    path = home_path(source.path).absolute()
    while IS_PATTERN.search(str(path)) and not path.exists():
        path = path.parent
    return str(path if path.is_dir() else path.parent)


def _digest(paths: list[Path]) -> tuple[str, tuple[Stamp, ...]]:
    """SHA-256 of the files' digests, and the files' stamps before they were read."""
    total, stamps = hashlib.sha256(), []
    for path in paths:
        try:
            with files.open_regular(path) as file:
                stamps.append(Stamp.of(path.absolute(), os.fstat(file.fileno())))
                total.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise DataError(
                f"data: cannot read {path}: {error.strerror}; check its permissions"
            ) from None
    return total.hexdigest(), tuple(stamps)


# -- Hugging Face data sets

CARDS = ("README.md", ".huggingface.yaml")
"""Names of files that list the data files of a data set."""
CARD_LIMIT = 2**22
"""Maximum size of a card, in bytes."""


def _open_data_set(source: Source, path: Path) -> OpenSource:
    """Open a split of a data set of Hugging Face, by directory or name, or of ModelScope, by name, whose rows are in
    Arrow files.
    """
    import datasets

    if path.is_dir():
        _require_local(path)
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs is in the error too
    try:
        loaded = _load_data_set(source, path)
    except TautError:
        raise
    except Exception as error:  # noqa: BLE001 (a decoder for each kind of file, each with errors of its own)
        where = _hub_name(source.path)
        if not path.is_dir() and (reason := hub.explain(where, error, "dataset")):
            raise DataError(f"data: {source.path}: {reason}") from None
        house = "ModelScope" if source.path.startswith("ms://") else "Hugging Face"
        cause = error.__cause__ or error  # datasets says only that something went wrong
        raise DataError(
            f"data: {source.path} cannot be loaded as a {house} data set: {first_line(cause)}; check the path or "
            "name, the split, and the configuration if it has several"
        ) from None
    finally:
        datasets.logging.set_verbosity(verbosity)
    # One split of it.
    table: Any = loaded
    if isinstance(loaded, dict):
        split = source.split or (next(iter(loaded)) if len(loaded) == 1 else None)
        if split not in loaded:
            fault = "no split is named" if split is None else f"there is no split {split!r}"
            raise DataError(
                f"data: {source.path}: {fault}; expected one of {', '.join(loaded)}; set it, as in "
                f'data.train=[{{ path = "{source.path}", split = "{next(iter(loaded))}" }}]'
            )
        table = loaded[split]
    elif source.split is not None and not _is_part(source.split):
        raise DataError(f"data: {source.path} has no splits; expected no split; remove it")
    if not table.cache_files:
        raise DataError(
            f"data: {source.path} is held in memory by datasets; unset HF_DATASETS_IN_MEMORY_MAX_SIZE"
        )
    digest, stamps = _digest(sorted(Path(entry["filename"]) for entry in table.cache_files))
    digest = f"hf:{digest}:{source.name}:{source.split}:{len(table)}"

    def read(_: bool) -> Records:
        # the rows of the files: images and audio are not decoded
        batches = table.with_format("arrow").iter(formats.BATCH)
        return formats.read_arrow(batches, source.path, "Hugging Face")

    return OpenSource(source.path, digest, stamps, read, (source.path,))


def _load_data_set(source: Source, path: Path) -> Any:
    """Load a data set with its library: splits by name, or one table."""
    import datasets

    # From ModelScope; from a directory that the library saved; or by name or directory.
    split = source.split if source.split and _is_part(source.split) else None
    if source.path.startswith("ms://"):
        extras.require("modelscope", f"data: {source.path}")
        from modelscope.msdatasets import MsDataset

        name, version = source.path.removeprefix("ms://"), source.revision or "master"
        loaded = MsDataset.load(name, subset_name=source.name, version=version, split=split)
        return loaded.to_hf_dataset() if isinstance(loaded, MsDataset) else loaded
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        if split is not None:
            raise DataError(
                f"data: {source.path} is a saved data set; expected the name of a split, not {split!r}; use share or "
                "limit for a part of it"
            )
        return datasets.load_from_disk(str(path))
    if not path.is_dir():
        hub.settle()
    where = str(path) if path.is_dir() else _hub_name(source.path)
    return datasets.load_dataset(
        where, source.name, revision=source.revision, split=split, keep_in_memory=False
    )


def _is_part(split: str) -> bool:
    """Whether a split is an expression of the library's, as train[:5%] or train+test."""
    return "[" in split or "+" in split


def _hub_name(path: str) -> str:
    return path.removeprefix("hf://").removeprefix("datasets/").rstrip("/")


def _require_regular(directory: Path) -> None:
    """Raise DataError where opening a file of a directory would block."""
    for folder, _, names in os.walk(directory):
        for name in names:
            if not (file := Path(folder, name)).exists():
                continue  # a link to nothing
            try:
                files.open_regular(file).close()
            except OSError as error:
                raise DataError(
                    f"data: {file} cannot be read: {error.strerror}; expected a regular file; remove it from the data"
                ) from None


def _require_local(directory: Path) -> None:
    """Raise DataError where the card of a directory names data outside of it, which the library would fetch."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    for card in filter(Path.exists, (directory / name for name in CARDS)):
        try:
            text = files.read_regular(card, CARD_LIMIT).decode("utf-8")
            if card.suffix == ".md":
                block = REGEX_YAML_BLOCK.search(text)
                text = block[2] if block else ""
            for pattern in _patterns(text):
                is_inside = not re.search(r"://|::|^[/~]", pattern)
                if not is_inside or ".." in Path(pattern).parts:
                    raise DataError(
                        f"data: {card} names the data {pattern[:100]!r}; expected files in {directory}; get the data "
                        "first, and name the file or directory"
                    )
        except DataError:
            raise
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            reason = getattr(error, "strerror", None) or first_line(error)
            raise DataError(
                f"data: {card} cannot be read: {reason}; expected YAML; correct it, or remove it"
            ) from None


def _patterns(text: str) -> Iterator[str]:
    """File names, patterns and folders of data in the configurations of a card in YAML."""
    if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text, yaml.SafeLoader)):
        raise ValueError(
            "it repeats parts by reference (*name), which may stand for any number of parts"
        )
    card = yaml.safe_load(text)
    configs = card.get("configs") if isinstance(card, dict) else None
    left: list[Any] = [
        config.get(key)
        for config in (configs if isinstance(configs, list) else [])
        if isinstance(config, dict)
        for key in ("data_files", "data_dir")
    ]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)
