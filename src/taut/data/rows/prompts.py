"""Rows of prompts: token ids to continue, with their right answers; and data sets of them, which methods that generate
train on.

A row is what training takes (``schema.py``), with or without its answer. Messages go through the chat template, with
the generation prompt; a last assistant message is the answer and is removed. At the end of the column ``prompt`` it is
the beginning of one, which is continued: the prompt ends where its content does (``Template.continuing``). Text
(``prompt`` or ``text``) is continued without a template. The right answers of a row are

    the column named by ``reference``; else
    the first of REFERENCES that the row has; else
    the assistant message that was removed.

The prompt of a row whose answers are judged (``columns.kind``) is what precedes the best of them, and none of them
counts as right: right answers are in the column named by ``reference``. Images of the answer are not part of the
prompt.

``load_prompts`` reads one source and does not cut: an engine refuses prompts that are too long. ``load_prompt_set``
reads a split of ``data``. As a sample, a prompt has every token but the first as a target, so that whatever looks at
samples (checks, the planner of a dry run) works on prompts; what is learned in the end are completions. Prompts longer
than ``max_length`` are refused, or left out with ``data.too_long=drop``; those with an image that cannot be used are
refused, or left out with ``data.images.bad=drop``. Nothing is cached: prompts are few, compared with what is generated
from them.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from taut.config import changed
from taut.data.dataset import DataReport, Dataset, SourceShards, sources
from taut.data.read.json_io import did_you_mean, listed, shown
from taut.data.read.sources import number_of, numbered, open_source
from taut.data.render.chat_template import Ids, Text
from taut.data.render.images import in_batches, outside
from taut.data.render.render import Incident, Renderer
from taut.data.rows.messages import (
    Completion,
    Conversation,
    Document,
    Message,
    Row,
    Tool,
    images_of,
    text_of,
)
from taut.data.rows.schema import Columns, best_row, read_any, read_prompt
from taut.data.settings import DataConfig, Source, Split
from taut.data.store.shards import Shard, ShardBuilder, Shards
from taut.errors import ConfigError, DataError, EmptyError, PictureError, RenderError
from taut.io.console import counted
from taut.types import IntArray, Media, Prompt, Sample
from taut.vision.content import ImageRef

REFERENCES = ("answers", "answer", "references", "reference", "completion", "output")
"""Columns recognized as holding the right answer, in this order."""
LAST_MESSAGE = "the last message"
NEAR_END = 128
"""Characters at the end of a prompt in which the tag that it opens is looked for."""
PLAIN = ("sft", "prompt")
"""Kinds of data whose rows do not judge their answers."""

# -- the prompts of one source


@dataclass(frozen=True, eq=False, slots=True)
class PromptRow:
    """A row of a file of prompts."""

    place: str
    """``questions.jsonl:17``."""
    id: str
    """The row's own ``id`` where every row has one and no two are equal; else its place."""
    ids_T: IntArray
    prompt: tuple[Message, ...] | str
    """The messages or the text that ``ids_T`` was made of. Each image is the file that was read, or the stored copy of
    an image without a file, so that a reader of the prompt has what the model has."""
    references: tuple[str, ...]
    """The right answers, any of them; empty where the row has none."""
    reference_from: str | None
    """The name of the column that holds them, or LAST_MESSAGE."""
    columns: Mapping[str, Any]
    """The record of the file."""
    tools: tuple[Tool, ...] = ()
    """The tools that the template was given with ``prompt``."""
    media: tuple[Media, ...] = ()
    """The images among the ids, ascending."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """The values of the template's own variables that ``prompt`` was rendered with, in place of its defaults."""
    opened: str = ""
    """The tag that the text of ``ids_T`` ends with, such as ``<think>``."""

    @property
    def beginning(self) -> str:
        """The beginning of the answer with which the prompt ends; empty if there is none."""
        last = {} if isinstance(self.prompt, str) or not self.prompt else self.prompt[-1]
        return str(last["content"]) if last.get("role") == "assistant" else ""

    @property
    def asked(self) -> tuple[Message, ...] | str:
        """``prompt`` without the beginning of the answer."""
        return self.prompt[:-1] if self.beginning else self.prompt

    def as_prompt(self) -> Prompt:
        """The row as an engine takes it."""
        return Prompt(self.id, self.ids_T, media=self.media)


@dataclass(frozen=True, slots=True)
class _Unrendered:
    """A row that is read and not rendered yet."""

    place: str
    prompt: tuple[Message, ...] | str
    answer: str
    """The content of the assistant message that was removed; empty where there is none."""
    columns: Mapping[str, Any]
    tools: tuple[Tool, ...] = ()
    template_variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages of the prompt; none of a text."""
        return () if isinstance(self.prompt, str) else self.prompt


def load_prompts(
    source: str | Source,
    renderer: Renderer,
    columns: Columns | None = None,
    *,
    reference: str | None = None,
    needs_reference: bool = False,
    limit: int | None = None,
    left_out: list[Incident] | None = None,
    empty: list[Incident] | None = None,
    tools_of: Callable[[Mapping[str, Any]], tuple[Tool, ...]] | None = None,
) -> list[PromptRow]:
    """The rows of a file, directory or hub data set, the first ``limit`` of them.

    ``reference`` names the column with the right answer. Raises DataError, with file and line, for a row that is no
    prompt; where a named column is missing; and, if ``needs_reference``, where a row has no answer. Rows with an image
    that cannot be used are left out and listed in ``left_out``, where that is given; else the first of them is an
    error. Empty rows are listed in ``empty`` likewise. ``tools_of``: columns of a row -> tools that replace its own, if
    any.
    """
    opened = open_source(source if isinstance(source, Source) else Source(path=source))
    columns = columns or Columns()
    renderer.template.require_variables(columns.template_variables, opened.place(1))

    def leave_out(place: str, error: PictureError) -> None:
        if left_out is None:
            key = f"{columns.prefix}images.bad"
            raise PictureError(f"{error}; or leave such rows out with {key}=drop") from None
        left_out.append(Incident(place, "dropped", str(error).removeprefix(f"{place}: ")))

    def read() -> Iterator[_Unrendered]:
        for number, record in islice(opened.read_records(), limit):
            place = opened.place(number)
            try:
                row = _read(record, place, columns)
                offered = () if tools_of is None else tools_of(row.columns)
                yield replace(row, tools=offered) if offered else row
            except PictureError as error:
                leave_out(place, error)
            except EmptyError as error:
                if empty is None:
                    raise
                reason = str(error).removeprefix(f"{place}: ").partition(";")[0]
                empty.append(Incident(place, "dropped", reason))

    # Read and render, several rows at a time.
    rows: list[_Unrendered] = []
    texts: list[Text] = []
    for batch in in_batches(read(), lambda row: images_of(row.messages)):
        renderer.template.pictures.look((row.place, row.messages) for row in batch)
        for row in batch:
            try:
                with_files, text = _render(row, renderer)
            except PictureError as error:
                leave_out(row.place, error)
                continue
            rows.append(with_files)
            texts.append(text)
    if not rows and not left_out and not empty:
        raise DataError(
            f"{opened.path}: the file has no rows; expected at least one; check the path"
        )
    # Right answers, and ids of rows.
    known = REFERENCES if columns.kind in PLAIN else ()
    references = [_references(row, reference, needs_reference, known) for row in rows]
    ids_of = renderer.template.encode(texts)
    own_ids = [row.columns.get("id") for row in rows]
    names = [str(name) for name in own_ids if isinstance(name, str | int) and _is_text(str(name))]
    if not len(names) == len(rows) == len(set(names)):
        names = [row.place for row in rows]
    prompts = []
    for row, name, text, (answers, column) in zip(rows, names, texts, references, strict=True):
        ids_T = _ids(row.place, text, ids_of[text], renderer)
        tag = re.search(r"<[\w-]+>(?=\s*\Z)", text.text[-NEAR_END:])
        prompts.append(
            PromptRow(
                place=row.place,
                id=name,
                ids_T=ids_T,
                prompt=row.prompt,
                references=answers,
                reference_from=column,
                columns=row.columns,
                tools=row.tools,
                media=renderer.template.pictures.find(ids_T, text.pictures, row.place),
                template_variables=row.template_variables,
                opened=tag[0] if tag else "",
            )
        )
    return prompts


def with_privileged(
    rows: Sequence[PromptRow], column: str, template: str, renderer: Renderer
) -> dict[str, IntArray]:
    """The ids of each row's prompt, by place, in which ``template`` takes the place of the text of the last user
    message, or of the whole prompt. In it {prompt} is that text and {privileged} the row's column. Raises DataError for
    a row without one.
    """

    def filled(row: PromptRow, text: str) -> str:
        texts = reference_texts(row.columns.get(column))
        if texts is None or len(texts) != 1:
            raise DataError(
                f"{row.place}: {column} is {shown(row.columns.get(column))}; expected a text, which the teacher sees "
                "and the student does not; correct it, or name another column with distill.privileged"
            )
        first, _, rest = template.partition("{privileged}")
        return texts[0].join(part.replace("{prompt}", text) for part in (first, rest))

    # Each prompt with the template in place of the last text of the user.
    texts_of: dict[str, Text] = {}
    for row in rows:
        if row.media:
            raise DataError(
                f"{row.place}: the prompt has pictures, and distill.privileged changes its text; expected text alone; "
                "name a teacher with distill.teacher"
            )
        prompt = row.prompt
        if isinstance(prompt, str):
            prompt = filled(row, prompt)
        else:
            last = max(at for at, message in enumerate(prompt) if message["role"] == "user")
            content = filled(row, text_of(prompt[last]["content"]))
            prompt = (*prompt[:last], {**prompt[last], "content": content}, *prompt[last + 1 :])
        unrendered = _Unrendered(
            row.place, prompt, "", row.columns, row.tools, row.template_variables
        )
        texts_of[row.place] = _render(unrendered, renderer)[1]
    ids_of = renderer.template.encode(list(texts_of.values()))
    return {place: _ids(place, text, ids_of[text], renderer) for place, text in texts_of.items()}


def _read(record: Any, place: str, columns: Columns) -> _Unrendered:
    """The prompt of a record, and the answer where it ends in one."""
    if columns.kind in PLAIN:
        row = read_prompt(record, place, columns)
    else:
        # The prompt is what precedes the best answer.
        best = best_row(read_any(record, place, columns))
        if isinstance(best, Completion):
            row = Document(place, best.prompt)
        elif isinstance(best, Document) or not best.learned:
            raise DataError(
                f"{place}: the prompt cannot be told from its answers; expected it in a column of its own, or messages "
                f"that end in an answer; set {columns.prefix}columns"
            )
        else:
            messages = best.messages[: min(best.learned)]
            row = replace(best, messages=messages, learned=(), excluded=())
    if isinstance(row, Document):
        return _Unrendered(place, row.text, "", record)
    messages, answer = row.messages, ""
    if row.learned:
        messages, answer = messages[:-1], text_of(messages[-1]["content"])
    last = messages[-1]["role"] if messages else None
    is_begun = row.excluded == (len(messages) - 1,) and "tool_calls" not in messages[-1]
    if last not in ("user", "tool") and not is_begun:
        last_message = f"a {last} message" if last else "nothing"
        raise DataError(
            f"{place}: found {last_message} where the message to be answered should be; expected a user or tool "
            "message, with at most one assistant message after it; correct the row"
        )
    return _Unrendered(place, messages, answer, record, row.tools, row.template_variables)


def _render(row: _Unrendered, renderer: Renderer) -> tuple[_Unrendered, Text]:
    """The row with each image of its prompt as a file, and its text."""
    template = renderer.template
    if isinstance(row.prompt, str):
        return row, template.plain(row.prompt, row.place)
    *before, last = row.prompt
    whole = Conversation(
        row.place, row.prompt, (), (), row.tools, template_variables=row.template_variables
    )
    if last["role"] == "assistant":
        text = template.continuing(whole)
        if not text.words.endswith(last["content"]):  # the template trims it
            last = {**last, "content": last["content"].strip()}
    else:
        text = template.apply_to(whole, row.prompt, is_prompt=True)
    # The model has to see the tools that it may call.
    prompt = (*before, last)
    for tool in row.tools:
        name = tool["function"]["name"]
        if name not in text.words:
            raise RenderError(
                f"{row.place}: tools has {shown(name)}, which the chat template does not write; expected a template "
                f"that does; remove it, or set {template.key}=FILE, or {template.key}=hermes"
            )
    if not text.pictures:
        return replace(row, prompt=prompt), text
    # An image is the file that was read.
    images = iter([ImageRef("file", image.picture.source) for image in text.pictures])
    messages = []
    for message in prompt:
        if isinstance(parts := message["content"], list):
            content = [{**p, "image": next(images)} if p["type"] == "image" else p for p in parts]
            message = {**message, "content": content}
        messages.append(message)
    return replace(row, prompt=tuple(messages)), text


def _references(
    row: _Unrendered, column: str | None, is_needed: bool, known: Sequence[str]
) -> tuple[tuple[str, ...], str | None]:
    """The right answers of a row, and the column that holds them."""
    present = [name for name, value in row.columns.items() if value is not None]
    if column is None:
        column = next((name for name in known if name in present), None)
        texts = None if column is None else reference_texts(row.columns[column])
    elif column not in present:
        raise DataError(
            f"{row.place}: the row has no column {column!r}; expected the reference in it; its columns are "
            f"{listed(present)}{did_you_mean(column, present)}"
        )
    else:
        texts, is_needed = reference_texts(row.columns[column]), True
    if texts:
        return texts, column
    if column is None and row.answer:
        return (row.answer,), LAST_MESSAGE
    if not is_needed:
        return (), None
    if column is not None:
        fault = (
            f"{column} is {shown(row.columns[column])}; expected the right answer: a text, a number, or a list of "
            "them; correct it, or name another column with reference=COLUMN"
        )
    else:
        names = f"one of {', '.join(known)}, or an assistant message at the end"
        fault = (
            f"the row has no reference; expected {names if known else 'a column with the right answer'}; its columns "
            f"are {listed(present)}; name the one with the answer: reference=COLUMN"
        )
    raise DataError(f"{row.place}: {fault}")


def reference_texts(value: Any) -> tuple[str, ...] | None:
    """A text, a number or a list of them as texts; None for any other value, a blank text, or a number that is not
    finite (Arrow files have NaN for missing values). Of messages, as a ``completion`` may be, the last one's content.
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
    """Whether a text is not blank, and is Unicode."""
    has_surrogate = any("\ud800" <= character <= "\udfff" for character in text)
    return bool(text.strip()) and not has_surrogate


def _ids(place: str, text: Text, ids: Ids, renderer: Renderer) -> IntArray:
    """The ids as a prompt: without the end token that some tokenizers put after each text."""
    eos, bos = renderer.tokenizer.eos_token_id, renderer.tokenizer.bos_token_id
    if not text.is_rendering and ids[-1:] == [eos]:
        plain = Text(text.text, is_rendering=True)  # no token added
        text_ids = renderer.template.encode([plain])[plain]
        ids = ids[:-1] if ids[:-1][-len(text_ids) :] == text_ids else ids
    if bos is not None and ids[:2] == [bos, bos]:
        raise RenderError(
            f"{place}: the prompt begins with two BOS tokens; expected one; remove it from the text or the template"
        )
    if not ids:
        raise DataError(
            f"{place}: the prompt has no token; expected at least one; remove it or fill it in"
        )
    return np.asarray(ids, dtype=np.int64)


# -- data sets of prompts


class PromptReport(DataReport):
    """Counts of prompts; what is learned does not exist yet."""

    @property
    def sizes(self) -> str:
        sizes = ("rows", self.num_rows), ("prompts", self.num_samples), ("tokens", self.num_tokens)
        return ", ".join(counted(number, nouns) for nouns, number in sizes) + self.pictures


class PromptSet(Dataset):
    """Prompts by index, in the order of sources and rows; ``prompt_rows`` has the rows themselves, index for index."""

    def __init__(self, parts: Sequence[SourceShards], rows: Sequence[PromptRow]) -> None:
        super().__init__(parts, [f"{part.path}: read as prompts" for part in parts])
        self.report = PromptReport(**vars(self.report))
        self.prompt_rows = list(rows)
        self.answers: Mapping[str, Sample] = {}
        """The rows with their answers, by place, where a method learns from those too."""

    def prompts(self) -> list[Prompt]:
        """The prompts as an engine takes them."""
        return [Prompt(row.place, row.ids_T, media=row.media) for row in self.prompt_rows]

    def questions(self) -> Iterator[Row]:
        """The prompts as rows whose answer, which does not exist yet, is to be learned."""
        for row in self.prompt_rows:
            if isinstance(row.prompt, str):
                yield Completion(row.place, row.prompt, "")
            elif not row.beginning:  # a server would have to be told to go on
                variables = row.template_variables
                learned = (len(row.prompt),)
                yield Conversation(row.place, row.prompt, learned, template_variables=variables)


def load_prompt_set(
    config: DataConfig,
    split: Split,
    renderer: Renderer,
    max_length: int,
    reference: str | None = None,
    tools_of: Callable[[Mapping[str, Any]], tuple[Tool, ...]] | None = None,
) -> PromptSet:
    """The prompts of ``config.train`` or ``config.eval``, of at most ``max_length`` tokens. ``reference``: the column
    with the right answer; ``tools_of``: as in ``load_prompts``. Raises DataError for a row that is no prompt.
    """
    _require_usable(config)
    parts: list[SourceShards] = []
    prompt_rows: list[PromptRow] = []
    seen_paths, seen_names = Counter[str](), Counter[str]()
    image_store = renderer.image_store
    for source, columns in sources(config, split, "prompt"):
        opened = open_source(source)
        unread: list[Incident] = []
        left_out = unread if image_store is not None and image_store.images.bad == "drop" else None
        empty = unread if config.empty == "drop" else None
        # Read the prompts, without those that may be left out.
        rows = load_prompts(
            source,
            renderer,
            columns,
            reference=reference,
            left_out=left_out,
            empty=empty,
            tools_of=tools_of,
        )
        if not rows:
            first = unread[0]
            raise DataError(
                f"{opened.path}: none of its {counted(len(unread), 'rows')} can be used "
                f"({first.place}: {first.reason}); expected some; correct data.images.folder, or the files"
            )
        incidents = [
            replace(incident, place=str(number_of(opened.names, incident.place)))
            for incident in unread
        ]
        # Leave out, or refuse, those that are too long.
        kept = []
        for row in rows:
            if row.ids_T.size <= max_length:
                kept.append(row)
                continue
            size = counted(row.ids_T.size, "tokens")
            reason = f"{size}, and a prompt may have {max_length:,}"
            if config.too_long == "error":
                raise DataError(
                    f"{row.place}: the prompt has {reason}; expected fewer; raise data.max_length, or set "
                    "data.too_long=drop"
                )
            number = number_of(opened.names, row.place)
            incidents.append(Incident(str(number), "dropped", reason))
        if not kept:
            raise DataError(
                f"{opened.path}: none of its {counted(len(rows), 'prompts')} has at most {max_length} tokens; "
                "expected some; raise data.max_length"
            )
        incidents.sort(key=lambda incident: int(incident.place))
        shard = _shard(kept, opened.names, len(rows) + len(unread), incidents)
        (label,), names = numbered([opened.path], seen_paths), numbered(opened.names, seen_names)
        parts.append(
            SourceShards(
                label,
                names,
                source.weight,
                shard.digest,
                Shards.of([shard]),
                source=opened.path,
                stamps=opened.stamps,
                file_names=opened.names,
                image_store=image_store,
            )
        )
        prompt_rows += kept
    prompts = PromptSet(parts, prompt_rows)
    if len({row.id for row in prompt_rows}) < len(
        prompt_rows
    ):  # files that number their rows alike
        prompts.prompt_rows = [
            replace(row, id=prompts.sample_id(index)) for index, row in enumerate(prompt_rows)
        ]
    return prompts


def _require_usable(config: DataConfig) -> None:
    """Refuse options that prompts do not use."""
    faults = []
    if config.too_long in ("split", "truncate"):
        faults.append(
            f"too_long={config.too_long} would cut prompts, and their answers be judged by the whole; expected error "
            "or drop; set data.too_long"
        )
    faults += [
        f"{key} is set, and what is learned are the model's own completions; expected it for data that have answers "
        "to learn; take it out"
        for key in changed(config, ("targets", "min_length", "without_targets", "step_separator"))
    ]
    faults += [
        f"{key}={value}, and prompts are read again each time, by this process; expected none; take it out"
        for key in ("cache", "workers")
        if (value := getattr(config, key)) is not None
    ]
    if faults:
        raise ConfigError(f"data.{faults[0]}")


def _shard(
    rows: Sequence[PromptRow],
    names: Sequence[str],
    num_rows: int,
    incidents: Sequence[Incident],
) -> Shard:
    """The prompts as samples. The digest covers ids, references and columns, which rewards read."""
    builder, samples = ShardBuilder(), []
    builder.num_rows, builder.incidents = num_rows, list(incidents)
    for row in rows:
        at_N = 1 + np.flatnonzero(outside(row.media, row.ids_T.size)[1:])
        sample = Sample(row.place, row.ids_T, at_N, np.ones(at_N.size), row.media)
        samples.append((number_of(names, row.place), row.place, [sample]))
        builder.forms["completion" if isinstance(row.prompt, str) else "conversation"] += 1
    builder.add(samples)
    shard = builder.build()

    def written(value: object) -> str:
        """A value that JSON has no form for; an image is its bytes."""
        if isinstance(value, bytes):
            return hashlib.sha256(value).hexdigest()
        to_bytes = getattr(value, "tobytes", None)
        return str(value) if to_bytes is None else hashlib.sha256(to_bytes()).hexdigest()

    # names too: they seed the random streams
    records = [[row.id, row.references, row.columns] for row in rows]
    digest = hashlib.sha256(shard.arrays["ids"].tobytes() + shard.arrays["offsets"].tobytes())
    digest.update(json.dumps(records, default=written).encode())
    for row in rows:
        digest.update("".join(image.picture.digest for image in row.media).encode())
    return replace(shard, digest=digest.hexdigest())
