"""What a rank reads of another's card."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch.distributed as dist

from taut.errors import RankFailed
from taut.train import watch
from taut.train.watch import Card, Collective, Watch


class Store:
    """A store without a server, and so without a thread's own connection to it."""

    def __init__(self) -> None:
        self.kept: Any = dist.HashStore()  # type: ignore[attr-defined]

    def clone(self) -> Any:
        return self.kept


def card(number: int = 7, what: str = "all_reduce of Float [3]", **keys: Any) -> Card:
    here = {"host": watch.this_machine(), "pid": os.getpid(), "doing": "taking step 2"}
    return Card(**{**here, "last": {"0": Collective(number, what)}, **keys})


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Rank 0 of 2, whose thread does not run."""
    monkeypatch.setattr(watch.threading.Thread, "start", lambda _: None)
    monkeypatch.setattr(Watch, "meet", lambda *_: None)
    made = Watch(Store(), 0, 2)
    made._mine = card()
    return made


def looks(ours: Watch, other: Card) -> RankFailed | None:
    ours._store.set("taut/rank/1", other.encoded())
    return ours._dead() or ours._astray()


def test_a_card_is_read_as_it_was_written() -> None:
    assert Card.decoded(card(awaits_all=True).encoded().encode()) == card(awaits_all=True)


def test_a_rank_that_does_the_same_is_well(ours: Watch) -> None:
    assert looks(ours, card()) is None
    assert looks(ours, card(number=8)) is None, "it is ahead"
    assert looks(ours, card(awaits_all=True)) is None, "this rank works for both"


def test_a_process_that_has_ended_is_gone(ours: Watch) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    found = looks(ours, card(pid=child.pid))
    child.wait()
    assert str(found).startswith(f"rank 1 (process {child.pid} on ")
    assert "it was last seen taking step 2 (last all_reduce of Float [3]" in str(found)
    assert looks(ours, card(pid=child.pid, host="another")) is None, "not of this machine"


def test_a_silent_machine_is_given_up(ours: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    far = card(host="another/boot", pid=1)
    assert looks(ours, far) is None
    monkeypatch.setattr(watch, "SILENCE", -1.0)
    assert "process 1 on another) has been silent" in str(looks(ours, far))
    far.beat += 1
    monkeypatch.setattr(watch, "SILENCE", 60.0)
    assert looks(ours, far) is None


def test_different_collectives_in_one_place_are_found_at_once(ours: Watch) -> None:
    found = str(looks(ours, card(what="all_gather of Float [8]")))
    assert "rank 0: taking step 2 (last all_reduce of Float [3] as its 7. collective)" in found
    assert "rank 1: taking step 2 (last all_gather of Float [8] as its 7. collective)" in found


def test_one_that_waits_for_all_before_the_others_collective_is_found_in_time(
    ours: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = card(number=6, awaits_all=True)
    assert looks(ours, waits) is None, "the cards are of two moments"
    monkeypatch.setattr(watch, "ASTRAY", -1.0)
    assert "waits for all, after all_reduce" in str(looks(ours, waits))


def test_the_first_to_fail_is_the_one_that_says_why(
    ours: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "LINGER", 0.0)
    assert ours._reported() is None
    assert ours.report(2, "taut: error: bad data")
    assert not ours.report(75, "taut: interrupted")
    found = ours._reported()
    assert found is not None
    assert (str(found), found.exit_code, found.is_told) == ("taut: error: bad data", 2, True)


@pytest.mark.parametrize(
    ("error", "is_collective"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:537] Connection reset by peer"), True),
        (RuntimeError("NCCL communicator was aborted on rank 1."), True),
        (RuntimeError("shapes do not fit"), False),
        (ValueError("gloo"), False),
    ],
)
def test_only_a_collectives_error_is_explained(
    error: Exception, is_collective: bool, ours: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "BEAT", 0.01)
    found = ours.explain(error)
    assert (found is not None) == is_collective
    if found is not None:
        assert "every rank lives (rank 0: taking step 2" in str(found)
