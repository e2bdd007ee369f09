"""Where records come from: data files, one by one, by pattern or by directory, here or at an address; and data sets of
Hugging Face and ModelScope.

A source yields ``(number, record)``. Each number names a file and a line or record of it: ``Opened.place`` writes it as
``train.jsonl:17``. Of a source of one file it is the line itself. What is wrong with a record or a file is a DataError
that names it (``formats.py``). Addresses are fetched first (``taut.io.remote``), then read like any other file.

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
import lzma
import os
import re
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import yaml
from pydantic import Field

from taut import extras
from taut.config import configclass, home_path, user_path
from taut.data import formats
from taut.data.cache import directory_of
from taut.data.formats import SUFFIXES, Records, first_line
from taut.data.schema import Format
from taut.errors import ConfigError, DataError
from taut.io import files, hub, remote

IN_FILE = 2**40
"""A record's number is its file's, from 0, times this, plus its own in the file."""
GIVEN = "rows:"
"""Rows that were given as Python objects: ``rows:`` and the name of the file that holds them (given_rows.py)."""
GIVEN_FOLDER = "rows"
ITERABLE = "iterable:"
"""An iterable that was given as a Python object (given_rows.py)."""
REMOTE_FOLDER = "files"
"""Folders of the cache: rows that were given, and files that were fetched."""
TOKENISED = "taut-shards.json"
"""The table of contents of a directory that was tokenised ahead (ahead.py)."""
HUB_FILE = re.compile(r"hf://datasets/[^/]+/[^/]+/.")
IS_PATTERN = re.compile(r"[*?\[]")
SPLIT_WORD = re.compile(
    r"(^|[^a-z])(train(ing)?|val(id(ation)?)?|dev|test(ing)?|eval(uation)?)([^a-z]|$)"
)
"""A name by which the files of a directory are splits of one Hugging Face data set."""


@configclass
class Source:
    """One data set of a mixture."""

    path: str
    """A file (.jsonl, .json, .csv, .tsv, these with .gz or .zst, .parquet, .arrow), a pattern such as data/*.jsonl, or
    a directory of such files; the same at an address (https://, s3://, gs://, hf://datasets/); a Hugging Face data
    set: its directory, or its name as owner/name or hf://name; or a ModelScope data set, ms://owner/name."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """How many times each row is seen per epoch; 0.5 is half of the rows, drawn again each epoch."""
    share: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    """Use the rows whose hash lies in this part of [0, 1), as [0, 0.95], with [0.95, 1] in data.eval. Equal rows have
    equal hashes, so they are all in one part."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Use the first rows only, this many of those in share."""
    split: str | None = None
    """Hugging Face and ModelScope data sets: the split, or a part of it, as train[:5%]; required if there is more than
    one."""
    name: str | None = None
    """Hugging Face and ModelScope data sets: the configuration."""
    revision: str | None = None
    """Hugging Face and ModelScope data sets by name: a commit, tag or branch."""
    format: Format | None = None
    """As data.format, for this source."""
    columns: dict[str, str] | None = None
    """As data.columns, for this source."""
    replace: dict[str, str] | None = None
    """Text -> the text that stands in its place in all values of the rows, as { "{{NAME}}" = "Robin" }."""
    prepend: dict[str, str] | None = None
    """Column -> the text that is put before its own in each row, as { response = "<think>\\n\\n</think>\\n\\n" }."""
    append: dict[str, str] | None = None
    """Column -> the text that is put after its own in each row, as { query = " /no_think" }."""
    system: str | None = None
    """As data.system, for this source; empty for none."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Values of the template's variables for the rows of this source alone; what is saved keeps those of
    data.chat_template_kwargs."""

    def __post_init__(self) -> None:
        if self.replace is not None and "" in self.replace:
            raise ConfigError(
                f'{self.path}: replace has the key ""; expected the text to be replaced; correct it'
            )
        if self.share is not None and not 0 <= self.share[0] < self.share[1] <= 1:
            raise ConfigError(
                f"{self.path}: share={self.share}; expected two numbers, 0 <= first < second <= 1; correct it"
            )

    @property
    def identity(self) -> tuple[str | None, ...]:
        """What names the rows of which share is a part."""
        return self.path, self.name, self.split, self.revision


class Stamp(NamedTuple):
    """The state of a file when its digest was taken."""

    path: Path
    size: int
    modified_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path, status: os.stat_result) -> Stamp:
        return cls(path, status.st_size, status.st_mtime_ns, status.st_ino)

    def change(self) -> str | None:
        """How the file has changed since; None: it has not."""
        try:
            now = Stamp.of(self.path, self.path.stat())
        except OSError as error:
            return f"{self.path} is gone ({error.strerror})"
        if now.size != self.size:
            return f"{self.path} had {self.size:,} bytes and has {now.size:,}"
        return None if now == self else f"{self.path} was written again"


def changes(stamps: Iterable[Stamp]) -> list[str]:
    """How files have changed since their stamps, by size, time and inode; nothing is read."""
    return [change for stamp in stamps if (change := stamp.change()) is not None]


def place_of(names: Sequence[str], number: int) -> str:
    """The file and line of a record. ``names``: of the source's files."""
    file, line = divmod(number, IN_FILE)
    return f"{names[file]}:{line}"


def number_of(names: Sequence[str], place: str) -> int:
    """The number of the record in a place: the opposite of ``place_of``."""
    name, _, line = place.rpartition(":")
    return names.index(name) * IN_FILE + int(line)


def full_place(names: Sequence[str], place: str) -> str:
    """A place inside a source, ``17`` or ``17#2``, with its file."""
    number, mark, part = place.partition("#")
    return place_of(names, int(number)) + mark + part


def numbered(names: Sequence[str], seen: Counter[str]) -> tuple[str, ...]:
    """The names, with a number where one was ``seen`` before, so that each is another; they are counted in ``seen``."""
    seen.update(names)
    return tuple(name if seen[name] == 1 else f"{name}({seen[name]})" for name in names)


@dataclass(frozen=True)
class Opened:
    """A source that exists, with the digest of its content."""

    path: str
    """As the user wrote it."""
    digest: str
    """Of the content, and of what share and limit take of it."""
    stamps: tuple[Stamp, ...]
    """The stamp of each file that the digest covers."""
    _records: Any = field(repr=False)
    names: tuple[str, ...]
    """Of its files, or of the data set: sample ids begin with them."""
    _lines: Any = field(default=None, repr=False)
    """The lines of JSONL files; None: of another format."""
    share: tuple[float, float] | None = None
    limit: int | None = None
    change: Change | None = None
    """What is changed in the rows that are read."""
    note: str = ""
    """What there is to say about where it comes from."""
    is_part: bool = False
    """Whether these are the first rows of more, which are elsewhere."""
    left_out: list[int] = field(default_factory=lambda: [0], compare=False)
    """How many rows the share left out when they were last read."""

    def place(self, number: int) -> str:
        """The file and line of a record."""
        return place_of(self.names, number)

    @property
    def taken(self) -> str:
        """What share and limit take, and the note, in words; empty where they take all."""
        num_left_out = f" (it left out {self.left_out[0]:,} rows)" if self.left_out[0] else ""
        words = (
            [f"share {self.share[0]:g} to {self.share[1]:g}{num_left_out}"] if self.share else []
        )
        words += [f"at most {self.limit:,} rows"] if self.limit else []
        return ", ".join(words + ([self.note] if self.note else []))

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """The records as lines of JSON, without line ends: of JSONL files their own bytes. A DataError is raised for a
        value that JSON has no place for.
        """
        if self._lines is None:
            for number, record in self.records():
                yield number, formats.as_line(record, self.place(number))
            return
        yield from self._read(
            self._lines(), lambda number, line: formats.record_of(line, self.place(number))
        )

    def records(self) -> Records:
        """The records from the start. A DataError is raised at the end if they are not what the digest covers."""
        for number, record in self.attempts():
            if isinstance(record, DataError):
                self._require_unchanged()
                raise record
            yield number, record

    def attempts(self) -> Records:
        """The records, with the error of one that cannot be read in its place. Only JSONL goes on after an error: other
        formats do not show where the next record begins.
        """
        for number, record in self._read(self._records(), lambda _, record: record):
            yield number, self._changed(number, record)

    def _changed(self, number: int, record: Any) -> Any:
        """The record as the source changes it, or the error of one that it cannot."""
        if self.change is None or isinstance(record, DataError):
            return record
        try:
            return self.change.of(record)
        except ValueError as error:
            return DataError(f"{self.place(number)}: {error}")

    def _read(self, items: Records, record_of: Callable[[int, Any], Any]) -> Records:
        """The items that share and limit take. A DataError is raised if the files are not what the digest covers."""
        self._require_unchanged()
        try:
            yield from self._taken(items, record_of)
        except (DataError, OSError) as error:
            self._require_unchanged()  # another process may have cut the file
            if isinstance(error, DataError):
                raise
            raise DataError(
                f"{self.path}: cannot be read: {error.strerror or error}; expected a readable file"
            ) from None
        self._require_unchanged()

    def _taken(self, items: Records, record_of: Callable[[int, Any], Any]) -> Records:
        """The items that share and limit take; one that cannot be read is in each share."""
        self.left_out[0] = num_taken = 0
        for number, item in items:
            if self.share and not isinstance(record := record_of(number, item), DataError):
                low, high = self.share
                if not low <= fraction_of(record) < high:
                    self.left_out[0] += 1
                    continue
            yield number, item
            num_taken += 1
            if num_taken == self.limit:
                return
        if self.left_out[0] and not num_taken:
            raise DataError(
                f"{self.path}: none of its {self.left_out[0]:,} rows lies in share={list(self.share or ())}; expected "
                "some; widen the share"
            )

    def _require_unchanged(self) -> None:
        if changed := changes(self.stamps):
            raise DataError(
                f"{self.path}: the data changed while they were read: {changed[0]}; expected them to stay as they "
                "are; begin again when they are written"
            )


class Change(NamedTuple):
    """What a source changes in its rows."""

    replace: Mapping[str, str]
    prepend: Mapping[str, str]
    append: Mapping[str, str]

    def of(self, record: Any) -> Any:
        """The record with its texts replaced, then with those before and after its columns. Raises ValueError for a
        column that has no text.
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
    """A record, or a value in it, with texts replaced one after the other; names of columns stay."""
    if isinstance(value, str):
        for old, new in texts.items():
            value = value.replace(old, new)
    elif isinstance(value, Mapping):
        return {key: with_texts(inner, texts) for key, inner in value.items()}
    elif isinstance(value, list):
        return [with_texts(inner, texts) for inner in value]
    return value


def fraction_of(record: object) -> float:
    """A number in [0, 1) that equal records share: of the SHA-256 of the record as JSON with sorted keys, the first 52
    bits. Bytes, such as pictures in parquet files, count by their own SHA-256.
    """
    head = hashlib.sha256(canonical(record)).digest()[:8]
    return (int.from_bytes(head) >> 12) / 2**52


def canonical(record: object) -> bytes:
    """A record as JSON with sorted keys: the same for equal records."""
    text = json.dumps(
        record, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=_for_digest
    )
    return text.encode("utf-8", "surrogatepass")


def _for_digest(value: object) -> str:
    """A value that JSON has no form for."""
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else str(value)


def require_apart(train: Iterable[Source], held_out: Iterable[Source]) -> None:
    """Raise ConfigError where a source is named for training and for evaluation, and the shares overlap."""
    for source in train:
        for other in held_out:
            if source.identity != other.identity or not (source.share or other.share):
                continue
            low, high = source.share or (0, 1)
            other_low, other_high = other.share or (0, 1)
            if max(low, other_low) < min(high, other_high):
                raise ConfigError(
                    f"data.train has the share {low:g} to {high:g} of {source.path}, and data.eval {other_low:g} to "
                    f"{other_high:g}; expected shares without common rows, as [0, 0.95] and [0.95, 1]; correct one"
                )


def open_source(source: Source) -> Opened:
    """Find a source and hash its content. Nothing is parsed yet. What is at an address is fetched first."""
    scheme = remote.scheme_of(source.path)
    if scheme == "ms":
        opened = _open_data_set(source, Path(source.path))
    elif is_address(source.path):
        _require_no_split(source)
        folder = directory_of(None) / REMOTE_FOLDER
        fetched = remote.fetch(source.path, folder, SUFFIXES)
        opened = replace(_open_files(source, fetched.files), note=fetched.note)
    elif source.path.startswith(GIVEN):
        _require_no_split(source)
        opened = _open_given(source)
    else:
        opened = _open_local(source)
    change = Change(source.replace or {}, source.prepend or {}, source.append or {})
    if any(change):
        words = (f":{key}={json.dumps(texts)}" for key, texts in change._asdict().items() if texts)
        digest = opened.digest + "".join(words)
        opened = replace(opened, digest=digest, change=change, _lines=None)
    if source.share is None and source.limit is None:
        return opened
    digest = f"{opened.digest}:share={source.share}:limit={source.limit}"
    share = None if source.share is None else (source.share[0], source.share[1])
    return replace(opened, digest=digest, share=share, limit=source.limit)


def is_address(path: str) -> bool:
    """Whether a source is files at an address, and no path, pattern or name of a data set."""
    scheme = remote.scheme_of(path)
    return scheme not in (None, "ms") and (scheme != "hf" or HUB_FILE.match(path) is not None)


def _open_local(source: Source) -> Opened:
    path = user_path(source.path, "data")
    if (path / TOKENISED).is_file():
        raise DataError(
            f"data: {source.path} was tokenised ahead; expected rows here; name the file or directory that has them"
        )
    if path.is_file():
        _require_no_split(source)
        return _open_files(source, [(source.path, path)])
    if path.is_dir():
        _require_regular(path)
    is_library = any(getattr(source, key) is not None for key in ("split", "name", "revision"))
    if path.is_dir() and not is_library and (found := _plain_files(source.path, path)):
        return _open_files(source, found)
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
    parts = source.path.split("/")
    # owner/name, unless a directory ``owner`` exists here: then it is a mistyped path
    is_name = len(parts) == 2 and all(parts) and source.path[0] not in ".~"
    is_name = is_name and formats.suffix_of(source.path) is None and not Path(parts[0]).exists()
    if path.is_dir() or is_name or source.path.startswith("hf://"):
        return _open_data_set(source, path)
    raise DataError(
        f"found no file or directory {source.path}; expected a {', '.join(formats.FORMATS)} file, a pattern, a "
        "directory, an address, or the owner/name of a Hugging Face data set; check the path"
    )


def _require_no_split(source: Source) -> None:
    for key in ("split", "name", "revision"):
        if getattr(source, key) is not None:
            raise DataError(
                f"data: {key} is set for the file {source.path}; expected it for data sets of Hugging Face and "
                "ModelScope only"
            )


def _plain_files(name: str, directory: Path) -> list[tuple[str, Path]]:
    """The data files below a directory, sorted; none where it is a Hugging Face data set: it was saved as one, has a
    card, or its names say that they are splits.
    """
    found = []
    for folder, folders, names in os.walk(directory):
        folders[:] = sorted(name for name in folders if name[0] not in "._")
        found += [Path(folder, name) for name in sorted(names) if name[0] not in "._"]
    marks = ("state.json", "dataset_dict.json", "dataset_info.json", *CARDS)
    inside = [path.relative_to(directory) for path in found]
    if any((directory / mark).exists() for mark in marks):
        return []
    data = [path for path in inside if formats.suffix_of(path) is not None]
    if any(SPLIT_WORD.search(path.as_posix().lower()) for path in data):
        return []
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


def _open_files(source: Source, found: Sequence[tuple[str, Path]]) -> Opened:
    """A source of files. ``found``: what each is called, and its path."""
    for name, path in found:
        if formats.suffix_of(path) is None:
            raise DataError(
                f"data: {name} ends in {path.suffix!r}; expected one of {', '.join(SUFFIXES)}; rename it"
            )
    (first, first_path), kind = found[0], formats.format_of(found[0][1])
    if other := next((name for name, path in found if formats.format_of(path) != kind), None):
        raise DataError(
            f"data: {source.path} has {first} and {other}; expected files of one format; name a pattern for each"
        )
    digest, stamps = _digest([path for _, path in found])
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

    def chained(read: Callable[[Path, str], Records]) -> Records:
        for index, (name, path) in enumerate(found):
            for number, item in read(path, name):
                yield index * IN_FILE + number, item

    suffix = formats.suffix_of(first_path) if len(found) == 1 else f"{len(found)} {kind}"
    names = tuple(name for name, _ in found)
    return Opened(
        source.path,
        f"{suffix}:{digest}",
        stamps,
        lambda: chained(formats.read),
        names,
        (lambda: chained(formats.read_lines)) if kind == ".jsonl" else None,
    )


def _open_given(source: Source) -> Opened:
    path = directory_of(None) / GIVEN_FOLDER / source.path.removeprefix(GIVEN)
    if not path.is_file():
        raise DataError(
            f"data: the rows of {source.path} are not in {path.parent}; expected the file that was written when they "
            "were given from Python; set TAUT_CACHE as it was then, or give them again"
        )
    name, kind = "rows", formats.suffix_of(path)
    digest, stamps = _digest([path])
    return Opened(
        source.path,
        f"{kind}:{digest}",
        stamps,
        lambda: formats.read(path, name),
        (name,),
        (lambda: formats.read_lines(path, name)) if kind == ".jsonl" else None,
    )


def folder_of(source: Source, named: str | None, key: str) -> str:
    """The folder of relative paths of images: ``named``, the setting ``key``; else that of the data."""
    if named is not None:
        return str(user_path(named, key).absolute())
    if remote.scheme_of(source.path) or source.path.startswith((GIVEN, ITERABLE)):
        return str(Path.cwd())
    path = home_path(source.path).absolute()
    while IS_PATTERN.search(str(path)) and not path.exists():
        path = path.parent
    return str(path if path.is_dir() else path.parent)


def _digest(paths: list[Path]) -> tuple[str, tuple[Stamp, ...]]:
    """The SHA-256 of the files' digests, and the stamps of the files before they were read."""
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

LOAD_FAILURES = (
    OSError,
    ValueError,
    RuntimeError,
    LookupError,
    TypeError,
    AttributeError,
    ImportError,
    ArithmeticError,
    EOFError,
    yaml.YAMLError,
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    lzma.LZMAError,
)
"""Errors of ``datasets``, and of the libraries it unpacks files with, on a directory that is no data set."""
CARDS = ("README.md", ".huggingface.yaml")
"""Files of a data set that name its data files."""
CARD_LIMIT = 2**22
"""Largest card, in bytes."""


def _open_data_set(source: Source, path: Path) -> Opened:
    """A split of a data set of Hugging Face, by directory or name, or of ModelScope, by name; its rows are in Arrow
    files.
    """
    import datasets

    if path.is_dir():
        _require_local(path)
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs is in the error too
    try:
        loaded = _load_data_set(source, path)
    except (*LOAD_FAILURES, datasets.exceptions.DatasetsError) as error:
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

    def read() -> Records:
        """The rows as they are in the files: images and audio are not decoded."""
        batches = table.with_format("arrow").iter(formats.BATCH)
        return formats.read_arrow(batches, source.path, "Hugging Face")

    return Opened(source.path, digest, stamps, read, (source.path,))


def _load_data_set(source: Source, path: Path) -> Any:
    """What the library makes of a data set: its splits by name, or one table."""
    import datasets

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
    """Raise DataError where a directory has a file that would block."""
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
    """Raise DataError where a directory has a card that names data outside of it: the library would fetch addresses."""
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
        except OSError as error:
            raise DataError(
                f"data: {card} cannot be read: {error.strerror}; correct it, or remove it"
            ) from None
        except (ValueError, RecursionError, yaml.YAMLError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(
                f"data: {card} cannot be read: {first_line(error)}; expected YAML; correct it, or remove it"
            ) from None


def _patterns(text: str) -> Iterator[str]:
    """The file names, patterns and folders that the configurations of a card, in YAML, name as data."""
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
