"""Runs with ``rollout.difficulty_filter``: what taught nothing is asked less, and a kill changes none of it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers.chat_runs import events
from tests.helpers.kill_points import Point
from tests.helpers.killed_runs import kill, resume, whole
from tests.helpers.online_runs import keys_of, save_models
from tests.helpers.run_directories import left, require_equal

from taut.io import tables


def asked(out: Path) -> list[tuple[int, str]]:
    """(step, prompt) of each group."""
    rows = [
        (row["step"], row["prompt_id"])
        for batch in tables.read_tables(out / "rollouts", ["step", "prompt_id"])
        for row in batch.to_pylist()
    ]
    return list(dict.fromkeys(rows))


def test_what_taught_nothing_is_asked_less_and_a_resume_asks_the_same(tmp_path: Path) -> None:
    model = save_models(tmp_path / "models")
    keys = keys_of("grpo", model, tmp_path) | {
        "steps": 8,  # of 4 prompts each, of 13
        "rollout.difficulty_filter": 0.9,
        "rewards": [{"name": "length_target", "options": {"target": 2, "width": 1}}],
        "checkpoint.every": 2,
        "checkpoint.background": False,
    }
    whole(tmp_path / "whole", keys)
    kill(tmp_path / "out", keys, Point("update", 6))
    resume(tmp_path / "out", keys)
    require_equal(tmp_path / "out", left(tmp_path / "whole"))
    assert asked(tmp_path / "out") == asked(tmp_path / "whole")
    rollouts = events(tmp_path / "whole", "rollout")
    assert rollouts[0]["difficulty_replaced"] == 0
    assert sum(event["difficulty_replaced"] for event in rollouts) > 3
    latest = (tmp_path / "out" / "checkpoints" / "latest").read_text().strip()
    meta = json.loads((tmp_path / "out" / "checkpoints" / latest / "meta.json").read_text())
    (records,) = [
        m["difficulty"]
        for m in meta["memories"].values()
        if isinstance(m, dict) and "difficulty" in m
    ]
    assert {index for index, _, _ in records} <= set(range(13))
    assert any(not has_signal for _, _, has_signal in records)
