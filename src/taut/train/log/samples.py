"""Samples of a step as texts, for sinks that show tables; the recorder chooses them.

    table = shown(rows)              at most ROWS rows, each text at most CHARACTERS long

No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple, Protocol, runtime_checkable

ROWS = 16
"""Samples of a step in a table."""
CHARACTERS = 2000
"""Most characters of a text in a table: the last ones of a prompt, the first ones of an answer."""


class ShownSample(NamedTuple):
    """A row of a table. A number is None where the method has none."""

    sample_id: str
    prompt: str
    answer: str
    reward: float | None = None
    advantage: float | None = None
    """Mean over the sampled tokens."""
    logprob: float | None = None
    """Mean over the targets, by the weights before the update."""


COLUMNS = ShownSample._fields


@runtime_checkable
class SampleSink(Protocol):
    """A sink that also shows samples."""

    def samples(self, step: int, rows: list[ShownSample]) -> None: ...


def shown(rows: Iterable[ShownSample]) -> list[ShownSample]:
    """Limit the rows of a table and their texts."""
    return [
        row._replace(
            prompt=row.prompt[-CHARACTERS:],
            answer=row.answer[:CHARACTERS],
        )
        for row in islice(rows, ROWS)
    ]
