"""A rank that dies, in each phase of a run, or goes another way than the other: both end in seconds, with one line that
names it and what it did. Nobody tells the survivor, as torchrun would.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.helpers import online_runs
from tests.helpers.chat_runs import QUIET, events, words_of
from tests.helpers.forked_processes import LIMIT, start, worlds
from torch.distributed import TCPStore

PROGRAM = """\
import os, signal, sys, time
from taut.cli import main
from taut.train import distributed

def plant(ranks):
    open(os.environ["PLANTED"], "w").write(str(time.time()))
    how = os.environ["HOW"]
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "elsewhere":
        ranks.barrier()
    elif how == "another collective":
        ranks.sum([1.0])
    elif how == "out of memory":
        import torch
        from taut.run import setup
        def load(*_, **__):
            torch.empty(1 << 50)
        setup.load_model = load
    elif how == "another plan":
        from taut.train import trainer
        real = trainer.plan_microbatches
        trainer.plan_microbatches = lambda *given: real(*given)[:1] * 3

real = distributed.Ranks.doing
def doing(ranks, what):
    real(ranks, what)
    if ranks.rank == 1 and what.startswith(os.environ["WHEN"]) and not os.path.exists(os.environ["PLANTED"]):
        plant(ranks)
distributed.Ranks.doing = doing
sys.exit(main())
"""
SECONDS = 60.0
"""Within which the run has to end, on a busy machine; on a quiet one two, and up to fifteen where none has died."""
SMALL: dict[str, Any] = {
    **QUIET,
    "steps": 3,
    "check": "off",
    "contract.prompts": 0,
    "checkpoint.every": 2,
    "eval.every": 2,
}


def survivor(
    place: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], when: str, how: str
) -> str:
    """What the ranks print on stderr, once both have ended; rank 1 does ``how`` when it begins to do ``when``."""
    (place / "program.py").write_text(PROGRAM)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    planted = place / "planted"
    told = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "PLANTED": str(planted),
        "WHEN": when,
        "HOW": how,
    }
    started = []
    for world in worlds(2):
        for key, value in {**world, **told, "MASTER_PORT": str(store.port)}.items():
            monkeypatch.setenv(key, value)
        method = keys.get("method", "sft")
        words = words_of({**keys, "out": place / "out"})
        started.append(start(place, place / "program.py", method, *words))
    for process in started:
        process.join(LIMIT)
    ended = time.time()
    codes = [process.exitcode for process in started]
    said = "".join((place / f"{rank}.err").read_text() for rank in (0, 1))
    assert planted.exists(), said
    assert None not in codes, f"still running: {codes} {said}"
    assert ended - float(planted.read_text()) < SECONDS, said
    assert codes[0] not in (0, None)
    assert (codes[1] == -signal.SIGKILL) == (how == "killed")
    return said


def require_one_line(said: str, *parts: str) -> None:
    (line,) = [line for line in said.splitlines() if line.startswith("taut: ")]
    assert "Traceback" not in said
    assert line.startswith("taut: error: ")
    for part in parts:
        assert part in line


PHASES = [
    "reading the data",
    "loading the model",
    "taking step 2",
    "evaluating after step 2",
    "saving step-000002",
    "writing the model",
]


@pytest.mark.parallel
@pytest.mark.parametrize("when", PHASES)
def test_a_killed_rank_is_named_with_what_it_did(
    when: str, model: Path, train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {**SMALL, "model": model, "data.train": train, "data.eval": train}
    said = survivor(tmp_path, monkeypatch, keys, when, "killed")
    require_one_line(said, "rank 1 (process ", f"it was last seen {when}", "resume=true")
    if when.startswith("taking"):
        (end,) = events(tmp_path / "out", "end")
        assert "rank 1 (process " in end["reason"]


@pytest.mark.parallel
def test_a_rank_killed_in_a_rollout_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {**SMALL, **online_runs.keys_of("gkd", online_runs.save_models(tmp_path), tmp_path)}
    del keys["eval.every"]
    said = survivor(tmp_path, monkeypatch, keys, "preparing step 2", "killed")
    require_one_line(said, "rank 1 (process ", "it was last seen preparing step 2")


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("how", "parts"),
    [
        ("elsewhere", ["the ranks do not do the same", "waits for all", "all_gather of"]),
        ("another collective", ["the ranks do not do the same", "all_reduce of Double [1]"]),
        ("another plan", ["the ranks have planned step", "3 micro-batches"]),
    ],
)
def test_a_rank_that_goes_astray_is_named(
    how: str,
    parts: list[str],
    model: Path,
    train: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = {**SMALL, "model": model, "data.train": train}
    said = survivor(tmp_path, monkeypatch, keys, "taking step 2", how)
    require_one_line(said, "rank 0", "rank 1", *parts)


@pytest.mark.parallel
def test_a_rank_out_of_memory_while_loading_says_so_before_the_others_wait(
    model: Path, train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {**SMALL, "model": model, "data.train": train}
    said = survivor(tmp_path, monkeypatch, keys, "loading the model", "out of memory")
    require_one_line(said, f"loading {model} on rank 1: out of memory", "by plan a rank takes")
