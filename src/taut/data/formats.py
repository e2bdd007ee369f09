"""What a row of data is once validated: a conversation, a prompt with its completion, or a
document.

Strict on purpose: an unknown role, an unknown key of a message, empty content or a value of the
wrong kind is a DataError that names file and line; nothing is guessed and nothing is dropped.
Content given as a list of text parts is joined; one that has a picture stays a list of parts
(``media.py``). Tool calls and tools are brought into the one shape that chat templates expect: ``{"type": "function",
"function": {"name", "arguments": object}}``.

Does not know files, columns (``columns.py``) or chat templates (``render.py``), which decide what
order of roles they accept. Imported by the rest of ``taut.data`` and by whoever renders prompts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from taut.data.media import HERE, MEDIA, Finding, read_content
from taut.data.media import images_of as images_of
from taut.data.media import text_of as text_of
from taut.data.strict_json import read_json
from taut.data.wording import did_you_mean as did_you_mean
from taut.data.wording import listed as listed
from taut.data.wording import shown as shown
from taut.errors import DataError

Message: TypeAlias = dict[str, Any]
"""A message as chat templates read it: role, content, and what else it carries; never ``train``. Content is a text, or
a list of parts where it has a picture."""
Tool: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, some of whose assistant turns may be learned."""

    place: str
    messages: tuple[Message, ...]
    learned: tuple[int, ...]
    """Indices of the assistant messages that may be targets."""
    excluded: tuple[int, ...] = ()
    """Indices of those marked train: false, never targets."""
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A text and its continuation; the two are concatenated as they are."""

    place: str
    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Document:
    """Plain text, as for continued pre-training."""

    place: str
    text: str


Row: TypeAlias = Conversation | Completion | Document
RowForm: TypeAlias = Literal["conversation", "completion", "document"]
"""Whether a row goes through the chat template (a conversation) or is plain text."""


def form_of(row: Row) -> RowForm:
    """Which of the three a row is."""
    if isinstance(row, Conversation):
        return "conversation"
    return "completion" if isinstance(row, Completion) else "document"


ROLES = ("system", "user", "assistant", "tool")
KEYS_OF_ROLE = {
    "system": {"name"},
    "user": {"name"},
    "assistant": {"name", "tool_calls", "reasoning_content", "reasoning", "thinking"},
    "tool": {"name", "tool_call_id"},
}
MESSAGE_KEYS = {"role", "content", "train"}.union(*KEYS_OF_ROLE.values())


def read_conversation(
    value: object,
    place: str,
    tools: object = None,
    *,
    ignore: Collection[str] = (),
    first_learned: int = 0,
    column: str = "messages",
    finding: Finding = HERE,
) -> Conversation:
    """Validate a list of messages.

    Assistant turns from ``first_learned`` on may be learned, but for those with train: false. ``finding``: where the
    pictures are that messages name.
    """
    items = parse_if_text(value, f"{place}: {column}")
    if not isinstance(items, list) or not items:
        raise DataError(f"{place}: {column} is {shown(items)}; expected a list of messages")
    messages: list[Message] = []
    learned: list[int] = []
    excluded: list[int] = []
    for index, item in enumerate(items):
        message, train = _read_message(item, f"{place}: {column}[{index}]", ignore, finding)
        messages.append(message)
        if message["role"] == "assistant" and not train:
            excluded.append(index)
        elif message["role"] == "assistant" and index >= first_learned:
            learned.append(index)
    functions = read_tools(tools, place)
    return Conversation(place, tuple(messages), tuple(learned), tuple(excluded), functions)


def read_text(value: object, where: str) -> str:
    """A string that is not blank."""
    if not isinstance(value, str):
        raise DataError(f"{where} is {shown(value)}; expected a string")
    if not value.strip():
        raise DataError(f"{where} is empty; expected text; remove the row or fill it in")
    return value


def read_list(value: object, where: str) -> list[Any]:
    """A list, or its JSON."""
    items = parse_if_text(value, where)
    if not isinstance(items, list):
        raise DataError(f"{where} is {shown(items)}; expected a list")
    return items


def read_number(value: object, where: str) -> float:
    """A finite number, or its text as CSV files have it."""
    found = parse_if_text(value, where)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise DataError(f"{where} is {shown(value)}; expected a number")
    if not abs(found) <= sys.float_info.max:
        raise DataError(f"{where} is {shown(value)}; expected a finite number")
    return float(found)


def read_label(value: object, where: str) -> float:
    """True or false, or their text as CSV files have it."""
    texts = {"true": True, "false": False}
    found = texts.get(value.strip().lower()) if isinstance(value, str) else value
    if not isinstance(found, bool):
        raise DataError(f"{where} is {shown(value)}; expected true (a good answer) or false")
    return float(found)


def read_fraction(value: object, where: str) -> float:
    """True, false, or how much of it is true."""
    number = float(value) if isinstance(value, bool) else read_number(value, where)
    if not 0 <= number <= 1:
        raise DataError(f"{where} is {shown(value)}; expected true, false or a number from 0 to 1")
    return number


def read_tools(value: object, place: str) -> tuple[Tool, ...]:
    """The functions on offer, each wrapped as ``{"type": "function", "function": {...}}``."""
    if value is None or value == "":
        return ()
    items = parse_if_text(value, f"{place}: tools")
    if not isinstance(items, list):
        raise DataError(
            f"{place}: tools is {shown(items)}; expected a list of function descriptions"
        )
    require_json(items, f"{place}: tools")
    return tuple(_read_function(item, f"{place}: tools[{i}]") for i, item in enumerate(items))


def parse_if_text(value: object, where: str) -> object:
    """JSON held in a string (as CSV files have it) is parsed; all else is returned as it is."""
    if not isinstance(value, str):
        return value
    try:
        return read_json(value)
    except ValueError as error:
        raise DataError(
            f"{where} is text but not JSON ({error}); expected a list or its JSON"
        ) from None


def require_json(value: object, where: str) -> None:
    """That templates can write it as JSON: Arrow also has NaN, bytes and times."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{where} is no JSON ({error}); expected what JSON can hold") from None


def _read_message(
    item: object, where: str, ignore: Collection[str], finding: Finding
) -> tuple[Message, bool]:
    if not isinstance(item, dict):
        raise DataError(f"{where} is {shown(item)}; expected an object with role and content")
    given = {key: value for key, value in item.items() if value is not None and key not in ignore}
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        hint = did_you_mean(role, ROLES) if isinstance(role, str) else ""
        found = shown(role) if "role" in given else "missing"
        raise DataError(f"{where}.role is {found}; expected system, user, assistant or tool{hint}")
    _check_keys(given, role, where)
    content = read_content(given.get("content"), where, role, finding, ignore)
    message: Message = {"role": role, "content": content}
    for key in sorted(KEYS_OF_ROLE[role] & given.keys()):
        is_calls = key == "tool_calls"
        message[key] = _read_calls(given[key], where) if is_calls else given[key]
        if not is_calls and not isinstance(given[key], str):
            raise DataError(f"{where}.{key} is {shown(given[key])}; expected a string")
    if message.get("tool_calls") == []:
        del message["tool_calls"]
    is_empty = isinstance(content, str) and not content.strip()
    if is_empty and role != "tool" and "tool_calls" not in message:
        raise DataError(
            f"{where}.content is empty; expected text; remove the message or fill it in"
        )
    return message, _read_train(given, role, where)


def _check_keys(given: Message, role: str, where: str) -> None:
    for key in given:
        if key in MEDIA:
            raise DataError(
                f"{where} has {key}; expected pictures as parts of its content, or in a column of the "
                "row; sound is not supported"
            )
        if key in ("weight", "loss_weight", "loss", "mask"):
            raise DataError(
                f"{where} has {key!r}; expected train; write train: false for a turn not to be "
                "learned"
            )
        if key not in MESSAGE_KEYS:
            hint = did_you_mean(key, MESSAGE_KEYS) or "; remove it, or name it in data.ignore_keys"
            raise DataError(
                f"{where} has the unknown key {shown(key)}; expected role, content, train{hint}"
            )
        if key not in KEYS_OF_ROLE[role] and key not in ("role", "content", "train"):
            owner = next(name for name in ROLES if key in KEYS_OF_ROLE[name])
            raise DataError(
                f"{where} has {key} on a {role} message; expected it on {owner} messages only"
            )


def _read_train(given: Message, role: str, where: str) -> bool:
    train = given.get("train", True)
    if not isinstance(train, bool):
        raise DataError(f"{where}.train is {shown(train)}; expected true or false")
    if "train" in given and train and role != "assistant":
        raise DataError(
            f"{where}.train is true on a {role} message; expected it on assistant messages only"
        )
    return train


def _read_calls(value: object, where: str) -> list[Tool]:
    items = parse_if_text(value, f"{where}.tool_calls")
    if not isinstance(items, list):
        raise DataError(f"{where}.tool_calls is {shown(items)}; expected a list of calls")
    return [read_call(item, f"{where}.tool_calls[{i}]") for i, item in enumerate(items)]


def read_call(item: object, where: str) -> Tool:
    """One tool call; arguments given as JSON are parsed, because templates write them as JSON."""
    call = _read_function(item, where)
    function = call["function"]
    arguments = function.get("arguments", {})
    if arguments is None or arguments == "":
        arguments = {}
    arguments = parse_if_text(arguments, f"{where}.arguments")
    if not isinstance(arguments, dict):
        raise DataError(f"{where}.arguments is {shown(arguments)}; expected an object or its JSON")
    require_json(call, where)
    return {**call, "function": {**function, "arguments": arguments}}


def _read_function(item: object, where: str) -> Tool:
    if not isinstance(item, dict):
        raise DataError(f"{where} is {shown(item)}; expected an object with the name of a function")
    if item.get("type", "function") != "function":
        raise DataError(f"{where}.type is {shown(item['type'])}; expected function")
    wrapped = (
        item if "function" in item else {"function": {k: v for k, v in item.items() if k != "type"}}
    )
    function = wrapped["function"]
    if not isinstance(function, dict):
        raise DataError(f"{where}.function is {shown(function)}; expected an object with a name")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise DataError(f"{where}.name is {shown(name)}; expected the name of a function")
    return {**wrapped, "type": "function", "function": function}
