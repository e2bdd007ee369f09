"""Tool calls in generated text, in the chat template's own format, which is derived from the template.

    an object   <tool_call>{"name": ..., "arguments": {...}}</tool_call>     alone, marked, or in a marked list
    a name      [TOOL_CALLS]name[ARGS]{...}                                  then its arguments as JSON
    tags        <function=name><parameter=key>value</parameter></function>   a value is JSON, or text where the tool's
                                                                             schema says string

Reading is strict about markers and the text between them, and tolerant of white space around them. Text that is marked
as a call and cannot be read is a ToolCall with its error; it is never dropped. Nothing in a thought is a call.

``derive_call_format`` renders known calls; there is no table of models. The text between two calls of one turn is the
end of the first and the beginning of the second; the text before the first or after the last alone belongs to the turn.
The derived format is proven: calls rendered and read again are equal, or the template is refused, as is one that writes
no calls. The format of thoughts is derived in the same way.

Does not run anything.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import count, takewhile
from typing import Any, NamedTuple, TypeAlias

from taut.data.read.json_io import read_item, read_json
from taut.data.render.chat_template import PROBE, Template
from taut.data.rows.messages import THOUGHTS, Message, Tool
from taut.errors import RenderError

Arguments: TypeAlias = dict[str, Any]

NAME = r"[\w.\-]+"
WORDS: dict[str, Any] = {"True": True, "False": False, "None": None}
"""true, false and null as templates write them that write arguments as text."""
JSON_TYPES: dict[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}
"""Names of each type in JSON schemas."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of a model."""

    id: str
    name: str
    arguments: Arguments = field(default_factory=dict)
    error: str | None = None
    """Reason why the text cannot be read as a call; then ``name`` is empty."""

    def as_message(self) -> Tool:
        """The call as an item of a message's ``tool_calls``."""
        function = {"name": self.name, "arguments": copy.deepcopy(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


class Malformed(ValueError):
    """A call cannot be read."""


class _Found(NamedTuple):
    name: str
    arguments: Arguments
    id: str = ""


@dataclass(frozen=True, slots=True)
class ObjectCall:
    """``{"name": ..., "arguments": {...}}``, or a list of such objects."""

    name_key: str
    arguments_key: str
    is_list: bool = False

    @property
    def keys(self) -> set[str]:
        """Keys that models give the arguments, whatever the template has."""
        return {self.arguments_key, "arguments", "parameters"}

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
        name = value.get(self.name_key)
        if not isinstance(name, str) or not name:
            raise Malformed(f"the call has no {self.name_key}")
        given = [key for key in self.keys if key in value]
        others = value.keys() - {self.name_key, "id", "type"}
        if len(given) > 1 or (others and not given):
            raise Malformed(
                f"the call has {' and '.join(sorted(others))}; expected its arguments under {self.arguments_key}"
            )
        arguments = value[given[0]] if given else {}
        if isinstance(arguments, str):
            text = arguments
            arguments, end = _json(text, 0)
            if text[end:].strip():
                raise Malformed("there is text after the arguments; expected one object")
        call_id = value.get("id")
        return _Found(name, _object(arguments), call_id if isinstance(call_id, str) else "")


@dataclass(frozen=True, slots=True)
class NamedCall:
    """``name``, the text between, ``{...}``."""

    between: str
    """A regular expression; its group, if it has one, is the call's id."""

    def read(self, text: str, at: int, tools: Sequence[Tool]) -> tuple[list[_Found], int]:
        head = re.compile(rf"\s*({NAME})\s*{self.between}\s*").match(text, at)
        if head is None:
            raise Malformed("found no name of a tool, with its arguments after it")
        arguments, end = _json(text, head.end())
        call_id = head[2] if head.re.groups == 2 else ""
        return [_Found(head[1], _object(arguments), call_id)], end


@dataclass(frozen=True, slots=True)
class TaggedCall:
    """``name``, then for each argument its opening, key, the text between, value and closing."""

    opening: str
    between: str
    closing: str

    def read(self, text: str, at: int, tools: Sequence[Tool]) -> tuple[list[_Found], int]:
        head = re.compile(rf"\s*({NAME})").match(text, at)
        if head is None:
            raise Malformed("found no name of a tool after the marker")
        name, at = head[1], head.end()
        schemas: Mapping[str, Any] = {}
        for tool in tools:
            if tool["function"]["name"] == name:
                parameters = tool["function"].get("parameters")
                properties = parameters.get("properties") if isinstance(parameters, dict) else None
                schemas = properties if isinstance(properties, dict) else {}
                break
        arguments: Arguments = {}
        argument = re.compile(
            rf"{loose(self.opening)}\s*({NAME})\s*{loose(self.between)}{_maybe(self.between, 'end')}"
            rf"(.*?){_maybe(self.closing, 'start')}{loose(self.closing)}",
            re.DOTALL,
        )
        while match := argument.match(text, at):
            key, at = match[1], match.end()
            if key in arguments:
                raise Malformed(f"the argument {key} is there twice")
            schema = schemas.get(key)
            kind = schema.get("type") if isinstance(schema, dict) else None
            arguments[key] = _value(match[2], key, kind)
        return [_Found(name, arguments)], at


Body: TypeAlias = ObjectCall | NamedCall | TaggedCall
"""The format of a call between its markers. ``read`` returns the calls that begin at ``at``, and their end, or raises
Malformed."""


@dataclass(frozen=True, slots=True)
class Thought:
    """The format in which a template writes thoughts."""

    begin: str
    end: str
    is_open: bool
    """Whether a turn begins in one."""

    def parts(self, text: str) -> Iterator[tuple[str, bool]]:
        """The parts of the text, and whether each is a thought. So is text before an end that never began, and all text
        after a beginning without an end.
        """
        pieces = text.split(self.end)
        for number, piece in enumerate(pieces):
            is_last = number == len(pieces) - 1
            answer = piece.partition(self.begin)[0]
            if (self.is_open and number == 0) or (answer == piece and not is_last):
                answer = ""
            yield answer, False
            yield piece[len(answer) :] + ("" if is_last else self.end), True


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The format in which a template writes calls."""

    begin: str
    """Marker before a call; empty if the call is the whole text."""
    end: str
    body: Body
    example: str
    """A turn with a call, as the template writes it, for people."""
    specials: tuple[str, ...] = ()
    """Tokens of the tokenizer that may stand before a call which no marker begins (``<|python_tag|>``)."""
    thought: Thought = Thought("<think>", "</think>", is_open=False)

    def read(self, text: str, tools: Sequence[Tool], first: int = 0) -> tuple[str, list[ToolCall]]:
        """The text without its calls, and the calls; ``first``: the number of earlier calls in the conversation."""
        plain: list[str] = []
        calls: list[ToolCall] = []
        find = self._among if self.begin else self._whole
        for part, is_thought in self.thought.parts(text):
            pieces: Iterable[str | _Found | Malformed]
            pieces = [part] if is_thought else find(part, tools)
            for piece in pieces:
                if isinstance(piece, str):
                    plain.append(piece)
                    continue
                taken, number = {call.id for call in calls}, first + len(calls)
                if isinstance(piece, Malformed):
                    calls.append(ToolCall(_id("", number, taken), "", error=str(piece)))
                else:
                    call_id = _id(piece.id, number, taken)
                    calls.append(ToolCall(call_id, piece.name, piece.arguments))
        return "".join(plain).strip(), calls

    def _among(self, text: str, tools: Sequence[Tool]) -> Iterator[str | _Found | Malformed]:
        """A text with marked calls in it."""
        opening = self.begin.split()[0]
        at = 0
        while (start := text.find(opening, at)) >= 0:
            yield text[at:start]
            try:
                begin = re.compile(loose(self.begin)).match(text, start)
                if begin is None:
                    raise Malformed(f"expected {' '.join(self.begin.split())} before a call")
                calls, stop = self.body.read(text, begin.end(), tools)
                end = re.compile(rf"\s*{loose(self.end)}").match(text, stop)
                if end is None:
                    raise Malformed(f"expected {' '.join(self.end.split())} after the call")
                at = end.end()
                yield from calls
            except Malformed as error:
                yield error
                # reading continues at the end of that call, or at the start of the next
                at = start + len(opening)
                last = self.end.split()[-1] if self.end else ""
                stop, following = text.find(last, at) if last else -1, text.find(opening, at)
                if following >= 0 and not 0 <= stop < following:
                    at = following
                else:
                    at = len(text) if stop < 0 else stop + len(last)
        yield text[at:]

    def _whole(self, text: str, tools: Sequence[Tool]) -> Iterator[str | _Found | Malformed]:
        """A text that is one call from its first character to its last, or contains none."""
        assert isinstance(self.body, ObjectCall)
        bare = text.strip()
        for special in self.specials:
            bare = bare.removeprefix(special).strip()
        has_keys = f'"{self.body.name_key}"' in bare and any(
            f'"{k}"' in bare for k in self.body.keys
        )
        if not bare.startswith("{") or not has_keys:
            yield text
            return
        try:
            calls, at = self.body.read(bare, 0, tools)
            if bare[at:].strip():
                raise Malformed("there is text after the call; expected the call alone")
            yield from calls
        except Malformed as error:
            yield error


def loose(marker: str) -> str:
    """A regular expression for a marker with any white space in it."""
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
    """The value, if it can be encoded."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Malformed("half of a surrogate pair is in it; expected Unicode text") from None
    return value


def _object(value: Any) -> Arguments:
    if not isinstance(value, dict):
        raise Malformed("the arguments are no JSON object")
    return value


def _value(text: str, key: str, kind: Any) -> Any:
    """The value of an argument that is written as text."""
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
    """The id of a tool call: nine letters and digits, as Mistral's templates require."""
    return f"call{number:05d}"


def _id(proposed: str, number: int, taken: Collection[str]) -> str:
    """The model's own id, if it is valid and free; else the next free id of ours."""
    if re.fullmatch(r"[A-Za-z0-9]{9}", proposed) is not None and proposed not in taken:
        return proposed
    return next(name for name in map(own_id, count(number)) if name not in taken)


# -- the format of a template


def _tool(name: str, kinds: Mapping[str, str]) -> Tool:
    properties = {key: {"type": kind, "description": key} for key, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties, "required": list(kinds)}
    function = {"name": name, "description": "What it does", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = (
    _tool("find_weather", {"city": "string", "unit": "string"}),
    _tool("tell_time", {"zone": "string", "style": "string"}),
    _tool("mixed", {"words": "string", "number": "integer", "flag": "boolean", "tree": "object"}),
)
PROBES = (
    ToolCall("call00001", "find_weather", {"city": "Paris", "unit": "celsius"}),
    ToolCall("call00002", "tell_time", {"zone": "Berlin", "style": "short"}),
)
HARD = (
    ToolCall(
        "call00001",
        "mixed",
        {"words": 'a "b" é', "number": 3, "flag": True, "tree": {"x": [1.5, "two"]}},
    ),
)
THOUGHT = dict.fromkeys(THOUGHTS, "Let me see.")
"""A thought, under every name that templates know."""
USUAL = ("<think>", "</think>")
"""Around the thoughts of a model whose template writes none."""


def derive_call_format(template: Template) -> CallFormat:
    """Derive the format of a template's calls. Raises RenderError where it writes none, or none that can be read."""
    single = _turn(template, PROBES[:1])
    if single is None or PROBES[0].name not in single:
        raise RenderError(
            "the chat template writes no tool calls; expected one that does, since tools are on offer; set "
            f"{template.key}=hermes, or give another with {template.key}=FILE"
        )
    plain = _turn(template, ()) or ""
    single = single[len(_common_prefix(plain, single)) :]
    two = _turn(template, PROBES)
    for find in (_find_object, _find_named, _find_tagged):
        try:
            made = find(single, two)
        except ValueError:  # two calls are not written as one is
            continue
        if made is None:
            continue
        specials = tuple(template.tokenizer.get_added_vocab()) if not made[0] else ()
        derived = CallFormat(*made, example=single, specials=specials)
        # Proven: calls that the template writes are read as what they are.
        for calls in (PROBES[: 2 if two else 1], HARD):
            text = _turn(template, calls)
            read = [] if text is None else derived.read(text, TOOLS)[1]
            expected = [(call.name, call.arguments, None) for call in calls]
            if [(call.name, call.arguments, call.error) for call in read] != expected:
                break
        else:
            return replace(derived, thought=_thought(template, derived))
    raise RenderError(
        f"the chat template writes a tool call as {single.strip()!r:.200}; expected JSON, or tags with a key and a "
        f"value; give another template with {template.key}=FILE"
    )


def _thought(template: Template, call_format: CallFormat) -> Thought:
    """Derive the format of a thought before text, and before a call, or the usual one where the template has none."""
    word = THOUGHT["thinking"]
    answer: Message = {"role": "assistant", "content": "Hello"}
    call: Message = {**answer, "content": "", "tool_calls": [PROBES[0].as_message()]}
    turns = ((answer, "Hello"), (call, call_format.begin.split()[0] if call_format.begin else "{"))
    texts: list[tuple[str, str]] = []
    """The text before a thought, and from its end to the answer."""
    for turn, mark in turns:
        before, thought, after = _row(template, {**turn, **THOUGHT}).partition(word)
        if thought:
            texts.append((before, after.partition(mark)[0]))
    prompt = template.apply(PROBE[:1], TOOLS, "the probe", is_prompt=True).text
    end = reduce(_common_prefix, (after for _, after in texts)).strip() if texts else ""
    if not end:
        return Thought(*USUAL, prompt.rstrip().endswith(USUAL[0]))
    before = texts[0][0]
    begin = before[len(_common_prefix(prompt, before)) :].strip()
    is_open = not begin and before.startswith(prompt)
    return Thought(begin or before.split()[-1], end, is_open)


def _row(template: Template, turn: Message) -> str:
    """The template's text with this turn; empty where it does not take the turn."""
    try:
        return template.apply((*PROBE[:1], turn), TOOLS, "the probe").text
    except RenderError:
        return ""


def _turn(template: Template, calls: Sequence[ToolCall]) -> str | None:
    """The template's text for a turn with these calls, up to its end; None where it does not take the turn."""
    turn: Message = {"role": "assistant", "content": "" if calls else "Hello"}
    if calls:
        turn["tool_calls"] = [call.as_message() for call in calls]
    if (probe := template.probe(turn, TOOLS)) is None:
        return None
    begin = len(_common_prefix(probe.prompt.text, probe.row.text))
    text = probe.row.text[begin : template.spans(probe.row)[probe.end][0]]
    return text if all(call.name in text for call in calls) else None


_Made: TypeAlias = tuple[str, str, Body]


def _find_object(one: str, two: str | None) -> _Made | None:
    call = _object_of(one, PROBES[0])
    if call is None:
        return None
    start, stop, *keys = call
    second = _object_of(two, PROBES[1], one[start:stop]) if two else None
    before, after = one[:start], one[stop:]
    if before.rstrip().endswith("[") and after.lstrip().startswith("]"):
        begin, end = before.rstrip()[:-1], after.lstrip()[1:]
        return begin.strip(), end.strip(), ObjectCall(keys[0], keys[1], is_list=True)
    between = two[two.index(one[start:stop]) + stop - start : second[0]] if two and second else None
    return *_markers(before, after, between), ObjectCall(keys[0], keys[1])


def _objects(text: str, begin: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The JSON objects in a text from ``begin`` on: start, stop, value."""
    for brace in re.compile(r"\{").finditer(text, begin):
        with suppress(ValueError):
            value, stop = read_item(text, brace.start())
            yield brace.start(), stop, value


def _object_of(text: str, call: ToolCall, after: str = "") -> tuple[int, int, str, str] | None:
    """The span of a call's object in a text, and the keys of its name and its arguments."""
    for start, stop, value in _objects(text, text.index(after) + len(after)):
        names = [key for key, item in value.items() if item == call.name]
        written = [call.arguments, json.dumps(call.arguments)]
        arguments = [key for key, item in value.items() if item in written]
        if names and arguments:
            return start, stop, names[0], arguments[0]
    return None


def _find_named(one: str, two: str | None) -> _Made | None:
    first, second = PROBES
    span = _named_of(one, first)
    if span is None:
        return None
    start, opening, stop = span
    between = one[start + len(first.name) : opening].strip()
    pattern = r"([A-Za-z0-9]+)\s*".join(loose(part) for part in between.split(first.id))
    other = _named_of(two, second) if two else None
    apart = None
    if two and other:
        core = two.index(one[start + len(first.name) : stop])
        apart = two[core + stop - start - len(first.name) : other[0]]
    begin, end = _markers(one[:start], one[stop:], apart)
    return (begin, end, NamedCall(pattern)) if begin else None


def _named_of(text: str, call: ToolCall) -> tuple[int, int, int] | None:
    """The start of the name, and the start and end of the arguments' JSON."""
    start = text.rindex(call.name)
    spans = ((at, stop) for at, stop, value in _objects(text, start) if value == call.arguments)
    return next(((start, at, stop) for at, stop in spans), None)


def _find_tagged(one: str, two: str | None) -> _Made | None:
    first, second = PROBES
    words = [first.name, *(word for pair in first.arguments.items() for word in pair)]
    pattern = "(.*?)".join(re.escape(word) for word in words)
    match = re.search(rf"^(.*?){pattern}(.*)$", one, re.DOTALL)
    if match is None:
        return None
    before, name_key, key_value, value_key, again, rest = match.groups()
    opening = _common_suffix(name_key, value_key)
    closing = value_key[: len(value_key) - len(opening)]
    if key_value != again or not (opening.strip() and key_value.strip() and closing.strip()):
        return None
    if not rest.startswith(closing):
        return None
    after, apart = rest[len(closing) :], None
    if two:
        last = list(first.arguments.values())[-1] + closing
        apart = two[two.index(last) + len(last) : two.index(second.name)]
    begin, end = _markers(before, after, apart)
    return (begin, end, TaggedCall(opening, key_value, closing)) if begin else None


def _markers(before: str, after: str, between: str | None) -> tuple[str, str]:
    """The markers before and after a call. The text between two calls is the end of one and the beginning of the next;
    the text before the first or after the last alone belongs to the turn.
    """
    if between is None:
        return before.strip(), after.strip()
    begin = _common_suffix(before, between)
    end = _common_prefix(after, between[: len(between) - len(begin)])
    return begin.strip(), end.strip()


def _common_prefix(left: str, right: str) -> str:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    return "".join(character for character, _ in pairs)


def _common_suffix(left: str, right: str) -> str:
    return _common_prefix(left[::-1], right[::-1])[::-1]
