"""Runs that end before their last step: what they leave, and how they are resumed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.chat_runs import (
    PLAIN,
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
from tests.helpers.forked_processes import run
from tests.helpers.online_runs import keys_of, questions, save_models
from tests.helpers.online_runs import train as train_online
from tests.helpers.refusals import ErrorCode, refused
from tests.helpers.slow_cases import slow_except

import taut
from taut.run.states import state_of

Go = Callable[..., taut.Result]


@pytest.fixture
def held_out(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "held_out.jsonl", chats(7, seed=5))


@pytest.fixture
def go(model: Path, train: Path, held_out: Path, tmp_path: Path) -> Go:
    """A run with a learning rate that is far too high, so that it gets worse soon."""
    fixed = {
        **PLAIN,
        "steps": 30,
        "data__eval": str(held_out),
        "optim__learning_rate": 0.05,
        "eval__every": 2,
        "eval__best": "loss",
        "eval__stop_after": 2,
        "checkpoint__every": 1,
        "checkpoint__keep": 100,
    }
    return lambda name, **keys: sft(model, train, tmp_path / name, **{**fixed, **keys})


def killed_after(whole: Path, step: int, to: Path) -> Path:
    """A run as it was when it was killed after the checkpoint of a step."""
    shutil.copytree(whole, to)
    shutil.rmtree(to / "model")
    for path in (to / "checkpoints").glob("step-*"):
        if int(path.name[-6:]) > step:
            shutil.rmtree(path)
    lines = (to / "events.jsonl").read_text().splitlines(keepends=True)
    kept = [n for n, line in enumerate(lines) if json.loads(line).get("step") == step]
    (to / "events.jsonl").write_text("".join(lines[: kept[-1] + 1]))
    note = to / "best" / "best.json"
    if json.loads(note.read_text())["step"] > step:
        shutil.rmtree(to / "best")
    return to


def left(result: taut.Result) -> dict[str, Any]:
    """What the last event says, without what differs between runs."""
    (end,) = events(result.out, "end")[-1:]
    return {key: end[key] for key in ("outcome", "step", "loss", "metrics", "ended_early")}


def measured(out: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events(out, "eval")}


def test_a_run_ends_after_evaluations_without_a_better_value(go: Go) -> None:
    result = go("out")
    losses = measured(result.out)
    best = min(losses, key=lambda step: losses[step])
    assert list(losses) == list(range(2, best + 5, 2)), "each once, the last one two after the best"
    assert result.steps == best + 4 < 30
    end = left(result)
    assert (end["outcome"], end["step"]) == ("finished", best + 4)
    assert end["ended_early"] == (
        f"eval.stop_after=2: 2 evaluations in a row without a better loss; the best is {losses[best]:.4g} after step "
        f"{best}"
    )
    assert result.ended_early == end["ended_early"]
    assert result.metrics == {"loss": losses[best + 4]}
    assert json.loads((result.out / "best" / "best.json").read_text())["step"] == best
    assert (result.out / "checkpoints" / f"step-{best + 4:06d}").is_dir()
    state = state_of(result.out)
    assert (state.state, state.reason) == ("finished", end["ended_early"])
    # the steps are those of a run of so many steps
    plain = go("plain", steps=best + 4, eval__every=0, eval__best=None, eval__stop_after=0)
    assert column(plain.out, "loss") == column(result.out, "loss")
    assert largest_difference(weights(plain.model), weights(result.model)) == 0.0


@pytest.mark.parametrize("before_end", slow_except([0, 2], [0, 1, 2, 3, 4]))
def test_a_resumed_run_ends_at_the_same_evaluation(before_end: int, go: Go, tmp_path: Path) -> None:
    whole = go("whole")
    killed_after(whole.out, whole.steps - before_end, tmp_path / "killed")
    again = go("killed", resume=True)
    assert left(again) == left(whole)
    assert measured(again.out) == measured(whole.out)
    assert len(events(again.out, "eval")) == len(events(whole.out, "eval"))
    assert largest_difference(weights(again.model), weights(whole.model)) == 0.0
    assert largest_difference(weights(again.out / "best"), weights(whole.out / "best")) == 0.0


def test_a_run_that_ended_early_is_finished_until_it_is_asked_for_more(go: Go) -> None:
    first = go("out")
    written = (first.out / "events.jsonl").read_bytes()
    for steps in (30, 40):
        again = go("out", resume=True, steps=steps)
        assert again.notice is not None
        assert "a better loss" in again.notice
        assert (again.steps, again.ended_early) == (first.steps, first.ended_early)
    assert (first.out / "events.jsonl").read_bytes() == written
    longer = go("out", resume=True, eval__stop_after=3)
    assert longer.steps == first.steps + 2
    assert left(longer)["ended_early"].startswith("eval.stop_after=3: 3 evaluations in a row")
    assert column(longer.out, "step") == list(range(1, longer.steps + 1))


def test_epochs(go: Go, train: Path) -> None:
    rows = len(train.read_text().splitlines())
    keys = {"eval__best": None, "eval__stop_after": 0, "steps": None, "epochs": 2}
    out = go("out", **keys, eval__every="0.5 epochs", checkpoint__every="1 epoch").out
    steps = column(out, "step")
    seen = [0, *(min(6 * step, 2 * rows) for step in steps)]

    def over(share: float) -> list[int]:
        size = share * rows
        return [s for s in steps if seen[s] // size > seen[s - 1] // size]

    assert list(measured(out)) == over(0.5)
    assert [event["step"] for event in events(out, "checkpoint")] == over(1.0)


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({"eval__best": None}, "eval.stop_after/eval.best"),
        ({"eval__every": 0}, "eval.stop_after/eval.every"),
        ({"eval__every": "5 minutes"}, "eval.stop_after/eval.every"),
        ({"data__eval": None}, "eval.stop_after/data.eval/eval.answers.data"),
        (
            {"data__streaming": True, "eval__every": "1 epoch"},
            "data.streaming/eval.every",
        ),
        (
            {"data__streaming": True, "checkpoint__every": "1 epoch"},
            "data.streaming/checkpoint.every",
        ),
        (
            {"eval__every": 0, "eval__answers__every": 2, "eval__answers__rewards": "contains"},
            "eval.best/eval.every",
        ),
    ],
)
def test_what_cannot_end_early_is_refused(
    keys: dict[str, Any], code: str, go: Go, tmp_path: Path
) -> None:
    with refused(ErrorCode(code)):
        go("out", **keys)
    assert not (tmp_path / "out").exists()


def test_minutes_change_no_step(go: Go) -> None:
    """So few that an evaluation and a checkpoint are due after each step, however fast the machine is."""
    keys = {"steps": 3, "eval__best": None, "eval__stop_after": 0}
    few = "0.000001 minutes"
    out = go("out", **keys, eval__every=few, checkpoint__every=few).out
    assert list(measured(out)) == [1, 2, 3]
    assert [event["step"] for event in events(out, "checkpoint")] == [1, 2, 3]
    plain = go("plain", **keys, eval__every="100000 minutes", checkpoint__every="100000 minutes")
    assert list(measured(plain.out)) == [3]
    assert [event["step"] for event in events(plain.out, "checkpoint")] == [3]
    assert column(plain.out, "loss") == column(out, "loss")


@pytest.mark.parametrize("name", ["length_target", "words"])
def test_rollouts_end_early_by_answers(name: str, tmp_path: Path) -> None:
    """13 prompts, 4 a step: epochs end with steps 4, 7, 10 and 13. Greedy answers of a rate of nearly 0 stay as they
    are, so no later value is better."""
    own = tmp_path / "own.py"
    own.write_text("def words(answers):\n    return len([a.text for a in answers])\n")
    result = train_online(
        keys_of(
            "grpo",
            save_models(tmp_path / "models"),
            tmp_path,
            steps=20,
            data__eval=str(write_rows(tmp_path / "held_out.jsonl", questions(3))),
            eval__answers__every="1 epoch",
            eval__metrics=[f"{own}:words"] if name == "words" else [],
            eval__best=name,
            eval__stop_after=2,
            optim__learning_rate=1e-12,
        )
    )
    assert [event["step"] for event in events(result.out, "eval")] == [4, 7, 10]
    assert left(result)["step"] == 10
    assert json.loads((result.out / "best" / "best.json").read_text())["step"] == 4


@pytest.mark.slow
def test_two_ranks_end_together(
    go: Go, model: Path, train: Path, held_out: Path, tmp_path: Path
) -> None:
    """At the same evaluation as one rank."""
    keys = {**QUIET, "model": model, "data.train": train, "data.eval": held_out, "steps": 30}
    keys |= {"optim.learning_rate": 0.05, "eval.best": "loss", "eval.stop_after": 2}
    keys |= {"eval.every": 2, "check": "off", "contract.prompts": 0, "out": tmp_path / "two"}
    done = run("-m", "taut", "sft", *words_of(keys), num_ranks=2)
    assert done.returncode == 0, done.stderr[-2000:]
    one = go("one")
    (end,) = events(tmp_path / "two", "end")
    assert (end["step"], end["ended_early"]) == (one.steps, one.ended_early)
