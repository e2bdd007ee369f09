"""What the tests of this folder call where the stand-in is: small programs, and faults for a run (``Case.before``)."""

from __future__ import annotations

import gc
from typing import Any

import torch
from tests.cuda_stand_in import torch_cuda
from tests.cuda_stand_in.device import CUDA, Device, active


def arithmetic() -> dict[str, Any]:
    """A product with its gradient, in bfloat16 by autocast."""
    torch_cuda.install(has_numbers=True)
    torch.manual_seed(0)
    left, right = torch.randn(64, 64), torch.randn(64, 64)

    def work(device: str) -> tuple[Any, Any, str]:
        x = left.clone().to(device).requires_grad_()
        with torch.autocast(device, dtype=torch.bfloat16):
            y = x @ right.to(device)
        y.float().square().sum().backward()
        assert x.grad is not None
        return y.tolist(), x.grad.tolist(), str(y.device)

    expected = work("cpu")
    device = Device()
    with active(device):
        product, gradient, there = work("cuda")
    gc.collect()
    return {
        "product": product,
        "product of the CPU": expected[0],
        "gradient": gradient,
        "gradient of the CPU": expected[1],
        "device": there,
        "allocated": device.allocated,
        "peak": device.peak,
        "kernels": dict(device.kernels),
    }


def transfers() -> dict[str, list[str]]:
    """One way after another to move or read something -> what was noted."""
    torch_cuda.install(has_numbers=True)
    device, found = Device(), {}
    with active(device):
        x = torch.arange(4.0, device=CUDA)
        host = torch.ones(4)
        pinned = torch.ones(4).pin_memory()
        ways = {
            "x.cuda(), not pinned": lambda: host.cuda(),
            "non_blocking, not pinned": lambda: host.to(CUDA, non_blocking=True),
            "non_blocking, pinned": lambda: pinned.to(CUDA, non_blocking=True),
            "item": lambda: x[1].item(),
            "tolist": lambda: x.tolist(),
            "nonzero": lambda: x.nonzero(),
            "x[mask]": lambda: x[x > 1],
            "x[mask] = 0": lambda: x.clone().__setitem__(x > 1, 0.0),
            "x[[0, 1]]": lambda: x[[0, 1]],
            "x[indices on the host]": lambda: x[torch.tensor([0, 1])],
            "torch.tensor([x[0], x[1]])": lambda: torch.tensor([x[0], x[1]]),
            "sum": lambda: x.sum(),
        }
        for name, act in ways.items():
            device.notes.clear()
            act()
            noted = device.notes.elements()
            found[name] = [f"{note.kind}: {note.what}" for note in noted]
    return found


def mixed_devices() -> None:
    """The device's and the host's numbers in one sum."""
    torch_cuda.install(has_numbers=True)
    with active(Device()):
        torch.ones(3, device=CUDA) + torch.ones(3)


def not_deterministic() -> None:
    """A cumulative sum of floats."""
    torch_cuda.install(has_numbers=True)
    torch.use_deterministic_algorithms(mode=True)
    with active(Device()):
        assert torch.ones(3, device=CUDA, dtype=torch.int64).cumsum(0).tolist() == [1, 2, 3]
        torch.ones(3, device=CUDA).cumsum(0)


def numpy_of_the_device() -> None:
    """NumPy's view of the device's memory."""
    torch_cuda.install(has_numbers=True)
    with active(Device()):
        torch.ones(3, device=CUDA).numpy()


# -- faults of a run


def item_in_the_loop() -> None:
    """The gradient norm is read in each step."""
    from taut.train import optim

    clip = optim.clip

    def clip_and_read(*args: Any, **keywords: Any) -> Any:
        norms = clip(*args, **keywords)
        for norm in torch.utils._pytree.tree_leaves(norms):
            if isinstance(norm, torch.Tensor):
                norm.reshape(-1)[0].item()
                break
        return norms

    optim.clip = clip_and_read


def no_compiler() -> None:
    """Flex attention cannot be compiled."""
    from taut.attention import flex
    from taut.models import attention_backends

    def kernel(device_type: str) -> Any:
        raise RuntimeError("planted: no C compiler")

    flex._kernel = kernel  # type: ignore[assignment]
    attention_backends.BACKENDS["flex"] = flex.attend
