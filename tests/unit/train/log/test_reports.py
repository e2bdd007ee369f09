"""The views of the event stream: console, TensorBoard, Weights & Biases."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from taut.config import Decision
from taut.io import progress
from taut.train.log import Event, RunLog, Sink, read_events
from taut.train.log.console import ConsoleReport
from taut.train.log.events import scalars
from taut.train.settings import LogConfig
from taut_tools.adapters.tensorboard import TensorBoard


def step(number: int, **fields: Any) -> Event:
    return {
        "kind": "step",
        "time": 100.0 + 0.5 * number,
        "step": number,
        "loss": 1.0 / number,
        "grad_norm": 0.5,
        "learning_rate": 1e-4,
        "num_targets": 50,
        "num_tokens": 75,
        "num_tokens_unshared": 100,
        "seconds": 0.5,
        "sample_ids": ["a:1"],
        **fields,
    }


START: Event = {
    "kind": "start",
    "time": 0.0,
    "num_steps": 4,
    "decisions": [("attention", "reference", "no CUDA device")],
    "data": "8 samples",
    "dropped": [f"a.jsonl:{line}: too long" for line in range(9)],
}


def told(*events: Event, every: int = 1, is_terminal: bool = False) -> str:
    """What the console says of some events."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=is_terminal, width=120, soft_wrap=True)
    report = ConsoleReport(every, console)
    for event in events:
        report(event)
    report.close()
    return stream.getvalue()


def test_without_a_terminal_each_step_is_a_plain_line() -> None:
    lines = told(START, step(1), step(2)).splitlines()
    assert lines[0] == "attention  reference  no CUDA device"
    assert lines[1] == "data  8 samples"
    assert lines[2:7] == [f"dropped  a.jsonl:{line}: too long" for line in range(5)]
    assert lines[7] == "dropped  and 4 more: see events.jsonl"
    assert lines[8].startswith(
        "step 1/4  loss 1.0000  grad 0.5  lr 1.00e-04  200 tok/s  0:00:02 left  25% of tokens shared  "
    )
    assert lines[8].endswith("GB")
    assert "0:00:01 left" in lines[9]
    assert "\x1b" not in "".join(lines)


def test_the_time_left_has_evaluations_between_steps_and_at_the_end() -> None:
    """Of 4 steps of 0.5 s: an evaluation of 10 s after the first, and one of 10 s that is still to come."""
    measured = {"kind": "eval", "time": 110.5, "step": 1, "num_samples": 8, "loss": 1.0}
    lines = told(START, step(1), measured, step(2, time=111.0)).splitlines()
    (line,) = [line for line in lines if line.startswith("step 2/4")]
    assert "0:00:21 left" in line  # 2 steps of 0.5 s, with 10 s after every second one, and 10 s


def test_what_a_method_measures_beside_the_loss_is_told_of_each_step_and_in_the_end() -> None:
    measured = {"rewards/accuracy": 0.75, "rewards/margin": 0.1234567, "logps/chosen": -99.0}
    found = {"kind": "eval", "time": 0, "step": 1, "loss": 0.6, "rewards/accuracy": 0.875}
    end = {"kind": "end", "time": 0, "step": 1, "cursor": (1, 6)}
    text = told(START, step(1, num_targets=0, **measured), found, end)
    assert "loss 1.0000  accuracy 0.75  margin 0.123  grad 0.5" in text
    rows = {line.split("  ")[0]: line for line in text.splitlines()}
    assert rows["held-out rewards/accuracy"].endswith("  0.8750")
    assert "targets" not in rows["tokens"]
    assert "cursor" not in text


def test_a_mean_reward_says_over_how_many_completions_it_is_where_some_have_none() -> None:
    counts = {"completions": 16, "stopped": 1.0, "tokens_mean": 9.0}
    whole = {"kind": "rollout", "time": 0, "step": 1, "reward": 0.5, "rewarded": 16, **counts}
    some = {**whole, "reward": 1 / 3, "rewarded": 6}
    none = {"kind": "rollout", "time": 0, "step": 3, "rewarded": 0, **counts}
    skipped = step(3, skipped=1.0, num_targets=0, num_tokens=0, num_tokens_unshared=0, loss=0.0)
    end = {"kind": "end", "time": 0, "step": 3}
    lines = told(START, whole, step(1), some, step(2), none, skipped, end).splitlines()
    shown = [line.partition("  ")[2] for line in lines if line.startswith("step ")]
    assert shown[0].startswith("reward 0.500  9 tokens  ends 100%  loss")
    assert shown[1].startswith("reward 0.333 (6 of 16)  9 tokens  ends 100%  loss")
    assert shown[2] == "9 tokens  ends 100%  skipped: no completion has a reward"
    rows = {line.split("  ")[0]: line for line in lines}
    assert rows["reward"].endswith("0.5000 at first, 0.3333 at last")
    assert rows["loss"].endswith("1.0000 at the first step, 0.5000 at the last")


POLICY = {"advantage/size": 0.7, "entropy_estimate": 1.25}
ROLLED_OUT: Event = {
    "kind": "rollout",
    "time": 0,
    "step": 1,
    "reward": 0.5,
    "rewarded": 16,
    "completions": 16,
    "groups_with_signal": 3,
    "groups": 4,
    "stopped": 0.875,
    "tokens_mean": 52.4,
}


def test_a_policy_gradient_shows_its_rollouts_and_no_loss() -> None:
    turns = {**ROLLED_OUT, "step": 2, "turns_mean": 2.25, "calls": 24, "groups_with_signal": 2}
    clipped = {"clip/low": 0.01, "clip/high": 0.035, "old/kl": 0.0123}
    end = {"kind": "end", "time": 0, "step": 2, "loss": 1e-9}
    lines = told(
        START,
        ROLLED_OUT,
        step(1, **POLICY, kl=0.0163),
        turns,
        step(2, **POLICY, **clipped, entropy=1.5),
        end,
    ).splitlines()
    assert "loss" not in "".join(lines)
    shown = [line.partition("  ")[2] for line in lines if line.startswith("step ")]
    assert shown[0].startswith(
        "reward 0.500  signal 75%  52 tokens  ends 88%  kl 0.0163  entropy 1.25  grad 0.5  lr "
    )
    assert shown[1].startswith(
        "reward 0.500  signal 50%  52 tokens  ends 88%  2.2 turns  1.5 calls  old/kl 0.0123  clip 4.5%  entropy 1.5  "
    )
    rows = {line.split("  ")[0]: line.partition("  ")[2].strip() for line in lines}
    assert rows["reward"] == "0.5000 at first, 0.5000 at last" and rows["rollouts"] == "2"
    assert rows["signal"] == "75% at first, 50% at last"
    assert rows["entropy"] == "1.25 at first, 1.5 at last"
    assert rows["clip"] == "4.5% at first, 4.5% at last"
    assert rows["calls"] == "1.5 at first, 1.5 at last" and rows["ends"].startswith("88%")


@pytest.mark.parametrize(
    ("width", "kept"),
    [(60, "reward 0.500  1 day, 0:06:23 left"), (80, "reward 0.500  signal 75%  ends 88%  1 day,")],
)
def test_a_narrow_terminal_keeps_the_reward_of_a_policy_gradient(width: int, kept: str) -> None:
    stream = io.StringIO()
    report = ConsoleReport(1, Console(file=stream, force_terminal=True, width=width))
    report({**START, "num_steps": 10_000, "dropped": []})
    report(ROLLED_OUT)
    report(step(1234, seconds=9.9, **POLICY, kl=0.0163))
    report.close()
    assert kept in stream.getvalue()


def test_checks_that_were_left_out_by_name_have_a_line_of_their_own() -> None:
    asked = {"kind": "check", "time": 0, "part": "quick", "seconds": 0.5, "left_out": False}
    checks = [
        {**asked, "name": "run.steps", "outcome": "passed"},
        {**asked, "name": "data.flips", "outcome": "skipped"},
        {**asked, "name": "rewards.gold", "outcome": "skipped", "left_out": True},
    ]
    lines = told(START, *checks, step(1)).splitlines()
    assert "checks  1 passed, 2 skipped in 1.5 s" in lines
    assert "checks  left out by name (checks.skip): rewards.gold" in lines


def test_every_thins_the_lines_and_keeps_the_first_and_the_last() -> None:
    text = told({**START, "num_steps": 7}, *(step(number) for number in range(1, 8)), every=3)
    assert [line.split()[1] for line in text.splitlines() if line.startswith("step")] == [
        "1/7",
        "3/7",
        "6/7",
        "7/7",
    ]


def test_a_terminal_gets_a_bar_that_is_redrawn() -> None:
    text = told(
        START, step(1), {"kind": "resume", "time": 0, "from_step": 2}, step(3), is_terminal=True
    )
    assert "\x1b" in text
    assert "3/4" in text
    assert "loss 0.3333" in text


def test_the_bar_says_what_is_done_after_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not what was done before it began, by another command of this process."""
    now = time.monotonic()
    monkeypatch.setattr(progress, "_phase", progress.Phase("reading", now - 100))
    assert "reading" not in told(START, step(4), is_terminal=True)
    monkeypatch.setattr(progress, "_phase", progress.Phase("evaluating at the end", now + 100))
    assert "evaluating at the end" in told(START, step(4), is_terminal=True)


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("is_rolled_out", [False, True])
def test_a_narrow_terminal_keeps_step_loss_and_time_left(width: int, is_rolled_out: bool) -> None:
    """Of a long run with everything there is to say: nothing is cut in the middle."""
    stream = io.StringIO()
    report = ConsoleReport(1, Console(file=stream, force_terminal=True, width=width))
    report({**START, "num_steps": 10_000, "dropped": []})
    if is_rolled_out:
        fields = {"reward": -12.3456, "stopped": 0.953, "tokens_mean": 1234.5}
        report({"kind": "rollout", "time": 0, "step": 1, **fields})
    measured = {"rewards/accuracy": 0.75, "rewards/margin": 0.1234567}
    report(step(1234, loss=12.3456, seconds=9.9, grad_norm=123.456, **measured))
    report.close()
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).replace("\r", "\n").split("\n")
    (line,) = {line.rstrip() for line in lines if "loss" in line}
    assert len(line) <= width
    assert "1234/10000" in line
    assert "loss 12.3456" in line
    assert "1 day, 0:06:23 left" in line
    assert "…" not in line
    assert ("reward -12.346" in line) == (is_rolled_out and width == 80)


def test_no_bar_stands_before_the_first_step() -> None:
    checks = [
        {
            "kind": "check",
            "time": 0,
            "part": "quick",
            "name": "a.b",
            "outcome": "passed",
            "seconds": 9.0,
        },
        {"kind": "resume", "time": 0, "from_step": 2},
    ]
    before = told(START, *checks, is_terminal=True)
    assert "0/4" not in before
    assert "2/4" not in before
    assert "3/4" in told(START, *checks, step(3), is_terminal=True)


def test_a_gpu_says_its_own_memory() -> None:
    assert "  peak 5.0 GB" in told(START, step(1, memory_bytes=5_000_000_000))


@pytest.mark.skipif(sys.platform != "linux", reason="it is /proc that says it")
def test_a_process_says_what_it_holds_and_its_peak() -> None:
    ballast = bytearray(2**30)
    ballast[::4096] = b"x" * 2**18
    del ballast
    (now, peak) = re.findall(r"  ([\d.]+) GB, peak ([\d.]+) GB\n", told(START, step(1)))[0]
    assert float(now) < float(peak) - 0.9


def test_nothing_is_said_to_be_shared_where_nothing_is() -> None:
    assert "shared" not in told(START, step(1, num_tokens=100))


def test_a_loss_that_is_not_finite_can_be_shown() -> None:
    assert "loss nan" in told(START, step(1, loss=float("nan")))


def test_what_is_asked_before_training_is_one_line_and_one_for_each_warning() -> None:
    outcomes = ("a.b", "passed"), ("a.c", "skipped"), ("a.d", "passed"), ("a.e", "warning")
    asked = [
        {
            "kind": "check",
            "time": 0,
            "part": "quick",
            "name": name,
            "outcome": outcome,
            "seconds": 0.25,
            "detail": "300 of 300 eval samples are in data.train",
            "evidence": [f"eval.jsonl:{number}" for number in range(1, 5)],
            "remedy": "hold out other rows",
        }
        for name, outcome in outcomes
    ]
    text = told(*asked, {"kind": "resume", "time": 0, "from_step": 3})
    assert text.splitlines() == [
        "checks  2 passed, 1 skipped in 1.0 s",
        "warning a.e: 300 of 300 eval samples are in data.train (eval.jsonl:1; eval.jsonl:2; eval.jsonl:3); hold out "
        "other rows",
        "resumed after step 3",
    ]


def test_checks_warnings_and_the_rest_have_a_line_each() -> None:
    text = told(
        {
            "kind": "check",
            "time": 0,
            "name": "first_step",
            "outcome": "passed",
            "value": 1.23456e-7,
            "detail": "d [x]",
        },
        {"kind": "check", "time": 0, "name": "heads", "outcome": "skipped"},
        {"kind": "warning", "time": 0, "step": 3, "name": "spike", "detail": "12 times the median"},
        {"kind": "eval", "time": 0, "step": 3, "loss": 1.5, "num_samples": 2000},
        {"kind": "checkpoint", "time": 0, "step": 3, "path": "out/checkpoints/3"},
        {"kind": "resume", "time": 0, "from_step": 3},
    )
    assert text.splitlines() == [
        "check first_step: passed 1.235e-07  (d [x])",
        "check heads: skipped",
        "warning at step 3: 12 times the median",
        "eval  after step 3: loss 1.5  num_samples 2,000",
        "checkpoint of step 3: out/checkpoints/3",
        "resumed after step 3",
    ]


def test_the_end_sums_the_run_up() -> None:
    evals = [
        {"kind": "eval", "time": 0, "step": at, "loss": loss} for at, loss in ((1, 2.0), (2, 1.5))
    ]
    end = {"kind": "end", "time": 0, "step": 2, "model": "out/model", "eval_loss": None}
    text = told(START, step(1), step(2), *evals, end)
    rows = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "2 in 0:00:01" in rows["steps"]
    assert "1.0000 at the first step, 0.5000 at the last" in rows["loss"]
    assert "2.0000 -> 1.5000" in rows["held-out loss"]
    assert "200 (100 targets), 200 a second" in rows["tokens"]
    assert "150: 25% of tokens are in shared prefixes" in rows["computed"]
    assert rows["model"].split() == ["model", "out/model"]
    assert text.count("out/model") == 1


def test_the_start_says_how_much_of_the_model_is_trained() -> None:
    start = {**START, "model": "m", "num_parameters": 1000}
    assert "model  m: 1,000 parameters, 25 (2.50%) trained\n" in told({**start, "num_trained": 25})
    assert "model  m: 1,000 parameters, all trained\n" in told({**start, "num_trained": 1000})


def test_resuming_without_a_checkpoint_says_so() -> None:
    text = told({"kind": "resume", "time": 0, "from_step": 0})
    assert text == "resume: no checkpoint in out; from the start\n"


def test_scalars_are_the_numbers_of_measurements() -> None:
    assert scalars(step(2, is_last=True)) == {
        "train/loss": 0.5,
        "train/grad_norm": 0.5,
        "train/learning_rate": 1e-4,
        "train/num_targets": 50,
        "train/num_tokens": 75,
        "train/num_tokens_unshared": 100,
        "train/seconds": 0.5,
    }
    assert scalars({"kind": "eval", "time": 1.0, "step": 1, "loss": 2.0}) == {"eval/loss": 2.0}
    assert scalars(START) == {}


def test_a_skipped_step_has_no_loss_to_draw() -> None:
    drawn = scalars(step(2)).keys() - scalars(step(2, skipped=1.0, loss=0.0, grad_norm=0.0)).keys()
    assert drawn == {"train/loss", "train/grad_norm"}


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    out = tmp_path / "tensorboard"
    write(TensorBoard(out), START, step(1), step(2), step(3, loss=9.0))
    resume = {"kind": "resume", "time": 103.5, "from_step": 2}
    write(
        TensorBoard(out),
        START,
        resume,
        step(3),
        {"kind": "eval", "time": 105.0, "step": 3, "loss": 0.25},
    )
    curves = EventAccumulator(str(out))
    curves.Reload()
    assert [(point.step, point.value) for point in curves.Scalars("train/loss")] == [
        (1, 1.0),
        (2, 0.5),
        (3, pytest.approx(1 / 3)),
    ]
    assert curves.Scalars("eval/loss")[0].value == 0.25


def write(sink: Sink, *events: Event) -> None:
    for event in events:
        sink(event)
    sink.close()


def test_the_sinks_that_were_asked_for_are_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunLog().open(tmp_path, LogConfig(tensorboard=True, console=False)) as log:
        log.emit("warning", detail="w")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "tensorboard"]
    assert capsys.readouterr().out == ""
    with RunLog().open(tmp_path, LogConfig()) as log:
        log.emit("warning", detail="w")
    assert capsys.readouterr().out == "warning: w\n"


def test_decisions_are_printed_when_they_are_known_and_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dtype, place = Decision("dtype", "float32", "set"), Decision("url", "http://a:b@c/", "given")
    log = RunLog()
    log.decide([dtype], tmp_path, LogConfig())
    assert capsys.readouterr().out == "dtype  float32  set\n"
    log.decide([dtype, place], tmp_path, LogConfig())
    assert capsys.readouterr().out == "url  http://***@c/  given\n"
    log.decide([dtype, place], tmp_path, LogConfig())
    assert capsys.readouterr().out == ""
    with log.open(tmp_path, LogConfig()):
        log.emit("start", decisions=[dtype, place, Decision("attention", "reference", "a CPU")])
    assert capsys.readouterr().out == "attention  reference  a CPU\n"
    (start,) = read_events(tmp_path / "events.jsonl")
    assert [name for name, *_ in start["decisions"]] == ["dtype", "url", "attention"]
    RunLog().decide([dtype], tmp_path, LogConfig(console=False))
    assert capsys.readouterr().out == ""


def test_wandb_is_told_the_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told_wandb: list[Any] = []
    run = SimpleNamespace(
        config=SimpleNamespace(
            update=lambda fields, **_: told_wandb.append(fields["start"]["num_steps"])
        ),
        define_metric=lambda *_, **__: None,
        log=lambda values: told_wandb.append((values["step"], values["train/loss"])),
        finish=lambda: told_wandb.append("finished"),
    )
    module = SimpleNamespace(
        init=lambda **fields: told_wandb.append((fields["project"], fields["id"])) or run,
        Error=ValueError,
        Settings=SimpleNamespace,
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delitem(sys.modules, "taut_tools.adapters.wandb", raising=False)
    from taut_tools.adapters.wandb import WeightsAndBiases

    write(WeightsAndBiases("p", tmp_path, "abc", {}), START, step(1))
    assert told_wandb == [("p", "abc"), 4, (1, 1.0), "finished"]


def test_a_report_that_fails_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is dropped with a warning in events.jsonl, in front of the event it could not take."""

    class Lost(Exception):
        pass

    def fail(*_: Any, **__: Any) -> None:
        raise Lost("no connection")

    run = SimpleNamespace(define_metric=lambda *_, **__: None, log=fail, finish=lambda: None)
    module = SimpleNamespace(init=lambda **_: run, Error=Lost, Settings=SimpleNamespace)
    (tmp_path / "resolved.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr("taut.io.extras.find_spec", lambda _: True)
    monkeypatch.delitem(sys.modules, "taut_tools.adapters.wandb", raising=False)
    config = LogConfig(console=False, tensorboard=True, wandb="p")
    with RunLog().open(tmp_path, config) as log:
        for sink in log._sinks:
            if isinstance(sink, TensorBoard):
                monkeypatch.setattr(sink._writer, "flush", _full)
        log.emit("step", step=1, loss=0.5)
        log.emit("end", outcome="finished", step=1)
    events = read_events(tmp_path / "events.jsonl")
    assert [(event["kind"], event.get("detail")) for event in events] == [
        ("warning", "Weights & Biases takes no more: no connection"),
        ("step", None),
        ("warning", "TensorBoard's file cannot be written: No space left on device"),
        ("end", None),
    ]


def _full() -> None:
    raise OSError(28, "No space left on device")


def test_no_report_loads_torch() -> None:
    code = (
        "import json, sys, taut.train.log.console, taut_tools.adapters.tensorboard;"
        "print(json.dumps([m for m in ('torch', 'transformers', 'tensorflow') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


ANSWERS: Event = {
    "kind": "eval",
    "time": 0,
    "step": 2,
    "exact_match": 0.5,
    "exact_match_low": 0.25,
    "exact_match_high": 0.75,
    "stopped": 0.875,
    "num_prompts": 8,
    "samples": [
        {
            "place": "q.jsonl:1",
            "references": ["the Elbe", "Elbe"],
            "text": "It is\nthe Elbe",
            "finish_reason": "length",
            "scores": {"exact_match": 0.0},
        }
    ],
}


def test_an_evaluation_by_generation_shows_its_numbers_and_some_answers() -> None:
    best = {
        "kind": "best",
        "time": 0,
        "step": 2,
        "name": "exact_match",
        "value": 0.5,
        "path": "o/best",
    }
    loss = {"kind": "eval", "time": 0, "step": 2, "loss": 1.5}
    again = {**ANSWERS, "step": 4, "exact_match": 0.625}
    stop = {"asked": 4, "ended": 3, "wanted": 0.9, "cause": "why"}
    end = {"kind": "end", "time": 0, "model": "o/model", "stop": stop}
    text = told(START, step(1), step(2), ANSWERS, loss, best, again, end)
    for line in (
        "eval  after step 2: exact_match 0.5 [0.25, 0.75]  stopped 0.875  num_prompts 8",
        "      'It is the Elbe' (cut)  for 'the Elbe | Elbe'  (q.jsonl:1)",
        "best  exact_match 0.5 after step 2: o/best",
        "held-out exact_match  0.5000 -> 0.6250",
        "held-out stopped      0.8750 -> 0.8750",
        "held-out loss         1.5000",
        "stops                 3 of 4 answers ended by themselves, expected 90%",
        "best                  o/best: exact_match 0.5 after step 2; model/ is the last one",
    ):
        assert line in text.splitlines(), text
    text = told(START, step(1), step(2), best, {**end, "step": 2, "ended_early": "it was enough"})
    assert "best      o/best: exact_match 0.5 after step 2; model/ is it" in text.splitlines()
    assert "ended     after step 2: it was enough" in text.splitlines()


def test_the_numbers_of_an_evaluation_by_generation_are_curves() -> None:
    found = scalars(ANSWERS)
    assert found["eval/exact_match"] == 0.5
    assert found["eval/stopped"] == 0.875
    assert "eval/samples" not in found


def test_the_first_warning_of_a_kind_says_where_its_step_is_shown() -> None:
    stream = io.StringIO()
    report = ConsoleReport(1, Console(file=stream, width=200), Path("runs/a b"))
    for step, name in ((3, "spike"), (4, "spike"), (5, "equal_rewards"), (6, "checkpoint")):
        report({"kind": "warning", "time": 0, "step": step, "name": name, "detail": "d"})
    report({"kind": "warning", "time": 0, "name": "lock", "detail": "d"})
    look = "look  taut show --step {0} 'runs/a b', or taut page 'runs/a b' and #/run/a%20b/samples?step={0}"
    assert stream.getvalue().splitlines() == [
        "warning at step 3: d",
        look.format(3),
        "warning at step 4: d",
        "warning at step 5: d",
        look.format(5),
        "warning at step 6: d",
        "warning: d",
    ]
