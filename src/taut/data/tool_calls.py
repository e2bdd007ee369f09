"""Calls of tools in what a model wrote, in the chat template's own format (``call_format.py`` finds it).

    an object   <tool_call>{"name": ..., "arguments": {...}}</tool_call>     alone, marked, or in a marked list
    a name      [TOOL_CALLS]name[ARGS]{...}                                  then its arguments as JSON
    tags        <function=name><parameter=key>value</parameter></function>   a value is JSON, or text where the tool's
                                                                             schema says string

Reading is strict about markers and what is between them, and easy about white space around them. What is marked as a
call and cannot be read is a ToolCall with its error; it is never dropped.

Does not run anything, and does not know templates. May import formats and strict_json. Imported by rollout.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from taut.data.formats import Tool
from taut.data.strict_json import read_item, read_json

Arguments: TypeAlias = dict[str, Any]

NAME = r"[\w.\-]+"
WORDS: dict[str, Any] = {"True": True, "False": False, "None": None}
"""How templates that write arguments as text write what JSON calls true, false and null."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What a model asks for."""

    id: str
    name: str
    arguments: Arguments = field(default_factory=dict)
    error: str | None = None
    """Why it cannot be read as a call; then ``name`` is empty."""

    def as_message(self) -> Tool:
        """As a message's ``tool_calls`` have it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class Malformed(ValueError):
    """What is wrong with a call."""


class _Found(NamedTuple):
    name: str
    arguments: Arguments
    id: str = ""


class Body(Protocol):
    """How a call is written between its markers."""

    def read(self, text: str, at: int, tools: Sequence[Tool]) -> tuple[list[_Found], int]:
        """The calls that begin at ``at``, and where they end. Raises Malformed."""


@dataclass(frozen=True, slots=True)
class ObjectCall:
    """``{"name": ..., "arguments": {...}}``, or a list of such."""

    name_key: str
    arguments_key: str
    is_list: bool = False

    def read(self, text: str, at: int, tools: Sequence[Tool]) -> tuple[list[_Found], int]:
        value, end = _json(text, at)
        if not self.is_list:
            return [self._call(value)], end
        if not isinstance(value, list) or not value:
            raise Malformed("found no list of calls after the marker")
        return [self._call(item) for item in value], end

    def _call(self, value: Any) -> _Found:
        if not isinstance(value, dict):
            raise Malformed(f"a call is an object with {self.name_key} and {self.arguments_key}")
        name, arguments = value.get(self.name_key), value.get(self.arguments_key, {})
        if not isinstance(name, str) or not name:
            raise Malformed(f"the call has no {self.name_key}")
        if isinstance(arguments, str):
            arguments, _ = _json(arguments, 0)
        own = value.get("id")
        return _Found(name, _object(arguments), own if isinstance(own, str) else "")


@dataclass(frozen=True, slots=True)
class NamedCall:
    """``name``, what stands between, ``{...}``."""

    between: str
    """A regular expression; its group, if it has one, is the call's id."""

    def read(self, text: str, at: int, tools: Sequence[Tool]) -> tuple[list[_Found], int]:
        found = re.compile(rf"\s*({NAME})\s*{self.between}\s*").match(text, at)
        if found is None:
            raise Malformed("found no name of a tool, with its arguments after it")
        arguments, end = _json(text, found.end())
        own = found[2] if found.re.groups == 2 else ""
        return [_Found(found[1], _object(arguments), own)], end


@dataclass(frozen=True, slots=True)
class TaggedCall:
    """``name``, then for each argument what opens it, its key, what stands between, its value, what closes it."""

    opening: str
    between: str
    closing: str

    def read(self, text: str, at: int, tools: Sequence[Tool]) -> tuple[list[_Found], int]:
        head = re.compile(rf"\s*({NAME})").match(text, at)
        if head is None:
            raise Malformed("found no name of a tool after the marker")
        name, at = head[1], head.end()
        kinds = _kinds(name, tools)
        arguments: Arguments = {}
        one = re.compile(
            rf"{loose(self.opening)}\s*({NAME})\s*{loose(self.between)}{_maybe(self.between, 'end')}"
            rf"(.*?){_maybe(self.closing, 'start')}{loose(self.closing)}",
            re.DOTALL,
        )
        while found := one.match(text, at):
            key, at = found[1], found.end()
            if key in arguments:
                raise Malformed(f"the argument {key} is there twice")
            arguments[key] = _value(found[2], key, kinds.get(key))
        return [_Found(name, arguments)], at


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a template writes calls."""

    begin: str
    """What stands before a call; empty: the call is all there is."""
    end: str
    body: Body
    example: str
    """A turn with a call, as the template writes it, for people."""
    specials: tuple[str, ...] = ()
    """Tokens of the tokenizer that may stand before a call which no marker begins (``<|python_tag|>``)."""

    def read(self, text: str, tools: Sequence[Tool], first: int = 0) -> tuple[str, list[ToolCall]]:
        """What is said beside the calls, and the calls; ``first``: how many the conversation has had before."""
        plain: list[str] = []
        calls: list[ToolCall] = []
        for piece in self._pieces(text, tools):
            if isinstance(piece, str):
                plain.append(piece)
                continue
            number = first + len(calls)
            if isinstance(piece, Malformed):
                calls.append(ToolCall(_own_id(number), "", error=str(piece)))
            else:
                taken = {call.id for call in calls}
                calls.append(ToolCall(_id(piece.id, number, taken), piece.name, piece.arguments))
        return "".join(plain).strip(), calls

    def _pieces(self, text: str, tools: Sequence[Tool]) -> Iterator[str | _Found | Malformed]:
        """The text in its parts."""
        if not self.begin:
            yield from self._whole(text, tools)
            return
        opening = self.begin.split()[0]
        at = 0
        while (start := text.find(opening, at)) >= 0:
            yield text[at:start]
            try:
                found, at = self._marked(text, start, tools)
                yield from found
            except Malformed as error:
                yield error
                last = self.end.split()[-1] if self.end else ""
                stop = text.find(last, start + len(opening)) if last else -1
                at = len(text) if stop < 0 else stop + len(last)
        yield text[at:]

    def _marked(self, text: str, at: int, tools: Sequence[Tool]) -> tuple[list[_Found], int]:
        begin = re.compile(loose(self.begin)).match(text, at)
        if begin is None:
            raise Malformed(f"expected {' '.join(self.begin.split())} before a call")
        found, at = self.body.read(text, begin.end(), tools)
        end = re.compile(rf"\s*{loose(self.end)}").match(text, at)
        if end is None:
            raise Malformed(f"expected {' '.join(self.end.split())} after the call")
        return found, end.end()

    def _whole(self, text: str, tools: Sequence[Tool]) -> Iterator[str | _Found | Malformed]:
        """A text that is a call from its first character to its last, or none at all."""
        assert isinstance(self.body, ObjectCall)
        bare = text.strip()
        for special in self.specials:
            bare = bare.removeprefix(special).strip()
        keys = (self.body.name_key, self.body.arguments_key)
        if not bare.startswith("{") or not all(f'"{key}"' in bare for key in keys):
            yield text
            return
        try:
            found, at = self.body.read(bare, 0, tools)
            if bare[at:].strip():
                raise Malformed("there is text after the call; expected the call alone")
            yield from found
        except Malformed as error:
            yield error


def loose(marker: str) -> str:
    """A regular expression for a marker, whatever white space is in it."""
    return r"\s*".join(re.escape(part) for part in marker.split())


def _maybe(marker: str, side: str) -> str:
    """The white space that the template writes on this side of a marker, which is not the value's own."""
    bare = marker.rstrip() if side == "end" else marker.lstrip()
    space = marker[len(bare) :] if side == "end" else marker[: len(marker) - len(bare)]
    return f"(?:{re.escape(space)})?" if space else ""


def _json(text: str, at: int) -> tuple[Any, int]:
    begin = at + len(text[at:]) - len(text[at:].lstrip())
    try:
        return read_item(text, begin)
    except ValueError as error:
        raise Malformed(f"the call is not JSON: {error}") from None


def _object(value: Any) -> Arguments:
    if not isinstance(value, dict):
        raise Malformed("the arguments are no JSON object")
    return value


def _kinds(name: str, tools: Sequence[Tool]) -> dict[str, Any]:
    """The types that a tool's schema gives its arguments."""
    for tool in tools:
        if tool["function"]["name"] == name:
            properties = tool["function"].get("parameters", {}).get("properties", {})
            return {key: schema.get("type") for key, schema in properties.items()}
    return {}


def _value(text: str, key: str, kind: Any) -> Any:
    """An argument that was written as text."""
    if kind == "string":
        return text
    if text.strip() in WORDS:
        return WORDS[text.strip()]
    try:
        return read_json(text)
    except ValueError:
        if kind is None:
            return text
        raise Malformed(f"the argument {key} is not of type {kind}") from None


def _own_id(number: int) -> str:
    """Nine letters and digits, as Mistral's templates want them."""
    return f"call{number:05d}"


def _id(found: str, number: int, taken: Collection[str]) -> str:
    is_good = re.fullmatch(r"[A-Za-z0-9]{9}", found) is not None and found not in taken
    return found if is_good else _own_id(number)
