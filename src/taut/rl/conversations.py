"""The requests of an agent as token paths: a forest of conversations, recorded as they were sampled.

    question = conversations.ask(messages, tools)         the ids of the prompt, and its place in the forest
    reply = conversations.answer(question, completion)    the assistant's message, as the agent gets it
    conversations.paths()                                 every sampled token exactly once

A request whose messages continue a recorded history continues its ids: sampled text is never tokenized again, and the
tokens between turns are the template's (``turns.py``). It continues the longest recorded history that its messages
begin with; if that is not the newest, the request is a branch. Messages with an answer that was never given (an edited
history, a summary, examples) are rendered as a conversation of their own, whose assistant messages are context. So are
requests with other tools, which the template writes into the prompt.

Two messages are equal if role, text and calls are. White space at the ends of a text, ids of calls and how their JSON
is written do not count, since agents change them.

    paths    from a root to each leaf; the first is the path with the newest answer. A sampled token on several paths
             is a target of the first of them, and context of the others

Knows nothing of engines and requests; text only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeAlias

import numpy as np

from taut.data.rows.messages import Message, Tool, images_of
from taut.data.rows.tool_calls import CallFormat
from taut.errors import DataError, RenderError
from taut.rl.turns import Bridge
from taut.types import Completion, FloatArray, IntArray

Key: TypeAlias = tuple[Any, ...]
"""A key that equal messages share."""


@dataclass(frozen=True, eq=False, slots=True)
class Path:
    """Token ids from the first message to an answer. N counts its targets, in order."""

    ids_T: IntArray
    sampled_at_N: IntArray
    logp_N: FloatArray
    version_N: IntArray


@dataclass(frozen=True, eq=False, slots=True)
class Question:
    """A request, with its place in the forest."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    ids: list[int]
    """The prompt: all that its answer is sampled after."""
    parent: Answer | None
    """The answer that it goes on from; None: the first request of a conversation."""

    @property
    def root(self) -> Question:
        """The first request of its conversation."""
        return self if self.parent is None else self.parent.question.root


@dataclass(frozen=True, eq=False, slots=True)
class Answer:
    """A completion in the forest."""

    question: Question
    completion: Completion
    message: Message
    num_calls: int
    """Tool calls of the conversation so far."""
    history: tuple[Key, ...]
    """The conversation so far, this answer included."""


class Conversations:
    """The forest of one trajectory."""

    def __init__(self, bridge: Bridge, calls: CallFormat | None) -> None:
        self.bridge, self.calls = bridge, calls
        self.answers: list[Answer] = []
        """In the order in which they were sampled."""
        self.num_edited = 0
        """Conversations that begin as an earlier one and go on with an answer that was never given."""
        self.num_malformed = 0
        """Tool calls that could not be read."""

    @property
    def num_roots(self) -> int:
        """Conversations that were begun: answers to a first request count once, however often it is asked."""
        roots = [answer.question for answer in self.answers if answer.question.parent is None]
        return len({tuple(question.ids) for question in roots})

    @property
    def num_calls(self) -> int:
        """Tool calls in all answers."""
        return sum(
            a.num_calls - (a.question.parent.num_calls if a.question.parent else 0)
            for a in self.answers
        )

    def ask(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Question:
        """Return the place in the forest that a request continues, and its prompt.

        Raises RenderError for messages that the template does not take, DataError for pictures and for messages that
        end with an assistant's.
        """
        if images_of(messages):
            raise DataError("messages: found a picture; expected text; leave it out")
        if messages[-1]["role"] not in ("user", "tool"):
            raise DataError(
                f"messages: the last has the role {messages[-1]['role']}; expected user or tool, for an answer to it"
            )
        # tools that the template shows, with calls that can be read
        keys, tools = tuple(map(key_of, messages)), tuple(tools)
        if tools and self.calls is None:
            key = f"{self.bridge.template.key}=hermes"
            raise RenderError(
                f"tools: the chat template writes no tool calls that are read; expected none; set {key}"
            )
        self.bridge.require_tools(tools)
        # the longest recorded history that the messages begin with
        parent: Answer | None = None
        for answer in self.answers:  # of answers that read the same, the newest
            size = len(answer.history)
            is_longest = parent is None or size >= len(parent.history)
            if is_longest and answer.question.tools == tools and keys[:size] == answer.history:
                parent = answer
        said = messages[0 if parent is None else len(parent.history) :]
        if parent is None or any(message["role"] == "assistant" for message in said):
            self.num_edited += self._is_edited(keys)
            ids = self.bridge.prompt(messages, tools)
            return Question(tuple(messages), tools, ids, None)
        # its ids go on with the tokens between turns
        sampled = parent.completion.ids_N
        last = int(sampled[-1]) if sampled.size else -1
        history = (*parent.question.messages, parent.message)
        between = self.bridge.between(history, said, tools, last)
        ids = [*parent.question.ids, *sampled.tolist(), *between]
        return Question((*history, *said), tools, ids, parent)

    def answer(self, question: Question, completion: Completion) -> Answer:
        """Record an answer."""
        parent = question.parent
        num_calls = 0 if parent is None else parent.num_calls
        message: Message = {"role": "assistant", "content": completion.text}
        if question.tools and self.calls is not None:
            text, calls = self.calls.read(completion.text, question.tools, first=num_calls)
            good = [call for call in calls if call.error is None]
            self.num_malformed += len(calls) - len(good)
            num_calls += len(calls)
            if good:
                message["tool_calls"] = [call.as_message() for call in good]
                message["content"] = text if len(good) == len(calls) else completion.text
        history = (*map(key_of, question.messages), key_of(message))
        answer = Answer(question, completion, message, num_calls, history)
        self.answers.append(answer)
        return answer

    def forget(self) -> None:
        """Forget the newest answer: nobody was there to get it."""
        self.answers.pop()

    def paths(self) -> list[Path]:
        """Every path from a root to a leaf, the one with the newest answer first, then in the order of their leaves."""
        inner = {id(answer.question.parent) for answer in self.answers}
        *others, newest = [answer for answer in self.answers if id(answer) not in inner]
        taken: set[int] = set()
        return [_path(leaf, taken) for leaf in (newest, *others)]

    def _is_edited(self, keys: tuple[Key, ...]) -> bool:
        """Whether a conversation begins as an earlier one, and has another answer later."""
        begins = 0
        for answer in self.answers:
            pairs = zip(keys, answer.history, strict=False)
            begins = max(begins, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
        return begins > 0 and any(key[0] == "assistant" for key in keys[begins:])


def key_of(message: Mapping[str, Any]) -> Key:
    """A key that equal messages share."""
    calls = tuple(
        (call["function"]["name"], json.dumps(call["function"]["arguments"], sort_keys=True))
        for call in message.get("tool_calls", ())
    )
    return message["role"], str(message["content"]).strip(), calls


def _path(leaf: Answer, taken: set[int]) -> Path:
    """The path to a leaf; its targets are the answers that are not in ``taken``, which gets them."""
    on_path: list[Answer] = []
    answer: Answer | None = leaf
    while answer is not None:
        if id(answer) not in taken:
            on_path.append(answer)
        answer = answer.question.parent
    on_path.reverse()
    taken.update(map(id, on_path))
    ids = [*leaf.question.ids, *leaf.completion.ids_N.tolist()]
    at: list[int] = []
    logp: list[float] = []
    version: list[int] = []
    for answer in on_path:
        completion, start = answer.completion, len(answer.question.ids)
        size = completion.ids_N.size
        assert ids[start : start + size] == completion.ids_N.tolist(), "other ids than were sampled"
        at += range(start, start + size)
        logp += [float("nan")] * size if completion.logp_N is None else completion.logp_N.tolist()
        version += [completion.version] * size
    return Path(
        np.array(ids, np.int64),
        np.array(at, np.int64),
        np.array(logp, np.float64),
        np.array(version, np.int64),
    )
