"""What trains is saved, exactly, and nothing that is read back is run."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.jobs import make
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from taut import parallel, sharded
from taut.optim import OptimConfig, build_optimizer


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.table.weight
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.register_buffer("count", torch.tensor([1, 2]))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)


def test_only_what_trains_and_what_counts_is_saved() -> None:
    """Tied once, frozen not, buffers that last."""
    model = Small()
    state = sharded.training_state(model, build_optimizer(model, OptimConfig(learning_rate=1e-5)))
    keys = ["step", "exp_avg", "exp_avg_sq"]
    assert list(state) == [
        "model.table.weight",
        "model.count",
        *(f"optimizer.table.weight.{key}" for key in keys),
    ]
    assert state["model.table.weight"].data_ptr() == model.table.weight.data_ptr()
    assert sharded.num_bytes(state) == 3 * 15 * 4 + 4 + 16


def test_adapters_are_saved_without_the_base(tmp_path: Path) -> None:
    built, _ = make(tmp_path, lora__rank=2)
    state = sharded.training_state(built.scorer, built.job.optimizer)
    trained = {name for name, p in built.scorer.named_parameters() if p.requires_grad}
    assert {
        name.removeprefix(
            "model.",
        )
        for name in state
        if name.startswith("model.")
    } == trained
    assert all("lora_" in name for name in trained)


def test_written_and_read_back_exactly(tmp_path: Path) -> None:
    model, ranks = Small(), parallel.start("cpu")
    optimizer = build_optimizer(model, OptimConfig(learning_rate=1e-5))
    state = sharded.training_state(model, optimizer)
    room = sharded.allocate(state)
    sharded.stage(state, room)
    assert all(room[name].data_ptr() != state[name].data_ptr() for name in state)
    sharded.write(room, tmp_path / "saved", ranks)
    with torch.no_grad():
        for tensor in state.values():
            tensor.fill_(9)
    sharded.read(state, tmp_path / "saved", ranks)
    assert all(torch.equal(state[name], room[name]) for name in state)
    assert model.count.tolist() == [1, 2]


def test_an_index_that_names_other_code_is_not_read(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "made"),)

    ranks, state = parallel.start("cpu"), {"model.a": torch.zeros(2)}
    sharded.write(state, tmp_path / "saved", ranks)
    (tmp_path / "saved" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(RuntimeError, match="the index names"):
        sharded.read(state, tmp_path / "saved", ranks)
    assert not (tmp_path / "made").exists()


class Lookup:
    """Pickled as Python 3.11.0 pickles a member of an enum."""

    def __init__(self, kind: type, name: str) -> None:
        self.kind, self.name = kind, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.kind, self.name)


def test_an_index_of_the_first_releases_of_python_3_11_is_read() -> None:
    member = _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT
    written = pickle.dumps(Lookup(_MEM_FORMAT_ENCODING, member.name))
    assert sharded._Unpickler(io.BytesIO(written)).load() is member
    with pytest.raises(pickle.UnpicklingError, match="looks up __subclasses__"):
        sharded._Unpickler(io.BytesIO(pickle.dumps(Lookup(torch.Size, "__subclasses__")))).load()


def test_a_place_that_cannot_be_written_is_an_oserror(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Not a directory"):
        sharded.write({"a": torch.zeros(2)}, tmp_path / "file" / "saved", parallel.start("cpu"))
