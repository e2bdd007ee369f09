"""Data from files to samples: read, validate, render, fit to length, cache, and look up by index.

``load_dataset`` returns a Dataset: a sequence of samples built on demand from memory-mapped shards. Its memory grows
with the number of sources, not of samples. A second load of the same content with the same tokenizer, template and
options reads the cache and tokenizes nothing. A source with an error leaves nothing in the cache; the sources before it
stay there. ``tokenize.py`` makes the shards.

``kind`` says how rows judge their answers (``rows/schema.py``). A row whose answers are compared is several samples,
which stay together (``Dataset.row``).

A large file may be tokenized while a run trains on it (``growing.py``).

Does not shuffle, choose fractions, pack or plan (``batching.py``). Under torchrun let one rank load first.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import numpy as np

from taut.config import Decision
from taut.data.read.sources import (
    OpenSource,
    Stamp,
    changes,
    folder_of,
    full_place,
    numbered,
    open_source,
    place_of,
)
from taut.data.render.render import Incident, Limits, Renderer
from taut.data.render.template_files import is_template_file, read_template
from taut.data.rows.messages import FORM_OF, Row, RowForm
from taut.data.rows.schema import AnyRow, Columns, read_any, read_kept
from taut.data.settings import (
    DataConfig,
    Kind,
    Source,
    Split,
    named_sources,
)
from taut.data.store import cache
from taut.data.store.pretokenized import (
    PretokenizedSource,
    pretokenized_sources,
    require_same,
    settings_of,
)
from taut.data.store.remote_shards import RemoteShard, RemoteShards, ShardFetcher
from taut.data.store.shards import VALUE, LengthCounts, Shard, Shards
from taut.data.tokenize import LARGE, TokenizeJob, choose_workers, tokenize_source
from taut.errors import ConfigError, DataError, EmptyError
from taut.io import progress
from taut.io.console import counted
from taut.types import IntArray, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from taut.vision.image_store import ImageStore

CACHE_VERSION = 8
"""Raise it whenever the same row could give other ids or targets, or be refused: it is part of every cache key."""
BINS, MAX_LISTED = 40, 200
"""Bins of the histogram of lengths, and rows and sources that are listed, in the description for the run log."""


# -- what a configuration names


def sources(config: DataConfig, split: Split, kind: Kind = "sft") -> list[tuple[Source, Columns]]:
    """The sources that ``config.train`` or ``config.eval`` names, and how each is read."""
    named = named_sources(config, split)
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
                empty=config.empty,
            ),
        )
        for source in named
    ]


class ConfiguredSource(NamedTuple):
    """A source that is open, and how its rows are read."""

    source: Source
    columns: Columns
    opened: OpenSource
    """Its rows; the first ones of a pretokenized source."""
    pretokenized: PretokenizedSource | None = None


def open_sources(config: DataConfig, split: Split, kind: Kind = "sft") -> list[ConfiguredSource]:
    """Open the sources that ``config.train`` or ``config.eval`` names. A pretokenized directory stands for the sources
    that were tokenized.
    """
    found = []
    for source, columns in sources(config, split, kind):
        parts = pretokenized_sources(source, split)
        if parts is None:
            found.append(ConfiguredSource(source, columns, open_source(source)))
            continue
        trained_on = [it.path for it in named_sources(config, "train")]
        if split == "eval" and parts[0].split == "train" and source.path in trained_on:
            raise ConfigError(
                f"data.eval={source.path} was tokenized without data.eval, and data.train is the same; expected "
                "held-out data; tokenize with data.eval too, or name another directory"
            )
        found += [ConfiguredSource(it.source, it.columns(kind), it.opened, it) for it in parts]
    return found


def input_paths(config: DataConfig) -> list[str]:
    """Every file, directory or name that a data configuration reads."""
    paths = [source.path for split in ("train", "eval") for source in named_sources(config, split)]
    template = config.template if is_template_file(config.template) else None
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
        control_tokens=config.control_tokens,
    )


# -- rows


@overload
def read_rows(config: DataConfig, split: Split, kind: Literal["sft"] = "sft") -> Iterator[Row]: ...
@overload
def read_rows(config: DataConfig, split: Split, kind: Kind) -> Iterator[AnyRow]: ...
def read_rows(config: DataConfig, split: Split, kind: Kind = "sft") -> Iterator[AnyRow]:
    """The rows of ``config.train`` or ``config.eval``, in the order of sources and rows; the first ones of a
    pretokenized source.
    """
    _require_no_stream(config, split)
    for source in open_sources(config, split, kind):
        for number, record in source.opened.read_records():
            row = read_kept(record, source.opened.place(number), source.columns)
            if row is not None:
                yield row


# -- samples


@dataclass(frozen=True)
class DataReport:
    """Counts of a data set's rows and samples, for the console and the run log."""

    num_rows: int
    num_samples: int
    num_tokens: int
    num_targets: int
    dropped: tuple[Incident, ...]
    cut: tuple[Incident, ...]
    is_cached: bool
    """Whether every source came from the cache."""
    decisions: tuple[str, ...]
    """For each source, whether it came from the cache, and if not the reason."""
    num_pictures: int = 0
    """Distinct images of each source."""
    note: str = ""
    """What the numbers are of, if not of all rows."""

    @property
    def sizes(self) -> str:
        sizes = (
            ("rows", self.num_rows),
            ("samples", self.num_samples),
            ("tokens", self.num_tokens),
            ("targets", self.num_targets),
        )
        text = ", ".join(counted(number, nouns) for nouns, number in sizes)
        return text + self.pictures + self.note

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
class SourceShards:
    """A tokenized source of a data set."""

    path: str
    """As configured; numbered where a mixture repeats a path."""
    names: tuple[str, ...]
    """Names of its files, with which sample ids begin; numbered likewise, so that ids are unique."""
    weight: float
    key: str
    shards: Shards
    source: str
    """As configured."""
    stamps: tuple[Stamp, ...]
    """Stamps of its files when they were read."""
    file_names: tuple[str, ...]
    """Names of its files, without numbers."""
    image_store: ImageStore | None = None
    """Store of its images."""
    remote: RemoteShards | None = None
    """Where its shards are, if they have to be fetched."""
    is_first_look: bool = False
    """Whether it has only the first rows of what the configuration names."""

    def sample(self, index: int) -> Sample:
        shard, inside = self.shards.locate(index)
        return shard.sample(inside, self._name(shard, inside), self.image_store)

    @property
    def identity(self) -> str:
        """Digest that is equal for equal samples: of all they depend on, or of the arrays where there are images."""
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
        shard, inside = self.shards.locate(index)
        start, stop = shard.arrays["offsets"][inside : inside + 2]
        return int(stop - start)

    def first_id_over(self, size: int) -> tuple[str, int] | None:
        """The first sample with an id of ``size`` or more, and the id."""
        for number, summary in enumerate(self.shards.summaries):
            if summary.largest_id >= size:
                shard = self.shards[number]
                ids = shard.arrays["ids"]
                at = int((ids >= size).argmax())
                inside = int(np.searchsorted(shard.arrays["offsets"], at, side="right")) - 1
                return self._name(shard, inside), int(ids[at])
        return None

    def line(self, index: int) -> int:
        """The line or record that a sample comes from."""
        shard, inside = self.shards.locate(index)
        return int(shard.arrays["line"][inside])

    def name(self, index: int) -> str:
        return self._name(*self.shards.locate(index))

    def _name(self, shard: Shard, inside: int) -> str:
        line, part = shard.arrays["line"][inside], shard.arrays["part"][inside]
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

    tokenized: Decision | None = None
    """When a large source is tokenized, in a run that trains, and why."""

    def __init__(
        self, parts: Sequence[SourceShards], decisions: Sequence[str] = (), is_cached: bool = False
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
    def num_read(self) -> int:
        """Number of samples that statistics are of."""
        return len(self)

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
        """Fetch ahead the remote shards of these samples, or rows, which the next steps read."""
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
        self.fetchers[0].expect(upcoming)

    @property
    def is_remote(self) -> bool:
        """Whether shards would have to be fetched to look at all samples."""
        return any(part.remote and len(part.shards) > 1 for part in self.parts)

    def local_shards(self) -> Iterator[tuple[range, Shard]]:
        """The shards that can be opened without fetching many, each with the indices of its samples: all local shards,
        and the first of each remote source.
        """
        for first, part in zip(self._starts.tolist(), self.parts, strict=False):
            starts = (first + part.shards.starts_K).tolist()
            for number in range(1 if part.remote else len(part.shards)):
                yield range(starts[number], starts[number + 1]), part.shards[number]

    @property
    def fetchers(self) -> list[ShardFetcher]:
        """The fetcher of remote shards, if there are any."""
        return list(dict.fromkeys(part.remote.fetcher for part in self.parts if part.remote))

    def length(self, index: int) -> int:
        """The number of tokens of a sample, without building it."""
        part, offset = self._locate(index)
        return part.length(offset)

    def sizes(self, of: Literal["tokens", "targets"], *, rows: bool = False) -> Iterator[IntArray]:
        """The number of tokens, or of targets, of every sample, or row with samples, shard by shard."""
        name = "offsets" if of == "tokens" else "target_offsets"
        for shard in (shard for part in self.parts for shard in part.shards):
            offsets, starts = shard.arrays[name], shard.arrays.get("row_offsets")
            yield np.diff(offsets[starts] if rows and starts is not None else offsets)

    @cached_property
    def lengths(self) -> LengthCounts:
        """Counts of samples by their number of tokens."""
        return LengthCounts.joined(part.shards.lengths for part in self.parts)

    @property
    def longest(self) -> int:
        """The largest number of tokens of a sample."""
        return self.lengths.longest

    def longer_than(self, size: float, most: int) -> list[int]:
        """Indices of the first samples with more than ``size`` tokens, at most ``most`` of them."""
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
        """The store of images, if there are any."""
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
        """Number of samples with a token that ends an answer among their targets."""
        return sum(it.num_ended for part in self.parts for it in part.shards.summaries)

    def first_id_over(self, size: int) -> tuple[str, int] | None:
        """The first sample with an id of ``size`` or more, and the id; None if all are smaller."""
        return next((hit for part in self.parts if (hit := part.first_id_over(size))), None)

    def has_value(self, name: str) -> bool:
        """Whether any sample has a value of this name that is not 0."""
        array = VALUE + name
        return any(array in it.values for part in self.parts for it in part.shards.summaries)

    @property
    def forms(self) -> Counter[RowForm]:
        """Number of rows that are conversations, completions of a plain text, or documents."""
        read_as = self.read_as
        return Counter({form: read_as[form] for form in FORM_OF.values() if read_as[form]})

    @property
    def read_as(self) -> Counter[RowForm]:
        """Number of rows of each form, and of rows that are read in another way than they are written."""
        return sum((Counter(part.shards.forms) for part in self.parts), Counter[RowForm]())

    def described(self, name: Split) -> dict[str, Any]:
        """Description for the run log, of bounded size: counts, a histogram of lengths, the first rows that were left
        out or cut, the sources.
        """
        report = self.report
        # A histogram of lengths, in whole tokens.
        lengths = self.lengths
        bins = np.linspace(lengths.shortest, lengths.longest + 1, BINS + 1)
        edges = np.unique(bins.round().astype(np.int64))
        counts, _ = np.histogram(lengths.size_L, edges, weights=lengths.count_L)
        sizes = ("num_rows", "num_samples", "num_tokens", "num_targets", "num_pictures")
        # What was left out or cut.
        listed: dict[str, Any] = {}
        for kind, incidents in (("dropped", report.dropped), ("cut", report.cut)):
            listed[f"num_{kind}"] = len(incidents)
            listed[kind] = [{"place": i.place, "reason": i.reason} for i in incidents[:MAX_LISTED]]
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
                for part in self.parts[:MAX_LISTED]
            ],
        }

    def changed_sources(self) -> list[str]:
        """Paths of the sources whose files have changed since they were read, or are gone, by size, time and inode. The
        files of a Hugging Face data set are its Arrow files.
        """
        changed = (part.source for part in self.parts if changes(part.stamps))
        return list(dict.fromkeys(changed))

    def _locate(self, index: int) -> tuple[SourceShards, int]:
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
    first_rows: int | None = None,
) -> Dataset:
    """Load the samples of ``config.train`` or ``config.eval``, from the cache if possible. ``looks_again``: tokenize
    again the sources whose images could not be read, or have changed; false where another process has just done so.
    ``first_rows``: of a large source that is not in the cache, read so many rows alone.
    """
    progress.show(f"reading the data ({split})")
    require_fitting(config, kind)
    _require_no_stream(config, split)
    named = open_sources(config, split, kind)
    directory = cache_dir or cache.directory_of(config.cache)
    limits = limits_of(config, max_length)
    identity, settings = renderer.identity(), settings_of(config, kind, renderer, limits)
    most_fetched = None if config.fetched_gb is None else int(config.fetched_gb * 1e9)
    parts, decisions, is_cached = [], [], True
    seen_paths, seen_names = Counter[str](), Counter[str]()
    for source, columns, opened, pretokenized in named:
        remote = None
        # Shards that were made before the run, if they were made in the same way.
        if pretokenized is not None:
            require_same(pretokenized, settings, split)
            key = pretokenized.content["key"]
            shards, remote = pretokenized.shards(directory, most_fetched)
            decision = f"{source.path}: {pretokenized.described}"
            if remote is not None and config.fetched_gb is not None:
                decision += f"; of what is fetched at most {config.fetched_gb:g} GB are kept"
            decisions.append(decision)
        # Shards from the cache; or tokenized now, and kept there.
        else:
            has_images = renderer.image_store is not None
            key = key_of(opened.digest, columns, limits, identity, has_images=has_images)
            cached, reason = cache.load(directory, key)
            if cached is None and first_rows and opened.num_bytes > LARGE:
                opened = opened.first_look(first_rows)
                key = key_of(opened.digest, columns, limits, identity, has_images=has_images)
                cached, reason = cache.load(directory, key)
            if cached is not None and looks_again and (reason := cached.stale_reason()):
                cache.remove(directory, key)
                cached = None
            if cached is None:
                is_cached = False
                num_workers, why_workers = choose_workers(opened, renderer, config.workers)
                reason += why_workers
                job = TokenizeJob(opened.path, opened.names, columns, limits, renderer)
                make = partial(tokenize_source, job, opened, num_workers)
                try:
                    num_finished = cache.save(directory, key, make)
                except EmptyError as error:
                    raise _with_count(error, opened, columns, has_images=has_images) from None
                if num_finished:
                    reason += f"; the first {num_finished:,} rows by a run that was interrupted"
                cached, trouble = cache.load(directory, key)
                assert cached is not None, (
                    f"a source that was just written cannot be read: {trouble}"
                )
            shards = cached
            decisions.append(
                f"{source.path}: {f'tokenized ({reason})' if reason else 'from the cache'}"
                + (f"; {opened.taken}" if opened.taken else "")
            )
        # The source's place in the mixture.
        (label,), names = numbered([opened.path], seen_paths), numbered(opened.names, seen_names)
        weight, fault = source.weight, ""
        is_compared = kind == "preference"
        count = shards.num_groups if is_compared else shards.num_samples
        if split == "eval" and weight != 1:
            fault = "expected none: held-out samples count once each; remove the weight"
        elif round(weight * count) == 0:
            fault = (
                f"expected one that gives at least one of its {count} {'rows' if is_compared else 'samples'} to an "
                "epoch; raise it, or leave the source out"
            )
        if fault:
            raise ConfigError(f"data.{split}: {label} has weight {weight:g}; {fault}")
        parts.append(
            SourceShards(
                label,
                names,
                weight,
                key,
                shards,
                source=opened.path,
                stamps=opened.stamps,
                file_names=opened.names,
                image_store=renderer.image_store,
                remote=remote,
                is_first_look=opened.is_first_look,
            )
        )
    return Dataset(parts, decisions, is_cached)


def _with_count(
    error: EmptyError, opened: OpenSource, columns: Columns, *, has_images: bool
) -> EmptyError:
    """The error of the first empty row, with the number of such rows among those that are examined."""
    num_rows, num_empty = 0, 0
    most = 2_000 if has_images else 200_000  # reading rows with videos opens those
    for _, record in islice(opened.read_records(strict=False), most):
        num_rows += 1
        try:
            read_any(record, "", columns)
        except EmptyError:
            num_empty += 1
        except DataError:
            continue
    others = f"the first of {num_empty:,} such rows" if num_empty > 1 else "the only such row"
    counts = f" is empty, {others} of {num_rows:,};"
    return EmptyError(str(error).replace(" is empty;", counts, 1))


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
    fault = ""
    if kind != "stepwise" and config.step_separator != DataConfig.step_separator:
        fault = (
            f"step_separator is set, and these are {kind} data; expected it for stepwise data only; remove "
            "data.step_separator"
        )
    elif kind != "sft" and config.targets == "all":
        fault = (
            f"targets=all would learn the prompts of {kind} data too; expected assistant (all of an answer) or "
            "last (its last turn); set data.targets"
        )
    elif kind != "sft" and config.too_long == "split":
        fault = (
            f"too_long=split would take the answers of {kind} data apart; expected error, drop or truncate; set "
            "data.too_long"
        )
    if fault:
        raise ConfigError(f"data.{fault}")


def key_of(
    content: str, columns: Columns, limits: Limits, identity: str, *, has_images: bool
) -> str:
    """Hash of everything that a source's samples depend on. ``content`` identifies the rows."""
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
    if columns.empty != "error":
        parts.append({"empty": columns.empty})
    if columns.kind != "sft":
        parts += [columns.kind, columns.step_separator]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
