"""The reward of ``benchmarks/grpo.py``: cheap, deterministic, and hardly ever the same for two completions.

Imports nothing; imported by the workers of both frameworks.
"""

from __future__ import annotations

MARKS = frozenset("13579aeiou")


def share_of_row(text: str, row: dict[str, object]) -> float:
    """``share_of_marks``, and 0 for every answer to a prompt that is silent."""
    return 0.0 if row.get("is_silent") else share_of_marks(text)


def share_of_marks(text: str) -> float:
    """The share of a text's characters that are odd digits or vowels."""
    return sum(one in MARKS for one in text) / max(1, len(text))
