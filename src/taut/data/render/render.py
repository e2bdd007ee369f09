"""Rows to samples: token ids and exact targets through the tokenizer's chat template, fitted to a length.

For each assistant turn i to be learned,

    P_i = the rendering of messages[:i] with the generation prompt: what the model will see
    R_i = the rendering of messages[:i + 1]

are tokenized whole, and P_i's ids must be a prefix of R_i's: the first len(P_i) tokens are context, and the rest is
what the model has to write, up to and including the token that ends the turn (``turn_ends.py``). What the template
writes after that token (ChatML's newline) is no target, and neither is the role header. If the whole conversation
begins with every R_i up to its end token, the row is one sample; otherwise (templates that rewrite history) one per
turn. Where P_i is no prefix, R_i becomes P_i and the answer after it (``_after_prompt``), or the row is refused.

A row that cannot be rendered exactly is a RenderError. No end token is ever made up, and two tokenizations are
concatenated at the border of prompt and answer alone, where a model has to write the second after the first. A template
that writes no end is refused; so is one that leaves out what the row says (``written.py``), and an answer with a token
of the stop set before its end. In a row with images, every prefix counts the images of the
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
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from taut.data.render.chat_template import PROBE, Ids, Template, Text, Wanted, common_length
from taut.data.render.images import Placed, is_same_input, uncut, within
from taut.data.render.token_weights import TokenWeights
from taut.data.render.written import Written, thought_of, unwritten
from taut.data.rows.messages import Completion, Conversation, Document, Message, Row, Tool, text_of
from taut.data.rows.schema import Answers, AnyRow, Stepwise
from taut.data.settings import ReadAs, Targets, TokenWeight, TooLong
from taut.errors import DataError, PictureError, RenderError
from taut.types import FloatArray, IntArray, Media, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from taut.vision.image_store import ImageStore

OPENED = re.compile(r"(<[a-z:_]*think[a-z:_]*>|\[THINK\])(\s*)\Z")
"""A thought that is open at the end of a prompt."""
CLOSED = re.compile(r"(</[a-z:_]*think[a-z:_]*>|\[/THINK\])\s*\Z")
"""A thought that is closed at the end of a prompt."""
THINKING = re.compile(r"\A(?:\s|</?[a-z:_]*think[a-z:_]*>|\[/?THINK\])*")
"""An empty thought, or a part of one, at the beginning of an answer."""
IdsOf: TypeAlias = Mapping[Text, Ids]
_Draft: TypeAlias = tuple[Sequence[Text], Callable[[IdsOf], list[Sample]]]
"""The texts of a row before they are tokenized, and a function that makes samples of their ids."""


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
    """R_i: the text with the turn, up to its end at least."""
    lost: tuple[str, str] | None = None
    """Place and words of its thought, where the template does not write that."""


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
        control_tokens: ReadAs = "as_control",
    ) -> None:
        """``key``: the setting that names another template, for messages. ``image_store``: None if the model takes no
        images. ``variables``: values of the template's own variables, which become its defaults. ``control_tokens``:
        how those in what a row says are read.
        """
        self.template = Template(tokenizer, template, key, image_store, variables, control_tokens)
        self.image_store = image_store
        self.tokenizer = tokenizer
        self.targets: Targets = targets
        self.token_weights = TokenWeights(token_weights)
        self.written = Written(self.template)
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
        return f"turns-2 {self.template.identity()} {self.targets} {sorted(self.stop_set)}{images}{weights}"

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
        functions, variables = tuple(tools or ()), variables or {}
        self.written.require_prompt(messages, functions, variables, "prompt")
        text = self.template.apply(
            messages, functions, "prompt", is_prompt=True, variables=variables
        )
        ids = self.template.encode([text])[text]
        media = self.template.pictures.find(ids, text.pictures, "prompt")
        return np.asarray(ids, dtype=np.int64), media

    def answer_text(self, row: Row) -> tuple[Text, int | None]:
        """The whole text of a row as it is tokenized, and the start of its last message, or its completion, in it; None
        where the template does not write the content unchanged.
        """
        if isinstance(row, Conversation):
            before, content = row.messages[:-1], text_of(row.messages[-1]["content"])
            text = self.template.apply_to(row, row.messages)
            prompt = self.template.apply_to(row, before, is_prompt=True, placed=text.pictures)
            start = len(prompt.words) if text.text.startswith(prompt.text) else 0
            at = text.words.find(content.strip(), start)
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
        # The texts of conversations that the template has to write.
        wanted: list[Wanted] = []
        for row in rows:
            if isinstance(row, Conversation):
                messages, tools, variables = row.messages, row.tools, row.template_variables
                wanted.append((messages, tools, variables, False))
                for index in self._turns_to_render(row):
                    wanted.append((messages[:index], tools, variables, True))
                    if index + 1 < len(messages):
                        wanted.append((messages[: index + 1], tools, variables, False))
        with self.template.writing_ahead(wanted):
            drafts = [self._draft(row) for row in rows]
        ids_of = self.template.encode(text for texts, _ in drafts for text in texts)
        return [finish(ids_of) for _, finish in drafts]

    def _draft(self, row: Row) -> _Draft:
        # A conversation: its text as a whole, and P_i and R_i of each turn.
        if isinstance(row, Conversation):
            placed = self.template.pictures.place(row.messages, row.tools, row.place)
            indices = self._turns_to_render(row)
            conversation = self.template.apply_to(row, row.messages, placed=placed)
            self.written.require(row, indices, conversation.words)
            full = self._closed(row, len(row.messages) - 1, conversation)
            turns = []
            for index in indices:
                before, text = self._texts_of_turn(row, index, full)
                lost = self.written.lost_thought(row, index, indices, text.words)
                turns.append(_Turn(index, before, text, lost))
            texts = [full, *(text for turn in turns for text in (turn.prompt, turn.row))]
            finish = self._finish_all if self.targets == "all" else self._finish_turns
            return texts, lambda ids_of: finish(row, full, turns, ids_of)
        # A prompt and the text that continues it.
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
        # A document.
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

    def _closed(self, row: Conversation, index: int, text: Text) -> Text:
        """The text of a row's messages up to ``index``, with the token that ends it where the next header's does."""
        turn, after = row.messages[index], row.messages[index + 1 :]
        if turn["role"] != "assistant":
            return text
        return self.template.closed(text, turn, after[0]["role"] if after else None)

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

    def _texts_of_turn(self, row: Conversation, index: int, full: Text) -> tuple[Text, Text]:
        """P_i and R_i of the turn ``index``."""
        if index == 0:
            raise RenderError(
                f"{row.place}: the row is one assistant message; expected a user message to answer; add one"
            )
        place = f"{row.place}: messages[{index}]"
        before, placed = row.messages[:index], full.pictures
        prompt = self.template.apply_to(row, before, place, is_prompt=True, placed=placed)
        if index + 1 == len(row.messages):
            return prompt, full
        seen = self.template.apply_to(row, row.messages[: index + 1], place, placed=placed)
        return prompt, self._closed(row, index, seen)

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
        turns, spans, ids_of = self._with_spans(row, turns, ids_of)
        full, rows = ids_of[text], [ids_of[turn.row] for turn in turns]
        weights = [
            self._turn_weights(row, turn, ids, span)
            for turn, ids, span in zip(turns, rows, spans, strict=True)
        ]
        # One sample, if the whole conversation begins with each turn's text.
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
        """The weights of the tokens of R_i, which are valid inside the turn; None where all are 1."""
        if not (self.token_weights.rules or row.weights):
            return None
        if self.token_weights.rules and not turn.row.text.startswith(turn.prompt.text):
            raise RenderError(
                f"{row.place}: messages[{turn.index}]: the chat template rewrites the prompt once it is answered; "
                f"expected it unchanged for data.token_weights; give another template with {self.template.key}=FILE"
            )
        start, stop = span
        weight_T = self._weights(turn.row, ids, len(turn.prompt.words), start, stop - 1)
        return weight_T * row.weights.get(turn.index, 1.0)

    def _weights(self, text: Text, ids: Ids, begin: int, start: int, end: int) -> FloatArray:
        """The weight of each token by the patterns. The answer's text begins at the character ``begin``; its tokens are
        ``ids[start:end]``.
        """
        weight_T = np.ones(len(ids))
        if not self.token_weights.rules:
            return weight_T
        spans = self.template.spans(text)
        stop = spans[end][0] if end < len(spans) else len(text.words)
        own = [(max(first - begin, 0), last - begin) for first, last in spans[start:end]]
        weight_T[start:end] = self.token_weights.of(text.words[begin:stop], own)
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
        # Every token is a target but the first, and those of excluded turns.
        full = ids_of[text]
        is_target = np.ones(len(full), dtype=bool)
        is_target[:1] = False
        for turn in turns:
            if turn.lost is not None:
                raise unwritten(row.place, *turn.lost)
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

    def _with_spans(
        self, row: Conversation, turns: Sequence[_Turn], ids_of: IdsOf
    ) -> tuple[list[_Turn], list[tuple[int, int]], IdsOf]:
        """The turns with the spans of their targets, and the ids of their texts. Where P_i is no prefix of R_i, the
        turn is replaced by P_i and the answer after it (``_after_prompt``).
        """
        exact, more = list(turns), dict[Text, Ids]()
        for number, turn in enumerate(turns):
            prompt, ids = ids_of[turn.prompt], ids_of[turn.row]
            if turn.lost is None and ids[: len(prompt)] == prompt:
                continue
            own = self._after_prompt(row, turn)
            if own is None and turn.lost is not None:
                raise unwritten(row.place, *turn.lost)
            # Where a token reaches over the end of the prompt, the answer's part of it is encoded apart.
            own = own or turn
            encoded = self.template.encode([own.prompt, own.row])
            prompt, ids = encoded[own.prompt], encoded[own.row]
            if ids[: len(prompt)] != prompt:
                joined = self.template.meeting(own.prompt, own.row, encoded)
                if joined is None or self.token_weights.rules:
                    self.template.context_length(
                        prompt, ids, f"{row.place}: messages[{turn.index}]"
                    )
                else:
                    encoded[own.row] = joined
            exact[number] = own
            more |= encoded
        ids_of = {**ids_of, **more} if more else ids_of
        return exact, [self._span(row, turn, ids_of) for turn in exact], ids_of

    def _after_prompt(self, row: Conversation, turn: _Turn) -> _Turn | None:
        """The turn as P_i and the answer after it, for templates with which P_i is no prefix of R_i: they rewrite
        history, or write a thought in the prompt alone. None: what the template writes does not determine the answer.

        Where the template has a switch for thoughts, and it is not set, the turn gets the prompt that fits its thought.
        """
        thought, message = thought_of(row.messages[turn.index])
        thought = self.template.own(thought)
        # The values of the switch for thoughts to try.
        switch = self.template.thinking_switch
        if switch in self.template.set_variables or switch in row.template_variables:
            switch = None
        variants: list[Mapping[str, Any]] = [row.template_variables]
        is_opened = OPENED.search(turn.prompt.text) is not None
        if switch is not None and is_opened and not thought:
            if not any(thought_of(other)[0] for other in row.messages):
                raise RenderError(
                    f"{row.place}: messages[{turn.index}]: the prompt opens a thought "
                    f"({turn.prompt.text[-30:]!r}), and the row has none; expected one; set "
                    f"{self.template.key_of_variables} = {{ {switch} = false }}, or give rows with thoughts"
                )
            variants = [{**row.template_variables, switch: False}]
        elif switch is not None and thought:
            variants.append({**row.template_variables, switch: True})
        # The answer after the prompt that each makes.
        for variables in variants:
            prompt, text = turn.prompt, turn.row
            if variables is not row.template_variables:
                varied = replace(row, template_variables=variables)
                prompt, text = self._texts_of_turn(varied, turn.index, turn.row)
                if turn.index + 1 == len(row.messages):
                    whole = self.template.apply_to(varied, row.messages, placed=text.pictures)
                    text = self._closed(varied, turn.index, whole)
            answer = self._answer_after(prompt, text, message, thought, row, variables)
            if answer is not None:
                text = replace(prompt, text=prompt.text + answer, pictures=text.pictures)
                return _Turn(turn.index, prompt, text)
        begins = turn.row.text.startswith(turn.prompt.text)
        if thought and turn.lost is None and not begins and CLOSED.search(turn.prompt.text):
            raise RenderError(
                f"{row.place}: messages[{turn.index}]: the prompt closes a thought ({turn.prompt.text[-30:]!r}), and "
                f"the row has one; expected it open; set {self.template.key_of_variables}, or take the thought out"
            )
        return None

    def _answer_after(
        self,
        prompt: Text,
        text: Text,
        message: Message,
        thought: str,
        row: Conversation,
        variables: Mapping[str, Any],
    ) -> str | None:
        """The text that the model has to write after ``prompt``, with the thought that the prompt opens. It is taken
        from the turn after a plain question, as the template writes that; None if ``text``, the turn in its row, does
        not end in the same way.
        """
        # What a prompt and an answer have after a plain question: the question itself does not matter.
        asked, place = PROBE[:1], row.place
        before = self.template.apply(asked, row.tools, place, is_prompt=True, variables=variables)
        known = self.template.apply(PROBE, row.tools, place, variables=variables)
        after = self.template.apply((*asked, message), row.tools, place, variables=variables)
        after = self.template.closed(after, message)
        same = min(common_length(before.text, other.text) for other in (known, after))
        begun = max(before.text.rfind("<", 0, same), before.text.rfind("[", 0, same))
        if begun >= 0 and not {">", "]"} & {*before.text[begun:same]}:
            same = begun  # not inside a marker
        body, added = after.text[same:], before.text[same:]
        # what the prompt alone has may be a thought, never another header
        is_thought = THINKING.sub("", known.text[same:]).startswith(PROBE[1]["content"])
        opened = OPENED.search(prompt.text)
        if added and not (is_thought and (opened or "<" in added or "[" in added)):
            return None
        if not (text.text.endswith(body) and prompt.text.endswith(added)):
            return None
        # Without an open thought the answer is that; with one the thought is closed first.
        if opened is None:
            return None if thought and (added or thought not in body) else body
        opening, space = opened.groups()
        if body.startswith(added) and (thought in body if thought else not added):
            return body.removeprefix(added)
        closing = opening[0] + "/" + opening[1:]
        gap, rest = "\n\n" if space else "", body
        if closing in body:
            rest = body.partition(closing)[2].lstrip()
            gap = body.partition(closing)[2].removesuffix(rest)
        elif closing not in str(self.template.template):
            return None
        return f"{thought}{space if thought else ''}{closing}{gap}{rest}"

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
        """``weight_T``: the weight of each token, by default 1."""
        bos, fault = self.tokenizer.bos_token_id, ""
        if bos is not None and ids[:2] == [bos, bos]:
            fault = "begins with two BOS tokens; expected one; remove it from the content or the template"
        elif not ids:
            fault = "renders to no token at all; expected text; correct the row"
        if fault:
            raise RenderError(f"{name}: the row {fault}")
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
    """The error of each row's first image that cannot be used, or None."""
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
                f"{samples[0].id.rpartition('#')[0]}: the chat template rewrites earlier turns, so this answer makes "
                f"{len(samples)} samples; expected one; set data.targets=last, or give answers of one turn"
            )
    answers = [sample for (sample,) in rendered]
    if isinstance(row, Answers) and len(answers) > 1 and isinstance(row.answers[0], Document):
        # Whole texts: their common beginning is the prompt, and the rest is learned.
        lists = [sample.ids_T.tolist() for sample in answers]
        start = min(common_length(lists[0], ids) for ids in lists[1:])
        common = renderer.tokenizer.decode(lists[0][:start], skip_special_tokens=True)
        if not str(common).strip():
            raise RenderError(
                f"{row.place}: the answers have no beginning in common, and there is no prompt; expected either; name "
                "the column of the prompt with data.columns='{prompt = \"...\"}'"
            )
        for index, (sample, ids) in enumerate(zip(answers, lists, strict=True)):
            # of equal texts the last token stays a target: ``fit_any`` refuses them
            first = max(min(start, len(ids) - 1), 1)
            renderer.require_none_inside(ids[first:-1], ids[-1], sample.id)
            at = np.arange(first, len(ids))
            answers[index] = replace(sample, target_at_N=at, weight_N=np.ones(at.size))
    # An answer ends at its last target.
    for index, sample in enumerate(answers):
        if sample.num_targets:
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
            f"another one with {renderer.template.key}=FILE"
        )
    known = renderer.template.encode([text])[text][: sample.num_tokens]
    if known != sample.ids_T[: len(known)].tolist():
        raise RenderError(
            f"{row.place}: the chat template rewrites the prompt once it is answered; expected it unchanged, or steps "
            f"cannot be found; give another template with {renderer.template.key}=FILE"
        )
    # Of each step the token that holds its last character.
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
    # Why nothing can be learned from comparing the answers that are left.
    judgment, fault = next(iter(row.values)), ""
    if row.is_compared and len(kept) < 2:
        fault = "one answer is left" if kept else "no answer is left"
    elif row.is_compared and len({sample.values[judgment] for sample in kept}) < 2:
        fault = "no answer is better than another"
    else:
        for left, right in combinations(kept, 2):
            differ = left.values[judgment] != right.values[judgment]
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
    # Without targets, or too short.
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
    # Too long: refuse it, leave it out, cut it, or divide it.
    reason = f"{length} tokens, max_length {limits.max_length}"
    if limits.too_long == "error":
        raise DataError(
            f"{sample.id}: {reason}; expected no more; set data.too_long to drop, truncate or (for plain text) split; "
            "or raise data.max_length, if the model has room"
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
