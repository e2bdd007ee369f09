"""A data set folder says what it holds, and is whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from taut.data.read.folder import ROWS, Card, write_card, writing_folder


def test_rows_that_datasets_cannot_load_are_named_on_the_card(tmp_path: Path) -> None:
    with writing_folder(tmp_path / "set") as folder:
        (folder / ROWS).write_text('{"text": "\\ud800"}\n')
        fault = write_card(folder, Card("set", "made by hand"))
    assert "surrogate" in fault
    card = (tmp_path / "set" / "README.md").read_text()
    assert f"`datasets` cannot load these rows: {fault}" in card
    assert "dataset_info" not in card


def test_an_exception_leaves_nothing_and_a_killed_writer_s_folder_is_replaced(
    tmp_path: Path,
) -> None:
    left = tmp_path / ".set.partial"
    left.mkdir()
    (left / "old").write_text("")
    with pytest.raises(FileNotFoundError), writing_folder(tmp_path / "set") as folder:
        (folder / "none").read_text()
    assert list(tmp_path.iterdir()) == []
