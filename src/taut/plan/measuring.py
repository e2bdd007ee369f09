"""Bytes on one device, and on its host, from what a micro-batch was seen to hold on one that has the whole model.

With one rank that is all there is. FSDP over N ranks leaves each

    weights      W / N + R + 2 L       W all, R those outside the layers, L the largest layer: R stays whole from the
                                       forward to the end of the backward, a layer while it runs, the next one beside it
    gradients    G / N + r + 2 l       the same of what trains, until they are reduced and scattered
    optimizer    2 G / N
    reference    G / N, or another model's W / N: it is whole a layer at a time, while nothing else is there
    casts, activations, logits, temporary      as with one rank: they belong to the micro-batch

``casts`` too: what autocast keeps for the backward is a copy of the whole weights, which nobody shards; with
activation checkpointing it is one layer's. Before it is sharded each rank holds the whole model (``loading``).

Imports tracing and checkpoint. The package, its command and its checks import it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from taut.losses import Loss
from taut.methods.reference import STREAM
from taut.models import architecture
from taut.plan.footprint import Ledger, Parts
from taut.plan.tracing import Sizes, Traced
from taut.run.setup import Built
from taut.train.checkpoint import CheckpointConfig
from taut.train.trainer import backward
from taut.types import Packed, Scores


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank."""

    parts: Parts
    """On the device, at the fullest moment of a step."""
    loading: int
    """On the device, while the model is loaded."""
    staging: int
    """On the host: buffers for checkpoints that are written in the background. Among ``parts`` where host and device
    are one."""

    @property
    def peak(self) -> int:
        """On the device, at the fullest moment of all."""
        return max(sum(self.parts.values()), self.loading)

    @property
    def is_loading(self) -> bool:
        """Whether loading is the fullest moment."""
        return self.loading > sum(self.parts.values())


def footprint(
    traced: Traced, num_ranks: int, *, stages: bool = False, is_host: bool = False
) -> Footprint:
    """What each of ``num_ranks`` holds. ``stages``: whether checkpoints are written in the background; ``is_host``:
    whether the device is the host itself."""
    shares = dict.fromkeys(("weights", "gradients"), 1 / num_ranks)
    parts = traced.parts(shares)
    parts["optimizer"] = traced.optimizer // num_ranks
    parts["reference"] = traced.reference // num_ranks
    if num_ranks > 1:
        parts["weights"] = parts["weights"] // num_ranks + _whole(traced.weights)
        parts["gradients"] = parts["gradients"] // num_ranks + _whole(traced.trained)
    staging = (traced.trained.all + traced.optimizer) // num_ranks if stages else 0
    if is_host:
        parts["staging"] = staging
    return Footprint(parts, traced.weights.all, staging)


def stages(config: CheckpointConfig, num_steps: int | None) -> bool:
    """Whether a run has buffers for its checkpoints."""
    is_under_way = config.keep_best or (
        config.every > 0 and (num_steps is None or config.every < num_steps)
    )
    return config.background and is_under_way


def _whole(sizes: Sizes) -> int:
    """What of sharded parameters is whole at a time."""
    return min(sizes.rest + 2 * sizes.layer, sizes.all)


def device_memory(device: torch.device) -> int:
    """Bytes that a device has: a GPU's, or all of the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# --------------------------------------------------------------------------------------------------
# What one micro-batch of a built run really holds and takes, to be held against a prediction.
#
# ``bytes`` is what the allocator handed out at the fullest moment: on a GPU torch's own peak; on a CPU the sum of all
# that torch's allocator gave and took back, kernels' buffers included, on top of what was there. ``parts`` are the
# live tensors (``Ledger``). Neither is the process's resident set, which on a CPU has the allocator's fragments too.
#
# Gradients are added to and then dropped, weights and optimizer state stay as they are. Imports build and below. The
# package's users import it.


@dataclass(frozen=True)
class Measured:
    """One micro-batch, forward and backward."""

    bytes: int
    """Handed out by the allocator at the fullest moment; weights, gradients and optimizer state included."""
    seconds: float
    """Without a profiler, once everything that is made once has been made."""


def measure(built: Built, packed: Packed, *, is_first: bool) -> Measured:
    """Run ``packed`` through a job. ``is_first``: with no gradient there before it."""
    job, model = built.job, built.scorer
    act = partial(_act, built, packed)
    model.train()
    act()  # what is made once is made now
    if is_first:
        job.optimizer.zero_grad()
    began = time.perf_counter()
    act()
    if job.ranks.device.type == "cuda":
        torch.cuda.synchronize(job.ranks.device)
    seconds = time.perf_counter() - began
    if is_first:
        job.optimizer.zero_grad()
    most = peak_bytes(act, _there(built), job.ranks.device)
    job.optimizer.zero_grad()
    return Measured(most, seconds)


def measured_parts(built: Built, packed: Packed, *, is_first: bool) -> Parts:
    """What the live tensors are at their fullest moment, optimizer state included."""
    job, model = built.job, built.scorer
    model.train()
    if not is_first:
        _act(built, packed)
    held = {"reference": _beside(built), "optimizer": tensors_of(job.optimizer)}
    parts = _parts(model, partial(_act, built, packed), held)
    job.optimizer.zero_grad()
    return parts


def _act(built: Built, packed: Packed) -> None:
    job = built.job
    backward(job, _told(job.method.loss, packed), dict.fromkeys(job.method.loss.units, 1.0), 1)


def _told(loss: Loss, packed: Packed) -> Packed:
    """A micro-batch with something in the place of what roles and a step's statistics say."""
    packed = replace(packed, streams={STREAM: packed.weight_N, **packed.streams})
    if not loss.observes:
        return packed
    nothing_N = torch.zeros(packed.num_targets, dtype=torch.float64)
    scores = Scores(nothing_N, nothing_N, scalar_R=torch.zeros(packed.num_reads))
    return replace(packed, stats=loss.statistics(loss.observe(scores, packed)))


def _there(built: Built) -> list[Tensor]:
    """The tensors that are there before a micro-batch."""
    model = built.scorer
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    state = tensors_of(built.job.optimizer)
    return [*model.parameters(), *model.buffers(), *state, *gradients, *_beside(built)]


def _beside(built: Built) -> list[Tensor]:
    """What a reference holds. One that is kept in a file is gone before the first step."""
    if built.run.models().reference_file is not None:
        return []
    return [tensor for role in built.job.roles for tensor in role.tensors()]


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


def _parts(
    model: nn.Module, act: Callable[[], object], held: Mapping[str, Iterable[Tensor]]
) -> Parts:
    """What the live tensors are at their fullest moment."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    known: dict[str, Iterable[Tensor]] = {
        **held,
        "weights": [*model.parameters(), *model.buffers()],
        "gradients": gradients,
    }
    inner = model.get_submodule("model")
    vocabulary = architecture.head(inner).weight.shape[0] if architecture.has_head(inner) else None
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
