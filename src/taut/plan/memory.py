"""Bytes of one rank and its host: predicted from a trace on a single device, or measured on a real micro-batch.

The prediction for one rank is the trace itself. With FSDP over N ranks (of each replica) each rank holds

    weights      W / N + R + 3 L       W all, R those outside the layers, L the largest layer: R is gathered from the
                                       forward to the end of the backward, a layer while it runs, with the next one and
                                       the buffer that it arrives in
    gradients    G / N + r + 3 l + f   the same of the trained parameters, until they are reduced and scattered; f a
                                       layer's in float32, which are summed
    optimizer    2 G / N               as the run's optimizer stores it
    critic       as weights, with gradients and moments of its own
    reference    G / N, or another model as weights
    teacher      as weights; of the model as its own teacher, as a reference
    rewards      W                     reward models in this process, a copy on each rank
    casts, activations, logits, temporary      as with one rank: they belong to the micro-batch
    loading      (W - R) / N + R       each rank reads its part of the layers, and the rest whole

With parallel.cpu_offload what is divided by N is on the host, and the rest on the device; on one rank too.

What is gathered (R, L, r, l) counts in the dtype of the products. Adapters in the layers, routers and scalar heads,
their gradients and their moments are whole on each rank. ``casts`` are one device's: autocast keeps a copy of the whole
weights for the backward; with activation checkpointing of one layer. Ranks compute by the weights that they gather.

Measured are the bytes of the allocator at the peak: on a GPU torch's own peak; on a CPU the sum of torch's allocations
and frees, including the kernels' buffers, on top of what existed before. ``Allocations`` gives the live tensors by
part. Neither is the process's resident set, which on a CPU also has the allocator's fragments. Measuring drops
gradients, and leaves weights and optimizer state unchanged.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedConfig

from taut.evals.round_trip import WHOLE
from taut.methods.inputs import Inputs
from taut.methods.method import RunConfig
from taut.methods.settings import STREAM
from taut.models import architecture
from taut.models.quantized.frozen_storage import host_memory
from taut.models.scorer import MIN_CHUNK_ROWS, chunk_elements
from taut.plan.allocations import Allocations, Parts
from taut.plan.models import (
    REFERENCE,
    TEACHER,
    Kernels,
    ModelFootprint,
    Sizes,
    computed_together,
    rank_of,
)
from taut.plan.rollouts import Rollout, rollout_of, scoring_of
from taut.plan.tracing import Traced, known_parts, trace
from taut.plan.workload import Workload
from taut.run.setup import Built
from taut.train.distributed import UNDIVIDED, local
from taut.train.settings import CheckpointConfig, ParallelConfig
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
    offloaded: int = 0
    """On the host: activations, and with parallel.cpu_offload what a rank has of weights, gradients and moments."""
    reading: int = 0
    """On the host: what a rank reads before it is on the device. 0 where the device is the host."""
    saving: int = 0
    """On the host of the first rank, while the run's result is written and compared with what was trained."""
    ending: int = 0
    """On the device while the result is saved: what training holds, and ``saving`` where the device is the host."""
    generating: int = 0
    """On the device while completions are generated in this process; 0: there are none."""
    scoring: int = 0
    """On the device while reward models and teachers score them; 0: there are none."""

    @property
    def step(self) -> int:
        """Peak on the device in a step."""
        return sum(self.parts.values())

    @property
    def around(self) -> int:
        """Peak on the device around the steps: loading, generating, scoring, saving."""
        return max(self.loading, self.generating, self.scoring, self.ending)

    @property
    def peak(self) -> int:
        """Peak on the device."""
        return max(self.step, self.around)


def footprint(
    traced: Traced,
    num_ranks: int,
    parallel: ParallelConfig = UNDIVIDED,
    *,
    stages: bool = False,
    is_host: bool = False,
    merges: bool = True,
    rollout: Rollout | None = None,
    scoring: int = 0,
) -> Footprint:
    """The bytes of each rank; of ranks that compute together, with the activations of whole layers. ``stages``: whether
    checkpoints are written in the background; ``is_host``: whether the device is the host itself; ``merges``: whether
    the whole model is saved, and not its adapter alone.
    """
    num_shards, offloads = num_ranks // parallel.replicas, parallel.cpu_offload
    models = [computed_together(model, parallel.tensor) for model in traced.models]
    # what a rank owns of each part, and the share that is of the traced whole
    every = _own(models, num_shards)
    own = _own(models, None) if offloads else every
    # what of a part is on one rank, by what the trace has of it
    traced_models = traced.models
    full = {m.part: sum(o.counted for o in traced_models if o.part == m.part) for m in models}
    full["gradients"] = sum(m.gradients.all + m.whole.trained for m in traced_models)
    shares = {part: own[part] / max(1, full[part]) for part in full}
    parts = traced.parts(shares)
    for part, share in shares.items():
        parts[part] = int(parts[part] * share)
    parts["optimizer"] = own["optimizer"]
    # what ranks gather for a layer, and the gradients that they reduce
    gathered = others = 0
    if num_ranks > 1 or offloads:
        gathered = _at_a_time(models[0].gathered)
        others = max(_at_a_time(model.gathered) for model in models if model.is_divided)
        for model in models:
            if model.is_divided:
                parts[model.part] += _at_a_time(model.gathered)
                parts["gradients"] += _at_a_time(model.gradients)
                if model.gradients.layer:  # a layer's gradients, summed at a time
                    parts["gradients"] += model.trained.layer
    # copies for checkpoints, loading and saving
    staging = every["gradients"] + every["optimizer"] if stages else 0
    if is_host:
        parts["staging"] = staging
    own_parts = {model.part for model in models}
    held = sum(own[part] for part in own_parts) + own["optimizer"]
    saved = saving(traced.policy, merges=merges)
    loading = _loading(models, num_shards)
    if offloads:  # what is outside the layers is divided on the device
        loading = sum(_of_rank(m, None) + m.weights.rest * m.is_divided for m in models)
    # on the host, what a rank reads of a model; of one that is quantized on the way, a layer
    reading = 0
    for model in () if is_host else models:
        is_quantized = 2 * model.weights.all < 3 * model.num_parameters
        reading = max(reading, 4 * model.group if is_quantized else _read(model, num_shards))
    return Footprint(
        parts=parts,
        loading=loading,
        staging=staging,
        offloaded=traced.offloaded + sum(every.values()) - sum(own.values()),
        reading=reading,
        saving=saved,
        ending=held + saved if is_host else held,
        generating=0 if rollout is None else held + rollout.bytes + gathered,
        scoring=held + scoring + others if scoring else 0,
    )


def saving(policy: ModelFootprint, *, merges: bool) -> int:
    """The bytes on the host of the first rank while a run's result is saved. The model is written a layer at a time
    (whole, merged and in the dtype of the file), and then read and compared: whole in float32 if it is small, else what
    stands outside its layers, and a layer that is compared with the merged one. Adapters are compared on the base as
    training stores it, in the same way. A GPU with room takes what is read.
    """
    whole, at_a_time = 4 * policy.num_parameters, 4 * policy.group
    is_whole = whole <= WHOLE
    base = policy.weights.all if is_whole else policy.weights.rest + 2 * at_a_time
    if not merges:
        return base
    read = whole if is_whole else 4 * policy.num_outside
    return max(read + 3 * at_a_time, base)


def _own(models: Sequence[ModelFootprint], num_shards: int | None) -> Parts:
    """The bytes of a rank's own parts; without ``num_shards``, only of what every rank has whole."""
    own = {
        part: sum(_of_rank(model, num_shards) for model in models if model.part == part)
        for part in {model.part for model in models}
    }
    own["gradients"] = sum(rank_of(m.trained.all, m.whole.trained, num_shards) for m in models)
    own["optimizer"] = sum(rank_of(m.optimizer, m.whole.optimizer, num_shards) for m in models)
    return own


def _at_a_time(sizes: Sizes) -> int:
    """The bytes of what is gathered that exist at a time: all outside the layers, a layer that runs, the next one, and
    the buffer that this one arrives in.
    """
    return min(sizes.rest + 3 * sizes.layer, sizes.all + sizes.layer)


def _of_rank(model: ModelFootprint, num_shards: int | None) -> int:
    """The bytes of a rank's own part of a model's weights; without ``num_shards``, of what every rank has whole."""
    if not model.is_divided:
        return model.weights.all
    return rank_of(model.weights.all, model.whole.weights, num_shards)


def _read(model: ModelFootprint, num_shards: int) -> int:
    """The bytes that a rank reads of a model."""
    rest = model.weights.rest if model.is_divided else model.weights.all
    return rest + (model.weights.all - rest) // num_shards


def _loading(models: Sequence[ModelFootprint], num_shards: int) -> int:
    """The most that is in memory while models are read one after the other: of those that train, each rank reads its
    part of the layers and all that is outside them, which is divided once all of these are there.
    """
    first = [model for model in models if not model.is_apart]
    most = sum(_read(model, num_shards) for model in first)
    here = sum(_of_rank(model, num_shards) for model in first)
    for model in models:
        if model not in first:
            most = max(most, here + _read(model, num_shards))
            here += _of_rank(model, num_shards)
    return most


def coarse_bound(
    run: RunConfig, inputs: Inputs, model: nn.Module, device: torch.device, dtype: torch.dtype
) -> int | None:
    """Bytes that a step cannot exceed: inputs and outputs of linear layers kept twice in ``dtype`` (of what trains),
    all weights with gradients and moments, a reference, and the head's chunk.

    None if much of the model is not in linear layers (stacked experts), there is a vision tower, or another model than
    the policy and a copy of it.
    """
    others = run.models()
    is_other = others.reference is not None and others.reference.model is not None
    if others.teacher is not None or others.critic is not None or is_other:
        return None
    if architecture.takes_pictures(inputs.config):
        return None
    table = architecture.stored_table(architecture.embedding(model))
    assert table is not None, "an embedding has a weight"
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_linear = sum(module.weight.numel() for module in linear)
    if num_linear < 0.5 * (num_parameters - table.numel()):
        return None
    # activations, weights and the head, each at its largest
    tokens = max(run.batch.tokens_per_microbatch, inputs.longest)
    width = sum(module.in_features + module.out_features for module in linear)
    weights = 5 * num_parameters  # as they are, gradients, two moments, autocast's copies
    head = 0
    if architecture.has_head(model):
        head = 4 * max(chunk_elements(device, dtype), MIN_CHUNK_ROWS * table.shape[0])
    values = 2 * tokens * width + weights + head
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return dtype.itemsize * values + trained * others.has_live_reference


def stages(config: CheckpointConfig, num_steps: int | None) -> bool:
    """Whether a run allocates buffers for its checkpoints."""
    return config.background and (config.keep_best or config.saves_before(num_steps))


def device_memory(device: torch.device) -> int:
    """The memory of a GPU, or of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_memory()


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


def needs(
    run: RunConfig,
    config: PreTrainedConfig,
    kernels: Kernels,
    work: Workload,
    *,
    num_ranks: int = 1,
    packed: Packed | None = None,
) -> Footprint:
    """Predict the memory that a configuration takes of each rank: loading, generating, scoring, the largest of its
    first steps, saving. ``packed``: instead a step of this micro-batch. Raises ModelError for a model that cannot run
    on fake tensors.
    """
    if packed is None:
        prediction = predict_steps(run, config, kernels, work, num_ranks=num_ranks)
    else:
        is_first = work.later is None
        prediction = predict(run, config, kernels, packed, is_first=is_first, num_ranks=num_ranks)
    rollout = rollout_of(run, config, kernels, work.supply, num_ranks)
    scoring = scoring_of(run, kernels, work.supply, num_ranks)
    return footprint_of(run, prediction.traced, kernels, num_ranks, rollout, scoring)


def footprint_of(
    run: RunConfig,
    traced: Traced,
    kernels: Kernels,
    num_ranks: int,
    rollout: Rollout | None = None,
    scoring: int = 0,
    num_steps: int | None = None,
) -> Footprint:
    """The bytes of each rank of a run. ``scoring``: see ``scoring_of``; ``num_steps``: of a run, if known."""
    return footprint(
        traced,
        num_ranks,
        run.parallel,
        stages=stages(run.checkpoint, num_steps or run.steps),
        is_host=kernels.device.type == "cpu",
        merges=run.save.merged,
        rollout=rollout,
        scoring=scoring,
    )


def predict(
    run: RunConfig,
    config: PreTrainedConfig,
    kernels: Kernels,
    packed: Packed,
    *,
    is_first: bool,
    num_ranks: int = 1,
) -> Prediction:
    """Memory of one micro-batch, without checkpoint buffers. ``is_first``: no gradients exist before it.

    Raises ModelError where the model cannot run on fake tensors.
    """
    offloads = run.parallel.cpu_offload
    kernels = kernels._replace(is_sharded=num_ranks > 1 or offloads)
    traced = trace(run, config, kernels, packed, is_first=is_first)
    needed = footprint(traced, num_ranks, run.parallel)
    return Prediction(packed.num_tokens, traced, needed)


def predict_steps(
    run: RunConfig,
    config: PreTrainedConfig,
    kernels: Kernels,
    work: Workload,
    *,
    num_ranks: int = 1,
) -> Prediction:
    """Memory of the first steps: of the micro-batch with the highest peak."""
    first, later = work.first, work.later
    cases = [] if later is None else [(later, False)]
    # a later micro-batch that is no smaller has the higher peak
    if later is None or later.num_tokens < first.num_tokens:
        cases.append((first, True))
    predictions = [
        predict(run, config, kernels, packed, is_first=is_first, num_ranks=num_ranks)
        for packed, is_first in cases
    ]
    return max(predictions, key=lambda prediction: prediction.peak)


# -- measurement


@dataclass(frozen=True)
class Measured:
    """Memory and time of one micro-batch, forward and backward."""

    bytes: int
    """Bytes of the allocator at the peak, with weights, gradients and optimizer state."""
    seconds: float
    """Duration without a profiler, after a warm-up."""


def measure(built: Built, packed: Packed, *, is_first: bool) -> Measured:
    """Run ``packed`` through a trainer. ``is_first``: without gradients before it."""
    trainer, model = built.trainer, built.scorer
    act = partial(_run, built, packed)
    model.train()
    # time, without a profiler
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
    # then memory
    before = held_tensors(built)
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
    apart, known = _apart(built), known_parts(model)
    # what exists before is known by part; the rest is told by its allocation
    known[TEACHER] = [*known[TEACHER], *apart.pop(TEACHER)]
    allocations = Allocations(
        {**apart, "optimizer": tensors_of(trainer.optimizer), **known}, vocabulary
    )
    handles = allocations.watch_gradients(model.parameters())
    handles.append(model.register_forward_hook(lambda *_: allocations.end_forward()))
    try:
        with allocations:
            _run(built, packed)
    finally:
        for handle in handles:
            handle.remove()
    trainer.optimizer.zero_grad()
    return allocations.history().peak()


def _run(built: Built, packed: Packed) -> None:
    """Forward and backward, with placeholders for the roles' streams and the step's statistics."""
    loss = built.trainer.source.loss
    packed = replace(packed, streams={STREAM: packed.weight_N, **packed.streams})
    if loss.observes:
        nothing_N = torch.zeros(packed.num_targets, dtype=torch.float64)
        scores = Scores(nothing_N, nothing_N, scalar_R=torch.zeros(packed.num_reads))
        packed = replace(packed, stats=loss.statistics(loss.observe(scores, packed)))
    packed = packed.to(built.trainer.ranks.device)
    routers = built.scorer.routers
    slope_LE = None if routers is None else torch.zeros(routers.shape, device=packed.ids_T.device)
    backward(built.trainer, packed, dict.fromkeys(loss.units, 1.0), 1, slope_LE)


def held_tensors(built: Built) -> list[Tensor]:
    """Tensors that a run holds before a micro-batch: models, gradients, moments."""
    known, apart = known_parts(built.scorer).values(), _apart(built).values()
    return [*itertools.chain(*known, *apart), *tensors_of(built.trainer.optimizer)]


def _apart(built: Built) -> dict[str, list[Tensor]]:
    """Part -> the tensors of a reference, and of teachers that score completions. A reference whose logprobs are in a
    file is freed before the first step.
    """
    own = built.models.self_teacher
    roles = [role for role in built.trainer.roles if role is not own]
    if built.run.models().reference_file is not None:
        roles = []
    teachers: list[Tensor] = [] if own is None else own.tensors()
    for scorer in built.models.teachers.values():
        teachers = [*teachers, *scorer.parameters()]
    return {
        REFERENCE: [tensor for role in roles for tensor in role.tensors()],
        TEACHER: teachers,
    }


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
    # on a CPU: what existed, and the sum of allocations and frees
    own = [local(tensor).untyped_storage() for tensor in before]
    storages = {storage.data_ptr(): storage.nbytes() for storage in own}
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler's message on stderr
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiled:
        act()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    now = peak = 0
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):  # several threads allocate
        now += event.nbytes()
        peak = max(peak, now)
    return sum(storages.values()) + peak
