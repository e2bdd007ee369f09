"""The pictures that rows name: each is opened and verified, as files, bytes or data URLs. Addresses are not fetched.

Pictures that data.ignore_keys leaves out are counted and not opened: nothing looks at them.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from taut.checks.data.records import Record, records
from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.session import Session

KEYS = ("image", "images", "image_url")
MOST = 200
"""Pictures that are opened."""
SHOWN = 4


class Named(NamedTuple):
    """A picture that a row names."""

    record: Record
    value: Any
    is_ignored: bool


def ask(session: Session) -> Finding:
    """Can every picture be read that a row names?"""
    every = [one for record in session.once(records) for one in _named(record)]
    if not every:
        return skipped("no row names a picture")
    used = [one for one in every if not one.is_ignored]
    if not used:
        return passed("the pictures are left out: data.ignore_keys", len(every), "pictures")
    broken = [(one, reason) for one in islice(used, MOST) if (reason := _trouble(one))]
    looked = min(len(used), MOST)
    if broken:
        lines = [f"{one.record.place}: {reason}" for one, reason in broken[:SHOWN]]
        return failed(
            f"{len(broken):,} of {looked:,} pictures cannot be read",
            number=len(broken),
            unit=f"of {looked:,} pictures",
            evidence=lines,
            remedy="correct the paths (from the data file's directory, or from here) or remove the rows; text alone "
            "is trained with the column in data.ignore_keys",
        )
    return passed("every picture can be opened", looked, "pictures")


def _named(record: Record) -> Iterator[Named]:
    """Pictures in columns, in keys of messages, and in parts of their content."""
    if not isinstance(record.value, dict):
        return
    ignored = set(record.columns.ignore_keys)
    for holder in (record.value, *_messages(record.value)):
        for key in KEYS:
            for value in _listed(holder.get(key)):
                yield Named(record, value, key in ignored)
        content = holder.get("content")
        for part in content if isinstance(content, list) else []:
            value = _of_part(part)
            if value is not None:
                yield Named(record, value, is_ignored=False)


def _messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    columns = [value for value in row.values() if isinstance(value, list)]
    return [item for column in columns for item in column if isinstance(item, dict)]


def _of_part(part: Any) -> Any:
    """The picture in a part of a message's content; None where it is of another kind."""
    if not isinstance(part, dict) or part.get("type") not in KEYS:
        return None
    return next((part[key] for key in (*KEYS, "url", "path") if part.get(key)), None)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None or value == "" else [value]


def _trouble(one: Named) -> str:
    """Why a picture cannot be read; nothing where it can, or is at an address."""
    value = one.value
    if isinstance(value, dict):  # as datasets keeps them, or as chat interfaces name them
        value = value.get("bytes") or value.get("path") or value.get("url")
    if isinstance(value, bytes):
        return _opened(BytesIO(value), f"{len(value):,} bytes")
    if not isinstance(value, str):
        return f"{type(value).__name__} is no picture"
    if value.startswith(("http://", "https://")):
        return ""
    if value.startswith("data:"):
        return _decoded(value)
    path = Path(value.removeprefix("file://")).expanduser()
    places = [path] if path.is_absolute() else [one.record.folder / path, path]
    found = next((place for place in places if place.is_file()), None)
    return _opened(found, value) if found else f"there is no file {value}"


def _decoded(url: str) -> str:
    try:
        raw = base64.b64decode(url.partition(",")[2], validate=True)
    except binascii.Error:
        return "the data URL is not base64"
    return _opened(BytesIO(raw), "the data URL")


def _opened(source: Path | BytesIO, name: str) -> str:
    try:
        with Image.open(source) as picture:
            picture.verify()
    except (OSError, SyntaxError, ValueError) as error:  # what PIL raises on what is no picture
        return f"{name}: {str(error).splitlines()[0][:80]}"
    return ""
