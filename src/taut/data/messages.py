"""Pictures and videos in the content of messages, in the shapes that data have them, brought into one.

    {"type": "text", "text": str}       {"type": "image", "image": ImageRef}

A picture is a part of the content: ``{"type": "image", "image": VALUE}``, with ``path``, ``url``, ``bytes``, ``base64``
or ``source`` in place of ``image``, or ``{"type": "image_url", "image_url": {"url": VALUE}}``. A VALUE is a path, an
address, a data URL, bytes, a PIL picture, or an object of these; text under ``bytes``, ``base64``, ``data`` is base64.

A video (``{"type": "video", "video": FILE or list of VALUES}``) becomes its frames, each a picture with its time in a
text before it, as Qwen3-VL writes it: ``<1.5 seconds>``. A list of frames has ``fps`` or ``timestamps`` beside it.

Pictures are for the model to read: an assistant's turn has none. Sound is refused. A value that can be no picture is a
PictureError, which may be left out; a shape that is none of these is a DataError. Nothing is opened but videos: a file
that is not there keeps its name for whoever opens it. Does not know columns (``placing.py``). Imported by the rest of
``taut.data``.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias
from urllib.parse import unquote

from PIL import Image

from taut.config import home_path
from taut.data.json_io import did_you_mean, listed, read_json, shown
from taut.errors import DataError, PictureError
from taut.vision.content import Frame, ImageRef, ImagesConfig, frames_of, png_of

Part: TypeAlias = dict[str, Any]

PICTURES = ("images", "image", "image_url")
VIDEOS = ("videos", "video", "video_url")
SOUNDS = ("audio", "audios", "input_audio", "audio_url")
MEDIA = (*PICTURES, *VIDEOS, *SOUNDS)
"""Columns, keys of messages and types of parts that are not text."""
ENCODED = ("bytes", "base64", "data")
"""Keys whose text is base64."""
VALUES = ("image", "image_url", "video", "video_url", "path", "url", "source", *ENCODED)
"""Keys that hold a picture or a video."""
NOTES = ("type", "text", "index", "media_type", "mime_type")
"""What else a part may have: nothing of it is needed once the picture is found."""
TIMES = ("fps", "timestamps")


class Finding(NamedTuple):
    """How pictures and the frames of videos are found."""

    folder: str = ""
    """Where relative paths are tried first, before the working directory."""
    fps: float = 2.0
    """Frames a second that are taken of a video's file."""
    max_frames: int = 64
    """Frames a video may have; of a file so many are taken, evenly spread."""
    prefix: str = "data."
    """What stands before settings in the configuration, for messages."""
    images: ImagesConfig = ImagesConfig()
    """Limits of videos, and of pictures in memory."""


HERE = Finding()
"""Relative to the working directory."""


def read_content(
    content: object, where: str, role: str, finding: Finding, ignored: Collection[str]
) -> str | list[Part]:
    """The content of a message: a text, or the parts of one that has a picture."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise DataError(
            f"{where}.content is {shown(content)}; expected a string or a list of text parts and pictures"
        )
    parts: list[Part] = []
    try:
        for index, part in enumerate(content):
            parts += _read_part(part, f"{where}.content[{index}]", finding, ignored)
    except RecursionError:
        raise DataError(
            f"{where}.content is nested too deeply; expected a list of text parts and pictures; correct the row"
        ) from None
    if all(part["type"] == "text" for part in parts):
        return text_of(parts)
    if role == "assistant":
        raise DataError(
            f"{where} is an assistant message with a picture; expected text: the model reads pictures and does not "
            "write them; put it into a user, tool or system message"
        )
    return parts


def text_of(content: str | Sequence[Part]) -> str:
    """What a content says, without its pictures."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def images_of(messages: Sequence[Mapping[str, Any]]) -> list[ImageRef]:
    """The pictures of messages, in order of appearance."""
    lists = [it["content"] for it in messages if isinstance(it.get("content"), list)]
    return [part["image"] for parts in lists for part in parts if part["type"] == "image"]


def named(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages for people to read: a picture is its name, in brackets."""
    return [{**it, "content": _named(it.get("content"))} for it in messages]


def _named(content: object) -> object:
    if not isinstance(content, list):
        return content
    return "".join(
        it["text"] if it["type"] == "text" else f"[picture {it['image'].name}]" for it in content
    )


def has_value(part: Mapping[str, Any]) -> bool:
    """Whether a part has its picture with it. Arrow has an empty object where there is none."""
    return any(part.get(name) is not None and part[name] != {} for name in VALUES)


def _read_part(part: object, where: str, finding: Finding, ignored: Collection[str]) -> list[Part]:
    if isinstance(part, str):
        return [{"type": "text", "text": part}]
    if not isinstance(part, dict):
        raise DataError(f'{where} is {shown(part)}; expected {{"type": "text", "text": ...}}')
    kind, text = part.get("type"), part.get("text")
    if kind == "text" and isinstance(text, str):
        return [{"type": "text", "text": text}]
    given = {key: it for key, it in part.items() if key in VALUES or key not in ignored}
    if kind in PICTURES:
        return [{"type": "image", "image": _read_object(given, where, finding)}]
    if kind in VIDEOS:
        return [it for frame in _frames(given, where, finding) for it in _frame_parts(frame)]
    if kind in SOUNDS:
        raise DataError(
            f"{where} is of type {kind}; expected text or pictures: sound is not supported; remove the row"
        )
    raise DataError(
        f'{where} is {shown(part)}; expected {{"type": "text", "text": ...}} or {{"type": "image", "image": ...}}'
    )


def _read_object(given: Mapping[str, Any], where: str, finding: Finding) -> ImageRef:
    """The picture in an object that has one of VALUES; of bytes and the path they are from, the bytes."""
    unknown = [key for key, it in given.items() if it is not None and key not in (*VALUES, *NOTES)]
    if unknown:
        raise DataError(
            f"{where} has {listed(unknown)} beside a picture; expected one of {', '.join(VALUES)}; what holds for all "
            f"pictures is set in {finding.prefix}images; remove it, or name it in {finding.prefix}ignore_keys"
        )
    found = [name for name in VALUES if has_value({name: given.get(name)})]
    if set(found) == {"bytes", "path"}:
        found = ["bytes"]
    if len(found) != 1:
        has = " and ".join(found) if found else "no picture"
        raise DataError(
            f"{where} has {has}; expected one of {', '.join(VALUES)}; a part without a picture takes the next one of "
            "the row's column images"
        )
    value = given[found[0]]
    if found[0] in ENCODED and isinstance(value, str):
        return ImageRef("bytes", _decoded(value, where))
    return _read_value(value, where, finding)


def _read_value(value: object, where: str, finding: Finding) -> ImageRef:
    """The reference to a picture, or to the file of a video."""
    if isinstance(value, ImageRef):
        return value
    if isinstance(value, dict):
        return _read_object(value, where, finding)
    if isinstance(value, Image.Image):
        limit = finding.images.limit_pixels
        if value.width * value.height > limit:  # it may not be decoded yet
            raise PictureError(
                f"{where} is a picture of {value.width:,} x {value.height:,} pixels; expected at most {limit:,}; "
                f"make it smaller or raise {finding.prefix}images.limit_pixels"
            )
        try:
            return png_of(value)
        except (OSError, ValueError, SyntaxError) as error:
            raise PictureError(
                f"{where} is a picture that cannot be read ({error}); expected a whole one; remove the row"
            ) from None
    if isinstance(value, bytes | bytearray):
        return ImageRef("bytes", _filled(bytes(value), where))
    if isinstance(value, str | Path) and str(value):
        return _read_address(str(value), where, finding)
    raise DataError(
        f"{where} is {shown(value)}; expected a picture: a path, an address, a data URL, bytes or a PIL picture"
    )


def _read_address(value: str, where: str, finding: Finding) -> ImageRef:
    if value[:8].lower().startswith(("http://", "https://")):
        return ImageRef("url", value)
    if value.startswith("data:"):
        head, _, raw = value.partition(",")
        if not head.endswith(";base64"):
            raise PictureError(f"{where} is the data URL {shown(value)}; expected one in base64")
        return ImageRef("bytes", _decoded(raw, where))
    if value.startswith("file:"):
        value = unquote(re.sub(r"^file:(//(localhost(?=/))?)?", "", value))
    elif re.match(r"\w+://", value):
        raise PictureError(
            f"{where} is at {ImageRef('url', value).name}; expected a path, or an address of http or https; fetch it "
            "first"
        )
    try:
        path = home_path(value)
        is_elsewhere = not (finding.folder / path).exists() and path.exists()
    except (OSError, ValueError, RuntimeError):  # too long, with a zero byte, or of an unknown user
        raise PictureError(
            f"{where} is {shown(value)}, which can be no path; expected a path, an address or a data URL; base64 alone "
            'goes under its own key: {"type": "image", "base64": ...}'
        ) from None
    return ImageRef("file", str(path if is_elsewhere else finding.folder / path))


def _decoded(text: str, where: str) -> bytes:
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        raw = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise PictureError(f"{where} is no base64 ({error}); expected an encoded picture") from None
    return _filled(raw, where)


def _filled(raw: bytes, where: str) -> bytes:
    if not raw:
        raise PictureError(
            f"{where} is empty; expected an encoded picture; remove it or fill it in"
        )
    return raw


def _frames(given: Mapping[str, Any], where: str, finding: Finding) -> Sequence[Frame]:
    """The frames of a video: those of a file, or those that are listed."""
    inner = given.get("video")
    if isinstance(inner, dict):  # as a column may have it: the frames, and when they are
        given = {**{key: it for key, it in given.items() if key != "video"}, **inner}
    times = {key: given[key] for key in TIMES if given.get(key) is not None}
    rest = {key: it for key, it in given.items() if key not in TIMES}
    value = rest.get("video")
    if isinstance(value, list | tuple):
        _read_object({**rest, "video": b" "}, where, finding)  # there is nothing beside them
        return _listed_frames(value, times, where, finding)
    if "timestamps" in times:
        raise DataError(
            f"{where} has timestamps beside a file; expected them beside a list of frames; remove them"
        )
    fps = _number(times.get("fps", finding.fps), f"{where}.fps")
    film = _read_object(rest, where, finding)
    try:
        return frames_of(film, fps, finding.max_frames, where, finding.images)
    except PictureError as error:
        raise PictureError(str(error).replace("data.images.", f"{finding.prefix}images.")) from None


def _listed_frames(
    values: Sequence[Any], times: Mapping[str, Any], where: str, finding: Finding
) -> list[Frame]:
    num = len(values)
    if not 0 < num <= finding.max_frames:
        raise DataError(
            f"{where} has {num} frames; expected 1 to {finding.max_frames}; give fewer, or raise "
            f"{finding.prefix}images.max_frames"
        )
    if len(times) != 1:
        raise DataError(
            f"{where} has {' and '.join(times) or 'neither fps nor timestamps'}; expected one of them, which say when "
            "each frame is shown"
        )
    if "fps" in times:
        rate = _number(times["fps"], f"{where}.fps")
        seconds = [index / rate for index in range(num)]
    else:
        marks = times["timestamps"]
        if not isinstance(marks, list | tuple) or len(marks) != num:
            raise DataError(
                f"{where}.timestamps is {shown(marks)}; expected a list of the seconds of {num} frames"
            )
        seconds = [_number(it, f"{where}.timestamps[{i}]", least=0.0) for i, it in enumerate(marks)]
    images = [_read_value(it, f"{where}.video[{i}]", finding) for i, it in enumerate(values)]
    return [Frame(*pair) for pair in zip(seconds, images, strict=True)]


def _number(value: object, where: str, least: float = 1e-3) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value < math.inf:  # type: ignore[operator]
        raise DataError(f"{where} is {shown(value)}; expected a number of at least {least:g}")
    return float(value)  # type: ignore[arg-type]


def _frame_parts(frame: Frame) -> list[Part]:
    return [
        {"type": "text", "text": f"<{frame.seconds:.1f} seconds>"},
        {"type": "image", "image": frame.image},
    ]


# --------------------------------------------------------------------------------------------------
# What a row of data is once validated: a conversation, a prompt with its completion, or a
# document.
#
# Strict on purpose: an unknown role, an unknown key of a message, empty content or a value of the wrong kind is a
# DataError that names file and line; nothing is guessed and nothing is dropped. Content given as a list of text parts
# is joined; one that has a picture stays a list of parts (``media.py``). Tool calls and tools are brought into the
# one shape that chat templates expect: ``{"type": "function", "function": {"name", "arguments": object}}``.
#
# Does not know files, columns (``columns.py``) or chat templates (``render.py``), which decide what
# order of roles they accept. Imported by the rest of ``taut.data`` and by whoever renders prompts.

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
