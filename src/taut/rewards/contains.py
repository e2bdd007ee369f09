"""1 where the words of one of the references stand in the answer, in their order and side by side; else 0.

Both are normalised (``normal.py``). Words are what spaces separate: "fox" is not in "foxhound", and a reference inside
a sentence of a script without spaces is not found.

May import ``rewards.normal`` only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from taut.rewards.normal import normalise


def contains(text: str, references: Sequence[str], row: Mapping[str, Any]) -> float | None:
    """None where there is no reference."""
    if not references:
        return None
    words = f" {normalise(text)} "
    return float(any(f" {normalise(reference)} " in words for reference in references))
