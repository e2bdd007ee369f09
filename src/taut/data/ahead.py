"""Data that were tokenised ahead: the directory that ``taut tokenise out=DIR`` writes, as a source of a run.

    DIR/taut-shards.json            how the rows were tokenised, the sources, and of each shard what is noted of it
        <key>/00000/ids.npy ...     the shards of a source, as the cache has them (``cache.py``)

DIR is a cache directory with a table of contents, so it is made like one: what was interrupted goes on where it ended.
The table is written last. It holds all that a run asks before its first step: counts, lengths, what was dropped and
cut, the digests. So a copy at an address is used without fetching a shard that no step reads (``fetched.py``), and the
samples, their ids and their order are those of the rows themselves.

A run has to tokenise as the directory was: ``require_same`` refuses another tokenizer, template or setting by name. The
first rows of each source are kept as well, for what looks at rows: golden prompts and checks. Rows with pictures are
refused, since their files stay where they are.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pydantic
from typing_extensions import TypedDict

from taut.config import home_path
from taut.data import cache, formats
from taut.data.entries import Shards
from taut.data.fetched import FetchedShards, RemoteShard, fetched_shards, require_room
from taut.data.schema import Columns, Format
from taut.data.sources import (
    IS_PATTERN,
    REMOTE_FOLDER,
    TOKENISED,
    Opened,
    Source,
    is_address,
)
from taut.errors import ConfigError, DataError, OutputError
from taut.io import files, remote
from taut.io.console import counted

if TYPE_CHECKING:
    from taut.data.dataset import DataConfig, OpenSource, SourcePart, Split
    from taut.data.render import Limits, Renderer
    from taut.data.schema import Kind

FORMAT = 1
FETCHED_FOLDER = "shards"
"""Folder of the cache for shards that were fetched."""
FIRST_ROWS = 64
"""Rows of each source that are kept as they are."""
FIRST_BYTES = 2**20
"""Bytes of rows of each source from which no more are kept."""
OWN = re.compile(r"[0-9a-f]{64}(\.partial)?|taut-cache-[a-z0-9_]{8}")
"""Names in a directory that was interrupted."""


class _Columns(TypedDict):
    """How the rows of a source were read (``Columns``)."""

    format: Format
    mapping: dict[str, str]
    ignore_keys: list[str]
    step_separator: str
    apply_chat_template: bool
    system: str | None
    template_variables: dict[str, Any]


class _Source(TypedDict):
    path: str
    """As it was configured."""
    names: list[str]
    """Of its files."""
    weight: float
    key: cache.Digest
    """The name of its folder."""
    columns: _Columns
    rows: list[tuple[int, Any]]
    """The first rows, with their numbers."""
    shards: list[cache.ListedShard]


class _Manifest(TypedDict):
    format: int
    made_by: str
    settings: dict[str, Any]
    """What ids and targets depend on (``settings_of``)."""
    train: list[_Source]
    eval: list[_Source]


@dataclass(frozen=True)
class TokenisedSource:
    """A source that was tokenised ahead."""

    directory: str
    """Where it is: a path or an address."""
    split: Split
    """What its samples were tokenised for; held-out data of one run may be all the data of another directory."""
    note: str
    """Why it may not be what is at the address now."""
    settings: Mapping[str, Any]
    content: _Source

    @property
    def told(self) -> str:
        """Words for the report."""
        sizes = [sum(shard["sizes"].values()) for shard in self.content["shards"]]
        counts = f"{counted(len(sizes), 'shards')}, {sum(sizes) / 1e9:.3g} GB"
        note = f"; {self.note}" if self.note else ""
        return f"tokenised ahead, in {self.directory} ({counts}){note}"

    @property
    def source(self) -> Source:
        return Source(path=self.content["path"], weight=self.content["weight"])

    @property
    def opened(self) -> Opened:
        """The first rows, as a source of rows."""
        rows = self.content["rows"]
        names = tuple(self.content["names"])
        return Opened(
            self.content["path"], self.content["key"], (), lambda: iter(rows), names, is_part=True
        )

    def columns(self, kind: Kind) -> Columns:
        read = self.content["columns"]
        return Columns(
            read["format"],
            read["mapping"],
            tuple(read["ignore_keys"]),
            kind=kind,
            step_separator=read["step_separator"],
            apply_chat_template=read["apply_chat_template"],
            system=read["system"],
            template_variables=read["template_variables"],
        )

    def shards(self, cache_directory: Path, limit: int | None) -> tuple[Shards, Remote | None]:
        """Its shards; and, where they are at an address, what fetches them."""
        listed, key = self.content["shards"], self.content["key"]
        if remote.scheme_of(self.directory) is None:
            shards, reason = cache.load(home_path(self.directory), key)
            if shards is not None and cache.listed(home_path(self.directory), key) != listed:
                shards, reason = None, "other shards than its table of contents lists"
            if shards is None:
                raise DataError(
                    f"data: {self.directory}/{key}: {reason}; expected the shards of {TOKENISED}; copy or tokenise "
                    "them again"
                )
            return shards, None
        fetched = fetched_shards(cache_directory / FETCHED_FOLDER, limit)
        there = tuple(
            RemoteShard(
                _within(self.directory, f"{key}/{cache.shard_name(number)}"),
                shard["name"],
                shard["meta"],
                shard["sizes"],
            )
            for number, shard in enumerate(listed)
        )
        require_room(there, limit)
        metas = [shard["meta"] for shard in listed]
        shards = cache.shards_of(metas, lambda number: fetched.open(there[number]), is_remote=True)
        return shards, Remote(fetched, there)


@dataclass(frozen=True)
class Remote:
    """What fetches the shards of a source."""

    fetched: FetchedShards
    shards: tuple[RemoteShard, ...]


# -- reading


def tokenised_sources(source: Source, split: Split) -> list[TokenisedSource] | None:
    """The sources in a directory that was tokenised ahead; None: it is none."""
    found = _find(source.path)
    if found is None:
        return None
    (((_, path),), note) = found
    for key in ("share", "limit", "split", "name", "revision", "format", "columns", "system"):
        if getattr(source, key) is not None:
            raise ConfigError(
                f"data.{split}: {key} is set for {source.path}, which was tokenised ahead; expected a weight only; set "
                "it where the rows are tokenised"
            )
    manifest = _read(path, source.path)
    of: Split = split if manifest[split] else "train"
    return [
        TokenisedSource(
            source.path,
            of,
            note,
            manifest["settings"],
            {**content, "weight": source.weight * content["weight"]},
        )
        for content in manifest[of]
    ]


def _find(path: str) -> remote.Fetched | None:
    """The table of contents of a directory, here or at an address; None: there is none."""
    if remote.scheme_of(path) is None:
        here = home_path(path) / TOKENISED
        return remote.Fetched([(path, here)]) if here.is_file() else None
    is_file = formats.suffix_of(urlsplit(path).path) is not None
    if is_file or IS_PATTERN.search(path) or not is_address(path):
        return None
    return remote.find(_within(path, TOKENISED), cache.directory_of(None) / REMOTE_FOLDER)


def _within(address: str, name: str) -> str:
    """The address of a file below another address; a query (of a signed address) stays."""
    parts = urlsplit(address)
    return parts._replace(path=f"{parts.path.rstrip('/')}/{name}").geturl()


def _read(path: Path, directory: str) -> _Manifest:
    try:
        raw = files.read_json(path, cache.MANIFEST_LIMIT)
        if raw.get("format") != FORMAT:
            raise DataError(
                f"data: {directory}/{TOKENISED} is of the format {raw.get('format')}; expected {FORMAT}; tokenise "
                "again with this version of taut"
            )
        manifest = pydantic.TypeAdapter(_Manifest).validate_python(raw)
        for content in (*manifest["train"], *manifest["eval"]):
            for number, shard in enumerate(content["shards"]):
                cache.require_arrays(shard["meta"], shard["sizes"], cache.shard_name(number))
        return manifest
    except cache.FAILURES as error:
        raise DataError(
            f"data: {directory}/{TOKENISED} cannot be read ({cache.reason_of(error)}); expected it as 'taut "
            "tokenise' wrote it; copy or tokenise it again"
        ) from None


def settings_of(
    config: DataConfig, kind: Kind, renderer: Renderer, limits: Limits
) -> dict[str, Any]:
    """What the ids and targets of samples depend on, beside the rows: digests, and keys of the configuration."""
    template = renderer.template
    return {
        "rows": kind,
        "chat template": hashlib.sha256(json.dumps(template.template).encode()).hexdigest(),
        "tokenizer": template.content(),
        "stop tokens": sorted(renderer.stop_set),
        "data.targets": config.targets,
        "data.max_length": limits.max_length,
        "data.too_long": limits.too_long,
        "data.min_length": limits.min_length,
        "data.without_targets": limits.without_targets,
        "data.apply_chat_template": config.apply_chat_template,
        "data.chat_template_kwargs": config.chat_template_kwargs,
        "data.system": config.system,
        "data.step_separator": config.step_separator,
        "data.token_weights": renderer.token_weights.identity() or None,
    }


def require_same(tokenised: TokenisedSource, now: Mapping[str, Any], split: Split) -> None:
    """Raise DataError where a run would have tokenised in another way."""
    for name, value in now.items():
        then = tokenised.settings.get(name)
        if then == value:
            continue
        if isinstance(then, str) and len(then) == 64:
            then, value = then[:12], value[:12]
        raise DataError(
            f"data.{split}: {tokenised.directory} was tokenised with {name} {then}, and this run has {value}; expected "
            "the same; take that of the directory, or tokenise the rows again with 'taut tokenise out=DIR'"
        )


# -- writing


def require_new(directory: Path) -> None:
    """Raise OutputError unless the directory is new, or one that was interrupted."""
    if (directory / TOKENISED).exists():
        raise OutputError(
            f"out={directory} was tokenised before; expected a new directory; name another, or remove it"
        )
    try:
        others = [path for path in directory.iterdir() if not OWN.fullmatch(path.name)]
    except FileNotFoundError:
        return
    except OSError as error:
        raise OutputError(
            f"out={directory} cannot be written: {error.strerror}; expected a new directory; name another"
        ) from None
    if others:
        raise OutputError(
            f"out={directory} has {others[0].name}; expected a new directory, or one in which 'taut tokenise' was "
            "interrupted; name another"
        )


def write(
    directory: Path,
    settings: Mapping[str, Any],
    splits: Mapping[str, Sequence[tuple[SourcePart, OpenSource]]],
) -> None:
    """Write the table of contents of data that were tokenised into ``directory``. ``settings``: of ``settings_of``."""
    manifest: dict[str, Any] = {"train": [], "eval": []}
    for split, parts in splits.items():
        manifest[split] = [_content(directory, split, *part) for part in parts]
    manifest |= {"format": FORMAT, "made_by": f"taut {version('taut')}", "settings": settings}
    try:
        files.write_text(directory / TOKENISED, json.dumps(manifest))
    except OSError as error:
        raise OutputError(
            f"out={directory} cannot be written: {error.strerror}; expected a directory with space; run again"
        ) from None


def _content(directory: Path, split: str, part: SourcePart, source: OpenSource) -> _Source:
    if source.tokenised is not None:
        raise DataError(
            f"data.{split}: {source.tokenised.directory} was tokenised before; expected rows; copy the directory as "
            "it is"
        )
    if part.shards.num_pictures or part.shards.is_fleeting:
        raise DataError(
            f"data.{split}: {part.path} has pictures; expected rows of text, since a picture's file stays where it is; "
            "take out= away, and the rows are tokenised into data.cache"
        )
    columns = source.columns
    return {
        "path": part.source,
        "names": list(part.file_names),
        "weight": part.weight,
        "key": part.key,
        "columns": {
            "format": columns.format,
            "mapping": dict(columns.mapping),
            "ignore_keys": list(columns.ignore_keys),
            "step_separator": columns.step_separator,
            "apply_chat_template": columns.apply_chat_template,
            "system": columns.system,
            "template_variables": dict(columns.template_variables),
        },
        "rows": list(_first_rows(source.opened)),
        "shards": cache.listed(directory, part.key),
    }


def _first_rows(opened: Opened) -> Iterator[tuple[int, Any]]:
    """The first rows that JSON has a place for."""
    size = 0
    for number, record in islice(opened.attempts(), FIRST_ROWS):
        try:
            line = formats.as_line(record, opened.place(number))
        except DataError:
            continue
        size += len(line)
        if size > FIRST_BYTES:
            return
        yield number, json.loads(line)
