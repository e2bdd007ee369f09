"""A disk that is full, told by the system itself: what writes says so in a line, whichever library was writing."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.jobs import make

from taut import sharded
from taut.checkpoint import CheckpointConfig, Checkpoints
from taut.deliver import save_best
from taut.errors import OutputError
from taut.outdir import MARK, Lock, complete
from taut.parallel import Ranks
from taut.runlog import EventLog, RunLog, read_events

SAID = "File too large"
"""What the system says past a limit on the size of a file: one error of its kind that needs no disk to be filled."""


@contextmanager
def no_file_longer_than(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def refused(act: Callable[[], object], size: int) -> None:
    message = f"cannot (be written|write).*({SAID}|os error 27)"
    with pytest.raises(OutputError, match=message), no_file_longer_than(size):
        act()


@pytest.mark.parametrize("size", [10, 5_000])
def test_tensors(size: int, tmp_path: Path) -> None:
    state = {f"t{i}": torch.randn(1000) for i in range(3)}
    with pytest.raises(OSError, match=SAID), no_file_longer_than(size):
        sharded.write(state, tmp_path, Ranks(0, 1, torch.device("cpu")))


def test_a_checkpoint_and_the_next_one(tmp_path: Path) -> None:
    job = make(tmp_path)[0].job
    out = tmp_path / "out"
    out.mkdir()
    (out / MARK).write_text("{}")
    saver = Checkpoints(
        out / "checkpoints", CheckpointConfig(every=1), job.scorer, job.optimizer, 9, job.ranks,
        job.emit, notes=lambda step: {},
    )  # fmt: skip
    saver.save(1, wait=True)
    refused(lambda: saver.save(2, wait=True), 1000)
    saver.save(2, wait=True)
    saver.close()
    assert len(complete(saver.folder)) == 2


def test_a_model(tmp_path: Path) -> None:
    built, _ = make(tmp_path)
    best = tmp_path / "best"
    for size in (10, 20_000):
        refused(lambda: save_best(built, best, lambda _: None), size)
        assert not list(tmp_path.glob("*best*"))
    save_best(built, best, lambda _: None)
    assert best.is_dir()


def test_events(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    def tell() -> None:
        with RunLog([EventLog(path)]) as log:
            log.emit("step", step=1, text="x" * 300)

    refused(tell, 100)
    with RunLog([EventLog(path)]) as log:
        log.emit("step", step=1)
    assert [event["step"] for event in read_events(path)] == [1]


def test_the_lock(tmp_path: Path) -> None:
    def take() -> None:
        with Lock(tmp_path / "out") as lock:
            lock.take()

    refused(take, 0)
    take()
