"""GRPO on what an agent asks: a program that knows nothing of taut, an engine of a tiny model, branches and an edit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers.chat_runs import decisions, events
from tests.helpers.online_runs import keys_of, save_models, train
from tests.helpers.run_directories import differences, left
from tests.unit.rl.test_agents import PROGRAM

from taut.cli import main
from taut.errors import ConfigError
from taut.io.tables import read_tables

AGENT = (
    PROGRAM
    + """
asked = row["messages"]
first = ask(asked)
for question in ("Sure?", "Why?"):
    last = ask([*asked, first, user(question)])
ask([*asked, {"role": "assistant", "content": "I forgot."}, user("Again?")])
status, _ = ask(asked, model="gpt-5")
assert status == 400
print(json.dumps({"reward": {"length": len(last["content"] or "") / 10}}))
"""
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("agents")
    save_models(found)
    (found / "agent.py").write_text(AGENT)
    return found


def keys(place: Path, method: str = "grpo", **more: Any) -> dict[str, Any]:
    own = {
        "rollout.environment.name": f"agent:{sys.executable} {place}/agent.py",
        "rewards": [],
        "rollout.n": 2,
        "batch.samples_per_step": 2,
        "steps": 2,
        "log.tokens.every": 1,
        "log.tokens.samples": 64,
    }
    return keys_of(method, place / "policy", place, **{**own, **more})


def test_what_an_agent_asks_is_what_is_trained_on(place: Path, tmp_path: Path) -> None:
    """Four answers a trajectory on three paths: one turn that two paths share, and an edited history. The engine's
    logprobs are the trainer's own on the same paths, and another run on the recording has the same numbers to the bit.
    """
    run = keys(place)
    out = train(run).out
    for event in events(out, "rollout"):
        assert (event["errors"], event["completions"], event["turns_mean"]) == (0, 4, 4.0)
        assert (event["paths_mean"], event["conversations"], event["edited_histories"]) == (3, 8, 4)
        assert event["reward"] == event["reward/length"]
    assert decisions(out)["the agent's sampling"][0] == "the rollout's"

    recorded: dict[str, tuple[list[int], list[int]]] = {}
    for batch in read_tables(out / "rollouts"):
        for row in batch.to_pylist():
            for number, path in enumerate([row, *row["branches"]]):
                name = row["sample_id"] + (f", branch {number}" if number else "")
                recorded[name] = path["ids_T"], path["sampled_at_N"]
            one, other = row["branches"]
            turn = one["sampled_at_N"][
                : int(np.flatnonzero(np.diff(one["sampled_at_N"]) > 1)[0]) + 1
            ]
            assert one["ids_T"][: turn[-1] + 1] == other["ids_T"][: turn[-1] + 1]
            assert other["sampled_at_N"][0] > turn[-1], "the shared turn is a target once"
    assert len(recorded) == 2 * 4 * 3
    trained = [row for batch in read_tables(out / "tokens/rank-00000") for row in batch.to_pylist()]
    assert any("branch" in row["sample_id"] for row in trained)
    for row in trained:
        assert (row["ids_T"], row["target_at_N"]) == recorded[row["sample_id"]]
    for step in events(out, "step"):
        sizes = [len(row["target_at_N"]) for row in trained if row["step"] == step["step"]]
        assert step["num_targets"] == sum(sizes)
        assert step["num_tokens"] < step["num_tokens_unshared"]
        assert step["engine/difference"] < 1e-9

    replayed = train({**run, "out": str(tmp_path / "again"), "rollout.replay_from": str(out)}).out
    assert not differences(left(replayed), left(out))


def test_a_method_that_compares_tokens_takes_no_agent(place: Path) -> None:
    with pytest.raises(ConfigError, match="what an agent asks may branch"):
        train(keys(place, "ppo", out=str(place / "ppo")))


SECRETS = ("hunter2", "tr0ub4dor")
LEAKS = (
    PROGRAM
    + """
asked = row["messages"]
ask(asked)
if row.get("n", 0) % 2:
    sys.exit(f"cannot reach s3://AKIA:{sys.argv[2]}/x@bucket with --api-key {sys.argv[2]}")
print(json.dumps({"reward": 1.0}))
"""
)


@pytest.mark.slow
def test_no_byte_of_a_run_has_a_secret(
    place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of the command of an agent, of the environment that it sets, and of what an agent says at its end; taut resume
    asks for it again, and another secret is no other run.
    """
    (place / "leaks.py").write_text(LEAKS)

    def command(secret: str) -> str:
        return (
            f"agent:env GITHUB_TOKEN={secret} {sys.executable} {place}/leaks.py --api-key {secret}"
        )

    run = keys(
        place,
        **{
            "out": str(tmp_path / "out"),
            "rollout.environment.name": command(SECRETS[0]),
            "checkpoint.every": 1,
            "rollout_monitor.max_errors": 1.0,
            "loss_monitor.nothing_learned": "warn",
        },
    )
    out = train(run).out
    assert "rollout.environment.name" in json.loads((out / "resolved.json").read_text())["redacted"]

    def require_clean() -> None:
        printed = capfd.readouterr()
        assert not any(secret in printed.out + printed.err for secret in SECRETS)
        for path in out.rglob("*"):
            if path.is_file():
                found = path.read_bytes()
                assert not any(secret.encode() in found for secret in SECRETS), path

    require_clean()
    assert main(["resume", str(out), "steps=3"]) == 2
    assert "keeps no secrets, and rollout.environment.name had one" in capfd.readouterr().err
    assert (
        main(["resume", str(out), "steps=3", f"rollout.environment.name={command(SECRETS[1])}"])
        == 0
    )
    assert len(events(out, "step")) == 3
    require_clean()
