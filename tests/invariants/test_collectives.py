"""The collectives of a step of two ranks: three of the package's own, however many parameters and metrics there are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.helpers import judged_runs, online_runs
from tests.helpers.chat_runs import QUIET, chats, write_rows
from tests.helpers.forked_processes import run

OWN = {"optim.clip": 1, "step_statistics.totals": 2}
"""The gradient norm; the object with the sums, the signals, and the next step's counts."""


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    place = tmp_path_factory.mktemp("collectives")
    model = online_runs.save_models(place)
    steps = {"steps": 6, "check": "off", "stop_check.prompts": 0, "contract.prompts": 0}
    train = str(write_rows(place / "t.jsonl", chats(10)))
    todo: dict[str, dict[str, Any]] = {
        "sft": {**QUIET, "method": "sft", "model": str(model), "data.train": train},
        "dpo": judged_runs.keys_of("dpo", model, place / "dpo"),
        # the second step of a rollout, which the loop knows before the first has ended
        "grpo": {
            **online_runs.keys_of("grpo", model, place / "grpo"),
            "rollout.minibatches": 2,
        },
    }
    runs = [{**keys, **steps, "out": str(place / "out" / name)} for name, keys in todo.items()]
    (place / "todo.json").write_text(json.dumps(runs))
    done = run("-m", "tests.helpers.collectives", place / "todo.json", num_ranks=2)
    assert done.returncode == 0, done.stderr
    found = json.loads((place / "todo.json.counted").read_text())
    return dict(zip(todo, found, strict=True))


@pytest.mark.parametrize("method", ["sft", "dpo", "grpo"])
@pytest.mark.slow
def test_a_step_makes_three_of_its_own(method: str, counted: dict[str, dict[str, int]]) -> None:
    found = counted[method]
    own = {name: count for name, count in found.items() if not name.startswith("sharding ")}
    assert own == OWN
    assert len(found) > len(own), "the model is sharded"
