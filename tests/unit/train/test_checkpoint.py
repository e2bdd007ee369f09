"""Checkpoints: complete or absent, verified, the newest kept, what fails told."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.tiny_models import parameters_of
from tests.helpers.tiny_trainers import make

from taut.errors import OutputError
from taut.io import files
from taut.train import sharded
from taut.train.cadence import Cadence
from taut.train.checkpoint import Checkpoints, find_newest, set_aside
from taut.train.run_dir import LATEST, MARK, complete
from taut.train.settings import CheckpointConfig
from taut.train.trainer import Trainer, train_step

Made = tuple[Trainer, list[dict[str, Any]]]


class Counter:
    """Something that remembers."""

    remembered = int

    def __init__(self) -> None:
        self.value = 0

    def remember(self) -> int:
        return self.value

    def recall(self, remembered: int) -> None:
        self.value = remembered


@pytest.fixture
def made(tmp_path: Path) -> Made:
    built, events = make(tmp_path / "made")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / MARK).write_text("{}")
    return built.trainer, events


@contextmanager
def opened(
    trainer: Trainer, out: Path, num_steps: int = 20, **config: Any
) -> Iterator[Checkpoints]:
    chosen = CheckpointConfig(**config)
    saver = Checkpoints(
        out / "checkpoints", chosen, Cadence(chosen.every, trainer).is_due, trainer.scorer, trainer.optimizer,
        num_steps, trainer.ranks, trainer.emit,
        notes=lambda step: {
            "cursor": [step, 6 * step], "loss": 1.0, "identity": {"config": {}}
        },
    )  # fmt: skip
    try:
        saver.prepare()
        yield saver
    finally:
        saver.close()


def names(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def kinds(events: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(event["kind"], event["step"]) for event in events]


@pytest.mark.parametrize("background", [True, False])
def test_everything_comes_back_exactly(background: bool, made: Made, tmp_path: Path) -> None:
    one, other = made[0], make(tmp_path / "other")[0].trainer
    counter = Counter()
    with opened(one, tmp_path / "out", every=1, background=background) as saver:
        saver.memories = {"counter": counter}
        train_step(one, 1)
        train_step(one, 2)
        counter.value = 7
        torch.manual_seed(5)
        assert saver.save(2, wait=True) == tmp_path / "out" / "checkpoints" / "step-000002"
    drawn = torch.rand(3)
    counter.value = 0
    with opened(other, tmp_path / "out", every=1) as saver:
        saver.memories = {"counter": counter}
        found, damaged = find_newest(saver.folder, other.ranks, skip_damaged=False)
        assert found is not None
        assert (found.step, found.meta.cursor, damaged) == (2, (2, 12), [])
        saver.resume(found)
        assert torch.equal(torch.rand(3), drawn)
    assert counter.value == 7
    for trainer in (one, other):
        train_step(trainer, 3)
    after = parameters_of(other.scorer)
    assert all(torch.equal(value, after[name]) for name, value in parameters_of(one.scorer).items())
    assert int(other.optimizer.state[other.trained[0]]["step"]) == 3


def test_what_is_saved_is_the_state_at_the_save_though_training_goes_on(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = made
    go_on = threading.Event()
    real = sharded.write
    monkeypatch.setattr(
        "taut.train.sharded.write", lambda *given: (go_on.wait(60), real(*given))[1]
    )
    with opened(trainer, tmp_path / "out", every=1) as saver:
        train_step(trainer, 1)
        before = {
            k: v.clone()
            for k, v in sharded.training_state(trainer.scorer, trainer.optimizer).items()
        }
        saver.save(1)
        train_step(trainer, 2)
        go_on.set()
        saver.settle()
        found, _ = find_newest(saver.folder, trainer.ranks, skip_damaged=False)
        assert found is not None
        saver.resume(found)
    after = sharded.training_state(trainer.scorer, trainer.optimizer)
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_saved_when_due_and_after_the_last_step_and_only_the_newest_kept(
    made: Made, tmp_path: Path
) -> None:
    trainer, events = made
    with opened(trainer, tmp_path / "out", num_steps=5, every=2, keep=1) as saver:
        for step in range(1, 6):
            saver(step)
            assert (
                not (saver.folder / LATEST).exists()
                or (
                    saver.folder / (saver.folder / LATEST).read_text().strip() / "meta.json"
                ).is_file()
            )
    assert names(tmp_path / "out") == ["latest", "step-000005"]
    assert kinds(events) == [("checkpoint", 2), ("checkpoint", 4), ("checkpoint", 5)]
    assert all(event["seconds_blocked"] < 10 for event in events)


def test_the_time_a_save_kept_training_waiting_is_told(made: Made, tmp_path: Path) -> None:
    trainer, events = made
    with opened(trainer, tmp_path / "out", every=1, background=False) as saver:
        saver.save(1)
    assert [event["seconds_blocked"] >= event["seconds"] > 0 for event in events] == [True]


def test_none_are_saved_unless_asked_for(made: Made, tmp_path: Path) -> None:
    with opened(made[0], tmp_path / "out", num_steps=1, every=0) as saver:
        saver(1)
        assert not saver.folder.exists()
        saver.save(1, wait=True)
    assert names(tmp_path / "out") == ["latest", "step-000001"]


def test_a_step_is_saved_once(made: Made, tmp_path: Path) -> None:
    trainer, events = made
    with opened(trainer, tmp_path / "out", every=2) as saver:
        saver(2)
        saver.save(2, wait=True)
        saver.save(2, wait=True, is_measured=False)
    assert kinds(events) == [("checkpoint", 2)]


def test_the_best_is_kept_too(made: Made, tmp_path: Path) -> None:
    best: list[int] = []
    with opened(made[0], tmp_path / "out", every=2, keep=1, keep_best=True) as saver:
        saver.best_step = lambda: best[-1] if best else None
        for step in range(1, 9):
            if step in (3, 5):
                best.append(step)
            saver(step)
    assert names(tmp_path / "out") == ["latest", "step-000005", "step-000008"]


def test_a_full_disk_is_told_and_nothing_saved_is_lost(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    trainer, _ = made
    with opened(trainer, tmp_path / "out", every=2) as saver:
        saver.save(2, wait=True)
        for place in ("os.fsync", "taut.io.files.sync_tree", "taut.io.files.digest"):
            with monkeypatch.context() as patched:
                patched.setattr(place, full)
                with pytest.raises(
                    OutputError,
                    match=r"cannot be written in .*: No space left on device; complete there: step-000002; see to",
                ):
                    saver.save(4, wait=True)
            assert [path.name for path in complete(saver.folder)] == ["step-000002"]
            assert (saver.folder / LATEST).read_text() == "step-000002\n"
        saver.save(4, wait=True)
    assert names(tmp_path / "out") == ["latest", "step-000002", "step-000004"]


def test_room_is_looked_for_before_training_and_before_each_write(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = made
    total, used, _ = shutil.disk_usage(tmp_path)
    with opened(trainer, tmp_path / "out", every=2) as saver:
        monkeypatch.setattr("shutil.disk_usage", lambda _: type("U", (), {"free": 1000}))
        with pytest.raises(OutputError, match=r"0\.0\d GB are needed and 0\.00 GB are free"):
            saver.save(2, wait=True)
    assert names(tmp_path / "out") == []
    with (
        pytest.raises(
            OutputError, match=r"checkpoint\.keep=2 takes up to .* GB in .* and 0\.00 GB are free"
        ),
        opened(trainer, tmp_path / "out", every=2),
    ):
        pass
    with opened(trainer, tmp_path / "out", every=0):
        pass
    assert used <= total


def test_a_run_whose_directory_was_taken_away_says_so(made: Made, tmp_path: Path) -> None:
    with opened(made[0], tmp_path / "out", every=2) as saver:
        saver.save(2, wait=True)
        shutil.rmtree(tmp_path / "out")
        with pytest.raises(OutputError, match="was removed or emptied while the run was writing"):
            saver.save(4, wait=True)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_somebody_removed_is_told_and_training_goes_on(
    made: Made, tmp_path: Path
) -> None:
    trainer, events = made
    with opened(trainer, tmp_path / "out", every=2) as saver:
        saver.save(2, wait=True)
        shutil.rmtree(saver.folder / "step-000002")
        saver.save(4, wait=True)
    assert kinds(events) == [("checkpoint", 2), ("checkpoint", 4), ("warning", 4)]
    assert "step-000002 is gone" in events[-1]["detail"]


def test_what_a_killed_write_left_is_cleared(made: Made, tmp_path: Path) -> None:
    left = tmp_path / "out" / "checkpoints" / ".step-000004.partial"
    left.mkdir(parents=True)
    (left / "meta.json").write_text("{}")
    assert find_newest(left.parent, made[0].ranks, skip_damaged=False) == (None, [])
    with opened(made[0], tmp_path / "out", every=2):
        assert not left.exists()


def damage(path: Path, how: str) -> None:
    if how == "missing":
        path.unlink()
    elif how == "flipped":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    else:
        path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize("how", ["missing", "flipped", "cut"])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "meta.json"])
def test_a_damaged_one_is_named_and_passed_over_only_if_allowed(
    how: str, name: str, made: Made, tmp_path: Path
) -> None:
    trainer, _ = made
    with opened(trainer, tmp_path / "out", every=2) as saver:
        saver.save(2, wait=True)
        saver.save(4, wait=True)
    folder = tmp_path / "out" / "checkpoints"
    damage(folder / "step-000004" / name, how)
    if (name, how) != ("meta.json", "missing"):  # without it there is no checkpoint
        with pytest.raises(OutputError, match=rf"step-000004/{name} .*checkpoint\.skip_damaged"):
            find_newest(folder, trainer.ranks, skip_damaged=False)
    found, damaged = find_newest(folder, trainer.ranks, skip_damaged=True)
    assert found is not None
    assert found.step == 2
    assert len(damaged) == ((name, how) != ("meta.json", "missing"))
    damage(folder / "step-000002" / name, "flipped")
    with pytest.raises(OutputError, match=r"no checkpoint is left|damaged|cannot be read"):
        find_newest(folder, trainer.ranks, skip_damaged=True)


def test_later_ones_are_set_aside(made: Made, tmp_path: Path) -> None:
    with opened(made[0], tmp_path / "out", every=2) as saver:
        saver.save(2, wait=True)
        saver.save(4, wait=True)
    folder = tmp_path / "out" / "checkpoints"
    set_aside(folder, 2)
    assert [path.name for path in complete(folder)] == ["step-000002"]
    assert (folder / LATEST).read_text() == "step-000002\n"
    assert len(list(folder.glob("damaged-step-000004-*"))) == 1
    shutil.rmtree(folder / "step-000002")
    set_aside(folder, 0)
    assert not (folder / LATEST).exists()


def test_notes_are_json_and_name_every_file(made: Made, tmp_path: Path) -> None:
    with opened(made[0], tmp_path / "out", every=2) as saver:
        path = saver.save(2, wait=True)
    meta = json.loads((path / "meta.json").read_text())
    assert set(meta["files"]) == {"__0_0.distcp", ".metadata"}
    assert all(files.digest(path / name) == sha for name, sha in meta["files"].items())
    assert set(meta["random"][0]) == {"python", "numpy", "torch"}
