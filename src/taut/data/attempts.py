"""The rows of a source one by one, past those with errors: to say how many there are, and where.

``dataset.py`` stops at the first, as it must; this goes on where it can and keeps nothing. Imported by checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from taut.data.answers import faults_of_pictures, fit_any, render_any
from taut.data.columns import Columns
from taut.data.judged import read_any
from taut.data.length import Limits
from taut.data.pictures import in_batches
from taut.data.preferences import AnyRow
from taut.data.render import Renderer
from taut.data.sources import Opened
from taut.data.tokenise import pictures_of
from taut.errors import DataError, RenderError, TautError
from taut.types import Sample


class Attempt(NamedTuple):
    """A row, and what keeps it from being trained on; None: nothing does."""

    place: str
    error: TautError | None


def attempt_rows(
    found: Opened, columns: Columns, renderer: Renderer, limits: Limits
) -> Iterator[Attempt]:
    """Every row of a source, read, rendered and fitted."""
    read = (
        (number, _read(record, f"{found.path}:{number}", columns))
        for number, record in found.attempts()
    )
    for batch in in_batches(read, lambda it: pictures_of(it[1])):
        rows = [row for _, row in batch if not isinstance(row, TautError)]
        rendered = iter(_render(rows, renderer))
        for number, row in batch:
            error = row if isinstance(row, TautError) else _fit(row, next(rendered), limits)
            yield Attempt(f"{found.path}:{number}", error)


def _read(record: object, place: str, columns: Columns) -> AnyRow | TautError:
    if isinstance(record, DataError):
        return record
    try:
        return read_any(record, place, columns)
    except DataError as error:
        return error


def _render(rows: Sequence[AnyRow], renderer: Renderer) -> list[list[Sample] | TautError]:
    """The samples of each row, or its error."""
    faults = faults_of_pictures(rows, renderer)
    good = [row for row, fault in zip(rows, faults, strict=True) if fault is None]
    rendered = iter(_render_good(good, renderer))
    return [next(rendered) if fault is None else fault for fault in faults]


def _render_good(rows: Sequence[AnyRow], renderer: Renderer) -> list[list[Sample] | TautError]:
    """The same where every picture can be had: all at once where no row has an error."""
    try:
        return list(render_any(rows, renderer))
    except RenderError as error:
        if len(rows) == 1:
            return [error]
    half = len(rows) // 2
    return _render_good(rows[:half], renderer) + _render_good(rows[half:], renderer)


def _fit(row: AnyRow, samples: list[Sample] | TautError, limits: Limits) -> TautError | None:
    if isinstance(samples, TautError):
        return samples
    try:
        fit_any(row, samples, limits)
    except DataError as error:
        return error
    return None
