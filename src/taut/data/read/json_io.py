"""JSON as the standard has it, and values in error messages.

Python's own reader accepts silently what is refused here: a key twice in one object, which would lose a value; NaN and
Infinity, which are not JSON; and 1e999, which would become Infinity. Raises json.JSONDecodeError where there is a
position, else NotJson; both are ValueErrors. Nesting deeper than the interpreter's stack is NotJson too.

Imports nothing of taut.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NoReturn


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


# -- JSON

_SPACE = re.compile(r"[ \t\n\r]*")


class NotJson(ValueError):
    """The text is not standard JSON, at an unknown position."""


def read_json(text: str) -> Any:
    """The value of a text."""
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise NotJson("nested too deeply") from None


def read_json_list(text: str) -> Iterator[Any]:
    """The items of a text that is a list, one by one."""
    at = _space(text, 0)
    if text[at : at + 1] != "[":
        raise json.JSONDecodeError("Expecting a list", text, at)
    at = _space(text, at + 1)
    is_first = True
    while text[at : at + 1] != "]":
        if not is_first:
            if text[at : at + 1] != ",":
                raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
            at = _space(text, at + 1)
        item, at = read_item(text, at)
        yield item
        at, is_first = _space(text, at), False
    end = _space(text, at + 1)
    if end != len(text):
        raise json.JSONDecodeError("Extra data", text, end)


def read_item(text: str, at: int) -> tuple[Any, int]:
    """The value that begins at ``at``, and its end."""
    try:
        return _DECODER.raw_decode(text, at)
    except RecursionError:
        raise NotJson("nested too deeply") from None


def _space(text: str, at: int) -> int:
    """The first position from ``at`` on that is no white space."""
    space = _SPACE.match(text, at)
    assert space is not None, "white space may be empty"
    return space.end()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise NotJson(f"the key {twice[:40]!r} is there twice in one object")
    return value


def _constant(word: str) -> NoReturn:
    raise NotJson(f"{word} is no JSON; expected a finite number or null")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise NotJson(f"the number {digits[:40]} is too large")
    return number


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_constant=_constant, parse_float=_finite
)
