"""A server that takes weights by vLLM's own routes, and what stands in for a GPU, CUDA IPC and NCCL.

    stand_in(monkeypatch, nccl)
    with TransferServer(model=tiny(), backend="ipc") as server: ...

``HostMemory`` is the host as a GPU. ``FileChannel`` is the channel "ipc" with a file in memory as the buffer.
``FakeNccl`` is a library with NCCL's C interface, called with the same ctypes arguments; its ranks are in this process,
and a collective ends once each of them has come to it, or when its group is aborted.
"""

from __future__ import annotations

import base64
import ctypes
import json
import secrets
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers.fake_vllm import Body, _send
from tests.helpers.fake_weight_sync import ROUTES as PAUSE
from tests.helpers.fake_weight_sync import WeightServer
from torch import Tensor

from taut.inference import weight_sync, weight_transfer
from taut.inference.weight_transfer import CHANNELS, ROUTES, UNPICKLES, Gpu, IpcChannel
from taut.io.temporary import MEMORY

UUID = "GPU-of-tests"
PATIENCE = 30.0
INVALID_USAGE = 5


class HostMemory(Gpu):
    """The host, as if it were a GPU."""

    is_there = True
    uuid = UUID

    def used(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def stream(self) -> Any:
        return SimpleNamespace(cuda_stream=0, synchronize=lambda: None)

    def synchronize(self) -> None:
        """Nothing runs by itself here."""

    def collect(self) -> None:
        """Nor is anything shared."""


class FileChannel(IpcChannel):
    """Its buffer is a file in memory."""

    backend = "ipc"

    def _new(self, size: int) -> Tensor:
        self._path = MEMORY / f"taut-test-{secrets.token_hex(8)}"
        return torch.from_file(str(self._path), shared=True, size=size, dtype=torch.uint8)

    def _shared(self, buffer: Tensor) -> dict[str, Any]:
        return {"block": str(self._path)}

    def release(self) -> None:
        if self._buffer is not None:
            self._path.unlink()
        super().release()


CHUNK = 2**14
"""Bytes of a chunk: a tiny model takes several."""


def stand_in(
    monkeypatch: pytest.MonkeyPatch, nccl: FakeNccl | None = None, chunk_bytes: int = CHUNK
) -> None:
    """Take the host for a GPU, files for CUDA IPC and a fake for NCCL."""
    monkeypatch.setattr(weight_sync, "Gpu", HostMemory)
    monkeypatch.setattr(weight_transfer, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setitem(CHANNELS, "ipc", FileChannel)
    monkeypatch.setattr(weight_transfer, "nccl_library", lambda: nccl or FakeNccl())


def received(info: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a request of ``FileChannel``, as vLLM unpacks them."""
    with Path(info["block"]).open("rb") as block:
        raw = bytearray(block.read(sum(info["tensor_sizes"])))
    parts = torch.frombuffer(raw, dtype=torch.uint8).split(info["tensor_sizes"])
    shaped = zip(info["names"], info["dtype_names"], info["shapes"], parts, strict=True)
    return {
        name: part.view(getattr(torch, dtype)).view(shape) for name, dtype, shape, part in shaped
    }


@dataclass
class _Group:
    num_ranks: int = 0
    is_aborted: bool = False
    turn: threading.Condition = field(default_factory=threading.Condition)
    calls: dict[int, int] = field(default_factory=dict)
    """How many collectives each rank has come to."""
    data: list[bytes] = field(default_factory=list)
    """What rank 0 brought to each."""


class FakeNccl:
    """NCCL's functions, as far as they are called."""

    def __init__(self) -> None:
        self.groups: dict[bytes, _Group] = {}
        self.members: dict[int, tuple[_Group, int]] = {}
        """Groups and ranks by communicator."""
        self.fails: Callable[[str], bool] = lambda name: False
        """Which functions fail."""
        self.aborted = 0

    def ncclGetUniqueId(self, place: Any) -> int:
        unique_id = secrets.token_bytes(128)
        self.groups[unique_id] = _Group()
        ctypes.memmove(place, unique_id, 128)
        return self._result("ncclGetUniqueId")

    def ncclCommInitRank(self, place: Any, size: Any, unique_id: Any, rank: Any) -> int:
        if result := self._result("ncclCommInitRank"):
            return result
        group = self.groups[ctypes.string_at(ctypes.byref(unique_id), 128)]
        group.num_ranks = size.value
        comm = len(self.members) + 1
        self.members[comm] = group, rank.value
        place._obj.value = comm
        return self._meet(group, rank.value, b"")

    def ncclAllReduce(self, *arguments: Any) -> int:
        sent, _, count, dtype, _, comm, _ = arguments
        assert (count.value, dtype.value) == (1, 7), "one number of float32, as vLLM's ranks add up"
        group, rank = self.members[comm.value]
        return self._meet(group, rank, ctypes.string_at(sent, 4))

    def ncclBroadcast(self, *arguments: Any) -> int:
        sent, _, count, dtype, root, comm, _ = arguments
        assert root.value == 0
        if result := self._result("ncclBroadcast"):
            return result
        size = {0: 1, 1: 1, 2: 4, 4: 8, 6: 2, 7: 4, 8: 8, 9: 2}[dtype.value]
        group, rank = self.members[comm.value]
        return self._meet(group, rank, ctypes.string_at(sent, count.value * size))

    def ncclCommAbort(self, comm: Any) -> int:
        group, _ = self.members[comm.value]
        self.aborted += 1
        with group.turn:
            group.is_aborted = True
            group.turn.notify_all()
        return 0

    def ncclGetErrorString(self, result: Any) -> bytes:
        return {INVALID_USAGE: b"invalid usage"}[result.value]

    def _result(self, name: str) -> int:
        return INVALID_USAGE if self.fails(name) else 0

    def _meet(self, group: _Group, rank: int, data: bytes) -> int:
        """Wait until all ranks have come to this collective."""
        with group.turn:
            at = group.calls.get(rank, 0)
            group.calls[rank] = at + 1
            if rank == 0:
                group.data.append(data)
            group.turn.notify_all()
            group.turn.wait_for(
                lambda: (
                    group.is_aborted
                    or sum(count > at for count in group.calls.values()) == group.num_ranks
                ),
                PATIENCE,
            )
            return INVALID_USAGE if group.is_aborted else 0

    # -- the server's side

    def take(self, unique_id: bytes, rank: int) -> bytes:
        """What rank 0 brings to the next collective."""
        group = self.groups[unique_id]
        at = group.calls.get(rank, 0)
        if self._meet(group, rank, b""):
            raise RuntimeError("NCCL error: invalid usage")
        return group.data[at]


@dataclass
class TransferServer(WeightServer):
    """Takes weights by vLLM's routes. With ``full`` in ``has`` it has taut's extension too."""

    has: tuple[str, ...] = ("pause", "full")
    backend: str | None = "ipc"
    routes: tuple[str, ...] = ROUTES
    unpickles: bool = True
    world_size: int = 1
    gpu: str | None = UUID
    nccl: FakeNccl = field(default_factory=FakeNccl)
    loses: Callable[[str], bool] = lambda name: False
    """Which tensors do not arrive."""
    before_chunk: Callable[[TransferServer, int], object] = lambda server, number: None
    """Called with the number of chunks that came since the start."""

    def restart(self) -> None:
        super().restart()
        self.version, self.is_updating, self.num_chunks, self.num_groups = "default", False, 0, 0
        self.init_info: Body = {}

    def handle(self, handler: Any, body: Body | None) -> None:
        path = handler.path.partition("?")[0]
        if self.is_gone:
            return super().handle(handler, body)
        if path == "/openapi.json" and "pause" in self.has:
            own: dict[str, Any] = {route: {} for route in self.routes}
            return _send(handler, 200, json.dumps({"paths": {**PAUSE["paths"], **own}}))
        if path == "/server_info" and path in self.routes:
            return _send(handler, 200, json.dumps(self._described()))
        if path == "/weight_info" and path in self.routes:
            return _send(handler, 200, json.dumps({"weight_version": self.version}))
        if path == "/reset_prefix_cache":
            self.told.append(handler.path)
            return _send(handler, 200, json.dumps({"success": True}))
        if path not in self.routes or body is None:
            return super().handle(handler, body)
        self.told.append(path)
        try:
            getattr(self, path[1:])(body)
        except (RuntimeError, AssertionError, OSError) as error:
            return _send(handler, 500, json.dumps({"error": {"message": str(error)}}))
        if self.is_gone:
            handler.close_connection = True
            return None
        return _send(handler, 200, json.dumps({"message": "done"}))

    def _described(self) -> Body:
        config = {
            "weight_transfer_config": self.backend and {"backend": self.backend},
            "model_config": {"dtype": "torch.float32", "enable_sleep_mode": "sleep" in self.has},
            "parallel_config": {"world_size": self.world_size, "data_parallel_size": 1},
            "device_config": {"device": "cuda"},
            "lora_config": None,
        }
        return {"vllm_config": config, "vllm_env": {UNPICKLES: self.unpickles}}

    def _call(self, body: Body) -> tuple[int, str]:
        status, text = super()._call(body)
        answer = json.loads(text)
        if body["method"] == "taut_held":
            answer["results"] = [{**answer["results"][0], "gpu": self.gpu}]
        return status, json.dumps(answer)

    def init_weight_transfer_engine(self, body: Body) -> None:
        self.init_info = body["init_info"]
        self.num_groups += 1
        if self.backend == "nccl":
            assert self.init_info["world_size"] == 1 + self.world_size
            for _ in ("the group", "the number that is added up"):
                self.nccl.take(self._unique_id, self.init_info["rank_offset"])

    def start_weight_update(self, body: Body) -> None:
        assert "weights" not in self.asleep
        assert not self.is_updating, "called while a weight update is already active"
        self.is_updating, self.num_chunks = True, 0

    def update_weights(self, body: Body) -> None:
        assert self.is_updating, "start_weight_update must be called before update_weights."
        self.before_chunk(self, self.num_chunks)
        self.num_chunks += 1
        info = body["update_info"]
        tensors = received(info) if self.backend == "ipc" else self._broadcast(info)
        state = {name: tensor for name, tensor in tensors.items() if not self.loses(name)}
        self.worker.model.load_state_dict(state, strict=False)

    def finish_weight_update(self, body: Body) -> None:
        assert self.is_updating, "called without a matching start_weight_update."
        self.is_updating, self.version = False, body["weight_version"]

    def _broadcast(self, info: Body) -> dict[str, Tensor]:
        tensors = {}
        for name, dtype, shape in zip(
            info["names"], info["dtype_names"], info["shapes"], strict=True
        ):
            raw = bytearray(self.nccl.take(self._unique_id, self.init_info["rank_offset"]))
            tensors[name] = torch.frombuffer(raw, dtype=getattr(torch, dtype)).view(shape)
        return tensors

    @property
    def _unique_id(self) -> bytes:
        return base64.b64decode(self.init_info["nccl_unique_id_b64"])
