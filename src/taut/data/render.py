"""Rows to token ids and exact targets, through the tokenizer's chat template.

For each assistant turn i to be learned,

    P_i = the rendering of messages[:i] with the generation prompt: what the model will see
    R_i = the rendering of messages[:i + 1]

are tokenised whole, and P_i's ids must be a prefix of R_i's: the first len(P_i) tokens are context,
what follows is what the model has to write, up to and with the LAST token that ends the turn. What
the template writes after that token (ChatML's newline) is no target, and neither is the role
header. If the whole conversation begins with every R_i up to its end token, the row is one sample;
else (templates that strip thinking from history) one per turn.

A row that cannot be rendered exactly is a RenderError. Two tokenisations are never glued together
and no end token is ever made up. A template that writes none is refused; so is one that passes over
tools, tool calls or reasoning, and an answer with a token of the stop set before its end.

Of a row with pictures every prefix counts those of the whole; each is seen once; and no token of a picture is a target,
whoever's turn it is in (``pictures.py``).

Does not read files (``sources.py``) and does not cut (``length.py``). Imported by ``dataset.py``
and by whoever needs prompts or the stop set.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from taut.data.formats import Completion, Conversation, Document, Message, Row, Tool, shown
from taut.data.media import text_of
from taut.data.pictures import Placed
from taut.data.template import Ids, Template, Text
from taut.errors import RenderError
from taut.types import IntArray, Media, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from taut.vision.album import Album

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
