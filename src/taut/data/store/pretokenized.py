"""Pretokenized data: the directory that ``taut tokenize out=DIR`` writes, as a source of a run.

    DIR/taut-shards.json            how the rows were tokenized, the sources, and the meta.json of each shard
        <key>/00000/ids.npy ...     the shards of a source, as the cache has them (``cache.py``)

DIR is a cache directory with a table of contents, so it is made like one: an interrupted command continues where it
ended. The table is written last. It holds all that a run asks before its first step: counts, lengths, incidents and
digests. So a copy at an address is used without fetching a shard that no step reads (``remote_shards.py``), and the
samples, their ids and their order are equal to those of the rows.

A run has to tokenize as the directory was: ``require_same`` refuses another tokenizer, template or setting by name. The
first rows of each source are kept too, for golden prompts and checks. Rows with pictures are refused, since the files
of pictures are not copied.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pydantic
from typing_extensions import TypedDict

from taut.config import home_path
from taut.data.read import formats
from taut.data.read.sources import PRETOKENIZED, REMOTE_FOLDER, OpenSource, is_address
from taut.data.rows.schema import Columns
from taut.data.settings import IS_PATTERN, Format, Source
from taut.data.store import cache
from taut.data.store.remote_shards import RemoteShard, RemoteShards, require_room, shard_fetcher
from taut.data.store.shards import Shards
from taut.errors import ConfigError, DataError, OutputError
from taut.io import files, remote
from taut.io.console import counted

if TYPE_CHECKING:
    from taut.data.dataset import ConfiguredSource, SourceShards
    from taut.data.render.render import Limits, Renderer
    from taut.data.settings import DataConfig, Kind, Split

FORMAT = 1
FETCHED_FOLDER = "shards"
"""Folder of the cache for fetched shards."""
FIRST_ROWS = 64
"""Number of rows of each source that are kept."""
FIRST_BYTES = 2**20
"""Maximum bytes of kept rows of each source."""
OWN = re.compile(r"[0-9a-f]{64}(\.partial)?|taut-cache-[a-z0-9_]{8}")
"""Names in the directory of an interrupted command."""


class _Columns(TypedDict):
    """Options with which the rows of a source were read (``Columns``)."""

    format: Format
    mapping: dict[str, str]
    ignore_keys: list[str]
    step_separator: str
    apply_chat_template: bool
    system: str | None
    template_variables: dict[str, Any]


class _Source(TypedDict):
    path: str
    """As configured."""
    names: list[str]
    """Names of its files."""
    weight: float
    key: cache.Digest
    """Name of its folder."""
    columns: _Columns
    rows: list[tuple[int, Any]]
    """First rows, with their numbers."""
    shards: list[cache.ShardRecord]


class _Manifest(TypedDict):
    format: int
    made_by: str
    settings: dict[str, Any]
    """All that ids and targets depend on (``settings_of``)."""
    train: list[_Source]
    eval: list[_Source]


@dataclass(frozen=True)
class PretokenizedSource:
    """A source that was tokenized before the run."""

    directory: str
    """A path or an address."""
    split: Split
    """The split that its samples were tokenized for: data.eval may name a directory that has training data only."""
    note: str
    """Reason why it may differ from what is at the address now."""
    settings: Mapping[str, Any]
    content: _Source

    @property
    def described(self) -> str:
        """Description for the report."""
        sizes = [sum(shard["sizes"].values()) for shard in self.content["shards"]]
        counts = f"{counted(len(sizes), 'shards')}, {sum(sizes) / 1e9:.3g} GB"
        note = f"; {self.note}" if self.note else ""
        return f"tokenized ahead, in {self.directory} ({counts}){note}"

    @property
    def source(self) -> Source:
        return Source(path=self.content["path"], weight=self.content["weight"])

    @property
    def opened(self) -> OpenSource:
        """The first rows, as a source of rows."""
        content = self.content
        return OpenSource(
            content["path"],
            content["key"],
            (),
            lambda _: iter(content["rows"]),
            tuple(content["names"]),
            is_part=True,
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
            empty="drop",  # what is empty was left out, or it would not be here
        )

    def shards(
        self, cache_directory: Path, limit: int | None
    ) -> tuple[Shards, RemoteShards | None]:
        """Its shards; and where they are if they have to be fetched. ``limit``: maximum bytes that are kept."""
        # Here: they are opened like those of a cache.
        listed, key = self.content["shards"], self.content["key"]
        if remote.scheme_of(self.directory) is None:
            shards, reason = cache.load(home_path(self.directory), key)
            if (
                shards is not None
                and cache.read_manifest(home_path(self.directory) / key) != listed
            ):
                shards, reason = None, "other shards than its table of contents lists"
            if shards is None:
                raise DataError(
                    f"data: {self.directory}/{key}: {reason}; expected the shards of {PRETOKENIZED}; copy or tokenize "
                    "them again"
                )
            return shards, None
        # At an address: each is fetched when it is first needed.
        fetcher = shard_fetcher(cache_directory / FETCHED_FOLDER, limit)
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
        summaries = [cache.summary_of(shard["meta"]) for shard in listed]
        shards = Shards(summaries, lambda number: fetcher.open(there[number]))
        return shards, RemoteShards(fetcher, there)


# -- reading


def pretokenized_sources(source: Source, split: Split) -> list[PretokenizedSource] | None:
    """The sources of a pretokenized directory; None if ``source`` is none."""
    found = _find(source.path)
    if found is None:
        return None
    (((_, path),), note) = found
    for key in ("share", "limit", "split", "name", "revision", "format", "columns", "system"):
        if getattr(source, key) is not None:
            raise ConfigError(
                f"data.{split}: {key} is set for {source.path}, which was tokenized ahead; expected a weight only; set "
                "it where the rows are tokenized"
            )
    manifest = _read(path, source.path)
    of: Split = split if manifest[split] else "train"
    return [
        PretokenizedSource(
            source.path,
            of,
            note,
            manifest["settings"],
            {**content, "weight": source.weight * content["weight"]},
        )
        for content in manifest[of]
    ]


def _find(path: str) -> remote.Fetched | None:
    """The table of contents of a directory, here or at an address; None if there is none."""
    if remote.scheme_of(path) is None:
        here = home_path(path) / PRETOKENIZED
        return remote.Fetched([(path, here)]) if here.is_file() else None
    is_file = formats.suffix_of(urlsplit(path).path) is not None
    if is_file or IS_PATTERN.search(path) or not is_address(path):
        return None
    return remote.find(_within(path, PRETOKENIZED), cache.directory_of(None) / REMOTE_FOLDER)


def _within(address: str, name: str) -> str:
    """The address of a file below another address, with the query of a signed address."""
    parts = urlsplit(address)
    return parts._replace(path=f"{parts.path.rstrip('/')}/{name}").geturl()


def _read(path: Path, directory: str) -> _Manifest:
    try:
        raw = files.read_json(path, cache.MANIFEST_LIMIT)
        if raw.get("format") != FORMAT:
            raise DataError(
                f"data: {directory}/{PRETOKENIZED} is of the format {raw.get('format')}; expected {FORMAT}; tokenize "
                "again with this version of taut"
            )
        manifest = pydantic.TypeAdapter(_Manifest).validate_python(raw)
        for content in (*manifest["train"], *manifest["eval"]):
            for number, shard in enumerate(content["shards"]):
                cache.require_arrays(shard["meta"], shard["sizes"], cache.shard_name(number))
        return manifest
    except cache.FAILURES as error:
        raise DataError(
            f"data: {directory}/{PRETOKENIZED} cannot be read ({cache.reason_of(error)}); expected it as 'taut "
            "tokenize' wrote it; copy or tokenize it again"
        ) from None


def settings_of(
    config: DataConfig, kind: Kind, renderer: Renderer, limits: Limits
) -> dict[str, Any]:
    """All that the ids and targets of samples depend on beside the rows: digests, and keys of the configuration."""
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
        "data.empty": None if config.empty == "error" else config.empty,
        "data.apply_chat_template": config.apply_chat_template,
        "data.chat_template_kwargs": config.chat_template_kwargs,
        "data.control_tokens": "as_text" if renderer.template.is_as_text else None,
        "data.system": config.system,
        "data.step_separator": config.step_separator,
        "data.token_weights": renderer.token_weights.identity() or None,
    }


def require_same(source: PretokenizedSource, now: Mapping[str, Any], split: Split) -> None:
    """Raise DataError where a run would tokenize in another way."""
    for name, value in now.items():
        then = source.settings.get(name)
        if then == value:
            continue
        if isinstance(then, str) and len(then) == 64:
            then, value = then[:12], value[:12]
        raise DataError(
            f"data.{split}: {source.directory} was tokenized with {name} {then}, and this run has {value}; expected "
            "the same; set it so, or tokenize again with 'taut tokenize out=DIR'"
        )


# -- writing


def require_new(directory: Path) -> None:
    """Raise OutputError unless the directory is new, or that of an interrupted command."""
    try:
        others = [path.name for path in directory.iterdir() if not OWN.fullmatch(path.name)]
    except FileNotFoundError:
        return
    except OSError as error:
        fault = f"cannot be written: {error.strerror}"
    else:
        if not others:
            return
        fault = "was tokenized before" if PRETOKENIZED in others else f"has {others[0]}"
    raise OutputError(
        f"out={directory} {fault}; expected a new directory, or one in which 'taut tokenize' was interrupted; name "
        "another, or remove it"
    )


def write(
    directory: Path,
    settings: Mapping[str, Any],
    splits: Mapping[str, Sequence[tuple[SourceShards, ConfiguredSource]]],
) -> None:
    """Write the table of contents of the shards in ``directory``. ``settings``: those of ``settings_of``."""
    manifest: dict[str, Any] = {"train": [], "eval": []}
    for split, parts in splits.items():
        manifest[split] = [_content(directory, split, *part) for part in parts]
    manifest |= {"format": FORMAT, "made_by": f"taut {version('taut')}", "settings": settings}
    try:
        files.write_text(directory / PRETOKENIZED, json.dumps(manifest))
    except OSError as error:
        raise OutputError(
            f"out={directory} cannot be written: {error.strerror}; expected a directory with space; run again"
        ) from None


def _content(directory: Path, split: str, part: SourceShards, source: ConfiguredSource) -> _Source:
    fault = ""
    if source.pretokenized is not None:
        fault = (
            f"{source.pretokenized.directory} was tokenized before; expected rows; copy it as it is"
        )
    elif part.shards.num_pictures or part.shards.depends_on_files:
        fault = (
            f"{part.path} has pictures; expected rows of text, since a picture's file stays where it is; take out= "
            "away, and the rows are tokenized into data.cache"
        )
    if fault:
        raise DataError(f"data.{split}: {fault}")
    # Keep the first rows, except those that JSON cannot represent.
    rows: list[tuple[int, Any]] = []
    size = 0
    for number, record in islice(source.opened.read_records(strict=False), FIRST_ROWS):
        try:
            line = formats.as_line(record, source.opened.place(number))
        except DataError:
            continue
        size += len(line)
        if size > FIRST_BYTES:
            break
        rows.append((number, json.loads(line)))
    columns, shards = source.columns, cache.read_manifest(directory / part.key)
    assert shards is not None, "this process has just written or loaded them"
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
        "rows": rows,
        "shards": shards,
    }
