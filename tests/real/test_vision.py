"""The example with pictures, whole: minutes. It needs no model of the cache."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import taut
from taut.train.log import all_events

pytestmark = [pytest.mark.real, pytest.mark.slow]

EXAMPLE = Path(__file__).parents[2] / "examples" / "vision"


def test_held_out_pictures_are_understood(tmp_path: Path) -> None:
    wanted = json.loads((EXAMPLE / "expected.json").read_text())
    subprocess.run([sys.executable, EXAMPLE / "make.py", tmp_path], check=True)
    out = tmp_path / "run"
    taut.sft(
        EXAMPLE / "run.toml",
        model=str(tmp_path / "model"),
        data={"train": str(tmp_path / "train.jsonl")},
        out=str(out),
        **{"eval.answers.data": str(tmp_path / "eval.jsonl")},
    )
    found = [event for event in all_events(out / "events.jsonl") if event["kind"] == "eval"]
    assert [event["step"] for event in found] == wanted["evaluated_after"]
    assert {event["num_prompts"] for event in found} == {wanted["questions"]}
    first, last = found[0], found[-1]
    assert first["exact_match"] >= wanted["exact_match_first_at_least"]
    assert last["exact_match"] >= wanted["exact_match_at_least"] > 2 * wanted["chance"]
    assert last["stopped"] >= wanted["stopped_at_least"]
