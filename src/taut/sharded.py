"""Training tensors to a directory and back, through torch.distributed.checkpoint: sharded, and resharded on reading.

    state = training_state(scorer, optimizer)     name -> tensor; the tensors that train themselves, not copies
    staging = allocate(state)                      as many again, on the CPU
    stage(state, staging)                          copies; ends before it returns
    write(staging, directory, ranks)               each rank its shards; every file forced to the disk
    read(state, directory, ranks)                  in place, however many ranks wrote

Only what trains is there (frozen weights are in the model the run began with), and only tensors: no pickled object is
ever loaded. The index that torch.distributed.checkpoint pickles is read with its own few classes allowed.

Knows no steps and no runs. Imported by checkpoint.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    StorageMeta,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from taut.parallel import Ranks

State = dict[str, Tensor]

INDEX = ".metadata"
"""torch.distributed.checkpoint's index of a directory."""
ALLOWED = {
    "pathlib": ("Path", "PosixPath"),
    "torch": ("Size", *(n for n in dir(torch) if isinstance(getattr(torch, n), torch.dtype))),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
}
"""What the index may be made of."""


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """What changes while the model trains: trained weights, buffers, the optimizer's moments. Live, not copied."""
    tensors = model.state_dict()  # under FSDP this also puts the shards in place
    everything = dict(model.named_parameters(remove_duplicate=False))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    buffers = [name for name in tensors if name not in everything]
    state: State = {f"model.{name}": tensors[name] for name in (*trained, *buffers)}
    for name, parameter in trained.items():
        for key, value in optimizer.state[parameter].items():
            state[f"optimizer.{name}.{key}"] = value
    return state


def num_bytes(state: State) -> int:
    """Bytes of this rank's part."""
    return sum(_local(tensor).nbytes for tensor in state.values())


def allocate(state: State) -> State:
    """Room on the CPU for a copy of ``state``, touched, so that no later copy waits for the system's pages."""
    is_cuda = any(tensor.device.type == "cuda" for tensor in state.values())
    room: State = _create_cpu_state_dict(state, pin_memory=is_cuda)
    for tensor in room.values():
        _local(tensor).zero_()
    return room


@torch.no_grad()
def stage(state: State, room: State) -> None:
    """Copy ``state`` as it is now. When this returns the tensors may change."""
    _copy_state_dict(state, room)


def write(state: State, directory: Path, ranks: Ranks) -> None:
    """Write every rank's part. Raises OSError on all ranks if one cannot."""
    writer = _Writer(directory, sync_files=True)
    try:
        _save_state_dict(
            state, storage_writer=writer, process_group=ranks.group, no_dist=ranks.size == 1
        )
    except CheckpointException as error:
        raise _cause(error) from error


def read(state: State, directory: Path, ranks: Ranks) -> None:
    """Fill ``state`` in place. Raises OSError, or RuntimeError where the directory holds other tensors."""
    try:
        _load_state_dict(
            state,
            storage_reader=_Reader(directory),
            process_group=ranks.group,
            no_dist=ranks.size == 1,
        )
    except CheckpointException as error:
        raise _cause(error) from error


class _Writer(FileSystemWriter):
    """Says what the system said: of a full disk torch.save itself tells an unexpected position."""

    def write_data(self, *args: Any, **kwargs: Any) -> Future[list[WriteResult]]:
        try:
            return super().write_data(*args, **kwargs)
        except RuntimeError as error:
            raise _behind(error) or error from error


class _Reader(FileSystemReader):
    """Reads the index without trusting it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / INDEX).open("rb") as file:
            index = _Unpickler(file).load()
        assert isinstance(index, Metadata)
        index.storage_meta = index.storage_meta or StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"the index names {module}.{name}")
        return super().find_class(module, name)


def _member(kind: type, name: str) -> _MEM_FORMAT_ENCODING:
    """How the first releases of Python 3.11 write the one enum an index has; nothing else is looked up."""
    if kind is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"the index looks up {name} of {kind}")
    return _MEM_FORMAT_ENCODING[name]


def _cause(error: CheckpointException) -> Exception:
    """The first failure itself: an OSError if the place is to blame."""
    failures = [failure for failure, _ in error.failures.values()]
    for failure in failures:
        if isinstance(failure, OSError):
            return OSError(failure.errno, failure.strerror or str(failure))
    return RuntimeError(str(failures[0]))


def _behind(error: BaseException | None) -> OSError | None:
    """The OSError that came before an error, if one did."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
