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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from taut.config import configclass, home_path
from taut.data.packing import pack
from taut.errors import EngineError, OutputError, TautError
from taut.inference import worker
from taut.inference.vllm_client import PUSHED, TOLERANCE, Asked, Held, Report
from taut.inference.worker.taut_worker import checksum
from taut.io.temporary import MEMORY, PRIVATE, TemporaryFolder
from taut.models.lora import is_adapted, plain_model, save_adapter
from taut.models.scorer import Scorer
from taut.train import distributed
from taut.train.distributed import Ranks
from taut.types import FloatArray, IntArray, Sample

FILE_BYTES = 2 * 2**30
"""About how much goes into one file: as much is copied at a time."""


class Folder:
    """A temporary folder for pushes, which the server reads. ``close`` removes it."""

    def __init__(self, place: str | None) -> None:
        """Raises OutputError where it cannot be made."""
        parent = home_path(place) if place is not None else _memory()
        try:
            parent.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
            found = parent.stat()
            is_prepared = place is not None and not found.st_mode & stat.S_IWOTH
            self._mode = PRIVATE | (found.st_mode & 0o055 if is_prepared else 0)
            self._group = found.st_gid if is_prepared else None
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
        """An empty folder in it."""
        made = self.path / name
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(mode=PRIVATE)
        return made

    def share(self, pushed: Path) -> None:
        """Let those read a folder of ``new`` and its files who may read the place that the user prepared."""
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
    model: nn.Module, state: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The model's weights by their names in a checkpoint, adapters merged; what is tied comes once.

    ``state``: the whole weights under ``model``'s own names, where ``model`` holds shards.
    """
    with torch.no_grad():
        plain = plain_model(model, state)
        once = {name for name, _ in plain.named_parameters()}
        shared = {name for name, _ in plain.named_parameters(remove_duplicate=False)} - once
        every = plain.state_dict()
        own = {name: tensor for name, tensor in every.items() if name not in shared}
        return dict(revert_weight_conversion(plain, own))


def write(tensors: Mapping[str, Tensor], dtype: torch.dtype, folder: Path) -> int:
    """Write tensors into files; how many bytes they are. Raises OutputError where there is no room."""
    num_bytes = 0
    try:
        for number, some in enumerate(_batches(tensors, dtype)):
            num_bytes += sum(tensor.nbytes for tensor in some.values())
            save_file(some, folder / f"weights-{number:04}.safetensors")
    except (OSError, SafetensorError) as error:
        raise OutputError(
            f"rollout.server.sync.folder: {folder} cannot be written: {error}; expected room for the model's weights; "
            "set it to a folder with room"
        ) from None
    return num_bytes


def served(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor as it is sent: on the CPU, numbers in the server's dtype."""
    tensor = tensor.detach()
    return tensor.to("cpu", dtype if tensor.is_floating_point() else None).contiguous()


def require_arrived(
    tensors: Mapping[str, Tensor], dtype: torch.dtype, workers: Sequence[Sequence[Report]]
) -> tuple[int, list[str]]:
    """How many tensors the server has to the bit, and the names of those it cannot show.

    ``workers``: the reports of each. A parameter is whole on every worker, or in shards that add up. Raises
    EngineError for one that is neither, and where the server shows none at all.
    """
    by_name: dict[str, list[Report]] = {}
    for report in (report for reports in workers for report in reports):
        by_name.setdefault(report.name, []).append(report)
    shown: set[str] = set()
    for name, reports in by_name.items():
        found = [int(r.checksum, 16) for r in reports if r.checksum is not None]
        parts = reports[0].parts
        if not parts or len(found) < len(reports):
            continue
        wanted = sum(_part(tensors[part], dtype, reports[0].columns) for part in parts) % 2**64
        if sum(found) % 2**64 != wanted and any(value != wanted for value in found):
            raise EngineError(
                f"server: {name} ({', '.join(parts)}) has checksum {found[0]:016x}; expected {wanted:016x}, that of "
                "the weights just pushed; the server holds other weights: start it from the model that is trained, "
                "and let nobody else push to it"
            )
        shown.update(parts)
    if not shown:
        raise EngineError(
            f"server: it shows a checksum of none of the {len(tensors)} tensors just pushed; expected most of them; "
            "serve the model that is trained, with the worker extension of this version of taut"
        )
    return len(shown), [name for name in tensors if name not in shown]


def _part(tensor: Tensor, dtype: torch.dtype, columns: list[int] | None) -> int:
    sent = served(tensor if columns is None else tensor[:, columns], dtype)
    return checksum(sent)


def _batches(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    batch: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors.items():
        batch[name] = served(tensor, dtype)
        num_bytes += batch[name].nbytes
        if num_bytes >= FILE_BYTES:
            yield batch
            batch, num_bytes = {}, 0
    if batch:
        yield batch


def _memory() -> Path:
    return MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())


PROBE = "The quick brown fox jumps over the lazy dog. 12 x 3.5 = 42, so: what comes next?"
"""The text whose log-probs server and model must agree on."""
PROBE_TOKENS = 32

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
    only the user who trains can read. Whoever can read a folder named here can read the weights, unless every user can
    write in it."""
    timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds a server may take to load them."""


@dataclass(frozen=True)
class Proof:
    """What showed that a push arrived."""

    version: int
    mode: Mode
    num_bytes: int
    seconds: float
    num_equal: int
    """Tensors of which the server showed the same checksum."""
    unread: tuple[str, ...]
    """Tensors of which it could show none: their proof is the log-probs alone."""
    largest_error: float
    """Nats between the server's log-probs of the probe and the training model's own, at most."""
    largest_change: float
    """Nats by which the push changed the server's log-probs of the probe, at most."""


@dataclass(frozen=True)
class Trained:
    """The model in training, as far as its weights and log-probs go. Every rank asks it together."""

    scorer: Scorer
    ranks: Ranks
    dtype: torch.dtype
    """What it computes in."""
    compute: Callable[[], AbstractContextManager[Any]] = nullcontext

    def state(self) -> dict[str, torch.Tensor] | None:
        """Every tensor under the model's own names; None but on the writer."""
        return distributed.full_state_dict(self.scorer.model, self.ranks)

    def log_probs(self, ids_T: IntArray) -> FloatArray:
        """Of every id but the first."""
        at_N = np.arange(1, ids_T.size)
        packed = pack([Sample("probe", ids_T, at_N, np.ones(at_N.size))])
        was_training = self.scorer.training
        self.scorer.eval()
        try:
            with torch.no_grad(), self.compute():
                logp_N = self.scorer(packed.to(self.scorer.device)).logp_N
        finally:
            self.scorer.train(was_training)
        found: FloatArray = logp_N.double().cpu().numpy()
        return found


@dataclass(frozen=True)
class _Sent:
    """What the server was given last. The writer's alone."""

    version: int
    name: str
    """What requests name for it."""
    folder: Path
    dtype: str
    said_N: FloatArray
    """What the server said of the probe afterwards."""
    held: list[Held]
    """What each worker is to say it has, until the next push; none where no extension is there to say it."""
    checksums: list[list[Report]]


class Sync:
    """Pushes to one server, and remembers what was pushed. Every rank has one and calls it together with the others;
    the writer's alone talks to the server. ``close`` removes the files.
    """

    def __init__(
        self, asked: Asked, trained: Trained, config: SyncConfig, probe_T: IntArray
    ) -> None:
        """Raises EngineError for a server that takes no weights, and says how to start one that does."""
        self.asked, self.trained, self.config, self.probe_T = asked, trained, config, probe_T
        self.name = asked.base
        """What requests are to name."""
        self.proof: Proof | None = None
        """Of the last push."""
        self.restarts = 0
        """How often the server had lost what it was given, and got it again."""
        self.mode: Mode = _together(trained.ranks, self._choose)
        self._folder = Folder(config.folder) if trained.ranks.is_writer else None
        self._dtype = asked.dtype() if trained.ranks.is_writer else "unknown"
        self._count = 0
        self._sent: _Sent | None = None

    def close(self) -> None:
        if self._sent is not None and self.mode == "adapter":
            self.asked.leave(self._sent.name)
        self.asked.root.close()
        if self._folder is not None:
            self._folder.close()

    @property
    def version(self) -> int:
        """The step after which the server's weights are; 0 before the first push."""
        return 0 if self.proof is None else self.proof.version

    def push(self, version: int) -> Proof:
        """Make the server's weights those in training, and prove it. Raises EngineError where they did not arrive."""
        state, expected_N = self.trained.state(), self.trained.log_probs(self.probe_T)
        self._count += 1
        try:
            proof, self.name = _together(
                self.trained.ranks, lambda: self._push(version, state or {}, expected_N)
            )
        except EngineError as error:
            raise EngineError(f"weights after step {version}: {error}") from None
        self.proof = proof
        return proof

    def hold(self) -> None:
        """Before generation: the server must have what was pushed. Started again, it gets it once more."""
        self.restarts += _together(self.trained.ranks, self._hold)

    def require_kept(self) -> None:
        """After that: it must be the same process with the same weights still."""
        _together(self.trained.ranks, self._require_kept)

    def _choose(self) -> Mode:
        asked, wanted, model = self.asked, self.config.mode, self.trained.scorer.model
        obstacle = adapter_obstacle(model)
        if wanted == "adapter" and obstacle is not None:
            raise EngineError(
                f"rollout.server.sync.mode=adapter, and {obstacle}; expected a plain LoRA adapter; set it to full"
            )
        if wanted != "full" and obstacle is None and asked.takes_adapters():
            return "adapter"
        if wanted != "adapter" and asked.dtype() != "unknown":
            return "full"
        needs = "adapters" if wanted == "adapter" else "weights"
        raise EngineError(
            f"server: {asked.openai.url} takes no {needs} while it runs; expected vLLM with taut's worker extension, "
            f"or for a LoRA adapter with runtime loading; {how_to_start(asked.base)}"
        )

    def _push(
        self, version: int, state: Mapping[str, Tensor], expected_N: FloatArray
    ) -> tuple[Proof, str]:
        assert self._folder is not None
        began = time.monotonic()
        last, asked = self._sent, self.asked
        before_N = asked.log_probs(asked.base, self.probe_T) if last is None else last.said_N
        folder = self._folder.new(f"{version}-{self._count}")  # a path that never was before
        if self.mode == "full":
            self._folder.keep_only(folder)  # there need be room for one push alone
            sent, num_bytes, arrived = self._push_full(version, state, folder)
        else:
            sent, num_bytes, arrived = self._push_adapter(version, state, folder), 0, (0, [])
            num_bytes = sum(file.stat().st_size for file in folder.iterdir())
        said_N = asked.log_probs(sent.name, self.probe_T)
        old_N = None if last is None else before_N
        self._require_same(said_N, expected_N, old_N, sent.dtype)
        self._sent = replace(sent, said_N=said_N)
        self._folder.keep_only(folder)
        proof = Proof(
            version=version,
            mode=self.mode,
            num_bytes=num_bytes,
            seconds=time.monotonic() - began,
            num_equal=arrived[0],
            unread=tuple(arrived[1]),
            largest_error=float(np.abs(said_N - expected_N).max()),
            largest_change=float(np.abs(said_N - before_N).max()),
        )
        return proof, sent.name

    def _push_full(
        self, version: int, state: Mapping[str, Tensor], folder: Path
    ) -> tuple[_Sent, int, tuple[int, list[str]]]:
        held = self.asked.held()
        dtype = getattr(torch, held[0].dtype)
        tensors = checkpoint_tensors(self.trained.scorer.model, state)
        num_bytes = write(tensors, dtype, folder)
        assert self._folder is not None
        self._folder.share(folder)
        checksums = self._load(version, folder)
        arrived = require_arrived(tensors, dtype, checksums)
        now = {"version": version, "folder": str(folder)}
        held = [one.model_copy(update=now) for one in held]
        sent = _Sent(version, self.asked.base, folder, held[0].dtype, np.empty(0), held, checksums)
        return sent, num_bytes, arrived

    def _load(self, version: int, folder: Path) -> list[list[Report]]:
        """Have the server load files and forget what it computed with the old; the checksums of what it then has."""
        self.asked.load(folder, version)
        self.asked.empty_prefix_cache()
        return self.asked.checksums(folder)

    def _push_adapter(self, version: int, state: Mapping[str, Tensor], folder: Path) -> _Sent:
        """Under a name and a path of its own, so that nothing kept of another version is taken for it."""
        save_adapter(self.trained.scorer.model, folder, dict(state))
        assert self._folder is not None
        self._folder.share(folder)
        name = f"{self.asked.base}{PUSHED}{folder.parent.name.rpartition('-')[2]}-{folder.name}"
        held = self._held()
        self.asked.load_adapter(name, folder)
        if self._sent is not None and self.asked.serves(self._sent.name):
            self.asked.unload_adapter(self._sent.name)
        return _Sent(version, name, folder, self._dtype, np.empty(0), held, [])

    def _require_same(
        self, said_N: FloatArray, wanted_N: FloatArray, old_N: FloatArray | None, dtype: str
    ) -> None:
        """The server's log-probs of the probe must be those of the model in training. ``old_N``: of the push before."""
        trained = str(self.trained.dtype).removeprefix("torch.")
        limit = max(_tolerance(dtype), _tolerance(trained))
        far = np.abs(said_N - wanted_N)
        at = int(far.argmax())
        if far[at] <= limit:
            return
        kept = old_N is not None and np.abs(said_N - old_N).max() == 0
        what = "as before the push: it keeps the old weights" if kept else "of another model"
        raise EngineError(
            f"server: log-prob {said_N[at]:.4f} for id {self.probe_T[at + 1]} of the probe, {what}; expected "
            f"{wanted_N[at]:.4f} by the model in training (to within {limit:g}); serve the model that is trained, and "
            "let nobody else push to it"
        )

    def _hold(self) -> int:
        sent = self._sent
        if sent is None or self._has(sent):
            return 0
        held = self._held()
        if self.mode == "adapter":
            self.asked.load_adapter(sent.name, sent.folder)
        else:
            now = {"version": sent.version, "folder": str(sent.folder)}
            held = [one.model_copy(update=now) for one in held]
            checksums = self._load(sent.version, sent.folder)
            if checksums != sent.checksums:
                raise EngineError(
                    "server: started again, it shows other checksums for the same weights; expected the same model in "
                    f"the same dtype ({sent.dtype}); start it as before"
                )
        self._sent = replace(sent, held=held)
        said_N = self.asked.log_probs(sent.name, self.probe_T)
        self._require_same(said_N, sent.said_N, None, sent.dtype)
        return 1

    def _require_kept(self) -> None:
        if self._sent is not None and not self._has(self._sent):
            raise EngineError(
                "server: it was started again while it answered, and lost the weights it was given; its answers may be "
                "of others and are not used; run the same command again with resume=true"
            )

    def _has(self, sent: _Sent) -> bool:
        """Whether the server has it still, on the same base; False after a restart."""
        held = self._held()
        if [one.start for one in held] != [one.start for one in sent.held]:
            return False
        for one, due in zip(held, sent.held, strict=True):
            if one != due:
                raise EngineError(
                    f"server: it holds weights {_origin(one)}; expected those {_origin(due)}, which it had at this "
                    "run's last push; let nobody else push to it"
                )
        return self.mode == "full" or self.asked.serves(sent.name)

    def _held(self) -> list[Held]:
        """What each worker has; nothing where no extension is there to say it."""
        return [] if self._dtype == "unknown" else self.asked.held()


def _together(ranks: Ranks, work: Callable[[], T]) -> T:
    """What ``work`` gives on the writer, or raises there, on every rank."""
    outcome: T | TautError | None = None
    if ranks.is_writer:
        try:
            outcome = work()
        except TautError as error:
            outcome = error
    said = ranks.gather(outcome)[0]
    if isinstance(said, TautError):
        raise said
    result: T = said
    return result


def how_to_start(name: str) -> str:
    """The command line of a server that takes weights."""
    place = Path(worker.__file__).parent
    serve = (
        f"vllm serve DIR --served-model-name {name} --logprobs-mode processed_logprobs "
        "--host 127.0.0.1"
    )
    return (
        f"start it with VLLM_SERVER_DEV_MODE=1 PYTHONPATH={shlex.quote(str(place))} {serve} --worker-extension-cls "
        f"taut_worker.TautWorker; for adapters alone VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 {serve} --enable-lora "
        "--max-lora-rank RANK (docs/weights.md)"
    )


def _origin(held: Held) -> str:
    return f"of version {held.version} ({held.folder})" if held.folder else "it was started with"


def adapter_obstacle(model: nn.Module) -> str | None:
    """Why what is trained cannot go to vLLM as an adapter; None where it can."""
    if not is_adapted(model):
        return "the model itself is trained"
    (settings,) = model.peft_config.values()  # type: ignore[operator]
    for name, what in (
        ("use_dora", "DoRA"),
        ("modules_to_save", "modules trained whole beside it (lora.modules_to_save)"),
        (
            "trainable_token_indices",
            "rows of the embedding trained beside it (lora.train_token_rows)",
        ),
    ):
        if getattr(settings, name, None):
            return f"vLLM loads no adapter with {what}"
    return None


def _tolerance(dtype: str) -> float:
    narrow = TOLERANCE["bfloat16"]
    return TOLERANCE["float32"] if dtype in ("float32", "float64") else narrow
