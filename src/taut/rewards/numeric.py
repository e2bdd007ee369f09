r"""1 if the number an answer ends in equals that of one of the references; else 0.

That is the first number after the last ``####`` if there is one (GSM8K, arXiv:2110.14168), else the last number in
the last ``\boxed{...}``, else the last number of the text. An answer without a number is wrong; a reference without one
is an error.

A number is 42, -7, 1,234,567 (a comma separates thousands, never decimals), 3.14, .5, 1e-3, 1.2 x 10^5, 3/4, 1 3/4,
\frac{3}{4}, or one of these with % or percent. Digits directly after a Latin letter are none (H2O), and a hyphen
directly after a word or a digit is no minus (3-5). 50% equals 50 and 0.5; 0.5% does not equal 50%. Equal means: within
one part in a million.
"""

from __future__ import annotations

import math
import re
from typing import ClassVar, NamedTuple

from taut.config import configclass
from taut.errors import DataError
from taut.rewards.verifier import Answered, Explained, Verifier

TOLERANCE = 1e-6
"""Relative."""

_PLAIN = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_POWER = r"(?:[eE]|\s?(?:[x*\u00d7]|\\times|\\cdot)\s?10\s?(?:\^|\*\*)\s?\{?)(?P<power>[-+]?\d{1,4})(?!\d)\}?"
_NUMBER = re.compile(
    rf"(?:(?<![\w)\]])(?P<sign>[-+]))?(?<![A-Za-z_\d])(?<!\d\.)"
    rf"(?:(?P<units>\d+) (?=\d+/\d))?(?P<top>{_PLAIN})(?:{_POWER}|\s?/\s?(?P<bottom>{_PLAIN}))?"
    r"(?P<percent>\s?%|\s?per ?cent\b)?"
)
_CLEANED = (
    (re.compile(r"[\u2212\u2012\u2013]"), "-"),
    (re.compile(r"\\!|\\,|(?<=\d)\{(?=,\})|(?<=,)\}(?=\d)"), ""),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}"), r"\1/\2"),
    (re.compile(r"(?<!\d)\\?[$€£]\s?(?=[\d.])"), ""),
)
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


class Number(NamedTuple):
    """A number of a text; ``value`` as it is written, before the percent sign."""

    value: float
    is_percent: bool


@configclass
class Numeric(Verifier):
    """The answer ends in a reference's number."""

    full_marks: ClassVar[float | None] = 1.0
    needs_reference: ClassVar[bool] = True

    def __call__(self, answered: Answered) -> float | None:
        """None if there is no reference."""
        if not answered.references:
            return None
        wanted = [_reference(text) for text in answered.references]
        found = read_number(answered.text)
        if found is None:
            return Explained(0.0, "the answer has no number")
        if any(_are_equal(found, number) for number in wanted):
            return 1.0
        return Explained(0.0, f"read {found.value:g}{'%' if found.is_percent else ''}")


def _reference(text: str) -> Number:
    number = read_number(text)
    if number is None:
        raise DataError(
            f"found the reference {text[:60]!r} without a number; expected one; correct the row, or use exact_match"
        )
    return number


def read_number(text: str) -> Number | None:
    """The number a text ends in; None if there is none."""
    for pattern, plain in _CLEANED:
        text = pattern.sub(plain, text)
    _, mark, after = text.rpartition("####")
    boxed = _BOXED.findall(text)
    numbers = _numbers(after if mark else boxed[-1] if boxed else text)
    if not numbers:
        return None
    return numbers[0] if mark else numbers[-1]


def _numbers(text: str) -> list[Number]:
    numbers = [_read(match) for match in _NUMBER.finditer(text)]
    return [number for number in numbers if number is not None and math.isfinite(number.value)]


def _read(match: re.Match[str]) -> Number | None:
    value = _plain(match["top"])
    if match["power"]:
        value = float(f"{match['top'].replace(',', '')}e{match['power']}")
    if match["bottom"]:
        bottom = _plain(match["bottom"])
        if bottom == 0:
            return None
        value /= bottom
    value += _plain(match["units"] or "0")
    return Number(-value if match["sign"] == "-" else value, match["percent"] is not None)


def _plain(digits: str) -> float:
    return float(digits.replace(",", ""))


def _are_equal(left: Number, right: Number) -> bool:
    if left.is_percent == right.is_percent:
        return _is_close(left.value, right.value)
    percent, plain = (left, right) if left.is_percent else (right, left)
    return _is_close(plain.value, percent.value) or _is_close(plain.value, percent.value / 100)


def _is_close(left: float, right: float) -> bool:
    return math.isclose(left, right, rel_tol=TOLERANCE)
