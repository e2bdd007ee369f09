"""Rows to samples: token ids and exact targets through the tokenizer's chat template, fitted to a length.

For each assistant turn i to be learned,

    P_i = the rendering of messages[:i] with the generation prompt: what the model will see
    R_i = the rendering of messages[:i + 1]

are tokenised whole, and P_i's ids must be a prefix of R_i's: the first len(P_i) tokens are context, and the rest is
what the model has to write, up to and including the LAST token that ends the turn. What the template writes after that
token (ChatML's newline) is no target, and neither is the role header. If the whole conversation begins with every R_i
up to its end token, the row is one sample; otherwise (templates that strip thinking from history) one per turn.

A row that cannot be rendered exactly is a RenderError. Two tokenisations are never concatenated and no end token is
ever made up. A template that writes no end token is refused; so is one that leaves out tools, tool calls or reasoning,
and an answer with a token of the stop set before its end. In a row with images, every prefix counts the images of the
whole row; no token of an image is a target. A target's weight is its message's, times that of the pattern that finds it
(``token_weights.py``); one of weight 0 is no target.

Where answers are judged, every answer is rendered as the row of SFT that it is, and ends at its last target, so that
its last token, where a reward is read, is the one that a server stops at. In compared whole texts (documents), the
prompt is the common beginning of their ids. Steps are read at the token that holds the last character of each step
which is not white space; one token that holds the end of a step and the beginning of the next is a RenderError.

Samples longer than ``max_length`` are handled by the policy ``too_long``:

    error      the first such sample ends the run (the default)
    drop       it is left out
    truncate   its first max_length tokens stay, fewer where that would cut an image: then what is before the image; no
               end token is made up, so nothing false is learned; a sample left without targets is left out
    split      documents only: windows of max_length tokens, each beginning with the last token of the one before, so
               that every token except the document's first is a target exactly once; the end token is where the
               document really ends. Splitting a conversation is an error

Samples under min_length are left out. Everything that is left out or cut is returned as an Incident, to be listed. A
row whose answers are compared needs two that differ, in preference and in ids. Where the length policy removes an
answer, or cuts two to the same ids, the whole row is left out and listed; a list of more answers goes on with those
left.

Does not read files (``sources.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from taut.data.chat_template import Ids, Template, Text, Wanted, common_length
from taut.data.images import Placed, is_same_input, uncut, within
from taut.data.json_io import shown
from taut.data.messages import Completion, Conversation, Document, Message, Row, Tool, text_of
from taut.data.schema import Answers, AnyRow, Stepwise
from taut.data.token_weights import TokenWeight, TokenWeights
from taut.errors import DataError, PictureError, RenderError
from taut.types import FloatArray, IntArray, Media, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from taut.vision.image_store import ImageStore

Targets: TypeAlias = Literal["assistant", "last", "all"]
TooLong: TypeAlias = Literal["error", "drop", "split", "truncate"]
IdsOf: TypeAlias = Mapping[Text, Ids]
_Draft: TypeAlias = tuple[Sequence[Text], Callable[[IdsOf], list[Sample]]]
"""The texts of a row, not tokenised yet, and what makes samples of their ids."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The length policy, and what happens to rows without targets."""

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
    """Targets that are not learned."""


# -- one row


@dataclass(frozen=True, slots=True)
class _Turn:
    """An assistant turn to be learned."""

    index: int
    prompt: Text
    """P_i: the text before the turn."""
    row: Text
    """R_i: the text with the turn."""


class Renderer:
    """Renders rows with one tokenizer, one template and one choice of targets."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None = None,
        targets: Targets = "assistant",
        key: str = "data.template",
        image_store: ImageStore | None = None,
        variables: Mapping[str, Any] | None = None,
        token_weights: Sequence[TokenWeight] = (),
    ) -> None:
        """``key``: the setting that names another template, for messages. ``image_store``: None if the model takes no
        images. ``variables``: values of the template's own variables, which become its defaults.
        """
        self.template = Template(tokenizer, template, key, image_store, variables)
        self.image_store = image_store
        self.tokenizer = tokenizer
        self.targets: Targets = targets
        self.token_weights = TokenWeights(token_weights)
        self.stop_set: frozenset[int] = frozenset()

    def stopping_at(self, stop_set: Collection[int]) -> Renderer:
        """A renderer that refuses a row whose turn does not end with a token of this set (the model would not stop
        there), or has one of them before its end (the model would be cut there).
        """
        renderer = copy.copy(self)
        renderer.stop_set = frozenset(stop_set)
        return renderer

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The token that ends a plain assistant turn; empty without template and eos."""
        return self.template.stop_ids

    def identity(self) -> str:
        """A digest that changes whenever the ids or targets of some row could."""
        images = f" {self.image_store.identity()}" if self.image_store else ""
        weights = self.token_weights.identity()
        return f"{self.template.identity()} {self.targets} {sorted(self.stop_set)}{images}{weights}"

    def prompt_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> IntArray:
        """The ids of ``prompt_media``."""
        return self.prompt_media(messages, tools, variables)[0]

    def prompt_media(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[IntArray, tuple[Media, ...]]:
        """The ids and images of history and generation prompt: what an engine feeds the model for its next turn.
        ``variables``: the row's values of the template's own variables.
        """
        text = self.template.apply(
            messages, tuple(tools or ()), "prompt", is_prompt=True, variables=variables
        )
        ids = self.template.encode([text])[text]
        media = self.template.pictures.find(ids, text.pictures, "prompt")
        return np.asarray(ids, dtype=np.int64), media

    def answer_text(self, row: Row) -> tuple[Text, int | None]:
        """The whole text of a row as it is tokenised, and the start of its last message, or its completion, in it;
        None: the template does not write the content unchanged.
        """
        if isinstance(row, Conversation):
            before, content = row.messages[:-1], text_of(row.messages[-1]["content"])
            text = self.template.apply_to(row, row.messages)
            prompt = self.template.apply_to(row, before, is_prompt=True, placed=text.pictures)
            start = len(prompt.text) if text.text.startswith(prompt.text) else 0
            at = text.text.find(content.strip(), start)
            num_leading_spaces = len(content) - len(content.lstrip())
            return text, None if at < 0 else at - num_leading_spaces
        whole = row.prompt + row.completion if isinstance(row, Completion) else row.text
        start = len(row.prompt) if isinstance(row, Completion) else 0
        return self.template.plain(whole, row.place), start

    def render(self, row: Row) -> list[Sample]:
        """The samples of one row: one, or one per learned turn."""
        return self.render_all([row])[0]

    def look(self, rows: Iterable[Row]) -> None:
        """Read the images of these rows, several at a time."""
        chats = (row for row in rows if isinstance(row, Conversation))
        self.template.pictures.look((row.place, row.messages) for row in chats)

    def render_all(self, rows: Sequence[Row]) -> list[list[Sample]]:
        """The samples of each row; the tokenizer is called at most twice for all of them."""
        self.look(rows)
        with self.template.writing_ahead(text for row in rows for text in self._texts_of(row)):
            drafts = [self._draft(row) for row in rows]
        ids_of = self.template.encode(text for texts, _ in drafts for text in texts)
        return [finish(ids_of) for _, finish in drafts]

    def _texts_of(self, row: Row) -> Iterator[Wanted]:
        """What the template is asked to write of a row."""
        if not isinstance(row, Conversation):
            return
        messages, tools, variables = row.messages, row.tools, row.template_variables
        yield messages, tools, variables, False
        for index in self._turns_to_render(row):
            yield messages[:index], tools, variables, True
            if index + 1 < len(messages):
                yield messages[: index + 1], tools, variables, False

    def _draft(self, row: Row) -> _Draft:
        if isinstance(row, Conversation):
            return self._draft_conversation(row)
        if isinstance(row, Completion):
            prompt = self.template.plain(row.prompt, row.place)
            whole = self.template.plain(row.prompt + row.completion, row.place)

            def finish_completion(ids_of: IdsOf) -> list[Sample]:
                before, ids = ids_of[prompt], ids_of[whole]
                is_ended = before[-1:] == [self.tokenizer.eos_token_id]
                if is_ended and ids[: len(before)] != before:
                    before = before[:-1]  # a tokenizer that itself ends each text with eos
                start = self.template.context_length(before, ids, row.place)
                ids = self._with_eos(ids, row.place)
                self.require_none_inside(ids[start:-1], ids[-1], row.place)
                first = 1 if self.targets == "all" else max(start, 1)
                weight_T = self._weights(whole, ids, len(row.prompt), start, len(ids) - 1)
                return [self._sample(row.place, ids, range(first, len(ids)), weight_T=weight_T)]

            return (prompt, whole), finish_completion
        if self.token_weights.rules:
            raise RenderError(
                f"{row.place}: the row is a text without an answer, and data.token_weights is for answers; expected "
                "conversations, or prompts with completions; take the key out"
            )
        document = self.template.plain(row.text, row.place)

        def finish_document(ids_of: IdsOf) -> list[Sample]:
            ids = self._with_eos(ids_of[document], row.place)
            return [self._sample(row.place, ids, range(1, len(ids)))]

        return (document,), finish_document

    def _draft_conversation(self, row: Conversation) -> _Draft:
        placed = self.template.pictures.place(row.messages, row.tools, row.place)
        full = self.template.apply_to(row, row.messages, placed=placed)
        turns = [self._draft_turn(row, index, full) for index in self._turns_to_render(row)]
        texts = [full, *(text for turn in turns for text in (turn.prompt, turn.row))]
        # what the template leaves out of the text would make the samples differ from the row
        wanted = [("tools", tool["function"]["name"], full) for tool in row.tools]
        for index, message in enumerate(row.messages):
            for call in message.get("tool_calls", ()):
                wanted.append((f"messages[{index}].tool_calls", call["function"]["name"], full))
        for turn in turns:
            message = row.messages[turn.index]
            for key in ("reasoning_content", "reasoning", "thinking"):
                thought = message.get(key, "").strip()
                wanted.append((f"messages[{turn.index}].{key}", thought, turn.row))
        for where, words, text in wanted:
            if words not in text.text:
                raise RenderError(
                    f"{row.place}: {where} has {shown(words)}, which the chat template does not write; expected a "
                    "template that does; remove it from the row or give another one with data.template=FILE"
                )
        finish = self._finish_all if self.targets == "all" else self._finish_turns
        return texts, lambda ids_of: finish(row, full, turns, ids_of)

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
                f"{row.place}: messages[0] is an assistant message; expected a user message to answer; add one, or "
                "write train: false on it"
            )
        place = f"{row.place}: messages[{index}]"
        before, placed = row.messages[:index], full.pictures
        prompt = self.template.apply_to(row, before, place, is_prompt=True, placed=placed)
        if index + 1 == len(row.messages):
            return _Turn(index, prompt, full)
        seen = row.messages[: index + 1]
        return _Turn(index, prompt, self.template.apply_to(row, seen, place, placed=placed))

    def _with_eos(self, ids: Ids, place: str) -> Ids:
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise RenderError(
                f"{place}: plain text has to end with the tokenizer's eos token, and it has none; expected one; set "
                "eos_token in the tokenizer's configuration"
            )
        return ids if ids[-1:] == [eos] else [*ids, int(eos)]

    def _finish_turns(
        self, row: Conversation, text: Text, turns: Sequence[_Turn], ids_of: IdsOf
    ) -> list[Sample]:
        """One sample where the whole conversation begins with every R_i; else one per turn."""
        spans = [self._span(row, turn, ids_of) for turn in turns]
        full, rows = ids_of[text], [ids_of[turn.row] for turn in turns]
        weights = [
            self._turn_weights(row, turn, ids, span)
            for turn, ids, span in zip(turns, rows, spans, strict=True)
        ]
        if all(
            ids is full or full[:stop] == ids[:stop]
            for ids, (_, stop) in zip(rows, spans, strict=True)
        ):
            at = [position for span in spans for position in range(*span)]
            whole_T = None
            for (start, stop), weight_T in zip(spans, weights, strict=True):
                if weight_T is not None:
                    whole_T = np.ones(len(full)) if whole_T is None else whole_T
                    whole_T[start:stop] = weight_T[start:stop]
            return [self._sample(row.place, full, at, text.pictures, whole_T)]
        return [
            self._sample(
                f"{row.place}#{number}" if len(turns) > 1 else row.place,
                ids,
                range(*span),
                turn.row.pictures,
                weight_T,
            )
            for number, (turn, ids, span, weight_T) in enumerate(
                zip(turns, rows, spans, weights, strict=True), 1
            )
        ]

    def _turn_weights(
        self, row: Conversation, turn: _Turn, ids: Ids, span: tuple[int, int]
    ) -> FloatArray | None:
        """The weights of the tokens of R_i, which mean nothing outside the turn; None: they are 1."""
        if not (self.token_weights.rules or row.weights):
            return None
        if self.token_weights.rules and not turn.row.text.startswith(turn.prompt.text):
            raise RenderError(
                f"{row.place}: messages[{turn.index}]: the chat template writes the prompt in another way once it is "
                "answered, so data.token_weights does not know where the answer's text begins; expected it unchanged; "
                f"give another template with {self.template.key}=FILE"
            )
        start, stop = span
        weight_T = self._weights(turn.row, ids, len(turn.prompt.text), start, stop - 1)
        return weight_T * row.weights.get(turn.index, 1.0)

    def _weights(self, text: Text, ids: Ids, begin: int, start: int, end: int) -> FloatArray:
        """The weight of each token by the patterns. The answer's text begins at the character ``begin``; its tokens are
        ``ids[start:end]``.
        """
        weight_T = np.ones(len(ids))
        if not self.token_weights.rules:
            return weight_T
        spans = self.template.spans(text)
        stop = spans[end][0] if end < len(spans) else len(text.text)
        own = [(max(first - begin, 0), last - begin) for first, last in spans[start:end]]
        weight_T[start:end] = self.token_weights.of(text.text[begin:stop], own)
        return weight_T

    def _finish_all(
        self, row: Conversation, text: Text, turns: Sequence[_Turn], ids_of: IdsOf
    ) -> list[Sample]:
        """One sample: every token is a target except the first, and the turns marked train: false."""
        if row.weights:
            raise RenderError(
                f"{row.place}: messages[{min(row.weights)}] has a weight, and data.targets=all learns every token "
                "alike; expected data.targets=assistant or last; set it, or remove the weight"
            )
        full = ids_of[text]
        is_target = np.ones(len(full), dtype=bool)
        is_target[:1] = False
        for turn in turns:
            start, stop = self._span(row, turn, ids_of)
            if turn.index not in row.excluded:
                continue
            if full[:stop] != ids_of[turn.row][:stop]:
                raise RenderError(
                    f"{row.place}: messages[{turn.index}] has train: false and is written differently once history; "
                    "expected targets=assistant or last for such templates; set data.targets"
                )
            is_target[start:stop] = False
        return [self._sample(row.place, full, np.flatnonzero(is_target), text.pictures)]

    def _span(self, row: Conversation, turn: _Turn, ids_of: IdsOf) -> tuple[int, int]:
        """The span [start, stop) of a turn's targets in R_i."""
        place = f"{row.place}: messages[{turn.index}]"
        ids = ids_of[turn.row]
        start = self.template.context_length(ids_of[turn.prompt], ids, place)
        end = self.template.end_of_turn(ids, start, place)
        if self.stop_set and ids[end] not in self.stop_set:
            stops = " or ".join(self.template.quoted([index]) for index in sorted(self.stop_set))
            raise RenderError(
                f"{place}: the template ends this turn with {self.template.quoted(ids[end : end + 1])}, at which no "
                f"server would stop; expected {stops}; add its id to eos_token_id in the model's generation_config.json"
            )
        self.require_none_inside(ids[start:end], ids[end], place)
        return start, end + 1

    def require_none_inside(self, inside: Ids, end: int, place: str) -> None:
        """Refuse targets with a token that ends an answer before their end."""
        ends = {end, *self.stop_set}
        if not ends.isdisjoint(inside):
            stop = next(token for token in inside if token in ends)
            raise RenderError(
                f"{place}: {self.template.quoted([stop])} ends an answer and is inside this one too; expected "
                "it once, or the model would learn to stop there; remove it from the content"
            )

    def _sample(
        self,
        name: str,
        ids: Ids,
        target_at: Iterable[int],
        placed: Sequence[Placed] = (),
        weight_T: FloatArray | None = None,
    ) -> Sample:
        """``weight_T``: the weight of each token; None: 1."""
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise RenderError(
                f"{name}: the row begins with two BOS tokens; expected one; remove it from the content or the template"
            )
        if not ids:
            raise RenderError(
                f"{name}: the row renders to no token at all; expected text; correct the row"
            )
        ids_T, pictures = np.asarray(ids, dtype=np.int64), self.template.pictures
        media = pictures.find(ids_T, placed, name)
        at = pictures.learnable(ids_T, np.fromiter(target_at, dtype=np.int64), media)
        if weight_T is None:
            return Sample(name, ids_T, at, np.ones(at.size), media)
        at = at[weight_T[at] > 0]
        return Sample(name, ids_T, at, weight_T[at], media)


# -- rows of any kind


def answers_of(row: AnyRow) -> tuple[Row, ...]:
    """The answers of a row, each as a row of SFT."""
    if isinstance(row, Answers):
        return row.answers
    return (row.answer if isinstance(row, Stepwise) else row,)


def render_any(rows: Sequence[AnyRow], renderer: Renderer) -> list[list[Sample]]:
    """The samples of each row, answers in their order."""
    answers = [answers_of(row) for row in rows]
    rendered = iter(renderer.render_all([answer for group in answers for answer in group]))
    return [
        _finish_judged(row, [next(rendered) for _ in group], renderer)
        if isinstance(row, Answers | Stepwise)
        else next(rendered)
        for row, group in zip(rows, answers, strict=True)
    ]


def render_each(
    rows: Sequence[AnyRow], renderer: Renderer, tolerated: tuple[type[DataError], ...]
) -> list[list[Sample] | DataError]:
    """The samples of each row, or its error where that is of a tolerated type."""
    if not tolerated:
        return list(render_any(rows, renderer))
    faults = faults_of_pictures(rows, renderer)
    good = [row for row, fault in zip(rows, faults, strict=True) if fault is None]
    rendered = iter(_render_halves(good, renderer, tolerated))
    return [next(rendered) if fault is None else fault for fault in faults]


def _render_halves(
    rows: Sequence[AnyRow], renderer: Renderer, tolerated: tuple[type[DataError], ...]
) -> list[list[Sample] | DataError]:
    """All rows at once; where one has an error, each half for itself."""
    try:
        return list(render_any(rows, renderer))
    except tolerated as error:
        if len(rows) == 1:
            return [error]
    half = len(rows) // 2
    return [
        *_render_halves(rows[:half], renderer, tolerated),
        *_render_halves(rows[half:], renderer, tolerated),
    ]


def faults_of_pictures(rows: Sequence[AnyRow], renderer: Renderer) -> list[PictureError | None]:
    """For each row the error of its first image that cannot be used."""
    renderer.look(answer for row in rows for answer in answers_of(row))
    faults: list[PictureError | None] = []
    for row in rows:
        fault = None
        try:
            for answer in answers_of(row):
                if isinstance(answer, Conversation):
                    renderer.template.pictures.place_each(answer.messages, answer.place)
        except PictureError as error:
            fault = error
        faults.append(fault)
    return faults


def _finish_judged(
    row: Answers | Stepwise, rendered: Sequence[Sequence[Sample]], renderer: Renderer
) -> list[Sample]:
    """One sample per answer, with its values or labels."""
    for samples in rendered:
        if len(samples) > 1:
            raise RenderError(
                f"{samples[0].id.rpartition('#')[0]}: the chat template writes earlier turns in another way than they "
                f"were generated, so the turns of this answer make {len(samples)} samples; expected one; set "
                "data.targets=last, or give answers of one turn"
            )
    answers = [sample for (sample,) in rendered]
    if isinstance(row, Answers) and len(answers) > 1 and isinstance(row.answers[0], Document):
        # whole texts: their common beginning is the prompt, and the rest is learned
        lists = [sample.ids_T.tolist() for sample in answers]
        start = min(common_length(lists[0], ids) for ids in lists[1:])
        common = renderer.tokenizer.decode(lists[0][:start], skip_special_tokens=True)
        if not str(common).strip():
            raise RenderError(
                f"{row.place}: the answers are texts that have no beginning in common, and there is no prompt; "
                "expected a prompt that each begins with, or one in a column of its own; name it with "
                "data.columns='{prompt = \"...\"}'"
            )
        for index, (sample, ids) in enumerate(zip(answers, lists, strict=True)):
            # of equal texts the last token stays a target: ``fit_any`` refuses them
            first = max(min(start, len(ids) - 1), 1)
            renderer.require_none_inside(ids[first:-1], ids[-1], sample.id)
            at = np.arange(first, len(ids))
            answers[index] = replace(sample, target_at_N=at, weight_N=np.ones(at.size))
    for index, sample in enumerate(answers):
        if sample.num_targets:  # nothing after the last target
            stop = int(sample.target_at_N[-1]) + 1
            ids_T, media = sample.ids_T[:stop], within(sample.media, 0, stop)
            answers[index] = replace(sample, ids_T=ids_T, media=media)
    if isinstance(row, Stepwise):
        return [_with_reads(row, answers[0], renderer)]
    return [
        replace(sample, values={name: values[index] for name, values in row.values.items()})
        for index, sample in enumerate(answers)
    ]


def _with_reads(row: Stepwise, sample: Sample, renderer: Renderer) -> Sample:
    """The sample with the last token of each step, and its label."""
    text, start = renderer.answer_text(row.answer)
    if start is None:
        raise RenderError(
            f"{row.place}: the chat template does not write the steps as they are; expected their text unchanged; give "
            "another one with data.template=FILE"
        )
    spans = np.array(renderer.template.spans(text)).reshape(-1, 2)
    numbers = np.flatnonzero(spans[:, 0] < spans[:, 1])  # tokens that hold text
    assert numbers.size, f"{row.place}: the tokenizer says where its tokens lie"
    spans = spans[numbers]
    read_at: list[int] = []
    begins = [begin for begin, _ in row.steps[1:]]
    for number, (_, end) in enumerate(row.steps):
        is_last = (spans[:, 0] < start + end) & (start + end <= spans[:, 1])
        if not is_last.any():
            raise RenderError(
                f"{row.place}: no token holds the end of completions[{number}]; expected text that the tokenizer takes "
                "whole; correct the step"
            )
        last = int(np.flatnonzero(is_last)[-1])
        token = int(numbers[last])
        if number < len(begins) and spans[last, 1] > start + begins[number]:
            raise RenderError(
                f"{row.place}: one token, {renderer.template.quoted(sample.ids_T[token : token + 1].tolist())}, holds "
                f"the end of completions[{number}] and the beginning of the next; expected a token that ends between "
                "them; set data.step_separator"
            )
        read_at.append(token)
    labels = np.array(row.labels, dtype=np.float64)
    return replace(
        sample, read_at_R=np.array(read_at, dtype=np.int64), read_values={"label": labels}
    )


# -- length


def fit_any(
    row: AnyRow, samples: Sequence[Sample], limits: Limits
) -> tuple[list[Sample], list[Incident]]:
    """The samples of a row as the length policy leaves them, and what was left out or cut."""
    fitted = [fit(sample, limits, is_document=isinstance(row, Document)) for sample in samples]
    kept = [sample for remaining, _ in fitted for sample in remaining]
    incidents = [incident for _, incident in fitted if incident is not None]
    if isinstance(row, Stepwise) and kept and not kept[0].read_values["label"].size:
        reason = f"{incidents[0].reason}, no step left"
        return [], [Incident(row.place, "dropped", reason, samples[0].num_targets)]
    if not isinstance(row, Answers) or len(samples) == 1:
        return kept, incidents
    # why nothing can be learned from comparing the answers that are left
    judgement, fault = next(iter(row.values)), ""
    if row.is_compared and len(kept) < 2:
        fault = "one answer is left" if kept else "no answer is left"
    elif row.is_compared and len({sample.values[judgement] for sample in kept}) < 2:
        fault = "no answer is better than another"
    else:
        for left, right in combinations(kept, 2):
            differ = left.values[judgement] != right.values[judgement]
            if differ and is_same_input(left, right):
                names = " and ".join(sample.id.rpartition("#")[2] for sample in (left, right))
                fault = f"answers {names} are the same, token for token"
                break
    if not fault:
        return kept, incidents
    if incidents:
        first = incidents[0]
        number = first.place.rpartition("#")[2]
        fault = f"{fault}: answer {number} was {first.kind} ({first.reason})"
    elif limits.without_targets == "error":
        raise DataError(
            f"{row.place}: {fault}; expected two answers of which one is better; correct the row or remove it, or set "
            "data.without_targets=drop"
        )
    lost = sum(sample.num_targets for sample in samples)
    return [], [Incident(row.place, "dropped", fault, lost)]


def fit(
    sample: Sample, limits: Limits, *, is_document: bool
) -> tuple[list[Sample], Incident | None]:
    """The sample as the policy leaves it: itself, parts of it, or nothing."""
    length = sample.num_tokens
    if not sample.num_targets:
        if limits.without_targets == "error":
            raise DataError(
                f"{sample.id}: the row has no targets; expected at least one assistant turn to learn; remove the row, "
                "or set data.without_targets=drop"
            )
        return [], Incident(sample.id, "dropped", "no targets")
    if length < limits.min_length:
        reason = f"{length} tokens, min_length {limits.min_length}"
        return [], Incident(sample.id, "dropped", reason, sample.num_targets)
    if length <= limits.max_length:
        return [sample], None
    reason = f"{length} tokens, max_length {limits.max_length}"
    if limits.too_long == "error":
        raise DataError(
            f"{sample.id}: {reason}; expected no more; raise data.max_length, "
            "or set data.too_long to drop, truncate or (for plain text) split"
        )
    if limits.too_long == "drop":
        return [], Incident(sample.id, "dropped", reason, sample.num_targets)
    if limits.too_long == "truncate":
        stop = uncut(sample.media, limits.max_length)
        if stop < limits.max_length:
            reason = f"{reason}, in a picture that begins at {stop}"
        num_left = int((sample.target_at_N < stop).sum())
        if not num_left:
            reason = f"{reason}, no target left"
            return [], Incident(sample.id, "dropped", reason, sample.num_targets)
        short = _slice(sample, sample.id, 0, stop)
        return [short], Incident(sample.id, "cut", reason, sample.num_targets - num_left)
    if not is_document:
        raise DataError(
            f"{sample.id}: {reason}; data.too_long=split is for plain text, and this is a conversation or completion; "
            "set data.too_long to drop or truncate, or raise data.max_length"
        )
    starts = range(0, length - 1, limits.max_length - 1)
    windows = [
        _slice(sample, f"{sample.id}#{number}", start, start + limits.max_length)
        for number, start in enumerate(starts, start=1)
    ]
    return windows, Incident(sample.id, "cut", f"{reason}, split into {len(windows)}")


def _slice(sample: Sample, name: str, start: int, stop: int) -> Sample:
    """The tokens [start, stop) of a sample, with the targets, images and reads inside."""
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
