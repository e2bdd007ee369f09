"""The worker extension on a model that keeps its weights as vLLM's does: fused, emptied, copied for a kernel."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.fake_weight_sync import Worker
from torch import Tensor, nn

from taut.inference.vllm_client import ParameterReport
from taut.inference.weight_sync import Files, require_arrived
from taut.inference.worker import taut_worker
from taut.inference.worker.taut_worker import NUM_COLUMNS, checksum, columns

WIDTH, VOCABULARY = 40, 7


class Method:
    """vLLM's way with a layer's weight on a CPU: a copy in the kernel's own layout, and perhaps nothing beside it."""

    def __init__(self, removes: bool) -> None:
        self.removes = removes

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.packed = layer.weight.detach().T.clone()
        layer.cpu_linear = True
        if self.removes:
            layer.weight = nn.Parameter(torch.empty(0))

    def apply(self, layer: Any, rows: Tensor, bias: None) -> Tensor:
        return rows @ layer.packed


def layer(weight: Tensor, removes: bool) -> Any:
    made: Any = nn.Module()
    made.weight = nn.Parameter(weight.clone())
    made.quant_method = Method(removes)
    made.embedding_dim = weight.shape[1]
    if removes:
        made.input_size = made.input_size_per_partition = weight.shape[1]
    made.quant_method.process_weights_after_loading(made)
    return made


class Model(nn.Module):
    """An attention projection that is fused and emptied, a norm, and a table with a head tied to it."""

    packed_modules_mapping: ClassVar = {"qk_proj": ["q_proj", "k_proj"]}

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.embed = nn.Module()
        self.embed.weight = nn.Parameter(tensors["embed.weight"].clone())
        self.qk_proj = layer(torch.cat([tensors["q_proj.weight"], tensors["k_proj.weight"]]), True)
        self.norm = nn.Module()
        self.norm.base_layer = nn.Module()  # a server that can load adapters
        self.norm.base_layer.weight = nn.Parameter(tensors["norm.weight"].clone())
        self.head = layer(tensors["embed.weight"], False)
        self.head.weight = self.embed.weight


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "q_proj.weight": torch.randn(6, WIDTH),
        "k_proj.weight": torch.randn(2, WIDTH),
        "norm.weight": torch.randn(WIDTH),
        "embed.weight": torch.randn(VOCABULARY, WIDTH),
    }


def told(model: nn.Module, tensors: dict[str, Tensor]) -> list[ParameterReport]:
    reports = Worker(model).taut_checksums([*tensors])
    return [ParameterReport.model_validate(report) for report in reports]


def test_every_tensor_is_read_where_the_model_keeps_it(
    tensors: dict[str, Tensor],
) -> None:
    reports = told(Model(tensors), tensors)
    assert {report.name: set(report.parts) for report in reports} == {
        "embed.weight": {"embed.weight"},
        "qk_proj.weight": {"q_proj.weight", "k_proj.weight"},
        "norm.weight": {"norm.weight"},
        "head's copy": {"embed.weight"},
    }
    in_part = [report.name for report in reports if report.columns is not None]
    assert in_part == ["qk_proj.weight", "head's copy"]
    assert require_arrived(Files(tensors), [reports]) == (4, [])


def test_a_head_s_old_copy_is_found(tensors: dict[str, Tensor]) -> None:
    model = Model(tensors)
    model.head.packed.add_(1)
    (copy,) = [report for report in told(model, tensors) if report.name == "head's copy"]
    assert copy.checksum != f"{checksum(tensors['embed.weight'][:, columns(WIDTH)]):016x}"


def test_loading_makes_a_tied_head_s_copy_anew(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    model = Model(tensors)
    changed = {name: value + 1 for name, value in tensors.items() if "proj" not in name}
    changed["norm.base_layer.weight"] = changed.pop("norm.weight")
    save_file(changed, tmp_path / "weights.safetensors")
    worker = Worker(model)
    assert worker.taut_load(str(tmp_path), 5) == {}
    assert torch.equal(model.head.packed, tensors["embed.weight"].T + 1)
    held = worker.taut_held()
    assert (held["version"], held["folder"], held["dtype"]) == (5, str(tmp_path), "float32")


def test_a_load_that_fails_half_way_is_seen_to_have_begun(
    tensors: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(tensors, tmp_path / "weights.safetensors")
    worker = Worker(Model(tensors))
    assert (worker.taut_held()["version"], worker.taut_held()["folder"]) == (-1, "")

    def failing(**given: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(worker, "reload_weights", failing)
    with pytest.raises(RuntimeError):
        worker.taut_load(str(tmp_path), 5)
    assert worker.taut_held()["folder"] == str(tmp_path)


def test_a_folder_without_files_is_said(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    worker = Worker(Model(tensors))
    assert worker.taut_load(str(tmp_path), 1) == {"error": f"sees no file in {tmp_path}"}
    assert worker.taut_version == -1


def test_a_layer_whose_input_is_sharded_is_not_read(
    tensors: dict[str, Tensor],
) -> None:
    model = Model(tensors)
    model.qk_proj.input_size = 2 * WIDTH
    reports = told(model, tensors)
    assert next(r for r in reports if r.name == "qk_proj.weight").checksum is None
    unread = require_arrived(Files(tensors), [reports])[1]
    assert sorted(unread) == ["k_proj.weight", "q_proj.weight"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_checksum_sums_and_ignores_zeros_and_order(dtype: torch.dtype) -> None:
    values = torch.randn(50, dtype=torch.float64).to(dtype)
    padded = torch.cat([values.flip(0), torch.zeros(9, dtype=dtype)])
    halves = checksum(values[:20]) + checksum(values[20:])
    assert checksum(values) == checksum(padded) == halves % 2**64
    assert checksum(values) != checksum(-values)


def test_columns_are_spread_over_the_width() -> None:
    assert columns(3) == [0, 1, 2]
    assert columns(576) == list(range(0, 576, 36)) and len(columns(576)) == NUM_COLUMNS


def test_the_file_imports_nothing_that_vllm_s_environment_lacks() -> None:
    tree = ast.parse(Path(taut_worker.__file__).read_text())
    found = {
        (node.module or "").split(".")[0]
        if isinstance(node, ast.ImportFrom)
        else node.names[0].name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert found == {
        "__future__",
        "collections",
        "pathlib",
        "safetensors",
        "torch",
        "typing",
        "uuid",
    }
    beside = {path.name for path in Path(taut_worker.__file__).parent.glob("*.py")}
    assert beside == {"__init__.py", "taut_worker.py"}
