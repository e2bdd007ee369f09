"""A source's rows on their way to flat arrays: read, rendered, fitted, laid one after another.

``cache.py`` says which arrays those are, and writes them; ``sample_at`` is the way back. Imported by ``dataset.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from taut.data import cache
from taut.data.answers import answers_of, fit_any, render_any, render_each
from taut.data.columns import Columns
from taut.data.formats import Conversation, RowForm, form_of, images_of
from taut.data.judged import read_any
from taut.data.length import Incident, Limits
from taut.data.media_arrays import changed_source, media_arrays, media_at
from taut.data.pictures import in_batches
from taut.data.preferences import AnyRow, best_row
from taut.data.render import Renderer
from taut.data.sources import Opened
from taut.errors import DataError, PictureError, TautError
from taut.printing import counted
from taut.types import IntArray, Media, Sample

if TYPE_CHECKING:
    from taut.vision.album import Album
    from taut.vision.picture import ImageRef

VALUE, READ_VALUE = "value.", "read_value."


def tokenise(found: Opened, columns: Columns, limits: Limits, renderer: Renderer) -> cache.Entry:
    """Read, render and fit every row of a source; nothing is written."""
    flat = _Flat()
    read = (
        (number, _read(record, f"{found.path}:{number}", columns, renderer))
        for number, record in found.records()
    )
    for batch in in_batches(read, lambda it: pictures_of(it[1])):
        readable = [row for _, row in batch if not isinstance(row, PictureError)]
        flat.films |= {one.film: None for row in readable for one in pictures_of(row) if one.film}
        rendered = iter(_rendered(readable, renderer))
        for number, row in batch:
            flat.num_rows += 1
            if isinstance(row, PictureError):
                flat.leave_out(number, f"{found.path}:{number}", row)
            elif isinstance(samples := next(rendered), PictureError):
                flat.leave_out(number, row.place, samples)
            else:
                flat.forms[form_of(best_row(row))] += 1
                flat.add(number, row.place, *fit_any(row, samples, limits))
    if not flat.num_rows:
        raise DataError(
            f"{found.path}: the file has no rows; expected at least one; check the path"
        )
    if not flat.lines:
        first = flat.incidents[0]
        files = ", or data.images.folder" if flat.is_fleeting else ""
        raise DataError(
            f"{found.path}: none of its {counted(flat.num_rows, 'rows')} is left (row {first.place}: "
            f"{first.reason}); "
            f"expected some; change data.max_length, data.min_length or data.too_long{files}"
        )
    return flat.entry()


def pictures_of(row: AnyRow | TautError) -> list[ImageRef]:
    """Those of all its answers."""
    answers = () if isinstance(row, TautError) else answers_of(row)
    chats = [it.messages for it in answers if isinstance(it, Conversation)]
    return [picture for messages in chats for picture in images_of(messages)]


def _read(record: Any, place: str, columns: Columns, renderer: Renderer) -> AnyRow | PictureError:
    """The row; or, where those without their pictures are left out, what is wrong with one."""
    try:
        return read_any(record, place, columns)
    except PictureError as error:
        if not _drops_pictures(renderer):
            raise _with_way_out(error) from None
        return error


def _rendered(rows: Sequence[AnyRow], renderer: Renderer) -> Sequence[list[Sample] | PictureError]:
    if _drops_pictures(renderer):
        return render_each(rows, renderer)
    try:
        return render_any(rows, renderer)
    except PictureError as error:
        raise _with_way_out(error) from None


def _with_way_out(error: PictureError) -> PictureError:
    return PictureError(f"{error}; or leave such rows out with data.images.bad=drop")


def _drops_pictures(renderer: Renderer) -> bool:
    return renderer.album is not None and renderer.album.images.bad == "drop"


class _Flat:
    """Samples on their way into flat arrays."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.forms: Counter[RowForm] = Counter()
        self.ids: list[NDArray[np.int32]] = []
        self.target_at: list[NDArray[np.int32]] = []
        self.lines: list[int] = []
        self.part_numbers: list[int] = []
        self.values: dict[str, list[float]] = {}
        self.read_at: list[NDArray[np.int32]] = []
        self.read_values: dict[str, list[NDArray[np.float64]]] = {}
        self.incidents: list[Incident] = []
        self.media: list[tuple[Media, ...]] = []
        self.films: dict[str, None] = {}
        """The files of videos, in their order."""
        self.is_fleeting = False

    def leave_out(self, number: int, place: str, error: PictureError) -> None:
        """A row whose picture cannot be used."""
        reason = str(error).removeprefix(f"{place}: ")
        self.incidents.append(Incident(str(number), "dropped", reason))
        self.is_fleeting = True

    def add(
        self, number: int, place: str, samples: Sequence[Sample], incidents: Sequence[Incident]
    ) -> None:
        for sample in samples:
            self.ids.append(sample.ids_T.astype(np.int32))
            self.target_at.append(sample.target_at_N.astype(np.int32))
            self.lines.append(number)
            self.media.append(sample.media)
            self.part_numbers.append(int(sample.id[len(place) + 1 :] or 0))
            for name, value in sample.values.items():
                self.values.setdefault(name, []).append(value)
            if sample.read_at_R is not None:
                self.read_at.append(sample.read_at_R.astype(np.int32))
            for name, value_R in sample.read_values.items():
                self.read_values.setdefault(name, []).append(value_R)
        for incident in incidents:
            where = f"{number}{incident.place[len(place) :]}"
            self.incidents.append(replace(incident, place=where))

    def entry(self) -> cache.Entry:
        arrays = {
            "ids": np.concatenate(self.ids),
            "offsets": np.cumsum([0, *map(len, self.ids)]),
            "target_at": np.concatenate(self.target_at),
            "target_offsets": np.cumsum([0, *map(len, self.target_at)]),
            "line": np.asarray(self.lines),
            "part": np.asarray(self.part_numbers),
        }
        arrays |= {VALUE + name: np.asarray(given) for name, given in self.values.items()}
        if self.read_at:
            arrays["read_at"] = np.concatenate(self.read_at)
            arrays["read_offsets"] = np.cumsum([0, *map(len, self.read_at)])
        for name, given in self.read_values.items():
            arrays[READ_VALUE + name] = np.concatenate(given)
        arrays |= media_arrays(self.media, list(self.films))
        incidents = tuple(self.incidents)
        return cache.Entry(arrays, self.num_rows, incidents, self.is_fleeting, self.forms)


def why_again(entry: cache.Entry) -> str:
    """Why a cached entry is to be made anew, for the sake of its pictures; empty: it is not."""
    if entry.is_fleeting:
        return "pictures could not be read the last time"
    changed = changed_source(entry.arrays)
    return "" if changed is None else f"{Path(changed).name} has changed"


def sample_at(
    arrays: Mapping[str, NDArray[Any]], index: int, name: str, album: Album | None = None
) -> Sample:
    """A sample of an entry, by its number in it. ``album``: where its pictures are had from."""
    start, stop = arrays["offsets"][index : index + 2]
    first, last = arrays["target_offsets"][index : index + 2]
    target_at_N = arrays["target_at"][first:last].astype(np.int64)
    sample = Sample(
        name,
        arrays["ids"][start:stop].astype(np.int64),
        target_at_N,
        np.ones(target_at_N.size),
        media=media_at(arrays, index, name, album),
        values={
            key.removeprefix(VALUE): float(array[index])
            for key, array in arrays.items()
            if key.startswith(VALUE)
        },
    )
    if "read_at" not in arrays:
        return sample
    first, last = arrays["read_offsets"][index : index + 2]
    return replace(
        sample,
        read_at_R=arrays["read_at"][first:last].astype(np.int64),
        read_values={
            key.removeprefix(READ_VALUE): array[first:last].astype(np.float64)
            for key, array in arrays.items()
            if key.startswith(READ_VALUE)
        },
    )


def row_offsets(line_S: NDArray[np.int64]) -> IntArray:
    """Where the samples of each row begin, and one more, the end: samples of one row are neighbours."""
    begins = np.flatnonzero(np.diff(line_S)) + 1
    return np.concatenate([[0], begins, [line_S.size]])
