"""Calls of tools in what a model wrote, in the chat template's own format (``call_format.py`` finds it).

    an object   <tool_call>{"name": ..., "arguments": {...}}</tool_call>     alone, marked, or in a marked list
    a name      [TOOL_CALLS]name[ARGS]{...}                                  then its arguments as JSON
    tags        <function=name><parameter=key>value</parameter></function>   a value is JSON, or text where the tool's
                                                                             schema says string

Reading is strict about markers and what is between them, and easy about white space around them. What is marked as a
call and cannot be read is a ToolCall with its error; it is never dropped. In a thought nothing is a call.

Does not run anything, and does not know templates. May import formats and strict_json. Imported by rollout.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, Protocol, TypeAlias

from taut.data.formats import Tool
from taut.data.strict_json import read_item, read_json

Arguments: TypeAlias = dict[str, Any]

NAME = r"[\w.\-]+"
WORDS: dict[str, Any] = {"True": True, "False": False, "None": None}
"""How templates that write arguments as text write what JSON calls true, false and null."""
JSON_TYPES: dict[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}
"""What schemas call a value of each type."""


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
        function = {"name": self.name, "arguments": copy.deepcopy(self.arguments)}
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
            text = arguments
            arguments, end = _json(text, 0)
            if text[end:].strip():
                raise Malformed("there is text after the arguments; expected one object")
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
class Thought:
    """How a template writes thoughts."""

    begin: str
    end: str
    is_open: bool
    """Whether a turn begins in one."""

    def parts(self, text: str) -> Iterator[tuple[str, bool]]:
        """The text in its parts, and whether each is thought. What is before an end, and never began, is; so is all
        that comes after a beginning without an end."""
        pieces = text.split(self.end)
        for number, piece in enumerate(pieces):
            is_last = number == len(pieces) - 1
            said = piece.partition(self.begin)[0]
            if (self.is_open and number == 0) or (said == piece and not is_last):
                said = ""
            yield said, False
            yield piece[len(said) :] + ("" if is_last else self.end), True


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
    thought: Thought | None = None
    """None: the template writes none."""

    def read(self, text: str, tools: Sequence[Tool], first: int = 0) -> tuple[str, list[ToolCall]]:
        """What is said beside the calls, and the calls; ``first``: how many the conversation has had before."""
        plain: list[str] = []
        calls: list[ToolCall] = []
        for piece in self._pieces(text, tools):
            if isinstance(piece, str):
                plain.append(piece)
                continue
            taken, number = {call.id for call in calls}, first + len(calls)
            if isinstance(piece, Malformed):
                calls.append(ToolCall(_id("", number, taken), "", error=str(piece)))
            else:
                calls.append(ToolCall(_id(piece.id, number, taken), piece.name, piece.arguments))
        return "".join(plain).strip(), calls

    def _pieces(self, text: str, tools: Sequence[Tool]) -> Iterator[str | _Found | Malformed]:
        """The text in its parts."""
        for part, is_thought in (
            [(text, False)] if self.thought is None else self.thought.parts(text)
        ):
            if is_thought:
                yield part
            else:
                yield from (self._among if self.begin else self._whole)(part, tools)

    def _among(self, text: str, tools: Sequence[Tool]) -> Iterator[str | _Found | Malformed]:
        """A text with marked calls in it."""
        opening = self.begin.split()[0]
        at = 0
        while (start := text.find(opening, at)) >= 0:
            yield text[at:start]
            try:
                found, at = self._marked(text, start, tools)
                yield from found
            except Malformed as error:
                yield error
                at = self._after(text, start + len(opening), opening)
        yield text[at:]

    def _after(self, text: str, at: int, opening: str) -> int:
        """Where to read on after a call that cannot be read: at its end, or where the next begins."""
        last = self.end.split()[-1] if self.end else ""
        stop, following = text.find(last, at) if last else -1, text.find(opening, at)
        if following >= 0 and not 0 <= stop < following:
            return following
        return len(text) if stop < 0 else stop + len(last)

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
        value, end = read_item(text, begin)
    except ValueError as error:
        raise Malformed(f"the call is not JSON: {error}") from None
    return _unicode(value), end


def _unicode(value: Any) -> Any:
    """The value, which can be written."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Malformed("half of a surrogate pair is in it; expected Unicode text") from None
    return value


def _object(value: Any) -> Arguments:
    if not isinstance(value, dict):
        raise Malformed("the arguments are no JSON object")
    return value


def _kinds(name: str, tools: Sequence[Tool]) -> dict[str, Any]:
    """The types that a tool's schema gives its arguments."""
    for tool in tools:
        if tool["function"]["name"] == name:
            parameters = tool["function"].get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            schemas = properties if isinstance(properties, dict) else {}
            return {key: it.get("type") for key, it in schemas.items() if isinstance(it, dict)}
    return {}


def _value(text: str, key: str, kind: Any) -> Any:
    """An argument that was written as text."""
    kinds = kind if isinstance(kind, list) else [kind]
    if kinds == ["string"]:
        return text
    try:
        value = WORDS[text.strip()] if text.strip() in WORDS else _unicode(read_json(text))
    except Malformed:
        raise
    except ValueError:
        if kind is None or "string" in kinds:
            return text
        raise Malformed(
            f"the argument {key} is not of type {' or '.join(map(str, kinds))}"
        ) from None
    is_meant = "string" not in kinds or any(name in kinds for name in JSON_TYPES[type(value)])
    return value if is_meant else text


def own_id(number: int) -> str:
    """Nine letters and digits, as Mistral's templates want them."""
    return f"call{number:05d}"


def _id(found: str, number: int, taken: Collection[str]) -> str:
    """The model's own, or the next of ours; one that nobody has."""
    if re.fullmatch(r"[A-Za-z0-9]{9}", found) is not None and found not in taken:
        return found
    return next(name for name in map(own_id, count(number)) if name not in taken)
