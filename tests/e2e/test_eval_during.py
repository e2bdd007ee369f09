"""Evaluation by generation while a tiny model trains, and the best of its models."""

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
from tests.helpers.refusals import ErrorCode, refused
from tests.helpers.slow_cases import slow_except

import taut
from taut.cli import main
from taut.errors import SandboxError
from taut.evals.contract import read_contract
from taut_tools.sandbox.shared import shared

Go = Callable[..., taut.Result]

ANSWERS: dict[str, Any] = {
    "eval__answers__rewards": ["exact_match", "contains"],
    "eval__answers__every": 2,
    "eval__answers__limit": 5,
    "eval__answers__sampling__max_new_tokens": 6,
}


@pytest.fixture
def held_out(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "held_out.jsonl", chats(7, seed=5))


@pytest.fixture
def go(model: Path, train: Path, held_out: Path, tmp_path: Path) -> Go:
    """``go(name, **keys)`` runs 5 steps into ``tmp_path/name``."""
    fixed = {**PLAIN, "steps": 5, "data__eval": str(held_out)}
    return lambda name, **keys: sft(model, train, tmp_path / name, **{**fixed, **keys})


def answered(out: Path) -> list[dict[str, Any]]:
    return [event for event in events(out, "eval") if "exact_match" in event]


def test_answers_are_measured_every_so_often_and_at_the_end(go: Go, held_out: Path) -> None:
    result = go("out", **ANSWERS)
    found = answered(result.out)
    assert [event["step"] for event in found] == [2, 4, 5]
    for event in found:
        assert event["num_prompts"] == 5
        assert 0 <= event["exact_match_low"] <= event["exact_match"] <= event["exact_match_high"]
        assert event["exact_match"] <= event["contains"] <= 1
        assert 0 <= event["stopped"] <= 1
        assert 1 <= event["tokens_mean"] <= 6
    sample = found[-1]["samples"][0]
    rows = [json.loads(line) for line in held_out.read_text().splitlines()]
    assert sample["references"] == [rows[0]["messages"][-1]["content"]]
    assert sample["finish_reason"] in ("stop", "length")
    assert sample["place"] == f"{held_out}:1"
    assert result.metrics["exact_match"] == found[-1]["exact_match"]
    assert result.metrics["loss"] == result.eval_loss
    assert events(result.out, "end")[-1]["metrics"] == result.metrics


@pytest.mark.parametrize("temperature", slow_except([1.0], [0.0, 1.0]))
def test_a_run_that_is_evaluated_takes_the_steps_of_one_that_is_not(
    temperature: float, go: Go
) -> None:
    keys = {"lora__rank": 2, "lora__dropout": 0.2, "dtype": "float32"}
    plain = go("plain", data__eval=None, **keys)
    sampling = {
        "eval__answers__sampling__temperature": temperature,
        "eval__answers__sampling__n": 2 if temperature else 1,
    }
    measured = go("measured", **keys, **ANSWERS, **sampling, eval__best="stopped")
    assert column(measured.out, "loss") == column(plain.out, "loss")
    assert column(measured.out, "grad_norm") == column(plain.out, "grad_norm")
    assert largest_difference(weights(measured.model), weights(plain.model)) == 0.0


def learning(rows: Path, **keys: Any) -> dict[str, Any]:
    """A run that learns one answer by heart and then is made to forget it."""
    return {
        "steps": 12,
        "data__eval": str(rows),
        "optim__learning_rate": 3e-3,
        "eval__every": 3,
        "eval__best": "loss",
        **keys,
    }


def test_the_best_model_is_kept_and_loads(go: Go, held_out: Path) -> None:
    """The learning rate is far too high at the end, so that the last model is not the best."""
    keys = learning(held_out, optim__learning_rate=0.05, optim__schedule="constant")
    keys["contract__prompts"] = 2
    result = go("out", **keys)
    losses = {event["step"]: event["loss"] for event in events(result.out, "eval")}
    best = min(losses, key=lambda step: losses[step])
    assert best < 12, losses
    note = json.loads((result.out / "best" / "best.json").read_text())
    assert (note["step"], note["metric"], note["value"]) == (best, "loss", losses[best])
    told = events(result.out, "best")
    assert told[-1]["step"] == best
    values = [event["value"] for event in told]
    assert values == sorted(values, reverse=True)
    upto = go("upto", **{**keys, "steps": best, "eval__best": None})
    assert largest_difference(weights(result.out / "best"), weights(upto.model)) == 0.0
    assert largest_difference(weights(result.out / "best"), weights(result.model)) > 0.0
    names = {path.name for path in result.model.iterdir()}
    assert {path.name for path in (result.out / "best").iterdir()} == {*names, "best.json"}
    assert main(["verify", str(result.out / "best")]) == 0
    assert read_contract(result.out / "best").goldens


def test_a_resumed_run_goes_on_from_the_best_it_left(go: Go, held_out: Path) -> None:
    keys = learning(held_out, optim__learning_rate=0.05, checkpoint__every=4)
    whole = go("whole", **keys)
    go("parts", **{**keys, "steps": 5})
    note = (whole.out.parent / "parts" / "best" / "best.json").read_text()
    parts = go("parts", **keys, resume=True)
    assert events(parts.out, "best")[-1]["value"] == events(whole.out, "best")[-1]["value"]
    read = json.loads((parts.out / "best" / "best.json").read_text())
    assert read["value"] <= json.loads(note)["value"]
    best = largest_difference(weights(parts.out / "best"), weights(whole.out / "best"))
    assert best == 0.0 or read["step"] <= 5


def test_a_best_measured_otherwise_is_refused(go: Go, held_out: Path, tmp_path: Path) -> None:
    keys = learning(held_out, steps=4, checkpoint__every=2)
    go("out", **keys)
    with pytest.raises(
        taut.ConfigError, match=r"is the best model by loss, and eval\.best=stopped"
    ):
        go("out", **{**keys, **ANSWERS, "eval__best": "stopped", "steps": 6}, resume=True)
    write_rows(held_out, chats(7, seed=6))
    with pytest.raises(taut.ConfigError, match="is the best model by loss on other data"):
        go("out", **{**keys, "steps": 6}, resume=True)
    shutil.rmtree(tmp_path / "out" / "best")
    assert go("out", **{**keys, "steps": 6}, resume=True).steps == 6


def test_of_equal_values_the_earlier_stays(go: Go, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("def same(text, references, row):\n    return 0.5\n")
    keys = {**ANSWERS, "eval__answers__rewards": f"{path}:same", "eval__best": "same"}
    out = go("out", **keys).out
    assert [event["step"] for event in events(out, "best")] == [2]


BROKEN = """
def picky(text, references, row):
    raise LookupError("no such answer")
"""


def test_errors_of_a_reward_are_told_and_never_the_best(go: Go, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(BROKEN)
    rewards = [f"{path}:picky", "exact_match"]
    keys = {**ANSWERS, "eval__answers__rewards": rewards, "eval__best": "picky"}
    result = go("out", check="off", **keys)  # rewards.gold would end it
    assert result.metrics.keys() == {"loss", "exact_match", "stopped"}
    assert [
        event["picky_errors"] for event in events(result.out, "eval") if "stopped" in event
    ] == [5, 5, 5]
    warnings = events(result.out, "warning")
    assert "5 scores of picky are errors, the first: " in warnings[0]["detail"]
    assert "LookupError: no such answer" in warnings[0]["detail"]
    assert "eval.best: picky has no value" in warnings[1]["detail"]
    assert not (result.out / "best").exists()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"eval__best": "exact"}, r"found eval\.best=exact; expected one of loss, exact_match, "),
        (
            {"eval__every": 0, "eval__best": "loss"},
            r"eval\.best=loss and eval\.every=0: .* set eval\.every",
        ),
        ({"eval__answers__every": 0, "eval__best": "stopped"}, r"eval\.answers\.every=0"),
        ({"eval__answers__rewards": ["exakt"]}, "found the reward 'exakt'; expected one of exact"),
        (
            {"eval__answers__rewards": []},
            ErrorCode("eval.answers.every/eval.answers.rewards/eval.metrics"),
        ),
        ({"data__eval": None}, "is set without data to ask"),
        (
            {"eval__answers__reference": "gold"},
            r"held_out\.jsonl:1: the row has no column 'gold'.*messages",
        ),
        (
            {"eval__answers__rewards": ["numeric"]},
            r"held_out\.jsonl:1: numeric: .*without a number",
        ),
        (
            {"eval__answers__sampling__n": 4},
            ErrorCode("eval.answers.sampling.temperature/eval.answers.sampling.n"),
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_written(
    keys: dict[str, Any], message: str, go: Go, tmp_path: Path
) -> None:
    with refused(message, taut.TautError):
        go("out", **{**ANSWERS, **keys})
    assert not (tmp_path / "out").exists()


def test_what_holds_programs_is_a_decision_of_the_run(go: Go) -> None:
    try:
        held = shared().mechanism
    except SandboxError:
        pytest.skip("no mechanism holds programs here")
    result = go("out", steps=1, check="off", eval__answers__rewards="code")
    (start,) = events(result.out, "start")
    assert ["sandbox", held.name, held.reason] in start["decisions"]


def test_what_is_asked_is_an_input_that_overwriting_must_not_delete(go: Go, tmp_path: Path) -> None:
    go("out", steps=1)
    asked = write_rows(tmp_path / "out" / "model" / "asked.jsonl", chats(3))
    with pytest.raises(taut.OutputError, match=r"overwrite=true would delete .*asked"):
        go("out", **ANSWERS, eval__answers__data=str(asked), overwrite=True)
    own = tmp_path / "out" / "model" / "own.py"
    own.write_text("def same(text, references, row):\n    return 1\n")
    keys = {**ANSWERS, "eval__answers__rewards": [f"{own}:same"]}
    with pytest.raises(taut.OutputError, match=r"overwrite=true would delete .*own\.py"):
        go("out", **keys, overwrite=True)
    assert asked.exists()
    assert own.exists()


@pytest.mark.slow
def test_two_ranks_measure_what_one_does(
    model: Path, train: Path, held_out: Path, go: Go, tmp_path: Path
) -> None:
    keys = {**ANSWERS, "eval__best": "loss", "eval__every": 2}
    one = go("one", **keys)
    dotted = {key.replace("__", "."): value for key, value in keys.items()}
    fixed = {"model": model, "data.train": train, "data.eval": held_out, "steps": 5}
    out = tmp_path / "two"
    words = words_of({**QUIET, **fixed, **dotted, "out": out})
    done = run("-m", "taut", "sft", *words, num_ranks=2)
    assert done.returncode == 0, done.stderr[-2000:]
    for mine, theirs in zip(answered(one.out), answered(out), strict=True):
        assert {**mine, "time": 0} == {**theirs, "time": 0}
    assert [e["step"] for e in events(one.out, "best")] == [e["step"] for e in events(out, "best")]
    assert largest_difference(weights(one.out / "best"), weights(out / "best")) < 1e-6


def test_sources_may_use_the_same_ids(model: Path, train: Path, tmp_path: Path) -> None:
    files = [
        write_rows(tmp_path / name, [{**row, "id": n} for n, row in enumerate(chats(2, seed))])
        for seed, name in enumerate(("a.jsonl", "b.jsonl"))
    ]
    asked = {"eval__answers__data": list(map(str, files)), "eval__answers__rewards": "contains"}
    result = sft(model, train, tmp_path / "out", steps=1, **asked)
    assert "contains" in result.metrics
