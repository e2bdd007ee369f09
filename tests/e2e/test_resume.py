"""A run that is killed and resumed is the run that was not: bit for bit."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.chat_runs import (
    PLAIN,
    QUIET,
    chats,
    column,
    decisions,
    events,
    largest_difference,
    save_model,
    sft,
    weights,
    words_of,
    write_rows,
)
from tests.helpers.forked_processes import start
from tests.helpers.slow_cases import slow_except

import taut
from taut.cli import main
from taut.models.cpu import cpu_matmul
from taut.models.load import load_tokenizer
from taut.run.fingerprint import TOLERANCE
from taut.train import trainer as loop
from taut.train.run_dir import Lock

Go = Callable[..., taut.Result]

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "full in bfloat16": {"dtype": "bfloat16"},
    "lora with noise": {"lora__rank": 4, "lora__dropout": 0.2, "noise__neftune_alpha": 5.0},
    "lora on nf4": {"lora__rank": 4, "quantize": "nf4", "dtype": "float32"},
    "pissa": {"lora__rank": 4, "lora__init": "pissa", "lora__init_iterations": 2},
    "lora by rows": {"lora__rank": 4, "lora__train_token_rows": "always"},
}


@pytest.fixture
def go(model: Path, train: Path, tmp_path: Path) -> Go:
    fixed = {"steps": 6, "checkpoint__every": 2, "checkpoint__keep": 3, "optim__schedule": "cosine"}
    fixed = {**PLAIN, **fixed}
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


@pytest.mark.parametrize("kind", slow_except(["full", "lora with noise"], KINDS))
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


def test_a_resume_may_change_the_learning_rate_of_the_steps_to_come(go: Go) -> None:
    keys = {"optim__schedule": "constant"}
    whole = go("whole", steps=4, **keys).out
    out = go("out", steps=2, **keys).out
    go("out", steps=4, resume=True, optim__learning_rate=5e-4, **keys)
    assert column(out, "learning_rate") == [1e-3, 1e-3, 5e-4, 5e-4]
    assert (
        column(out, "loss")[:3] == column(whole, "loss")[:3]
    )  # the third is of the weights of step 2
    assert column(out, "loss")[3] != column(whole, "loss")[3]
    (warning,) = [it for it in events(out, "warning") if it["name"] == "schedule"]
    said = "optim.learning_rate: 0.001 then, 0.0005 now: active from step 3 on"
    assert warning["detail"] == said
    again = go("out", steps=4, resume=True, optim__learning_rate=5e-4, **keys)
    assert again.notice is not None, "nothing is left to do"
    with pytest.raises(taut.ConfigError, match=r"finished after step 4, .* changes nothing"):
        go("out", steps=4, resume=True, optim__learning_rate=1e-4, **keys)


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
        ({"seed": 7}, r"run: seed: 0 then, 7 now"),
        ({"optim__weight_decay": 0.5}, r"run: optim\.weight_decay: 0\.0 then, 0\.5 now"),
        ({"batch__samples_per_step": 3}, r"run: batch\.samples_per_step: 6 then, 3 now"),
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
    with pytest.raises(
        taut.ConfigError,
        match=r"belongs to another run: data .*rows\.jsonl: other content, \w{12}",
    ):
        sft(model, train, tmp_path / "out", resume=True, **keys)


MOVED: dict[str, tuple[str, str]] = {
    "a file": ("rows.jsonl", "else/where.jsonl"),
    "a directory": ("rows", "elsewhere"),
    "a pattern": ("rows/*.jsonl", "elsewhere/*.jsonl"),
}
"""Where the rows are when the run begins, and when it is resumed."""


@pytest.mark.parametrize("kind", slow_except(["a file"], MOVED))
def test_moved_data_are_the_same_data_bit_for_bit(
    kind: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise is drawn by the ids of samples, which begin with the path: the run goes on with those it had."""
    monkeypatch.chdir(tmp_path)
    old, new = MOVED[kind]
    file = Path(old.replace("*", "a")) if old.endswith("jsonl") else Path(old, "a.jsonl")
    file.parent.mkdir(exist_ok=True)
    write_rows(file, chats(8))
    keys = {**PLAIN, "lora__rank": 2, "lora__dropout": 0.2, "checkpoint__every": 1}
    whole = sft(model, old, tmp_path / "whole", steps=3, **keys).out
    sft(model, old, tmp_path / "out", steps=1, **keys)
    moved = Path(new.replace("*", "a")) if new.endswith("jsonl") else Path(new, "a.jsonl")
    moved.parent.mkdir(exist_ok=True)
    file.rename(moved)
    taut.resume(tmp_path / "out", steps=2, data={"train": new})
    taut.resume(tmp_path / "out", steps=3)
    for name in ("loss", "sample_ids"):
        assert column(tmp_path / "out", name) == column(whole, name)
    told = [it["detail"] for it in events(tmp_path / "out", "warning") if it["name"] == "data"]
    same = "the same contents; ids of samples stay as they were"
    assert told == [f"data.train: {old} then, {new} now: {same}"] * 2
    resolved = json.loads((tmp_path / "out" / "resolved.json").read_text())
    (source,) = resolved["config"]["data"]["train"]
    assert (source["path"], source["known_as"]) == (new, old)
    write_rows(moved, chats(8, seed=1))
    with pytest.raises(taut.ConfigError, match=r"data rows\S*: other content, \w{12}\.\.\. then"):
        taut.resume(tmp_path / "out", steps=4)


def test_moved_data_are_compared_source_by_source(model: Path, tmp_path: Path) -> None:
    """Two sources in the other order, or with another weight, are another mixture."""
    one, two = (str(write_rows(tmp_path / f"{seed}.jsonl", chats(6, seed=seed))) for seed in (1, 2))
    keys = {**PLAIN, "checkpoint__every": 1}
    sft(model, one, tmp_path / "out", steps=1, data__train=[one, two], **keys)
    for train, says in (
        ([two, one], r"data \S*1\.jsonl: other content"),
        ([{"path": one, "weight": 0.5}, two], r"data\.train: .*'weight': 0\.5"),
    ):
        with pytest.raises(taut.ConfigError, match=says):
            taut.resume(tmp_path / "out", steps=2, data={"train": train})


def test_resuming_without_a_checkpoint_starts_at_step_one(go: Go) -> None:
    first = go("out", checkpoint__every=0)
    again = go("out", checkpoint__every=0, resume=True)
    assert column(again.out, "step") == [1, 2, 3, 4, 5, 6]
    assert again.loss == first.loss


@pytest.mark.slow
def test_killed_by_the_system_and_resumed(model: Path, train: Path, tmp_path: Path) -> None:
    """A real kill -9 in the middle of a step."""
    keys = {"steps": 60, "checkpoint__every": 7}
    whole = sft(model, train, tmp_path / "whole", **keys)
    out = tmp_path / "killed"
    dotted = {"steps": 60, "checkpoint.every": 7, "out": out, "model": model, "data.train": train}
    process = start(tmp_path, "-m", "taut", "sft", *words_of({**QUIET, **dotted}))
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.is_alive():
            if (out / "checkpoints" / "step-000014" / "meta.json").exists():
                break
            time.sleep(0.01)
    finally:
        process.kill()
        process.join()
    assert not (out / "model").exists(), "it was killed before its end"
    resumed = sft(model, train, out, resume=True, **keys)
    assert column(out, "step") == list(range(1, 61))
    assert column(out, "loss") == column(whole.out, "loss")
    assert largest_difference(weights(resumed.model), weights(whole.model)) == 0.0


def snapshot(out: Path) -> dict[Path, tuple[bytes, int]]:
    return {
        p: (p.read_bytes(), p.stat().st_mtime_ns)
        for p in out.rglob("*")
        if p.is_file() and p.name != ".lock"
    }


def test_a_finished_run_is_left_as_it_is(go: Go) -> None:
    first = go("out")
    before = snapshot(first.out)
    again = go("out", resume=True)
    assert snapshot(first.out) == before
    assert (again.steps, again.loss, again.model) == (first.steps, first.loss, first.model)
    assert again.metrics == first.metrics
    assert again.notice is not None
    assert re.search(r"is finished: 6 steps, .*; raise steps or epochs to train on", again.notice)
    assert first.notice is None


def test_a_finished_run_says_so_on_the_command_line(
    model: Path, train: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {**QUIET, "model": model, "data.train": train, "out": tmp_path / "out", "steps": 2}
    words = words_of({**keys, "resume": True})
    assert main(["sft", *words]) == 0
    capsys.readouterr()
    assert main(["sft", *words]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"{tmp_path / 'out'} is finished: 2 steps")
    assert said.err == ""


@pytest.mark.parametrize("place", ["absent", "empty", "killed as it began"])
def test_one_command_line_serves_every_start(place: str, go: Go, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if place != "absent":
        out.mkdir()
    if place == "killed as it began":
        (out / ".lock").write_text("process 1 on a machine that is no more")
        (out / ".resolved.json.partial").write_text("{")
    assert go("out", resume=True).steps == 6
    assert column(out, "step") == [1, 2, 3, 4, 5, 6]
    assert [event["from_step"] for event in events(out, "resume")] == [0]


def test_a_finished_run_trains_on_if_it_is_made_longer(go: Go) -> None:
    keys = {"optim__schedule": "constant", "checkpoint__every": 4}
    whole = go("whole", steps=9, **keys)
    go("parts", steps=6, **keys)
    parts = go("parts", steps=9, resume=True, **keys)
    assert parts.steps == 9
    assert column(parts.out, "loss") == column(whole.out, "loss")
    assert largest_difference(weights(parts.model), weights(whole.model)) == 0.0


def test_a_finished_run_without_a_checkpoint_cannot_be_made_longer(go: Go) -> None:
    out = go("out", checkpoint__every=0).out
    before = snapshot(out)
    with pytest.raises(
        taut.ConfigError, match=r"finished after step 6, without a checkpoint to train on"
    ):
        go("out", checkpoint__every=0, steps=9, resume=True)
    assert snapshot(out) == before


def test_more_epochs_leave_no_sample_out_and_take_none_twice(
    model: Path, train: Path, tmp_path: Path
) -> None:
    """23 chats, six a step: the first epoch ends on a step of five."""
    keys = {"epochs": 1, "optim__schedule": "constant", "checkpoint__every": 9}
    sft(model, train, tmp_path / "out", **keys)
    for epochs in (2, 3.5):
        sft(model, train, tmp_path / "out", **{**keys, "epochs": epochs}, resume=True)
    seen = [name for step in column(tmp_path / "out", "sample_ids") for name in step]
    assert [len(ids) for ids in column(tmp_path / "out", "sample_ids")][:5] == [6, 6, 6, 5, 6]
    for epoch in range(3):
        assert len(set(seen[23 * epoch : 23 * (epoch + 1)])) == 23
    assert len(seen) == round(3.5 * 23)
    with pytest.raises(taut.ConfigError, match=r"is beyond the end of this run"):
        sft(model, train, tmp_path / "out", **{**keys, "epochs": 3}, resume=True)


def test_a_changed_model_is_refused_and_a_moved_one_is_not(
    model: Path, train: Path, tmp_path: Path
) -> None:
    own = shutil.copytree(model, tmp_path / "model")
    keys = {"steps": 2, "checkpoint__every": 1}
    sft(own, train, tmp_path / "out", **keys)
    own.rename(tmp_path / "moved")
    sft(tmp_path / "moved", train, tmp_path / "out", **{**keys, "steps": 3}, resume=True)
    assert column(tmp_path / "out", "step") == [1, 2, 3]
    other = save_model(tmp_path / "other", "qwen2", dtype=torch.float64, seed=1)
    with pytest.raises(
        taut.ConfigError, match=r"belongs to another run: model model\.safetensors: other content"
    ):
        sft(other, train, tmp_path / "out", **{**keys, "steps": 4}, resume=True)


def test_a_damaged_checkpoint_is_passed_over_only_if_allowed(go: Go, tmp_path: Path) -> None:
    whole = go("whole").out
    killed = killed_copy(whole, tmp_path / "killed")
    damaged = killed / "checkpoints" / "step-000004" / "__0_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    before = snapshot(killed)
    with pytest.raises(taut.OutputError, match=r"step-000004/__0_0\.distcp is damaged"):
        go("killed", resume=True)
    assert snapshot(killed) == before
    go("killed", resume=True, checkpoint__skip_damaged=True)
    (told,) = [e for e in events(killed, "warning") if e["name"] == "checkpoint"]
    assert "step-000004/__0_0.distcp is damaged" in told["detail"]
    assert column(killed, "loss") == column(whole, "loss")
    assert largest_difference(weights(killed / "model"), weights(whole / "model")) == 0.0
    assert len(list((killed / "checkpoints").glob("damaged-step-000004-*"))) == 1


def test_another_environment_turns_equality_into_a_tolerance(
    go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = go("whole").out
    killed_copy(whole, tmp_path / "killed")
    killed_copy(whole, tmp_path / "same")
    go("same", resume=True)
    assert not events(tmp_path / "same", "warning")
    monkeypatch.setattr("taut.run.fingerprint.torch.get_num_threads", lambda: 7)
    out = go("killed", resume=True, batch__tokens_per_microbatch=90).out
    (told,) = events(out, "warning")
    assert (told["name"], told["tolerance"]) == ("exactness", TOLERANCE["float64"])
    assert re.search(r"batch\.tokens_per_microbatch: 8192 then, 90 now", told["detail"])
    assert re.search(r"environment threads: \d then, 7 now", told["detail"])
    limit = TOLERANCE["float64"]
    assert column(out, "loss") == pytest.approx(column(whole, "loss"), rel=limit)


def test_a_resume_takes_the_products_of_its_checkpoint_whatever_a_measurement_says(
    go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a noisy machine each measurement may say something else. The model is small, so every size counts as large."""
    monkeypatch.setattr(cpu_matmul, "MIN_SIZE", 0)
    monkeypatch.setattr(cpu_matmul, "BLOCKS", (64, 16))
    real, taken, measured = cpu_matmul._product, [], []
    monkeypatch.setattr(cpu_matmul, "_product", lambda *args: (taken.append(1), real(*args))[1])

    def measure(shapes: object) -> dict[str, cpu_matmul.Rates]:
        """oneDNN is faster at first, and never again."""
        measured.append(cpu_matmul.Rates(1.0, 0.5 if measured else 2.0))
        return dict.fromkeys(cpu_matmul.SHAPES, measured[-1])

    monkeypatch.setattr(cpu_matmul, "measure", measure)
    monkeypatch.setenv("TAUT_CACHE", str(tmp_path / "first"))
    whole = go("whole", dtype="float32").out
    assert decisions(whole)["cpu_matmul"][0] == "onednn"
    monkeypatch.setenv("TAUT_CACHE", str(tmp_path / "second"))
    for name in ("once", "forced"):
        killed_copy(whole, tmp_path / name)
    once = go("once", resume=True, dtype="float32").out
    assert decisions(once)["cpu_matmul"] == ("onednn", "that of the checkpoint")
    assert not events(once, "warning")
    twice = go("once", resume=True, dtype="float32", steps=8).out
    straight = go("whole", resume=True, dtype="float32", steps=8).out
    assert len(measured) == 1
    assert column(twice, "loss") == column(straight, "loss")
    assert largest_difference(weights(twice / "model"), weights(straight / "model")) == 0.0
    assert taken
    taken.clear()
    forced = go("forced", resume=True, dtype="float32", cpu_matmul="mkl").out
    assert not taken
    (told,) = events(forced, "warning")
    assert (told["name"], told["tolerance"]) == ("exactness", TOLERANCE["float32"])
    assert "environment cpu_matmul: 'onednn' then, 'mkl' now" in told["detail"]
    limit = TOLERANCE["float32"]
    assert column(forced, "loss") == pytest.approx(column(whole, "loss")[:6], rel=limit)
    other = go("other", dtype="float32").out
    assert decisions(other)["cpu_matmul"][0] == "mkl"


def test_a_run_that_is_being_written_is_left_alone(go: Go, tmp_path: Path) -> None:
    out = go("out").out
    before = snapshot(out)
    with Lock(out) as lock:
        lock.take()
        for keys in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(taut.OutputError, match="is being written by process"):
                go("out", **keys)
    assert snapshot(out) == before


def test_data_that_change_under_the_run_are_told_and_not_used(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = write_rows(tmp_path / "rows.jsonl", chats(8))
    whole = sft(model, train, tmp_path / "whole", steps=3)
    real = loop.train_step

    def changing(trainer: loop.Trainer, step: int) -> loop.StepReport:
        if step == 2:
            write_rows(train, chats(9, seed=4))
        return real(trainer, step)

    monkeypatch.setattr("taut.train.trainer.train_step", changing)
    monkeypatch.setattr("taut.train.monitors.LOOK_EVERY", -1.0)
    result = sft(model, train, tmp_path / "out", steps=3)
    (told,) = events(result.out, "warning")
    assert (told["name"], told["step"]) == ("data", 2)
    assert f"{train}: changed since this run read it" in told["detail"]
    assert column(result.out, "loss") == column(whole.out, "loss")


def test_a_template_that_asks_for_the_day_is_told_the_first_one(
    model: Path, train: Path, tmp_path: Path
) -> None:
    template = tmp_path / "dated.jinja"
    text = load_tokenizer(str(model)).chat_template
    template.write_text("{{ strftime_now('%A') }}\n" + text)
    keys = {"steps": 4, "checkpoint__every": 2, "data__template": str(template)}
    out = sft(model, train, tmp_path / "out", **keys).out
    day, reason = decisions(out)["day"]
    assert day == json.loads((out / "resolved.json").read_text())["day"]
    assert "on which the run began" in reason
    resolved = (out / "resolved.json").read_text()
    sft(model, train, out, **{**keys, "steps": 6}, resume=True)
    (out / "resolved.json").write_text(resolved.replace(day, "2026-01-05"))
    with pytest.raises(
        taut.ConfigError, match=r"belongs to another run: .*tokenizer: other content"
    ):
        sft(model, train, out, **{**keys, "steps": 8}, resume=True)


def test_a_finished_run_needs_no_checkpoint_to_be_finished(go: Go) -> None:
    out = go("out").out
    damaged = out / "checkpoints" / "step-000006" / ".metadata"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert go("out", resume=True).notice is not None
    with pytest.raises(taut.OutputError, match=r"step-000006/\.metadata is damaged"):
        go("out", resume=True, steps=8)
    with pytest.raises(taut.ConfigError, match=r"belongs to another run: .*seed: 0 then, 1 now"):
        go("out", resume=True, seed=1)
    with pytest.raises(taut.ConfigError, match="is beyond the end of this run, step 4"):
        go("out", resume=True, steps=4)
