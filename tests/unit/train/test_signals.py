"""Signals are noted, agreed on, and given back."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from taut.errors import Interrupted
from taut.train.distributed import Ranks
from taut.train.signals import SIGNALS, Interrupt, Interrupts

ALONE = Ranks(0, 1, torch.device("cpu"))


class Two:
    """Two ranks; the other one says what it got."""

    size = 2

    def __init__(self, other: str | None) -> None:
        self.other = other

    def max(self, values: list[float]) -> list[float]:
        return [max(values[0], float(self.other is not None))]

    def gather_in_step(self, value: Any) -> list[Any]:
        return [value, self.other]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_raised_where_it_is_asked_for(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Interrupts.watching() as interrupts:
        interrupts.check()
        interrupts.agree(ALONE)
        os.kill(os.getpid(), number)
        assert interrupts.received == number.name
        for ask in (interrupts.check, lambda: interrupts.agree(ALONE)):
            with pytest.raises(Interrupt, match=number.name):
                ask()
    assert signal.getsignal(number) == before


def test_at_once_is_at_once_with_one_rank_only() -> None:
    with Interrupts.watching() as interrupts, interrupts.at_once(cast(Ranks, Two(None))):
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Interrupt, match="SIGINT"):
        _killed_at_once()
    with Interrupts.watching() as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupt):  # a signal that came before is not forgotten
            interrupts.at_once(ALONE).__enter__()


def _killed_at_once() -> None:
    with Interrupts.watching() as interrupts, interrupts.at_once(ALONE):
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("not reached")


def test_ranks_agree_on_a_signal_that_one_of_them_got() -> None:
    interrupts = Interrupts()
    interrupts.agree(cast(Ranks, Two(None)))
    with pytest.raises(Interrupt, match="SIGUSR1"):
        interrupts.agree(cast(Ranks, Two("SIGUSR1")))


def test_only_a_later_signal_is_a_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    now = [100.0]
    monkeypatch.setattr("os._exit", codes.append)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    interrupts = Interrupts()
    interrupts.notice(signal.SIGINT, None)
    now[0] += 0.5
    interrupts.notice(signal.SIGTERM, None)
    assert (codes, interrupts.received) == ([], "SIGINT")
    now[0] += 1.0
    interrupts.notice(signal.SIGTERM, None)
    assert codes == [128 + signal.SIGTERM]


def test_an_interrupt_is_no_mistake_that_somebody_might_handle(tmp_path: Path) -> None:
    assert issubclass(Interrupt, KeyboardInterrupt)
    assert not issubclass(Interrupt, Exception)


def test_what_is_held_is_done_before_the_signal_is_raised() -> None:
    done: list[str] = []
    with pytest.raises(Interrupt, match="SIGTERM"):
        _killed_while_held(done)
    assert done == ["held"]
    with Interrupts.watching() as interrupts:
        with interrupts.held():
            os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.received == "SIGTERM", "between steps it stays a note"


def _killed_while_held(done: list[str]) -> None:
    with Interrupts.watching() as interrupts, interrupts.at_once(ALONE):
        with interrupts.held():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("held")
        done.append("after")


def test_a_signal_that_is_ignored_stays_ignored_but_for_sigint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        with Interrupts.watching() as interrupts:
            for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
                os.kill(os.getpid(), number)
            assert interrupts.received is None
            os.kill(os.getpid(), signal.SIGINT)
            assert interrupts.received == "SIGINT"
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
        with Interrupts.watching() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert interrupts.received == "SIGHUP"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_before_training_a_signal_is_an_error_and_ctrl_c_is_ctrl_c() -> None:
    for number, expected, message in (
        (signal.SIGHUP, Interrupted, "interrupted by SIGHUP before training began"),
        (signal.SIGINT, KeyboardInterrupt, "^$"),
    ):
        with pytest.raises(expected, match=message) as raised:
            _killed_before_training(number)
        assert not isinstance(raised.value, Interrupt)


def _killed_before_training(number: signal.Signals) -> None:
    with Interrupts.watching() as interrupts, interrupts.before_training():
        os.kill(os.getpid(), number)
        raise AssertionError("not reached")


def test_a_notice_that_an_inner_watch_got_is_not_a_new_one_to_the_outer() -> None:
    with Interrupts.watching() as outer, outer.at_once():
        with Interrupts.watching():
            os.kill(os.getpid(), signal.SIGTERM)
        assert outer.received == "SIGTERM"
        os.kill(os.getpid(), signal.SIGTERM)  # the launcher passes it on: nothing is raised
