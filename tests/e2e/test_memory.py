"""A run that is out of memory: what was trained is saved; halved budgets are recorded, and the same after a resume."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers.chat_runs import PLAIN, column, events, largest_difference, sft, weights
from tests.helpers.slow_cases import slow_except

import taut
from taut.cli import main
from taut.errors import OutOfMemory
from taut.evals import training_evals
from taut.inference.local import LocalEngine
from taut.plan.memory_options import SETTINGS
from taut.run.ending import end_stopped
from taut.train import trainer as loop
from taut.train.log import all_events
from taut.train.trainer import Trainer

Go = Callable[..., taut.Result]
ROOM = {3: 200, 5: 90}
"""Step -> tokens that a micro-batch has room for, from then on."""
ANSWERS = {
    "eval__answers__rewards": "exact_match",
    "eval__answers__limit": 2,
    "eval__answers__sampling__max_new_tokens": 4,
}


FIXED: dict[str, Any] = {
    **PLAIN,
    "steps": 6,
    "checkpoint__every": 2,
    "checkpoint__keep": 9,
    "lora__rank": 4,
    "lora__dropout": 0.2,
    "batch__halve_when_out_of_memory": True,
}


@pytest.fixture
def go(model: Path, train: Path, tmp_path: Path) -> Go:
    return lambda name, **keys: sft(model, train, tmp_path / name, **{**FIXED, **keys})


@pytest.fixture(scope="module")
def cut_run(model: Path, train: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that had too little room in steps 3 and 5."""
    place = tmp_path_factory.mktemp("cut")
    with pytest.MonkeyPatch.context() as planted:
        plant(planted, ROOM)
        cache = str(place / "cache")
        return sft(model, train, place / "out", **FIXED, data__cache=cache).out


def plant(monkeypatch: pytest.MonkeyPatch, room: Mapping[int, int]) -> None:
    """Micro-batches of more tokens ask the CPU's allocator for more than there is."""
    backward = loop.backward

    def act(trainer: Trainer, packed: Any, scales: Any, step: int, *rest: Any) -> Any:
        torch.rand(())
        scores = backward(trainer, packed, scales, step, *rest)
        if packed.num_tokens > min([tokens for at, tokens in room.items() if at <= step] or [9999]):
            torch.empty(1 << 50)
        return scores

    monkeypatch.setattr(loop, "backward", act)


def cut_back(run: Path, to: Path, step: int, seen: int) -> Path:
    """``run`` as it was when it was killed in the step after ``seen``, its newest checkpoint that of ``step``."""
    shutil.copytree(run, to)
    for name in ("model", "adapter"):
        shutil.rmtree(to / name, ignore_errors=True)
    for path in (to / "checkpoints").glob("step-*"):
        if path.name > f"step-{step:06d}":
            shutil.rmtree(path)
    (to / "checkpoints" / "latest").write_text(f"step-{step:06d}\n")
    lines = (to / "events.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line).get("step", 0) <= seen]
    (to / "events.jsonl").write_text("".join(kept[:-1] if '"end"' in kept[-1] else kept))
    return to


def cuts(out: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in e.items() if k != "time"} for e in events(out, "budget")]


def test_halving_changes_numbers_by_rounding_and_is_recorded(go: Go, cut_run: Path) -> None:
    whole = go("whole", batch__halve_when_out_of_memory=False).out
    cut = cut_run
    assert column(cut, "loss") == pytest.approx(column(whole, "loss"), rel=1e-9)
    differs = [column(cut, name) != column(whole, name) for name in ("loss", "grad_norm")]
    assert any(differs), "the micro-batches are others"
    for name in ("step", "sample_ids", "num_targets"):
        assert column(cut, name) == column(whole, name)
    found = cuts(cut)
    assert {cut["step"] for cut in found} == {3, 5}
    before = 8192
    for one in found:
        assert (one["tokens_before"], one["configured"]) == (before, 8192)
        assert one["reason"].startswith("out of memory (wanting 4.5e+06 GB more) in a")
        assert set(one["sample_ids"]) <= set(column(cut, "sample_ids")[one["step"] - 1])
        before = one["tokens"]
    assert before <= ROOM[5]


@pytest.mark.parametrize(("step", "seen"), slow_except([(2, 3)], [(4, 5), (2, 5), (2, 3)]))
def test_resumed_with_room_enough_it_is_the_run_that_had_too_little(
    step: int,
    seen: int,
    go: Go,
    cut_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit, whether the checkpoint was taken before a cut or after it."""
    killed = cut_back(cut_run, tmp_path / "killed", step, seen)
    if seen < 5:  # the second cut is not known yet
        plant(monkeypatch, ROOM)
    go("killed", resume=True)
    assert [e["from_step"] for e in events(killed, "resume")] == [step]
    for name in ("step", "loss", "grad_norm", "sample_ids"):
        assert column(killed, name) == column(cut_run, name)
    assert largest_difference(weights(killed / "model"), weights(cut_run / "model")) == 0.0
    assert cuts(killed) == cuts(cut_run)


def test_killed_twice_it_is_still_the_same(go: Go, cut_run: Path, tmp_path: Path) -> None:
    """Cuts that a resume took back hold, though that life was killed before it came to them."""
    killed = cut_back(cut_run, tmp_path / "killed", 2, 5)
    go("killed", resume=True, steps=4)
    assert {cut["step"] for cut in cuts(killed)} == {3}
    go("killed", resume=True)
    assert column(killed, "loss") == column(cut_run, "loss")
    assert cuts(killed) == cuts(cut_run)


def test_another_budget_begins_afresh(go: Go, cut_run: Path, tmp_path: Path) -> None:
    killed = cut_back(cut_run, tmp_path / "killed", 2, 5)
    go(
        "killed",
        resume=True,
        batch__tokens_per_microbatch=120,
        batch__halve_when_out_of_memory=False,
    )
    assert cuts(killed) == []
    assert "tokens_per_microbatch: 8192 then, 120 now" in events(killed, "warning")[0]["detail"]
    assert column(killed, "loss") == pytest.approx(column(cut_run, "loss"), rel=1e-9)
    assert any(e["kind"] == "budget" for e in all_events(killed / "events.jsonl"))


@pytest.fixture(autouse=True)
def one_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each setting takes a second to predict; tests/unit/plan has the others."""
    monkeypatch.setattr("taut.plan.memory_options.SETTINGS", SETTINGS[3:4])


def test_without_halving_what_was_trained_is_saved_and_a_smaller_budget_goes_on(
    go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"batch__halve_when_out_of_memory": False, "checkpoint__every": 0}
    whole = go("whole", **keys).out
    with monkeypatch.context() as planted:
        plant(planted, {4: 100})
        with pytest.raises(taut.TautError) as caught:
            go("out", **keys)
        text = str(caught.value)
        out = whole.parent / "out"
        assert text.startswith("step 4: out of memory (wanting ")
        assert f"the state after step 3 is in {out / 'checkpoints' / 'step-000003'}" in text
        assert "; by plan a rank takes 0.0" in text
        assert type(caught.value).__name__ == "OutOfMemory"
        assert caught.value.exit_code == 2
        assert "\n" not in text
        (end,) = events(out, "end")
        assert (end["outcome"], end["step"]) == ("stopped", 3)
        assert column(out, "step") == [1, 2, 3]
        go("out", resume=True, batch__tokens_per_microbatch=100, **keys)
    assert column(out, "loss")[:3] == column(whole, "loss")[:3]
    assert column(out, "loss") == pytest.approx(column(whole, "loss"), rel=1e-9)


def test_in_the_first_step_nothing_is_to_be_saved(
    model: Path,
    train: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plant(monkeypatch, {1: 100})
    words = [
        f"model={model}",
        f"data.train={train}",
        f"out={tmp_path / 'out'}",
        "data.max_length=200",
        "check=off",
    ]
    assert (
        main(["sft", *words, "steps=2", "stop_check.prompts=0", "log.console=false", "device=cpu"])
        == 2
    )
    said = capsys.readouterr().err
    assert "nothing was to be saved" in said
    assert "Traceback" not in said
    assert not list((tmp_path / "out").glob("checkpoints/step-*"))


@pytest.mark.parametrize("every", slow_except([2], [2, 0]), ids=["on the way", "at the end"])
def test_an_evaluation_without_memory_keeps_what_was_trained(
    every: int, go: Go, train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"data__eval": str(train), "eval__every": every, "checkpoint__every": 0, "steps": 4}
    whole = go("whole", **keys).out
    step = every or 4
    with monkeypatch.context() as planted:
        prepare = training_evals.prepare_microbatches

        def few(trainer: Trainer, *arguments: Any) -> Any:
            too_much = partial(torch.empty, 1 << 50)
            planted.setattr(type(trainer.scorer), "forward", lambda *_, **__: too_much())
            return prepare(trainer, *arguments)

        planted.setattr(training_evals, "prepare_microbatches", few)
        with pytest.raises(
            taut.TautError, match=rf"^held-out loss after step {step}: out of memory"
        ) as e:
            go("out", **keys)
    assert str(e.value).count("step-00000") == 1
    out = go("out", resume=True, **keys).out
    for kind in ("step", "eval"):
        assert [e["loss"] for e in events(out, kind)] == [e["loss"] for e in events(whole, kind)]
    assert [e["step"] for e in events(out, "eval")] == [e["step"] for e in events(whole, "eval")]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"stop_check__prompts": 2},
            "asked whether its answers end: out of memory .* stop_check.prompts",
        ),
        (
            {**ANSWERS, "eval__answers__every": 2},
            "answers after step 2: out of memory .* eval.answers.local.sequences",
        ),
    ],
    ids=["stop check", "answers"],
)
def test_generation_without_memory_keeps_what_was_trained(
    keys: dict[str, Any],
    message: str,
    go: Go,
    train: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = {**keys, "data__eval": str(train), "checkpoint__every": 0, "steps": 3}
    monkeypatch.setattr(LocalEngine, "generate", lambda *_: torch.empty(1 << 50))
    with pytest.raises(taut.TautError, match=message) as caught:
        go("out", **keys)
    step = 3 if "stop_check__prompts" in keys else 2
    assert str(caught.value).count(f"{tmp_path / 'out' / 'checkpoints'}/step-00000{step}") == 1
    monkeypatch.undo()
    out = go("out", resume=True, **keys).out
    assert column(out, "step") == [1, 2, 3]
    assert [e["outcome"] for e in events(out, "end")][-1] == "finished"


def test_a_model_that_does_not_fit_is_refused_in_one_line_with_what_would(
    model: Path, train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> None:
        torch.empty(1 << 50)

    monkeypatch.setattr("taut.run.setup.load_model", load)
    with pytest.raises(OutOfMemory) as caught:
        sft(model, train, tmp_path / "out", **FIXED)
    assert re.match(r"loading .* on rank 0: out of memory \(wanting .*\)", str(caught.value))
    assert "; by plan a rank takes " in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_an_update_without_memory_is_one_line_and_saves_nothing(
    model: Path, train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights may be those of two steps."""

    def step(*_: Any, **__: Any) -> None:
        torch.empty(1 << 50)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with pytest.raises(OutOfMemory, match="rank 0, outside the forward and backward"):
        sft(model, train, tmp_path / "out", **{**FIXED, "batch__halve_when_out_of_memory": False})
    assert not list((tmp_path / "out").glob("checkpoints/step-*"))


def test_with_several_ranks_the_newest_checkpoint_is_named_and_none_is_written(go: Go) -> None:
    """The others are in the middle of the step: a save would wait for them for ever."""
    out, said = go("out").out, []
    folder = out / "checkpoints"
    trainer = SimpleNamespace(
        ranks=SimpleNamespace(size=2), done=5, emit=lambda *_, **e: said.append(e)
    )
    built: Any = SimpleNamespace(trainer=trainer)
    checkpoints: Any = SimpleNamespace(folder=folder)
    error = end_stopped(built, OutOfMemory("no room"), checkpoints, str)
    assert str(error).startswith(f"no room; the newest checkpoint is {folder / 'step-000006'}; ")
    assert said[0]["outcome"] == "stopped"
    shutil.rmtree(folder)
    assert "there is no checkpoint yet" in str(
        end_stopped(built, OutOfMemory("no room"), checkpoints, str)
    )
