"""``taut resume OUT``: from the directory alone, from anywhere, a run goes on as it would have."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.chat_runs import (
    QUIET,
    chats,
    column,
    largest_difference,
    weights,
    words_of,
    write_rows,
)
from tests.helpers.slow_cases import slow_except

import taut
from taut.cli import main
from taut.commands import train
from taut.run.ending import Result
from taut.train.run_dir import Lock, read_resolved

RUN = {**QUIET, "model": "models/tiny", "data.train": "train.jsonl", "steps": 6}
EVERY_2 = {"checkpoint.every": 2, "checkpoint.keep": 3, "optim.schedule": "cosine"}


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, of relative paths; its parent is where it was started."""
    here = tmp_path_factory.mktemp("here")
    write_rows(here / "train.jsonl", chats(23))
    (here / "models").mkdir()
    (here / "models" / "tiny").symlink_to(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        patch.setenv("TAUT_CACHE", str(here / "cache"))
        assert main(["sft", *words_of({**RUN, **EVERY_2, "out": "runs/whole"})]) == 0
    return here / "runs" / "whole"


@pytest.fixture
def died(whole: Path) -> Any:
    """The same, killed after step 5 while it wrote its last checkpoint."""
    out = whole.with_name("died")
    shutil.copytree(whole, out)
    shutil.rmtree(out / "model")
    (out / "checkpoints" / "step-000006").rename(out / "checkpoints" / ".step-000006.partial")
    lines = (out / "events.jsonl").read_text().splitlines(keepends=True)
    last = next(
        i
        for i, line in enumerate(lines)
        if line.startswith('{"kind": "step"') and '"step": 6,' in line
    )
    (out / "events.jsonl").write_text("".join(lines[:last]) + lines[last][:30])
    change(out, lambda resolved: resolved["config"].update(out="runs/died"))
    yield out
    shutil.rmtree(out)


def change(out: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Edit resolved.json."""
    resolved = json.loads((out / "resolved.json").read_text())
    edit(resolved)
    (out / "resolved.json").write_text(json.dumps(resolved))


@pytest.mark.parametrize("place", slow_except(["elsewhere"], ["runs/..", ".", "elsewhere"]))
def test_it_goes_on_from_anywhere_bit_for_bit(
    place: str, whole: Path, died: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = whole.parent.parent
    (tmp_path / "elsewhere").mkdir()
    cwd = started / place if place != "elsewhere" else tmp_path / place
    monkeypatch.chdir(cwd)
    named = os.path.relpath(died)
    (before,) = taut.runs(named)
    assert (before.state, before.step, before.resumes_after) == ("died", 5, 4)
    assert main(["resume", named]) == 0
    assert Path.cwd() == cwd.resolve()
    for name in ("step", "loss", "grad_norm", "sample_ids", "learning_rate"):
        assert column(died, name) == column(whole, name)
    assert largest_difference(weights(died / "model"), weights(whole / "model")) == 0.0
    assert [one.state for one in taut.runs(named)] == ["finished"]
    after = read_resolved(died)
    assert after["directory"] == str(started.resolve())
    assert after["config"]["data"]["train"] == "train.jsonl"
    assert after["config"]["out"] == (str(Path(named).resolve()) if place == "elsewhere" else named)


def test_as_a_library_with_more_steps_its_paths_hold_where_it_was_called(
    died: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = taut.resume(os.path.relpath(died), steps=7, checkpoint={"every": 0})
    assert (result.steps, column(died, "step")) == (7, [1, 2, 3, 4, 5, 6, 7])
    assert (result.out, result.model) == (died.resolve(), died.resolve() / "model")
    assert read_resolved(died)["config"]["checkpoint"]["every"] == 0


def test_a_finished_run_is_left_alone_and_told(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    assert main(["resume", str(whole)]) == 0
    assert f"{whole} is finished: 6 steps" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()} == before


def test_a_run_that_died_before_its_first_checkpoint_begins_anew(whole: Path, died: Path) -> None:
    shutil.rmtree(died / "checkpoints")
    (died / "events.jsonl").unlink()
    assert main(["resume", str(died)]) == 0
    assert column(died, "loss") == column(whole, "loss")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "found 0 directories; expected one run to continue, as in taut resume runs/a"),
        (["DIED", "out=other"], "found 2 directories"),
        (["DIED", "other"], "found 'other' next to OUT; expected settings as key=value"),
        (["nowhere"], "nowhere is not a taut run (no resolved.json)"),
        (["DIED/resolved.json"], "is not a taut run (no resolved.json)"),
        (["DIED", "stepz=3"], "unknown key 'stepz' on the command line; did you mean 'steps'?"),
        (["DIED", "overwrite=true"], "resume=true and overwrite=true contradict each other"),
        (["DIED", "seed=5"], "belongs to another run: seed: 0 then, 5 now"),
        (
            ["DIED", "data.eval=none.jsonl"],
            "relative paths refer to STARTED, where the run was started",
        ),
    ],
)
def test_what_cannot_be_gone_on_with_is_one_line(
    words: list[str],
    message: str,
    died: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    before = {
        path: path.read_bytes()
        for path in died.rglob("*")
        if path.name != ".lock" and path.is_file()
    }
    assert main(["resume", *(word.replace("DIED", str(died)) for word in words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message.replace("STARTED", str(died.parent.parent)) in line
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda it: it.update(method="dqn"),
            r"found method='dqn' at .*resolved\.json; expected one of sft, reward, .*; the run",
        ),
        (lambda it: it.pop("method"), r"found method=None at"),
        (lambda it: it.pop("directory"), r"found no 'config' and 'directory' at"),
        (lambda it: it.update(config=3), r"found no 'config' and 'directory' at"),
        (
            lambda it: it.update(taut="9.0", config={**it["config"], "color": "red"}),
            r"unknown key 'color' at .*resolved\.json; .*; the run is of taut 9\.0 and this is 0\.1\.0",
        ),
        (lambda it: it["config"].update(seed="x"), r"found seed=\"x\" at .*resolved\.json"),
        (lambda it: it["config"].pop("model"), r"key 'model' is missing"),
        (lambda it: it.update(directory="/nowhere"), r"started in /nowhere, which is not available"),
    ],
)  # fmt: skip
def test_a_configuration_that_no_longer_loads_is_named_by_key(
    edit: Callable[[dict[str, Any]], Any], message: str, died: Path
) -> None:
    change(died, edit)
    with pytest.raises(taut.TautError, match=message):
        taut.resume(died)


def test_a_damaged_file_is_one_line(died: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (died / "resolved.json").write_text('{"config": ')
    assert main(["resume", str(died)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "resolved.json is damaged: it is no JSON object" in line


def test_a_run_somebody_else_writes_is_left_to_them(
    died: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Lock(died) as lock:
        lock.take()
        assert main(["resume", str(died)]) == 2
        assert taut.runs(died)[0].state == "running"
    assert f"is being written by process {os.getpid()}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"), [(taut.CheckFailed("it spiked"), 1), (KeyboardInterrupt(), 130)]
)
def test_exit_codes_are_those_of_the_command_it_was_begun_with(
    error: BaseException, code: int, died: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> Result:
        raise error

    monkeypatch.setattr(train, "train", fail)
    cwd = Path.cwd()
    assert main(["resume", str(died)]) == code
    assert Path.cwd() == cwd


@pytest.mark.slow
def test_two_ranks_go_on_from_elsewhere(whole: Path, died: Path, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, "-m", "taut", "resume", str(died)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert column(died, "sample_ids") == column(whole, "sample_ids")
    assert column(died, "loss") == pytest.approx(column(whole, "loss"), rel=1e-9)
