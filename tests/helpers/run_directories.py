"""What a run leaves in ``out``, read back to be compared with another's bit for bit.

Reads a checkpoint through torch.distributed.checkpoint alone, whatever its tensors are called. Knows the names in
``out``, nothing of how taut writes them.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from taut.train.log import read_events

TOLD = ("step", "loss", "grad_norm", "learning_rate", "sample_ids", "num_tokens", "num_targets")
"""Fields of a step in which equal runs are equal."""
UNEQUAL = ("time", "seconds", "model", "path")
"""Fields of other events in which two equal runs in two places differ."""


@dataclass(frozen=True)
class Left:
    """What a finished run left in ``out``."""

    steps: list[dict[str, Any]]
    measured: list[dict[str, Any]]
    """What evaluations and the end say."""
    checkpoints: list[str]
    """Their names."""
    tensors: dict[str, Tensor]
    """Of the model, the adapter, the best model and every checkpoint."""
    recorded: list[str]
    """The rows of its tables of tokens and rollouts."""
    files: dict[str, bytes]
    """All others of the model, the adapter and the best model."""


def left(out: Path) -> Left:
    """Read what a finished run left, and require that nothing of it is half done."""
    require_tidy(out)
    events = read_events(out / "events.jsonl")
    measured = [
        {key: value for key, value in event.items() if key not in UNEQUAL}
        for event in events
        if event["kind"] in ("eval", "best", "end")
    ]
    tensors: dict[str, Tensor] = {}
    files: dict[str, bytes] = {}
    for folder in ("model", "adapter", "best"):
        for path in sorted((out / folder).glob("*")):
            name = f"{folder}/{path.name}"
            if path.suffix == ".safetensors":
                tensors |= {f"{name}: {key}": value for key, value in load_file(path).items()}
            else:
                files[name] = _in_order(path)
    checkpoints = sorted((out / "checkpoints").glob("step-*"))
    for path in checkpoints:
        tensors |= {f"{path.name}: {key}": item for key, item in read_checkpoint(path).items()}
    steps = [{key: event[key] for key in TOLD} for event in events if event["kind"] == "step"]
    names = [path.name for path in checkpoints]
    return Left(steps, measured, names, tensors, recorded_in(out), files)


def recorded_in(out: Path) -> list[str]:
    """The rows of all tables, in the order of steps and samples, without the seconds that they took."""
    from taut.io.tables import (
        read_tables,
    )  # pyarrow starts threads, which a fork server must not have

    folders = [*sorted((out / "tokens").glob("rank-*")), out / "rollouts"]
    rows = [row for f in folders for batch in read_tables(f) for row in batch.to_pylist()]
    rows = [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in rows]
    return [repr(row) for row in sorted(rows, key=lambda row: (row["step"], repr(row)))]


def _in_order(path: Path) -> bytes:
    """A file's content. peft lists the names in a set, in any order."""
    if path.name != "adapter_config.json":
        return path.read_bytes()
    found = json.loads(path.read_text())
    ordered = {k: sorted(value) if isinstance(value, list) else value for k, value in found.items()}
    return json.dumps(ordered).encode()


def require_equal(out: Path, whole: Left) -> None:
    """What is in ``out`` is, bit for bit, what another run left."""
    found = differences(left(out), whole)
    shown = "\n".join(found[:20])
    assert not found, f"{out} differs in {len(found)} things:\n{shown}"


def differences(one: Left, other: Left) -> list[str]:
    """What is not the same, bit for bit."""
    found = []
    for name in ("steps", "measured", "checkpoints", "recorded"):
        for first, second in zip_longest(getattr(one, name), getattr(other, name)):
            if first != second:
                found.append(f"{name}: {first} against {second}")
                break
    for name in sorted({*one.tensors, *other.tensors}):
        if not is_same(one.tensors.get(name), other.tensors.get(name)):
            found.append(name)
    for name in sorted({*one.files, *other.files}):
        if one.files.get(name) != other.files.get(name):
            found.append(name)
    return found


def is_same(one: Tensor | None, other: Tensor | None) -> bool:
    """Equal in type, shape and every bit."""
    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*bits)


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint of torch.distributed.checkpoint."""
    reader = FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(tensors, storage_reader=FileSystemReader(folder), no_dist=True)
    return tensors


def require_latest_is_complete(out: Path) -> None:
    """At every moment ``latest`` names a checkpoint that can be read, where it is there at all."""
    latest = out / "checkpoints" / "latest"
    if latest.exists():
        folder = latest.with_name(latest.read_text().strip())
        assert json.loads((folder / "meta.json").read_text()), f"{folder} says nothing of itself"
        assert read_checkpoint(folder), f"{folder} has no tensors"


def require_tidy(out: Path) -> None:
    """Nothing half-written and nothing retired is left."""
    waste = [path for path in out.rglob("*") if path.name.endswith((".partial", ".old", ".tmp"))]
    assert not waste, f"{out} has {waste}"
