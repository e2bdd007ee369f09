r"""1 if the mathematics an answer ends in equals that of one of the references; else 0 (the library math-verify).

Both are read as LaTeX or as plain expressions (``\frac{1}{2}``, 0.5, {1, 2}, x > 3, matrices), the last ``\boxed{...}``
of an answer before anything else, and compared by sympy: 1/2 equals 0.5 and x^2 - 1 equals (x - 1)(x + 1). An answer
that cannot be read or compared is wrong; a reference that cannot be read is an error. A reference without dollar signs
and words is one formula: without that the library reads ``2\sqrt{3}`` as 2. Mixed numbers (1 1/2) and 1e-3 it does not
know: write a fraction or a decimal, or use ``numeric``.

The library's own time limits are signals, which only a main thread hears; they are off, and a comparison that takes
too long is ended with its process: that answer is wrong.

math-verify is imported here only.
"""

from __future__ import annotations

import logging
import re
from functools import cached_property
from typing import Any, ClassVar

from taut.config import configclass
from taut.errors import DataError
from taut.rewards.verifier import Answered, Explained, Place, Verifier, import_library

_PROSE = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{3,}(?![^{]*\})")
"""A word, that is no command of LaTeX and stands in no braces."""


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
        """Import the library."""
        assert self._library

    def dress(self, reference: str) -> str:
        """In a box, if only boxes are read."""
        is_bare = self.boxed and "\\boxed" not in reference
        return f"\\boxed{{{reference}}}" if is_bare else reference

    def __call__(self, answered: Answered) -> float | None:
        """None if there is no reference."""
        if not answered.references:
            return None
        wanted = [self._reference(text) for text in answered.references]
        parsed = self._answer(answered.text)
        if any(self._is_equal(reference, parsed) for reference in wanted):
            return 1.0
        read = next((part for part in parsed if isinstance(part, str)), None)
        return Explained(0.0, "no formula or number was read" if read is None else f"read {read}")

    @cached_property
    def _library(self) -> Any:
        library = import_library("math_verify", "math-verify", "math")
        for name in ("math_verify.parser", "math_verify.grader"):
            logging.getLogger(name).setLevel(logging.ERROR)  # it warns that its limits are off
        return library

    def _answer(self, text: str) -> Any:
        library = self._library
        latex = library.LatexExtractionConfig(
            boxed_match_priority=0, try_extract_without_anchor=not self.boxed
        )
        plain = [] if self.boxed else [library.ExprExtractionConfig()]
        return library.parse(text, [latex, *plain], parsing_timeout=None)

    def _reference(self, text: str) -> Any:
        is_formula = "$" not in text and "\\boxed" not in text and not _PROSE.search(text)
        for written in (f"${text}$", text) if is_formula else (text,):
            parsed = self._library.parse(written, parsing_timeout=None)
            if any(not isinstance(part, str) for part in parsed):
                return parsed
        raise DataError(
            f"found the reference {text[:60]!r}, which is no mathematics; expected a number, a formula or a set; "
            "correct the row, or use exact_match"
        )

    def _is_equal(self, reference: Any, answer: Any) -> bool:
        return bool(
            self._library.verify(
                reference, answer, float_rounding=self.digits, timeout_seconds=None
            )
        )
