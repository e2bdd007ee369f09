"""Weights on their way to a server: files in a folder that both see, and checksums of what arrived.

Tensors are written under the names of a Hugging Face checkpoint (an adapter merged, tied tensors once), in the dtype
the server computes in, so that what it reads needs no rounding and checksums are those of the very bits.

The folder is in memory (/dev/shm) unless the user names another. It is locked while its process lives; one that a
killed process left behind is removed by the next.

May import models, errors, rollout/served and rollout/worker. ``sync.py`` imports it.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from taut.config import home_path
from taut.errors import EngineError, OutputError
from taut.models.lora import plain_model
from taut.rollout.served import Report
from taut.rollout.worker.taut_worker import checksum

MEMORY = Path("/dev/shm")
PREFIX = "taut-weights-"
FILE_BYTES = 2 * 2**30
"""About how much goes into one file: as much is copied at a time."""


class Folder:
    """A folder of this process's own, which others may read. ``close`` removes it."""

    def __init__(self, place: str | None) -> None:
        """Raises OutputError where there can be none."""
        parent = home_path(place) if place is not None else _memory()
        try:
            parent.mkdir(parents=True, exist_ok=True)
            _remove_left(parent)
            made = Path(tempfile.mkdtemp(prefix=".taut-", dir=parent))
            made.chmod(0o755)
            self._lock = _locked(made)
            self.path = made.rename(parent / f"{PREFIX}{made.name.removeprefix('.taut-')}")
        except OSError as error:
            raise OutputError(
                f"rollout.server.sync.folder: {parent} cannot be written: {error.strerror}; expected a folder that "
                "this process and the server both see; set it to one"
            ) from None
        assert self._lock is not None  # nobody else looks at it under its first name

    def close(self) -> None:
        assert self._lock is not None
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def new(self, name: str) -> Path:
        """An empty folder in it."""
        made = self.path / name
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
        return made

    def keep_only(self, kept: Path) -> None:
        """Remove the files of other versions."""
        for other in self.path.iterdir():
            if other.is_dir() and other != kept:
                shutil.rmtree(other, ignore_errors=True)


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
        for file in folder.iterdir():
            file.chmod(0o644)
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


def _locked(folder: Path) -> IO[bytes] | None:
    """A lock that ends with this process; None where another has it."""
    file = (folder / "lock").open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def _remove_left(parent: Path) -> None:
    """Remove the folders of processes that are no more. Others' stay, and so does what may not be looked at."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            lock = _locked(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                lock.close()
