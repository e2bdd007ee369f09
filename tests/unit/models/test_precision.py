"""Compute dtypes end to end, forward and backward."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from tests.helpers.tiny_models import tiny_model
from tests.helpers.tiny_samples import sample
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from taut.attention.layout import Layout
from taut.commands.settings import Generate
from taut.config import load
from taut.data.packing import ALONE, pack
from taut.errors import ConfigError
from taut.methods.method import RunConfig
from taut.models.attention_backends import PREFIX
from taut.models.precision import (
    ChosenDtype,
    Wide,
    backward_context,
    cast_once,
    cast_weight,
    compute_context,
    resolve_dtype,
    use_arithmetic,
)
from taut.types import Packed, Sample

CPU = torch.device("cpu")


def gradients(model: nn.Module, samples: list[Sample], wide: bool) -> tuple[Tensor, list[Tensor]]:
    """Logprobs of the last sample and every gradient of their sum."""
    packed: Packed = pack(samples, ALONE)
    start, stop = packed.spans[-1]
    model.zero_grad()
    with compute_context(torch.float64, CPU) if wide else torch.enable_grad():
        logits = model(
            input_ids=packed.ids_T[None],
            position_ids=packed.position_ids[None],
            use_cache=False,
            taut_layout=Layout(packed.reach_T.numpy()),
        ).logits[0, start:stop]
        logp = torch.log_softmax(logits, -1)[:-1].gather(-1, packed.ids_T[start + 1 : stop, None])
        logp.sum().backward()
    return logp.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def error_of_packing(name: str, wide: bool) -> float:
    model = tiny_model(name, attention=PREFIX + "reference")
    one = sample("one", [int(i) for i in torch.arange(3, 25)])
    other = sample("other", [int(i) for i in torch.arange(50, 63)])
    packed, alone = gradients(model, [other, one], wide), gradients(model, [one], wide)
    relative = [
        float((a - b).abs().max() / b.abs().max())
        for a, b in zip(packed[1], alone[1], strict=True)
        if b.abs().max() > 0
    ]
    return max(*relative, float((packed[0] - alone[0]).abs().max()))


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gpt_oss"])
def test_packed_equals_alone_to_1e12(name: str) -> None:
    assert error_of_packing(name, wide=True) < 1e-12


def test_without_the_context_the_librarys_casts_show() -> None:
    assert error_of_packing("gemma2", wide=False) > 1e-9


def test_a_cast_to_float32_stays_wide_forward_and_backward() -> None:
    x = torch.tensor([1.0 + 1e-12], dtype=torch.float64, requires_grad=True)
    with compute_context(torch.float64, CPU):
        y = x.float() * x.to(torch.float32)
        assert y.dtype == torch.float64
        assert (y - 1).item() == pytest.approx(2e-12, rel=1e-3)
        assert torch.softmax(x, -1, dtype=torch.float32).dtype == torch.float64
        y.backward()
    assert (x.grad - 2).item() == pytest.approx(2e-12, rel=1e-3)


def test_contexts_of_the_other_dtypes() -> None:
    layer = nn.Linear(4, 4)
    with compute_context(torch.bfloat16, CPU):
        assert layer(torch.ones(1, 4)).dtype == torch.bfloat16
    with compute_context(torch.float32, CPU):
        assert layer(torch.ones(1, 4)).dtype == torch.float32
    assert isinstance(backward_context(torch.float64), Wide)
    assert not isinstance(backward_context(torch.bfloat16), torch.autocast)


def test_the_default_dtype_follows_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    chosen = resolve_dtype(None, CPU)
    assert chosen == ChosenDtype(torch.bfloat16, "the CPU has bf16 arithmetic (avx512_bf16)")
    assert chosen.parameters == torch.float32
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    assert resolve_dtype(None, CPU).dtype == torch.float32
    assert resolve_dtype("float64", CPU).parameters == torch.float64


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="dtype=half is not known; expected one of float64"):
        resolve_dtype("half", CPU)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bf16", "bfloat16"),
        ("torch.bfloat16", "bfloat16"),
        ("fp32", "float32"),
        ("float", "float32"),
        ("double", "float64"),
        ("float64", "float64"),
    ],
)
def test_a_dtype_has_its_names_of_elsewhere(name: str, dtype: str) -> None:
    given = ["model=m", "data.train=a.jsonl", f"dtype={name}"]
    assert load(RunConfig, None, given).dtype == dtype
    assert load(Generate, None, ["model=m", "prompts=p", "out=o", f"dtype={name}"]).dtype == dtype


@pytest.mark.parametrize("name", ["fp16", "float16", "half", "torch.float16"])
def test_float16_is_refused_with_what_to_use(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"found dtype={name}, .*float16.*set dtype=bfloat16"):
        load(RunConfig, None, ["model=m", "data.train=a.jsonl", f"dtype={name}"])
    with pytest.raises(ConfigError, match="expected 'float64', 'float32' or 'bfloat16'"):
        load(RunConfig, None, ["model=m", "data.train=a.jsonl", "dtype=float8"])


def test_a_frozen_weight_is_cast_once() -> None:
    """Autocast keeps the cast of what requires a gradient; frozen base weights are cast at every call without help."""

    class Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
        num_elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if (
                func._schema.name == "aten::_to_copy"
                and (kwargs or {}).get("dtype") is torch.bfloat16
            ):
                self.num_elements += args[0].numel() * (args[0].ndim == 2)
            return func(*args, **(kwargs or {}))

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    x = torch.ones(3, 1, 8)  # of another rank than a weight
    with (
        torch.no_grad(),
        cast_once(model),
        torch.autocast("cpu", dtype=torch.bfloat16),
        Casts() as casts,
    ):
        first, second = model(x), model(x)
    assert torch.equal(first, second)
    assert casts.num_elements == 2 * 64
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]
    with pytest.raises(AssertionError, match="graph"), cast_once(model):
        pass


def test_a_weight_that_autocast_does_not_know_is_cast_once_in_an_engine() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    with torch.no_grad(), cast_once(nn.Module()):
        assert cast_weight(weight, torch.bfloat16) is cast_weight(weight, torch.bfloat16)
    assert cast_weight(weight, torch.bfloat16).requires_grad, "a cast with gradient is not kept"
    assert cast_weight(weight, torch.bfloat16) is not cast_weight(weight, torch.bfloat16)


@pytest.fixture
def switches() -> Iterator[None]:
    """PyTorch's switches are put back."""
    precision = torch.get_float32_matmul_precision()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(mode=False)
    torch.utils.deterministic.fill_uninitialized_memory = fills


@pytest.mark.usefixtures("switches")
def test_tf32_is_for_a_cuda_device_and_said_there() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    for tf32, precision in ((True, "high"), (False, "highest")):
        (decision,) = use_arithmetic(torch.float32, cuda, tf32=tf32, deterministic=False)
        assert decision[:2] == ("tf32", str(tf32).lower())
        assert torch.get_float32_matmul_precision() == precision
    assert use_arithmetic(torch.float32, cpu, tf32=False, deterministic=False) == []
    for dtype, device, found in ((torch.float32, cpu, "cpu"), (torch.float64, cuda, "float64")):
        with pytest.raises(ConfigError, match=f"tf32=true with .*{found}"):
            use_arithmetic(dtype, device, tf32=True, deterministic=False)


@pytest.mark.usefixtures("switches")
def test_determinism_is_in_force_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    cpu = torch.device("cpu")
    (decision,) = use_arithmetic(torch.float32, cpu, tf32=False, deterministic=True)
    assert decision[:2] == ("deterministic", "true")
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    (later,) = use_arithmetic(torch.float32, cpu, tf32=False, deterministic=False)
    assert later[:2] == decision[:2] and "not asked for" in later.reason
