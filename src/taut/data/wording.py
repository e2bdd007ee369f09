"""Values and names in error messages: short, on one line, and safe for any JSON.

Imports nothing of ours. Imported by the rest of ``taut.data``; others take them from ``formats.py``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from itertools import islice


def listed(names: Iterable[object]) -> str:
    """Names in an error message: a few, on one line."""
    return ", ".join(
        name if isinstance(name, str) and name.isprintable() and len(name) <= 40 else shown(name)
        for name in islice(names, 9)
    )


def shown(value: object) -> str:
    """A value in an error message: short, one line, and safe for any JSON."""
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:37] + "...")
    if isinstance(value, dict):
        keys = ", ".join(shown(key) for key in list(value)[:5])
        return f"an object with keys {keys}" if value else "an empty object"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}" if value else "an empty list"
    if value is None:
        return "null"
    return repr(value)[:40]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
