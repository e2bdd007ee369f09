"""No false alarm on pictures: of models that take them every check is asked on sound rows with pictures, and on rows of
text, where the checks of pictures say so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.chat_runs import QUIET, chats, write_rows
from tests.helpers.picture_rows import chats_with_pictures
from tests.helpers.slow_cases import slow_except
from tests.helpers.vision_models import tiny_vlm

from taut.checks.examine import Examination, examine
from taut.checks.session import Session
from taut.config import from_mapping
from taut.methods.method import RunConfig
from taut.train import distributed


def ask(place: Path, kind: str, rows: list[dict[str, Any]], **keys: Any) -> Examination:
    train = write_rows(place / "train.jsonl", rows)
    fixed = {"model": str(tiny_vlm(kind, place / "m")), "data.train": str(train), "steps": 9}
    run = from_mapping(RunConfig, {**QUIET, **fixed, "dtype": "float32", **keys})
    return examine(Session(run, distributed.start("cpu")), "quick")


@pytest.mark.parametrize("kind", slow_except(["qwen3_vl"], ["qwen3_vl", "gemma3"]))
def test_sound_pictures_pass_every_check(kind: str, tmp_path: Path) -> None:
    """Positions in three dimensions and features in several layers; blocks that see both ways."""
    found = ask(tmp_path, kind, chats_with_pictures(tmp_path))
    assert not found.failures, "\n".join(f"{it.name}: {it.finding}" for it in found.failures)
    asked = {it.name: it.finding.outcome for it in found.results if "vision." in it.name}
    assert asked == dict.fromkeys(asked, "passed")
    assert len(asked) == 4


def test_rows_of_text_are_said_to_have_no_picture(tmp_path: Path) -> None:
    found = ask(tmp_path, "qwen2_vl", chats(6), freeze=["vision_tower", "projector"])
    assert not found.failures, "\n".join(f"{it.name}: {it.finding}" for it in found.failures)
    said = [it.finding for it in found.results if it.name.startswith("vision.")]
    assert {it.says for it in said} == {"no row has a picture"}


def test_equal_words_about_another_picture_are_another_sample(tmp_path: Path) -> None:
    rows = chats_with_pictures(tmp_path)
    first, _, _, _, _, _, third = rows[:7]  # pictures of one size
    answer = first["messages"][-1]
    other = {"messages": [third["messages"][0], answer]}
    held_out = write_rows(tmp_path / "eval.jsonl", [other])
    found = ask(tmp_path, "qwen2_vl", [first, *rows[2::3]], **{"data.eval": str(held_out)})
    answers = {it.name: it.finding for it in found.results}
    assert answers["data.overlap"].number == 0.0
