"""Prompts to be answered, as a data set: what methods that generate train on.

A row is one of ``prompts.py``: messages or text, with or without its right answers. As a sample it is its prompt, every
token but the first a target, so that all that looks at samples (checks, the planner of a rehearsal) has one; what is
learned in the end are completions. ``asked`` has the rows themselves, index for index.

Prompts longer than ``max_length`` are refused, or left out with ``data.too_long=drop``, and those with a picture that
cannot be had likewise, with ``data.images.bad=drop``. Nothing is cached: prompts are few beside what is generated for
them.

Imported by run, methods, checks and evals.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from taut.data.cache import Entry
from taut.data.dataset import DataConfig, Dataset, Part, Split, sources
from taut.data.formats import Completion, Conversation, Row, RowForm
from taut.data.length import Incident
from taut.data.media_arrays import media_arrays
from taut.data.prompts import PromptRow, load_prompts
from taut.data.render import Renderer
from taut.data.report import DataReport
from taut.data.sources import open_source
from taut.errors import ConfigError, DataError
from taut.printing import counted
from taut.types import IntArray, Prompt


@dataclass(frozen=True)
class Asking:
    """How prompts are read, beside what ``data`` says."""

    max_length: int
    """Tokens a prompt may have."""
    reference: str | None = None
    """The column with the right answer; by default answers, answer, ..., or the last assistant message."""


class PromptReport(DataReport):
    """What came of the rows; what is learned is not there yet."""

    @property
    def sizes(self) -> str:
        sizes = ("rows", self.num_rows), ("prompts", self.num_samples), ("tokens", self.num_tokens)
        return ", ".join(counted(number, nouns) for nouns, number in sizes) + self.pictures


class PromptSet(Dataset):
    """Prompts by index, in the order of sources and rows."""

    def __init__(self, parts: Sequence[Part], asked: Sequence[PromptRow]) -> None:
        super().__init__(parts, [f"{part.path}: read as prompts" for part in parts])
        self.report = PromptReport(**vars(self.report))
        self.asked = list(asked)

    def prompts(self) -> list[Prompt]:
        """What an engine takes."""
        return [Prompt(row.place, row.ids_T, media=row.media) for row in self.asked]

    def questions(self) -> Iterator[Row]:
        """The prompts as rows whose answer, not there yet, is to be learned."""
        for row in self.asked:
            if isinstance(row.prompt, str):
                yield Completion(row.place, row.prompt, "")
            else:
                yield Conversation(row.place, row.prompt, learned=(len(row.prompt),))


def load_prompt_set(config: DataConfig, split: Split, renderer: Renderer, how: Asking) -> PromptSet:
    """The prompts of ``config.train`` or ``config.eval``. Raises DataError for a row that is none."""
    _require_fitting(config)
    parts: list[Part] = []
    asked: list[PromptRow] = []
    for source, columns in sources(config, split, "prompt"):
        opened = open_source(source)
        unread: list[Incident] = []
        album = renderer.album
        left_out = unread if album is not None and album.images.bad == "drop" else None
        rows = load_prompts(source, renderer, columns, reference=how.reference, left_out=left_out)
        kept, incidents = _fitted(rows, how.max_length, config.too_long)
        if not kept:
            raise DataError(_nothing_left(opened.path, len(rows), unread, how.max_length))
        incidents += [replace(one, place=one.place.rpartition(":")[2]) for one in unread]
        incidents.sort(key=lambda incident: int(incident.place))
        entry = _entry(kept, len(rows) + len(unread), incidents)
        times = 1 + sum(part.source == opened.path for part in parts)
        label = source.path if times == 1 else f"{source.path}({times})"
        part = Part(label, source.weight, entry.digest, entry, opened.path, opened.stamps)
        parts.append(replace(part, album=album))
        asked += kept
    made = PromptSet(parts, asked)
    if len({row.id for row in asked}) < len(asked):  # files that number their rows alike
        made.asked = [replace(row, id=made.sample_id(index)) for index, row in enumerate(asked)]
    return made


def _nothing_left(path: str, num_rows: int, unread: Sequence[Incident], max_length: int) -> str:
    if not num_rows:
        first = unread[0]
        return (
            f"{path}: none of its {counted(len(unread), 'rows')} has pictures that can be used ({first.place}: "
            f"{first.reason}); expected some; correct data.images.folder, or the files"
        )
    found = f"none of its {counted(num_rows, 'prompts')} has at most {max_length} tokens"
    return f"{path}: {found}; expected some; raise data.max_length"


def _require_fitting(config: DataConfig) -> None:
    if config.too_long in ("split", "truncate"):
        raise ConfigError(
            f"data.too_long={config.too_long} would cut prompts, and their answers be judged by the whole; expected "
            "error or drop; set data.too_long"
        )
    for key in ("targets", "min_length", "without_targets", "step_separator"):
        if getattr(config, key) != getattr(DataConfig, key):
            raise ConfigError(
                f"data.{key} is set, and what is learned are the model's own completions; expected it for data that "
                "have answers to learn; take it out"
            )
    if config.cache is not None:
        raise ConfigError(
            f"data.cache={config.cache}, and prompts are read anew each time; expected none; take it out"
        )


def _fitted(
    rows: Sequence[PromptRow], max_length: int, too_long: str
) -> tuple[list[PromptRow], list[Incident]]:
    kept, incidents = [], []
    for row in rows:
        size = row.ids_T.size
        if size <= max_length:
            kept.append(row)
            continue
        reason = f"{counted(size, 'tokens')}, and a prompt may have {max_length:,}"
        if too_long == "error":
            raise DataError(
                f"{row.place}: the prompt has {reason}; expected fewer; raise data.max_length, or set "
                "data.too_long=drop"
            )
        incidents.append(Incident(row.place.rpartition(":")[2], "dropped", reason))
    return kept, incidents


def _entry(rows: Sequence[PromptRow], num_rows: int, incidents: Sequence[Incident]) -> Entry:
    sizes = np.array([row.ids_T.size for row in rows])
    targets = [_targets(row) for row in rows]
    arrays = {
        "ids": np.concatenate([row.ids_T for row in rows]).astype(np.int32),
        "offsets": np.cumsum([0, *sizes]),
        "target_at": np.concatenate(targets).astype(np.int32),
        "target_offsets": np.cumsum([0, *map(len, targets)]),
        "line": np.array([int(row.place.rpartition(":")[2]) for row in rows]),
        "part": np.zeros(len(rows), dtype=np.int32),
    }
    arrays |= media_arrays(row.media for row in rows)
    # ids too: they key the random streams
    told = json.dumps([[row.id, row.references, row.columns] for row in rows], default=_written)
    digest = hashlib.sha256(arrays["ids"].tobytes() + arrays["offsets"].tobytes() + told.encode())
    for row in rows:
        digest.update("".join(one.picture.digest for one in row.media).encode())
    num_plain = sum(isinstance(row.prompt, str) for row in rows)
    forms: dict[RowForm, int] = {"completion": num_plain, "conversation": len(rows) - num_plain}
    return Entry(arrays, num_rows, tuple(incidents), forms=forms, digest=digest.hexdigest())


def _targets(row: PromptRow) -> IntArray:
    """All but the first token and the pictures'."""
    is_target = np.ones(row.ids_T.size, dtype=bool)
    is_target[0] = False
    for one in row.media:
        is_target[one.start : one.stop] = False
    return np.flatnonzero(is_target)


def _written(value: object) -> str:
    """What JSON has no form for, for a digest: a picture is its bytes."""
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    to_bytes = getattr(value, "tobytes", None)
    return str(value) if to_bytes is None else hashlib.sha256(to_bytes()).hexdigest()
