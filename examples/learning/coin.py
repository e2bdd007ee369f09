"""A reward that knows nothing of the answer: 0 or 1 with equal chances, drawn anew for each answer."""

from __future__ import annotations

import random
from typing import Any

DRAW = random.Random(0)


def coin(text: str, references: list[str], row: dict[str, Any]) -> float:
    return float(DRAW.random() < 0.5)


coin.judges = "form"  # type: ignore[attr-defined]  # so that taut does not look for right answers that it pays for
