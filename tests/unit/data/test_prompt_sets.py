"""Prompts as a data set: each has a name of its own, whatever files call their rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.chat_runs import write_rows
from tests.helpers.tiny_tokenizers import tiny_tokenizer

from taut.config import from_mapping
from taut.data.render.render import Renderer
from taut.data.rows.prompts import PromptSet, load_prompt_set
from taut.data.settings import DataConfig
from taut.errors import ConfigError, DataError


def loaded(*paths: Path, most: int = 40, **keys: Any) -> PromptSet:
    config = from_mapping(DataConfig, {"train": [str(path) for path in paths], **keys})
    return load_prompt_set(config, "train", Renderer(tiny_tokenizer()), most)


def rows(*words: str, **columns: Any) -> list[dict[str, Any]]:
    return [{"prompt": word, "answer": "4", "id": n, **columns} for n, word in enumerate(words)]


def test_rows_keep_their_own_names_where_no_two_are_equal(tmp_path: Path) -> None:
    one = write_rows(tmp_path / "one.jsonl", rows("cat", "dog"))
    two = write_rows(tmp_path / "two.jsonl", rows("bird"))
    assert [row.id for row in loaded(one).prompt_rows] == ["0", "1"]
    names = [row.id for row in loaded(one, two).prompt_rows]
    assert names == [f"{one}:1", f"{one}:2", f"{two}:1"]
    twice = loaded(two, two)
    assert [row.id for row in twice.prompt_rows] == [f"{two}:1", f"{two}(2):1"]
    assert [row.place for row in twice.prompt_rows] == [f"{two}:1"] * 2


def test_a_prompt_is_refused_or_left_out_where_it_is_too_long(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", rows("cat", "cat " * 50, "dog"))
    with pytest.raises(DataError, match=r"rows\.jsonl:2: the prompt has .* may have 20; .*drop"):
        loaded(path, most=20)
    kept = loaded(path, most=20, too_long="drop")
    assert [row.id for row in kept.prompt_rows] == ["0", "2"]
    assert [len(sample.ids_T) for sample in kept] == [row.ids_T.size for row in kept.prompt_rows]
    assert [incident.place for incident in kept.report.dropped] == [f"{path}:2"]
    with pytest.raises(DataError, match="none of its 3 prompts has at most 1 tokens"):
        loaded(path, most=1, too_long="drop")


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("too_long", "truncate", "would cut prompts"),
        ("too_long", "split", "would cut prompts"),
        ("targets", "all", r"data\.targets is set"),
        ("min_length", 4, r"data\.min_length is set"),
        ("cache", "somewhere", r"data\.cache=somewhere, and prompts are read again"),
    ],
)
def test_what_has_no_meaning_for_prompts_is_refused(
    key: str, value: Any, told: str, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", rows("cat"))
    with pytest.raises(ConfigError, match=told):
        loaded(path, **{key: value})


def test_a_row_by_another_name_is_another_row(tmp_path: Path) -> None:
    """Its name keys what is drawn for it: the place, where a row has none of its own."""
    named = [row | {"id": None} for row in rows("cat", "dog")]
    path = write_rows(tmp_path / "rows.jsonl", named)
    before = loaded(path).parts[0].shards.digest
    path.write_text("\n" + path.read_text())
    assert loaded(path).parts[0].shards.digest != before


def test_an_empty_prompt_is_refused_or_left_out(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [*rows("cat", ""), {"prompt": None, "id": 3}])
    with pytest.raises(DataError, match=r"rows\.jsonl:2: prompt is empty; .*data\.empty=drop"):
        loaded(path)
    kept = loaded(path, empty="drop")
    assert [row.id for row in kept.prompt_rows] == ["0"]
    assert [incident.place for incident in kept.report.dropped] == [f"{path}:2", f"{path}:3"]
