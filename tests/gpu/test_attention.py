"""Every attention backend on the device, forward and backward, against taut's own attention in float64 on the CPU.

An error is the largest difference over the largest value expected, or over 1 where that is smaller (a token that sees
itself alone has no gradient of q). Needs torch alone: neither transformers nor pydantic,
except for the test that holds the list of backends to the registry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import kernel_emulation
from torch import Tensor

from taut.attention import decode, flex, reference, varlen
from taut.attention.layout import Call, Layout
from taut.errors import AttentionError

BACKENDS = {"reference": reference.attend, "varlen": varlen.attend, "flex": flex.attend}
ERRORS = {
    ("reference", torch.float32): 1e-5,
    ("reference", torch.bfloat16): 2e-2,
    ("varlen", torch.bfloat16): 2e-2,
    ("varlen", torch.float16): 4e-3,
    ("flex", torch.float32): 5e-3,  # its products may be TF32
    ("flex", torch.bfloat16): 2e-2,
}
"""(backend, dtype) -> the largest error of the output; a gradient may have four times as much."""


@pytest.fixture(autouse=True)
def flash_everywhere() -> Iterator[None]:
    """FlashAttention's operators, also on the CPU."""
    with kernel_emulation.flash_on_cpu():
        yield


def reach_of(*ends: tuple[int, int]) -> np.ndarray:
    """(number of tokens, reach) of each run of tokens."""
    return np.concatenate([np.full(size, reach) for size, reach in ends])


LAYOUTS = {
    "tree": reach_of((5, 16), (3, 13), (2, 10), (3, 13), (3, 16), (4, 20)),
    "flat": reach_of((7, 7), (5, 12), (8, 20)),
    # segments longer than a kernel's block, and shorter, below a prompt that several blocks hold
    "long tree": reach_of((200, 640), (150, 430), (80, 430), (130, 560), (80, 640), (137, 777)),
    "long flat": reach_of((300, 300), (1, 301), (129, 430), (347, 777)),
}
CALLS = {
    "plain": Call(0.3),
    "window": Call(0.3, window=4),
    "long window": Call(0.3, window=140),
    "window of one": Call(0.3, window=1),
    "softcap": Call(0.3, softcap=2.0),
    "sinks": Call(0.3, sinks=torch.linspace(-1, 1, 4)),
    "window and sinks": Call(0.3, window=3, sinks=torch.linspace(-1, 1, 4)),
}
TAKEN = {"varlen": ("plain", "window", "long window", "window of one")}
"""What a backend computes, if not everything."""
CASES = [
    pytest.param(
        backend, dtype, call, layout, id=f"{backend}-{dtype}-{call}-{layout}".replace("torch.", "")
    )
    for backend, dtype in ERRORS
    for call in TAKEN.get(backend, tuple(CALLS))
    for layout in LAYOUTS
    if "tree" in layout or call in ("plain", "window")
]
ONCE = [case for case in CASES if case.values[3] == "long tree"]

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def heads(num_tokens: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    """q [1, 4, T, K], k and v [1, 2, T, K], on the CPU, with scores of about 1."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 4, num_tokens, size), (1, 2, num_tokens, size), (1, 2, num_tokens, size)]
    widths = [(16 / size) ** 0.25, (16 / size) ** 0.25, 1.0]
    return [
        (width * torch.randn(shape, generator=generator)).to(dtype)
        for width, shape in zip(widths, shapes, strict=True)
    ]


def attend(backend: str, inputs: list[Tensor], layout: Layout, call: Call) -> Tensor:
    """[1, 4, T, K] on the device of the layout."""
    if call.sinks is not None:
        call = replace(call, sinks=call.sinks.to(layout.device))
    return BACKENDS[backend](*inputs, layout, call)


def exact(inputs: list[Tensor], reach_T: np.ndarray, call: Call, **options: Any) -> Tensor:
    if call.sinks is not None:
        call = replace(call, sinks=call.sinks.double())
    return reference.attend(*inputs, Layout(reach_T, **options), call)


def gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=torch.float64)
    total = (out.double() * weights.view_as(out)).sum()
    return list(torch.autograd.grad(total, inputs))


def error(found: Tensor, expected: Tensor) -> float:
    assert found.isfinite().all()
    difference = (found.detach().double().cpu() - expected).abs().max()
    return float(difference / expected.abs().max().clamp(min=1))


@pytest.mark.parametrize(("backend", "dtype", "call", "layout"), ONCE)
def test_without_gradient(
    device: torch.device, backend: str, dtype: torch.dtype, call: str, layout: str
) -> None:
    reach_T = LAYOUTS[layout]
    inputs = heads(reach_T.size, 16, dtype)
    with torch.no_grad():
        on_device = [heads.to(device) for heads in inputs]
        out = attend(backend, on_device, Layout(reach_T, device=device), CALLS[call])
        expected = exact([heads.double() for heads in inputs], reach_T, CALLS[call])
    assert out.dtype == dtype
    assert error(out, expected) < ERRORS[backend, dtype]


@pytest.mark.parametrize(("backend", "dtype", "call", "layout"), CASES)
def test_forward_and_backward(
    device: torch.device, backend: str, dtype: torch.dtype, call: str, layout: str
) -> None:
    require_backward(device, backend)
    reach_T = LAYOUTS[layout]
    compare_gradients(device, backend, dtype, CALLS[call], reach_T)


@pytest.mark.parametrize("size", [64, 96, 128, 256])
@pytest.mark.parametrize("backend", list(BACKENDS))
def test_head_sizes(device: torch.device, backend: str, size: int) -> None:
    """Those of real models; forward and backward."""
    require_backward(device, backend)
    reach_T = LAYOUTS["long tree"]
    compare_gradients(device, backend, torch.bfloat16, CALLS["plain"], reach_T, size)


@pytest.mark.parametrize("backend", ["reference", "flex"])
def test_blocks_that_see_themselves_both_ways(device: torch.device, backend: str) -> None:
    require_backward(device, backend)
    reach_T = LAYOUTS["tree"]
    last_T = np.arange(20)
    last_T[1:4] = 3
    last_T[14:16] = 15
    for call in (CALLS["plain"], CALLS["window"]):
        compare_gradients(device, backend, torch.float32, call, reach_T, last_T=last_T)


@pytest.mark.parametrize("call", ["softcap", "sinks"])
def test_what_a_kernel_lacks_is_refused(device: torch.device, call: str) -> None:
    reach_T = LAYOUTS["flat"]
    inputs = [some.to(device) for some in heads(20, 16, torch.bfloat16)]
    with pytest.raises(AttentionError, match="set attention=flex"):
        attend("varlen", inputs, Layout(reach_T, device=device), CALLS[call])


def test_the_list_is_the_registry() -> None:
    registered = pytest.importorskip(
        "taut.models.attention_backends", reason="needs transformers", exc_type=ImportError
    )
    assert registered.BACKENDS == BACKENDS


def require_backward(device: torch.device, backend: str) -> None:
    if device.type == "cpu" and backend == "flex":
        pytest.skip("torch's flex kernel has no backward on a CPU")


def compare_gradients(
    device: torch.device,
    backend: str,
    dtype: torch.dtype,
    call: Call,
    reach_T: np.ndarray,
    size: int = 16,
    **options: Any,
) -> None:
    inputs = heads(reach_T.size, size, dtype)
    wide = [some.double().requires_grad_() for some in inputs]
    expected = exact(wide, reach_T, call, **options)
    on_device = [some.to(device).requires_grad_() for some in inputs]
    out = attend(backend, on_device, Layout(reach_T, device=device, **options), call)
    limit = ERRORS[backend, dtype]
    assert error(out, expected.detach()) < limit
    wanted = gradients(expected, wide)
    for name, found, other in zip("qkv", gradients(out, on_device), wanted, strict=True):
        assert error(found, other) < 4 * limit, name


@pytest.mark.parametrize("num_queries", [6, 1])
@pytest.mark.parametrize("has_hidden", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_decoding_step_over_some_keys(
    device: torch.device,
    dtype: torch.dtype,
    softcap: float | None,
    has_hidden: bool,
    num_queries: int,
) -> None:
    """Output and log-sum-exp of a rectangle, in autocast, over keys that are a part of a longer buffer. With one query
    FlashAttention may order the log-sum-exp of grouped heads otherwise.
    """
    query, key, value = heads(300, 64, dtype)
    query, kept = (
        query[:, :2, :num_queries].expand(3, -1, -1, -1),
        torch.cat([key, value, key]),
    )
    keys, values = kept[..., 20:, :], kept.flip(0)[..., 20:, :]
    hidden = torch.zeros(3, 1, 1, keys.shape[2], dtype=dtype)
    hidden[1, ..., :17] = -torch.inf
    call = Call(0.3, softcap=softcap)
    with torch.autocast(device.type, torch.bfloat16):
        moved = [some.to(device) for some in (query, kept, hidden)]
        on_device = moved[1][..., 20:, :], moved[1].flip(0)[..., 20:, :]
        out, lse = decode._part(moved[0], *on_device, call, moved[2] if has_hidden else None)
    scores = query.double() @ keys.double().mT * 0.3
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if has_hidden:
        scores += hidden.double()
    assert lse.dtype == torch.float32
    assert error(lse, scores.logsumexp(-1)) < (5e-3 if dtype == torch.float32 else 1e-4)
    assert error(out, scores.softmax(-1) @ values.double()) < 2e-2


def test_flex_is_compiled_once_for_micro_batches_of_any_size(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("flex is compiled on a GPU")
    torch._dynamo.reset()
    counter = torch._dynamo.utils.counters["stats"]
    counts = []
    for size in (300, 777, 1300, 513):
        reach_T = reach_of((size - 200, size), (100, size - 100), (100, size))
        inputs = [some.to(device) for some in heads(size, 64, torch.bfloat16)]
        layout = Layout(reach_T, device=device)
        for window in (None, 40, 130):
            flex.attend(*inputs, layout, Call(0.3, window=window))
        counts.append(counter["unique_graphs"])
    assert len(set(counts)) == 1
