"""Signals: the open step is abandoned and the state saved; the run that goes on is the one that was left alone."""

from __future__ import annotations

import os
import signal
import sys
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
from tests.helpers.slow_cases import slow_except

import taut
from taut.errors import Interrupted

Go = Callable[..., taut.Result]
FIXED: dict[str, Any] = {
    **PLAIN,
    "steps": 6,
    "optim__schedule": "cosine",
    "batch__tokens_per_microbatch": 90,
    "checkpoint__every": 0,
    "eval__every": 2,
    "eval__best": "loss",
}


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("eval") / "held_out.jsonl", chats(5, seed=3))


@pytest.fixture
def go(model: Path, train: Path, held_out: Path, tmp_path: Path) -> Go:
    fixed = {**FIXED, "data__eval": str(held_out)}
    return lambda name, **keys: sft(model, train, tmp_path / name, **{**fixed, **keys})


@pytest.fixture(scope="module")
def whole(
    model: Path, train: Path, held_out: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The run that is left alone."""
    place = tmp_path_factory.mktemp("whole")
    keys = {"data__eval": str(held_out), "data__cache": str(place / "cache")}
    return sft(model, train, place / "out", **FIXED, **keys).out


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int, signal.Signals], None]:
    """``at("taut.train.trainer.backward", 7, SIGTERM)``: the signal comes in the middle of the seventh call."""

    def plant(target: str, number: int, which: signal.Signals) -> None:
        module, _, name = target.rpartition(".")
        real, calls = getattr(sys.modules[module], name), []

        def with_signal(*given: Any, **named: Any) -> Any:
            calls.append(name)
            if len(calls) == number:
                os.kill(os.getpid(), which)
            return real(*given, **named)

        monkeypatch.setattr(target, with_signal)

    return plant


def require_equal(resumed: Path, whole: Path) -> None:
    """Bit for bit, each step and each evaluation once."""
    for name in ("step", "loss", "grad_norm", "sample_ids", "learning_rate"):
        assert column(resumed, name) == column(whole, name)
    for kind in ("eval", "best"):
        found = [
            [{**e, "time": 0, "path": ""} for e in events(out, kind)] for out in (resumed, whole)
        ]
        assert found[0] == found[1]
    for folder in ("model", "best"):
        assert largest_difference(weights(resumed / folder), weights(whole / folder)) == 0.0


SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]


@pytest.mark.parametrize("which", slow_except([signal.SIGTERM], SIGNALS))
def test_the_open_step_is_abandoned_and_taken_again(
    which: signal.Signals,
    go: Go,
    at: Any,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    first, *_ = events(whole, "step")
    assert len(first["sample_ids"]) == 6
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with monkeypatch.context():
        at("taut.train.trainer.backward", 11, which)
        with pytest.raises(Interrupted, match=rf"by {which.name}: the state after step \d is in"):
            go("out")
    monkeypatch.undo()
    assert {number: signal.getsignal(number) for number in before} == before
    done = events(out, "end")[-1]
    assert (done["outcome"], Interrupted.exit_code) == ("interrupted", 75)
    assert column(out, "step") == list(range(1, done["step"] + 1))
    assert [path.name for path in (out / "checkpoints").glob("step-*")] == [
        f"step-{done['step']:06d}"
    ]
    assert not (out / "model").exists()
    go("out", resume=True)
    require_equal(out, whole)


AFTER = [
    ("taut.evals.training_evals._write", 2, 4),  # while out/best is written
    ("taut.run.save.score", 1, 6),  # the final export
    ("taut.evals.training_evals.prepare_microbatches", 2, 4),  # the evaluation after step 4
    ("taut.evals.training_evals.prepare_microbatches", 3, 6),  # the one at the end
    ("taut.evals.contract.answer", 1, 6),
]


@pytest.mark.parametrize(("target", "number", "step"), slow_except(AFTER[:1], AFTER))
def test_what_follows_a_step_is_ended_at_once_and_done_again(
    target: str,
    number: int,
    step: int,
    go: Go,
    at: Any,
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    keys = {"contract__prompts": 1} if target == "taut.evals.contract.answer" else {}
    at(target, number, signal.SIGTERM)
    with pytest.raises(Interrupted, match=f"the state after step {step} is in"):
        go("out", **keys)
    monkeypatch.undo()
    assert not list(out.glob(".*.partial"))
    result = go("out", resume=True, **keys)
    assert result.loss == column(whole, "loss")[-1]
    require_equal(out, whole)


def test_before_the_first_step_there_is_nothing_to_save(go: Go, at: Any, tmp_path: Path) -> None:
    at("taut.train.trainer.backward", 1, signal.SIGTERM)
    with pytest.raises(Interrupted, match="SIGTERM before the first step was over; nothing was"):
        go("out", check="off")  # it takes a backward of its own
    assert not (tmp_path / "out" / "checkpoints").exists()
    assert go("out", resume=True).steps == 6


def test_signals_of_one_notice_count_once(
    go: Go, at: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As under torchrun, which passes on the signal that its ranks got as well."""
    at("taut.train.trainer.backward", 11, signal.SIGINT)
    at("taut.train.trainer.backward", 11, signal.SIGTERM)
    with pytest.raises(Interrupted, match="the state after step"):
        go("out")
    monkeypatch.undo()
    assert go("out", resume=True).steps == 6


PROGRAM = """\
import os, signal, sys, time
from taut import cli
from taut.train import trainer as loop
real, calls = loop.backward, []
def backward(*given):
    calls.append(1)
    if len(calls) == 11:
        os.kill(os.getpid(), signal.SIGTERM)
        if os.environ.get("TWICE"):
            time.sleep(1.1)
            os.kill(os.getpid(), signal.SIGTERM)
    return real(*given)
loop.backward = backward
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("times", slow_except(["once"], ["once", "twice"]))
def test_exit_codes(times: str, model: Path, train: Path, tmp_path: Path) -> None:
    keys = {**QUIET, "model": model, "data.train": train, "out": tmp_path / "out", "steps": 6}
    keys |= {"batch.tokens_per_microbatch": 90}
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {"TWICE": "1"} if times == "twice" else {}
    done = run(tmp_path / "program.py", "sft", *words_of(keys), **environment)
    saved = list((tmp_path / "out").glob("checkpoints/step-*"))
    if times == "twice":
        assert (done.returncode, done.stderr, saved) == (128 + signal.SIGTERM, "", [])
        return
    assert done.returncode == 75
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("taut: error: interrupted by SIGTERM: the state after step ")
    assert "the same command with resume=true goes on" in done.stderr
    assert len(saved) == 1


EARLY = """\
import importlib, os, signal, sys
from taut import cli
if os.environ["IGNORED"]:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
module, _, name = os.environ["AT"].partition(":")
module = importlib.import_module(module)
real = getattr(module, name)
def with_signal(*given, **named):
    os.kill(os.getpid(), int(os.environ["SIGNAL"]))
    return real(*given, **named)
setattr(module, name, with_signal)
sys.exit(cli.main())
"""
"""A program that gets a signal while a function is called."""


def with_signal(at: str, which: signal.Signals, *words: str, ignored: str = "", place: Path) -> Any:
    (place / "program.py").write_text(EARLY)
    told = {"AT": at, "SIGNAL": str(int(which)), "IGNORED": ignored}
    return run(place / "program.py", *words, **told)


@pytest.mark.parametrize(
    ("at", "which"),
    [
        ("taut.config:load", signal.SIGTERM),  # the command line is read
        ("numpy:save", signal.SIGHUP),  # tokenized rows go to the cache
        ("taut.run.setup:join_models", signal.SIGUSR1),
        ("taut.commands.train:before_training", signal.SIGTERM),  # checks
        ("taut.commands.train:before_training", signal.SIGINT),
    ],
)
def test_a_signal_before_training_ends_the_run_in_a_line_and_leaves_nothing(
    at: str, which: signal.Signals, model: Path, train: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    keys = {**QUIET, "model": model, "data.train": train, "out": out, "steps": 1}
    keys |= {"data.cache": tmp_path / "cache"}
    done = with_signal(at, which, "sft", *words_of(keys), place=tmp_path)
    if which == signal.SIGINT:
        assert (done.returncode, done.stderr) == (130, "taut: interrupted\n")
    elif at == "taut.config:load":
        assert (done.returncode, done.stderr) == (75, "taut: interrupted by SIGTERM\n")
    else:
        assert (done.returncode, done.stderr) == (
            75,
            f"taut: error: interrupted by {which.name} before training began; nothing was changed in out; "
            "the same command starts again\n",
        )
    assert not out.exists()
    assert not list((tmp_path / "cache").glob(".*"))  # nothing half-written


def test_an_ignored_hangup_stays_ignored(model: Path, train: Path, tmp_path: Path) -> None:
    keys = {**QUIET, "model": model, "data.train": train, "out": tmp_path / "out", "steps": 1}
    for at in ("taut.commands.train:before_training", "taut.train.trainer:backward"):
        words = words_of({**keys, "overwrite": True})
        done = with_signal(at, signal.SIGHUP, "sft", *words, ignored="yes", place=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_signal_ends_another_command_in_a_line(model: Path, tmp_path: Path) -> None:
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "the cat"}] * 3)
    words = [str(model), f"prompts={prompts}", f"out={tmp_path / 'answers.jsonl'}", "device=cpu"]
    at = "taut.commands.generate:open_engine"
    done = with_signal(at, signal.SIGHUP, "generate", *words, place=tmp_path)
    assert (done.returncode, done.stderr) == (75, "taut: interrupted by SIGHUP\n")


def test_a_signal_to_one_rank_ends_all_and_loses_nothing(
    model: Path, train: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    keys = {**QUIET, "model": model, "data.train": train, "out": out, "steps": 6, "check": "off"}
    program = PROGRAM.replace("len(calls) == 11", 'len(calls) == 4 and os.environ["RANK"] == "1"')
    (tmp_path / "program.py").write_text(program)
    done = run(tmp_path / "program.py", "sft", *words_of(keys), num_ranks=2)
    assert done.returncode != 0
    assert done.stderr.count("interrupted by SIGTERM: the state after step 3 is in") == 1
    assert column(out, "step") == [1, 2, 3]
    whole = sft(model, train, tmp_path / "whole", steps=6)
    resumed = sft(model, train, out, steps=6, resume=True, checkpoint__every=0)
    assert column(out, "loss") == pytest.approx(column(whole.out, "loss"), rel=1e-9)
    assert largest_difference(weights(resumed.model), weights(whole.model)) < 1e-9


def test_another_thread_gets_no_signals_and_still_trains(go: Go) -> None:
    import threading

    results: list[taut.Result] = []
    thread = threading.Thread(target=lambda: results.append(go("out", steps=2)))
    thread.start()
    thread.join()
    assert results[0].steps == 2
