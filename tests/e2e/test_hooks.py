"""Hooks: they see every event, may end a run, and change no number."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.chat_runs import (
    PLAIN,
    column,
    events,
    largest_difference,
    sft,
    weights,
    words_of,
)
from tests.helpers.forked_processes import run
from tests.helpers.refusals import ErrorCode, refused

import taut
from taut.train.log import read_events

Go = Callable[..., taut.Result]

COUNTER = """
import json
import random
import numpy
import torch

class Counter:
    '''Ends the run after three steps, counted over resumes; draws numbers and spoils what it is given.'''

    def __init__(self, out, settings):
        self.file, self.steps, self.most = out.parent / "seen.jsonl", 0, settings["steps"] - 3

    def __call__(self, event):
        with self.file.open("a") as file:
            file.write(json.dumps([event["kind"], event.get("step")]) + "\\n")
        random.random(), numpy.random.rand(), torch.rand(1)
        self.steps += event["kind"] == "step"
        step = event.get("step")
        event.clear()
        return f"{self.steps} steps, the last is {step}" if self.steps == self.most else None

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]

def watch(event):
    pass
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(COUNTER)
    return path


@pytest.fixture
def go(model: Path, train: Path, tmp_path: Path) -> Go:
    fixed = {**PLAIN, "steps": 6, "checkpoint__every": 1, "checkpoint__keep": 100}
    return lambda name, **keys: sft(model, train, tmp_path / name, **{**fixed, **keys})


def test_a_hook_sees_all_and_ends_the_run(go: Go, own: Path, tmp_path: Path) -> None:
    result = go("out", hooks=[f"{own}:Counter", f"{own}:watch"])
    reason = f"the hook {own}:Counter: 3 steps, the last is 3"
    assert (result.steps, result.ended_early) == (3, reason)
    (end,) = events(result.out, "end")
    assert (end["outcome"], end["step"], end["ended_early"]) == ("finished", 3, reason)
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    assert seen == [[e["kind"], e.get("step")] for e in read_events(result.out / "events.jsonl")]
    plain = go("plain", steps=3, optim__schedule="constant")
    assert column(result.out, "loss") == column(plain.out, "loss")
    assert largest_difference(weights(result.model), weights(plain.model)) == 0.0
    assert go("out", hooks=[f"{own}:Counter", f"{own}:watch"], resume=True).notice is not None
    assert go("out", hooks=[], resume=True).steps == 6


@pytest.mark.parametrize("step", [2, 3])
def test_its_state_is_part_of_the_checkpoint(step: int, go: Go, own: Path, tmp_path: Path) -> None:
    """Killed before it asked for the end, or after that and before the model was saved."""
    hooks = [f"{own}:Counter"]
    whole = go("whole", hooks=hooks)
    killed = tmp_path / "killed"
    shutil.copytree(whole.out, killed)
    shutil.rmtree(killed / "model")
    for path in sorted((killed / "checkpoints").glob("step-*"))[step:]:
        shutil.rmtree(path)
    again = go("killed", hooks=hooks, resume=True)
    assert (again.steps, again.ended_early) == (3, whole.ended_early)
    assert largest_difference(weights(again.model), weights(whole.model)) == 0.0


BROKEN = """
class Broken:
    def __call__(self, event):
        if event["kind"] == WHEN[0] and event.get("step") in (None, WHEN[1]):
            raise LookupError("no such thing")
"""


def test_an_error_ends_the_run_with_its_place(go: Go, tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text(BROKEN + "WHEN = ('step', 2)\n")
    with pytest.raises(taut.TautError, match=r"Broken raised LookupError.*\(broken\.py:5\)") as it:
        go("out", hooks=[f"{path}:Broken"])
    assert "the state after step 2 is in" in str(it.value)
    assert column(tmp_path / "out", "step") == [1, 2]
    assert events(tmp_path / "out", "end")[-1]["outcome"] == "stopped"
    path.write_text("class Broken:\n    def __call__(self, event):\n        pass\n")
    assert go("out", hooks=[f"{path}:Broken"], resume=True).steps == 6
    plain = go("plain")
    assert largest_difference(weights(tmp_path / "out" / "model"), weights(plain.model)) == 0.0


def test_an_error_at_the_end_is_a_warning(go: Go, tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text(BROKEN + "WHEN = ('end', 6)\n")
    result = go("out", hooks=[f"{path}:Broken"])
    assert result.steps == 6
    assert "LookupError" in events(result.out, "warning")[-1]["detail"]
    assert events(result.out, "end")[-1]["outcome"] == "finished"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("class A:\n    def __init__(self, trainer): ...\n", "missing 1 required positional"),
        ("class A:\n    def __init__(self): raise LookupError\n", "LookupError"),
        ("B = 1\n", "has no class 'A'"),
        ("A = lambda event: 1\n", "returned 1; expected None, or the reason"),
        (
            "class A:\n    def __call__(self, event): ...\n    def state_dict(self): return {1j}\n"
            "    def load_state_dict(self, state): ...\n",
            "set is not JSON serializable",
        ),
    ],
)
def test_what_is_no_hook_is_refused(code: str, told: str, go: Go, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(code)
    with pytest.raises(taut.TautError, match=told):
        go("out", hooks=[f"{path}:A"])


def test_another_name_is_refused(go: Go) -> None:
    with refused(ErrorCode("invalid-value")):
        go("out", hooks=["own.py"])


@pytest.mark.slow
def test_two_ranks_end_together(model: Path, train: Path, own: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "model": model,
        "data.train": train,
        "out": tmp_path / "two",
        "steps": 6,
    }
    keys |= {
        "hooks": [f"{own}:Counter"],
        "checkpoint.every": "0.000001 minutes",
        "check": "off",
        "device": "cpu",
    }
    keys |= {"stop_check.prompts": 0, "contract.prompts": 0, "data.max_length": 200}
    done = run("-m", "taut", "sft", *words_of(keys), num_ranks=2)
    assert done.returncode == 0, done.stderr[-2000:]
    assert events(tmp_path / "two", "end")[-1]["step"] == 3
    assert [event["step"] for event in events(tmp_path / "two", "checkpoint")] == [1, 2, 3]
