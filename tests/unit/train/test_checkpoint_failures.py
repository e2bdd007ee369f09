"""Checkpoints that fail, or are cut short, in the background."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.train.test_checkpoint import Made, kinds, made, opened

from taut.errors import OutOfMemory, OutputError
from taut.train import random_state, sharded
from taut.train.run_dir import complete
from taut.train.signals import Interrupt

__all__ = ["made"]


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_failure_ends_the_run_after_the_next_step(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(made[0], tmp_path / "out", every=4) as saver:
        monkeypatch.setattr("taut.io.files.sync_tree", full)
        saver(4)
        assert saver._pending is not None
        saver._pending.exception()
        with pytest.raises(OutputError, match="No space left"):
            saver(5)


def test_where_a_run_fails_its_own_error_is_the_one_that_is_told(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, events = made
    with opened(trainer, tmp_path / "out", every=2) as saver:
        with monkeypatch.context() as patched:
            patched.setattr("taut.io.files.sync_tree", full)
            saver.save(2)
            saver.settle_or_warn()
            assert [event["kind"] for event in events] == ["warning"]
            told = saver.rescue(2, random_state.capture(trainer.ranks.device))
            assert told.startswith("its training state was not saved: a checkpoint cannot be")
        told = saver.rescue(2, random_state.capture(trainer.ranks.device))
        assert told == f"training state: {complete(saver.folder)[0]}"


def test_an_interrupt_while_one_is_waited_for_loses_nothing(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, events = made
    with opened(trainer, tmp_path / "out", every=2) as saver:
        saver.save(2)
        assert saver._pending is not None

        def interrupted() -> None:
            raise Interrupt("SIGTERM")

        with monkeypatch.context() as patched:
            patched.setattr(saver._pending, "result", interrupted)
            with pytest.raises(Interrupt):
                saver.settle()
        saver.save(2, wait=True)
    assert kinds(events) == [("checkpoint", 2)]


def test_no_memory_for_the_second_copy(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 b")

    monkeypatch.setattr(sharded, "allocate", allocate)
    with opened(made[0], tmp_path / "out", every=2) as saver:
        with pytest.raises(OutOfMemory, match=r"step 2.*set checkpoint\.background=false"):
            saver(2)
        saver.save(2, wait=True)
        assert len(complete(saver.folder)) == 1
