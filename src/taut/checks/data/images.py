"""The pictures that rows name: each is read whole, by what reads it in training, so the two cannot disagree.

Where the model takes no pictures addresses are not fetched. Pictures that data.ignore_keys leaves out are counted and
not opened: nothing looks at them. Rows that cannot be read are left to data.rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from taut.checks.data.records import Record, records
from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.owned import Unavailable
from taut.checks.session import Session
from taut.data.messages import PICTURES, Conversation, images_of
from taut.data.schema import best_row, read_any
from taut.errors import DataError, PictureError
from taut.vision.content import ImageRef, ImagesConfig, decoded_size, encoded, require_allowed
from taut.vision.image_store import Album

MOST = 200
"""Pictures that are opened."""
SHOWN = 4


def ask(session: Session) -> Finding:
    """Can every picture be read that a row names?"""
    found = session.once(records)
    named = list(islice((one for record in found for one in _named(record)), MOST))
    if not named:
        if num_ignored := sum(map(_num_ignored, found)):
            return passed("the pictures are left out: data.ignore_keys", num_ignored, "pictures")
        return skipped("no row that can be read names a picture")
    images, album = session.run.data.images, _album(session)
    broken = [said for place, ref in named if (said := _trouble(place, ref, images, album))]
    if not broken:
        return passed("every picture can be read", len(named), "pictures")
    says = f"{len(broken):,} of {len(named):,} pictures cannot be read"
    number, unit, lines = len(broken), f"of {len(named):,} pictures", broken[:SHOWN]
    if images.bad == "drop":
        return passed(f"{says}, and their rows are left out", number, unit, notes=lines)
    return failed(
        says,
        number=number,
        unit=unit,
        evidence=lines,
        remedy="correct the paths (from data.images.folder or the data file's directory, or from here), or leave the "
        'rows out with data.images.bad="drop"; text alone is trained with the column in data.ignore_keys',
    )


def _named(record: Record) -> Iterator[tuple[str, ImageRef | PictureError]]:
    """The pictures of a record, or what is wrong with one before it is looked for."""
    try:
        row = best_row(read_any(record.value, record.place, record.columns))
    except PictureError as error:
        yield record.place, error
        return
    except DataError:
        return
    for ref in images_of(row.messages) if isinstance(row, Conversation) else ():
        yield record.place, ref


def _album(session: Session) -> Album | None:
    try:
        return session.language.renderer.album
    except Unavailable:
        return None


def _trouble(
    place: str, ref: ImageRef | PictureError, images: ImagesConfig, album: Album | None
) -> str:
    """Why a picture cannot be read; nothing where it can."""
    if isinstance(ref, PictureError):
        return str(ref)
    try:
        if album is not None:
            album.see(ref, place)
            return ""
        require_allowed(ref, images)
        if ref.kind != "url":
            decoded_size(encoded(ref, images), ref.name, images)
    except PictureError as error:
        return str(error) if album is not None else f"{place}: {error}"
    return ""


def _num_ignored(record: Record) -> int:
    """Pictures in columns, and in keys of messages, that nobody reads."""
    if not isinstance(record.value, dict):
        return 0
    keys = set(PICTURES) & set(record.columns.ignore_keys)
    return sum(_num(holder.get(key)) for holder in _holders(record.value) for key in keys)


def _holders(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The row, and its messages."""
    columns = [value for value in row.values() if isinstance(value, list)]
    return [row, *(item for column in columns for item in column if isinstance(item, dict))]


def _num(value: Any) -> int:
    return len(value) if isinstance(value, list) else int(value not in (None, ""))
