"""Resumes at awkward moments: between two renames, at the end of a longer run, while somebody else began one."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.chat_runs import PLAIN, chats, column, events, sft, write_rows

import taut
from taut.errors import Interrupted, OutputError
from taut.io import files
from taut.run import lifecycle
from taut.train import trainer as loop

Go = Callable[..., taut.Result]


@pytest.fixture
def go(model: Path, train: Path, tmp_path: Path) -> Go:
    fixed = {"steps": 6, "checkpoint__every": 2, "optim__schedule": "constant"}
    fixed = {**PLAIN, **fixed}
    return lambda name, **keys: sft(model, train, tmp_path / name, **{**fixed, **keys})


def test_latest_is_right_after_a_kill_before_it_was_replaced(
    go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the one before then, which a resume lets go of."""
    keys = {"checkpoint__keep": 1, "checkpoint__background": False}
    folder, real = tmp_path / "out" / "checkpoints", files.write_text

    def killed(path: Path, text: str) -> None:
        if text == "step-000004\n":
            raise SystemExit
        real(path, text)

    def looked(*_: object, **__: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(files, "write_text", killed)
        with pytest.raises(SystemExit):
            go("out", **keys)
    assert (folder / "latest").read_text() == "step-000002\n"
    with monkeypatch.context() as patched:
        patched.setattr(lifecycle, "run_steps", looked)
        with pytest.raises(SystemExit):
            go("out", resume=True, **keys)
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-000004"]
    assert (folder / "latest").read_text() == "step-000004\n"


def test_a_run_with_more_epochs_is_finished_at_its_end(
    model: Path, train: Path, tmp_path: Path
) -> None:
    """The first epoch ended on a small step, so that there is one more than in a run of two epochs."""
    keys: dict[str, Any] = {"checkpoint__every": 9, "batch__samples_per_step": 7}
    sft(model, train, tmp_path / "out", **keys, epochs=1)
    longer = sft(model, train, tmp_path / "out", **keys, epochs=2, resume=True)
    again = sft(model, train, tmp_path / "out", **keys, epochs=2, resume=True)
    assert again.notice is not None
    assert again.steps == longer.steps == 8
    assert len(column(tmp_path / "out", "step")) == 8


def test_a_run_that_another_process_began_meanwhile_is_left_alone(
    go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, real = go("other").out, lifecycle.build

    def late(*given: Any) -> Any:
        shutil.copytree(other, tmp_path / "out")
        return real(*given)

    monkeypatch.setattr(lifecycle, "build", late)
    with pytest.raises(OutputError, match="another run began there while this one was made ready"):
        go("out", resume=True)
    monkeypatch.undo()
    assert go("out", resume=True).notice is not None


def test_the_best_of_an_abandoned_schedule_goes_though_the_resume_is_killed(
    go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out = write_rows(tmp_path / "held_out.jsonl", chats(4, seed=1))
    keys = {"data__eval": str(held_out), "eval__every": 1, "eval__best": "loss"}
    keys |= {"checkpoint__every": 4, "optim__learning_rate": 1e-3}
    out = tmp_path / "out"
    real = lifecycle.run_steps

    def killed(*_: object) -> None:
        raise SystemExit

    def killed_after(trainer: Any, after_step: Sequence[Callable[[int], None]]) -> None:
        real(trainer, [*after_step, lambda step: killed() if step == 5 else None])

    for place, act, changed in (
        ("run_steps", killed_after, {}),
        ("emit_start", killed, {"steps": 9, "resume": True}),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(lifecycle, place, act)
            with pytest.raises(SystemExit):
                go("out", **{**keys, **changed})
    assert not (out / "best").exists()
    go("out", **{**keys, "steps": 9, "resume": True})
    found = events(out, "best")
    assert (out / "best" / "best.json").is_file()
    assert [event["step"] for event in found if event["step"] > 4]


def test_a_checkpoint_that_failed_before_does_not_keep_a_signal_from_saving(
    go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = files.sync_tree, []
    released, backward = threading.Event(), loop.backward

    def full_once(path: Path) -> None:
        calls.append(path)
        if len(calls) == 1:
            assert released.wait(60)
            raise OSError(28, "No space left on device")
        real(path)

    def with_signal(*given: Any) -> Any:
        if given[3] == 3:  # the step; the checkpoint of step 2 is being written
            os.kill(os.getpid(), signal.SIGTERM)
            released.set()
        return backward(*given)

    monkeypatch.setattr(files, "sync_tree", full_once)
    monkeypatch.setattr(loop, "backward", with_signal)
    with pytest.raises(Interrupted, match="the state after step"):
        go("out")
    assert "No space left" in events(tmp_path / "out", "warning")[-1]["detail"]
    monkeypatch.undo()
    assert go("out", resume=True).steps == 6
    assert [event["from_step"] for event in events(tmp_path / "out", "resume")] == [2]
