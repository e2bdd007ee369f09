"""Weight sync: pushes the training weights to a server after an update, and proves that they arrived.

    mode      what is sent                                        how vLLM takes it
    full      every weight, adapters merged, in its dtype         files in a folder; POST /collective_rpc to taut's
                                                                  worker extension; the prefix cache is emptied
    adapter   the adapter alone, in peft's format                 POST /v1/load_lora_adapter under a name per version,
                                                                  which requests then use; the last one is unloaded

Tensors are written under the names of a Hugging Face checkpoint (tied tensors once) in the dtype that the server
computes in, so nothing is rounded on the way and checksums cover the exact bits.

The folder is in memory (/dev/shm) unless the user names another. It is a ``TemporaryFolder``: the next process removes
what a killed one leaves. By default, and in a place where every user may write, only the user who trains (and root) can
read it: mode 0700, files 0600. In another place that the user names, the files get its group and its read permissions.

A push is proven twice. Checksums (full): each parameter in the server's process equals the tensor that was sent, bit
for bit. Logprobs (both): the server's logprobs of a fixed text equal the training model's, to within rounding. A
difference is an EngineError, so every completion comes from known weights.

Before each round of generation the server reports its process and the weights it holds. A server that was restarted
gets the same files once more. One that is restarted during a round ends the run.

Not here: transfers between GPUs (NCCL), a server that shards a layer's input on CPU kernels, more than one server.
"""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from taut.config import configclass, home_path
from taut.data.packing import pack
from taut.errors import EngineError, OutputError, TautError
from taut.inference import worker as worker_package
from taut.inference.vllm_client import PUSHED, TOLERANCE, ParameterReport, VllmServer, WorkerState
from taut.inference.worker.taut_worker import checksum
from taut.io.temporary import MEMORY, PRIVATE, TemporaryFolder
from taut.models.lora import Whole, is_adapted, plain_groups, plain_skeleton, save_adapter
from taut.models.quantised import quantised_layers
from taut.models.scorer import Scorer, evaluating
from taut.models.weight_files import converted
from taut.train import distributed
from taut.train.distributed import Ranks
from taut.types import FloatArray, IntArray, Sample

PROBE = "The quick brown fox jumps over the lazy dog. 12 x 3.5 = 42, so: what comes next?"
"""The text whose logprobs server and model must agree on."""
PROBE_TOKENS = 32
FILE_BYTES = 2 * 2**30
"""Approximate size of a file of weights; the CPU holds a copy of this size."""

T = TypeVar("T")
Mode = Literal["full", "adapter"]


@configclass
class SyncConfig:
    """How a server's weights follow those in training."""

    mode: Literal["auto", "full", "adapter"] = "auto"
    """What is pushed. full: every weight, adapters merged. adapter: only the LoRA adapter. auto: the adapter where one
    is trained and the server can load it, else every weight."""
    folder: str | None = None
    """A folder with room for the weights that this process and the server both see. By default one in /dev/shm that
    only the user who trains can read. Users who can read a folder named here can read the weights, unless every user
    can write in it."""
    timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds a server may take to load them."""


@dataclass(frozen=True)
class Proof:
    """Measurements that show that a push arrived."""

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
class Trained:
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


@dataclass(frozen=True)
class _Push:
    """The last push, on the writer only."""

    version: int
    name: str
    """The model name that requests use."""
    folder: Path
    dtype: str
    logp_N: FloatArray
    """The server's logprobs of the probe after the push."""
    workers: list[WorkerState]
    """The state each worker must report until the next push; empty without the worker extension."""
    checksums: list[list[ParameterReport]]


class Sync:
    """Pushes weights to one server and remembers the last push. Every rank has a Sync and calls it together with the
    others; only the writer's talks to the server. ``close`` removes the files.
    """

    def __init__(
        self, server: VllmServer, trained: Trained, config: SyncConfig, probe_T: IntArray
    ) -> None:
        """Raises EngineError, with the command that starts another, for a server whose weights cannot be changed."""
        self.server, self.trained, self.config, self.probe_T = server, trained, config, probe_T
        self.name = server.base
        """The model name that requests use."""
        self.proof: Proof | None = None
        """Proof of the last push."""
        self.restarts = 0
        """How often a restarted server got the last push again."""
        self.mode: Mode = _together(trained.ranks, self._choose_mode)
        self._folder = Folder(config.folder) if trained.ranks.is_writer else None
        self._dtype = server.dtype() if trained.ranks.is_writer else "unknown"
        self._count = 0
        self._last: _Push | None = None

    def close(self) -> None:
        if self._last is not None and self.mode == "adapter":
            self.server.leave(self._last.name)
        self.server.root.close()
        if self._folder is not None:
            self._folder.close()

    @property
    def version(self) -> int:
        """The step of the server's weights; 0 before the first push."""
        return 0 if self.proof is None else self.proof.version

    def push(self, version: int) -> Proof:
        """Send the weights in training to the server and prove it. Raises EngineError where they did not arrive."""
        expected_N, ranks = self.trained.log_probs(self.probe_T), self.trained.ranks
        self._count += 1
        outcome: tuple[Proof, str] | TautError | None = None
        with distributed.whole_tensors(self.trained.scorer.model, ranks) as whole:
            if whole is not None:
                outcome = _outcome(partial(self._push, version, whole, expected_N))
        try:
            proof, self.name = _shared(ranks, outcome)
        except EngineError as error:
            raise EngineError(f"weights after step {version}: {error}") from None
        self.proof = proof
        return proof

    def hold(self) -> None:
        """Before generation: check that the server has the last push; push it again to a server that was restarted."""
        self.restarts += _together(self.trained.ranks, self._hold)

    def require_kept(self) -> None:
        """After generation: raise EngineError unless the same process still has the same weights."""

        def check() -> None:
            if self._last is not None and not self._has(self._last):
                raise EngineError(
                    "server: it was started again while it answered, and lost the weights it was given; its answers "
                    "may be of others and are not used; run the same command again with resume=true"
                )

        _together(self.trained.ranks, check)

    def _choose_mode(self) -> Mode:
        server, wanted, model = self.server, self.config.mode, self.trained.scorer.model
        obstacle = None
        if not is_adapted(model):
            obstacle = "the model itself is trained"
        else:
            (settings,) = model.peft_config.values()  # type: ignore[operator]
            for name, what in (
                ("use_dora", "DoRA"),
                ("modules_to_save", "modules trained in full (lora.modules_to_save)"),
                (
                    "trainable_token_indices",
                    "trained rows of the embedding (lora.train_token_rows)",
                ),
            ):
                if obstacle is None and getattr(settings, name, None):
                    obstacle = f"vLLM loads no adapter with {what}"
        if wanted == "adapter" and obstacle is not None:
            raise EngineError(
                f"rollout.server.sync.mode=adapter, and {obstacle}; expected a plain LoRA adapter; set it to full"
            )
        is_quantised = any(quantised_layers(model))
        if is_quantised and (wanted == "full" or obstacle is not None):
            why = obstacle or "rollout.server.sync.mode=full"
            raise EngineError(
                f"the base is quantised, and {why}: a server would need whole weights that are not what it holds; "
                "expected a plain LoRA adapter, pushed alone (rollout.server.sync.mode=adapter); or set "
                "rollout.engine=local"
            )
        if wanted != "full" and obstacle is None and server.takes_adapters():
            return "adapter"
        if wanted != "adapter" and server.dtype() != "unknown" and not is_quantised:
            return "full"
        needs = "adapters" if wanted == "adapter" else "weights"
        raise EngineError(
            f"server: {server.openai.url} takes no {needs} while it runs; expected vLLM with taut's worker extension, "
            f"or for a LoRA adapter with runtime loading; {how_to_start(server.base)}"
        )

    def _push(self, version: int, whole: Whole, expected_N: FloatArray) -> tuple[Proof, str]:
        """Push as the writer; the proof, and the model name for requests."""
        assert self._folder is not None
        start = time.monotonic()
        server, model, last = self.server, self.trained.scorer.model, self._last
        before_N = server.log_probs(server.base, self.probe_T) if last is None else last.logp_N
        folder = self._folder.new(f"{version}-{self._count}")  # a path that never was before
        name, dtype, num_equal = server.base, self._dtype, 0
        checksums: list[list[ParameterReport]] = []
        unread: list[str] = []
        if self.mode == "full":
            self._folder.keep_only(folder)  # the folder needs room for one push only
            workers = server.workers()
            dtype = workers[0].dtype
            tensors = checkpoint_tensors(model, whole)
            num_bytes = write(tensors, getattr(torch, dtype), folder)
            self._folder.share(folder)
            workers, checksums = self._load(version, folder, workers)
            num_equal, unread = require_arrived(written(folder), checksums)
        else:  # under a new name and path, so that nothing cached of another version is used
            save_adapter(model, folder, whole)
            self._folder.share(folder)
            num_bytes = sum(file.stat().st_size for file in folder.iterdir())
            name = f"{server.base}{PUSHED}{folder.parent.name.rpartition('-')[2]}-{folder.name}"
            workers = self._workers()
            server.load_adapter(name, folder)
            if last is not None and server.serves(last.name):
                server.unload_adapter(last.name)
        logp_N = server.log_probs(name, self.probe_T)
        self._require_same(logp_N, expected_N, None if last is None else before_N, dtype)
        self._last = _Push(version, name, folder, dtype, logp_N, workers, checksums)
        self._folder.keep_only(folder)
        proof = Proof(
            version=version,
            mode=self.mode,
            num_bytes=num_bytes,
            seconds=time.monotonic() - start,
            num_equal=num_equal,
            unread=tuple(unread),
            largest_error=float(np.abs(logp_N - expected_N).max()),
            largest_change=float(np.abs(logp_N - before_N).max()),
        )
        return proof, name

    def _load(
        self, version: int, folder: Path, workers: Sequence[WorkerState]
    ) -> tuple[list[WorkerState], list[list[ParameterReport]]]:
        """Have the server load the files and empty its prefix cache; what its workers must report from now on, and
        their checksums. ``workers``: their state before.
        """
        self.server.load(folder, version)
        self.server.empty_prefix_cache()
        loaded = {"version": version, "folder": str(folder)}
        workers = [worker.model_copy(update=loaded) for worker in workers]
        return workers, self.server.checksums(folder)

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
            f"{expected_N[at]:.4f} by the model in training (to within {limit:g}); serve the model that is trained, "
            "and let no other client push to it"
        )

    def _hold(self) -> int:
        """How often the last push was sent again: 0 or 1."""
        last = self._last
        if last is None or self._has(last):
            return 0
        workers = self._workers()
        if self.mode == "adapter":
            self.server.load_adapter(last.name, last.folder)
        else:
            workers, checksums = self._load(last.version, last.folder, workers)
            if checksums != last.checksums:
                raise EngineError(
                    "server: started again, it shows other checksums for the same weights; expected the same model in "
                    f"the same dtype ({last.dtype}); start it as before"
                )
        self._last = replace(last, workers=workers)
        logp_N = self.server.log_probs(last.name, self.probe_T)
        self._require_same(logp_N, last.logp_N, None, last.dtype)
        return 1

    def _has(self, last: _Push) -> bool:
        """Whether the server still has the last push, on the same base; False after a restart."""
        workers = self._workers()
        if [worker.start for worker in workers] != [worker.start for worker in last.workers]:
            return False
        for worker, expected in zip(workers, last.workers, strict=True):
            if worker != expected:
                raise EngineError(
                    f"server: it holds weights {worker.origin}; expected those {expected.origin}, which it had at this "
                    "run's last push; let no other client push to it"
                )
        return self.mode == "full" or self.server.serves(last.name)

    def _workers(self) -> list[WorkerState]:
        """The state of each worker; empty without the worker extension."""
        return [] if self._dtype == "unknown" else self.server.workers()


def _together(ranks: Ranks, work: Callable[[], T]) -> T:
    """The result of ``work`` on the writer, returned or raised on every rank."""
    return _shared(ranks, _outcome(work) if ranks.is_writer else None)


def _outcome(work: Callable[[], T]) -> T | TautError:
    try:
        return work()
    except TautError as error:
        return error


def _shared(ranks: Ranks, outcome: T | TautError | None) -> T:
    """The writer's outcome, returned or raised on every rank."""
    shared = ranks.gather(outcome)[0]
    if isinstance(shared, TautError):
        raise shared
    result: T = shared
    return result


def how_to_start(name: str) -> str:
    """The command line of a server whose weights can be changed."""
    place = Path(worker_package.__file__).parent
    serve = (
        f"vllm serve DIR --served-model-name {name} --logprobs-mode processed_logprobs "
        "--host 127.0.0.1"
    )
    return (
        f"start it with VLLM_SERVER_DEV_MODE=1 PYTHONPATH={shlex.quote(str(place))} {serve} --worker-extension-cls "
        f"taut_worker.TautWorker; for adapters alone VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 {serve} --enable-lora "
        "--max-lora-rank RANK (docs/weights.md)"
    )


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

    def keep_only(self, kept: Path) -> None:
        """Remove the files of other versions."""
        for other in self.path.iterdir():
            if other.is_dir() and other != kept:
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
    """A tensor as it is sent: on the CPU, floating-point numbers in the server's dtype."""
    tensor = tensor.detach()
    return tensor.to("cpu", dtype if tensor.is_floating_point() else None).contiguous()


def require_arrived(
    tensors: Mapping[str, Tensor],
    workers: Sequence[Sequence[ParameterReport]],
) -> tuple[int, list[str]]:
    """How many tensors the server has bit for bit, and the names of those it cannot read.

    ``tensors``: what was sent; ``workers``: the reports of each worker. A parameter is whole on every worker, or in
    shards whose checksums add up. Raises EngineError for a parameter that is neither, and where the server reports
    no checksum at all.
    """
    by_name: dict[str, list[ParameterReport]] = {}
    for report in (report for reports in workers for report in reports):
        by_name.setdefault(report.name, []).append(report)
    proven: set[str] = set()
    for name, reports in by_name.items():
        sums = [int(report.checksum, 16) for report in reports if report.checksum is not None]
        parts, columns = reports[0].parts, reports[0].columns
        if not parts or len(sums) < len(reports):
            continue
        sent = [tensors[part] if columns is None else tensors[part][:, columns] for part in parts]
        expected = sum(checksum(tensor.contiguous()) for tensor in sent) % 2**64
        if sum(sums) % 2**64 != expected and any(value != expected for value in sums):
            raise EngineError(
                f"server: {name} ({', '.join(parts)}) has checksum {sums[0]:016x}; expected {expected:016x}, that of "
                "the weights just pushed; the server holds other weights: start it from the model that is trained, "
                "and let no other client push to it"
            )
        proven.update(parts)
    if not proven:
        raise EngineError(
            f"server: it shows a checksum of none of the {len(tensors)} tensors just pushed; expected most of them; "
            "serve the model that is trained, with the worker extension of this version of taut"
        )
    return len(proven), [name for name in tensors if name not in proven]
