"""What happens to samples that are too long or too short.

    error      the first sample over max_length ends the run (the default)
    drop       it is left out
    truncate   its first max_length tokens stay, fewer where that would cut a picture: then what is
               before the picture; no end token is made up, so nothing false is learned; a sample
               left without targets is left out
    split      documents only: windows of max_length tokens, each beginning with the last token of
               the one before, so that every token but the document's first is a target exactly
               once; the end token is where the document really ends. Splitting a conversation is
               an error

Samples under min_length are left out. Whatever is left out or cut is returned as an Incident, to be
listed. Of answers that are judged ``answers.py`` decides. Imported by it and ``dataset.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from taut.data.chat_template import Ids, Template, Text, common_length
from taut.data.images import Placed, is_same_input, uncut, within
from taut.data.json_io import shown
from taut.data.messages import Completion, Conversation, Document, Message, Row, Tool, text_of
from taut.data.schema import Answers, AnyRow, Stepwise
from taut.errors import DataError, PictureError, RenderError
from taut.types import IntArray, Media, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from taut.vision.image_store import Album

TooLong: TypeAlias = Literal["error", "drop", "split", "truncate"]


@dataclass(frozen=True, slots=True)
class Limits:
    """The length policy and what to do with rows that teach nothing."""

    max_length: int
    too_long: TooLong = "error"
    min_length: int = 0
    without_targets: Literal["error", "drop"] = "error"


@dataclass(frozen=True, slots=True)
class Incident:
    """A sample that was left out or cut."""

    place: str
    """``train.jsonl:17``, with ``#2`` for the second sample of the row."""
    kind: Literal["dropped", "cut"]
    reason: str
    targets_lost: int = 0
    """Targets of it that nobody learns."""


def fit(
    sample: Sample, limits: Limits, *, is_document: bool
) -> tuple[list[Sample], Incident | None]:
    """The sample as the policy leaves it: itself, parts of it, or nothing."""
    length = sample.num_tokens
    if not sample.num_targets:
        if limits.without_targets == "error":
            raise DataError(
                f"{sample.id}: the row has no targets; expected at least one assistant turn to "
                "learn; remove the row, "
                "or set data.without_targets=drop"
            )
        return [], Incident(sample.id, "dropped", "no targets")
    if length < limits.min_length:
        reason = f"{length} tokens, min_length {limits.min_length}"
        return [], Incident(sample.id, "dropped", reason, sample.num_targets)
    if length <= limits.max_length:
        return [sample], None
    return _shorten(sample, limits, is_document)


def _shorten(
    sample: Sample, limits: Limits, is_document: bool
) -> tuple[list[Sample], Incident | None]:
    found = f"{sample.num_tokens} tokens, max_length {limits.max_length}"
    if limits.too_long == "error":
        raise DataError(
            f"{sample.id}: {found}; expected no more; raise data.max_length, "
            "or set data.too_long to drop, truncate or (for plain text) split"
        )
    if limits.too_long == "drop":
        return [], Incident(sample.id, "dropped", found, sample.num_targets)
    if limits.too_long == "truncate":
        stop = uncut(sample.media, limits.max_length)
        if stop < limits.max_length:
            found = f"{found}, in a picture that begins at {stop}"
        return _truncate(sample, stop, found)
    if not is_document:
        raise DataError(
            f"{sample.id}: {found}; data.too_long=split is for plain text, and this is a "
            "conversation or completion; "
            "set data.too_long to drop or truncate, or raise data.max_length"
        )
    starts = range(0, sample.num_tokens - 1, limits.max_length - 1)
    windows = [
        _slice(sample, f"{sample.id}#{number}", start, start + limits.max_length)
        for number, start in enumerate(starts, start=1)
    ]
    return windows, Incident(sample.id, "cut", f"{found}, split into {len(windows)}")


def _truncate(sample: Sample, stop: int, found: str) -> tuple[list[Sample], Incident | None]:
    num_left = int((sample.target_at_N < stop).sum())
    if not num_left:
        reason = f"{found}, no target left"
        return [], Incident(sample.id, "dropped", reason, sample.num_targets)
    short = _slice(sample, sample.id, 0, stop)
    return [short], Incident(sample.id, "cut", found, sample.num_targets - num_left)


def _slice(sample: Sample, name: str, start: int, stop: int) -> Sample:
    is_inside = (sample.target_at_N > start) & (sample.target_at_N < stop)
    short = replace(
        sample,
        id=name,
        ids_T=np.ascontiguousarray(sample.ids_T[start:stop]),
        target_at_N=sample.target_at_N[is_inside] - start,
        weight_N=sample.weight_N[is_inside],
        media=within(sample.media, start, stop),
    )
    if sample.read_at_R is None:
        return short
    is_read = (sample.read_at_R >= start) & (sample.read_at_R < stop)
    read_values = {label: value_R[is_read] for label, value_R in sample.read_values.items()}
    return replace(short, read_at_R=sample.read_at_R[is_read] - start, read_values=read_values)


# --------------------------------------------------------------------------------------------------
# Rows to token ids and exact targets, through the tokenizer's chat template.
#
# For each assistant turn i to be learned,
#
#     P_i = the rendering of messages[:i] with the generation prompt: what the model will see
#     R_i = the rendering of messages[:i + 1]
#
# are tokenised whole, and P_i's ids must be a prefix of R_i's: the first len(P_i) tokens are context,
# what follows is what the model has to write, up to and with the LAST token that ends the turn. What
# the template writes after that token (ChatML's newline) is no target, and neither is the role
# header. If the whole conversation begins with every R_i up to its end token, the row is one sample;
# else (templates that strip thinking from history) one per turn.
#
# A row that cannot be rendered exactly is a RenderError. Two tokenisations are never glued together
# and no end token is ever made up. A template that writes none is refused; so is one that passes over
# tools, tool calls or reasoning, and an answer with a token of the stop set before its end.
#
# Of a row with pictures every prefix counts those of the whole; each is seen once; and no token of a picture is a
# target, whoever's turn it is in (``pictures.py``).
#
# Does not read files (``sources.py``) and does not cut (``length.py``). Imported by ``dataset.py``
# and by whoever needs prompts or the stop set.

Targets: TypeAlias = Literal["assistant", "last", "all"]
IdsOf: TypeAlias = Mapping[Text, Ids]


@dataclass(frozen=True, slots=True)
class _Turn:
    """An assistant turn: what is seen before it and what is there after it."""

    index: int
    prompt: Text
    row: Text


@dataclass(frozen=True, slots=True)
class _Draft:
    """A row whose texts are known and whose ids are not yet."""

    texts: tuple[Text, ...]
    finish: Callable[[IdsOf], list[Sample]]


class Renderer:
    """Renders rows with one tokenizer, one template and one choice of targets."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None = None,
        targets: Targets = "assistant",
        key: str = "data.template",
        album: Album | None = None,
    ) -> None:
        """``key``: the setting that gives another template, for messages. ``album``: where pictures are had from; None:
        the model takes none.
        """
        self.template = Template(tokenizer, template, key, album)
        self.album = album
        self.tokenizer = tokenizer
        self.targets: Targets = targets
        self.stop_set: frozenset[int] = frozenset()

    def stopping_at(self, stop_set: Collection[int]) -> Renderer:
        """The same renderer, which refuses a row whose turn does not end with a token of this set (the model would
        not stop there), or has one of them before its end (the model would be cut there)."""
        other = copy.copy(self)
        other.stop_set = frozenset(stop_set)
        return other

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The token that ends a plain assistant turn; empty without template and eos."""
        return self.template.stop_ids

    def identity(self) -> str:
        """Changes whenever the ids or targets of some row could."""
        pictures = f" {self.album.identity()}" if self.album else ""
        return f"{self.template.identity()} {self.targets} {sorted(self.stop_set)}{pictures}"

    def prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ) -> IntArray:
        """The ids of ``prompt_media``."""
        return self.prompt_media(messages, tools)[0]

    def prompt_media(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ) -> tuple[IntArray, tuple[Media, ...]]:
        """History and generation prompt, what an engine feeds the model for its next turn, and the pictures in it."""
        text = self.template.apply(messages, tuple(tools or ()), "prompt", is_prompt=True)
        ids = self.template.encode([text])[text]
        media = self.template.pictures.find(ids, text.pictures, "prompt")
        return np.asarray(ids, dtype=np.int64), media

    def answer_text(self, row: Row) -> tuple[Text, int | None]:
        """The whole text of a row as it is tokenised, and where its last message, or its completion, begins in it;
        None: the template does not write the content as it is."""
        if isinstance(row, Conversation):
            before, content = row.messages[:-1], text_of(row.messages[-1]["content"])
            text = self.template.apply(row.messages, row.tools, row.place)
            prompt = self.template.apply(
                before, row.tools, row.place, is_prompt=True, placed=text.pictures
            )
            lead = len(content) - len(content.lstrip())
            asked = prompt.text if text.text.startswith(prompt.text) else ""
            at = text.text.find(content.strip(), len(asked))
            return text, None if at < 0 else at - lead
        whole = row.prompt + row.completion if isinstance(row, Completion) else row.text
        start = len(row.prompt) if isinstance(row, Completion) else 0
        return self.template.plain(whole, row.place), start

    def render(self, row: Row) -> list[Sample]:
        """The samples of one row: one, or one per learned turn."""
        return self.render_all([row])[0]

    def look(self, rows: Iterable[Row]) -> None:
        """Have the pictures of these rows seen, several at a time."""
        chats = (row for row in rows if isinstance(row, Conversation))
        self.template.pictures.look((row.place, row.messages) for row in chats)

    def render_all(self, rows: Sequence[Row]) -> list[list[Sample]]:
        """The samples of each row; the tokenizer is called at most twice for all of them."""
        self.look(rows)
        drafts = [self._draft(row) for row in rows]
        ids_of = self.template.encode(text for draft in drafts for text in draft.texts)
        return [draft.finish(ids_of) for draft in drafts]

    def _draft(self, row: Row) -> _Draft:
        if isinstance(row, Conversation):
            return self._draft_conversation(row)
        if isinstance(row, Completion):
            prompt = self.template.plain(row.prompt, row.place)
            whole = self.template.plain(row.prompt + row.completion, row.place)
            return _Draft(
                (prompt, whole),
                lambda ids_of: [self._finish_completion(row, ids_of[prompt], ids_of[whole])],
            )
        text = self.template.plain(row.text, row.place)
        return _Draft((text,), lambda ids_of: [self._finish_document(row, ids_of[text])])

    def _draft_conversation(self, row: Conversation) -> _Draft:
        placed = self.template.pictures.place(row.messages, row.tools, row.place)
        full = self.template.apply(row.messages, row.tools, row.place, placed=placed)
        turns = [self._draft_turn(row, index, full) for index in self._turns_to_render(row)]
        texts = [full, *(text for turn in turns for text in (turn.prompt, turn.row))]
        _check_nothing_ignored(row, full, turns)
        finish = self._finish_all if self.targets == "all" else self._finish_turns
        return _Draft(tuple(texts), lambda ids_of: finish(row, full, turns, ids_of))

    def _turns_to_render(self, row: Conversation) -> tuple[int, ...]:
        if self.targets == "assistant":
            return row.learned
        if self.targets == "last":
            last = max(
                (i for i, message in enumerate(row.messages) if message["role"] == "assistant"),
                default=-1,
            )
            return tuple(index for index in row.learned if index == last)
        return tuple(sorted({*row.excluded, *row.learned[-1:]} - {0}))

    def _draft_turn(self, row: Conversation, index: int, full: Text) -> _Turn:
        if index == 0:
            raise RenderError(
                f"{row.place}: messages[0] is an assistant message; expected a user message to "
                "answer; "
                "add one, or write train: false on it"
            )
        place = f"{row.place}: messages[{index}]"
        before, placed = row.messages[:index], full.pictures
        prompt = self.template.apply(before, row.tools, place, is_prompt=True, placed=placed)
        if index + 1 == len(row.messages):
            return _Turn(index, prompt, full)
        seen = row.messages[: index + 1]
        return _Turn(index, prompt, self.template.apply(seen, row.tools, place, placed=placed))

    def _finish_document(self, row: Document, ids: Ids) -> Sample:
        ids = [*ids, *self._missing_eos(ids, row.place)]
        return self._sample(row.place, ids, range(1, len(ids)))

    def _finish_completion(self, row: Completion, prompt: Ids, ids: Ids) -> Sample:
        if prompt[-1:] == [self.tokenizer.eos_token_id] and ids[: len(prompt)] != prompt:
            prompt = prompt[:-1]  # a tokenizer that itself ends each text with eos
        start = self.template.context_length(prompt, ids, row.place)
        ids = [*ids, *self._missing_eos(ids, row.place)]
        self.require_none_inside(ids[start:-1], ids[-1], row.place)
        first = 1 if self.targets == "all" else max(start, 1)
        return self._sample(row.place, ids, range(first, len(ids)))

    def _missing_eos(self, ids: Ids, place: str) -> Ids:
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise RenderError(
                f"{place}: plain text has to end with the tokenizer's eos token, and it has none; "
                "expected one; "
                "set eos_token in the tokenizer's configuration"
            )
        return [] if ids[-1:] == [eos] else [int(eos)]

    def _finish_turns(
        self, row: Conversation, text: Text, turns: Sequence[_Turn], ids_of: IdsOf
    ) -> list[Sample]:
        spans = [self._span(row, turn, ids_of) for turn in turns]
        full, rows = ids_of[text], [ids_of[turn.row] for turn in turns]
        if all(full[:stop] == ids[:stop] for ids, (_, stop) in zip(rows, spans, strict=True)):
            at = [position for start, stop in spans for position in range(start, stop)]
            return [self._sample(row.place, full, at, text.pictures)]
        own = [turn.row.pictures for turn in turns]
        if len(turns) == 1:
            return [self._sample(row.place, rows[0], range(*spans[0]), own[0])]
        return [
            self._sample(f"{row.place}#{number}", ids, range(*span), pictures)
            for number, (ids, span, pictures) in enumerate(
                zip(rows, spans, own, strict=True), start=1
            )
        ]

    def _finish_all(
        self, row: Conversation, text: Text, turns: Sequence[_Turn], ids_of: IdsOf
    ) -> list[Sample]:
        """Every token but the first, and but the turns marked train: false."""
        full = ids_of[text]
        kept = np.ones(len(full), dtype=bool)
        kept[:1] = False
        for turn in turns:
            start, stop = self._span(row, turn, ids_of)
            if turn.index not in row.excluded:
                continue
            if full[:stop] != ids_of[turn.row][:stop]:
                raise RenderError(
                    f"{row.place}: messages[{turn.index}] has train: false and is written "
                    "differently once history; "
                    "expected targets=assistant or last for such templates; set data.targets"
                )
            kept[start:stop] = False
        return [self._sample(row.place, full, np.flatnonzero(kept), text.pictures)]

    def _span(self, row: Conversation, turn: _Turn, ids_of: IdsOf) -> tuple[int, int]:
        """Where the targets of a turn lie in R_i: [start, stop)."""
        place = f"{row.place}: messages[{turn.index}]"
        ids = ids_of[turn.row]
        start = self.template.context_length(ids_of[turn.prompt], ids, place)
        end = self.template.end_of_turn(ids, start, place)
        if self.stop_set and ids[end] not in self.stop_set:
            raise RenderError(
                f"{place}: the template ends this turn with {self.template.quoted(ids[end : end + 1])}, "
                f"at which no server would stop; expected {self._stops}; add its id to eos_token_id in "
                "the model's generation_config.json"
            )
        self.require_none_inside(ids[start:end], ids[end], place)
        return start, end + 1

    def require_none_inside(self, inside: Ids, end: int, place: str) -> None:
        """No token that ends an answer may be among the targets before the end."""
        found = next((token for token in inside if token == end or token in self.stop_set), None)
        if found is not None:
            raise RenderError(
                f"{place}: {self.template.quoted([found])} ends an answer and is inside this one too; expected "
                "it once, or the model would learn to stop there; remove it from the content"
            )

    @property
    def _stops(self) -> str:
        return " or ".join(self.template.quoted([index]) for index in sorted(self.stop_set))

    def _sample(
        self, name: str, ids: Ids, target_at: Iterable[int], placed: Sequence[Placed] = ()
    ) -> Sample:
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise RenderError(
                f"{name}: the row begins with two BOS tokens; expected one; "
                "remove it from the content or the template"
            )
        if not ids:
            raise RenderError(
                f"{name}: the row renders to no token at all; expected text; correct the row"
            )
        ids_T, pictures = np.asarray(ids, dtype=np.int64), self.template.pictures
        media = pictures.find(ids_T, placed, name)
        at = pictures.learnable(ids_T, np.fromiter(target_at, dtype=np.int64), media)
        return Sample(name, ids_T, at, np.ones(at.size), media)


def _check_nothing_ignored(row: Conversation, full: Text, turns: Sequence[_Turn]) -> None:
    """A template that leaves things out would train on something else than the row says."""
    wanted = [("tools", tool["function"]["name"], full) for tool in row.tools]
    for index, message in enumerate(row.messages):
        for call in message.get("tool_calls", ()):
            wanted.append((f"messages[{index}].tool_calls", call["function"]["name"], full))
    for turn in turns:
        message = row.messages[turn.index]
        for key in ("reasoning_content", "reasoning", "thinking"):
            wanted.append((f"messages[{turn.index}].{key}", message.get(key, "").strip(), turn.row))
    for where, words, text in wanted:
        if words not in text.text:
            raise RenderError(
                f"{row.place}: {where} has {shown(words)}, which the chat template does not "
                "write; expected a "
                "template that does; remove it from the row or give another one with "
                "data.template=FILE"
            )


# --------------------------------------------------------------------------------------------------
# Rows to samples where answers are judged: ids and targets as SFT has them, values, places to read, and what is left.
#
# Every answer is rendered as the row of SFT that it is, and ends at its last target: what a template writes after the
# end of a turn is no part of it, so that the last token, where a reward is read, is the one a server stops at. Of
# whole texts (documents) that are compared the prompt is what their ids have in common, and the rest is learned.
#
# Steps are read at the token that holds the last character of each which is not white space. One token that holds the
# end of a step and the beginning of the next cannot be read for the one without the other: a RenderError.
#
# A row whose answers are compared needs two that differ, in preference and in ids. Where the length policy takes an
# answer away, or cuts two to the same, the row goes as a whole and is listed; a list of more goes on with those left.
#
# ``fit_any`` and ``render_any`` take rows of SFT too, and leave them to ``render.py`` and ``length.py``;
# ``render_each`` goes on past rows whose pictures cannot be had. Imported by ``dataset.py`` and ``attempts.py``.


def render_any(rows: Sequence[AnyRow], renderer: Renderer) -> list[list[Sample]]:
    """The samples of each row, answers in their order."""
    answers = [answers_of(row) for row in rows]
    rendered = iter(renderer.render_all([answer for group in answers for answer in group]))
    found = [[next(rendered) for _ in group] for group in answers]
    return [
        _finish(row, samples, renderer) if isinstance(row, Answers | Stepwise) else samples[0]
        for row, samples in zip(rows, found, strict=True)
    ]


def render_each(rows: Sequence[AnyRow], renderer: Renderer) -> list[list[Sample] | PictureError]:
    """The same, with the error in the place of a row that has a picture which cannot be had."""
    faults = faults_of_pictures(rows, renderer)
    good = [row for row, fault in zip(rows, faults, strict=True) if fault is None]
    rendered = iter(render_any(good, renderer))
    return [next(rendered) if fault is None else fault for fault in faults]


def faults_of_pictures(rows: Sequence[AnyRow], renderer: Renderer) -> list[PictureError | None]:
    """What is wrong with the first such picture of each row."""
    renderer.look(answer for row in rows for answer in answers_of(row))
    return [_fault_of_pictures(row, renderer) for row in rows]


def _fault_of_pictures(row: AnyRow, renderer: Renderer) -> PictureError | None:
    try:
        for answer in answers_of(row):
            if isinstance(answer, Conversation):
                renderer.template.pictures.place_each(answer.messages, answer.place)
    except PictureError as error:
        return error
    return None


def fit_any(
    row: AnyRow, samples: Sequence[Sample], limits: Limits
) -> tuple[list[Sample], list[Incident]]:
    """The samples as the length policy leaves them, and what was left out or cut."""
    fitted = [fit(sample, limits, is_document=isinstance(row, Document)) for sample in samples]
    kept = [sample for found, _ in fitted for sample in found]
    incidents = [incident for _, incident in fitted if incident is not None]
    if isinstance(row, Answers) and len(samples) > 1:
        return _fit_compared(row, samples, kept, incidents, limits)
    if isinstance(row, Stepwise) and kept and not kept[0].read_values["label"].size:
        reason = f"{incidents[0].reason}, no step left"
        return [], [Incident(row.place, "dropped", reason, samples[0].num_targets)]
    return kept, incidents


def answers_of(row: AnyRow) -> tuple[Row, ...]:
    """Each as the row of SFT that it is."""
    if isinstance(row, Answers):
        return row.answers
    return (row.answer if isinstance(row, Stepwise) else row,)


def _finish(
    row: Answers | Stepwise, rendered: Sequence[Sequence[Sample]], renderer: Renderer
) -> list[Sample]:
    samples = [_only(found) for found in rendered]
    if isinstance(row, Stepwise):
        return [_with_reads(row, _ended(samples[0]), renderer)]
    if len(samples) > 1 and isinstance(row.answers[0], Document):
        samples = _after_common(row.place, samples, renderer)
    return [
        replace(_ended(sample), values={name: given[index] for name, given in row.values.items()})
        for index, sample in enumerate(samples)
    ]


def _only(found: Sequence[Sample]) -> Sample:
    if len(found) == 1:
        return found[0]
    place = found[0].id.rpartition("#")[0]
    raise RenderError(
        f"{place}: the chat template writes earlier turns in another way than they were generated, so the turns of "
        f"this answer make {len(found)} samples; expected one; set data.targets=last, or give answers of one turn"
    )


def _ended(sample: Sample) -> Sample:
    """Without what is after the last target."""
    if not sample.num_targets:
        return sample
    stop = int(sample.target_at_N[-1]) + 1
    return replace(sample, ids_T=sample.ids_T[:stop], media=within(sample.media, 0, stop))


def _after_common(place: str, samples: Sequence[Sample], renderer: Renderer) -> list[Sample]:
    """Whole texts, of which what comes after their common beginning is learned."""
    lists = [sample.ids_T.tolist() for sample in samples]
    start = min(common_length(lists[0], ids) for ids in lists[1:])
    common = renderer.tokenizer.decode(lists[0][:start], skip_special_tokens=True)
    if not str(common).strip():
        raise RenderError(
            f"{place}: the answers are texts that have no beginning in common, and there is no prompt; expected a "
            "prompt that each begins with, or one in a column of its own; name it with "
            "data.columns='{prompt = \"...\"}'"
        )
    found = []
    for sample, ids in zip(samples, lists, strict=True):
        # of equal texts the last token stays: what to do with them is not decided here
        first = max(min(start, len(ids) - 1), 1)
        renderer.require_none_inside(ids[first:-1], ids[-1], sample.id)
        at = np.arange(first, len(ids))
        found.append(replace(sample, target_at_N=at, weight_N=np.ones(at.size)))
    return found


def _with_reads(row: Stepwise, sample: Sample, renderer: Renderer) -> Sample:
    """The sample with the last token of each step, and its label."""
    text, start = renderer.answer_text(row.answer)
    if start is None:
        raise RenderError(
            f"{row.place}: the chat template does not write the steps as they are; expected their text unchanged; give "
            "another one with data.template=FILE"
        )
    spans = renderer.template.spans(text)
    holders = np.array([(first, stop) for first, stop in spans if first < stop])
    assert len(holders), f"{row.place}: the tokenizer says where its tokens lie"
    numbers = np.array([number for number, (first, stop) in enumerate(spans) if first < stop])
    at: list[int] = []
    begins = [begin for begin, _ in row.steps[1:]]
    for number, (_, end) in enumerate(row.steps):
        is_last = (holders[:, 0] < start + end) & (start + end <= holders[:, 1])
        if not is_last.any():
            raise RenderError(
                f"{row.place}: no token holds the end of completions[{number}]; expected text that the tokenizer takes "
                "whole; correct the step"
            )
        found = int(np.flatnonzero(is_last)[-1])
        token = int(numbers[found])
        if number < len(begins) and holders[found, 1] > start + begins[number]:
            raise RenderError(
                f"{row.place}: one token, {renderer.template.quoted(sample.ids_T[token : token + 1].tolist())}, holds "
                f"the end of completions[{number}] and the beginning of the next; expected a token that ends between "
                "them; set data.step_separator"
            )
        at.append(token)
    labels = np.array(row.labels, dtype=np.float64)
    return replace(sample, read_at_R=np.array(at, dtype=np.int64), read_values={"label": labels})


def _fit_compared(
    row: Answers,
    samples: Sequence[Sample],
    kept: list[Sample],
    incidents: list[Incident],
    limits: Limits,
) -> tuple[list[Sample], list[Incident]]:
    """The answers that are left, or none of them."""
    fault = _fault(row, kept)
    if fault is None:
        return kept, incidents
    if incidents:
        first = incidents[0]
        number = f"answer {first.place.rpartition('#')[2]}"
        reason = f"{fault}: {number} was {first.kind} ({first.reason})"
    elif limits.without_targets == "error":
        raise DataError(
            f"{row.place}: {fault}; expected two answers of which one is better; correct the row or remove it, or set "
            "data.without_targets=drop"
        )
    else:
        reason = fault
    lost = sum(sample.num_targets for sample in samples)
    return [], [Incident(row.place, "dropped", reason, lost)]


def _fault(row: Answers, kept: Sequence[Sample]) -> str | None:
    """Why nothing can be learned of these answers together."""
    judgement = next(iter(row.values))
    if row.is_compared and len(kept) < 2:
        return "one answer is left" if kept else "no answer is left"
    if row.is_compared and len({sample.values[judgement] for sample in kept}) < 2:
        return "no answer is better than another"
    for left, right in combinations(kept, 2):
        is_other = left.values[judgement] != right.values[judgement]
        if is_other and is_same_input(left, right):
            names = " and ".join(it.id.rpartition("#")[2] for it in (left, right))
            return f"answers {names} are the same, token for token"
    return None
