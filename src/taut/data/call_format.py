"""How a chat template writes calls of tools: found by rendering calls that are known, not from a table of models.

What stands between two calls of one turn is the end of the first and the beginning of the second; what is before the
first or after the last alone belongs to the turn. What was found is proven: calls rendered and read again are equal, or
the template is refused, as is one that writes no calls. How thoughts are written, in which nothing is a call, is found
in the same way.

May import errors, formats, strict_json, template and tool_calls. Imported by rollout.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import takewhile
from typing import TypeAlias

from taut.data.formats import Message, Tool
from taut.data.strict_json import read_item
from taut.data.template import PROBE, Template, common_length
from taut.data.tool_calls import (
    Body,
    CallFormat,
    NamedCall,
    ObjectCall,
    TaggedCall,
    Thought,
    ToolCall,
    loose,
)
from taut.errors import RenderError


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
THOUGHT = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "Let me see.")
"""A thought, under every name that templates know."""
USUAL = ("<think>", "</think>")
"""Around the thoughts of a template that takes them out, and writes none."""


def derive_call_format(template: Template) -> CallFormat:
    """How this template writes calls. Raises RenderError where it writes none, or in a way that cannot be read."""
    one = _turn(template, PROBES[:1])
    if one is None or PROBES[0].name not in one:
        raise RenderError(
            "the chat template writes no tool calls; expected one that does, since tools are on offer; give another "
            f"with {template.key}=FILE"
        )
    plain = _turn(template, ()) or ""
    one = one[len(_common_prefix(plain, one)) :]
    two = _turn(template, PROBES)
    for find in (_find_object, _find_named, _find_tagged):
        try:
            made = find(one, two)
        except ValueError:  # two calls are not written as one is
            continue
        if made is None:
            continue
        specials = tuple(template.tokenizer.get_added_vocab()) if not made[0] else ()
        found = CallFormat(*made, example=one, specials=specials)
        if _is_proven(found, template, num_calls=2 if two else 1):
            return replace(found, thought=_thought(template, found))
    raise RenderError(
        f"the chat template writes a tool call as {one.strip()!r:.200}, which is in none of the forms that are read "
        f"(JSON, or tags with a key and a value); expected one of them; give another template with {template.key}=FILE"
    )


def _is_proven(found: CallFormat, template: Template, num_calls: int) -> bool:
    """Whether calls that the template writes are read as what they are."""
    for calls in (PROBES[:num_calls], HARD):
        text = _turn(template, calls)
        if text is None:
            return False
        _, read = found.read(text, TOOLS)
        if [(call.name, call.arguments, call.error) for call in read] != [
            (call.name, call.arguments, None) for call in calls
        ]:
            return False
    return True


def _thought(template: Template, found: CallFormat) -> Thought | None:
    """How the template writes a thought before what is said, and before a call; None where it knows none."""
    word = THOUGHT["thinking"]
    said: Message = {"role": "assistant", "content": "Hello"}
    asks: Message = {**said, "content": "", "tool_calls": [PROBES[0].as_message()]}
    turns = ((said, "Hello"), (asks, found.begin.split()[0] if found.begin else "{"))
    split = [(*_row(template, {**turn, **THOUGHT}).partition(word), mark) for turn, mark in turns]
    shown = [
        (before, after.partition(mark)[0]) for before, is_there, after, mark in split if is_there
    ]
    prompt = template.apply(PROBE[:1], TOOLS, "the probe", is_prompt=True).text
    if not shown:
        row = _row(template, {**said, "content": f"{word.join(USUAL)}Hello"})
        is_taken_out = "Hello" in row and word not in row
        return Thought(*USUAL, prompt.rstrip().endswith(USUAL[0])) if is_taken_out else None
    before, end = shown[0][0], reduce(_common_prefix, (after for _, after in shown)).strip()
    own = before[len(_common_prefix(prompt, before)) :].strip()
    is_open = not own and before.startswith(prompt)
    return Thought(own or before.split()[-1], end, is_open) if end else None


def _row(template: Template, turn: Message) -> str:
    """What the template writes with this turn; empty where it does not take it."""
    try:
        return template.apply((*PROBE[:1], turn), TOOLS, "the probe").text
    except RenderError:
        return ""


def _turn(template: Template, calls: Sequence[ToolCall]) -> str | None:
    """What the template writes for a turn with these calls, up to its end; None where it does not take it."""
    turn: Message = {"role": "assistant", "content": "" if calls else "Hello"}
    if calls:
        turn["tool_calls"] = [call.as_message() for call in calls]
    try:
        prompt = template.apply(PROBE[:1], TOOLS, "the probe", is_prompt=True)
        row = template.apply((*PROBE[:1], turn), TOOLS, "the probe")
        ids_of = template.encode([prompt, row])
        start = common_length(ids_of[prompt], ids_of[row])
        end = template.end_of_turn(ids_of[row], start, "the probe")
    except RenderError:
        return None
    begin = len(_common_prefix(prompt.text, row.text))
    text = row.text[begin : template.spans(row)[end][0]]
    return text if all(call.name in text for call in calls) else None


_Made: TypeAlias = tuple[str, str, Body]


def _find_object(one: str, two: str | None) -> _Made | None:
    found = _object_of(one, PROBES[0])
    if found is None:
        return None
    start, stop, *keys = found
    second = _object_of(two, PROBES[1], one[start:stop]) if two else None
    before, after = one[:start], one[stop:]
    if before.rstrip().endswith("[") and after.lstrip().startswith("]"):
        begin, end = before.rstrip()[:-1], after.lstrip()[1:]
        return begin.strip(), end.strip(), ObjectCall(keys[0], keys[1], is_list=True)
    between = two[two.index(one[start:stop]) + stop - start : second[0]] if two and second else None
    return *_markers(before, after, between), ObjectCall(keys[0], keys[1])


def _object_of(text: str, call: ToolCall, after: str = "") -> tuple[int, int, str, str] | None:
    """Where the object of a call lies in a text, and the keys of its name and its arguments."""
    begin = text.index(after) + len(after)
    for start in (found.start() for found in re.finditer(r"\{", text) if found.start() >= begin):
        try:
            value, stop = read_item(text, start)
        except ValueError:
            continue
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
    """Where the name begins, and where the JSON of the arguments begins and ends."""
    start = text.rfind(call.name)
    for found in re.finditer(r"\{", text[start:]):
        try:
            value, stop = read_item(text, start + found.start())
        except ValueError:
            continue
        if value == call.arguments:
            return start, start + found.start(), stop
    return None


def _find_tagged(one: str, two: str | None) -> _Made | None:
    first, second = PROBES
    words = [first.name, *(word for pair in first.arguments.items() for word in pair)]
    pattern = "(.*?)".join(re.escape(word) for word in words)
    found = re.search(rf"^(.*?){pattern}(.*)$", one, re.DOTALL)
    if found is None:
        return None
    before, name_key, key_value, value_key, again, rest = found.groups()
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
    """What begins and what ends a call. What stands between two calls is the end of one and the beginning of another;
    what is before the first or after the last alone belongs to the turn."""
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
