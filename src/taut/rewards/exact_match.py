"""1 where the whole answer equals one of the references, both normalised (``normal.py``); else 0.

May import ``rewards.normal`` only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from taut.rewards.normal import normalise


def exact_match(text: str, references: Sequence[str], row: Mapping[str, Any]) -> float | None:
    """None where there is no reference."""
    if not references:
        return None
    return float(normalise(text) in {normalise(reference) for reference in references})
