"""Runs that are killed at an exact point (``tests.points``) and resumed. What they leave is read by ``tests.left``.

Runs are forked from a process that has only imported (multiprocessing's fork server): no kernel ran in it and it has
one thread. Some are resumed in a process of their own all the same (``is_fresh``). ``num_ranks``: so many processes,
with what torchrun would tell them. ``is_power_lost``: with the process goes all that was not synced.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from tests.chats import QUIET, chats, write_rows
from tests.left import require_latest_is_complete
from tests.points import NOWHERE, Counted, Operation, Point, cache_of

IMPORTED = ("taut.api", "torch", "transformers", "peft")
LIMIT = 120.0
"""Seconds a run may take."""
PATIENCE = 20.0
"""Seconds that ranks are given to end by themselves."""
PROGRAM = "import json, sys; from tests.kills import train; train(json.loads(sys.argv[1]))"


def _run(
    keys: dict[str, Any], at: Point | None, is_power_lost: bool, world: dict[str, str]
) -> None:
    """The body of a forked process; ``at`` is None for one that is not watched."""
    out = Path(keys["out"])
    os.environ.update({**_environment(out), **world})
    with out.with_name(f"{out.name}.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    for name in set(IMPORTED) - set(sys.modules):
        importlib.import_module(name)  # says what the fork server kept to itself
        raise AssertionError(f"the fork server has not imported {name}")
    assert len(os.listdir("/proc/self/task")) == 1, "the fork server had threads"  # noqa: PTH208
    if at is None:
        train(keys)
        return
    counted = Counted(out, at, is_power_lost=is_power_lost)
    counted.install()
    train(keys)
    _operations_of(out).write_text(json.dumps(counted.operations))


def train(keys: Mapping[str, Any]) -> None:
    """A run of the method that the keys name; of SFT where they name none."""
    import taut

    getattr(taut, keys.get("method", "sft"))(**keys)


@cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context


def _operations_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.operations.json")


def _environment(out: Path) -> dict[str, str]:
    return {"TAUT_CACHE": str(cache_of(out))}


def _fork(
    keys: Mapping[str, Any], at: Point | None, *, num_ranks: int = 1, is_power_lost: bool = False
) -> list[int]:
    """How each rank of a forked run ends: 0, 1 for an error, -9 for one that was killed. When one has failed the others
    are asked to end (SIGTERM), as torchrun does, and later made to.
    """
    worlds = _worlds(num_ranks)
    started = [
        _server().Process(
            target=_run,
            args=(dict(keys), at if at and at.rank == rank else None, is_power_lost, world),
        )
        for rank, world in enumerate(worlds)
    ]
    for process in started:
        process.start()
    has_ended = _wait(started)
    _end(started)
    assert has_ended, f"no end in {LIMIT:.0f} s: {log_of(Path(keys['out']))}"
    return [int(process.exitcode or 0) for process in started]


def _wait(started: Sequence[ForkServerProcess]) -> bool:
    """Until one has failed or all have ended. False: neither came about."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        alive = [process.sentinel for process in started if process.is_alive()]
        if not alive or any(process.exitcode for process in started):
            return True
        wait(alive, timeout=1.0)
    return False


def _worlds(num_ranks: int) -> list[dict[str, str]]:
    """What torchrun tells each rank; nothing to one that is alone."""
    if num_ranks == 1:
        return [{}]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        {key: str(value) for key, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
        for rank in range(num_ranks)
    ]


def _end(started: Sequence[ForkServerProcess]) -> None:
    """End those that still run, gently first."""
    for process in started:
        if process.is_alive():
            process.terminate()
    for process in started:
        process.join(PATIENCE)
        if process.is_alive():
            process.kill()
            process.join()


def log_of(out: Path) -> str:
    """The end of what the runs in ``out`` printed."""
    path = out.with_name(f"{out.name}.log")
    return path.read_text(errors="replace")[-3000:] if path.exists() else ""


def whole(out: Path, keys: Mapping[str, Any], *, num_ranks: int = 1) -> list[Operation]:
    """An uninterrupted run, and what it did (its first rank, of several)."""
    keys = {**keys, "out": str(out)}
    codes = _fork(keys, NOWHERE, num_ranks=num_ranks)
    assert not any(codes), f"the uninterrupted run failed: {log_of(out)}"
    return [Operation(*item) for item in json.loads(_operations_of(out).read_text())]


def kill(
    out: Path,
    keys: Mapping[str, Any],
    at: Point,
    *,
    num_ranks: int = 1,
    is_power_lost: bool = False,
) -> None:
    """A run, begun or resumed, that kills itself at a point."""
    keys = {**keys, "out": str(out), "resume": True}
    codes = _fork(keys, at, num_ranks=num_ranks, is_power_lost=is_power_lost)
    assert codes[at.rank] == -signal.SIGKILL, f"not killed at {at}: {codes}: {log_of(out)}"
    require_latest_is_complete(out)


def kill_if_reached(out: Path, keys: Mapping[str, Any], at: Point) -> bool:
    """A resumed run, which may have less to do than one from the start: whether it came to the point."""
    (code,) = _fork({**keys, "out": str(out), "resume": True}, at)
    assert code in (0, -signal.SIGKILL), f"ended with {code} on its way to {at}: {log_of(out)}"
    require_latest_is_complete(out)
    return code != 0


def resume(
    out: Path, keys: Mapping[str, Any], *, num_ranks: int = 1, is_fresh: bool = False
) -> None:
    """The same command line as ``kill``, to its end."""
    keys = {**keys, "out": str(out), "resume": True}
    if not is_fresh:
        codes = _fork(keys, None, num_ranks=num_ranks)
        assert not any(codes), f"the resumed run failed: {log_of(out)}"
        return
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(keys)],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
        env={**os.environ, **_environment(out)},
    )
    assert done.returncode == 0, done.stderr


def shuffled_mixture(place: Path, model: Path) -> dict[str, Any]:
    """Keys of a small run: two sources with weights, 18 samples an epoch and 5 a step, so that steps span epochs and
    checkpoints lie in the middle of one.
    """
    sources = {
        "often": write_rows(place / "often.jsonl", chats(8)),
        "seldom": write_rows(place / "seldom.jsonl", chats(12, seed=1)),
    }
    weights = {"often": 1.5, "seldom": 0.5}
    return {
        **QUIET,
        "model": str(model),
        "data.train": [{"path": str(sources[name]), "weight": weights[name]} for name in sources],
        "data.eval": str(write_rows(place / "held_out.jsonl", chats(3, seed=2))),
        "steps": 7,
        "batch.samples_per_step": 5,
        "batch.tokens_per_microbatch": 120,
        "optim.schedule": "cosine",
        "checkpoint.every": 3,
        "contract.prompts": 2,
        "contract.tokens": 8,
    }
