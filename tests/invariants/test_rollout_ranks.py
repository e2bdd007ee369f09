"""Two gloo ranks that share out environments and agents sample, and learn, as one process does."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.chat_runs import column, largest_difference, weights, write_rows
from tests.helpers.forked_processes import run
from tests.helpers.online_runs import keys_of, questions, save_models
from tests.helpers.slow_cases import slow_except
from tests.invariants.test_ranks import PROGRAM
from tests.unit.rl.test_agents import PROGRAM as ASK

from taut.run.recorded import Recorded

LIMIT = 1e-9
TALK = """
from taut.rl.environment import Step

class Talk:
    def __init__(self):
        self.said = []

    def step(self, text, calls):
        self.said.append(len(text))
        done = len(self.said) == 3 or len(text) % 7 == 3
        return Step([{"role": "user", "content": f"I heard {self.said}."}], done, -sum(self.said))
"""
AGENT = (
    ASK
    + """
asked, length = row["messages"], 0
first = ask(asked)
for question in ("Sure?", "Why?"):
    told = ask([*asked, first, user(question)])  # refused where the first answer is empty
    length += len(told["content"] or "") if isinstance(told, dict) else 0
print(json.dumps({"reward": length / 10}))
"""
)
KINDS: dict[str, dict[str, Any]] = {
    "forks": {
        "rollout.environment.name": "{place}/talk.py:Talk",
        "rollout.fork": {"turns": [1, 2]},
        "rollout.n": 8,
        "grpo.advantage": "tree",
    },
    "agents": {"rollout.environment.name": "agent:{python} {place}/agent.py", "rollout.n": 3},
    "by row": {
        "rollout.environment.by_row": {
            "talk": "{place}/talk.py:Talk",
            "agent": "agent:{python} {place}/agent.py",
        },
        "rollout.n": 3,
    },
}


@pytest.mark.parametrize("kind", slow_except(["by row"], KINDS))
def test_two_ranks_sample_as_one(kind: str, tmp_path: Path) -> None:
    model = save_models(tmp_path)
    (tmp_path / "talk.py").write_text(TALK)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "program.py").write_text(PROGRAM)
    given = json.dumps(KINDS[kind]).replace("{place}", str(tmp_path))
    own = json.loads(given.replace("{python}", sys.executable))
    keys = keys_of("grpo", model, tmp_path, rewards=[], steps=2, **{"batch.samples_per_step": 3})
    named = [
        {**row, "environment": ["talk", "agent"][number % 2]}
        for number, row in enumerate(questions(13))
    ]
    keys["data.train"] = str(write_rows(tmp_path / "named.jsonl", named))
    rows = []
    for num_ranks in (1, 2):
        out = tmp_path / f"{num_ranks}"
        listed = tmp_path / f"{num_ranks}.json"
        listed.write_text(json.dumps([{**keys, **own, "out": str(out)}]))
        done = run(tmp_path / "program.py", listed, num_ranks=num_ranks)
        assert done.returncode == 0, done.stderr[-2000:]
        rows.append([row for step in (1, 2) for row in Recorded(out).rollouts(step)])
    assert len(rows[0]) == len(rows[1]) == 2 * 3 * own["rollout.n"]
    for one, two in zip(*rows, strict=True):
        assert one["error"] is None
        for field in ("sample_id", "ids_T", "sampled_at_N", "messages", "reward"):
            assert one[field] == two[field], field
        assert one["advantage_N"] == pytest.approx(two["advantage_N"], abs=1e-6)
        for mine, theirs in zip(one["branches"], two["branches"], strict=True):
            assert mine["ids_T"] == theirs["ids_T"]
    if kind == "forks":
        assert {len(row["forks"]) for row in rows[0]} == {0, 1, 2}, "some end before a fork"
    else:
        assert any(row["branches"] for row in rows[0]), "agents branch"
    one, two = tmp_path / "1", tmp_path / "2"
    assert column(one, "loss") == pytest.approx(column(two, "loss"), abs=LIMIT)
    assert any(column(one, "loss"))
    assert largest_difference(weights(one / "model"), weights(two / "model")) < LIMIT
