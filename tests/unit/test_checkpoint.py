"""Checkpoints: complete or absent, the newest kept, another run's refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.jobs import make
from tests.models import parameters_of

from taut.checkpoint import (
    CheckpointConfig,
    Checkpoints,
    complete,
    difference,
    require_resumable,
)
from taut.errors import ConfigError, OutputError
from taut.loop import Job, train_step

IDENTITY = {"config": {"seed": 0, "lora": {"rank": 0}}, "data": "abc"}


def checkpoints(job: Job, folder: Path, **config: Any) -> Checkpoints:
    return Checkpoints(
        folder, CheckpointConfig(**config), job.scorer, job.optimizer, IDENTITY, job.ranks, job.emit
    )


def test_weights_and_optimizer_come_back_exactly(tmp_path: Path) -> None:
    one, _ = make(tmp_path / "one")
    other, _ = make(tmp_path / "other")
    train_step(one.job, 1)
    train_step(one.job, 2)
    path = checkpoints(one.job, tmp_path / "saved").save(2)
    assert path == tmp_path / "saved" / "step-000002"
    assert checkpoints(other.job, tmp_path / "saved").resume() == 2
    for job in (one.job, other.job):
        train_step(job, 3)
    after = parameters_of(other.scorer)
    assert all(torch.equal(value, after[name]) for name, value in parameters_of(one.scorer).items())
    moments = other.job.optimizer.state[other.job.trained[0]]
    assert int(moments["step"]) == 3


def test_saved_when_due_and_only_the_newest_kept(tmp_path: Path) -> None:
    built, events = make(tmp_path)
    saver = checkpoints(built.job, tmp_path / "saved", every=2, keep=1)
    for step in range(1, 6):
        saver(step)
    assert [path.name for path in complete(tmp_path / "saved")] == ["step-000004"]
    assert [(event["kind"], event["step"]) for event in events] == [
        ("checkpoint", 2),
        ("checkpoint", 4),
    ]


def test_the_newest_is_the_one_of_the_most_steps(tmp_path: Path) -> None:
    names = ["step-000200", "step-999999", "step-1000000"]
    for name in reversed(names):
        (tmp_path / name).mkdir()
        (tmp_path / name / "meta.json").write_text("{}")
    assert [path.name for path in complete(tmp_path)] == names


def test_none_are_saved_unless_asked_for(tmp_path: Path) -> None:
    built, _ = make(tmp_path)
    checkpoints(built.job, tmp_path / "saved")(1)
    assert not (tmp_path / "saved").exists()


def test_an_unfinished_checkpoint_does_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, _ = make(tmp_path)
    saver = checkpoints(built.job, tmp_path / "saved")
    saver.save(2)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.write_text", full)
        with pytest.raises(OutputError, match=r"step-000004 cannot be written: .*No space left"):
            saver.save(4)
    assert [path.name for path in complete(tmp_path / "saved")] == ["step-000002"]
    assert saver.resume() == 2
    saver.save(4)
    assert saver.resume() == 4


def test_without_a_checkpoint_nothing_is_loaded(tmp_path: Path) -> None:
    built, _ = make(tmp_path)
    before = parameters_of(built.scorer)
    assert checkpoints(built.job, tmp_path / "none").resume() == 0
    assert all(torch.equal(value, before[n]) for n, value in parameters_of(built.scorer).items())


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[], Path]:
    def save() -> Path:
        (tmp_path / "saved" / "step-000003").mkdir(parents=True)
        meta = (
            '{"step": 3, "identity": {"config": {"seed": 0, "lora": {"rank": 0}}, "data": "abc"}}'
        )
        (tmp_path / "saved" / "step-000003" / "meta.json").write_text(meta)
        return tmp_path / "saved"

    return save


def test_what_can_be_resumed(saved: Callable[[], Path]) -> None:
    folder = saved()
    require_resumable(folder, IDENTITY, num_steps=3)
    with pytest.raises(
        ConfigError, match=r"step-000003 is beyond the end of this run, step 2; .*steps=3"
    ):
        require_resumable(folder, IDENTITY, num_steps=2)
    changed = {"config": {"seed": 0, "lora": {"rank": 4}}, "data": "abc"}
    with pytest.raises(
        ConfigError, match=r"belongs to another run: config\.lora\.rank: 0 then, 4 now; "
    ):
        require_resumable(folder, changed, num_steps=9)
    shutil.rmtree(folder)
    require_resumable(folder, changed, num_steps=1)


def test_differences_are_named_by_their_keys() -> None:
    old = {"a": 1, "b": {"c": [1, 2], "d": None}, "gone": True}
    new = {"a": 1, "b": {"c": [1, 3], "d": None}, "new": 5}
    assert difference(old, new) == [
        "b.c: [1, 2] then, [1, 3] now",
        "gone: True then, None now",
        "new: None then, 5 now",
    ]
    assert difference(old, old) == []
