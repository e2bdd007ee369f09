r"""1 if the mathematics an answer ends in equals that of one of the references; else 0 (the library math-verify).

Both are read as LaTeX or as plain expressions (``\frac{1}{2}``, 0.5, {1, 2}, x > 3, matrices) and compared by sympy:
1/2 equals 0.5 and x^2 - 1 equals (x - 1)(x + 1). If one of two numbers is a decimal they are compared to ``digits``
decimal places, else exactly.

A reference is the content of its last ``\boxed{...}``, else what follows its last ``####`` or "answer is", else all of
it. It is read whole (``formulas.py``: lists, line breaks, units, words around it) or it is an error of its row.

An answer is the content of its last ``\boxed{...}``, read by the same rules; words around a single number are allowed.
Without a box it is all of the answer where these rules read it, else its last formula or number. An answer that cannot
be read or compared is wrong.

A single letter after a number may be a unit or a variable (5 m): a reference with a space before it is equal to both.
Numerals of another base are equal if their digits are, and their bases where both have one (204_7).

The library's own time limits are signals, which only a main thread hears; they are off, and a comparison that takes
too long is ended with its process: that answer is wrong.

math-verify is imported here only.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache, partial, reduce
from typing import Any, ClassVar

from taut.config import configclass
from taut.errors import DataError
from taut.rewards.formulas import LETTER, whole
from taut.rewards.settings import Place
from taut.rewards.verifier import Explained, RewardInput, Verifier, import_library

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(-?\d(?:[\d.,/]*\d)?))")
_MARK = re.compile(r".*(?:####|\banswer(?: is|:))[\s:]*(?=\S)", re.DOTALL | re.IGNORECASE)
_FINAL = re.compile(r"[Ff]inal answer is:?\s*(.{1,200}?)\.?\s*I hope", re.DOTALL)
_BASE = re.compile(r"(?<![\w.}])(\d[\dA-F]*)_(?:\{(\d+)\}|(\d+))")
_FUNCTION = re.compile(r"\b([A-Za-z])\s*\(\s*([a-z])\s*\)\s*=")
_LETTER_UNIT = re.compile(rf"((?:[^A-Za-z\\]|\\[A-Za-z]+)*[\d)}}])(\s*){LETTER}")
_DECIMAL_COMMA = re.compile(r"([-+]?\d+),(?!\d{3}$)(\d+)")


@configclass
class Math(Verifier):
    """The answer is mathematically equal to a reference."""

    runs: ClassVar[Place] = "process"
    full_marks: ClassVar[float | None] = 1.0
    max_memory: ClassVar[int | None] = 2**30
    unjudged: ClassVar[float | None] = 0.0
    trivial: ClassVar[str] = "\\boxed{0}"
    needs_reference: ClassVar[bool] = True

    boxed: bool = False
    r"""Only what is in ``\boxed{...}`` is an answer. By default a formula or number elsewhere is one too."""
    digits: int = 6
    """Decimal places to which numbers are compared."""

    def prepare(self) -> None:
        """Import the library, and compare once: its first time takes seconds."""
        assert self(RewardInput(text="\\boxed{2^2}", references=("4",)))

    def dress(self, reference: str) -> str:
        """A reference in a box, if only boxes are read."""
        is_bare = self.boxed and "\\boxed" not in reference
        return f"\\boxed{{{reference}}}" if is_bare else reference

    def __call__(self, answer: RewardInput) -> float | None:
        """None if there is no reference."""
        if not answer.references:
            return None
        wanted = [_reference(text) for text in answer.references]
        formula, parts = self._answer(answer.text)
        if any(self._is_equal(reference, formula, parts) for reference in wanted):
            return 1.0
        read = formula or next((part for part in parts if isinstance(part, str)), None)
        return Explained(0.0, "no formula or number was read" if read is None else f"read {read}")

    def _answer(self, text: str) -> tuple[str, list[Any]]:
        """The formula that the answer is; or an empty one, and what the library finds in its text."""
        boxed = _boxed(text)
        if boxed is None and self.boxed:
            return "", []
        formula = whole(text if boxed is None else boxed)
        if formula and (parts := _parse(formula)):
            return formula, parts
        if boxed is not None and len(re.findall(r"\d+(?:[.,]\d+)*", boxed)) != 1:
            return "", _parse(boxed)
        library = _library()
        kinds = library.LatexExtractionConfig(), library.ExprExtractionConfig()
        return "", library.parse(text if boxed is None else boxed, kinds, parsing_timeout=None)

    def _is_equal(self, reference: str, formula: str, parts: list[Any]) -> bool:
        if formula == reference:
            return True
        # Numerals keep their bases where both have one.
        both = _BASE.search(reference) and _BASE.search(formula)
        numeral = r"\1 b_{\2\3}" if both else r"\1"
        wanted = _readings(_BASE.sub(numeral, reference), has_space=True)
        if formula:
            formula = _BASE.sub(numeral, _renamed(formula, reference))
            parts = _readings(formula, has_space=bool(_variables(wanted)))
        if len(_variables(wanted + parts)) < 2:
            wanted, parts = wanted + _solutions(wanted), parts + _solutions(parts)
        verify = _library().verify
        return bool(verify(wanted, parts, float_rounding=self.digits, timeout_seconds=None))


def _reference(text: str) -> str:
    content = _boxed(text)
    if content is None:
        content = re.split(r"\.\s+(?=[A-Z])", _MARK.sub("", text))[0]
    formula = whole(content)
    if formula is None or not _parse(formula):
        raise DataError(
            f"found the reference {text[:60]!r}, which is no mathematics as a whole; expected one number, formula or "
            "list of them; correct the row, or use exact_match"
        )
    return formula


def _boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}``, of several where they are side by side; None: there is none."""
    text = _BOX.sub(lambda box: f"\\boxed{{{box[1]}}}" if box[1] else "\\boxed{", text)
    at = text.rfind("\\boxed{")
    if at < 0:
        return None
    if final := _FINAL.search(text, at):
        return final[1]
    library = import_library("latex2sympy2_extended.math_normalization", "math-verify", "math")
    content = str(library.extract_boxed_content(text))
    return content[1:] if content.count("{") > content.count("}") else content


def _readings(formula: str, *, has_space: bool) -> list[Any]:
    """The possible meanings of a formula. ``has_space``: a letter directly after a number is a variable, no unit."""
    unit, decimal = _LETTER_UNIT.fullmatch(formula), _DECIMAL_COMMA.fullmatch(formula)
    texts = [formula, decimal.expand(r"\1.\2")] if decimal else [formula]
    if unit and (unit[2] or not has_space):
        texts.append(unit[1])
    return [part for text in texts for part in _parse(text)]


def _renamed(formula: str, reference: str) -> str:
    """A formula with the reference's variable where both define the same function: f(t) = t^2 is f(x) = x^2."""
    own, wanted = (set(_FUNCTION.findall(text)) for text in (formula, reference))
    if (
        len(own | wanted) != 2
        or len({name for name, _ in own | wanted}) != 1
        or not (own and wanted)
    ):
        return formula
    ((_, old),), ((_, new),) = own, wanted
    return re.sub(rf"\\[A-Za-z]+|{old}", lambda part: new if part[0] == old else part[0], formula)


def _variables(parts: Sequence[Any]) -> set[str]:
    return {str(name) for part in parts for name in getattr(part, "free_symbols", ())}


def _solutions(parts: Sequence[Any]) -> list[Any]:
    """The solutions of each part that is an inequality or a list of them, which all hold where they can (x > 2 and
    x < 5), else one of them (x < 2 or x > 5)."""
    grader, found = _library().grader, []
    for part in parts:
        each = part.args if getattr(part, "is_FiniteSet", False) else (part,)
        if each and all(grader.is_relation(one) and not grader.is_equation(one) for one in each):
            with suppress(NotImplementedError, TypeError, ValueError):
                sets = [grader.unwrap_fcs(one).as_set() for one in each]
                common = reduce(lambda a, b: a.intersect(b), sets)
                found.append(reduce(lambda a, b: a.union(b), sets) if common.is_empty else common)
    return found


@lru_cache(maxsize=64)
def _parse(formula: str) -> list[Any]:
    """The library's reading of all of a formula; empty: it has none."""
    kind = _library().LatexExtractionConfig()
    kind = replace(
        kind, normalization_config=replace(kind.normalization_config, units=False, boxed="none")
    )
    parse = partial(_library().parse, extraction_mode="first_match", parsing_timeout=None)
    return [part for part in parse(f"${formula}$", [kind]) if not isinstance(part, str)]


@cache
def _library() -> Any:
    """math-verify, held to exact numbers: by itself it takes 2^-99 and 2^-98, which differ by less than 1e-15, for
    equal, and so does rounding with 0.0000001 and 0.0000002."""
    library = import_library("math_verify", "math-verify", "math")
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)  # it warns that its limits are off
    grader = library.grader
    is_close = grader.sympy_numeric_eq

    def are_equal(left: Any, right: Any, digits: int, precision: int) -> bool:
        if not is_close(left, right, digits, precision):
            return False
        difference = (left - right).doit()
        is_small = getattr(difference, "is_number", False) and abs(difference.n()) < 10.0**-digits
        if difference.is_zero or not is_small:  # 50% is 50 to the library
            return True
        if left.has(grader.Float) or right.has(grader.Float):
            return bool(abs(difference.n()) < max(abs(left.n()), abs(right.n())) / 20)
        return difference.is_zero is None

    grader.sympy_numeric_eq = are_equal
    return library
