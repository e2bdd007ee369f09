"""A run that leaves it open is evaluated each epoch where there are held-out rows, and saved by minutes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.chat_runs import PLAIN, chats, column, events, sft, write_rows

from taut.config import from_mapping
from taut.errors import ConfigError
from taut.methods.grpo import Grpo
from taut.methods.method import RunConfig
from taut.methods.sft import Sft
from taut.run.setup import decide_cadences
from taut.train.sharded import allocate

OPEN = {"model": "m", "out": "o", "data.train": "a.jsonl"}


def cadences(run: RunConfig) -> tuple[int | str | None, int | str | None]:
    return run.eval.every, run.checkpoint.every


@pytest.mark.parametrize(
    ("keys", "expected", "told"),
    [
        ({}, (0, "15 minutes"), ["checkpoint.every"]),
        ({"data.eval": "b.jsonl"}, ("1 epoch", "15 minutes"), ["checkpoint.every", "eval.every"]),
        ({"data.eval": "b.jsonl", "eval.every": 0, "checkpoint.every": 0}, (0, 0), []),
        ({"data.eval": "b.jsonl", "eval.every": 3, "checkpoint.every": 9}, (3, 9), []),
        (  # a stream has no epochs
            {"data.eval": "b.jsonl", "data.streaming": True, "steps": 4},
            (0, "15 minutes"),
            ["checkpoint.every"],
        ),
    ],
)
def test_what_is_left_open_is_decided_and_told(
    keys: dict[str, Any], expected: tuple[Any, Any], told: list[str]
) -> None:
    run, decisions = decide_cadences(from_mapping(Sft, {**OPEN, **keys}))
    assert cadences(run) == expected
    assert [one.name for one in decisions] == told
    assert [one.value for one in decisions] == [
        str({"eval.every": run.eval.every, "checkpoint.every": run.checkpoint.every}[name])
        for name in told
    ]
    # decided once
    assert decide_cadences(run) == (run, [])


def test_answers_are_generated_at_the_end_only() -> None:
    """No held-out loss is measured where answers are generated: nothing is decided, and nothing refused."""
    run, decisions = decide_cadences(
        from_mapping(Grpo, {**OPEN, "data.eval": "b.jsonl", "rewards": ["exact_match"]})
    )
    assert cadences(run) == (0, "15 minutes")
    assert [one.name for one in decisions] == ["checkpoint.every"]


def test_a_run_measures_each_epoch_and_allocates_no_buffers_it_does_not_need(
    model: Path, train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocated = []
    monkeypatch.setattr("taut.train.sharded.allocate", lambda s: allocated.append(1) or allocate(s))
    held_out = write_rows(tmp_path / "held_out.jsonl", chats(3, seed=5))
    keys = {
        **PLAIN,
        "checkpoint__every": None,
        "data__eval": str(held_out),
        "epochs": 2,
        "batch__samples_per_step": 4,
    }
    sft(model, train, tmp_path / "out", **keys)
    num_steps = json.loads((tmp_path / "out" / "resolved.json").read_text())["num_steps"]
    assert [event["step"] for event in events(tmp_path / "out", "eval")] == [
        num_steps // 2,
        num_steps,
    ]
    assert [event["step"] for event in events(tmp_path / "out", "checkpoint")] == [num_steps]
    assert not allocated
    # due while it trains: buffers are made once, and the same weights saved
    monkeypatch.setattr("taut.run.setup.CHECKPOINT_EVERY", "0.000001 minutes")
    sft(model, train, tmp_path / "often", **keys)
    saved = [event["step"] for event in events(tmp_path / "often", "checkpoint")]
    assert saved == list(range(1, num_steps + 1))
    assert allocated == [1]
    assert column(tmp_path / "often", "loss") == column(tmp_path / "out", "loss")


def test_the_best_model_of_one_epoch_is_refused(model: Path, train: Path, tmp_path: Path) -> None:
    held_out = write_rows(tmp_path / "held_out.jsonl", chats(3, seed=5))
    with pytest.raises(ConfigError, match=r"eval\.every=1 epoch: it is measured at the end only"):
        sft(model, train, tmp_path / "out", **PLAIN, data__eval=str(held_out), eval__best="loss")
    assert not (tmp_path / "out").exists()
