"""A run that is killed and resumed is the run that was not: bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.chats import (
    QUIET,
    chats,
    column,
    events,
    largest_difference,
    sft,
    weights,
    words_of,
    write_rows,
)

import taut

Go = Callable[..., taut.Result]

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "full in bfloat16": {"dtype": "bfloat16"},
    "lora with noise": {"lora__rank": 4, "lora__dropout": 0.2, "noise__neftune_alpha": 5.0},
    "lora by rows": {"lora__rank": 4, "lora__train_rows": "always"},
}


@pytest.fixture
def go(model: Path, train: Path, tmp_path: Path) -> Go:
    fixed = {"steps": 6, "checkpoint__every": 2, "checkpoint__keep": 3, "optim__schedule": "cosine"}
    return lambda name, **keys: sft(model, train, tmp_path / name, **{**fixed, **keys})


def killed_copy(run: Path, to: Path) -> Path:
    """``run`` as it was when it was killed after step 5 and during the checkpoint of step 6."""
    shutil.copytree(run, to)
    shutil.rmtree(to / "model")
    shutil.rmtree(to / "adapter", ignore_errors=True)
    final = to / "checkpoints" / "step-000006"
    (final / "meta.json").unlink()
    final.rename(to / "checkpoints" / ".step-000006.partial")
    path = to / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    last = next(i for i, line in enumerate(lines) if '"step": 6' in line and '"step"' in line[:16])
    path.write_text("".join(lines[:last]) + lines[last][:30])
    return to


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_equals_uninterrupted_bit_for_bit(kind: str, go: Go, tmp_path: Path) -> None:
    whole = go("whole", **KINDS[kind]).out
    killed = killed_copy(whole, tmp_path / "killed")
    assert column(killed, "step") == [1, 2, 3, 4, 5]
    resumed = go("killed", resume=True, **KINDS[kind])
    assert [event["from_step"] for event in events(killed, "resume")] == [4]
    for name in ("step", "loss", "grad_norm", "sample_ids", "learning_rate"):
        assert column(killed, name) == column(whole, name)
    assert resumed.loss == column(whole, "loss")[-1]
    assert largest_difference(weights(killed / "model"), weights(whole / "model")) == 0.0
    if "lora__rank" in KINDS[kind]:
        assert largest_difference(weights(killed / "adapter"), weights(whole / "adapter")) == 0.0
    names = sorted(path.name for path in (killed / "checkpoints").iterdir())
    assert names == ["latest", "step-000002", "step-000004", "step-000006"]
    assert (killed / "checkpoints" / "latest").read_text() == "step-000006\n"


def test_a_resumed_run_may_be_longer(go: Go) -> None:
    keys = {"optim__schedule": "constant", "checkpoint__keep": 1}
    whole = go("whole", **keys)
    go("parts", steps=2, **keys)
    parts = go("parts", resume=True, **keys)
    assert column(parts.out, "loss") == column(whole.out, "loss")
    assert largest_difference(weights(parts.model), weights(whole.model)) == 0.0


def test_only_the_newest_are_kept(go: Go) -> None:
    out = go("out", checkpoint__keep=2).out
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == ["latest", "step-000004", "step-000006"]
    assert [Path(event["path"]).name for event in events(out, "checkpoint")] == [
        "step-000002",
        "step-000004",
        "step-000006",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 7}, r"config\.seed: 0 then, 7 now"),
        ({"optim__learning_rate": 0.5}, r"config\.optim\.learning_rate: 0\.001 then, 0\.5 now"),
        ({"batch__samples_per_step": 3}, r"config\.batch\.samples_per_step: 6 then, 3 now"),
    ],
)
def test_a_changed_configuration_is_refused_with_its_key(
    changes: dict[str, Any], message: str, go: Go, tmp_path: Path
) -> None:
    go("out", steps=2)
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    with pytest.raises(taut.ConfigError, match=message):
        go("out", resume=True, **changes)
    after = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert after == before, "a refused resume leaves the run as it was"


def test_changed_data_are_refused(model: Path, tmp_path: Path) -> None:
    train = write_rows(tmp_path / "rows.jsonl", chats(8))
    keys = {"steps": 2, "checkpoint__every": 1}
    sft(model, train, tmp_path / "out", **keys)
    write_rows(train, chats(8, seed=1))
    with pytest.raises(taut.ConfigError, match=r"belongs to another run: data\..*rows\.jsonl.*: other content, \w{12}"):
        sft(model, train, tmp_path / "out", resume=True, **keys)


def test_resuming_without_a_checkpoint_starts_at_step_one(go: Go) -> None:
    first = go("out", checkpoint__every=0)
    again = go("out", checkpoint__every=0, resume=True)
    assert column(again.out, "step") == [1, 2, 3, 4, 5, 6]
    assert again.loss == first.loss


def test_killed_by_the_system_and_resumed(model: Path, train: Path, tmp_path: Path) -> None:
    """A real kill -9 in the middle of a step."""
    keys = {"steps": 60, "checkpoint__every": 7}
    whole = sft(model, train, tmp_path / "whole", **keys)
    out = tmp_path / "killed"
    dotted = {"steps": 60, "checkpoint.every": 7, "out": out, "model": model, "data.train": train}
    process = subprocess.Popen(
        [sys.executable, "-m", "taut", "sft", *words_of({**QUIET, **dotted})]
    )
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            if (out / "checkpoints" / "step-000014" / "meta.json").exists():
                break
            time.sleep(0.01)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert not (out / "model").exists(), "it was killed before its end"
    resumed = sft(model, train, out, resume=True, **keys)
    assert column(out, "step") == list(range(1, 61))
    assert column(out, "loss") == column(whole.out, "loss")
    assert largest_difference(weights(resumed.model), weights(whole.model)) == 0.0
