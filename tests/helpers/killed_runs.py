"""Runs that are killed at an exact point (``tests.helpers.kill_points``) and resumed.

``tests.helpers.run_directories`` reads what they leave.

Runs are forked (``tests.helpers.forked_processes``). Some are resumed in a process of their own all the same
(``is_fresh``).
``num_ranks``: so many processes, with what torchrun would tell them. ``is_power_lost``: with the process goes all that
was not synced.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.helpers.chat_runs import QUIET, chats, write_rows
from tests.helpers.forked_processes import LIMIT, fork, fork_bounded_process, require_clean, worlds
from tests.helpers.kill_points import NOWHERE, Counted, Operation, Point, cache_of
from tests.helpers.run_directories import require_latest_is_complete

PROGRAM = (
    "import json, sys; from tests.helpers.killed_runs import train; train(json.loads(sys.argv[1]))"
)


def _run(
    keys: dict[str, Any], at: Point | None, is_power_lost: bool, world: dict[str, str]
) -> None:
    """The body of a forked process; ``at`` is None for one that is not watched."""
    out = Path(keys["out"])
    os.environ.update({**_environment(out), **world})
    with out.with_name(f"{out.name}.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    require_clean()
    fork_bounded_process()
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


def _operations_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.operations.json")


def _environment(out: Path) -> dict[str, str]:
    return {"TAUT_CACHE": str(cache_of(out))}


def _fork(
    keys: Mapping[str, Any], at: Point | None, *, num_ranks: int = 1, is_power_lost: bool = False
) -> list[int]:
    """How each rank of a forked run ends."""
    given = [
        (dict(keys), at if at and at.rank == rank else None, is_power_lost, world)
        for rank, world in enumerate(worlds(num_ranks))
    ]
    codes = fork(_run, given)
    assert codes is not None, f"no end in {LIMIT:.0f} s: {log_of(Path(keys['out']))}"
    return codes


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
        "contract.max_new_tokens": 8,
    }
