"""Files of prompts: rows -> token ids to continue, with the answers they are held to.

A row is what training takes (``columns.py``), with or without its answer. Messages go through the chat template, with
the generation prompt; where the last one is an assistant's, it is taken off. Text (``prompt`` or ``text``) is continued
as it is, without a template. The answers of a row, any of which is right, are

    the column named by ``reference``; else
    the first of REFERENCES that the row has; else
    the assistant message that was taken off.

Of a row whose answers are judged (``columns.kind``) the prompt is what is before the best of them, and none of them is
held to be right: what is, is in the column named by ``reference``. Pictures of the answer are no part of the prompt.

Does not cut prompts: an engine refuses those that are too long. May import what ``dataset.py`` may; commands and evals
import it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from taut.data.cache import Entry, media_arrays
from taut.data.chat_template import Ids, Text
from taut.data.dataset import DataConfig, DataReport, Dataset, SourcePart, Split, sources
from taut.data.images import Placed, in_batches
from taut.data.json_io import did_you_mean, listed, shown
from taut.data.messages import (
    Completion,
    Conversation,
    Document,
    Message,
    Part,
    Row,
    RowForm,
    Tool,
    images_of,
    text_of,
)
from taut.data.render import Incident, Renderer
from taut.data.schema import Columns, best_row, read_any, read_prompt
from taut.data.sources import Source, open_source
from taut.errors import ConfigError, DataError, PictureError, RenderError
from taut.io.console import counted
from taut.types import IntArray, Media, Prompt
from taut.vision.content import ImageRef

REFERENCES = ("answers", "answer", "references", "reference", "completion", "output")
"""Columns recognised as holding the right answer, in this order."""
LAST_MESSAGE = "the last message"
PLAIN = ("sft", "prompt")
"""Kinds of data whose rows say nothing of their answers."""


@dataclass(frozen=True, eq=False, slots=True)
class PromptRow:
    """A row of a file of prompts."""

    place: str
    """``questions.jsonl:17``."""
    id: str
    """The row's own ``id`` where every row has one and no two are equal; else its place."""
    ids_T: IntArray
    prompt: tuple[Message, ...] | str
    """What ``ids_T`` was made of: messages, or a text. Each picture is the file that was read, or the copy of what has
    none, so that whoever is shown the prompt has what the model has."""
    references: tuple[str, ...]
    """The right answers, any of them; empty where the row has none."""
    reference_from: str | None
    """Where they are from: the name of a column, or LAST_MESSAGE."""
    columns: Mapping[str, Any]
    """The row as it is in the file."""
    tools: tuple[Tool, ...] = ()
    """Those that the template was given with ``prompt``."""
    media: tuple[Media, ...] = ()
    """The pictures among the ids, ascending."""


class _Read(NamedTuple):
    """A row that is not rendered yet."""

    place: str
    prompt: tuple[Message, ...] | str
    answer: str
    """The content of the assistant message that was taken off; empty where there is none."""
    columns: Mapping[str, Any]
    tools: tuple[Tool, ...] = ()


def load_prompts(
    source: str | Source,
    renderer: Renderer,
    columns: Columns | None = None,
    *,
    reference: str | None = None,
    needs_reference: bool = False,
    limit: int | None = None,
    left_out: list[Incident] | None = None,
) -> list[PromptRow]:
    """The rows of a file, directory or hub data set, the first ``limit`` of them.

    ``reference`` names the column with the right answer. Raises DataError, with file and line, for a row that is no
    prompt; where a named column is missing; and, if ``needs_reference``, where a row has no answer. Rows with a picture
    that cannot be had are told to ``left_out``, where that is given, and are not there.
    """
    opened = open_source(source if isinstance(source, Source) else Source(path=source))
    reading = _Reading(columns or Columns(), renderer, left_out)
    rows, texts = reading.rendered(
        row
        for number, record in islice(opened.records(), limit)
        if (row := reading.read(record, f"{opened.path}:{number}")) is not None
    )
    if not rows and not left_out:
        raise DataError(
            f"{opened.path}: the file has no rows; expected at least one; check the path"
        )
    known = REFERENCES if columns is None or columns.kind in PLAIN else ()
    answers = [_references(row, reference, needs_reference, known) for row in rows]
    ids_of = renderer.template.encode(texts)
    found = []
    for row, name, text, answer in zip(rows, _names(rows), texts, answers, strict=True):
        ids_T = _ids(row.place, text, ids_of[text], renderer)
        found.append(
            PromptRow(
                place=row.place,
                id=name,
                ids_T=ids_T,
                prompt=row.prompt,
                references=answer[0],
                reference_from=answer[1],
                columns=row.columns,
                tools=row.tools,
                media=renderer.template.pictures.find(ids_T, text.pictures, row.place),
            )
        )
    return found


def _from_files(
    prompt: tuple[Message, ...] | str, placed: Sequence[Placed]
) -> tuple[Message, ...] | str:
    if isinstance(prompt, str) or not placed:
        return prompt
    files = iter([ImageRef("file", one.picture.source) for one in placed])
    return tuple({**it, "content": _with_files(it["content"], files)} for it in prompt)


def _with_files(content: str | list[Part], files: Iterator[ImageRef]) -> str | list[Part]:
    if isinstance(content, str):
        return content
    return [{**it, "image": next(files)} if it["type"] == "image" else it for it in content]


@dataclass(frozen=True, slots=True)
class _Reading:
    """Records on their way to texts, past those with a picture that cannot be had if there is a list for these."""

    columns: Columns
    renderer: Renderer
    left_out: list[Incident] | None

    def read(self, record: Any, place: str) -> _Read | None:
        try:
            row = _asked(record, place, self.columns)
        except PictureError as error:
            self._leave_out(place, error)
            return None
        if isinstance(row, Document):
            return _Read(place, row.text, "", record)
        messages, answer = _split(row)
        return _Read(place, messages, answer, record, row.tools)

    def rendered(self, rows: Iterable[_Read]) -> tuple[list[_Read], list[Text]]:
        """Those that are left, and their texts."""
        kept, texts = [], []
        for batch in in_batches(rows, _pictures):
            self._look(batch)
            for row in batch:
                try:
                    text = _text(row, self.renderer)
                except PictureError as error:
                    self._leave_out(row.place, error)
                    continue
                texts.append(text)
                kept.append(row._replace(prompt=_from_files(row.prompt, text.pictures)))
        return kept, texts

    def _look(self, rows: Sequence[_Read]) -> None:
        chats = ((row.place, row.prompt) for row in rows if not isinstance(row.prompt, str))
        self.renderer.template.pictures.look(chats)

    def _leave_out(self, place: str, error: PictureError) -> None:
        if self.left_out is None:
            key = f"{self.columns.prefix}images.bad"
            raise PictureError(f"{error}; or leave such rows out with {key}=drop") from None
        reason = str(error).removeprefix(f"{place}: ")
        self.left_out.append(Incident(place, "dropped", reason))


def _pictures(row: _Read) -> list[ImageRef]:
    return [] if isinstance(row.prompt, str) else images_of(row.prompt)


def _text(row: _Read, renderer: Renderer) -> Text:
    template = renderer.template
    if isinstance(row.prompt, str):
        return template.plain(row.prompt, row.place)
    text = template.apply(row.prompt, row.tools, row.place, is_prompt=True)
    for tool in row.tools:
        name = tool["function"]["name"]
        if name not in text.text:
            raise RenderError(
                f"{row.place}: tools has {shown(name)}, which the chat template does not write; expected a template "
                f"that does; remove it from the row or give another one with {template.key}=FILE"
            )
    return text


def _asked(record: Any, place: str, columns: Columns) -> Conversation | Document:
    if columns.kind in PLAIN:
        return read_prompt(record, place, columns)
    row = best_row(read_any(record, place, columns))
    if isinstance(row, Completion):
        return Document(place, row.prompt)
    if isinstance(row, Document) or not row.learned:
        raise DataError(
            f"{place}: the prompt cannot be told from its answers; expected it in a column of its own, or messages "
            f"that end in an answer; set {columns.prefix}columns"
        )
    return replace(row, messages=row.messages[: min(row.learned)])


def _split(row: Conversation) -> tuple[tuple[Message, ...], str]:
    """The messages to be answered, and the answer where the conversation ends in one."""
    messages, answer = row.messages, ""
    if messages[-1]["role"] == "assistant":
        messages, answer = messages[:-1], text_of(messages[-1]["content"])
    last = messages[-1]["role"] if messages else None
    if last not in ("user", "tool"):
        found = f"a {last} message" if last else "nothing"
        raise DataError(
            f"{row.place}: found {found} where the message to be answered should be; expected a user or tool message, "
            "with at most one assistant message after it; correct the row"
        )
    return messages, answer


def _references(
    row: _Read, column: str | None, is_needed: bool, known: Sequence[str]
) -> tuple[tuple[str, ...], str | None]:
    """The right answers of a row, and where they are from."""
    given = [name for name, value in row.columns.items() if value is not None]
    if column is None:
        column = next((name for name in known if name in given), None)
        found = None if column is None else _texts(row.columns[column])
    elif column not in given:
        raise DataError(
            f"{row.place}: the row has no column {column!r}; expected the reference in it; its columns are "
            f"{listed(given)}{did_you_mean(column, given)}"
        )
    else:
        found, is_needed = _texts(row.columns[column]), True
    if found:
        return found, column
    if column is None and row.answer:
        return (row.answer,), LAST_MESSAGE
    if column is not None and is_needed:
        raise DataError(
            f"{row.place}: {column} is {shown(row.columns[column])}; expected the right answer: a text, a number, or a "
            "list of them; correct it, or name another column with reference=COLUMN"
        )
    if is_needed:
        names = f"one of {', '.join(known)}, or an assistant message at the end"
        raise DataError(
            f"{row.place}: the row has no reference; expected {names if known else 'a column with the right answer'}; "
            f"its columns are {listed(given)}; name the one with the answer: reference=COLUMN"
        )
    return (), None


def _texts(value: Any) -> tuple[str, ...] | None:
    """A text, a number or a list of them as texts; None for what is neither, blank, or no finite number (as Arrow
    files have NaN for what is missing).

    Messages, as a ``completion`` may be, are what the last of them says.
    """
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        value = value[-1].get("content") if value[-1].get("role") == "assistant" else None
    items = value if isinstance(value, list) else [value]
    if not items or not all(isinstance(item, str | int | float) for item in items):
        return None
    if any(isinstance(item, float) and not math.isfinite(item) for item in items):
        return None
    texts = tuple(str(item).lower() if isinstance(item, bool) else str(item) for item in items)
    return texts if all(_is_text(text) for text in texts) else None


def _is_text(text: str) -> bool:
    """Whether there is something in it, and it is Unicode."""
    has_half = any("\ud800" <= character <= "\udfff" for character in text)
    return bool(text.strip()) and not has_half


def _names(rows: Sequence[_Read]) -> list[str]:
    """The rows' own ids, if they can serve."""
    own = [row.columns.get("id") for row in rows]
    names = [str(name) for name in own if isinstance(name, str | int) and _is_text(str(name))]
    is_good = len(names) == len(rows) == len(set(names))
    return names if is_good else [row.place for row in rows]


def _ids(place: str, text: Text, ids: Ids, renderer: Renderer) -> IntArray:
    """The ids as a prompt: without the end token that some tokenizers put after each text."""
    eos, bos = renderer.tokenizer.eos_token_id, renderer.tokenizer.bos_token_id
    if not text.is_rendering and ids[-1:] == [eos]:
        plain = Text(text.text, is_rendering=True)  # no token added
        own = renderer.template.encode([plain])[plain]
        ids = ids[:-1] if ids[:-1][-len(own) :] == own else ids
    if bos is not None and ids[:2] == [bos, bos]:
        raise RenderError(
            f"{place}: the prompt begins with two BOS tokens; expected one; remove it from the "
            "text or the template"
        )
    if not ids:
        raise DataError(
            f"{place}: the prompt has no token; expected at least one; remove it or fill it in"
        )
    return np.asarray(ids, dtype=np.int64)


# --------------------------------------------------------------------------------------------------
# Prompts to be answered, as a data set: what methods that generate train on.
#
# A row is one of ``prompts.py``: messages or text, with or without its right answers. As a sample it is its prompt,
# every token but the first a target, so that all that looks at samples (checks, the planner of a rehearsal) has one;
# what is learned in the end are completions. ``asked`` has the rows themselves, index for index.
#
# Prompts longer than ``max_length`` are refused, or left out with ``data.too_long=drop``, and those with a picture
# that cannot be had likewise, with ``data.images.bad=drop``. Nothing is cached: prompts are few beside what is
# generated for them.
#
# Imported by run, methods, checks and evals.


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

    def __init__(self, parts: Sequence[SourcePart], asked: Sequence[PromptRow]) -> None:
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
    parts: list[SourcePart] = []
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
        part = SourcePart(label, source.weight, entry.digest, entry, opened.path, opened.stamps)
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
