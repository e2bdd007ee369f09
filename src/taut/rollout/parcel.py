"""Weights on their way to a server: files in a folder that both see, and checksums of what arrived.

Tensors are written under the names of a Hugging Face checkpoint (an adapter merged, tied tensors once), in the dtype
the server computes in, so that what it reads needs no rounding and checksums are those of the very bits.

The folder is in memory (/dev/shm) unless the user names another. It is a ``TemporaryFolder``, so that what a killed
process leaves is removed by the next one. By default, and in a place where every user may write, only the user who
trains (and root) can read it: mode 0700, files 0600. In another place that the user names, whoever may read the place
may read the weights: they get its group and its permissions to read.

May import models, errors, temporary, rollout/served and rollout/worker. ``sync.py`` imports it.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

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
from taut.temporary import MEMORY, PRIVATE, TemporaryFolder

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
