"""What one micro-batch of a built run really holds and takes, to be held against a prediction.

``bytes`` is what the allocator handed out at the fullest moment: on a GPU torch's own peak; on a CPU the sum of all
that torch's allocator gave and took back, kernels' buffers included, on top of what was there. ``parts`` are the live
tensors (``Ledger``). Neither is the process's resident set, which on a CPU has the allocator's fragments too.

Gradients are added to and then dropped, weights and optimizer state stay as they are. Imports build and below. The
package's users import it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from taut.build import Built
from taut.estimate.ledger import Ledger, Parts
from taut.loop import Job, backward
from taut.models import anatomy
from taut.types import Packed


@dataclass(frozen=True)
class Measured:
    """One micro-batch, forward and backward."""

    bytes: int
    """Handed out by the allocator at the fullest moment; weights, gradients and optimizer state included."""
    parts: Parts
    """Of the live tensors at their fullest moment, optimizer state included."""
    seconds: float
    """The fastest of the repetitions."""


def measure(
    built: Built,
    packed: Packed,
    *,
    is_first: bool,
    repeats: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:
    """Run ``packed`` through a job. ``is_first``: with no gradient there before it."""
    job, model = built.job, built.scorer
    optimizer = tensors_of(job.optimizer)

    def act() -> None:
        backward(job, packed, dict.fromkeys(job.method.loss.units, 1.0), 1)

    model.train()
    act()  # what is made once is made now
    if is_first:
        job.optimizer.zero_grad()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    here = [*model.parameters(), *model.buffers(), *optimizer, *gradients]
    del gradients
    most = peak_bytes(act, here, job.ranks.device)
    del here
    if is_first:
        job.optimizer.zero_grad()
    parts = _parts(job, model, act, optimizer)
    seconds = min(_timed(act, job.ranks.device, clock) for _ in range(repeats))
    job.optimizer.zero_grad()
    return Measured(most, parts, seconds)


def tensors_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The optimizer's state."""
    return [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]


def peak_bytes(act: Callable[[], object], here: Iterable[Tensor], device: torch.device) -> int:
    """What the allocator has handed out at the fullest moment of ``act``. ``here``: what is there before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        act()
        return torch.cuda.max_memory_allocated(device)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in here}
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler announces itself on stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        act()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    now = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return sum(storages.values()) + most


def _parts(job: Job, model: nn.Module, act: Callable[[], object], optimizer: list[Tensor]) -> Parts:
    """What the live tensors are at their fullest moment."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    known: dict[str, Iterable[Tensor]] = {
        "weights": [*model.parameters(), *model.buffers()],
        "gradients": gradients,
        "optimizer": optimizer,
    }
    vocabulary = anatomy.head(model.get_submodule("model")).weight.shape[0]
    ledger = Ledger(known, vocabulary)
    del gradients, known
    handles = ledger.watch_gradients(model.parameters())
    handles.append(model.register_forward_hook(lambda *_: ledger.end_forward()))
    try:
        with ledger:
            act()
    finally:
        for handle in handles:
            handle.remove()
    return ledger.history().peak()


def _timed(act: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    began = clock()
    act()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - began
