"""Numbers with what they count, for messages and reports: ``1 row``, ``1,204 rows``.

Imports nothing of ours. Anything may import it.
"""

from __future__ import annotations


def counted(number: int, nouns: str) -> str:
    """``counted(1, "rows")`` is ``1 row``. ``nouns`` is a plural that ends in s."""
    return f"{number:,} {nouns.removesuffix('s') if number == 1 else nouns}"
