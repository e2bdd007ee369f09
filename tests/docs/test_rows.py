"""Every row that the page on data shows is read and rendered, as the kind of data it stands under."""

from __future__ import annotations

import json
import re

import pytest
from tests.docs.pages import ROOT
from tests.helpers.tiny_tokenizers import tiny_tokenizer

from taut.data.render.render import Renderer, render_any
from taut.data.rows.schema import Columns, read_any
from taut.data.settings import Kind

PAGE = (ROOT / "docs/data.md").read_text()
ROWS = [json.loads(line) for line in re.findall(r"^    (\{.*\})$", PAGE, re.MULTILINE)]
MARKS: dict[str, Kind] = {"labels": "stepwise", "label": "unpaired", "score": "scored"}


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_a_row_of_the_page(row: dict[str, object]) -> None:
    kind = next((MARKS[name] for name in MARKS if name in row), "preference")
    read = read_any(row, "data.md:1", Columns(kind=kind))
    (samples,) = render_any([read], Renderer(tiny_tokenizer()))
    assert all(sample.num_targets > 0 for sample in samples)
    assert all(sample.values or sample.read_values for sample in samples)


def test_there_are_rows_of_every_kind() -> None:
    found = [next((MARKS[name] for name in MARKS if name in row), "preference") for row in ROWS]
    assert {*found} == {"preference", "unpaired", "scored", "stepwise"}
