"""The tokens that the template writes between two turns of the policy.

    next prompt = all tokens so far, as sampled | rest of the turn's end | messages | generation prompt

Sampled text is never tokenized again. The tokens after a turn do not depend on its text: the conversation is rendered
with a known word in place of the turn (in its last call, if it has calls), and the text after the word is tokenized,
from the token that ends the turn on. That token is special, so the tokens after it do not depend on the text before it.
A completion that sampled the end of its turn is followed by the rest.

Some templates write a turn differently once it is history (they take thinking out). Sampled turns stay unchanged: the
policy is trained on what it saw. ``rewrites`` says whether a template does so.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import TypeAlias

from taut.data.read.json_io import shown
from taut.data.render.chat_template import PROBE, Ids, Text, common_length
from taut.data.render.images import Placed
from taut.data.render.render import Renderer
from taut.data.rows.messages import Message, Tool, images_of
from taut.data.rows.tool_calls import THOUGHT, own_id
from taut.errors import RenderError
from taut.types import Media

WORD = "Understood"
"""Replaces a turn of the policy."""
REPLY = "Replied"
"""Replaces the messages of others."""
PLACE = "the conversation"

Rendered: TypeAlias = tuple[Ids, tuple[Media, ...]]
"""Token ids, and the pictures as they lie among them."""


class Bridge:
    """The tokens between turns, for one renderer and stop set."""

    def __init__(self, renderer: Renderer, stop_ids: Collection[int]) -> None:
        self.renderer, self.template = renderer, renderer.template
        self.stop_ids = frozenset(stop_ids)
        self.heard: set[str] = set()
        """Roles whose messages the template was seen to write after a turn, and tools that it shows."""

    def require_tools(self, tools: Sequence[Tool]) -> None:
        """Raise RenderError for a tool that the template does not show."""
        if (key := str(tools)) in self.heard:
            return
        prompt = self.template.apply(PROBE[:1], tools, "the probe", is_prompt=True).text
        for name in [tool["function"]["name"] for tool in tools]:
            if name not in prompt:
                raise RenderError(
                    f"the chat template does not write the tool {shown(name)}; expected one that shows the policy what "
                    f"it may call; give another with {self.template.key}=FILE, or {self.template.key}=hermes"
                )
        self.heard.add(key)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Ids:
        """History and generation prompt, where no turn has been sampled yet."""
        return self.prompt_media(messages, tools)[0]

    def prompt_media(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Rendered:
        """History and generation prompt with their pictures, where no turn has been sampled yet."""
        ids_T, media = self.renderer.prompt_media(messages, tools)
        return ids_T.tolist(), media

    def between(
        self, history: Sequence[Message], said: Sequence[Message], tools: Sequence[Tool], last: int
    ) -> Ids:
        """The ids of ``follows``."""
        return self.follows(history, said, tools, last)[0]

    def follows(
        self, history: Sequence[Message], said: Sequence[Message], tools: Sequence[Tool], last: int
    ) -> Rendered:
        """The tokens after the last turn of ``history``, whose last sampled token is ``last``, up to the next turn,
        where the messages ``said`` are the answer; and the pictures as they lie among the tokens.

        Raises RenderError where the template does not take these messages, or leaves out the content of one; and for a
        picture that would change the tokens of the pictures before it.
        """
        assert history[-1]["role"] == "assistant" and said
        word, others = WORD, str([said, tools])
        while word in others:  # the search for the word begins at the end
            word += "x"
        turns = _canonical(history, said, word)
        if not self.heard >= {message["role"] for message in said}:
            self._require_heard(turns, said, tools, word)
        ids, placed = self._from_end(turns, said, tools, word)
        # the first token of the next header may be the end of the turn: then no other end stands for it
        if last == ids[0] or (last in self.stop_ids and not self.template.turn_ends.closing):
            ids = ids[1:]
        store = self.template.pictures.image_store
        depends_on_count = store is not None and store.processor.depends_on_count
        if depends_on_count and placed and images_of(turns):
            raise RenderError(
                "the conversation gets another picture, and this model's processor makes other tokens of the pictures "
                "before it then; expected all pictures in the first messages; show one only"
            )
        return ids, self.template.pictures.find(ids, placed, PLACE)

    def rewrites(self, turn: Message, said: Message, tools: Sequence[Tool]) -> str | None:
        """None where prompt, turn and the tokens after it are, token for token, the template's own rendering of the
        whole; else what the template writes instead of the turn once that is history.

        Where the generation prompt begins a thought, the turn goes on with one. Raises RenderError where the tokens
        after a turn depend on its content.
        """
        messages = PROBE[:1]
        prompt = self.prompt(messages, tools)
        for turn in (turn, {**turn, **THOUGHT}):  # noqa: B020
            row = self.template.apply((*messages, turn), tools, PLACE)
            row = self.template.closed(row, turn, said["role"])
            row_ids = self.template.encode([row])[row]
            start = common_length(prompt, row_ids)
            if start == len(prompt):
                break
        else:
            return self.template.quoted(row_ids[start:][:8])
        end = self.template.end_of_turn(row_ids, start, PLACE)
        ids = row_ids[: end + 1]
        between = self.between((*messages, turn), [said], tools, last=ids[-1])
        path, whole = [*ids, *between], self.prompt((*messages, turn, said), tools)
        if path == whole:
            return None
        same = common_length(path, whole)
        if same > end or whole[len(whole) - len(between) :] != between:
            raise RenderError(
                f"after one turn the chat template writes {self.template.quoted(between[:16])}, and after another "
                f"{self.template.quoted(whole[end + 1 :][:16])}; expected that it does not depend on what was said; "
                f"give another template with {self.template.key}=FILE"
            )
        return self.template.quoted(whole[same:][:8])

    def _from_end(
        self, turns: Sequence[Message], said: Sequence[Message], tools: Sequence[Tool], word: str
    ) -> tuple[Ids, tuple[Placed, ...]]:
        """The tokens after the word in the last turn, from the token that ends the turn on, and their pictures."""
        whole = self.template.apply((*turns, *said), tools, PLACE, is_prompt=True)
        _, is_there, after = whole.text.rpartition(word)
        placed = whole.pictures[len(images_of(turns)) :]
        if not is_there:
            raise RenderError(
                "the chat template does not write what an assistant says; expected its content, or its calls; give "
                f"another template with {self.template.key}=FILE"
            )
        tail, first = Text(after, is_rendering=True), 0
        if "tool_calls" in turns[-1]:
            first = self._end_of_calls(turns[-1], tools, word, after)
        ids, ends = self.template.encode([tail])[tail], self.template.end_ids
        for index, span in enumerate(self.template.spans(tail)):
            if span[0] >= first and ids[index] in ends:
                return ids[index:], placed
        raise RenderError(
            f"the chat template writes {after!r:.80} after a turn, and no token that ends it; expected one, as after "
            f"the last turn; give another template with {self.template.key}=FILE"
        )

    def _require_heard(
        self, turns: Sequence[Message], said: Sequence[Message], tools: Sequence[Tool], word: str
    ) -> None:
        """Raise RenderError unless the template writes the messages of these roles after a turn; once for each role."""
        replies = [{**message, "content": f"{REPLY}{k}."} for k, message in enumerate(said)]
        text = self.template.decode(self._from_end(turns, replies, tools, word)[0])
        for message in replies:
            if message["content"] not in text:
                raise RenderError(
                    f"the chat template does not write what a message of role {message['role']} says after a turn; "
                    f"expected its content; give another template with {self.template.key}=FILE, or let another role "
                    "say it"
                )
            self.heard.add(message["role"])

    def _end_of_calls(self, turn: Message, tools: Sequence[Tool], word: str, tail: str) -> int:
        """Where the token that ends a turn with calls begins in ``tail``, what is written after the word: markers of
        calls may be special tokens, too."""
        whole = self.template.apply((*PROBE[:1], turn), tools, PLACE)
        row = self.template.closed(whole, turn, "tool").text
        alone = Text(row[row.rfind(word) + len(word) :], is_rendering=True)
        end = self.template.end_of_turn(self.template.encode([alone])[alone], 0, PLACE)
        first, stop = self.template.spans(alone)[end]
        if not tail.startswith(alone.text[:stop]):
            raise RenderError(
                f"the chat template ends a turn with calls with {alone.text[:stop]!r:.80}, and once it is history with "
                f"{tail[:stop]!r:.80}; expected the same; give another template with {self.template.key}=FILE"
            )
        return first


def moved(media: Sequence[Media], by: int) -> tuple[Media, ...]:
    """Return the pictures, ``by`` tokens later."""
    return tuple(
        replace(medium, start=medium.start + by, stop=medium.stop + by) for medium in media
    )


def _canonical(history: Sequence[Message], said: Sequence[Message], word: str) -> list[Message]:
    """The conversation with every turn replaced by the word, or by calls, the last of which has the word in the last
    turn: the tokens after a turn do not depend on what was sampled in it.
    """
    turns: list[Message] = []
    everything = [*history, *said]
    for index, message in enumerate(history):
        if message["role"] != "assistant":
            turns.append(message)
        elif calls := _calls(message, everything[index + 1 :]):
            turns.append({"role": "assistant", "content": "", "tool_calls": calls})
        else:
            turns.append({"role": "assistant", "content": word})
    if "tool_calls" in turns[-1]:
        *others, call = turns[-1]["tool_calls"]
        call = {**call, "function": {**call["function"], "arguments": {"text": word}}}
        turns[-1] = {**turns[-1], "tool_calls": [*others, call]}
    return turns


def _calls(turn: Message, after: Sequence[Message]) -> list[Tool]:
    """The calls of a turn as templates take them: one for each tool message after it, even if its call could not be
    read; else the turn's own.
    """
    names: dict[str, str] = {}
    for k, call in enumerate(turn.get("tool_calls", [])):
        index = call.get("id")
        index = index if isinstance(index, str) and index else own_id(k)  # a row may have none
        names[index] = call["function"]["name"]
    indices, answered_names = list(names), {}
    answers = takewhile(lambda message: message["role"] == "tool", after)
    for k, answer in enumerate(answers):
        index = answer.get("tool_call_id") or (indices[k] if k < len(indices) else own_id(k))
        answered_names[index] = answer.get("name") or names.get(index, "tool")
    return [
        {"id": index, "type": "function", "function": {"name": name, "arguments": {"text": "x"}}}
        for index, name in (answered_names or names).items()
    ]
