r"""1 if the number an answer ends in equals that of one of the references; else 0.

The answer is what follows the last ``####`` if a number stands there alone on the line (GSM8K, arXiv:2110.14168: not
the heading ``#### Step 2: add``), else the last ``\boxed{...}``, else the whole text; and the number is its last. An
answer without a number is wrong; a reference without one is an error.

A number is 42, -7, - 7 after an operator or at the beginning, 1,234,567 (a comma separates thousands, never decimals),
10 000, 3.14, .5, 1e-3, 1.2 x 10^5, 10^6, 3/4, 1 3/4, 1\frac{3}{4}, or one of these with % or percent. Digits directly
after a Latin letter, or in its exponent or index, are none (H2O, cm^2, x_1), and a hyphen directly after a word or a
digit is no minus (3-5). 50% equals 50 and 0.5; 0.5% does not equal 50%. Equal means: within one part in a million.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import ClassVar, NamedTuple

from taut.config import configclass
from taut.errors import DataError
from taut.rewards.verifier import Explained, RewardInput, Verifier

TOLERANCE = 1e-6
"""Relative."""

_PLAIN = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_POWER = r"(?:[eE]|\s?(?:[x*\u00d7]|\\times|\\cdot)\s?10\s?(?:\^|\*\*)\s?\{?)(?P<power>[-+]?\d{1,4})(?!\d)\}?"
_EXPONENT = r"\s?(?:\^|\*\*)\s?\{?(?P<exponent>[-+]?\d{1,4})(?!\d)\}?"
_NUMBER = re.compile(
    rf"(?:(?<![\w)\]])(?P<sign>[-+]))?(?<![A-Za-z_\d])(?<!\d\.)"
    rf"(?:(?P<units>\d+) (?=\d+/\d))?(?P<top>{_PLAIN})(?:{_POWER}|{_EXPONENT}|\s?/\s?(?P<bottom>{_PLAIN}))?"
    r"(?P<percent>\s?%|\s?per ?cent\b)?"
)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_CLEANED: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(f"[{''.join(map(chr, _RAISED))}]+"), lambda digits: "^" + digits[0].translate(_RAISED)),
    (re.compile(r"[\u2212\u2012\u2013]"), "-"),
    (re.compile(r"\\!|\\,|(?<=\d)\{(?=,\})|(?<=,)\}(?=\d)"), ""),
    (re.compile(r"(?<![\d.,])(\d{1,3})[ ~\u00a0\u2009\u202f](?=\d{3}(?![\d/]))"), r"\1"),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"(?<=\d)\s*(?=\\[dtc]?frac|[½¼¾])"), " "),
    (re.compile("[½¼¾]"), lambda part: {"½": "1/2", "¼": "1/4", "¾": "3/4"}[part[0]]),
    (re.compile(r"\\[dtc]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))"), r"\1\2/\3\4"),
    (re.compile(r"(?<!\d)\\?[$€£]\s?(?=[\d.])"), ""),
    (re.compile(r"(?<=[A-Za-z)}\]])\s?(?:\^|\*\*|_)\s?(?:\{[^{}]*\}|[-+]?\d+)"), " "),
    (re.compile(r"(?:^|(?<=[=:(\[{,<>$#\u2248]))[ \t]*-[ \t]+(?=[\d.])|\bnegative (?=\d)"), " -"),
)  # fmt: skip
_MARK = re.compile(r"(?<!#)####(?!#)[\s*$:]*([^\n#]*)")
_HEADING = re.compile(r"\d+[.):]+\s+\S")
_INSIDE = r"[^{}]"
for _ in range(6):  # braces within braces
    _INSIDE = rf"(?:[^{{}}]|\{{{_INSIDE}*\}})"
_BOXED = re.compile(rf"\\(?:boxed|fbox)\s*\{{({_INSIDE}*)\}}")


class Number(NamedTuple):
    """A number of a text; ``value`` is what is written before the percent sign."""

    value: float
    is_percent: bool


@configclass
class Numeric(Verifier):
    """The answer ends in a reference's number."""

    full_marks: ClassVar[float | None] = 1.0
    needs_reference: ClassVar[bool] = True

    def __call__(self, answer: RewardInput) -> float | None:
        """None if there is no reference."""
        if not answer.references:
            return None
        wanted = []
        for text in answer.references:
            number = read_number(text)
            if number is None:
                raise DataError(
                    f"found the reference {text[:60]!r} without a number; expected one; correct the row, or use "
                    "exact_match"
                )
            wanted.append(number)
        found = read_number(answer.text)
        if found is None:
            return Explained(0.0, "the answer has no number")
        if any(_are_equal(found, number) for number in wanted):
            return 1.0
        return Explained(0.0, f"read {found.value:g}{'%' if found.is_percent else ''}")


def read_number(text: str) -> Number | None:
    """The number a text ends in; None if there is none."""
    for pattern, plain in _CLEANED:
        text = pattern.sub(plain, text)
    # What follows the last mark, or is in the last box; else the last number.
    for mark in reversed(list(_MARK.finditer(text))):
        number = _NUMBER.match(mark[1].removeprefix("\\boxed{"))
        if not mark[1] and mark.end() == len(text):
            return None
        if number is not None and not _HEADING.match(mark[1]):
            return _read(number)
    boxed = _BOXED.findall(text)
    numbers = _numbers(boxed[-1] if boxed else text)
    return numbers[-1] if numbers else None


def _numbers(text: str) -> list[Number]:
    numbers = [_read(match) for match in _NUMBER.finditer(text)]
    return [number for number in numbers if number is not None and math.isfinite(number.value)]


def _read(match: re.Match[str]) -> Number | None:
    value = _plain(match["top"])
    if match["power"]:
        value = float(f"{match['top'].replace(',', '')}e{match['power']}")
    if match["exponent"]:
        power = int(match["exponent"])
        if value == 0 or abs(power * math.log10(value)) > 308:
            return None
        value **= power
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
