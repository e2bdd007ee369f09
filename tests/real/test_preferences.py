"""The examples on short answers, on the real model: they reach what their expected.json says."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import taut
from taut.train.log import all_events

pytestmark = [pytest.mark.real, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples"


def expected(name: str) -> dict[str, float]:
    found: dict[str, float] = json.loads((EXAMPLES / name / "expected.json").read_text())
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pairs")
    subprocess.run([sys.executable, EXAMPLES / "shorter/pairs.py", place], check=True)
    return place


def keys(model: Path, data: Path) -> dict[str, Any]:
    return {"model": str(model), "data": {s: str(data / f"{s}.jsonl") for s in ("train", "eval")}}


def stopped(model: Path, data: Path) -> float:
    """The share of answers to held-out questions that end."""
    asked = {"data": str(data / "eval.jsonl"), "reference": "answer", "rewards": "contains"}
    found = taut.evaluate(model=str(model), **asked, **{"sampling.max_new_tokens": 96, "limit": 64})
    return float(found.report.values()["stopped"])


def test_pairs_are_as_many_as_said_and_no_question_is_in_both(data: Path) -> None:
    wanted = expected("shorter")
    questions = {}
    for split in ("train", "eval"):
        rows = [json.loads(line) for line in (data / f"{split}.jsonl").read_text().splitlines()]
        assert len(rows) == wanted[f"{split}_pairs"]
        questions[split] = {row["prompt"][0]["content"] for row in rows}
        assert all(row["answer"] in row["rejected"][0]["content"] for row in rows)
    assert not questions["train"] & questions["eval"]


def test_the_shorter_answer_is_learned_and_answers_still_end(
    real_model: Path, data: Path, tmp_path: Path
) -> None:
    wanted = expected("shorter")
    before = stopped(real_model, data)
    out = tmp_path / "dpo"
    result = taut.dpo(EXAMPLES / "shorter/run.toml", out=str(out), **keys(real_model, data))
    first = next(event for event in all_events(out / "events.jsonl") if event["kind"] == "step")
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert wanted["loss_first"] == round(first["loss"], 4)
    assert first["rewards/accuracy"] == wanted["accuracy_before"]
    assert result.metrics["rewards/accuracy"] >= wanted["accuracy_after_at_least"]
    assert stopped(result.model, data) >= before - wanted["stopped_falls_by_at_most"]


def test_a_reward_model_of_the_same_pairs(real_model: Path, data: Path, tmp_path: Path) -> None:
    out, path = tmp_path / "rm", EXAMPLES / "shorter-reward/run.toml"
    result = taut.reward(path, out=str(out), **keys(real_model, data))
    assert result.metrics["accuracy"] >= expected("shorter-reward")["accuracy_after_at_least"]
    scored = taut.score(model=str(result.model), data=str(data / "eval.jsonl"))
    assert scored.accuracy == pytest.approx(result.metrics["accuracy"])


def test_right_and_short_from_rewards_alone(real_model: Path, data: Path, tmp_path: Path) -> None:
    wanted, out = expected("grpo-shorter"), tmp_path / "grpo"
    given = {"model": str(real_model), "data": {"train": str(data / "train.jsonl")}}
    taut.grpo(EXAMPLES / "grpo-shorter/run.toml", out=str(out), **given)
    rollouts = [e for e in all_events(out / "events.jsonl") if e["kind"] == "rollout"]
    last = rollouts[-1]
    assert len(rollouts) == wanted["steps"]
    assert last["reward"] >= wanted["reward_last_at_least"]
    assert last["stopped"] >= wanted["stopped_last_at_least"]
    assert last["tokens_mean"] <= wanted["tokens_last_at_most"]
