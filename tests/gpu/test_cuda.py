"""What only a GPU can show: the kernels' own alignment, backward, and a run from end to end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.chat_runs import chats, column, save_model, sft, write_rows
from tests.unit.attention.test_backends import FLAT, TREE, dense
from torch import Tensor

from taut.attention import kernels
from taut.attention.layout import Call, Layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")


def drawn(dtype: torch.dtype) -> list[Tensor]:
    """q [1, 4, 20, 16], k and v [1, 2, 20, 16]."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 4, 20, 16), (1, 2, 20, 16), (1, 2, 20, 16)]
    return [
        torch.randn(shape, generator=generator).to(CUDA, dtype).requires_grad_() for shape in shapes
    ]


def gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
    return list(torch.autograd.grad((out.float() * weights).sum(), inputs))


def compare(inputs: list[Tensor], out: Tensor, reach: object, call: Call, atol: float) -> None:
    """Against the dense softmax in float64 on the CPU, forward and backward."""
    exact = [x.detach().double().cpu().requires_grad_() for x in inputs]
    sinks = None if call.sinks is None else call.sinks.double().cpu()
    expected = dense(*exact, Layout(reach), Call(call.scale, call.window, call.softcap, sinks))
    torch.testing.assert_close(out.double().cpu(), expected, rtol=0, atol=atol)
    for found, wanted in zip(gradients(out, inputs), gradients(expected, exact), strict=True):
        torch.testing.assert_close(found.double().cpu(), wanted, rtol=0, atol=4 * atol)


@pytest.mark.parametrize("reach", [TREE, FLAT], ids=["tree", "flat"])
@pytest.mark.parametrize("window", [None, 1, 4])
def test_varlen_is_causal_from_the_bottom_right(reach: object, window: int | None) -> None:
    inputs, call = drawn(torch.bfloat16), Call(0.3, window=window)
    out = kernels.varlen(*inputs, Layout(reach, device=CUDA), call)
    compare(inputs, out, reach, call, atol=2e-2)


@pytest.mark.parametrize("reach", [TREE, FLAT], ids=["tree", "flat"])
@pytest.mark.parametrize("kind", ["plain", "window", "softcap", "sinks"])
def test_flex_forward_and_backward(reach: object, kind: str) -> None:
    sinks = torch.linspace(-1, 1, 4, device=CUDA)
    call = {
        "plain": Call(0.3),
        "window": Call(0.3, window=4),
        "softcap": Call(0.3, softcap=2.0),
        "sinks": Call(0.3, sinks=sinks),
    }[kind]
    inputs = drawn(torch.float32)
    out = kernels.flex(*inputs, Layout(reach, device=CUDA), call)
    compare(inputs, out, reach, call, atol=5e-3)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 3e-2), ("float32", 2e-3)])
def test_a_run_gives_the_losses_of_the_cpu(tmp_path: Path, dtype: str, tolerance: float) -> None:
    model = save_model(tmp_path / "model", "llama")
    train = write_rows(tmp_path / "train.jsonl", chats(24))
    on_cpu = sft(model, train, tmp_path / "cpu", steps=4, dtype="float32")
    on_gpu = sft(model, train, tmp_path / "gpu", steps=4, dtype=dtype, device="cuda")
    expected = column(on_cpu.out, "loss")
    assert column(on_gpu.out, "loss") == pytest.approx(expected, rel=tolerance)
