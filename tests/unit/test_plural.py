"""Numbers with what they count."""

from __future__ import annotations

import pytest

from taut.data.report import DataReport
from taut.plural import counted


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (1204, "1,204 rows")]
)
def test_one_has_no_s(number: int, said: str) -> None:
    assert counted(number, "rows") == said


def test_the_sizes_of_a_data_set_of_one_row() -> None:
    report = DataReport(1, 1, 12, 1, (), (), is_cached=False, decisions=(), num_pictures=1)
    assert report.sizes == "1 row, 1 sample, 12 tokens, 1 target, 1 picture"
