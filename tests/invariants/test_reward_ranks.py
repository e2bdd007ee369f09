"""A reward model in the process that trains: two gloo ranks, each with a copy, judge as one process does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.helpers.chat_runs import column, events, largest_difference, weights, write_rows
from tests.helpers.forked_processes import run
from tests.helpers.online_runs import keys_of, questions, save_models
from tests.invariants.test_ranks import PROGRAM
from tests.tools.score.test_score import save_reward

from taut.models.settings import NewHead
from taut.run.recorded import Recorded

LIMIT = 1e-9


def test_two_ranks_judge_as_one(tmp_path: Path) -> None:
    """Rewards, losses, held-out answers, final weights, and right answers before the run; next to another reward."""
    model = save_models(tmp_path)
    judge = save_reward(tmp_path, NewHead(seed=3))
    options = {"model": str(judge), "dtype": "float64"}
    rewards = [
        {"name": "reward_model", "judges": "form", "options": options},
        {"name": "length_target", "options": {"target": 5}},
    ]
    held_out = {"data.eval": str(write_rows(tmp_path / "eval.jsonl", questions(3)))}
    more = {"rewards": rewards, "check": "quick", "steps": 2, "eval.answers.every": 2, **held_out}
    todo = [
        {
            **keys_of("grpo", model, tmp_path, **more, **{"rollout.n": 3}),
            "out": str(tmp_path / name),
        }
        for name in ("one", "two")
    ]
    (tmp_path / "program.py").write_text(PROGRAM)
    for keys, num_ranks in zip(todo, (1, 2), strict=True):
        listed = tmp_path / f"{num_ranks}.json"
        listed.write_text(json.dumps([keys]))
        done = run(tmp_path / "program.py", listed, num_ranks=num_ranks)
        assert done.returncode == 0, done.stderr[-2000:]
    one, two = tmp_path / "one", tmp_path / "two"
    for out in (one, two):
        (gold,) = [e for e in events(out, "check") if e["name"] == "rewards.gold"]
        assert gold["outcome"] == "passed"
    for step in (1, 2):
        rows = [Recorded(out).rollouts(step) for out in (one, two)]
        assert len(rows[0]) == len(rows[1]) == 12
        values = [[[part["value"] for part in row["rewards"]] for row in of] for of in rows]
        assert len({value for value, _ in values[0]}) > 6
        for mine, theirs in zip(*values, strict=True):
            assert mine == pytest.approx(theirs, abs=LIMIT)
    assert column(one, "loss") == pytest.approx(column(two, "loss"), abs=LIMIT)
    assert [e["reward_model"] for e in events(one, "eval")] == pytest.approx(
        [e["reward_model"] for e in events(two, "eval")], abs=LIMIT
    )
    assert largest_difference(weights(one / "model"), weights(two / "model")) < LIMIT


def test_a_model_that_one_rank_cannot_read_ends_all(tmp_path: Path) -> None:
    options = {"model": str(tmp_path / "none"), "dtype": "float64"}
    keys = keys_of(
        "grpo",
        save_models(tmp_path),
        tmp_path,
        rewards=[{"name": "reward_model", "options": options}],
        steps=1,
    )
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "todo.json").write_text(json.dumps([keys]))
    done = run(tmp_path / "program.py", tmp_path / "todo.json", num_ranks=2, seconds=60)
    assert done.returncode != 0
    assert "none" in done.stderr
    assert not Path(keys["out"]).exists()
