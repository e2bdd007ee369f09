"""Compute dtypes end to end, forward and backward; oneDNN's products equal float32's, where they are used."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from tests.tiny_models import tiny_model
from tests.tiny_samples import sample
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from taut.attention.layout import Layout
from taut.commands.generate import Generate
from taut.config import load
from taut.data.packing import ALONE, pack
from taut.errors import ConfigError
from taut.methods.method import RunConfig
from taut.models.attention_backends import PREFIX
from taut.models.precision import (
    MIN_ROWS,
    ChosenDtype,
    OneDnn,
    Wide,
    backward_context,
    cast_once,
    compute_context,
    product_into,
    recompute_contexts,
    resolve_dtype,
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


def is_taken(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    with OneDnn(), Seen() as seen:
        functional.linear(x, weight, bias)
    return "mkldnn::_linear_pointwise" in seen.names


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_product_is_float32s(has_bias: bool) -> None:
    x, weight, bias = operands(9)
    given = bias if has_bias else None
    with torch.no_grad():
        assert is_taken(x, weight, given)
        with OneDnn():
            found = torch.nn.Linear.forward(_module(weight, given), x)
    wanted = functional.linear(
        x.double(), weight.double(), None if given is None else bias.double()
    )
    assert found.shape == (1, 9, 64)
    assert float((found - wanted).abs().max()) < 1e-5


@pytest.mark.parametrize("rows", [9, 700])
@pytest.mark.parametrize("is_turned", [False, True])
def test_a_product_into_memory_that_is_there_is_float32s(rows: int, is_turned: bool) -> None:
    """The head's, with rows enough and without."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(rows, 256, generator=generator), torch.randn(256, 256)
    weight = weight.T if is_turned else weight
    out = torch.empty(rows + 3, 256)
    with Seen() as seen:
        product_into(out[:rows], x, weight)
    assert ("mkldnn::_linear_pointwise" in seen.names) is (rows == 700)
    assert float((out[:rows] - x.double() @ weight.double().T).abs().max()) < 1e-3


def _module(weight: Tensor, bias: Tensor | None) -> torch.nn.Linear:
    module = torch.nn.Linear(48, 64, bias=bias is not None)
    module.weight.data = weight
    if bias is not None:
        module.bias.data = bias
    return module


def test_all_else_is_left_alone() -> None:
    x, weight, _ = operands(9)
    assert not is_taken(x, weight)  # a gradient may be wanted
    with torch.no_grad():
        few, _, _ = operands(MIN_ROWS - 1)
        assert not is_taken(few, weight)
        assert not is_taken(x.double(), weight.double())
        assert not is_taken(x.bfloat16(), weight.bfloat16())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not is_taken(x, weight)
            with OneDnn():
                assert functional.linear(x, weight).dtype == torch.bfloat16


def linear_grads(dtype: torch.dtype, *, is_ours: bool) -> list[Tensor]:
    """The product of many rows, and the gradients of all that goes into it."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, up = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((1, 2500, 96), (128, 96), (128,), (1, 2500, 128))
    )
    leaves = [leaf.requires_grad_() for leaf in (x, weight, bias)]
    with OneDnn(takes_small=False) if is_ours else nullcontext():
        product = functional.linear(*leaves)
    assert ("_Linear" in type(product.grad_fn).__name__) == (is_ours and dtype == torch.float32)
    return [product.detach(), *torch.autograd.grad(product, leaves, up)]


def test_in_training_products_and_gradients_are_float32s_and_the_same_each_time() -> None:
    found, again = (linear_grads(torch.float32, is_ours=True) for _ in range(2))
    wanted = linear_grads(torch.float64, is_ours=True)
    for one, other, exact in zip(found, again, wanted, strict=True):
        assert torch.equal(one, other)
        assert float((one - exact).norm() / exact.norm()) < 2e-6
    with torch.no_grad(), OneDnn(takes_small=False):
        x, weight, bias = (torch.randn(s) for s in ((2500, 96), (128, 96), (128,)))
        product = functional.linear(x, weight, bias)
    with OneDnn(takes_small=False):
        with_gradient = functional.linear(x, weight.requires_grad_(), bias)
    assert torch.equal(product, with_gradient), "a reference and a policy agree to the last bit"


def test_a_small_product_in_training_is_left_alone() -> None:
    x, weight, bias = operands(9)
    with OneDnn(takes_small=False):
        product = functional.linear(x, weight.requires_grad_(), bias)
    assert "_Linear" not in type(product.grad_fn).__name__


def test_layers_computed_again_give_the_same_gradients() -> None:
    device = torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 512), nn.SiLU(), nn.Linear(512, 128))
    model[0].weight.requires_grad_(False)
    x = torch.randn(1100, 128, requires_grad=True)
    contexts = partial(recompute_contexts, torch.float32, device)
    leaves = [x, model[0].bias, model[2].weight]
    grads = []
    for is_again in (False, True):
        with compute_context(torch.float32, device):
            y = (
                checkpoint(model, x, use_reentrant=False, context_fn=contexts)
                if is_again
                else model(x)
            )
        with backward_context(torch.float32):
            grads.append(torch.autograd.grad(y.square().sum(), leaves))
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))
