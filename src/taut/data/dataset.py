"""What came of a data set's rows, for people and for a run's log. ``dataset.py`` and ``prompt_set.py`` fill it in."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from taut.config import configclass, user_path
from taut.data import cache
from taut.data.cache import changed_source, media_arrays, media_at
from taut.data.images import in_batches
from taut.data.messages import Conversation, Row, RowForm, form_of, images_of
from taut.data.render import (
    Incident,
    Limits,
    Renderer,
    Targets,
    TooLong,
    answers_of,
    faults_of_pictures,
    fit_any,
    render_any,
    render_each,
)
from taut.data.schema import AnyRow, Columns, Format, Kind, best_row, read_any
from taut.data.sources import Opened, Source, Stamp, changes, folder_of, open_source
from taut.errors import ConfigError, DataError, PictureError, RenderError, TautError
from taut.io import files
from taut.io.console import counted
from taut.types import FloatArray, IntArray, Media, Sample
from taut.vision.content import ImagesConfig
from taut.vision.image_store import Album

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from taut.vision.content import ImageRef
    from taut.vision.image_store import Album


@dataclass(frozen=True)
class DataReport:
    """What came of the rows."""

    num_rows: int
    num_samples: int
    num_tokens: int
    num_targets: int
    dropped: tuple[Incident, ...]
    cut: tuple[Incident, ...]
    is_cached: bool
    """True where every source came from the cache."""
    decisions: tuple[str, ...]
    """Where each source came from, and why."""
    num_pictures: int = 0
    """Of each source; the same picture in many samples is one."""

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
        """How many, where there are any."""
        return f", {counted(self.num_pictures, 'pictures')}" if self.num_pictures else ""

    def __str__(self) -> str:
        text = self.sizes
        for name, incidents in (("dropped", self.dropped), ("cut", self.cut)):
            if incidents:
                first = incidents[0]
                text += f", {len(incidents):,} {name} (first {first.place}: {first.reason})"
        return text + (", from the cache" if self.is_cached else "")


# --------------------------------------------------------------------------------------------------
# A source's rows on their way to flat arrays: read, rendered, fitted, laid one after another.
#
# ``cache.py`` says which arrays those are, and writes them; ``sample_at`` is the way back. Imported by ``dataset.py``.

VALUE, READ_VALUE = "value.", "read_value."


def tokenise(found: Opened, columns: Columns, limits: Limits, renderer: Renderer) -> cache.Entry:
    """Read, render and fit every row of a source; nothing is written."""
    flat = _Flat()
    read = (
        (number, _read(record, f"{found.path}:{number}", columns, renderer))
        for number, record in found.records()
    )
    for batch in in_batches(read, lambda it: pictures_of(it[1])):
        readable = [row for _, row in batch if not isinstance(row, PictureError)]
        flat.films |= {one.film: None for row in readable for one in pictures_of(row) if one.film}
        rendered = iter(_rendered(readable, renderer))
        for number, row in batch:
            flat.num_rows += 1
            if isinstance(row, PictureError):
                flat.leave_out(number, f"{found.path}:{number}", row)
            elif isinstance(samples := next(rendered), PictureError):
                flat.leave_out(number, row.place, samples)
            else:
                flat.forms[form_of(best_row(row))] += 1
                flat.add(number, row.place, *fit_any(row, samples, limits))
    if not flat.num_rows:
        raise DataError(
            f"{found.path}: the file has no rows; expected at least one; check the path"
        )
    if not flat.lines:
        first = flat.incidents[0]
        files = ", or data.images.folder" if flat.is_fleeting else ""
        raise DataError(
            f"{found.path}: none of its {counted(flat.num_rows, 'rows')} is left (row {first.place}: "
            f"{first.reason}); "
            f"expected some; change data.max_length, data.min_length or data.too_long{files}"
        )
    return flat.entry()


def pictures_of(row: AnyRow | TautError) -> list[ImageRef]:
    """Those of all its answers."""
    answers = () if isinstance(row, TautError) else answers_of(row)
    chats = [it.messages for it in answers if isinstance(it, Conversation)]
    return [picture for messages in chats for picture in images_of(messages)]


def _read(record: Any, place: str, columns: Columns, renderer: Renderer) -> AnyRow | PictureError:
    """The row; or, where those without their pictures are left out, what is wrong with one."""
    try:
        return read_any(record, place, columns)
    except PictureError as error:
        if not _drops_pictures(renderer):
            raise _with_way_out(error) from None
        return error


def _rendered(rows: Sequence[AnyRow], renderer: Renderer) -> Sequence[list[Sample] | PictureError]:
    if _drops_pictures(renderer):
        return render_each(rows, renderer)
    try:
        return render_any(rows, renderer)
    except PictureError as error:
        raise _with_way_out(error) from None


def _with_way_out(error: PictureError) -> PictureError:
    return PictureError(f"{error}; or leave such rows out with data.images.bad=drop")


def _drops_pictures(renderer: Renderer) -> bool:
    return renderer.album is not None and renderer.album.images.bad == "drop"


class _Flat:
    """Samples on their way into flat arrays."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.forms: Counter[RowForm] = Counter()
        self.ids: list[NDArray[np.int32]] = []
        self.target_at: list[NDArray[np.int32]] = []
        self.lines: list[int] = []
        self.part_numbers: list[int] = []
        self.values: dict[str, list[float]] = {}
        self.read_at: list[NDArray[np.int32]] = []
        self.read_values: dict[str, list[NDArray[np.float64]]] = {}
        self.incidents: list[Incident] = []
        self.media: list[tuple[Media, ...]] = []
        self.films: dict[str, None] = {}
        """The files of videos, in their order."""
        self.is_fleeting = False

    def leave_out(self, number: int, place: str, error: PictureError) -> None:
        """A row whose picture cannot be used."""
        reason = str(error).removeprefix(f"{place}: ")
        self.incidents.append(Incident(str(number), "dropped", reason))
        self.is_fleeting = True

    def add(
        self, number: int, place: str, samples: Sequence[Sample], incidents: Sequence[Incident]
    ) -> None:
        for sample in samples:
            self.ids.append(sample.ids_T.astype(np.int32))
            self.target_at.append(sample.target_at_N.astype(np.int32))
            self.lines.append(number)
            self.media.append(sample.media)
            self.part_numbers.append(int(sample.id[len(place) + 1 :] or 0))
            for name, value in sample.values.items():
                self.values.setdefault(name, []).append(value)
            if sample.read_at_R is not None:
                self.read_at.append(sample.read_at_R.astype(np.int32))
            for name, value_R in sample.read_values.items():
                self.read_values.setdefault(name, []).append(value_R)
        for incident in incidents:
            where = f"{number}{incident.place[len(place) :]}"
            self.incidents.append(replace(incident, place=where))

    def entry(self) -> cache.Entry:
        arrays = {
            "ids": np.concatenate(self.ids),
            "offsets": np.cumsum([0, *map(len, self.ids)]),
            "target_at": np.concatenate(self.target_at),
            "target_offsets": np.cumsum([0, *map(len, self.target_at)]),
            "line": np.asarray(self.lines),
            "part": np.asarray(self.part_numbers),
        }
        arrays |= {VALUE + name: np.asarray(given) for name, given in self.values.items()}
        if self.read_at:
            arrays["read_at"] = np.concatenate(self.read_at)
            arrays["read_offsets"] = np.cumsum([0, *map(len, self.read_at)])
        for name, given in self.read_values.items():
            arrays[READ_VALUE + name] = np.concatenate(given)
        arrays |= media_arrays(self.media, list(self.films))
        incidents = tuple(self.incidents)
        return cache.Entry(arrays, self.num_rows, incidents, self.is_fleeting, self.forms)


def why_again(entry: cache.Entry) -> str:
    """Why a cached entry is to be made anew, for the sake of its pictures; empty: it is not."""
    if entry.is_fleeting:
        return "pictures could not be read the last time"
    changed = changed_source(entry.arrays)
    return "" if changed is None else f"{Path(changed).name} has changed"


def sample_at(
    arrays: Mapping[str, NDArray[Any]], index: int, name: str, album: Album | None = None
) -> Sample:
    """A sample of an entry, by its number in it. ``album``: where its pictures are had from."""
    start, stop = arrays["offsets"][index : index + 2]
    first, last = arrays["target_offsets"][index : index + 2]
    target_at_N = arrays["target_at"][first:last].astype(np.int64)
    sample = Sample(
        name,
        arrays["ids"][start:stop].astype(np.int64),
        target_at_N,
        np.ones(target_at_N.size),
        media=media_at(arrays, index, name, album),
        values={
            key.removeprefix(VALUE): float(array[index])
            for key, array in arrays.items()
            if key.startswith(VALUE)
        },
    )
    if "read_at" not in arrays:
        return sample
    first, last = arrays["read_offsets"][index : index + 2]
    return replace(
        sample,
        read_at_R=arrays["read_at"][first:last].astype(np.int64),
        read_values={
            key.removeprefix(READ_VALUE): array[first:last].astype(np.float64)
            for key, array in arrays.items()
            if key.startswith(READ_VALUE)
        },
    )


def row_offsets(line_S: NDArray[np.int64]) -> IntArray:
    """Where the samples of each row begin, and one more, the end: samples of one row are neighbours."""
    begins = np.flatnonzero(np.diff(line_S)) + 1
    return np.concatenate([[0], begins, [line_S.size]])


# --------------------------------------------------------------------------------------------------
# Data from files to samples: read, validate, render, fit to length, cache, and look up by index.
#
# ``load_dataset`` gives a Dataset: a sequence of samples built on demand from memory-mapped arrays,
# with lengths, target counts and weights as arrays for the planner. A second load of the same content
# with the same tokenizer, template and options reads the cache and tokenises nothing. A source with
# an error leaves nothing in the cache; good ones before it in a list stay there, whole.
#
# ``kind`` says whether rows are those of SFT or say something of their answers (``preferences.py``). Then a row may be
# several samples, which stay together (``Dataset.rows``), with values.
#
# Does not shuffle, choose fractions, pack or plan. Under torchrun let one rank load first. Imported
# by ``taut.run.config``, methods, checks and evals.

Split: TypeAlias = Literal["train", "eval"]
CACHE_VERSION = 6
"""Raise it whenever the same row could give other ids or targets, or be refused: it is part of every cache key."""
BLOCK = 4096
"""Samples looked at together."""


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
    """Keys of messages, and columns, that may be there and are not used."""
    targets: Targets = "assistant"
    """What is learned of a conversation: all assistant turns, the last one, or all tokens."""
    template: str | None = None
    """A file with a chat template to use in place of the tokenizer's own."""
    apply_chat_template: bool | None = None
    """Render prompts and completions that are plain text with the chat template, as a user message and an assistant
    message. By default they are used as they are, and taut check warns if the tokenizer has a chat template. Documents
    (the column text) are never rendered."""
    max_length: Annotated[int, Field(ge=2)] | None = None
    """Tokens a sample may have; by default the model's context."""
    too_long: TooLong = "error"
    """What happens to longer samples."""
    min_length: Annotated[int, Field(ge=0)] = 0
    """Shorter samples are left out."""
    without_targets: Literal["error", "drop"] = "error"
    """What happens to rows in which nothing is to be learned: no target, or no answer better than another."""
    step_separator: str = "\n"
    """What joins the steps of stepwise data."""
    images: ImagesConfig = field(default_factory=ImagesConfig)
    """How pictures are read."""
    cache: str | None = None
    """Where tokenised data is kept; by default $TAUT_CACHE or the user's cache directory."""


@dataclass(frozen=True, eq=False)
class SourcePart:
    """One tokenised source inside a data set."""

    path: str
    """As configured; numbered where a mixture names a path again, so that sample ids are unique."""
    weight: float
    key: str
    entry: cache.Entry
    source: str
    """As configured."""
    stamps: tuple[Stamp, ...]
    """Its files, as they were read."""
    album: Album | None = None
    """Where its pictures are had from."""

    def sample(self, index: int) -> Sample:
        return sample_at(self.entry.arrays, index, self.name(index), self.album)

    @property
    def identity(self) -> str:
        """Equal where samples are: what they were made from, and with what; where pictures may be, what came of it."""
        return self.key if self.album is None else self.entry.digest

    def num_with_target(self, ids: Collection[int]) -> int:
        """How many samples have one of ``ids`` among their targets."""
        arrays, num_found = self.entry.arrays, 0
        offsets, bounds = arrays["offsets"], arrays["target_offsets"]
        for first in range(0, len(offsets) - 1, BLOCK):
            last = min(first + BLOCK, len(offsets) - 1)
            counts = np.diff(bounds[first : last + 1])
            at = arrays["target_at"][bounds[first] : bounds[last]].astype(np.int64)
            places = at + np.repeat(offsets[first:last], counts)
            is_one = np.isin(arrays["ids"][places], list(ids))
            num_found += np.unique(np.repeat(np.arange(counts.size), counts)[is_one]).size
        return num_found

    def first_beyond(self, size: int) -> tuple[str, int] | None:
        """The first sample with an id of ``size`` or more, and the id."""
        ids = self.entry.arrays["ids"]
        if ids.max() < size:
            return None
        at = int((ids >= size).argmax())
        index = int(np.searchsorted(self.entry.arrays["offsets"], at, side="right")) - 1
        return self.name(index), int(ids[at])

    def name(self, index: int) -> str:
        line, part = self.entry.arrays["line"][index], self.entry.arrays["part"][index]
        return f"{self.path}:{line}#{part}" if part else f"{self.path}:{line}"


class Dataset(Sequence[Sample]):
    """Samples by index, in the order of sources and rows."""

    def __init__(
        self, parts: Sequence[SourcePart], decisions: Sequence[str] = (), is_cached: bool = False
    ) -> None:
        self.parts = tuple(parts)
        self.lengths: IntArray = _joined([np.diff(part.entry.arrays["offsets"]) for part in parts])
        self.num_targets: IntArray = _joined(
            [np.diff(part.entry.arrays["target_offsets"]) for part in parts]
        )
        counts = [len(part.entry.arrays["line"]) for part in parts]
        self.weights: FloatArray = np.repeat([part.weight for part in parts], counts)
        """How many times each sample is seen per epoch."""
        self._starts: IntArray = np.cumsum([0, *counts])
        rows = [row_offsets(part.entry.arrays["line"]) for part in parts]
        begins = [start + at[:-1] for start, at in zip(self._starts, rows, strict=False)]
        self.rows: IntArray = _joined([*begins, self._starts[-1:]])
        """Where the samples of each row begin, and one more, the end: row i has samples rows[i] to rows[i + 1]."""
        self.row_weights: FloatArray = self.weights[self.rows[:-1]]
        """How many times each row is seen per epoch."""
        identity = json.dumps([[part.identity, part.weight] for part in parts])
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()
        self.report = self._report(decisions, is_cached)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        part, offset = self._locate(index)
        return part.sample(offset)

    @property
    def album(self) -> Album | None:
        """Where pictures are had from; None: there are none."""
        return self.parts[0].album

    def sample_id(self, index: int) -> str:
        """The sample's id, without building it."""
        part, offset = self._locate(index)
        return part.name(offset)

    def row_place(self, index: int) -> str:
        """The source and line of the sample's row, as ``read_rows`` names it."""
        part, offset = self._locate(index)
        return f"{part.source}:{part.entry.arrays['line'][offset]}"

    def num_with_target(self, ids: Collection[int]) -> int:
        """How many samples have one of ``ids`` among their targets."""
        return sum(part.num_with_target(ids) for part in self.parts)

    def first_beyond(self, size: int) -> tuple[str, int] | None:
        """The first sample with an id of ``size`` or more, and the id; None: there is none."""
        return next((it for part in self.parts if (it := part.first_beyond(size))), None)

    def has_value(self, name: str) -> bool:
        """Whether a value is said of any sample that is not 0."""
        arrays = [part.entry.arrays[f"value.{name}"] for part in self.parts]
        return any(bool(values.any()) for values in arrays)

    @property
    def forms(self) -> Counter[RowForm]:
        """How many rows are conversations, completions of a plain text, or documents."""
        return sum((Counter(part.entry.forms) for part in self.parts), Counter[RowForm]())

    def changed_sources(self) -> list[str]:
        """The paths of the sources whose files are no longer what was read, or gone. A look at each file's size,
        time and inode; nothing is read. Of a Hugging Face data set these are its Arrow files."""
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
            replace(incident, place=f"{part.path}:{incident.place}")
            for part in self.parts
            for incident in part.entry.incidents
        ]
        tables = [part.entry.arrays.get("picture.content", ()) for part in self.parts]
        return DataReport(
            num_rows=sum(part.entry.num_rows for part in self.parts),
            num_samples=len(self),
            num_tokens=int(self.lengths.sum()),
            num_targets=int(self.num_targets.sum()),
            dropped=tuple(incident for incident in incidents if incident.kind == "dropped"),
            cut=tuple(incident for incident in incidents if incident.kind == "cut"),
            is_cached=is_cached,
            decisions=tuple(decisions),
            num_pictures=sum(map(len, tables)),
        )


def build_renderer(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, album: Album | None = None
) -> Renderer:
    """The renderer a data config asks for. ``album``: what makes pictures into tokens, of a model that takes them."""
    if config.template is None:
        return Renderer(tokenizer, None, config.targets, album=album)
    path = user_path(config.template, "data.template")
    try:
        template = files.read_text(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data.template: cannot read {config.template}: {getattr(error, 'strerror', None) or error}; "
            "expected a file with a chat template"
        ) from None
    return Renderer(tokenizer, template, config.targets, album=album)


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
    """The samples of ``config.train`` or ``config.eval``, from the cache where it holds them. ``looks_again``: at
    sources of which pictures could not be read, or have changed; false where another process has just done so.
    """
    _require_fitting(config, kind)
    named = sources(config, split, kind)
    directory = cache_dir or cache.directory_of(config.cache)
    limits = Limits(max_length, config.too_long, config.min_length, config.without_targets)
    opened = [open_source(source) for source, _ in named]
    identity, album = renderer.identity(), renderer.album
    parts, decisions, is_cached = [], [], True
    times_seen: Counter[str] = Counter()
    for (source, how), found in zip(named, opened, strict=True):
        key = _key(found, how, limits, identity, names_files=album is not None)
        entry, reason = cache.load(directory, key)
        if entry is not None and looks_again and (reason := why_again(entry)):
            cache.forget(directory, key)
            entry = None
        if entry is None:
            is_cached = False
            cache.save(directory, key, tokenise(found, how, limits, renderer))
            entry, trouble = cache.load(directory, key)
            assert entry is not None, f"a fresh cache entry cannot be read: {trouble}"
        decisions.append(
            f"{source.path}: {f'tokenised ({reason})' if reason else 'from the cache'}"
        )
        times_seen[source.path] += 1
        times = times_seen[source.path]
        label = source.path if times == 1 else f"{source.path}({times})"
        parts.append(SourcePart(label, source.weight, key, entry, found.path, found.stamps, album))
        _require_weight_counts(parts[-1], split, kind)
    return Dataset(parts, decisions, is_cached)


def _require_weight_counts(part: SourcePart, split: str, kind: Kind) -> None:
    line_S = part.entry.arrays["line"]
    is_compared = kind == "preference"
    count = len(row_offsets(line_S)) - 1 if is_compared else len(line_S)
    what = "rows" if is_compared else "samples"
    if split == "eval" and part.weight != 1:
        raise ConfigError(
            f"data.eval: {part.path} has weight {part.weight:g}; expected none: held-out samples count "
            "once each; remove the weight"
        )
    if round(part.weight * count) == 0:
        raise ConfigError(
            f"data.train: weight {part.weight:g} gives none of the {count} {what} of {part.path} "
            "to an epoch; expected at least one; raise the weight, or leave the source out"
        )


def _require_fitting(config: DataConfig, kind: Kind) -> None:
    """That no option is set which this kind of data has no use for."""
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


@overload
def read_rows(config: DataConfig, split: Split, kind: Literal["sft"] = "sft") -> Iterator[Row]: ...
@overload
def read_rows(config: DataConfig, split: Split, kind: Kind) -> Iterator[AnyRow]: ...
def read_rows(config: DataConfig, split: Split, kind: Kind = "sft") -> Iterator[AnyRow]:
    """The rows of ``config.train`` or ``config.eval`` themselves, in the order of sources and rows."""
    for source, columns in sources(config, split, kind):
        found = open_source(source)
        for number, record in found.records():
            yield read_any(record, f"{found.path}:{number}", columns)


def input_paths(config: DataConfig) -> list[str]:
    """Every file, directory or name that a data config reads."""
    paths = [source.path for split in ("train", "eval") for source in _listed(config, split)]
    return [*paths, *(path for path in (config.template, config.cache) if path)]


def sources(config: DataConfig, split: Split, kind: Kind = "sft") -> list[tuple[Source, Columns]]:
    """What ``config.train`` or ``config.eval`` names, and how each is read."""
    return [(source, _columns(config, source, kind)) for source in _sources(config, split)]


def _sources(config: DataConfig, split: Split) -> list[Source]:
    listed = _listed(config, split)
    if not listed:
        raise ConfigError(
            f"data.{split} is not set; expected a path or a list; set data.{split}=FILE.jsonl"
        )
    return listed


def _listed(config: DataConfig, split: str) -> list[Source]:
    given = (config.train if split == "train" else config.eval) or []
    items = [given] if isinstance(given, str) else given
    return [Source(path=item) if isinstance(item, str) else item for item in items]


def _columns(config: DataConfig, source: Source, kind: Kind) -> Columns:
    mapping = config.columns if source.columns is None else source.columns
    return Columns(
        source.format or config.format,
        mapping,
        config.ignore_keys,
        kind=kind,
        step_separator=config.step_separator,
        folder=folder_of(source, config.images.folder, "data.images.folder"),
        fps=config.images.fps,
        max_frames=config.images.max_frames,
        images=config.images,
        apply_chat_template=bool(config.apply_chat_template),
    )


def _key(
    found: Opened, columns: Columns, limits: Limits, identity: str, *, names_files: bool
) -> str:
    parts = [CACHE_VERSION, found.digest, identity, repr(columns), repr(limits)]
    if names_files:
        parts += [columns.folder, str(Path.cwd())]
    if columns.apply_chat_template:
        parts.append("apply_chat_template")
    if columns.kind != "sft":
        parts += [columns.kind, columns.step_separator]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _joined(arrays: Sequence[IntArray]) -> IntArray:
    return np.concatenate(arrays)


# --------------------------------------------------------------------------------------------------
# The rows of a source one by one, past those with errors: to say how many there are, and where.
#
# ``dataset.py`` stops at the first, as it must; this goes on where it can and keeps nothing. Imported by checks.


class Attempt(NamedTuple):
    """A row, and what keeps it from being trained on; None: nothing does."""

    place: str
    error: TautError | None


def attempt_rows(
    found: Opened, columns: Columns, renderer: Renderer, limits: Limits
) -> Iterator[Attempt]:
    """Every row of a source, read, rendered and fitted."""
    read = (
        (number, _read_row(record, f"{found.path}:{number}", columns))
        for number, record in found.attempts()
    )
    for batch in in_batches(read, lambda it: pictures_of(it[1])):
        rows = [row for _, row in batch if not isinstance(row, TautError)]
        rendered = iter(_render(rows, renderer))
        for number, row in batch:
            error = row if isinstance(row, TautError) else _fit(row, next(rendered), limits)
            yield Attempt(f"{found.path}:{number}", error)


def _read_row(record: object, place: str, columns: Columns) -> AnyRow | TautError:
    if isinstance(record, DataError):
        return record
    try:
        return read_any(record, place, columns)
    except DataError as error:
        return error


def _render(rows: Sequence[AnyRow], renderer: Renderer) -> list[list[Sample] | TautError]:
    """The samples of each row, or its error."""
    faults = faults_of_pictures(rows, renderer)
    good = [row for row, fault in zip(rows, faults, strict=True) if fault is None]
    rendered = iter(_render_good(good, renderer))
    return [next(rendered) if fault is None else fault for fault in faults]


def _render_good(rows: Sequence[AnyRow], renderer: Renderer) -> list[list[Sample] | TautError]:
    """The same where every picture can be had: all at once where no row has an error."""
    try:
        return list(render_any(rows, renderer))
    except RenderError as error:
        if len(rows) == 1:
            return [error]
    half = len(rows) // 2
    return _render_good(rows[:half], renderer) + _render_good(rows[half:], renderer)


def _fit(row: AnyRow, samples: list[Sample] | TautError, limits: Limits) -> TautError | None:
    if isinstance(samples, TautError):
        return samples
    try:
        fit_any(row, samples, limits)
    except DataError as error:
        return error
    return None
