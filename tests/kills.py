"""Runs that are killed at an exact point and resumed. What they leave is read by ``tests.left``.

A point is an operation of a run, counted within its kind, before which the process kills itself (SIGKILL):

    forward, backward, update              of a step, of a proof, of an evaluation
    checkpoint, export, best, record       an operation on files in out/checkpoints, out/model and out/adapter,
    cache                                  out/best, elsewhere in out; in the cache of tokenised data

An operation on files opens one for writing, syncs, renames or removes one, or makes or removes a directory. A native
write of safetensors is two: before it, and in the middle of it, where half a file is there. Kinds are counted apart, so
a point is the same one in every run, whichever thread gets there. ``is_power_lost``: what was not synced is lost too.

Runs are forked from a process that has only imported (multiprocessing's fork server): no kernel ran in it and it has
one thread. Some are resumed in a process of their own all the same (``resume(..., is_fresh=True)``).

Knows the names in ``out``, nothing of how taut writes them.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tests.chats import QUIET, chats, write_rows
from tests.left import require_latest_is_complete

IMPORTED = ("taut.api", "torch", "transformers", "peft")
LIMIT = 120.0
"""Seconds a run may take."""
PLACES = {"checkpoints": "checkpoint", "model": "export", "adapter": "export", "best": "best"}
ON_FILES = ("checkpoint", "export", "best", "record", "cache")
IN_STEPS = ("forward", "backward", "update")
PROGRAM = "import json, sys, taut; taut.sft(**json.loads(sys.argv[1]))"


class Operation(NamedTuple):
    """What a run did, in the order it was counted."""

    kind: str
    what: str


class Point(NamedTuple):
    """Before the ``number``-th operation of a kind, counted from 1; nowhere if that is 0."""

    kind: str
    number: int


NOWHERE = Point("", 0)


def point(operations: list[Operation], kind: str, share: float) -> Point:
    """The point that lies ``share`` (0 to 1) of the way through what a run did of a kind."""
    total = sum(operation.kind == kind for operation in operations)
    assert total, f"the run does nothing of the kind {kind}"
    return Point(kind, 1 + round(share * (total - 1)))


# In the process of a run.


class Counted:
    """Counts the operations of this process and kills it at one of them."""

    def __init__(self, out: Path, at: Point, *, is_power_lost: bool) -> None:
        self.out, self.cache = str(out), str(cache_of(out))
        self.at, self.is_power_lost = at, is_power_lost
        self.operations: list[Operation] = []
        self._numbers: Counter[str] = Counter()
        self._synced: dict[int, int] = {}
        self._lock = threading.RLock()

    def reach(self, kind: str, what: str = "", spoil: Callable[[], None] | None = None) -> None:
        """An operation is about to happen."""
        with self._lock:
            self._numbers[kind] += 1
            self.operations.append(Operation(kind, what))
            if self.at != (kind, self._numbers[kind]):
                return
            if spoil is not None:
                spoil()
            if self.is_power_lost:
                self._lose()
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(LIMIT)

    def reach_file(
        self, name: str, path: str | bytes | int, spoil: Callable[[], None] | None = None
    ) -> None:
        """An operation ``name`` on a file is about to happen; counted where it is the run's own."""
        place = os.path.abspath(os.fsdecode(_path_of(path) if isinstance(path, int) else path))  # noqa: PTH100
        kind = self._kind(place)
        if kind is not None:
            self.reach(kind, f"{name} {os.path.relpath(place, os.path.dirname(self.out))}", spoil)  # noqa: PTH120

    def install(self) -> None:
        """Watch this process from now on. There is no way back."""
        sys.addaudithook(self._audit)
        self._install_native()
        self._install_steps()

    def _kind(self, path: str) -> str | None:
        if path.startswith(self.cache):
            return "cache"
        if path != self.out and not path.startswith(self.out + os.sep):
            return None
        first = Path(path[len(self.out) + 1 :] or ".").parts[:1]
        return PLACES.get("".join(first).lstrip(".").split(".")[0], "record")

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            if not isinstance(path, int) and _is_writing(mode, flags):
                self.reach_file("open", path)
        elif event in ("os.remove", "os.rmdir", "os.mkdir"):
            self.reach_file(event, _at(arguments[0], arguments[-1]))
        elif event == "os.rename":
            self.reach_file(event, _at(arguments[0], arguments[2]))
        elif event == "os.truncate":
            self.reach_file(event, arguments[0])

    def _install_native(self) -> None:
        import safetensors.torch as library

        sync, serialize = os.fsync, library.serialize_file

        def synced(file: Any) -> None:
            descriptor = file if isinstance(file, int) else file.fileno()
            self.reach_file("os.fsync", descriptor)
            sync(descriptor)
            found = os.fstat(descriptor)
            self._synced[found.st_ino] = found.st_size

        def serialized(tensors: Any, filename: Any, **options: Any) -> None:
            path = os.fspath(filename)
            self.reach_file("save", path)
            serialize(tensors, filename, **options)
            half = Path(path).stat().st_size // 2
            self.reach_file("torn", path, lambda: os.truncate(path, half))

        os.fsync, library.serialize_file = synced, serialized

    def _install_steps(self) -> None:
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        differentiate = torch.autograd.backward

        def backward(*arguments: Any, **options: Any) -> None:
            self.reach("backward")
            differentiate(*arguments, **options)

        torch.autograd.backward = backward
        register_module_forward_pre_hook(lambda *_: self.reach("forward"))
        register_optimizer_step_pre_hook(lambda *_: self.reach("update"))

    def _lose(self) -> None:
        """What a machine without power would lose: each file ends where it was last synced."""
        for path in Path(self.out).rglob("*"):
            if path.is_file():
                found = path.stat()
                os.truncate(path, min(found.st_size, self._synced.get(found.st_ino, 0)))


def _is_writing(mode: str | None, flags: int) -> bool:
    if mode is not None:
        return any(letter in mode for letter in "wax+")
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115


def _at(path: str | bytes | int, folder: int) -> str | bytes | int:
    """A path relative to an open folder, as shutil.rmtree gives them."""
    if isinstance(path, int) or folder < 0:
        return path
    return os.path.join(_path_of(folder), os.fsdecode(path))  # noqa: PTH118


def _run(keys: dict[str, Any], at: Point | None, is_power_lost: bool) -> None:
    """The body of a forked process; ``at`` is None for one that is not watched."""
    out = Path(keys["out"])
    os.environ.update(_environment(out))
    with out.with_name(f"{out.name}.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    for name in set(IMPORTED) - set(sys.modules):
        importlib.import_module(name)  # says what the fork server kept to itself
        raise AssertionError(f"the fork server has not imported {name}")
    assert len(os.listdir("/proc/self/task")) == 1, "the fork server had threads"  # noqa: PTH208
    import taut

    if at is None:
        taut.sft(**keys)
        return
    counted = Counted(out, at, is_power_lost=is_power_lost)
    counted.install()
    taut.sft(**keys)
    _operations_of(out).write_text(json.dumps(counted.operations))


# In the process of a test.


@cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context


def _operations_of(out: Path) -> Path:
    return out.with_name(f"{out.name}.operations.json")


def cache_of(out: Path) -> Path:
    """Where a run keeps tokenised data: its own place, so that writing there is a part of it."""
    return out.with_name(f"{out.name}.cache")


def _environment(out: Path) -> dict[str, str]:
    return {"TAUT_CACHE": str(cache_of(out)), "OMP_NUM_THREADS": "1"}


def _fork(keys: Mapping[str, Any], at: Point | None, *, is_power_lost: bool = False) -> int:
    """How a forked run ends: 0, 1 for an error, -9 for one that was killed."""
    out = Path(keys["out"])
    process = _server().Process(target=_run, args=(dict(keys), at, is_power_lost))
    process.start()
    process.join(LIMIT)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"the run in {out} did not end in {LIMIT:.0f} s: {log_of(out)}")
    assert process.exitcode is not None
    return process.exitcode


def log_of(out: Path) -> str:
    """The end of what the runs in ``out`` printed."""
    path = out.with_name(f"{out.name}.log")
    return path.read_text(errors="replace")[-3000:] if path.exists() else ""


def whole(out: Path, keys: Mapping[str, Any]) -> list[Operation]:
    """An uninterrupted run, and what it did."""
    keys = {**keys, "out": str(out)}
    code = _fork(keys, NOWHERE)
    assert code == 0, f"the uninterrupted run failed: {log_of(out)}"
    return [Operation(*item) for item in json.loads(_operations_of(out).read_text())]


def kill(out: Path, keys: Mapping[str, Any], at: Point, *, is_power_lost: bool = False) -> None:
    """A run (``resume=true`` for all but the first in ``out``) that kills itself at a point."""
    keys = {**keys, "out": str(out), "resume": True}
    code = _fork(keys, at, is_power_lost=is_power_lost)
    assert code == -signal.SIGKILL, f"not killed at {at} but ended with {code}: {log_of(out)}"
    require_latest_is_complete(out)


def resume(out: Path, keys: Mapping[str, Any], *, is_fresh: bool = False) -> None:
    """The same command line as ``kill``, to its end."""
    keys = {**keys, "out": str(out), "resume": True}
    if not is_fresh:
        code = _fork(keys, None)
        assert code == 0, f"the resumed run failed: {log_of(out)}"
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
