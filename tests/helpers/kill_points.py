"""The points of a run at which it can be killed: every operation it does, counted in the run's own process.

    forward, backward, update              of a step, of a proof, of an evaluation
    checkpoint, export, best, record       an operation on files in out/checkpoints, out/model and out/adapter,
    cache                                  out/best, elsewhere in out; in the cache of tokenized data

An operation on files opens one for writing, syncs, renames or removes one, or makes or removes a directory. A native
write of safetensors is two: before it, and in the middle of it, where half a file is there. So are the tensors of a
model: before the first of a file, and before the last. Kinds are counted apart, so a point is the same one in every
run, whichever thread gets there.

Knows the names in ``out``, and of how taut writes them only that. ``tests.helpers.killed_runs`` starts the runs.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

PLACES = {"checkpoints": "checkpoint", "model": "export", "adapter": "export", "best": "best"}


class Operation(NamedTuple):
    """What a run did, in the order it was counted."""

    kind: str
    what: str


class Point(NamedTuple):
    """Before the ``number``-th operation of a kind, counted from 1; nowhere if that is 0."""

    kind: str
    number: int
    rank: int = 0
    """Which of several ranks it is that dies."""


NOWHERE = Point("", 0)


def point(operations: Sequence[Operation], kind: str, share: float, within: str = "") -> Point:
    """``share`` (0 to 1) of the way through what a run did of a kind, on files with ``within`` in their path."""
    mine = (operation.what for operation in operations if operation.kind == kind)
    numbers = [number for number, what in enumerate(mine, start=1) if within in what]
    assert numbers, f"the run does nothing of the kind {kind} {within}"
    return Point(kind, numbers[round(share * (len(numbers) - 1))])


def cache_of(out: Path) -> Path:
    """Where a run keeps tokenized data: its own place, so that writing there is a part of it."""
    return out.with_name(f"{out.name}.cache")


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
            if (kind, self._numbers[kind]) != self.at[:2]:
                return
            if spoil is not None:
                spoil()
            if self.is_power_lost:
                self._lose()
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # for the signal

    def reach_file(
        self, name: str, path: str | bytes | int | Path, spoil: Callable[[], None] | None = None
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

        from taut.models.weight_files import WeightFile

        put = WeightFile.put

        def put_tensor(file: WeightFile, name: str, tensor: torch.Tensor) -> None:
            if len(file.missing) in (1, file.num_tensors):
                self.reach_file("put", file.path)
            put(file, name, tensor)

        WeightFile.put = put_tensor  # type: ignore[method-assign]

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
