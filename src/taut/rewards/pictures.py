"""Pictures in what is sent to servers: inside the request, as data URLs; nobody else has our files.

May import errors and vision. The verifiers that run remotely import it.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from taut.errors import PictureError
from taut.vision.picture import ImageRef, ImagesConfig, encoded, mime_type

WITHIN = ImagesConfig(max_bytes=2**40)
"""Limits of what is sent: it was read within the run's own."""


def sent(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as JSON, each picture an ``image_url``. Raises PictureError for one that cannot be had."""
    return [
        {key: _content(it) if key == "content" else it for key, it in message.items()}
        for message in messages
    ]


def pictures_of(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The pictures of messages, in their order, as parts of a content."""
    return [
        part
        for message in sent(messages)
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if part["type"] == "image_url"
    ]


def _content(content: Any) -> Any:
    if not isinstance(content, list | tuple):
        return content
    return [
        {"type": "image_url", "image_url": {"url": _data_url(part["image"])}}
        if part["type"] == "image"
        else part
        for part in content
    ]


def _data_url(picture: ImageRef) -> str:
    raw = encoded(picture, WITHIN)
    kind = mime_type(raw)
    if kind is None:
        raise PictureError(f"the picture {picture.name} is of no format that is read")
    return f"data:{kind};base64,{base64.b64encode(raw).decode('ascii')}"
