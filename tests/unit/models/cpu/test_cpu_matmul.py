"""Products of either library equal float32's, by classes that a measurement chooses; the choice is kept and stored."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from taut.data.settings import DataConfig
from taut.errors import ConfigError
from taut.methods.method import RunConfig
from taut.models.cpu import cpu_matmul
from taut.models.cpu.cpu_matmul import (
    BF16_SHAPES,
    FEW,
    NOTHING,
    SHAPES,
    CpuMatmul,
    Rates,
    active,
    decoding,
    faster,
    install,
    linear,
    measure,
    packed_faster,
    product_into,
    rates_of_machine,
    select,
    torch_name,
    use,
)
from taut.models.cpu.packed_weights import PackedWeights
from taut.run.setup import use_cpu_matmul
from taut.train.distributed import Ranks

CPU = torch.device("cpu")
NARROW = torch.bfloat16
ALL = frozenset(SHAPES)
EQUAL = dict.fromkeys(SHAPES, Rates(100.0, 100.0))
pytestmark = pytest.mark.skipif(not cpu_matmul.has_onednn(), reason="this PyTorch has no oneDNN")


@pytest.fixture(autouse=True)
def _one_choice() -> Iterator[None]:
    before = active()
    use(NOTHING)
    yield
    use(before)


class Seen(TorchDispatchMode):
    """Which operators ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def operands(rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, rows, 48), (64, 48), (64,))
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x, weight, bias


def named(onednn: frozenset[str]) -> CpuMatmul:
    """The choice of oneDNN for these classes."""
    return CpuMatmul(f"onednn for {', '.join(onednn)}" if onednn else "mkl")


# -- products


def is_taken(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, onednn: frozenset[str] = ALL
) -> bool:
    use(named(onednn))
    with decoding(PackedWeights(0)), Seen() as seen:
        linear(x, weight, bias)
    return "mkldnn::_linear_pointwise" in seen.names


@pytest.mark.parametrize("has_bias", [False, True])
def test_an_engines_product_is_float32s(has_bias: bool) -> None:
    x, weight, bias = operands(9)
    given = bias if has_bias else None
    with torch.no_grad():
        assert is_taken(x, weight, given)
        with decoding(PackedWeights(0)):
            found = linear(x, weight, given)
    wanted = nn.functional.linear(
        x.double(), weight.double(), None if given is None else bias.double()
    )
    assert found.shape == (1, 9, 64)
    assert float((found - wanted).abs().max()) < 1e-5


def test_an_engine_takes_the_classes_that_were_chosen() -> None:
    large = torch.randn(1024, 512)
    with torch.no_grad():
        for rows, of_small, of_large in (
            (9, "few rows small", "few rows large"),
            (40, "some rows shallow", "some rows deep"),
            (300, "forward small", "forward large"),
        ):
            x, weight, _ = operands(rows)
            assert is_taken(x, weight, onednn=frozenset([of_small]))
            assert not is_taken(x, weight, onednn=ALL - {of_small})
            assert is_taken(torch.randn(rows, 512), large, onednn=frozenset([of_large]))


def test_all_else_is_left_alone() -> None:
    x, weight, _ = operands(9)
    assert not is_taken(x, weight)  # a gradient may be wanted
    with torch.no_grad():
        few, _, _ = operands(FEW - 1)
        assert not is_taken(few, weight)
        assert not is_taken(x.double(), weight.double())
        assert not is_taken(x.bfloat16(), weight.bfloat16())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not is_taken(x, weight)
            with decoding(PackedWeights(0)):
                assert linear(x, weight).dtype == torch.bfloat16


@pytest.mark.parametrize("rows", [9, 700])
@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("name", ["onednn", "mkl"])
def test_a_product_into_memory_that_is_there_is_float32s(
    rows: int, is_turned: bool, name: str
) -> None:
    """The head's, with rows enough and without."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(rows, 256, generator=generator), torch.randn(256, 256)
    weight = weight.T if is_turned else weight
    out = torch.empty(rows + 3, 256)
    use(CpuMatmul(name))
    with Seen() as seen:
        product_into(out[:rows], x, weight)
    is_onednns = name == "onednn" and rows == 700
    assert ("mkldnn::_linear_pointwise" in seen.names) is is_onednns
    assert float((out[:rows] - x.double() @ weight.double().T).abs().max()) < 1e-3


def linear_grads(dtype: torch.dtype, onednn: frozenset[str]) -> list[Tensor]:
    """The product of many rows, and the gradients of all that goes into it."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, up = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((1, 2500, 96), (128, 96), (128,), (1, 2500, 128))
    )
    leaves = [leaf.requires_grad_() for leaf in (x, weight, bias)]
    use(named(onednn))
    product: Any = linear(*leaves)
    is_ours = bool(onednn) and dtype == torch.float32
    assert ("_Linear" in type(product.grad_fn).__name__) == is_ours
    return [product.detach(), *torch.autograd.grad(product, leaves, up)]


KINDS = ("forward", "input gradient", "weight gradient")


@pytest.mark.parametrize(
    "chosen",
    [ALL, *(frozenset([f"{kind} small"]) for kind in KINDS)],
    ids=["all", *(f"{kind} small" for kind in KINDS)],
)
def test_in_training_each_product_is_float32s_by_either_library(chosen: frozenset[str]) -> None:
    found, again = (linear_grads(torch.float32, chosen) for _ in range(2))
    wanted = linear_grads(torch.float64, chosen)
    own = linear_grads(torch.float32, frozenset())
    for name, one, other, exact, plain in zip(
        (*KINDS, "bias"), found, again, wanted, own, strict=True
    ):
        assert torch.equal(one, other)
        assert float((one - exact).norm() / exact.norm()) < 2e-6
        if f"{name} small" not in chosen:
            assert torch.equal(one, plain), f"{name}: PyTorch's own product has its own bits"


def test_a_product_without_gradient_has_the_bits_of_one_with() -> None:
    x, weight, bias = (torch.randn(s) for s in ((2500, 96), (128, 96), (128,)))
    use(CpuMatmul("onednn"))
    with torch.no_grad():
        product = linear(x, weight, bias)
    with_gradient = linear(x, weight.requires_grad_(), bias)
    assert torch.equal(product, with_gradient), "a reference and a policy agree to the last bit"


def test_a_small_product_in_training_is_left_alone() -> None:
    x, weight, bias = operands(9)
    use(CpuMatmul("onednn"))
    product = linear(x, weight.requires_grad_(), bias)
    assert "_Linear" not in type(product.grad_fn).__name__


def test_only_what_a_gradient_needs_is_kept() -> None:
    x, weight, _ = (torch.randn(s) for s in ((2500, 96), (128, 96), (128,)))
    use(CpuMatmul("onednn"))
    for trains, kept in ((x, [None, weight]), (weight, [x, None])):
        trains.requires_grad_()
        product: Any = linear(x, weight)
        trains.requires_grad_(False)
        assert [t is o for t, o in zip(product.grad_fn.saved_tensors, kept, strict=True)] == [
            True
        ] * 2


@pytest.mark.parametrize("name", ["mkl", "onednn"])
def test_layers_computed_again_give_the_same_gradients(name: str) -> None:
    torch.manual_seed(0)
    use(CpuMatmul(name))
    model = nn.Sequential(nn.Linear(128, 512), nn.SiLU(), nn.Linear(512, 128))
    model[0].weight.requires_grad_(False)
    x = torch.randn(1100, 128, requires_grad=True)
    install(model)
    leaves = [x, model[0].bias, model[2].weight]
    grads = []
    for is_again in (False, True):
        y = checkpoint(model, x, use_reentrant=False) if is_again else model(x)
        assert ("_Linear" in type(y.grad_fn).__name__) is (name == "onednn")
        grads.append(torch.autograd.grad(y.square().sum(), leaves))
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_linear_layers_alone_are_installed() -> None:
    class Other(nn.Linear):
        """A layer with arithmetic of its own, such as a quantized one."""

    model = nn.Sequential(nn.Linear(128, 256), Other(256, 64), nn.LayerNorm(64))
    install(model)
    assert ["forward" in vars(module) for module in model] == [True, False, False]
    with torch.no_grad():
        x = torch.randn(2500, 128)
        wanted = model(x)
        use(CpuMatmul("onednn for forward small"))
        with Seen() as seen:
            found = model(x)
        assert "mkldnn::_linear_pointwise" in seen.names
        torch.testing.assert_close(found, wanted)
        again = copy.deepcopy(model)
        again[0].weight.zero_()
        assert not torch.equal(again(x), found), "a copy reads its own weights"


def test_the_heads_products_alone_leave_the_layers_to_pytorch() -> None:
    x, weight = torch.randn(2500, 128), torch.randn(256, 128, requires_grad=True)
    for plain in (NOTHING, CpuMatmul("mkl"), CpuMatmul("torch"), CpuMatmul("onednn for head")):
        use(plain)
        assert "_Linear" not in type(linear(x, weight).grad_fn).__name__


# -- the measurement


def timed(slow: str, classes: frozenset[str] = ALL) -> Callable[[str, str, Any], float]:
    """A clock by which a library needs twice the time for some classes."""
    return lambda name, library, _: 2.0 if library == slow and name in classes else 1.0


def test_packed_weights_are_taken_where_they_beat_the_library_that_is() -> None:
    rates = {
        "few rows small": Rates(100.0, 130.0, 140.0),
        "few rows large": Rates(100.0, 109.0, 112.0),
        "some rows deep": Rates(100.0, 90.0, 105.0),
        "bf16 few rows": Rates(100.0, packed=120.0),
        "head": Rates(100.0, 130.0),
    }
    assert faster(rates) == {"few rows small", "head"}
    assert packed_faster(rates) == {"few rows large", "bf16 few rows"}


HAS_BF16 = pytest.mark.skipif(not cpu_matmul.has_bf16(), reason="no bf16 arithmetic to pack for")


@pytest.mark.parametrize(
    "shapes",
    [
        SHAPES,
        pytest.param(SHAPES | BF16_SHAPES, marks=HAS_BF16),
        pytest.param(BF16_SHAPES, marks=HAS_BF16),
    ],
)
def test_an_engines_products_are_timed_in_every_way(
    shapes: dict[str, cpu_matmul.Shape], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_matmul, "LIMIT", 0.0)
    rates = measure(shapes, timed("torch", frozenset()))
    assert rates.keys() == shapes.keys()
    engines = {name for name, rate in rates.items() if rate.packed}
    assert engines == {name for name in rates if "rows" in name}
    assert {name for name, rate in rates.items() if not rate.onednn} == rates.keys() - ALL


def test_the_faster_library_takes_each_class() -> None:
    some = frozenset(["forward large", "head"])
    assert faster(measure(SHAPES, timed("torch"))) == ALL
    assert faster(measure(SHAPES, timed("onednn"))) == frozenset()
    assert faster(measure(SHAPES, timed("torch", some))) == some
    almost = {**EQUAL, "head": Rates(100.0, 100 * cpu_matmul.MARGIN)}
    assert not faster(almost), "PyTorch's own, unless oneDNN is clearly faster"


def test_the_shortest_time_counts() -> None:
    """Another program makes one library slower, at times."""
    calls: list[tuple[str, str]] = []

    def clock(name: str, library: str, _: Any) -> float:
        calls.append((name, library))
        is_disturbed = library == "torch" and calls.count((name, library)) % 2
        return 9.0 if is_disturbed else 1.0

    assert not faster(measure(SHAPES, clock))
    of_head = [library for name, library in calls if name == "head"]
    assert of_head[:4] == ["torch", "onednn"] * 2, "they take turns"


def test_a_clock_that_stands_still_has_rates() -> None:
    """As a process's own does between two steps of a profiler's timer."""
    assert not faster(measure(SHAPES, lambda *_: 0.0))


def test_a_class_is_timed_until_its_shortest_times_are_met_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def clock(name: str, library: str, _: Any) -> float:
        calls.append(f"{name} by {library}")
        number = calls.count(calls[-1])
        if name == "head" and library == "torch":  # met a second time at last
            return 1.0 if number in (2, 40) else 3.0
        return 1.0 + number if name == "head gradient" and number < 9 else 1.0

    monkeypatch.setattr(cpu_matmul, "LIMIT", 60.0)
    rates = measure(SHAPES, clock)
    assert all(rate.has_settled for rate in rates.values())
    assert calls.count("head by torch") == 40
    assert calls.count("forward large by torch") == cpu_matmul.ROUNDS
    calls.clear()
    monkeypatch.setattr(cpu_matmul, "LIMIT", 0.0)
    rates = measure(SHAPES, clock)
    assert {name for name, rate in rates.items() if not rate.has_settled} == {
        "head",
        "head gradient",
    }


def test_rates_of_a_machine_that_is_too_busy_are_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TAUT_CACHE", str(tmp_path))
    rates = EQUAL | {"head": Rates(100.0, 200.0, has_settled=False)}
    monkeypatch.setattr(
        cpu_matmul, "measure", lambda shapes: {name: rates[name] for name in shapes}
    )
    found, how = rates_of_machine(SHAPES)
    assert found == rates
    assert how.endswith("not kept, since other programs disturbed 1 of 12 classes")
    assert not list(tmp_path.rglob("*.json"))


def test_a_measurement_is_quick_and_draws_no_random_number() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    rates = measure(SHAPES)
    assert rates.keys() == SHAPES.keys()
    assert all(rate.torch > 0 for rate in rates.values())
    assert torch.equal(before, torch.get_rng_state())


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of threads of each measurement; rates are made up."""
    taken: list[int] = []

    def made_up(shapes: object) -> dict[str, Rates]:
        taken.append(torch.get_num_threads())
        return EQUAL | {"head": Rates(100.0, 200.0)}

    monkeypatch.setattr(cpu_matmul, "measure", made_up)
    return taken


def test_rates_are_kept_by_machine_threads_and_versions(
    counted: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TAUT_CACHE", str(tmp_path / "cache"))
    first, how = rates_of_machine(SHAPES)
    assert "measured in" in how
    again, how = rates_of_machine(SHAPES)
    assert first == again and len(counted) == 1
    assert "measured before" in how
    for variable, value in (
        ("MKL_ENABLE_INSTRUCTIONS", "AVX2"),
        ("ONEDNN_MAX_CPU_ISA", "AVX2"),
    ):
        monkeypatch.setenv(variable, value)
        rates_of_machine(SHAPES)
    assert len(counted) == 3
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert "77 threads" in rates_of_machine(SHAPES)[1]
    monkeypatch.setattr(cpu_matmul, "_processor", lambda: "another")
    rates_of_machine(SHAPES)
    monkeypatch.setattr(torch, "__version__", "9.9")
    rates_of_machine(SHAPES)
    assert len(counted) == 6
    assert {path.suffix for path in (tmp_path / "cache" / "cpu_matmul").iterdir()} == {".json"}


def _without_a_class(content: Any) -> None:
    del content["rates"]["head"]


def _negative(content: Any) -> None:
    content["rates"]["head"][0] = -1


def _of_another(content: Any) -> None:
    content["machine"]["torch"] = "0.1"


@pytest.mark.parametrize("damage", [None, _without_a_class, _negative, _of_another])
def test_a_damaged_file_is_measured_again_and_told(
    damage: Callable[[Any], None] | None,
    counted: list[int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("TAUT_CACHE", str(tmp_path))
    rates_of_machine(SHAPES)
    (path,) = (tmp_path / "cpu_matmul").iterdir()
    if damage is None:
        path.write_text("{")
    else:
        content = json.loads(path.read_text())
        damage(content)
        path.write_text(json.dumps(content))
    _, how = rates_of_machine(SHAPES)
    assert len(counted) == 2
    assert f"{path} could not be used: " in how
    assert "measured before" in rates_of_machine(SHAPES)[1]


def test_a_cache_that_cannot_be_written_is_told(
    counted: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TAUT_CACHE", str(tmp_path / "file"))
    _, how = rates_of_machine(SHAPES)
    assert "not kept, since" in how


# -- the choice


def test_auto_chooses_by_the_rates(counted: list[int]) -> None:
    chosen = select("auto", CPU, torch.float32)
    assert chosen.name == "onednn for head"
    assert chosen.onednn == {"head"}
    use(chosen)
    (decision,) = active().decisions
    assert (decision.name, decision.value) == ("cpu_matmul", f"{torch_name()}, onednn")
    assert decision.reason.startswith("onednn for head: ")
    own = torch_name()
    assert f"forward 100 against 100 GFLOP/s ({own} against onednn)" in decision.reason
    assert "head 100/133" in decision.reason


@pytest.mark.parametrize("packed", [frozenset(), frozenset(["few rows small", "some rows deep"])])
@pytest.mark.parametrize(
    "classes",
    [frozenset(), ALL, frozenset(["head", "forward small"])],
    ids=["none", "all", "two"],
)
def test_a_name_names_its_classes(classes: frozenset[str], packed: frozenset[str]) -> None:
    choice = CpuMatmul(cpu_matmul._name(classes, packed))
    assert (choice.onednn, choice.packed) == (classes, packed)


def test_bf16_chooses_packed_weights_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TAUT_CACHE", str(tmp_path))
    bf16 = {name: Rates(100.0, packed=150.0) for name in BF16_SHAPES}
    bf16["bf16 many rows"] = Rates(100.0, packed=101.0)
    rates = {**EQUAL, "head": Rates(100.0, 200.0), **bf16}
    monkeypatch.setattr(
        cpu_matmul, "measure", lambda shapes: {name: rates[name] for name in shapes}
    )
    monkeypatch.setattr(cpu_matmul, "has_bf16", lambda: True)
    assert select("auto", CPU, NARROW) == NOTHING, "it has no engine"
    chosen = select("auto", CPU, NARROW, engine=NARROW)
    assert chosen.name == "packed for bf16 few rows, bf16 some rows"
    assert not chosen.onednn and not chosen.has_layers
    (decision,) = chosen.decisions
    assert decision.value == "onednn, packed"
    assert "bf16 few rows 100, packed 150" in decision.reason and "head" not in decision.reason
    assert select("auto", CPU, NARROW, chosen.name).reason == "that of the checkpoint"
    assert select("auto", CPU, torch.float32, engine=torch.float32).name == "onednn for head"
    both = select("auto", CPU, torch.float32, engine=NARROW)
    assert both.name == f"onednn for head; {chosen.name}"
    assert both.decisions[0].value == f"{torch_name()}, onednn, packed"
    assert select("onednn", CPU, NARROW, engine=NARROW) == NOTHING, "forced: nothing is packed"
    rates |= {name: Rates(100.0, packed=100.0) for name in BF16_SHAPES}
    for path in tmp_path.rglob("*.json"):
        path.unlink()
    assert select("auto", CPU, NARROW, engine=NARROW) == NOTHING


@pytest.mark.parametrize("name", ["mkl", "onednn"])
def test_a_library_asked_for_by_name_is_not_measured(name: Any, counted: list[int]) -> None:
    monkeypatched = select(name, CPU, torch.float32, stored="onednn for head")
    assert monkeypatched == CpuMatmul(name, "asked for by name")
    assert not counted


def test_what_a_build_lacks_is_refused(monkeypatch: pytest.MonkeyPatch, counted: list[int]) -> None:
    monkeypatch.setattr(cpu_matmul, "has_onednn", lambda: False)
    with pytest.raises(ConfigError, match=r"cpu_matmul=onednn: .* expected auto or mkl"):
        select("onednn", CPU, torch.float32)
    chosen = select("auto", CPU, torch.float32, stored="onednn")
    assert chosen.name == "mkl"
    assert chosen.reason == (
        "the checkpoint's onednn is not available here; this build of PyTorch has no oneDNN"
    )
    monkeypatch.setattr(cpu_matmul, "torch_name", lambda: "torch")
    with pytest.raises(ConfigError, match=r"cpu_matmul=mkl: .* expected auto; set"):
        select("mkl", CPU, torch.float32)
    monkeypatch.setattr(cpu_matmul, "has_onednn", lambda: True)
    with pytest.raises(ConfigError, match="expected auto or onednn"):
        select("mkl", CPU, torch.float32)
    assert not counted


@pytest.mark.parametrize(
    "stored",
    [
        "mkl",
        "onednn",
        "onednn for forward large, head",
        "mkl; packed for few rows small, some rows deep",
        "onednn for head; packed for few rows large",
    ],
)
def test_a_resumed_run_takes_the_stored_choice_unmeasured(stored: str, counted: list[int]) -> None:
    assert select("auto", CPU, torch.float32, stored) == CpuMatmul(stored, "that of the checkpoint")
    assert not counted


@pytest.mark.parametrize(
    "stored",
    [
        "torch",
        "onednn for squares",
        "blas",
        "onednn ",
        "mkl; packed for squares",
        "packed for head",
    ],
)
def test_a_stored_choice_that_is_not_available_is_measured_and_told(
    stored: str, counted: list[int]
) -> None:
    chosen = select("auto", CPU, torch.float32, stored)
    assert chosen.name == "onednn for head"
    assert chosen.reason.startswith(f"the checkpoint's {stored} is not available here; forward")


def test_a_stored_choice_of_a_processor_with_other_arithmetic_is_measured_and_told(
    monkeypatch: pytest.MonkeyPatch, counted: list[int]
) -> None:
    """oneDNN packs no bfloat16 weights for a processor without its arithmetic."""
    stored = "mkl; packed for few rows small, bf16 few rows"
    monkeypatch.setattr(cpu_matmul, "has_bf16", lambda: True)
    assert select("auto", CPU, torch.float32, stored).name == stored
    monkeypatch.setattr(cpu_matmul, "has_bf16", lambda: False)
    assert select("auto", CPU, torch.float32, stored).name == "onednn for head"
    monkeypatch.setattr(cpu_matmul, "has_mkl_packed", lambda: False)
    stored = "onednn for head; packed for few rows small"
    assert select("auto", CPU, torch.float32, stored).name == "onednn for head"


@dataclass(frozen=True, slots=True)
class _Second(Ranks):
    """A rank whose first one has chosen."""

    def gather(self, value: Any) -> list[Any]:
        assert value is None, "one rank measures"
        return [CpuMatmul("onednn for head"), value]


def test_every_rank_takes_the_first_ones_choice(counted: list[int]) -> None:
    run = RunConfig(model="m", data=DataConfig(), dtype="float32")
    use_cpu_matmul(run, _Second(1, 2, CPU))
    assert active() == CpuMatmul("onednn for head")
    assert not counted
    use_cpu_matmul(run, Ranks(0, 1, CPU), "onednn")
    assert active().name == "onednn"
    use_cpu_matmul(replace(run, dtype="float64"), Ranks(0, 1, CPU), "onednn")
    assert active() == NOTHING, "a run before it has left nothing behind"


def test_other_dtypes_and_devices_have_no_choice(counted: list[int]) -> None:
    for device, dtype in (
        (CPU, torch.bfloat16),
        (CPU, torch.float64),
        (torch.device("cuda"), None),
    ):
        chosen = select("auto", device, dtype or torch.float32)
        assert chosen == NOTHING and chosen.decisions == []
    assert not counted
