"""Validated rows: a conversation, a prompt with its completion, or a document; and their messages, images included.

Strict on purpose: an unknown role, an unknown key of a message, empty content or a value of the wrong type is a
DataError that names file and line; nothing is guessed and nothing is dropped. Tool calls and tools become the one shape
that chat templates expect: ``{"type": "function", "function": {"name", "arguments": object}}``.

A developer message is a system message, as it is for gpt-oss, whose template writes both alike. A thought that is empty
is left out, and one that is a part of the content (``{"type": "thinking"}``, as Mistral has it) is reasoning_content.

Nulls that Arrow and pandas write for the keys of other rows count as absent: in a tool's description all that a schema
cannot have; in arguments those of keys that the tool does not declare, or whose schema has no null (``_arguments``).
Arguments given as JSON text are left as they are.

Content given as a list of text parts is joined. Content with an image stays a list of parts:

    {"type": "text", "text": str}       {"type": "image", "image": ImageRef}

In the data, an image is a part ``{"type": "image", "image": VALUE}``, with ``path``, ``url``, ``bytes``, ``base64`` or
``source`` in place of ``image``, or ``{"type": "image_url", "image_url": {"url": VALUE}}``. A VALUE is a path, an
address, a data URL, bytes, a PIL image, or an object of these; text under ``bytes``, ``base64``, ``data`` is base64.

A video (``{"type": "video", "video": FILE or list of VALUES}``) becomes its frames, each an image with its time in a
text before it, as Qwen3-VL writes it: ``<1.5 seconds>``. A list of frames needs ``fps`` or ``timestamps`` next to it.

Images may also be in columns of the row (``place_media``): ``images``, ``image`` or ``image_url`` (``videos``,
``video``, ``video_url``) fill the places that the messages have for them, which are parts ``{"type": "image"}`` without
an image (TRL), or ``<image>`` in a text (llava, LLaMA-Factory, ms-swift).

Assistant turns have no images, since the model reads and does not write them. Audio is refused. A value that cannot be
an image is a PictureError, whose row may be left out; a shape that is none of these is a DataError. No image file is
opened here, only videos. Does not know formats (``schema.py``), nor which order of roles a chat template accepts
(``chat_template.py``).
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar
from urllib.parse import unquote

from PIL import Image

from taut.config import home_path
from taut.data.read.json_io import did_you_mean, listed, read_json, shown
from taut.errors import DataError, EmptyError, PictureError
from taut.vision.content import Frame, ImageRef, frames_of, png_of
from taut.vision.settings import ImagesConfig

T = TypeVar("T")

# -- rows

Message: TypeAlias = dict[str, Any]
"""A message as chat templates read it: role, content and optional keys; never ``train``. Content is a text, or a list
of parts where it has an image."""
Part: TypeAlias = dict[str, Any]
"""A part of a message's content: text or an image."""
Tool: TypeAlias = dict[str, Any]
"""A function or a call of one, wrapped as ``{"type": "function", "function": {...}}``."""


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
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """Values of the chat template's own variables for this row, in place of the template's defaults."""
    weights: Mapping[int, float] = field(default_factory=dict)
    """Index of an assistant message -> the weight of its tokens in the loss, where it is not 1."""
    notes: tuple[RowForm, ...] = ()
    """Forms that were read in another way than they are written."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A text and its continuation, which are concatenated."""

    place: str
    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Document:
    """Plain text, as for continued pre-training."""

    place: str
    text: str


Row: TypeAlias = Conversation | Completion | Document
RowForm: TypeAlias = Literal[
    "conversation", "completion", "document", "developer", "nulls", "opening"
]
"""Whether a row goes through the chat template (a conversation) or is plain text; and what of it is read in another way
than it is written: a developer message as a system message, nulls as absent keys, an assistant's opening message as
context."""


FORM_OF: dict[type[Row], RowForm] = {
    Conversation: "conversation",
    Completion: "completion",
    Document: "document",
}


ROLES = ("system", "user", "assistant", "tool")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message under which templates know its thought."""
SPEAKING = ("tool_calls", *THOUGHTS)
"""Keys with which an answer may have no content."""
KEYS_OF_ROLE = {
    "system": {"name"},
    "user": {"name"},
    "assistant": {"name", "tool_calls", *THOUGHTS},
    "tool": {"name", "tool_call_id"},
}
MESSAGE_KEYS = {"role", "content", "train", "weight"}.union(*KEYS_OF_ROLE.values())

PICTURES = ("images", "image", "image_url")
VIDEOS = ("videos", "video", "video_url")
SOUNDS = ("audio", "audios", "input_audio", "audio_url")
MEDIA = (*PICTURES, *VIDEOS, *SOUNDS)
"""Columns, keys of messages and types of parts that are not text."""
ENCODED = ("bytes", "base64", "data")
"""Keys whose text is base64."""
VALUES = ("image", "image_url", "video", "video_url", "path", "url", "source", *ENCODED)
"""Keys that hold an image or a video."""
NOTES = ("type", "text", "index", "media_type", "mime_type")
"""Other keys that a part may have; they are not needed once the image is known."""
TIMES = ("fps", "timestamps")
MARKS = {"<image>": "image", "<video>": "video"}
"""Marks in texts -> the type of part whose place they are."""
_MARK = "|".join(MARKS)
_LEADING = re.compile(rf"(?:(?:{_MARK})\n?)*")
_TRAILING = re.compile(rf"(?:\n?(?:{_MARK}))*\Z")


class MediaOptions(NamedTuple):
    """Options for reading images and the frames of videos."""

    folder: str = ""
    """Folder that relative paths are tried in first, before the working directory."""
    prefix: str = "data."
    """Prefix of the settings in the configuration, for messages."""
    images: ImagesConfig = ImagesConfig()
    """Frames of videos, and the limits of videos and of images in memory."""


DEFAULT_MEDIA = MediaOptions()
"""Paths are relative to the working directory."""


# -- messages


def read_conversation(
    value: object,
    place: str,
    tools: object = None,
    *,
    ignore: Collection[str] = (),
    first_learned: int = 0,
    column: str = "messages",
    media: MediaOptions = DEFAULT_MEDIA,
) -> Conversation:
    """Validate a list of messages.

    Assistant turns from ``first_learned`` on may be learned, except those with train: false. ``ignore``: keys of
    messages that may be present and are not used; ``column``: the name of the list in errors.
    """
    items = value if is_blank(value) else parse_if_text(value, f"{place}: {column}")
    if is_blank(items):
        raise EmptyError(f"{place}: {column} is empty; expected a list of messages")
    if not isinstance(items, list):
        raise DataError(f"{place}: {column} is {shown(items)}; expected a list of messages")
    functions, is_padded = _read_tools(tools, place)
    notes: dict[RowForm, None] = {"nulls": None} if is_padded else {}
    # Arrow gives all messages the keys of each
    is_padded |= any(isinstance(item, dict) and item.get("tool_calls", 0) is None for item in items)
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in functions}
    context = _Context(schemas, is_padded, notes)
    messages: list[Message] = []
    learned: list[int] = []
    excluded: list[int] = []
    weights: dict[int, float] = {}
    for index, item in enumerate(items):
        where = f"{place}: {column}[{index}]"
        message, weight = _read_message(item, where, ignore, media, context)
        messages.append(message)
        role, is_learned = message["role"], weight > 0 and index >= first_learned
        if is_blank(message["content"]) and (
            role == "user"
            or (role == "assistant" and is_learned and message.keys().isdisjoint(SPEAKING))
        ):
            raise EmptyError(f"{where}.content is empty; expected text")
        if role == "assistant" and not weight:
            excluded.append(index)
        elif role == "assistant" and is_learned and not index and len(items) > 1:
            notes["opening"] = None  # it has no prompt
        elif role == "assistant" and is_learned:
            learned.append(index)
            if weight != 1:
                weights[index] = weight
    return Conversation(
        place,
        tuple(messages),
        tuple(learned),
        tuple(excluded),
        functions,
        weights=weights,
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class _Context:
    """Properties of a row with which its messages are read, and its notes."""

    schemas: Mapping[str, Any] = field(default_factory=dict)
    """Function -> the schema of its arguments."""
    is_padded: bool = False
    """Whether the row has nulls that only a table writes."""
    notes: dict[RowForm, None] = field(default_factory=dict)


def _read_message(
    item: object, where: str, ignore: Collection[str], media: MediaOptions, context: _Context
) -> tuple[Message, float]:
    """The message as templates read it, and its weight in the loss: 0 if it is not learned."""
    item = typed(item, dict, where, "an object with role and content")
    item = {key: value for key, value in item.items() if value is not None and key not in ignore}
    role = item.get("role")
    if role == "developer":
        role, context.notes["developer"] = "system", None
    if not isinstance(role, str) or role not in ROLES:
        hint = did_you_mean(role, ROLES) if isinstance(role, str) else ""
        value = shown(role) if "role" in item else "missing"
        raise DataError(f"{where}.role is {value}; expected system, user, assistant or tool{hint}")
    for key in item:
        if key in ("role", "content", "train", "weight") or key in KEYS_OF_ROLE[role]:
            continue
        if key in MEDIA:
            fault = f"{key}; expected pictures as parts of its content, or in a column; sound is not supported"
        elif key in ("loss_weight", "loss_scale", "loss", "mask"):
            fault = (
                f"{key!r}; expected train or weight; write train: false for a turn not to be learned, or its weight in "
                "the loss"
            )
        elif key not in MESSAGE_KEYS:
            hint = did_you_mean(key, MESSAGE_KEYS) or "; remove it, or name it in data.ignore_keys"
            fault = f"the unknown key {shown(key)}; expected role, content, train{hint}"
        else:
            owner = next(name for name in ROLES if key in KEYS_OF_ROLE[name])
            fault = f"{key} on a {role} message; expected it on {owner} messages only"
        raise DataError(f"{where} has {fault}")
    # Content, thoughts and calls.
    if role == "assistant" and isinstance(parts := item.get("content"), list):
        # Thoughts that are parts of the content are reasoning_content.
        thoughts = [it for it in parts if isinstance(it, dict) and it.get("type") == "thinking"]
        number = len(thoughts)
        if thoughts and (parts[:number] != thoughts or any(item.get(key) for key in THOUGHTS)):
            raise DataError(
                f"{where}.content has a thought after its text, or next to another; expected it first; correct the row"
            )
        given = [
            text_of(read_content(it.get("thinking"), where, "thought", DEFAULT_MEDIA, ()))
            for it in thoughts
        ]
        item |= {"reasoning_content": "\n".join(given)} if thoughts else {}
        item["content"] = parts[number:]
    content = read_content(item.get("content"), where, role, media, ignore)
    message: Message = {"role": role, "content": content}
    for key in sorted(KEYS_OF_ROLE[role] & item.keys()):
        if key == "tool_calls":
            calls = read_list(item[key], f"{where}.tool_calls", "a list of calls")
            if calls:
                message[key] = [
                    read_call(call, f"{where}.tool_calls[{i}]", context)
                    for i, call in enumerate(calls)
                ]
            continue
        text = typed(item[key], str, f"{where}.{key}", "a string")
        if key not in THOUGHTS or text.strip():  # an empty thought is no thought
            message[key] = text
    # Its weight in the loss.
    train = typed(item.get("train", True), bool, f"{where}.train", "true or false")
    has_weight = "weight" in item
    weight = read_number(item["weight"], f"{where}.weight") if has_weight else float(train)
    fault = ""
    if "train" in item and train and role != "assistant":
        fault = f".train is true on a {role} message; expected it on assistant messages only"
    elif has_weight and (weight < 0 or (weight and role != "assistant")):
        fault = f".weight is {weight:g} on a {role} message; expected 0 or more, on assistant messages; correct it"
    elif has_weight and "train" in item and train != bool(weight):
        fault = f" has train: {str(train).lower()} and weight {weight:g}; expected one of the two; remove the other"
    if fault:
        raise DataError(f"{where}{fault}")
    return message, weight


def read_tools(value: object, place: str) -> tuple[Tool, ...]:
    """The available functions, each wrapped as ``{"type": "function", "function": {...}}``."""
    return _read_tools(value, place)[0]


def _read_tools(value: object, place: str) -> tuple[tuple[Tool, ...], bool]:
    """The available functions, and whether they had nulls that only a table writes."""
    if value is None or value == "":
        return (), False
    items = read_list(value, f"{place}: tools", "a list of function descriptions")
    items = [parse_if_text(item, f"{place}: tools[{i}]") for i, item in enumerate(items)]
    is_padded = False
    if "null" in _require_json(items, f"{place}: tools"):
        plain = _as_schema(items, is_padded=False)
        if is_padded := plain != items:
            items = _as_schema(items, is_padded=True)
    tools = (_read_function(item, f"{place}: tools[{i}]") for i, item in enumerate(items))
    return tuple(tools), is_padded


def read_call(item: object, where: str, context: _Context | None = None) -> Tool:
    """One tool call; arguments given as JSON are parsed, because templates write them as JSON."""
    call = _read_function(item, where)
    function = call["function"]
    if isinstance(function.get("parameters"), dict | str) and not function.get("arguments"):
        function = {**function, "arguments": function["parameters"]}
        del function["parameters"]
    given = function.get("arguments", {})
    if given is None or given == "":
        given = {}
    arguments = parse_if_text(given, f"{where}.arguments")
    arguments = typed(arguments, dict, f"{where}.arguments", "an object or its JSON")
    if "null" in _require_json(call, where):
        call = {key: value for key, value in call.items() if value is not None}
        function = {key: value for key, value in function.items() if value is not None}
        if context is not None and arguments is given:  # a table fills up objects, not text
            schema = context.schemas.get(function["name"])
            arguments = _arguments(given, schema, context.is_padded)
            if arguments != given:
                context.notes["nulls"] = None
    return {**call, "function": {**function, "arguments": arguments}}


NAMES = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords of a schema whose keys are names."""
MAY_BE_NULL = ("default", "const", "example")
AS_THEY_ARE = ("default", "const", "enum", "example", "examples")
"""Keywords of a schema whose value may be null, and that hold values."""


def _as_schema(value: Any, is_padded: bool, keyword: str = "") -> Any:
    """A tool's description without the keys that are null: no schema has them. ``is_padded``: other keys were null, so
    that a default is one only where the schema allows null.
    """
    if isinstance(value, list):
        return [_as_schema(item, is_padded) for item in value]
    if not isinstance(value, dict) or keyword in AS_THEY_ARE:
        return value
    keeps_null = () if keyword in NAMES or (is_padded and not allows_null(value)) else MAY_BE_NULL
    return {
        key: _as_schema(item, is_padded, "" if keyword in NAMES else key)
        for key, item in value.items()
        if item is not None or key in keeps_null
    }


def allows_null(schema: Any) -> bool:
    """Whether a value of this JSON schema may be null; one that says nothing of its values allows all."""
    if not isinstance(schema, dict):
        return True
    kinds, values = schema.get("type"), schema.get("enum")
    options = [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    if kinds is None and values is None and not options:
        return True
    named = kinds if isinstance(kinds, list) else [kinds]
    is_named = "null" in named or schema.get("nullable") is True or None in (values or ())
    return is_named or any(map(allows_null, options))


def _arguments(value: Any, schema: Any, is_padded: bool) -> Any:
    """Arguments without the nulls that a table wrote: of a key that the schema does not declare, or whose own schema
    has no null and which may be left out. Where no schema says, nulls go from rows that have a table's nulls elsewhere.
    """
    schema = schema if isinstance(schema, dict) else {}
    if isinstance(value, list):
        return [_arguments(item, schema.get("items"), is_padded) for item in value]
    if not isinstance(value, dict):
        return value
    declared = schema.get("properties") or {}
    is_closed = is_padded or (bool(declared) and not schema.get("additionalProperties"))
    required = () if is_padded else schema.get("required") or ()

    def is_filled_in(key: str) -> bool:
        if key in declared:
            return not allows_null(declared[key]) and key not in required
        return is_closed

    return {
        key: _arguments(item, declared.get(key), is_padded)
        for key, item in value.items()
        if item is not None or not is_filled_in(key)
    }


def _read_function(item: object, where: str) -> Tool:
    item = typed(item, dict, where, "an object with the name of a function")
    if (item.get("type") or "function") != "function":
        raise DataError(f"{where}.type is {shown(item['type'])}; expected function")
    wrapped = (
        item if "function" in item else {"function": {k: v for k, v in item.items() if k != "type"}}
    )
    function = typed(wrapped["function"], dict, f"{where}.function", "an object with a name")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise DataError(f"{where}.name is {shown(name)}; expected the name of a function")
    schema = function.get("parameters")
    if isinstance(schema, str) and schema.startswith("{"):
        function = {**function, "parameters": parse_if_text(schema, f"{where}.parameters")}
    return {**wrapped, "type": "function", "function": function}


def _require_json(value: object, where: str) -> str:
    """The value as JSON. Raises DataError for what templates cannot write so: Arrow also has NaN, bytes and times."""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{where} is no JSON ({error}); expected what JSON can hold") from None


# -- single values


def typed(value: object, kind: type[T], where: str, expected: str) -> T:
    """Return a value of this type. Raises DataError for any other, with what it is and what was expected."""
    if not isinstance(value, kind):
        raise DataError(f"{where} is {shown(value)}; expected {expected}")
    return value


def parse_if_text(value: object, where: str) -> object:
    """Parse JSON that is held in a string, as in CSV files; return any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return read_json(value)
    except ValueError as error:
        raise DataError(
            f"{where} is text but not JSON ({error}); expected a list or its JSON"
        ) from None


def read_text(value: object, where: str) -> str:
    """A string that is not blank."""
    if is_blank(value):
        raise EmptyError(f"{where} is empty; expected text")
    return typed(value, str, where, "a string")


def is_blank(value: object) -> bool:
    """Whether there is nothing where a text or a list is expected; tables have NaN for it."""
    return (
        not value.strip()
        if isinstance(value, str)
        else value is None or value in ([], ()) or value != value
    )


def read_list(value: object, where: str, expected: str = "a list") -> list[Any]:
    """A list, or its JSON."""
    return typed(parse_if_text(value, where), list, where, expected)


def read_number(value: object, where: str) -> float:
    """A finite number, or its text as CSV files have it."""
    number = parse_if_text(value, where)
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if (
        not isinstance(number, int | float)
        or not is_number
        or not abs(number) <= sys.float_info.max
    ):
        finite = "finite " if is_number else ""
        raise DataError(f"{where} is {shown(value)}; expected a {finite}number")
    return float(number)


# -- content with images


def text_of(content: str | Sequence[Part]) -> str:
    """The text of a content, without its images."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def images_of(messages: Sequence[Mapping[str, Any]]) -> list[ImageRef]:
    """The images of messages, in order of appearance."""
    contents = [m["content"] for m in messages if isinstance(m.get("content"), list)]
    return [part["image"] for parts in contents for part in parts if part["type"] == "image"]


def named(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages for people to read: an image is its name, in brackets."""
    return [
        {
            **message,
            "content": "".join(
                part["text"] if part["type"] == "text" else f"[picture {part['image'].name}]"
                for part in content
            ),
        }
        if isinstance(content := message.get("content"), list)
        else {**message, "content": content}
        for message in messages
    ]


def read_content(
    content: object, where: str, role: str, media: MediaOptions, ignored: Collection[str]
) -> str | list[Part]:
    """The content of a message: a text, or a list of parts where it has an image."""
    if content is None or isinstance(content, str):
        return content or ""
    expected = "a string or a list of text parts and pictures"
    parts: list[Part] = []
    try:
        for index, part in enumerate(typed(content, list, f"{where}.content", expected)):
            parts += _read_part(part, f"{where}.content[{index}]", media, ignored)
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


def _read_part(
    part: object, where: str, media: MediaOptions, ignored: Collection[str]
) -> list[Part]:
    if isinstance(part, str):
        return [{"type": "text", "text": part}]
    part = typed(part, dict, where, '{"type": "text", "text": ...}')
    kind, text = part.get("type"), part.get("text")
    if kind == "text" and isinstance(text, str):
        return [{"type": "text", "text": text}]
    used = {key: value for key, value in part.items() if key in VALUES or key not in ignored}
    if kind in PICTURES:
        return [{"type": "image", "image": _read_object(used, where, media)}]
    if kind in VIDEOS:
        return [
            frame_part
            for frame in _read_video(used, where, media)
            for frame_part in (
                {"type": "text", "text": f"<{frame.seconds:.1f} seconds>"},
                {"type": "image", "image": frame.image},
            )
        ]
    fault = f'{shown(part)}; expected {{"type": "text", "text": ...}} or {{"type": "image", "image": ...}}'
    if kind in SOUNDS:
        fault = f"of type {kind}; expected text or pictures: sound is not supported; remove the row"
    raise DataError(f"{where} is {fault}")


def _has_value(part: Mapping[str, Any]) -> bool:
    """Whether a part holds its image. Arrow has an empty object where there is none."""
    return any(part.get(name) is not None and part[name] != {} for name in VALUES)


def _read_object(part: Mapping[str, Any], where: str, media: MediaOptions) -> ImageRef:
    """The image in an object that has one of VALUES. Of bytes and the path they are from, the bytes are used."""
    unknown = [
        key for key, value in part.items() if value is not None and key not in (*VALUES, *NOTES)
    ]
    if unknown:
        raise DataError(
            f"{where} has {listed(unknown)} next to a picture; expected one of {', '.join(VALUES)}; set it for all in "
            f"{media.prefix}images, remove it, or name it in {media.prefix}ignore_keys"
        )
    present = [name for name in VALUES if _has_value({name: part.get(name)})]
    if set(present) == {"bytes", "path"}:
        present = ["bytes"]
    if len(present) != 1:
        has = " and ".join(present) if present else "no picture"
        raise DataError(
            f"{where} has {has}; expected one of {', '.join(VALUES)}; a part without a picture takes the next one of "
            "the row's column images"
        )
    value = part[present[0]]
    if present[0] in ENCODED and isinstance(value, str):
        return _decode_base64(value, where)
    return _read_value(value, where, media)


def _read_value(value: object, where: str, media: MediaOptions) -> ImageRef:
    """The reference to an image, or to the file of a video."""
    if isinstance(value, ImageRef):
        return value
    if isinstance(value, dict):
        return _read_object(value, where, media)
    # A picture in memory, or its encoded bytes.
    if isinstance(value, Image.Image):
        limit = media.images.limit_pixels
        if value.width * value.height > limit:  # it may not be decoded yet
            raise PictureError(
                f"{where} is a picture of {value.width:,} x {value.height:,} pixels; expected at most {limit:,}; "
                f"make it smaller or raise {media.prefix}images.limit_pixels"
            )
        try:
            return png_of(value)
        except (OSError, ValueError, SyntaxError) as error:
            raise PictureError(
                f"{where} is a picture that cannot be read ({error}); expected a whole one; remove the row"
            ) from None
    if isinstance(value, bytes | bytearray):
        return _encoded_image(bytes(value), where)
    # An address, a data URL or a path.
    if not isinstance(value, str | Path) or not str(value):
        raise DataError(
            f"{where} is {shown(value)}; expected a picture: a path, an address, a data URL, bytes or a PIL picture"
        )
    address = str(value)
    if address[:8].lower().startswith(("http://", "https://")):
        return ImageRef("url", address)
    if address.startswith("data:"):
        if not address.partition(",")[0].endswith(";base64"):
            raise PictureError(f"{where} is the data URL {shown(address)}; expected one in base64")
        return _decode_base64(address, where)
    if address.startswith("file:"):
        address = unquote(re.sub(r"^file:(//(localhost(?=/))?)?", "", address))
    elif re.match(r"\w+://", address):
        raise PictureError(
            f"{where} is at {ImageRef('url', address).name}; expected a path, or an address of http or https; fetch it "
            "first"
        )
    try:
        path = home_path(address)
        is_elsewhere = not (media.folder / path).exists() and path.exists()
    except (OSError, ValueError, RuntimeError):  # too long, with a zero byte, or of an unknown user
        raise PictureError(
            f"{where} is {shown(address)}, which can be no path; expected a path, an address or a data URL; base64 "
            'alone goes under its own key: {"type": "image", "base64": ...}'
        ) from None
    return ImageRef("file", str(path if is_elsewhere else media.folder / path))


def _decode_base64(text: str, where: str) -> ImageRef:
    """The image in base64, or in a data URL."""
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        content = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise PictureError(f"{where} is no base64 ({error}); expected an encoded picture") from None
    return _encoded_image(content, where)


def _encoded_image(content: bytes, where: str) -> ImageRef:
    if not content:
        raise PictureError(
            f"{where} is empty; expected an encoded picture; remove it or fill it in"
        )
    return ImageRef("bytes", content)


def _read_video(part: Mapping[str, Any], where: str, media: MediaOptions) -> Sequence[Frame]:
    """The frames of a video, which is a file or a list of frames."""
    inner = part.get("video")
    if isinstance(inner, dict):  # as a column may have it: the frames and their times
        part = {**{key: value for key, value in part.items() if key != "video"}, **inner}
    times = {key: part[key] for key in TIMES if part.get(key) is not None}
    rest = {key: value for key, value in part.items() if key not in TIMES}
    # A file: its frames are sampled.
    values = rest.get("video")
    if not isinstance(values, list | tuple):
        if "timestamps" in times:
            raise DataError(
                f"{where} has timestamps next to a file; expected them next to a list of frames; remove them"
            )
        fps = _read_seconds(times.get("fps", media.images.fps), f"{where}.fps", least=1e-3)
        file = _read_object(rest, where, media)
        try:
            return frames_of(file, fps, media.images.max_frames, where, media.images)
        except PictureError as error:
            reason = str(error).replace("data.images.", f"{media.prefix}images.")
            raise PictureError(reason) from None
    # A list of frames.
    _read_object({**rest, "video": b" "}, where, media)  # refuses other keys
    num, fault = len(values), ""
    if not 0 < num <= media.images.max_frames:
        fault = (
            f"{num} frames; expected 1 to {media.images.max_frames}; give fewer, or raise "
            f"{media.prefix}images.max_frames"
        )
    elif len(times) != 1:
        has = " and ".join(times) or "neither fps nor timestamps"
        fault = f"{has}; expected one of them, which say when each frame is shown"
    if fault:
        raise DataError(f"{where} has {fault}")
    # The time of each frame.
    if "fps" in times:
        fps = _read_seconds(times["fps"], f"{where}.fps", least=1e-3)
        seconds = [index / fps for index in range(num)]
    else:
        timestamps = times["timestamps"]
        if not isinstance(timestamps, list | tuple) or len(timestamps) != num:
            raise DataError(
                f"{where}.timestamps is {shown(timestamps)}; expected a list of the seconds of {num} frames"
            )
        seconds = [
            _read_seconds(value, f"{where}.timestamps[{index}]", least=0.0)
            for index, value in enumerate(timestamps)
        ]
    images = [_read_value(value, f"{where}.video[{i}]", media) for i, value in enumerate(values)]
    return [Frame(*frame) for frame in zip(seconds, images, strict=True)]


def _read_seconds(value: object, where: str, least: float) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value < math.inf:  # type: ignore[operator]
        raise DataError(f"{where} is {shown(value)}; expected a number of at least {least:g}")
    return float(value)  # type: ignore[arg-type]


# -- images in columns of the row


def place_media(
    messages: object, row: Mapping[str, Any], place: str, *, needs_marks: bool = False
) -> object:
    """The messages with the images and videos of the row's columns in their places.

    The columns fill the places in order, unless a part names the number of its image (``index``); there must be as many
    as places. Messages without any place get the images before the first question (TRL); with ``needs_marks`` they are
    refused, since llava's conversations always have marks. A mark is taken out of its text, with the one newline that
    sets it off at the beginning or end: ``<image>\\nWhat is this?`` is an image and ``What is this?``.

    A row without such columns is returned unchanged, ``<image>`` in its texts included. What is no message is left for
    ``read_conversation`` to refuse; values are read there too.
    """
    if row.keys().isdisjoint((*PICTURES, *VIDEOS)):
        return messages
    columns = {
        kind: _media_column(row, names, place)
        for kind, names in (("image", PICTURES), ("video", VIDEOS))
    }
    if not any(columns.values()) or not isinstance(messages, list):
        return messages
    # The places: parts without an image, and marks in texts; without any, before the first question.
    messages = [_with_places(message) for message in messages]
    parts = [part for message in messages for part in _parts(message)]
    places = [part for part in parts if _is_place(part)]
    has_media = any(isinstance(part, dict) and part.get("type") in MEDIA for part in parts)
    if not needs_marks and not has_media:
        roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
        first = roles.index("user") if "user" in roles else None
        text = None if first is None else messages[first].get("content")
        if first is not None and isinstance(text, str):
            places = [
                {"type": kind} for kind, column in columns.items() if column for _ in column[1]
            ]
            content = [*places, {"type": "text", "text": text}]
            messages[first] = {**messages[first], "content": content}
    # The values of each column, in the order of their places.
    supply: dict[str, Iterator[Any]] = {}
    for kind, column in columns.items():
        name, values = column or (f"{kind}s", [])
        wanted = [
            part["index"] if isinstance(part.get("index"), int) else number
            for number, part in enumerate(part for part in places if part["type"] == kind)
        ]
        if sorted(set(wanted)) != list(range(len(values))):
            num = len(set(wanted))
            num = max(wanted) + 1 if num == len(values) else num
            raise DataError(
                f"{place}: {name} has {len(values)} and the messages have {num} places for them; expected as many; "
                f'give each a <{kind}>, or a part {{"type": "{kind}"}} without a value'
            )
        for index, value in enumerate(values):
            if value is None or value == {}:
                raise PictureError(
                    f"{place}: {name}[{index}] is null; expected what is in its place; remove the row or fill it in"
                )
        supply[kind] = iter([values[index] for index in wanted])
    return [
        {
            **message,
            "content": [
                {**part, part["type"]: next(supply[part["type"]])} if _is_place(part) else part
                for part in _parts(message)
            ],
        }
        if any(map(_is_place, _parts(message)))
        else message
        for message in messages
    ]


def _media_column(
    row: Mapping[str, Any], names: Sequence[str], place: str
) -> tuple[str, list[Any]] | None:
    """The name and the values of the column that is present; None where there is none.

    A column has one value or several; CSV files have several as JSON. A list in ``video`` is the frames of one video.
    """
    columns: dict[str, list[Any]] = {}
    for name in names:
        if name not in row:
            continue
        value = row[name]
        if isinstance(value, str) and value.lstrip().startswith("["):
            try:
                value = read_json(value)
            except ValueError as error:
                raise DataError(
                    f"{place}: {name} begins with [ but is not JSON ({error}); expected a path, or a list as JSON"
                ) from None
        if isinstance(value, list | tuple) and not (value and name == "video"):
            columns[name] = list(value)
        else:
            columns[name] = [] if value is None or value in ("", {}) else [value]
    filled = [name for name, values in columns.items() if values]
    if len(filled) > 1:
        raise DataError(
            f"{place}: the row has {' and '.join(filled)}; expected one of them; name the other in data.ignore_keys"
        )
    return next(((name, columns[name]) for name in (*filled, *columns)), None)


def _parts(message: Any) -> list[Any]:
    content = message.get("content") if isinstance(message, dict) else None
    return content if isinstance(content, list) else []


def _is_place(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in MARKS.values() and not _has_value(part)


def _with_places(message: Any) -> Any:
    """The message with a part for each mark in its texts."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str):
        content = [content] if re.search(_MARK, content) else None
    if not isinstance(content, list):
        return message
    parts: list[Any] = []
    for part in content:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        text = part.get("text") if is_text else part
        has_mark = isinstance(text, str) and re.search(_MARK, text)
        parts += split_at_marks(text) if has_mark else [part]
    return {**message, "content": parts}


def split_at_marks(text: str) -> list[Part]:
    """The parts of a text with marks."""
    leading = _LEADING.match(text)
    assert leading is not None, "the pattern matches the empty text"
    rest = text[leading.end() :]
    trailing = _TRAILING.search(rest)
    assert trailing is not None, "the pattern matches the empty text"
    pieces = [
        *re.findall(_MARK, leading.group()),
        *re.split(f"({_MARK})", rest[: trailing.start()]),
        *re.findall(_MARK, trailing.group()),
    ]
    return [
        {"type": MARKS[piece]} if piece in MARKS else {"type": "text", "text": piece}
        for piece in pieces
        if piece
    ]
