"""Weight sync: pushes the training weights to the servers after an update, and proves that they arrived at each.

    mode      what is sent                                        how vLLM takes it
    full      every weight, adapters merged, in its dtype         files in a folder; POST /collective_rpc to taut's
                                                                  worker extension; the prefix cache is emptied.
                                                                  Or from GPU to GPU, by vLLM's own routes
                                                                  (weight_transfer.py)
    adapter   the adapter alone, in peft's format                 POST /v1/load_lora_adapter under a name per version,
                                                                  which requests then use; earlier ones are unloaded
                                                                  once no request names them

Weights are gathered, merged and written (or sent) once, a layer at a time; all servers read the same files, at the same
time.

Tensors are written under the names of a Hugging Face checkpoint (tied tensors once) in the dtype that the server
computes in, so nothing is rounded on the way and checksums cover the exact bits.

The folder is in memory (/dev/shm) unless the user names another. It is a ``TemporaryFolder``: the next process removes
what a killed one leaves. By default, and in a place where every user may write, only the user who trains (and root) can
read it: mode 0700, files 0600. In another place that the user names, the files get its group and its read permissions.

A push is proven twice, at each server. Checksums (full): each parameter in the server's process equals the tensor that
was sent, bit for bit. Logprobs (both): the server's logprobs of a fixed text, in a request of its own, equal the
training model's, to within rounding. A server that fails a proof gets no requests until a later push is proven there;
where no server passes, it is an EngineError: every completion comes from known weights.

Requests under way during a push:

    full, the server can pause      they are frozen, and go on with the new weights: their keys and values are computed
                                    again; each token's logprob is that of the weights that sampled it
    full, it cannot                 they are waited for; meanwhile no new ones are sent
    adapter                         they end under the adapter that they began with
    a probe has to be alone         they are waited for

Servers on the GPUs that train (``sleep``) sleep between a rollout and the next push: they are woken in two parts,
weights before they are loaded, keys and values after that, and no request is sent while they sleep.

A completion's version is that of the weights at its beginning: of its oldest token.

A server that was restarted gets the same files once more, and is proven again, before it gets requests
(``server_pool.py`` finds out). One that gets weights without files has them again before the next rollout: only then do
all ranks hold those weights, and take part in gathering them.

Not here: a server that shards a layer's input on CPU kernels.
"""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from taut.config import Decision, home_path
from taut.data.packing import pack
from taut.errors import EngineError, OutputError
from taut.inference import worker as worker_package
from taut.inference.server_pool import Pool, Restarted, Server, Serving, require_held
from taut.inference.settings import SyncConfig
from taut.inference.vllm_client import (
    PUSHED,
    TOLERANCE,
    NoAnswer,
    ParameterReport,
    VllmServer,
)
from taut.inference.weight_transfer import (
    VERSION,
    Choice,
    Delivery,
    Gpu,
    Sent,
    Transfer,
    TransferServer,
    choose,
    options,
)
from taut.inference.worker.taut_worker import checksum
from taut.io.temporary import MEMORY, PRIVATE, TemporaryFolder
from taut.models.lora.adapters import is_adapted
from taut.models.lora.merge import Whole, plain_groups, plain_skeleton, save_adapter
from taut.models.quantized.quantized_storage import quantized_layers
from taut.models.scorer import Scorer, evaluating
from taut.models.weight_files import converted
from taut.train import distributed
from taut.train.distributed import Ranks
from taut.types import FloatArray, IntArray, Sample

EXTENSION = "--worker-extension-cls taut_worker.TautWorker"
PROCESSED = "--logprobs-mode processed_logprobs"
LOADS_ADAPTERS = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
"""Options with which a vLLM server is started."""
PROBE = "The quick brown fox jumps over the lazy dog. 12 x 3.5 = 42, so: what comes next?"
"""The text whose logprobs server and model must agree on."""
PROBE_TOKENS = 32
RETURNS = 0.01
"""Seconds between two looks at whether a server has its weights again."""
FILE_BYTES = 2 * 2**30
"""Approximate size of a file of weights; the CPU holds a copy of this size."""

T = TypeVar("T")
Mode = Literal["full", "adapter"]


@dataclass(frozen=True)
class Proof:
    """Measurements that show that a push arrived at a server."""

    version: int
    mode: Mode
    num_bytes: int
    seconds: float
    num_equal: int
    """Tensors of which the server reported the same checksum."""
    unread: tuple[str, ...]
    """Tensors without a checksum from the server: only the logprobs prove them."""
    largest_error: float
    """Largest difference (nats) of the server's logprobs of the probe from the training model's."""
    largest_change: float
    """Largest change (nats) of the server's logprobs of the probe by the push."""


@dataclass(frozen=True)
class TrainingModel:
    """The weights and logprobs of the model in training. All ranks call the methods together."""

    scorer: Scorer
    ranks: Ranks
    dtype: torch.dtype
    """The dtype of its forward pass."""
    compute: Callable[[], AbstractContextManager[Any]] = nullcontext

    def log_probs(self, ids_T: IntArray) -> FloatArray:
        """The logprob of every id but the first, [T - 1]."""
        at_N = np.arange(1, ids_T.size)
        packed = pack([Sample("probe", ids_T, at_N, np.ones(at_N.size))])
        with torch.no_grad(), evaluating(self.scorer), self.compute():
            logp_N: FloatArray = self.scorer(packed).logp_N.double().cpu().numpy()
        return logp_N


@dataclass(frozen=True, eq=False)
class _PushRecord:
    """The last push, on the writer only: what each server gets, and what it must then show."""

    version: int
    number: int
    """Number of the push in this run."""
    folder: Path | None
    """Folder with the files of the push; None where it is sent without files."""
    dtype: str
    expected_N: FloatArray
    """The training model's logprobs of the probe."""
    num_written: int = 0
    """Bytes of what was written."""
    sent: Sent = field(default_factory=Sent)
    """Tensors that were sent without files."""
    proven: list[tuple[list[list[ParameterReport]], tuple[int, list[str]]]] = field(
        default_factory=list
    )
    """Checksums of servers that are those of the tensors sent, and what ``require_arrived`` said of them: most servers
    show the same."""

    @property
    def num_bytes(self) -> int:
        return self.sent.num_bytes if self.folder is None else self.num_written

    @property
    def tensors(self) -> Sent | Files:
        """Tensors that a server must have."""
        return self.sent if self.folder is None else Files(written(self.folder))


@dataclass(frozen=True)
class _ServerCapabilities:
    """Capabilities of the servers, as the writer finds them."""

    mode: Mode
    dtype: str
    can_pause: bool
    """Whether all can."""
    is_probed_alone: bool
    """Whether one has to be."""
    way: Choice


class WeightSync:
    """Pushes weights to the servers of a pool and remembers the last push. Every rank has a WeightSync and calls it
    together with the others; only the writer's talks to the servers. ``close`` removes the files.
    """

    def __init__(
        self, pool: Pool, trained: TrainingModel, config: SyncConfig, probe_T: IntArray
    ) -> None:
        """Raises EngineError, with the command that starts another, for a server whose weights cannot be changed."""
        self.pool, self.trained, self.config, self.probe_T = pool, trained, config, probe_T
        self.proofs: list[Proof] = []
        """Proofs of the last push, of each server that has it."""
        self.is_asleep = False
        """Whether the servers sleep, on all ranks alike."""
        self.restarts = 0
        """Number of times that a restarted server got the last push again."""
        # What the servers can do, which the writer finds out.
        found = trained.ranks.run_on_writer(self._look_at_servers)
        self.mode, self._dtype, self._way = found.mode, found.dtype, found.way
        self._can_pause, self._is_probed_alone = found.can_pause, found.is_probed_alone
        self._transfer: Transfer | None = None
        if found.mode == "full" and found.way.servers:
            for server, described in zip(pool.servers, found.way.servers, strict=True):
                server.vllm = TransferServer.of(server.vllm, described)
            dtype, gpu = getattr(torch, found.dtype), Gpu(trained.ranks.device)
            self._transfer = Transfer(found.way.transport, gpu, dtype, config.timeout)
        self._folder = Folder(config.folder) if trained.ranks.is_writer else None
        self._count = 0
        self._last: _PushRecord | None = None
        self._logp: dict[Server, FloatArray] = {}
        """Each server's last logprobs of the probe."""
        self._adapters: dict[Server, dict[str, Path]] = {server: {} for server in pool.servers}
        """The adapters that each server has, by name, with their folders."""
        self._proving = threading.Lock()
        """Held while checksums are compared."""
        pool.revive = self._revive
        pool.revives = trained.ranks.is_writer and self._transfer is None

    def close(self) -> None:
        if self._transfer is not None:
            self._transfer.close()
        for server, adapters in self._adapters.items():
            for name in adapters:
                if server.failure is None:
                    server.vllm.leave(name)
        if self._folder is not None:
            self._folder.close()

    @property
    def decisions(self) -> list[Decision]:
        """How whole weights go to the servers, and what happens to requests that are under way during a push."""
        if self._is_probed_alone:
            value = "are waited for"
            reason = (
                "a server with --enable-lora on a CPU, whose vLLM ends at a probe next to other requests "
                "(vllm-project/vllm#16668)"
            )
        elif self.mode == "adapter":
            value, reason = "end under their own adapter", "each version has a name of its own"
        elif self._can_pause:
            value = "go on with the new weights"
            reason = (
                "every server can pause (/pause?mode=keep) and computes their keys and values again"
            )
        else:
            value = "are waited for"
            reason = (
                "a server cannot pause and go on (vLLM's /pause?mode=keep, VLLM_SERVER_DEV_MODE=1)"
            )
        found = [Decision("requests during a push", value, reason)]
        if self.mode == "full":
            reason = self._way.reason
            if silent := [server.url for server in self._way.servers if not server.has_extension]:
                reason += f"; logprobs alone prove it, since {silent[0]} is without taut's worker extension"
            found.append(Decision("weight transfer", self._way.transport, reason))
        if self.config.sleep:
            reason = "rollout.server.sync.sleep: weights in the host's memory, no keys and values (/sleep?level=1)"
            found.append(Decision("servers between rollouts", "sleep", reason))
        return found

    @property
    def version(self) -> int:
        """The step of the servers' weights; 0 before the first push."""
        return max((proof.version for proof in self.proofs), default=0)

    def push(self, version: int) -> list[Proof]:
        """Send the weights in training to the servers and prove it, at each that has not failed to answer. Raises
        EngineError where they arrived at none.
        """
        with self.pool.changing:
            return self._push(version)

    def _push(self, version: int) -> list[Proof]:
        # Write the weights for the servers, where they are not sent without files.
        expected_N, ranks = self.trained.log_probs(self.probe_T), self.trained.ranks
        self._count += 1
        if self._transfer is None:
            self._gathered(partial(self._write, version, expected_N))
        # Have the servers load them, while they get no new requests, and prove it.
        waits = self._is_probed_alone or (self.mode == "full" and not self._can_pause)
        self._free_memory()
        self.is_asleep = False  # ``_feed`` wakes them
        with self.pool.held(until_empty=waits):
            ranks.gather(None)  # requests of all ranks have ended, or are held
            if self._transfer is None:
                outcomes = ranks.run_on_writer(self._feed_all)
            else:
                outcomes = self._gathered(partial(self._send, version, expected_N))
            self._apply([serving for serving, _ in outcomes])
        self.proofs = [proof for _, proof in outcomes if proof is not None]
        if not self.pool.in_use:
            raise EngineError(f"weights after step {version}: {self.pool.failure}")
        # Remove what neither new requests need nor those under way: adapters on the servers, and files.
        under_way = ranks.gather({server.url: +server.models for server in self.pool.servers})
        if ranks.is_writer:
            for server in self.pool.in_use:
                adapters = self._adapters[server]
                named = {name for rank in under_way for name in rank.get(server.url, ())}
                for name in [it for it in adapters if it not in {*named, server.serving.model}]:
                    del adapters[name]
                    if server.vllm.serves(name):
                        server.vllm.unload_adapter(name)
            assert self._folder is not None and self._last is not None
            kept = {folder for named in self._adapters.values() for folder in named.values()}
            last = {self._last.folder} if self._last.folder is not None else set()
            self._folder.keep_only({*last, *kept})
        return self.proofs

    def hold(self) -> None:
        """Before generation: check that the servers have the last push; one that was restarted gets it again. All
        ranks then use the same servers.
        """
        ranks = self.trained.ranks
        outcomes = ranks.run_on_writer(self._hold)
        if not ranks.is_writer:  # the writer knows: what it found out, or that they came back since
            self._apply(outcomes)
        # Without files, servers that did not answer or were started again, and answer now, get another push.
        if self._transfer is not None:
            gone = [it for it in self.pool.servers if isinstance(it.failure, NoAnswer | Restarted)]
            if num_back := ranks.run_on_writer(lambda: sum(map(_answers, gone))):
                self.push(self.version)  # nothing was trained since
                self.restarts += num_back
        self.restarts = ranks.from_writer(self.restarts)
        if not self.pool.in_use:
            raise self.pool.failure

    def wake(self) -> None:
        """Before generation: wake the servers, if they sleep."""
        if self.is_asleep:
            self._free_memory()
            self.trained.ranks.run_on_writer(partial(self._tell_all, VllmServer.wake))
            self.is_asleep = False

    def rest(self) -> None:
        """After generation: have the servers sleep, where ``sleep`` asks for it. No request is under way."""
        if self.config.sleep and not self.is_asleep:
            self.trained.ranks.run_on_writer(partial(self._tell_all, VllmServer.sleep))
            self.is_asleep = True

    def _tell_all(self, tell: Callable[[VllmServer], None]) -> None:
        """Tell it to all servers, at the same time. One that does not do it is left out."""

        def try_one(server: Server) -> None:
            try:
                tell(server.vllm)
            except EngineError as failure:
                self.pool.leave_out(server, self.pool.named(server, failure))

        with self.pool.changing, ThreadPoolExecutor(len(self.pool.servers), "sleep") as threads:
            [*threads.map(try_one, self.pool.in_use)]

    def _free_memory(self) -> None:
        """Give back what the allocator of this process keeps of its GPU, before servers there take memory."""
        if self.config.sleep:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.trained.ranks.gather(None)

    def _gathered(self, work: Callable[[Whole], T]) -> T:
        """The result of ``work`` on the writer, which is given the whole weights, returned or raised on every rank."""
        model, ranks = self.trained.scorer.model, self.trained.ranks
        return distributed.run_with_whole_tensors(model, ranks, work)

    def _look_at_servers(self) -> _ServerCapabilities:
        """Raises EngineError for servers whose weights cannot be changed as asked."""
        model, servers = self.trained.scorer.model, [server.vllm for server in self.pool.servers]
        # What the model allows.
        wanted, obstacle = self.config.mode, _obstacle(model)
        if wanted == "adapter" and obstacle is not None:
            raise EngineError(
                f"rollout.server.sync.mode=adapter, and {obstacle}; expected a plain LoRA adapter; set it to full"
            )
        is_quantized = any(quantized_layers(model))
        if is_quantized and (wanted == "full" or obstacle is not None):
            why = obstacle or "rollout.server.sync.mode=full"
            raise EngineError(
                f"the base is quantized, and {why}; expected a plain LoRA adapter, pushed alone; set "
                "rollout.server.sync.mode=adapter, or rollout.engine=local"
            )
        # What the servers are, and by which way they take weights.
        workers = [server.worker() for server in servers]
        dtypes = ["unknown" if worker is None else worker.dtype for worker in workers]
        is_alone = any(worker is not None and worker.is_probed_alone for worker in workers)
        transport = self.config.transport
        way = Choice("files", "it is an adapter")
        if wanted != "adapter":
            way = choose(transport, Gpu(self.trained.ranks.device), servers)
        if transport in ("nccl", "ipc"):
            wanted = "full"
            if not way.servers:
                raise EngineError(
                    f"rollout.server.sync.transport={transport}, and {way.reason}; expected vLLM that takes them; "
                    f"{how_to_start(servers[0].base, transport)}, or set rollout.server.sync.transport=files"
                )
        # The adapter alone where each server takes it, else all weights.
        mode: Mode | None = None
        takes_adapters = [
            wanted != "full" and obstacle is None and server.takes_adapters() for server in servers
        ]
        if all(takes_adapters):
            mode = "adapter"
        elif wanted != "adapter" and not is_quantized:
            if way.servers:
                dtypes = [server.dtype for server in way.servers]
                is_alone = any(server.is_probed_alone for server in way.servers)
            mode = "full" if "unknown" not in dtypes else None
        if mode is None:
            lacks = dtypes.index("unknown") if wanted != "adapter" and "unknown" in dtypes else 0
            needs = "adapters" if wanted == "adapter" else "weights"
            if wanted == "adapter":
                lacks = takes_adapters.index(False)
            raise EngineError(
                f"server: {servers[lacks].openai.url} takes no {needs} while it runs; expected vLLM with taut's worker "
                f"extension, or for a LoRA adapter with runtime loading; {how_to_start(servers[lacks].base)}"
            )
        if len({*dtypes}) > 1:
            listed = ", ".join(
                f"{server.openai.url} in {dtype}"
                for server, dtype in zip(servers, dtypes, strict=True)
            )
            raise EngineError(
                f"server: {listed}; expected all servers to compute in one dtype; start them with the same --dtype"
            )
        # A server that wakes is paused until it has all its memory: resuming it before would be wrong.
        pauses = not self.config.sleep and all(server.pauses for server in servers)
        can_pause = mode == "full" and not is_alone and pauses
        return _ServerCapabilities(mode, dtypes[0], can_pause, is_alone, way)

    def _write(self, version: int, expected_N: FloatArray, whole: Whole) -> None:
        """Write the next push as the writer."""
        assert self._folder is not None
        folder = self._folder.new(f"{version}-{self._count}")  # a path that never was before
        model = self.trained.scorer.model
        if self.mode == "full":
            self._folder.keep_only({folder})  # the folder needs room for one push only
            tensors = checkpoint_tensors(model, whole)
            num_bytes = write(tensors, getattr(torch, self._dtype), folder)
        else:
            save_adapter(model, folder, whole)
            num_bytes = sum(file.stat().st_size for file in folder.iterdir())
        self._folder.share(folder)
        self._last = _PushRecord(version, self._count, folder, self._dtype, expected_N, num_bytes)

    def _feed_all(self) -> list[tuple[Serving | EngineError, Proof | None]]:
        """Give all servers the last push, at the same time; those that do not answer are left to ``_revive``."""
        push = self._last
        assert push is not None

        def feed(server: Server) -> tuple[Serving | EngineError, Proof | None]:
            if isinstance(server.failure, NoAnswer):
                return server.failure, None
            try:
                return self._feed(server, push)
            except EngineError as failure:
                return self.pool.named(server, failure), None

        with ThreadPoolExecutor(len(self.pool.servers), "weights") as threads:
            return [*threads.map(feed, self.pool.servers)]

    def _send(
        self, version: int, expected_N: FloatArray, whole: Whole
    ) -> list[tuple[Serving | EngineError, Proof | None]]:
        """Give all servers that answer the weights, without files: each on a thread, while this one gathers them."""
        transfer = self._transfer
        assert transfer is not None
        push = self._last = _PushRecord(version, self._count, None, self._dtype, expected_N)

        def feed(server: Server, delivery: Delivery) -> tuple[Serving | EngineError, Proof | None]:
            try:
                if isinstance(server.failure, NoAnswer) and not _answers(server):
                    return server.failure, None
                return self._feed(server, push, delivery)
            except EngineError as failure:
                transfer.forget(_transfers(server))
                return self.pool.named(server, failure), None
            finally:
                delivery.leave()

        # A thread for each server waits for what this one sends.
        servers = self.pool.servers
        deliveries = [Delivery() for _ in servers]
        with ThreadPoolExecutor(len(servers), "weights") as threads:
            fed = [
                threads.submit(feed, server, delivery)
                for server, delivery in zip(servers, deliveries, strict=True)
            ]
            tensors = checkpoint_tensors(self.trained.scorer.model, whole)
            transfer.send(tensors, deliveries, push.sent)
            return [future.result() for future in fed]

    def _feed(
        self, server: Server, push: _PushRecord, delivery: Delivery | None = None
    ) -> tuple[Serving, Proof]:
        """Have a server load what was written, or is sent by ``delivery``, and prove it."""
        # The server's own logprobs before.
        start, vllm = time.monotonic(), server.vllm
        if self.config.sleep:
            vllm.wake("weights")
        before_N = self._logp.get(server)
        is_first = before_N is None
        if before_N is None:  # it has not slept yet
            before_N = vllm.log_probs(vllm.base, self.probe_T)
        name, num_equal = vllm.base, 0
        unread: list[str] = []
        workers = [] if push.dtype == "unknown" else vllm.workers()
        # Load, and compare checksums of what arrived.
        if self.mode == "full":
            if workers[0].dtype != push.dtype:
                raise EngineError(
                    f"server: it computes in {workers[0].dtype}; expected {push.dtype}, as before; start it as before"
                )
            load: Callable[[], None]
            if delivery is None:
                assert push.folder is not None, "without a delivery it is written"
                loaded = {"version": push.version, "folder": str(push.folder)}
                workers = [worker.model_copy(update=loaded) for worker in workers]
                load = partial(vllm.load, push.folder, push.version)
            else:
                assert self._transfer is not None
                channel = self._transfer.channel(_transfers(server), workers[0])
                tag = f"{VERSION}-{channel.group}-{push.version}-{push.number}"
                workers = [_transfers(server).state(tag)]
                load = partial(delivery.take, channel, tag)
            old = server.serving.workers[-1:]
            server.serving = replace(server.serving, workers=(*old, workers) if old else ())
            with vllm.paused() if self._can_pause else nullcontext():
                load()
                vllm.empty_prefix_cache()
                checksums = vllm.checksums(push.tensors.names)
            if checksums is None:
                unread = push.tensors.names
            else:
                num_equal, unread = self._require_arrived(push, checksums)
        else:  # under a new name and path, so that nothing cached of another version is used
            assert push.folder is not None, "adapters are written"
            run = push.folder.parent.name.rpartition("-")[2]
            name = f"{vllm.base}{PUSHED}{run}-{push.folder.name}"
            vllm.load_adapter(name, push.folder)
            self._adapters[server][name] = push.folder
        if self.config.sleep:
            vllm.wake("kv_cache")
        # Its logprobs are now those of the model in training.
        logp_N = vllm.log_probs(name, self.probe_T)
        self._require_same(logp_N, push.expected_N, None if is_first else before_N, push.dtype)
        self._logp[server] = logp_N
        proof = Proof(
            version=push.version,
            mode=self.mode,
            num_bytes=push.num_bytes,
            seconds=time.monotonic() - start,
            num_equal=num_equal,
            unread=tuple(unread),
            largest_error=float(np.abs(logp_N - push.expected_N).max()),
            largest_change=float(np.abs(logp_N - before_N).max()),
        )
        return Serving(name, push.version, (workers,) if workers else ()), proof

    def _require_arrived(
        self, push: _PushRecord, checksums: list[list[ParameterReport]]
    ) -> tuple[int, list[str]]:
        with self._proving:
            for proven, outcome in push.proven:
                if checksums == proven:
                    return outcome
            outcome = require_arrived(push.tensors, checksums)
            push.proven.append((checksums, outcome))
            return outcome

    def _require_same(
        self, logp_N: FloatArray, expected_N: FloatArray, old_N: FloatArray | None, dtype: str
    ) -> None:
        """Raise EngineError unless the server's logprobs of the probe, ``logp_N``, are those of the model in training.
        ``old_N``: those after the last push.
        """
        narrow = {dtype, str(self.trained.dtype).removeprefix("torch.")} - {"float32", "float64"}
        limit = TOLERANCE["bfloat16" if narrow else "float32"]
        far = np.abs(logp_N - expected_N)
        at = int(far.argmax())
        if far[at] <= limit:
            return
        is_old = old_N is not None and np.abs(logp_N - old_N).max() == 0
        what = "as before the push: it keeps the old weights" if is_old else "of another model"
        raise EngineError(
            f"server: logprob {logp_N[at]:.4f} for id {self.probe_T[at + 1]} of the probe, {what}; expected "
            f"{expected_N[at]:.4f} by the model in training (within {limit:g}); serve that, let nobody else push to it"
        )

    def _apply(self, outcomes: Sequence[Serving | EngineError]) -> None:
        """Use the servers that have the last push, and no others."""
        for server, outcome in zip(self.pool.servers, outcomes, strict=True):
            if isinstance(outcome, EngineError):
                self.pool.leave_out(server, outcome)
            else:
                server.serving = outcome
                self.pool.admit(server)

    def _hold(self) -> list[Serving | EngineError]:
        """The state that each server serves, or the error that leaves it out."""
        for server in self.pool.in_use if self._last is not None else ():
            try:
                self._require_held(server)
            except EngineError as failure:
                self.pool.leave_out(server, self.pool.named(server, failure))
        while any(server.is_returning for server in self.pool.servers):
            time.sleep(RETURNS)
        return [server.failure or server.serving for server in self.pool.servers]

    def _require_held(self, server: Server) -> None:
        """Raise EngineError unless a server still has the last push, on the same base."""
        serving = server.serving
        if serving.workers:
            require_held(server.vllm.workers(), serving, serving)
        if self.mode == "adapter" and not server.vllm.serves(serving.model):
            raise Restarted(
                f"server: it has no model {serving.model} any more; it was started again"
            )

    def _revive(self, server: Server) -> None:
        """Give a server that was left out the last push, once it answers again."""
        if self._last is not None:
            self._adapters[server].clear()  # it was started again
            server.vllm.serves(server.vllm.base)  # soon, where it does not answer
            server.serving, _ = self._feed(server, self._last)
            self.restarts += 1
            if self.is_asleep:
                server.vllm.sleep()


def _transfers(server: Server) -> TransferServer:
    """A server that takes weights without files."""
    assert isinstance(server.vllm, TransferServer)
    return server.vllm


def _answers(server: Server) -> bool:
    return _transfers(server).answers


def _obstacle(model: nn.Module) -> str | None:
    """Why a model's adapter cannot be pushed alone; None where it can."""
    if not is_adapted(model):
        return "the model itself is trained"
    (settings,) = model.peft_config.values()  # type: ignore[operator]
    for name, what in (
        ("use_dora", "DoRA"),
        ("modules_to_save", "modules trained in full (lora.modules_to_save)"),
        ("trainable_token_indices", "trained rows of the embedding (lora.train_token_rows)"),
    ):
        if getattr(settings, name, None):
            return f"vLLM loads no adapter with {what}"
    return None


def how_to_start(name: str, backend: str | None = None) -> str:
    """The command line of a server whose weights can be changed; ``backend``: of vLLM's own transfer."""
    serve = f"vllm serve DIR --served-model-name {name} {PROCESSED} --host 127.0.0.1"
    if backend is not None:
        variables, option = options(backend)
        return f"start it with {variables}{full_weights()} {serve} {EXTENSION} {option} (docs/serving.md)"
    return (
        f"start it with {full_weights()} {serve} {EXTENSION}; for adapters alone {LOADS_ADAPTERS} {serve} "
        f"{adapters_of('RANK')} (docs/serving.md)"
    )


def full_weights() -> str:
    """Variables of a server that takes every weight."""
    place = Path(worker_package.__file__).parent
    return f"VLLM_SERVER_DEV_MODE=1 PYTHONPATH={shlex.quote(str(place))}"


def adapters_of(rank: int | str) -> str:
    return f"--enable-lora --max-lora-rank {rank}"


class Folder:
    """A temporary folder for pushes, which the server reads. ``close`` removes it."""

    def __init__(self, place: str | None) -> None:
        """Raises OutputError where it cannot be made."""
        memory = MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())
        parent = memory if place is None else home_path(place)
        try:
            parent.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
            status = parent.stat()
            is_prepared = place is not None and not status.st_mode & stat.S_IWOTH
            self._mode = PRIVATE | (status.st_mode & 0o055 if is_prepared else 0)
            self._group = status.st_gid if is_prepared else None
            self._folder = TemporaryFolder("weights", parent, self._mode)
            self.path = self._folder.path
            self._share(self.path, self._mode)
        except OSError as error:
            raise OutputError(
                f"rollout.server.sync.folder: {parent} cannot be written: {error.strerror}; expected a folder that "
                "this process and the server both see; set it to one"
            ) from None

    def close(self) -> None:
        self._folder.close()

    def new(self, name: str) -> Path:
        """Make an empty folder in it."""
        path = self.path / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(mode=PRIVATE)
        return path

    def share(self, pushed: Path) -> None:
        """Let users who may read the place that the user prepared read a folder of ``new`` and its files."""
        for file in pushed.iterdir():
            self._share(file, self._mode & 0o666)
        self._share(pushed, self._mode)

    def keep_only(self, kept: set[Path]) -> None:
        """Remove the files of other versions."""
        for other in self.path.iterdir():
            if other.is_dir() and other not in kept:
                shutil.rmtree(other, ignore_errors=True)

    def _share(self, path: Path, mode: int) -> None:
        if self._group is not None and path.stat().st_gid != self._group:
            os.chown(path, -1, self._group)
        path.chmod(mode)


def checkpoint_tensors(
    model: nn.Module, whole: Whole | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The model's weights by their names in a checkpoint, adapters merged, tied tensors once.

    ``whole``: gives the weights of ``model``, where it holds shards.
    """
    return converted(plain_skeleton(model), plain_groups(model, whole))


def write(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, folder: Path) -> int:
    """Write tensors into files of about ``FILE_BYTES``; the number of bytes. Raises OutputError without room."""
    waiting = iter(tensors)
    num_files = num_bytes = 0
    try:
        while True:
            batch: dict[str, Tensor] = {}
            batch_bytes = 0
            for name, tensor in waiting:
                batch[name] = served(tensor, dtype)
                batch_bytes += batch[name].nbytes
                if batch_bytes >= FILE_BYTES:
                    break
            if not batch:
                return num_bytes
            save_file(batch, folder / f"weights-{num_files:04}.safetensors")
            num_files, num_bytes = num_files + 1, num_bytes + batch_bytes
    except (OSError, SafetensorError) as error:
        raise OutputError(
            f"rollout.server.sync.folder: {folder} cannot be written: {error}; expected room for the model's weights; "
            "set it to a folder with room"
        ) from None


def written(folder: Path) -> dict[str, Tensor]:
    """The tensors in the files of ``write``, mapped into memory."""
    return {
        name: tensor
        for file in sorted(folder.iterdir())
        for name, tensor in load_file(file).items()
    }


def served(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor to send: on the CPU, floating-point numbers in the server's dtype."""
    tensor = tensor.detach()
    return tensor.to("cpu", dtype if tensor.is_floating_point() else None).contiguous()


@dataclass(frozen=True)
class Files:
    """Tensors that were written."""

    tensors: dict[str, Tensor]

    @property
    def names(self) -> list[str]:
        return [*self.tensors]

    def checksum(self, name: str, at: list[int] | None) -> int:
        """The checksum of a tensor, or of its columns ``at``."""
        tensor = self.tensors[name]
        return checksum(tensor if at is None else tensor[:, at])


def require_arrived(
    tensors: Files | Sent,
    workers: Sequence[Sequence[ParameterReport]],
) -> tuple[int, list[str]]:
    """How many tensors the server has bit for bit, and the names of those it cannot read.

    ``tensors``: what was sent; ``workers``: the reports of each worker. A parameter is whole on every worker, or in
    shards whose checksums add up. Raises EngineError for a parameter that is neither, and where the server reports
    no checksum at all.
    """
    # The reports of all workers on each parameter.
    by_name: dict[str, list[ParameterReport]] = {}
    for report in (report for reports in workers for report in reports):
        by_name.setdefault(report.name, []).append(report)
    proven: set[str] = set()
    for name, reports in by_name.items():
        sums = [int(report.checksum, 16) for report in reports if report.checksum is not None]
        parts, columns = reports[0].parts, reports[0].columns
        if not parts or len(sums) < len(reports):
            continue
        expected = sum(tensors.checksum(part, columns) for part in parts) % 2**64
        if sum(sums) % 2**64 != expected and any(value != expected for value in sums):
            raise EngineError(
                f"server: {name} ({', '.join(parts)}) has checksum {sums[0]:016x}; expected {expected:016x}, that of "
                "the weights just pushed; start it from the model that is trained, let nobody else push to it"
            )
        proven.update(parts)
    if not proven:
        raise EngineError(
            f"server: it shows a checksum of none of the {len(tensors.names)} tensors just pushed; expected most; "
            "serve the model that is trained, with this version's worker extension"
        )
    return len(proven), [name for name in tensors.names if name not in proven]
