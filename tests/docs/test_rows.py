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
MARKS: dict[str, Kind] = {
    "labels": "stepwise",
    "label": "unpaired",
    "score": "scored",
    "chosen": "preference",
    "answers": "preference",
    "rejected_response": "preference",
}


def kind_of(row: dict[str, object]) -> Kind:
    return next((MARKS[name] for name in MARKS if name in row), "sft")


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_a_row_of_the_page(row: dict[str, object]) -> None:
    kind = kind_of(row)
    read = read_any(row, "data.md:1", Columns(kind=kind))
    (samples,) = render_any([read], Renderer(tiny_tokenizer()))
    assert all(sample.num_targets > 0 for sample in samples)
    is_judged = [bool(sample.values or sample.read_values) for sample in samples]
    assert is_judged == [kind != "sft"] * len(samples)


def test_there_are_rows_of_every_kind() -> None:
    found = {kind_of(row) for row in ROWS}
    assert found == {"sft", "preference", "unpaired", "scored", "stepwise"}
