"""Bytes of one rank and its host: predicted from a trace on a single device, or measured on a real micro-batch.

The prediction for one rank is the trace itself. With FSDP over N ranks (of each replica) each rank holds

    weights      W / N + R + 2 L       W all, R those outside the layers, L the largest layer: R is gathered from the
                                       forward to the end of the backward, a layer while it runs, with the next one
    gradients    G / N + r + 2 l       the same of the trained parameters, until they are reduced and scattered
    optimizer    2 G / N
    reference    G / N, or another model's W / N: gathered one layer at a time, while nothing else is allocated
    casts, activations, logits, temporary      as with one rank: they belong to the micro-batch
    loading      (W - R) / N + R       each rank reads its part of the layers, and the rest whole

Adapters in the layers, their gradients and their moments are whole on each rank. ``casts`` are not sharded either:
autocast keeps a copy of the whole weights for the backward; with activation checkpointing of one layer.

Measured are the bytes of the allocator at the peak: on a GPU torch's own peak; on a CPU the sum of torch's allocations
and frees, including the kernels' buffers, on top of what existed before. ``Ledger`` gives the live tensors by part.
Neither is the process's resident set, which on a CPU also has the allocator's fragments. Measuring drops gradients, and
leaves weights and optimizer state unchanged.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedConfig

from taut.methods.method import RunConfig
from taut.methods.reference import STREAM
from taut.models import architecture
from taut.plan.ledger import Ledger, Parts
from taut.plan.steps import Workload
from taut.plan.tracing import Kernels, Sizes, Traced, trace
from taut.run.setup import Built
from taut.train.checkpoint import CheckpointConfig
from taut.train.trainer import backward
from taut.types import Packed, Scores


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank."""

    parts: Parts
    """On the device, at the peak of a step."""
    loading: int
    """On the device, while the model is loaded."""
    staging: int
    """On the host: buffers of background checkpoints. Part of ``parts`` where the device is the host."""

    @property
    def peak(self) -> int:
        """Peak on the device, loading included."""
        return max(sum(self.parts.values()), self.loading)

    @property
    def is_loading(self) -> bool:
        """Whether loading has the peak."""
        return self.loading > sum(self.parts.values())


def footprint(
    traced: Traced, num_shards: int, *, stages: bool = False, is_host: bool = False
) -> Footprint:
    """The bytes of each rank, of as many as the weights are divided among. ``stages``: whether checkpoints are written
    in the background; ``is_host``: whether the device is the host itself.
    """
    weights, trained, whole = traced.weights, traced.trained, traced.adapters
    of_trained = whole / max(1, trained.all)

    def divided(size: int, share: float) -> int:
        """The bytes of a rank, where a ``share`` of them is whole on each."""
        return int(size * share + size * (1 - share) / num_shards)

    shares = {
        "weights": divided(weights.all, whole / weights.all) / weights.all,
        "gradients": divided(trained.all, of_trained) / max(1, trained.all),
    }
    parts = traced.parts(shares)
    parts["optimizer"] = divided(traced.optimizer, of_trained)
    is_copy = traced.reference == trained.all  # of what trains; else another model
    parts["reference"] = divided(traced.reference, of_trained if is_copy else 0.0)
    if num_shards > 1:
        gathered = trained._replace(all=trained.all - whole, layer=0 if whole else trained.layer)
        parts["weights"] = divided(parts["weights"], whole / weights.all) + _gathered(weights)
        parts["gradients"] = divided(parts["gradients"], of_trained) + _gathered(gathered)
    staging = divided(trained.all + traced.optimizer, of_trained) if stages else 0
    if is_host:
        parts["staging"] = staging
    return Footprint(parts, weights.rest + (weights.all - weights.rest) // num_shards, staging)


def stages(config: CheckpointConfig, num_steps: int | None) -> bool:
    """Whether a run allocates buffers for its checkpoints."""
    saves_between = config.every > 0 and (num_steps is None or config.every < num_steps)
    return config.background and (config.keep_best or saves_between)


def _gathered(sizes: Sizes) -> int:
    """The bytes of sharded parameters that are gathered at a time."""
    return min(sizes.rest + 2 * sizes.layer, sizes.all)


def device_memory(device: torch.device) -> int:
    """The memory of a GPU, or of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True)
class Prediction:
    """The memory of a micro-batch on each rank."""

    num_tokens: int
    traced: Traced
    footprint: Footprint

    @property
    def peak(self) -> int:
        """Peak bytes."""
        return self.footprint.peak


def predict(
    run: RunConfig,
    config: PreTrainedConfig,
    kernels: Kernels,
    packed: Packed,
    *,
    is_first: bool,
    num_shards: int = 1,
) -> Prediction:
    """Memory of one micro-batch, without checkpoint buffers. ``is_first``: no gradients exist before it.

    Raises ModelError where the model cannot run on fake tensors.
    """
    traced = trace(run, config, kernels, packed, is_first=is_first)
    return Prediction(packed.num_tokens, traced, footprint(traced, num_shards))


def predict_steps(
    run: RunConfig,
    config: PreTrainedConfig,
    kernels: Kernels,
    work: Workload,
    *,
    num_shards: int = 1,
) -> Prediction:
    """Memory of the first steps: of the micro-batch with the highest peak."""
    first, later = work.first, work.later
    cases = [] if later is None else [(later, False)]
    # a later micro-batch that is no smaller has the higher peak
    if later is None or later.num_tokens < first.num_tokens:
        cases.append((first, True))
    predictions = [
        predict(run, config, kernels, packed, is_first=is_first, num_shards=num_shards)
        for packed, is_first in cases
    ]
    return max(predictions, key=lambda prediction: prediction.peak)


# -- measurement


@dataclass(frozen=True)
class Measured:
    """One micro-batch, forward and backward."""

    bytes: int
    """Bytes of the allocator at the peak, with weights, gradients and optimizer state."""
    seconds: float
    """Duration without a profiler, after a warm-up."""


def measure(built: Built, packed: Packed, *, is_first: bool) -> Measured:
    """Run ``packed`` through a trainer. ``is_first``: without gradients before it."""
    trainer, model = built.trainer, built.scorer
    act = partial(_run, built, packed)
    model.train()
    act()  # warm-up
    if is_first:
        trainer.optimizer.zero_grad()
    began = time.perf_counter()
    act()
    if trainer.ranks.device.type == "cuda":
        torch.cuda.synchronize(trainer.ranks.device)
    seconds = time.perf_counter() - began
    if is_first:
        trainer.optimizer.zero_grad()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    others = [*tensors_of(trainer.optimizer), *_reference_tensors(built)]
    before = [*model.parameters(), *model.buffers(), *gradients, *others]
    peak = peak_bytes(act, before, trainer.ranks.device)
    trainer.optimizer.zero_grad()
    return Measured(peak, seconds)


def measured_parts(built: Built, packed: Packed, *, is_first: bool) -> Parts:
    """The live tensors by part at their peak, with the optimizer state."""
    trainer, model = built.trainer, built.scorer
    model.train()
    if not is_first:
        _run(built, packed)
    inner = model.get_submodule("model")
    vocabulary = architecture.head(inner).weight.shape[0] if architecture.has_head(inner) else None
    ledger = Ledger(
        {
            "reference": _reference_tensors(built),
            "optimizer": tensors_of(trainer.optimizer),
            "weights": [*model.parameters(), *model.buffers()],
            "gradients": [p.grad for p in model.parameters() if p.grad is not None],
        },
        vocabulary,
    )
    handles = ledger.watch_gradients(model.parameters())
    handles.append(model.register_forward_hook(lambda *_: ledger.end_forward()))
    try:
        with ledger:
            _run(built, packed)
    finally:
        for handle in handles:
            handle.remove()
    trainer.optimizer.zero_grad()
    return ledger.history().peak()


def _run(built: Built, packed: Packed) -> None:
    """Forward and backward, with placeholders for the roles' streams and the step's statistics."""
    loss = built.trainer.source.loss
    packed = replace(packed, streams={STREAM: packed.weight_N, **packed.streams})
    if loss.observes:
        nothing_N = torch.zeros(packed.num_targets, dtype=torch.float64)
        scores = Scores(nothing_N, nothing_N, scalar_R=torch.zeros(packed.num_reads))
        packed = replace(packed, stats=loss.statistics(loss.observe(scores, packed)))
    packed = packed.to(built.trainer.ranks.device)
    backward(built.trainer, packed, dict.fromkeys(loss.units, 1.0), 1)


def _reference_tensors(built: Built) -> list[Tensor]:
    """The tensors of a reference. One whose logprobs are in a file is freed before the first step."""
    if built.run.models().reference_file is not None:
        return []
    return [tensor for role in built.trainer.roles for tensor in role.tensors()]


def tensors_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The optimizer's state."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, Tensor)]


def peak_bytes(act: Callable[[], object], before: Iterable[Tensor], device: torch.device) -> int:
    """The allocator's bytes at the peak of ``act``. ``before``: the tensors that exist before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        act()
        return torch.cuda.max_memory_allocated(device)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in before}
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler's message on stderr
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiled:
        act()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    now = peak = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return sum(storages.values()) + peak
