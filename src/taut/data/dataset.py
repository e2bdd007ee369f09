"""Data from files to samples: read, validate, render, fit to length, cache, and look up by index.

``load_dataset`` returns a Dataset: a sequence of samples built on demand from memory-mapped arrays. What it holds in
memory grows with the number of sources, not of samples. A second load of the same content with the same tokenizer,
template and options reads the cache and tokenises nothing. A source with an error leaves nothing in the cache; sources
before it in a list stay there. Rows are tokenised in ``tokenise.py``.

``kind`` says how rows judge their answers (``schema.py``). A row whose answers are compared is several samples, which
stay together (``Dataset.row``).

Does not shuffle, choose fractions, pack or plan (``batching.py``). Under torchrun let one rank load first.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias, overload

import numpy as np
from pydantic import Field

from taut.config import configclass
from taut.data import cache
from taut.data.ahead import Remote, TokenisedSource, require_same, settings_of, tokenised_sources
from taut.data.entries import VALUE, Entry, Shards
from taut.data.fetched import FetchedShards, RemoteShard
from taut.data.lengths import LengthCounts
from taut.data.messages import Row, RowForm
from taut.data.render import (
    Incident,
    Limits,
    Renderer,
    Targets,
    TooLong,
)
from taut.data.schema import AnyRow, Columns, Format, Kind, read_any
from taut.data.sources import (
    IS_PATTERN,
    ITERABLE,
    Opened,
    Source,
    Stamp,
    changes,
    folder_of,
    full_place,
    numbered,
    open_source,
    place_of,
    require_apart,
)
from taut.data.template_files import is_file, read_template
from taut.data.token_weights import TokenWeight
from taut.data.tokenise import entries, workers_for
from taut.errors import ConfigError
from taut.io import remote
from taut.io.console import counted
from taut.types import IntArray, Sample
from taut.vision.content import ImagesConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from taut.vision.image_store import ImageStore

Split: TypeAlias = Literal["train", "eval"]
CACHE_VERSION = 6
"""Raise it whenever the same row could give other ids or targets, or be refused: it is part of every cache key."""
BINS, LISTED = 40, 200
"""In the run log's description of a set: bins of the histogram of lengths; rows and sources that are named."""


@configclass
class DataConfig:
    """What to train on."""

    train: str | list[str | Source] | None = None
    """A path, a list of paths, or a mixture: a list of tables with path and weight."""
    eval: str | list[str | Source] | None = None
    """Held-out data, as train."""
    format: Format = "auto"
    """How rows are read; auto recognises them by their columns."""
    columns: dict[str, str] = field(default_factory=dict)
    """taut's name of a column -> its name in the data."""
    ignore_keys: tuple[str, ...] = ()
    """Keys of messages, and columns, that may be present and are not used."""
    targets: Targets = "assistant"
    """Which tokens of a conversation are learned: all assistant turns, the last one, or all tokens."""
    token_weights: tuple[TokenWeight, ...] = ()
    """Weights of parts of answers in the loss, as in [{ pattern = "<tool_call>.+?</tool_call>", weight = 2 }]."""
    template: str | None = None
    """A chat template to use in place of the tokenizer's own: a file, or the template itself; or hermes, which comes
    with taut: ChatML that writes tools and calls as Hermes does."""
    apply_chat_template: bool | None = None
    """Render prompts and completions that are plain text with the chat template, as a user message and an assistant
    message. By default they are used as they are, and taut check warns if the tokenizer has a chat template. Documents
    (the column text) are never rendered."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Values of the chat template's own variables, as in { enable_thinking = false }. They become the defaults of the
    template that is used, and saved: a server of the model needs no setting."""
    system: str | None = None
    """A system message put in front of conversations that have none; a row's own takes precedence."""
    max_length: Annotated[int, Field(ge=2)] | None = None
    """Largest number of tokens of a sample; by default the model's context."""
    too_long: TooLong = "error"
    """What happens to longer samples."""
    min_length: Annotated[int, Field(ge=0)] = 0
    """Shorter samples are left out."""
    without_targets: Literal["error", "drop"] = "error"
    """What happens to rows from which nothing can be learned: no target, or no answer better than another."""
    step_separator: str = "\n"
    """Text that joins the steps of stepwise data."""
    images: ImagesConfig = field(default_factory=ImagesConfig)
    """How pictures are read."""
    workers: Annotated[int, Field(ge=1)] | None = None
    """Processes that tokenise; 1: this one. By default one per processor core, at most 16, for a source of 16
    MiB or more, else 1."""
    cache: str | None = None
    """Directory for tokenised data; by default $TAUT_CACHE or the user's cache directory."""
    streaming: bool = False
    """Train on files as they arrive in the directory data.train, for a number of steps (docs/data.md)."""
    streaming_window: Annotated[int, Field(ge=1)] = 8192
    """Rows of a stream that are shuffled among themselves. They are read before the first step that has one of them."""
    streaming_settle: Annotated[float, Field(ge=0)] = 10.0
    """Seconds for which a file of a stream has not changed when it is taken; 0 where files are renamed into place."""
    streaming_timeout: Annotated[float, Field(gt=0)] = 3600.0
    """Seconds that a step waits for new rows of a stream; then the run stops, and can be resumed."""
    fetched_gb: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Gigabytes (10^9 bytes) of tokenised shards from an address that are kept in the cache directory at a time; by
    default all that are fetched."""

    def __post_init__(self) -> None:
        if self.token_weights and self.targets == "all":
            raise ConfigError(
                "data.token_weights with data.targets=all: the patterns are looked for in answers, and every token is "
                "learned; expected data.targets=assistant or last; set it, or take data.token_weights out"
            )
        require_apart(_sources_of(self, "train"), _sources_of(self, "eval"))
        if self.is_stream:
            self._require_streamable()
        if self.is_stream or not self.train:
            return
        for key in ("window", "settle", "timeout"):
            if getattr(self, f"streaming_{key}") != getattr(DataConfig, f"streaming_{key}"):
                raise ConfigError(
                    f"data.streaming_{key} is set and data.train is no stream; expected data.streaming=true; set it, "
                    "or take the key out"
                )

    @property
    def is_stream(self) -> bool:
        """Whether data.train has no end: a directory that grows, or an iterable."""
        named = _sources_of(self, "train")
        return bool(named) and (self.streaming or any(it.path == ITERABLE for it in named))

    def _require_streamable(self) -> None:
        """Raise ConfigError for settings that a stream does not have."""
        train = _sources_of(self, "train")
        if len(train) != 1:
            raise ConfigError(
                f"data.streaming=true with {len(train)} sources in data.train; expected one directory; let one process "
                "write the mixture"
            )
        (source,) = train
        for key, default in (
            ("weight", 1.0),
            ("limit", None),
            ("split", None),
            ("name", None),
            ("revision", None),
            ("replace", None),
            ("prepend", None),
            ("append", None),
        ):
            if getattr(source, key) != default:
                raise ConfigError(
                    f"data.train: {key} is set and {source.path} is a stream, which has no epochs and no end; "
                    f"expected none; take {key} out"
                )
        if remote.scheme_of(source.path) or IS_PATTERN.search(source.path):
            raise ConfigError(
                f"data.streaming=true and data.train={source.path}; expected a directory of this machine; name one"
            )
        if self.workers not in (None, 1):
            raise ConfigError(
                f"data.workers={self.workers} and data.train is a stream, which is tokenised next to training, in the "
                "order of its rows; expected 1; take the key out"
            )

    @property
    def system_messages(self) -> set[str]:
        """The system messages that sources put in front of conversations without one."""
        named = [*_sources_of(self, "train"), *_sources_of(self, "eval")]
        texts = [self.system if source.system is None else source.system for source in named]
        return {text for text in texts if text}


# -- what a configuration names


def sources(config: DataConfig, split: Split, kind: Kind = "sft") -> list[tuple[Source, Columns]]:
    """The sources that ``config.train`` or ``config.eval`` names, and how each is read."""
    named = _sources_of(config, split)
    if not named:
        raise ConfigError(
            f"data.{split} is not set; expected a path or a list; set data.{split}=FILE.jsonl"
        )
    return [
        (
            source,
            Columns(
                source.format or config.format,
                config.columns if source.columns is None else source.columns,
                config.ignore_keys,
                kind=kind,
                step_separator=config.step_separator,
                folder=folder_of(source, config.images.folder, "data.images.folder"),
                images=config.images,
                apply_chat_template=bool(config.apply_chat_template),
                system=config.system if source.system is None else source.system,
                template_variables=source.chat_template_kwargs or {},
            ),
        )
        for source in named
    ]


class OpenSource(NamedTuple):
    """A source that exists."""

    source: Source
    columns: Columns
    opened: Opened
    """Its rows; of a source that was tokenised ahead the first."""
    tokenised: TokenisedSource | None = None


def open_sources(config: DataConfig, split: Split, kind: Kind = "sft") -> list[OpenSource]:
    """The sources that ``config.train`` or ``config.eval`` names, opened. A directory that was tokenised ahead is the
    sources that were tokenised.
    """
    found = []
    for source, columns in sources(config, split, kind):
        ahead = tokenised_sources(source, split)
        if ahead is None:
            found.append(OpenSource(source, columns, open_source(source)))
        else:
            if split == "eval" and ahead[0].split == "train":
                _require_own_data(config, source)
            found += [OpenSource(it.source, it.columns(kind), it.opened, it) for it in ahead]
    return found


def _require_own_data(config: DataConfig, held_out: Source) -> None:
    """Raise ConfigError where held-out samples would be those that are trained on."""
    if held_out.path in [source.path for source in _sources_of(config, "train")]:
        raise ConfigError(
            f"data.eval={held_out.path} was tokenised without data.eval, and data.train is the same; expected held-out "
            "data; tokenise with data.eval too, or name another directory"
        )


def _sources_of(config: DataConfig, split: str) -> list[Source]:
    value = (config.train if split == "train" else config.eval) or []
    items = [value] if isinstance(value, str) else value
    return [Source(path=item) if isinstance(item, str) else item for item in items]


def input_paths(config: DataConfig) -> list[str]:
    """Every file, directory or name that a data config reads."""
    paths = [source.path for split in ("train", "eval") for source in _sources_of(config, split)]
    template = config.template if is_file(config.template) else None
    return [*paths, *(path for path in (template, config.cache) if path)]


def build_renderer(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, image_store: ImageStore | None = None
) -> Renderer:
    """The renderer that a data configuration describes. ``image_store``: for a model that takes images."""
    template = read_template(config.template, tokenizer, "data.template")
    variables = config.chat_template_kwargs
    return Renderer(
        tokenizer,
        template,
        config.targets,
        image_store=image_store,
        variables=variables,
        token_weights=config.token_weights,
    )


# -- rows


@overload
def read_rows(config: DataConfig, split: Split, kind: Literal["sft"] = "sft") -> Iterator[Row]: ...
@overload
def read_rows(config: DataConfig, split: Split, kind: Kind) -> Iterator[AnyRow]: ...
def read_rows(config: DataConfig, split: Split, kind: Kind = "sft") -> Iterator[AnyRow]:
    """The rows of ``config.train`` or ``config.eval`` themselves, in the order of sources and rows; of what was
    tokenised ahead the first.
    """
    _require_no_stream(config, split)
    for source in open_sources(config, split, kind):
        for number, record in source.opened.records():
            yield read_any(record, source.opened.place(number), source.columns)


# -- samples


@dataclass(frozen=True)
class DataReport:
    """Counts of a data set's rows and samples, for people and for the run log."""

    num_rows: int
    num_samples: int
    num_tokens: int
    num_targets: int
    dropped: tuple[Incident, ...]
    cut: tuple[Incident, ...]
    is_cached: bool
    """Whether every source came from the cache."""
    decisions: tuple[str, ...]
    """For each source, whether it came from the cache, and why not."""
    num_pictures: int = 0
    """Distinct images of each source."""

    @property
    def sizes(self) -> str:
        sizes = (
            ("rows", self.num_rows),
            ("samples", self.num_samples),
            ("tokens", self.num_tokens),
            ("targets", self.num_targets),
        )
        return ", ".join(counted(number, nouns) for nouns, number in sizes) + self.pictures

    @property
    def pictures(self) -> str:
        """The number of images, where there are any."""
        return f", {counted(self.num_pictures, 'pictures')}" if self.num_pictures else ""

    def __str__(self) -> str:
        text = self.sizes
        for name, incidents in (("dropped", self.dropped), ("cut", self.cut)):
            if incidents:
                first = incidents[0]
                text += f", {len(incidents):,} {name} (first {first.place}: {first.reason})"
        return text + (", from the cache" if self.is_cached else "")


@dataclass(frozen=True, eq=False)
class SourcePart:
    """One tokenised source of a data set."""

    path: str
    """As configured; numbered where a mixture names a path again."""
    names: tuple[str, ...]
    """Of its files, with which sample ids begin; numbered likewise, so that these are unique."""
    weight: float
    key: str
    shards: Shards
    source: str
    """As configured."""
    stamps: tuple[Stamp, ...]
    """Its files, as they were read."""
    file_names: tuple[str, ...]
    """Of its files, as they are read."""
    image_store: ImageStore | None = None
    """The store of its images."""
    remote: Remote | None = None
    """What fetches its shards; None: they are here."""

    def sample(self, index: int) -> Sample:
        entry, inside = self.shards.locate(index)
        return entry.sample(inside, self._name(entry, inside), self.image_store)

    @property
    def identity(self) -> str:
        """A digest that is equal where the samples are: of their inputs; of the arrays, where there may be images."""
        return self.key if self.image_store is None else self.shards.digest

    @property
    def num_samples(self) -> int:
        return self.shards.num_samples

    @property
    def num_groups(self) -> int:
        """Rows that have samples."""
        return self.shards.num_groups

    def length(self, index: int) -> int:
        """The number of tokens of a sample."""
        entry, inside = self.shards.locate(index)
        start, stop = entry.arrays["offsets"][inside : inside + 2]
        return int(stop - start)

    def first_beyond(self, size: int) -> tuple[str, int] | None:
        """The first sample with an id of ``size`` or more, and the id."""
        for number, facts in enumerate(self.shards.facts):
            if facts.largest_id >= size:
                entry = self.shards[number]
                ids = entry.arrays["ids"]
                at = int((ids >= size).argmax())
                inside = int(np.searchsorted(entry.arrays["offsets"], at, side="right")) - 1
                return self._name(entry, inside), int(ids[at])
        return None

    def line(self, index: int) -> int:
        """The line or record that a sample comes from."""
        entry, inside = self.shards.locate(index)
        return int(entry.arrays["line"][inside])

    def name(self, index: int) -> str:
        return self._name(*self.shards.locate(index))

    def _name(self, entry: Entry, inside: int) -> str:
        line, part = entry.arrays["line"][inside], entry.arrays["part"][inside]
        place = place_of(self.names, int(line))
        return f"{place}#{part}" if part else place


class Samples(Sequence[Sample]):
    """Samples by index or slice; a subclass has ``__len__`` and ``sample``."""

    def sample(self, index: int) -> Sample:
        """The sample number ``index``, counted from the end if below 0. Raises IndexError beyond the last."""
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self.sample(i) for i in range(*index.indices(len(self)))]
        return self.sample(index)


class Dataset(Samples):
    """Samples by index, in the order of sources and rows."""

    def __init__(
        self, parts: Sequence[SourcePart], decisions: Sequence[str] = (), is_cached: bool = False
    ) -> None:
        self.parts = tuple(parts)
        self._starts = np.cumsum([0, *(part.num_samples for part in parts)])
        self._row_starts = np.cumsum([0, *(part.num_groups for part in parts)])
        identity = json.dumps([[part.identity, part.weight] for part in parts])
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()
        self.report = self._report(decisions, is_cached)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def sample(self, index: int) -> Sample:
        part, offset = self._locate(index)
        return part.sample(offset)

    @property
    def num_groups(self) -> int:
        """Rows that have samples."""
        return int(self._row_starts[-1])

    def row(self, index: int) -> range:
        """The samples of row ``index``; rows without samples are not counted."""
        number = int(np.searchsorted(self._row_starts, index, side="right")) - 1
        own = self.parts[number].shards.row(index - int(self._row_starts[number]))
        first = int(self._starts[number])
        return range(first + own.start, first + own.stop)

    def row_of(self, index: int) -> int:
        """The row of sample ``index``."""
        part, offset = self._locate(index)
        return int(self._row_starts[self.parts.index(part)]) + part.shards.row_of(offset)

    def expect(self, steps: Iterable[Sequence[int]], *, rows: bool) -> None:
        """The next steps read these samples, or rows: shards at an address are fetched ahead. Of data that are here
        nothing is looked at.
        """
        there = [(number, part) for number, part in enumerate(self.parts) if part.remote]
        if not there:
            return
        starts, upcoming = self._row_starts if rows else self._starts, list[RemoteShard]()
        for indices in steps:
            number_S = np.searchsorted(starts, indices, side="right") - 1
            for number, part in there:
                own = np.asarray(indices)[number_S == number] - starts[number]
                assert part.remote is not None
                upcoming += [part.remote.shards[n] for n in part.shards.holding(own, rows=rows)]
        self.fetched[0].expect(upcoming)

    @property
    def is_elsewhere(self) -> bool:
        """Whether shards would have to be fetched to look at all samples."""
        return any(part.remote and len(part.shards) > 1 for part in self.parts)

    def at_hand(self) -> Iterator[tuple[range, Entry]]:
        """The shards that may be opened for a look, each with its samples: all that are here, and the first of a source
        at an address.
        """
        for first, part in zip(self._starts.tolist(), self.parts, strict=False):
            starts = (first + part.shards.starts_K).tolist()
            for number in range(1 if part.remote else len(part.shards)):
                yield range(starts[number], starts[number + 1]), part.shards[number]

    @property
    def fetched(self) -> list[FetchedShards]:
        """What fetches shards, if any source is at an address."""
        return list(dict.fromkeys(part.remote.fetched for part in self.parts if part.remote))

    def length(self, index: int) -> int:
        """The number of tokens of a sample, without building it."""
        part, offset = self._locate(index)
        return part.length(offset)

    def sizes(self, of: Literal["tokens", "targets"], *, rows: bool = False) -> Iterator[IntArray]:
        """The number of tokens, or of targets, of every sample, or row with samples, shard by shard."""
        name = "offsets" if of == "tokens" else "target_offsets"
        for entry in (entry for part in self.parts for entry in part.shards):
            offsets, starts = entry.arrays[name], entry.arrays.get("row_offsets")
            yield np.diff(offsets[starts] if rows and starts is not None else offsets)

    @cached_property
    def lengths(self) -> LengthCounts:
        """How many samples have each number of tokens."""
        return LengthCounts.joined(part.shards.lengths for part in self.parts)

    @property
    def longest(self) -> int:
        """The largest number of tokens of a sample."""
        return self.lengths.longest

    def longer_than(self, size: float, most: int) -> list[int]:
        """The first samples with more tokens, at most so many."""
        found: list[int] = []
        first = 0
        if not self.lengths.num_over(size):
            return found
        for length_S in self.sizes("tokens"):
            found += (first + np.flatnonzero(length_S > size)[: most - len(found)]).tolist()
            if len(found) == most:
                break
            first += length_S.size
        return found

    @property
    def image_store(self) -> ImageStore | None:
        """The store of images; None: there are none."""
        return self.parts[0].image_store

    def sample_id(self, index: int) -> str:
        """The sample's id, without building it."""
        part, offset = self._locate(index)
        return part.name(offset)

    def row_place(self, index: int) -> str:
        """The source and line of the sample's row, as ``read_rows`` names it."""
        part, offset = self._locate(index)
        return place_of(part.file_names, part.line(offset))

    @property
    def num_ended(self) -> int:
        """How many samples have a token that ends an answer among their targets."""
        return sum(facts.num_ended for part in self.parts for facts in part.shards.facts)

    def first_beyond(self, size: int) -> tuple[str, int] | None:
        """The first sample with an id of ``size`` or more, and the id; None: there is none."""
        return next((hit for part in self.parts if (hit := part.first_beyond(size))), None)

    def has_value(self, name: str) -> bool:
        """Whether any sample has a value of this name that is not 0."""
        array = VALUE + name
        return any(array in facts.values for part in self.parts for facts in part.shards.facts)

    @property
    def forms(self) -> Counter[RowForm]:
        """How many rows are conversations, completions of a plain text, or documents."""
        return sum((Counter(part.shards.forms) for part in self.parts), Counter[RowForm]())

    def described(self, name: Split) -> dict[str, Any]:
        """What the run log says of this set, in a bounded form: sizes, a histogram of lengths, the first rows that were
        left out or cut, the sources.
        """
        report = self.report
        lengths = self.lengths
        bins = np.linspace(lengths.shortest, lengths.longest + 1, BINS + 1)
        edges = np.unique(bins.round().astype(np.int64))
        counts, _ = np.histogram(lengths.size_L, edges, weights=lengths.count_L)
        sizes = ("num_rows", "num_samples", "num_tokens", "num_targets", "num_pictures")
        listed: dict[str, Any] = {}
        for kind, incidents in (("dropped", report.dropped), ("cut", report.cut)):
            listed[f"num_{kind}"] = len(incidents)
            listed[kind] = [{"place": i.place, "reason": i.reason} for i in incidents[:LISTED]]
        return {
            "name": name,
            **{size: getattr(report, size) for size in sizes},
            "lengths": {"edges": edges.tolist(), "counts": counts.tolist()},
            **listed,
            "sources": [
                {
                    "path": part.path,
                    "weight": part.weight,
                    "num_rows": part.shards.num_rows,
                    "num_samples": part.num_samples,
                }
                for part in self.parts[:LISTED]
            ],
        }

    def changed_sources(self) -> list[str]:
        """The paths of the sources whose files have changed since they were read, or are gone: a look at each file's
        size, time and inode. The files of a Hugging Face data set are its Arrow files.
        """
        changed = (part.source for part in self.parts if changes(part.stamps))
        return list(dict.fromkeys(changed))

    def _locate(self, index: int) -> tuple[SourcePart, int]:
        index = int(index) + len(self) if index < 0 else int(index)
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self.parts[number], index - int(self._starts[number])

    def _report(self, decisions: Sequence[str], is_cached: bool) -> DataReport:
        incidents = [
            replace(incident, place=full_place(part.names, incident.place))
            for part in self.parts
            for incident in part.shards.incidents
        ]
        return DataReport(
            num_rows=sum(part.shards.num_rows for part in self.parts),
            num_samples=len(self),
            num_tokens=sum(part.shards.num_tokens for part in self.parts),
            num_targets=sum(part.shards.num_targets for part in self.parts),
            dropped=tuple(incident for incident in incidents if incident.kind == "dropped"),
            cut=tuple(incident for incident in incidents if incident.kind == "cut"),
            is_cached=is_cached,
            decisions=tuple(decisions),
            num_pictures=sum(part.shards.num_pictures for part in self.parts),
        )


def load_dataset(
    config: DataConfig,
    split: Split,
    renderer: Renderer,
    max_length: int,
    cache_dir: Path | None = None,
    kind: Kind = "sft",
    *,
    looks_again: bool = True,
) -> Dataset:
    """The samples of ``config.train`` or ``config.eval``, from the cache where it holds them. ``looks_again``: whether
    sources whose images could not be read, or have changed, are tokenised again; false where another process has just
    done so.
    """
    require_fitting(config, kind)
    _require_no_stream(config, split)
    named = open_sources(config, split, kind)
    directory = cache_dir or cache.directory_of(config.cache)
    limits = limits_of(config, max_length)
    identity, settings = renderer.identity(), settings_of(config, kind, renderer, limits)
    most_fetched = None if config.fetched_gb is None else int(config.fetched_gb * 1e9)
    parts, decisions, is_cached = [], [], True
    seen_paths, seen_names = Counter[str](), Counter[str]()
    for source, columns, opened, tokenised in named:
        remote = None
        if tokenised is not None:
            require_same(tokenised, settings, split)
            key = tokenised.content["key"]
            shards, remote = tokenised.shards(directory, most_fetched)
            told = f"{source.path}: {tokenised.told}"
            if remote is not None and config.fetched_gb is not None:
                told += f"; of what is fetched at most {config.fetched_gb:g} GB are kept"
            decisions.append(told)
        else:
            has_images = renderer.image_store is not None
            key = key_of(opened.digest, columns, limits, identity, has_images=has_images)
            cached, reason = cache.load(directory, key)
            if cached is not None and looks_again and (reason := cached.stale_reason()):
                cache.forget(directory, key)
                cached = None
            if cached is None:
                is_cached = False
                num_workers, how = workers_for(opened, renderer, config.workers)
                reason += how
                num_finished = cache.save(
                    directory, key, partial(entries, opened, columns, limits, renderer, num_workers)
                )
                if num_finished:
                    reason += f"; the first {num_finished:,} rows by a run that was interrupted"
                cached, trouble = cache.load(directory, key)
                assert cached is not None, f"a fresh cache entry cannot be read: {trouble}"
            shards = cached
            decisions.append(
                f"{source.path}: {f'tokenised ({reason})' if reason else 'from the cache'}"
                + (f"; {opened.taken}" if opened.taken else "")
            )
        (label,), names = numbered([source.path], seen_paths), numbered(opened.names, seen_names)
        weight = source.weight
        if split == "eval" and weight != 1:
            raise ConfigError(
                f"data.eval: {label} has weight {weight:g}; expected none: held-out samples count once each; remove "
                "the weight"
            )
        is_compared = kind == "preference"
        count = shards.num_groups if is_compared else shards.num_samples
        if round(weight * count) == 0:
            nouns = "rows" if is_compared else "samples"
            raise ConfigError(
                f"data.train: weight {weight:g} gives none of the {count} {nouns} of {label} to an epoch; expected at "
                "least one; raise the weight, or leave the source out"
            )
        stamps, image_store = opened.stamps, renderer.image_store
        parts.append(
            SourcePart(
                label,
                names,
                weight,
                key,
                shards,
                opened.path,
                stamps,
                opened.names,
                image_store,
                remote,
            )
        )
    return Dataset(parts, decisions, is_cached)


def _require_no_stream(config: DataConfig, split: Split) -> None:
    if split == "train" and config.is_stream:
        raise ConfigError(
            "data.train is a stream, and this reads all of its rows; expected files that are complete; take "
            "data.streaming out, and the files that are there now are read"
        )


def limits_of(config: DataConfig, max_length: int) -> Limits:
    """The length policy of a configuration."""
    return Limits(max_length, config.too_long, config.min_length, config.without_targets)


def require_fitting(config: DataConfig, kind: Kind) -> None:
    """Refuse options that this kind of data does not use."""
    if kind != "stepwise" and config.step_separator != DataConfig.step_separator:
        raise ConfigError(
            f"data.step_separator is set, and these are {kind} data; expected it for stepwise data only; remove it"
        )
    if kind != "sft" and config.targets == "all":
        raise ConfigError(
            f"data.targets=all would learn the prompts of {kind} data too; expected assistant (all of an answer) or "
            "last (its last turn); set data.targets"
        )
    if kind != "sft" and config.too_long == "split":
        raise ConfigError(
            f"data.too_long=split would take the answers of {kind} data apart; expected error, drop or truncate; set "
            "data.too_long"
        )


def key_of(
    content: str, columns: Columns, limits: Limits, identity: str, *, has_images: bool
) -> str:
    """The hash of everything that a source's samples depend on. ``content``: names the rows."""
    parts = [CACHE_VERSION, content, identity, repr(columns), repr(limits)]
    if has_images:
        frames = columns.images.fps, columns.images.max_frames
        parts += [*frames, columns.folder, str(Path.cwd())]
        if columns.images.max_frame_pixels is not None:
            parts.append({"max_frame_pixels": columns.images.max_frame_pixels})
    if columns.apply_chat_template:
        parts.append("apply_chat_template")
    if columns.system:
        parts.append({"system": columns.system})
    if columns.template_variables:
        parts.append({"chat_template_kwargs": columns.template_variables})
    if columns.kind != "sft":
        parts += [columns.kind, columns.step_separator]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
