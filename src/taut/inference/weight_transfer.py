"""Weight transfer: whole weights to vLLM servers by vLLM's own routes, from one GPU to another, without files.

    nccl   a group of NCCL for each server: this process is rank 0, the server's workers are the ranks from 1 on. Each
           tensor is broadcast by itself.
    ipc    the server's worker is on this process's GPU. Tensors are packed into a buffer there; the server maps it
           (CUDA IPC), and copies them out.

    POST /init_weight_transfer_engine   once for each process of the server
    POST /start_weight_update           its layers wait for new weights
    POST /update_weights                for each chunk: names, dtypes and shapes; ipc: the handle
    POST /finish_weight_update          with a version, which GET /weight_info gives from then on

No rank holds more than a layer and a chunk beside its own shard. A chunk goes to all servers at the same time; the next
is gathered when all have it. A server that fails, or takes longer than ``sync.timeout`` for a chunk, is left
out and the others go on. Its NCCL group is aborted, which ends what waits for it on this GPU.

The version names the group that it came by, so a server that was started again, or that another client changed, is seen
by it.

Nothing of vLLM is imported. What is relied on: vLLM's routes, as 0.32 has them; for nccl ``nccl_unique_id_b64``, which
vLLM documents for trainers without torch, and the C interface of NCCL (the library that torch has loaded); for ipc
``reduce_tensor`` of torch.multiprocessing.reductions, whose arguments vLLM gives to ``rebuild_cuda_tensor`` of its own
torch. NCCL wants one version of itself on all ranks.

``weight_sync.py`` says when weights are sent, and proves that they arrived. Written against vLLM 0.32.0; not yet run on
a GPU.
"""

from __future__ import annotations

import base64
import ctypes
import pickle
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import httpx2
import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from taut.errors import EngineError
from taut.inference.settings import Transport
from taut.inference.vllm_client import (
    NoAnswer,
    ParameterReport,
    VllmServer,
    WorkerState,
    parsed,
)
from taut.inference.worker.taut_worker import checksum, columns

CHUNK_BYTES = 2**28
"""Approximate size of a chunk; sender and server each hold one on the GPU."""
ROUTES = tuple(
    f"/{name}"
    for name in (
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "weight_info",
        "server_info",
    )
)
"""Routes that a server has to answer."""
VERSION = "taut"
"""Before the group, the version and the number of a push, in the version that a server is given."""
ANSWERS = 5.0
"""Seconds within which a server that is there again answers."""
UNPICKLES = "VLLM_ALLOW_INSECURE_SERIALIZATION"
"""With 1 a server takes handles of CUDA IPC by HTTP."""


class Gpu:
    """The device that weights are sent from."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def is_there(self) -> bool:
        return self.device.type == "cuda"

    @property
    def uuid(self) -> str:
        return f"{torch.cuda.get_device_properties(self.device).uuid}"

    def used(self) -> AbstractContextManager[Any]:
        """Inside, it is the current device of the thread."""
        return torch.cuda.device(self.device)

    def stream(self) -> torch.cuda.Stream:
        """A new stream, which waits for no other."""
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Wait for what this thread has begun on its current stream."""
        torch.cuda.current_stream(self.device).synchronize()

    def collect(self) -> None:
        """Free shared memory that no other process uses any more."""
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


# -- the server's side


class _Backend(BaseModel):
    backend: str


class _Model(BaseModel):
    dtype: str


class _Parallel(BaseModel):
    world_size: int
    data_parallel_size: int


class _Device(BaseModel):
    device: str


class _Config(BaseModel):
    weight_transfer_config: _Backend | None
    model: _Model = Field(alias="model_config")  # pydantic keeps this name for itself
    parallel_config: _Parallel
    device_config: _Device
    lora_config: dict[str, Any] | None


class _Info(BaseModel):
    """Settings with which a server was started, as far as they are read."""

    vllm_config: dict[str, Any]
    vllm_env: dict[str, Any]


class _WeightInfo(BaseModel):
    weight_version: str


@dataclass(frozen=True)
class Described:
    """How a server takes weights by its own routes."""

    url: str
    backend: str
    dtype: str
    is_probed_alone: bool
    num_workers: int
    unpickles: bool
    """Whether it takes handles by HTTP."""
    has_extension: bool
    gpus: tuple[str | None, ...]
    """GPU of each worker, as taut's extension says."""


def described(server: VllmServer) -> Described | str:
    """How a server takes weights by its own routes, or why it does not."""
    url = server.openai.url
    if missing := [route for route in ROUTES if route not in server.routes]:
        return (
            f"{url} has no route {missing[0]} (it is older than vLLM 0.32, or was started without "
            "VLLM_SERVER_DEV_MODE=1)"
        )
    info = parsed(_Info, server.control.ask("server_info?config_format=json"))
    try:
        config = _Config.model_validate(info.vllm_config)
    except ValidationError:
        return f"{url} describes itself in another way than vLLM 0.32 (/server_info)"
    if config.weight_transfer_config is None:
        return f"{url} was started without --weight-transfer-config"
    try:
        workers = server.workers()
    except EngineError:
        workers = []
    parallel = config.parallel_config
    return Described(
        url=url,
        backend=config.weight_transfer_config.backend,
        dtype=config.model.dtype.removeprefix("torch."),
        is_probed_alone=config.device_config.device == "cpu" and config.lora_config is not None,
        num_workers=parallel.world_size * parallel.data_parallel_size,
        unpickles=bool(info.vllm_env.get(UNPICKLES)),
        has_extension=bool(workers),
        gpus=tuple(worker.gpu for worker in workers),
    )


@dataclass(frozen=True)
class TransferServer(VllmServer):
    """A vLLM server that takes weights by its own routes. What it says it holds is the version of the last transfer."""

    described: Described

    @classmethod
    def of(cls, server: VllmServer, described: Described) -> TransferServer:
        return cls(server.openai, server.control, server.root, server.base, described)

    def worker(self) -> WorkerState:
        return self.workers()[0]

    def workers(self) -> list[WorkerState]:
        """One state for all of its workers."""
        return [self._state(self.control.ask("weight_info"))]

    async def held(self, client: httpx2.AsyncClient) -> list[WorkerState]:
        return [self._state(await self.control.send(client, "weight_info"))]

    def checksums(self, names: Sequence[str]) -> list[list[ParameterReport]] | None:
        return super().checksums(names) if self.described.has_extension else None

    @property
    def answers(self) -> bool:
        """Whether it answers now."""
        try:
            self.control.once().ask("weight_info", within=ANSWERS)
        except (EngineError, TimeoutError):
            return False
        return True

    def state(self, tag: str) -> WorkerState:
        """State that the server reports once it has the weights of this version. The group stands for the process."""
        kind, group, number, *_ = [*tag.split("-"), "", ""]
        is_ours = kind == VERSION and number.isdecimal()
        return WorkerState(
            start=group if is_ours else tag,
            version=int(number) if is_ours else -1,
            folder=tag if is_ours else "",
            dtype=self.described.dtype,
            is_probed_alone=self.described.is_probed_alone,
        )

    def _state(self, answer: Any) -> WorkerState:
        return self.state(parsed(_WeightInfo, answer).weight_version)


# -- what is sent


@dataclass(frozen=True)
class Chunk:
    """Some of the tensors, contiguous on the sender's device."""

    tensors: dict[str, Tensor]

    @property
    def described(self) -> dict[str, Any]:
        tensors = self.tensors.values()
        return {
            "names": [*self.tensors],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            "shapes": [[*tensor.shape] for tensor in tensors],
        }

    @property
    def sizes(self) -> list[int]:
        return [tensor.nbytes for tensor in self.tensors.values()]


@dataclass
class Sent:
    """Sizes and checksums of the tensors that were sent."""

    num_bytes: int = 0
    checksums: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    """Checksum of each tensor, and of the columns that a kernel for CPUs is asked for."""

    def add(self, chunk: Chunk) -> None:
        for name, tensor in chunk.tensors.items():
            some = None
            if tensor.ndim == 2:
                some = checksum(tensor[:, columns(tensor.shape[1])])
            self.checksums[name] = checksum(tensor), some
        self.num_bytes += sum(chunk.sizes)

    @property
    def names(self) -> list[str]:
        return [*self.checksums]

    def checksum(self, name: str, at: list[int] | None) -> int:
        """The checksum of a tensor, or of its columns ``at``."""
        whole, some = self.checksums[name]
        if at is None:
            return whole
        assert some is not None, "columns are those of a matrix"
        return some


def chunks(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, device: torch.device
) -> Iterator[Chunk]:
    """The tensors on the device, floating-point numbers in ``dtype``, the widest elements of a chunk first: each then
    begins in a packed buffer where its elements can be read.
    """
    batch: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors:
        to = dtype if tensor.is_floating_point() else None
        batch[name] = tensor.detach().to(device, to).contiguous()
        num_bytes += batch[name].nbytes
        if num_bytes >= CHUNK_BYTES:
            yield _ordered(batch)
            batch, num_bytes = {}, 0
    if batch:
        yield _ordered(batch)


def _ordered(batch: dict[str, Tensor]) -> Chunk:
    return Chunk(dict(sorted(batch.items(), key=lambda item: -item[1].element_size())))


# -- how it is sent


class Channel:
    """The way to one process of a server. ``open`` makes it, ``close`` ends it; after an error it is of no use."""

    backend: ClassVar[str]

    def __init__(self, server: TransferServer, gpu: Gpu, timeout: float) -> None:
        self.server, self.gpu, self.timeout = server, gpu, timeout
        self.group = secrets.token_hex(8)
        """Names the process of the server that this was opened with."""
        self.root = server.root.once()

    @classmethod
    def obstacle(cls, server: Described, gpu: Gpu) -> str | None:
        """Why this process cannot send to a server in this way; None where it can."""
        raise NotImplementedError

    @classmethod
    def doubt(cls, server: Described) -> str | None:
        """Name the property of a server that only sending weights can prove; None where there is none."""
        return None

    def open(self) -> None:
        raise NotImplementedError

    def send(self, chunk: Chunk) -> None:
        """Send a chunk, and wait until the server has it. Raises EngineError."""
        raise NotImplementedError

    def start(self) -> None:
        """Have the server wait for weights."""
        self.root.ask("start_weight_update", {})

    def finish(self, tag: str) -> None:
        """Say that all were sent, under a version."""
        self.root.ask("finish_weight_update", {"weight_version": tag})
        self.release()

    def release(self) -> None:
        """Free what was needed for one push."""

    def close(self) -> None:
        self.release()

    def _request(self, path: str, body: dict[str, Any]) -> Future[Any]:
        return self.root.start(path, body)


class IpcChannel(Channel):
    """Through a buffer on the GPU that the server uses too."""

    backend = "ipc"

    def __init__(self, server: TransferServer, gpu: Gpu, timeout: float) -> None:
        super().__init__(server, gpu, timeout)
        self._buffer: Tensor | None = None
        self._handle: dict[str, Any] = {}
        """Handle by which the server finds the buffer."""

    @classmethod
    def obstacle(cls, server: Described, gpu: Gpu) -> str | None:
        if not server.unpickles:
            return f"{server.url} was started without {UNPICKLES}=1"
        if server.num_workers != 1:
            return f"{server.url} computes on {server.num_workers} GPUs (CUDA IPC reaches one, this process's)"
        if any(uuid not in (None, gpu.uuid) for uuid in server.gpus):
            return f"{server.url} computes on GPU {server.gpus[0]}, this process on {gpu.uuid}"
        return None

    @classmethod
    def doubt(cls, server: Described) -> str | None:
        if server.has_extension:
            return None
        return f"{server.url} does not say on which GPU it is (taut's worker extension does)"

    def open(self) -> None:
        self.root.ask("init_weight_transfer_engine", {"init_info": {"packed": True}})

    def send(self, chunk: Chunk) -> None:
        size = sum(chunk.sizes)
        if self._buffer is None or self._buffer.numel() < size:
            self.release()
            self._buffer = self._new(max(size, CHUNK_BYTES))
            self._handle = self._shared(self._buffer)
        end = 0
        for tensor in chunk.tensors.values():
            begin, end = end, end + tensor.nbytes
            self._buffer[begin:end].copy_(tensor.view(-1).view(torch.uint8))
        self.gpu.synchronize()
        self.root.ask(
            "update_weights",
            {"update_info": {**chunk.described, "tensor_sizes": chunk.sizes, **self._handle}},
        )

    def release(self) -> None:
        if self._buffer is not None:
            self._buffer, self._handle = None, {}
            self.gpu.collect()

    def _new(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.gpu.device)

    def _shared(self, buffer: Tensor) -> dict[str, Any]:
        """The fields of a request by which the server finds a new buffer."""
        _, arguments = reduce_tensor(buffer)  # type: ignore[no-untyped-call]
        handle = pickle.dumps({self.gpu.uuid: arguments})
        return {"ipc_handles_pickled": base64.b64encode(handle).decode()}


class NcclChannel(Channel):
    """A group of NCCL with the server's workers."""

    backend = "nccl"

    def __init__(self, server: TransferServer, gpu: Gpu, timeout: float) -> None:
        super().__init__(server, gpu, timeout)
        self._nccl: Nccl | None = None

    @classmethod
    def obstacle(cls, server: Described, gpu: Gpu) -> str | None:
        if gpu.uuid in server.gpus:
            return (
                f"{server.url} computes on this process's GPU (NCCL takes no GPU twice; start it with the backend "
                "ipc)"
            )
        try:
            nccl_library()
        except OSError as error:
            return f"this process finds no NCCL ({error})"
        return None

    def open(self) -> None:
        num_ranks = 1 + self.server.described.num_workers
        self._nccl = Nccl(nccl_library(), self.gpu)
        unique_id = self._nccl.unique_id()
        info = {
            "nccl_unique_id_b64": base64.b64encode(unique_id).decode(),
            "rank_offset": 1,
            "world_size": num_ranks,
            "packed": False,
        }
        request = self._request("init_weight_transfer_engine", {"init_info": info})
        self._join(request, partial(self._nccl.join, unique_id, num_ranks), "join a group of NCCL")

    def send(self, chunk: Chunk) -> None:
        assert self._nccl is not None, "it is opened first"
        request = self._request("update_weights", {"update_info": chunk.described})
        self._join(request, partial(self._nccl.broadcast, chunk), "receive a chunk of weights")

    def close(self) -> None:
        super().close()
        if self._nccl is not None:
            self._nccl.abort()

    def _join(self, request: Future[Any], work: Callable[[], None], what: str) -> None:
        """Do what the server does at the same time, ``work``, until both are done. Neither ends by itself where the
        other side has failed.
        """
        own = _on_thread(work)
        wait([request, own], self.timeout, FIRST_EXCEPTION)
        errors = [future.exception() for future in (request, own) if future.done()]
        if len(errors) == 2 and errors == [None, None]:
            return
        self.close()
        request.cancel()
        for error in errors:
            if isinstance(error, EngineError):
                raise error
            if error is not None:
                raise EngineError(
                    f"server: {self.server.openai.url}: {error}; expected it to {what}; start it with the NCCL of this "
                    "process's torch, on other GPUs, or set rollout.server.sync.transport=files"
                ) from error
        raise NoAnswer(
            f"server: {self.server.openai.url} did not {what} within {self.timeout:g} seconds; expected it to; start "
            "it again, or set rollout.server.sync.timeout"
        )


def _on_thread(work: Callable[[], None]) -> Future[None]:
    """Start work on a thread that may be left behind, where it waits in a library for ever."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 (it is raised by whoever takes the future)
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="nccl", daemon=True).start()
    return future


CHANNELS: dict[str, type[Channel]] = {
    channel.backend: channel for channel in (NcclChannel, IpcChannel)
}
"""Channels by the backend that a server was started with."""


class _UniqueId(ctypes.Structure):
    _fields_: ClassVar = [("internal", ctypes.c_char * 128)]


_FLOAT32, _SUM, _SUCCESS = 7, 0, 0
_NCCL_DTYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: _FLOAT32,
    torch.float64: 8,
    torch.bfloat16: 9,
}
"""nccl.h's ncclDataType_t."""


class NcclError(Exception):
    """A call of NCCL that failed."""


class Nccl:
    """Rank 0 of a group, by NCCL's C interface. Only ``abort`` may be called while another call runs."""

    def __init__(self, library: Any, gpu: Gpu) -> None:
        self._library, self._gpu, self._stream = library, gpu, gpu.stream()
        self._comm = ctypes.c_void_p()
        self._lock = threading.Lock()
        """Held while the group is ended."""

    def unique_id(self) -> bytes:
        unique_id = _UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(unique_id))
        return ctypes.string_at(ctypes.byref(unique_id), ctypes.sizeof(unique_id))

    def join(self, unique_id: bytes, num_ranks: int) -> None:
        """Make the group, once all ranks are there, and add up one number, as vLLM's ranks do."""
        given = _UniqueId.from_buffer_copy(unique_id)
        with self._gpu.used():
            number = torch.zeros(1, device=self._gpu.device)
            self._gpu.synchronize()
            place = ctypes.byref(self._comm)
            self._call("ncclCommInitRank", place, ctypes.c_int(num_ranks), given, ctypes.c_int(0))
            self._call("ncclAllReduce", *_buffers(number), ctypes.c_int(_SUM), *self._where)
            self._stream.synchronize()

    def broadcast(self, chunk: Chunk) -> None:
        """Send the tensors of a chunk, one after another, and wait until they have gone."""
        with self._gpu.used():
            for tensor in chunk.tensors.values():
                self._call("ncclBroadcast", *_buffers(tensor), ctypes.c_int(0), *self._where)
            self._stream.synchronize()

    def abort(self) -> None:
        """End the group, and with it what waits on the GPU."""
        with self._lock:
            comm, self._comm = self._comm, ctypes.c_void_p()
            if comm.value is not None:
                self._library.ncclCommAbort(comm)

    @property
    def _where(self) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        return self._comm, ctypes.c_void_p(self._stream.cuda_stream)

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        if result != _SUCCESS:
            text = self._library.ncclGetErrorString(ctypes.c_int(result)).decode()
            raise NcclError(f"{name}: {text}")


def _buffers(tensor: Tensor) -> tuple[Any, ...]:
    """Arguments of NCCL for a tensor: send and receive buffer (one place), number of elements, type."""
    place = ctypes.c_void_p(tensor.data_ptr())
    return (
        place,
        place,
        ctypes.c_size_t(tensor.numel()),
        ctypes.c_int(_NCCL_DTYPES[tensor.dtype]),
    )


def nccl_library() -> Any:
    """The NCCL that torch has loaded. Raises OSError where there is none."""
    library = ctypes.CDLL("libnccl.so.2")
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


# -- a push


@dataclass(eq=False)
class Delivery:
    """One push to one server. The server's thread calls ``take``, and waits in it for the thread that sends."""

    ready: Future[Channel | None] = field(default_factory=Future)
    """The way to a server that waits for weights, or None."""
    arrived: Future[None] = field(default_factory=Future)

    def take(self, channel: Channel, tag: str) -> None:
        """Get all weights. Raises EngineError where they cannot be sent."""
        channel.start()
        self.ready.set_result(channel)
        self.arrived.result()
        channel.finish(tag)

    def leave(self) -> None:
        """Say that the server will take nothing, unless it has begun to."""
        if not self.ready.done():
            self.ready.set_result(None)

    @property
    def channel(self) -> Channel | None:
        """The way to the server, as long as it takes weights."""
        return None if self.arrived.done() else self.ready.result()


class Transfer:
    """Sends weights to servers, by one thread; each server has a thread that takes them."""

    def __init__(self, backend: str, gpu: Gpu, dtype: torch.dtype, timeout: float) -> None:
        self.backend, self.gpu, self.dtype, self.timeout = backend, gpu, dtype, timeout
        self._channels: dict[TransferServer, Channel] = {}

    def close(self) -> None:
        for server in [*self._channels]:
            self.forget(server)

    def forget(self, server: TransferServer) -> None:
        """End the way to a server."""
        if server in self._channels:
            self._channels.pop(server).close()

    def channel(self, server: TransferServer, held: WorkerState) -> Channel:
        """The way to a server that holds these weights: anew where it is another process than before."""
        if server not in self._channels or self._channels[server].group != held.start:
            self.forget(server)
            channel = CHANNELS[self.backend](server, self.gpu, self.timeout)
            channel.open()
            self._channels[server] = channel
        return self._channels[server]

    def send(
        self, tensors: Iterable[tuple[str, Tensor]], deliveries: Sequence[Delivery], sent: Sent
    ) -> None:
        """Send all tensors to the servers that take them, as long as they do, and describe them in ``sent``."""
        try:
            with ThreadPoolExecutor(len(deliveries), "chunks") as threads:
                for chunk in chunks(tensors, self.dtype, self.gpu.device):
                    self.gpu.synchronize()
                    sending = {
                        delivery: threads.submit(delivery.channel.send, chunk)
                        for delivery in deliveries
                        if delivery.channel is not None
                    }
                    sent.add(chunk)
                    for delivery, future in sending.items():
                        if (error := future.exception()) is not None:
                            delivery.arrived.set_exception(error)
            for delivery in deliveries:
                if delivery.channel is not None:
                    delivery.arrived.set_result(None)
        finally:
            for delivery in deliveries:
                if not delivery.arrived.done():
                    delivery.arrived.set_exception(
                        EngineError(
                            "server: the weights could not all be sent; expected all of them"
                        )
                    )


# -- which way


@dataclass(frozen=True)
class Choice:
    """How whole weights go to the servers."""

    transport: str
    """files, or a server's backend."""
    reason: str
    servers: tuple[Described, ...] = ()
    """Empty: files."""


def choose(wanted: Transport, gpu: Gpu, servers: Sequence[VllmServer]) -> Choice:
    """The way that is wanted, or files where it is closed, and why. auto: the servers' own, where nothing about it is
    in doubt.
    """
    if wanted == "files":
        return Choice("files", "as asked")
    if not gpu.is_there:
        return Choice("files", f"this process computes on {gpu.device.type}, not on a GPU")
    # Every server has to take them by one way, which this process can use.
    found: list[Described] = []
    for server in servers:
        own = described(server)
        if isinstance(own, str):
            return Choice("files", own)
        found.append(own)
        backend = found[0].backend if wanted == "auto" else wanted
        if own.backend != backend or backend not in CHANNELS:
            return Choice("files", f"{own.url} was started with the backend {own.backend}")
        channel = CHANNELS[backend]
        obstacle = channel.obstacle(own, gpu)
        if wanted == "auto":
            obstacle = obstacle or channel.doubt(own)
        if obstacle is not None:
            return Choice("files", obstacle)
    reason = "as asked" if wanted != "auto" else "every server was started with it"
    return Choice(found[0].backend, reason, tuple(found))


def options(backend: str) -> tuple[str, str]:
    """The variables and the option that a server is started with."""
    variables = f"{UNPICKLES}=1 " if backend == "ipc" else ""
    return variables, f"""--weight-transfer-config '{{"backend": "{backend}"}}'"""
