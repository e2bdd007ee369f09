"""What trains is saved, exactly, and nothing that is read back is run."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.tiny_trainers import make
from torch import nn
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from taut.errors import OutputError
from taut.train import distributed, sharded
from taut.train.distributed import Ranks
from taut.train.optim import build_optimizer
from taut.train.settings import OptimConfig

ONE = Ranks(0, 1, torch.device("cpu"))


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
    state = sharded.training_state(built.scorer, built.trainer.optimizer)
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
    model, ranks = Small(), distributed.start("cpu")
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


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory with one tensor, ``model.a``."""
    sharded.write({"model.a": torch.arange(6.0).reshape(2, 3)}, tmp_path / "saved", ONE)
    return tmp_path / "saved"


def fill(directory: Path) -> torch.Tensor:
    """``model.a``, as it is read from a directory."""
    state = {"model.a": torch.zeros(2, 3)}
    sharded.read(state, directory, ONE)
    return state["model.a"]


def index_of(directory: Path) -> Metadata:
    """The index, as torch reads it."""
    index = pickle.loads((directory / ".metadata").read_bytes())
    assert isinstance(index, Metadata)
    return index


def test_the_index_read_as_data_is_the_one_that_torch_reads(saved: Path) -> None:
    ours, theirs = sharded.read_index(saved), index_of(saved)
    for index in (ours, theirs):
        for stored in index.state_dict_metadata.values():
            assert isinstance(stored, TensorStorageMetadata)
            vars(stored.properties).pop(
                "strides", None
            )  # torch 2.15 writes them; nothing here reads them
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3),
        torch.zeros(0, 3),
        torch.randn(3, 2).t(),
        torch.randn(4, 4)[1:3, ::2],
        torch.randn(3, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.randn(5, dtype=torch.float64),
        torch.randn(3).to(torch.float8_e4m3fn),
    ],
)
def test_every_kind_of_tensor_comes_back(tensor: torch.Tensor, tmp_path: Path) -> None:
    sharded.write({"t": tensor}, tmp_path / "saved", ONE)
    state = {"t": torch.empty(tensor.shape, dtype=tensor.dtype)}
    sharded.read(state, tmp_path / "saved", ONE)
    assert torch.equal(state["t"].float(), tensor.float())


def test_an_index_that_names_other_code_is_not_read(saved: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "made"),)

    (saved / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(
        OutputError, match=r"the index names posix\.mkdir where it should have a Met"
    ):
        fill(saved)
    assert not (tmp_path / "made").exists()


def test_an_index_that_sets_attributes_of_a_class_is_not_read(saved: Path) -> None:
    """As pickle.Unpickler would do, whatever list of allowed classes it has."""
    build = b"ctorch.distributed.checkpoint.metadata\nMetadata\nN}\x8c\x06__eq__K\x01s\x86b0"
    honest = (saved / ".metadata").read_bytes()
    (saved / ".metadata").write_bytes(b"\x80\x04" + build + honest[2:])
    with pytest.raises(OutputError, match="it adds to a Name; expected a Record"):
        fill(saved)
    assert Metadata.__eq__ is not 1  # noqa: F632 (identity is meant)


class Lookup:
    """Pickled as Python 3.11.0 pickles a member of an enum."""

    def __init__(self, kind: type, name: str) -> None:
        self.kind, self.name = kind, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.kind, self.name)


class PropertiesOf3110(TensorProperties):
    """Pickled as Python 3.11.0 pickles it."""

    def __reduce__(self) -> tuple[Any, ...]:  # type: ignore[override]
        kind = _MEM_FORMAT_ENCODING
        state = (self.dtype, self.layout, False, Lookup(kind, "TORCH_CONTIGUOUS_FORMAT"), False)
        return TensorProperties, (), state


def test_an_index_of_the_first_releases_of_python_3_11_is_read(saved: Path) -> None:
    index = index_of(saved)
    stored = index.state_dict_metadata["model.a"]
    assert isinstance(stored, TensorStorageMetadata)
    stored.properties = PropertiesOf3110(torch.float32)
    written = pickle.dumps(index)
    assert b"getattr" in written
    (saved / ".metadata").write_bytes(written)
    assert torch.equal(fill(saved), torch.arange(6.0).reshape(2, 3))


def test_a_sharded_tensor_is_put_together(tmp_path: Path) -> None:
    """As several ranks wrote it: two chunks, each in its own file."""
    whole = torch.arange(12.0).reshape(4, 3)
    for name, rows in (("a", whole[:3]), ("b", whole[3:])):
        sharded.write({"t": rows.clone()}, tmp_path / name, ONE)
    a, b = index_of(tmp_path / "a"), index_of(tmp_path / "b")
    (tmp_path / "b" / "__0_0.distcp").rename(tmp_path / "a" / "__1_0.distcp")
    stored = a.state_dict_metadata["t"]
    assert isinstance(stored, TensorStorageMetadata)
    second = ChunkStorageMetadata(torch.Size([3, 0]), torch.Size([1, 3]))
    stored.size, stored.chunks = torch.Size([4, 3]), [*stored.chunks, second]
    (place,) = b.storage_data.values()
    place.relative_path = "__1_0.distcp"
    a.storage_data[MetadataIndex("t", second.offsets)] = place
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(a))
    state = {"t": torch.zeros(4, 3)}
    sharded.read(state, tmp_path / "a", ONE)
    assert torch.equal(state["t"], whole)
    stored.chunks[1] = ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([1, 3]))
    del a.storage_data[MetadataIndex("t", second.offsets)]
    a.storage_data[MetadataIndex("t", torch.Size([2, 0]))] = place
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(a))
    with pytest.raises(OutputError, match=r"the chunks of t do not make up \[4, 3\]"):
        sharded.read(state, tmp_path / "a", ONE)


def test_tensors_that_are_missing_or_too_many_are_refused(tmp_path: Path) -> None:
    ranks = distributed.start("cpu")
    names = [f"model.lora_{number}" for number in range(4)]
    sharded.write({name: torch.ones(3) for name in names}, tmp_path / "saved", ranks)
    for wanted, says in (
        ([*names, "model.lora_9"], r"lacks the tensor model\.lora_9"),
        (names[:2], r"has 2 tensor\(s\) that this run does not train, model\.lora_2 the first"),
    ):
        state = {name: torch.zeros(3) for name in wanted}
        with pytest.raises(OutputError, match=says):
            sharded.read(state, tmp_path / "saved", ranks)
        assert not any(tensor.any() for tensor in state.values())


def test_a_place_that_cannot_be_written_is_an_oserror(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Not a directory"):
        sharded.write({"a": torch.zeros(2)}, tmp_path / "file" / "saved", distributed.start("cpu"))
