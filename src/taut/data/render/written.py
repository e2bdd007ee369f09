"""Require that the template writes everything that a row says: asked for every row, when it is rendered.

A template may leave out a system message, tools, calls, the text beside a call, or a thought, and say nothing. Whether
it does depends on the shape of a conversation (who speaks, and what each message has), not on its words. So the words
of the first row of each shape are replaced by marks that occur nowhere else, and what the template writes is searched
for them: words that stand elsewhere too, as a function's name does among the tools, cannot be mistaken. The
answer holds for every row of that shape.

What must be written: the words of every message, names and arguments of every call, each tool's name, description and
parameters; in the row as a whole, or in the prompt of its last learned answer (Mistral's templates write the system
message there alone). A thought, and the words of an assistant, may be written where the turn is the last one alone,
since templates rewrite history. A thought that the template does not write is no error yet: ``Renderer`` may learn it
after a prompt that opens one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from taut.data.read.json_io import shown
from taut.data.render.chat_template import Template
from taut.data.rows.messages import THOUGHTS, Conversation, Message, Tool, text_of
from taut.errors import RenderError
from taut.io import limited_call

OPEN, CLOSE = "<think>", "</think>"
"""Around a thought in the content of a message."""
REPLY = "<tool_response>"
"""How a user's message begins that is a tool's result: templates ask for it."""
Part: TypeAlias = tuple[int, str]
"""The index of a message, -1 for the tools, and what it has: content, thought, calls."""


def thought_of(message: Message) -> tuple[str, Message]:
    """The thought of an assistant's message, or an empty text; and the message with the thought under its own keys."""
    for key in THOUGHTS:
        if thought := str(message.get(key) or "").strip():
            return thought, message
    content = message["content"]
    if message["role"] != "assistant" or not isinstance(content, str) or CLOSE not in content:
        return "", message
    before, _, answer = content.partition(CLOSE)
    thought = before.rpartition(OPEN)[2].strip()
    apart = {**message, "content": answer.lstrip("\n")}
    return thought, apart | dict.fromkeys(THOUGHTS, thought) if thought else apart


def unwritten(place: str, where: str, words: str) -> RenderError:
    """The error for words of a row that the template leaves out."""
    return RenderError(
        f"{place}: {where} has {shown(words)}, which the chat template does not write; expected a "
        "template that does; remove it from the row, or set data.template=FILE, or data.template=hermes for tools"
    )


@dataclass(frozen=True, slots=True)
class _Left:
    """The parts that a template leaves out of the rows of one shape."""

    parts: frozenset[Part] = frozenset()
    thoughts: frozenset[int] = frozenset()
    """Learned turns whose thought it does not write."""


class Written:
    """Finds the words that one template leaves out, by the shape of rows."""

    def __init__(self, template: Template) -> None:
        self.template = template
        self._left: dict[Any, _Left | None] = {}
        """Shape -> what is left out of it; None where the template refuses the marks."""

    def require(self, row: Conversation, learned: Sequence[int], text: str) -> None:
        """Raise RenderError for the first words of a row that are in no sample of it. ``text``: its rendering."""
        left = self._of(row.messages, row.tools, row.template_variables, learned)
        if left is not None and not left.parts:
            return
        for part, where, words in _said(row.messages, row.tools):
            if words not in text if left is None else part in left.parts:
                raise unwritten(row.place, where, words)

    def require_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        variables: Mapping[str, Any],
        place: str,
    ) -> None:
        """Raise RenderError for the first words of a prompt that the template leaves out."""
        left = self._of(messages, tools, variables, None)
        if left is None or not left.parts:
            return
        for part, where, words in _said(messages, tools):
            if part in left.parts:
                raise unwritten(place, where, words)

    def lost_thought(
        self, row: Conversation, index: int, learned: Sequence[int], text: str
    ) -> tuple[str, str] | None:
        """Place and words of the thought of a turn, if the template does not write it. ``text``: of the turn."""
        thought, _ = thought_of(row.messages[index])
        if not thought:
            return None
        left = self._of(row.messages, row.tools, row.template_variables, learned)
        if thought in text if left is None else index not in left.thoughts:
            return None
        key = next((key for key in THOUGHTS if row.messages[index].get(key)), "content")
        return f"messages[{index}].{key}", thought

    def _of(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        variables: Mapping[str, Any],
        learned: Sequence[int] | None,
    ) -> _Left | None:
        """The parts that are left out. ``learned``: the turns that are learned; None for a prompt."""
        kinds = tuple(map(_kind, messages))
        has = tuple(any(_words(tool, key) for tool in tools) for key in _OF_A_TOOL)
        settings = json.dumps(variables, sort_keys=True, default=str) if variables else ""
        shape = kinds, has, settings, None if learned is None else tuple(learned)
        if shape not in self._left:
            self._left = {} if len(self._left) > 10_000 else self._left
            try:
                self._left[shape] = self._ask(messages, tools, has, variables, learned)
            except limited_call.FunctionFailed:
                self._left[shape] = None
        return self._left[shape]

    def _ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        has: Sequence[bool],
        variables: Mapping[str, Any],
        learned: Sequence[int] | None,
    ) -> _Left:
        marks = _Marks()
        marked = [marks.message(index, message) for index, message in enumerate(messages)]
        functions = [marks.tool(has)] if tools else []

        def write(stop: int, *, is_prompt: bool) -> str:
            adapted = self.template.adapted(marked[:stop])
            place = "a conversation with marks for its words"
            return self.template.write(
                adapted, functions, is_prompt=is_prompt, place=place, **variables
            )

        # Marks that are in none of the texts that the model is taught on.
        if learned is None:
            text = write(len(marked), is_prompt=True)
        else:
            text = write(len(marked), is_prompt=False)
            if learned:
                text += write(learned[-1], is_prompt=True)
        lost = [(mark, part) for mark, part in marks.of.items() if mark not in text]
        # Of these not those that are written where their turn is the last.
        turns: dict[int, str] = {}
        parts, thoughts = set[Part](), set[int]()
        for mark, (index, kind) in lost:
            if learned is not None and index in learned and kind in ("content", "thought"):
                if index not in turns:
                    turns[index] = write(index + 1, is_prompt=False)
                if mark in turns[index]:
                    continue
            if kind != "thought":
                parts.add((index, kind))
            elif learned is not None and index in learned:
                thoughts.add(index)
        return _Left(frozenset(parts), frozenset(thoughts))


_OF_A_TOOL = ("name", "description", "parameters")


def _words(tool: Tool, key: str) -> str:
    """The tool's name or description, or the name of its first parameter; empty if it has none."""
    value = tool["function"].get(key)
    if key == "parameters":
        properties = value.get("properties") if isinstance(value, Mapping) else None
        value = next(iter(properties), "") if isinstance(properties, Mapping) else ""
    return str(value or "")


def _kind(message: Message) -> tuple[Any, ...]:
    """All that a template may look at in a message except its words."""
    content = message["content"]
    if isinstance(content, str):
        form: Any = bool(content.strip())
        if form:
            form = (CLOSE in content, OPEN in content, content.startswith(REPLY))
    else:
        form = tuple((part["type"], bool(str(part.get("text", "")).strip())) for part in content)
    if message["role"] != "assistant":
        return message["role"], form
    thoughts = tuple(key for key in THOUGHTS if str(message.get(key) or "").strip())
    calls = tuple(bool(call["function"].get("arguments")) for call in message.get("tool_calls", ()))
    return "assistant", form, thoughts, calls


def _said(messages: Sequence[Message], tools: Sequence[Tool]) -> Iterator[tuple[Part, str, str]]:
    """The parts of a row, each with its place and words of it."""
    for tool in tools:
        for key in _OF_A_TOOL:
            if words := _words(tool, key):
                yield (-1, key), "tools", words
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        for call in message.get("tool_calls", ()):
            function = call["function"]
            yield (index, "calls"), f"{where}.tool_calls", str(function["name"])
            for key in function.get("arguments") or {}:
                yield (index, "arguments"), f"{where}.tool_calls", str(key)
        words = thought_of(message)[1]["content"]
        words = words.strip() if isinstance(words, str) else text_of(words).strip()
        if words:
            yield (index, "content"), f"{where} ({message['role']})", words


class _Marks:
    """Marks in place of words."""

    def __init__(self) -> None:
        self.of: dict[str, Part] = {}

    def new(self, index: int, kind: str) -> str:
        mark = f"Zq{len(self.of)}Kx"
        self.of[mark] = index, kind
        return mark

    def message(self, index: int, message: Message) -> Message:
        content = message["content"]
        if isinstance(content, list):
            parts = [
                {**part, "text": self.new(index, "content")}
                if part["type"] == "text" and part["text"].strip()
                else part
                for part in content
            ]
            marked: Message = {**message, "content": parts}
        else:
            marked = {**message, "content": self._content(index, message)}
        thoughts = [key for key in THOUGHTS if str(message.get(key) or "").strip()]
        if thoughts:
            marked |= dict.fromkeys(thoughts, self.new(index, "thought"))
        if "tool_calls" in message:
            marked["tool_calls"] = [
                {**call, "function": self._call(index, call["function"])}
                for call in message["tool_calls"]
            ]
        return marked

    def _content(self, index: int, message: Message) -> str:
        content = message["content"]
        if not content.strip():
            return str(content)
        is_thinking = message["role"] == "assistant" and CLOSE in content
        if is_thinking:
            thought = self.new(index, "thought") if thought_of(message)[0] else ""
            opening = f"{OPEN}\n" if OPEN in content else ""
            answer = content.partition(CLOSE)[2].strip() and self.new(index, "content")
            return f"{opening}{thought}\n{CLOSE}\n\n{answer}"
        mark = self.new(index, "content")
        return f"{REPLY}\n{mark}\n</tool_response>" if content.startswith(REPLY) else mark

    def _call(self, index: int, function: Mapping[str, Any]) -> dict[str, Any]:
        arguments = {}
        if function.get("arguments"):
            arguments = {self.new(index, "arguments"): self.new(index, "arguments")}
        return {**function, "name": self.new(index, "calls"), "arguments": arguments}

    def tool(self, has: Sequence[bool]) -> Tool:
        function: dict[str, Any] = {"name": self.new(-1, "name")}
        if has[1]:
            function["description"] = self.new(-1, "description")
        if has[2]:
            name = self.new(-1, "parameters")
            kind = {"type": "string", "description": "what it is"}
            function["parameters"] = {
                "type": "object",
                "properties": {name: kind},
                "required": [name],
            }
        return {"type": "function", "function": function}
