"""Seconds of a step: measured on a few layers of the model's own shape, or from a GPU's data sheet.

    seconds = sum over micro-batches (a * F + b + c * N)  +  d * P

F: floating-point operations of the layers on the micro-batch (``architecture.flops``: tokens and visible pairs; one
more forward where layers are recomputed), N its targets, P the trained parameters. ``calibrate`` measures a on PROBED
layers with random weights and a small vocabulary, b and c on the embedding and the chunked head alone, at two numbers
of targets, d on an update of those layers; nothing is fitted to a whole model.

For a GPU that this machine lacks (``GPUS``) a micro-batch takes the longest of

    operations / (UTILIZATION * peak)       matrix products: of the layers and heads of all models
    bytes / bandwidth                       every weight cast and read, activations written and read, gradients written
    operators * LAUNCH                      each operator dispatched

so that a small micro-batch does not count as free. Added is the update, which reads and writes weights, gradients and
moments at the memory's bandwidth; and what ranks send each other (weights gathered for forward and backward, gradients
scattered, once per micro-batch) at the link's, as far as it exceeds the computation; the same holds for activations
that go to the host and come back, at the bus's. These are not measured, and the printed source says so.
"""

from __future__ import annotations

import difflib
import re
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from taut.attention.layout import Layout
from taut.errors import ConfigError
from taut.methods.method import RunConfig
from taut.models import architecture
from taut.models.cpu import faster_layers
from taut.models.load import quiet_library
from taut.models.precision import backward_context, compute_context
from taut.models.scorer import Scorer, score_hidden
from taut.models.settings import ActivationCheckpointing
from taut.plan.models import (
    CRITIC,
    REFERENCE,
    TEACHER,
    Kernels,
    ModelFootprint,
    adapted,
    computed_together,
    period,
    planned_model,
    rank_of,
    with_layers,
)
from taut.plan.tracing import Traced
from taut.train.distributed import UNDIVIDED
from taut.train.optim import build_optimizer
from taut.train.settings import ParallelConfig
from taut.types import Packed

Clock = Callable[[], float]

PROBED = 4
"""Timed layers; more where the period of layer types is longer."""
SMALL_VOCABULARY = 1024
FEW = 8
"""Targets of the smaller timed head."""
REPEATS = 3
UTILIZATION = 0.4
"""Assumed fraction of a GPU's dense peak in a training step. Not measured."""
NARROW = 2
"""Bytes of a weight that is multiplied, in bfloat16."""
HOST = 50e9
"""Assumed bytes a second at which the host's processor updates offloaded weights. Not measured."""
SELECTIVE = 0.5
"""Seconds of what activation_checkpointing=selective computes again, as a part of what ``true`` does. Measured on a
CPU, a layer of 576 x 1536 in float32 and bfloat16; what it is on a GPU was not measured.
"""
PER_NODE, NETWORK = 8, 50e9
"""Assumed number of GPUs on a machine, and bytes a second of each to other machines (400 Gbit/s)."""
LAUNCH = 5e-6
"""Assumed minimal seconds of an operator: the library's Python, torch's dispatcher, the kernel launch. Not measured."""


class Gpu(NamedTuple):
    """A GPU's data sheet."""

    gib: float
    tflops: float
    """Dense peak in bf16, with sums in float32; in float16 where there is no bf16."""
    gb_per_second: float
    """Memory bandwidth."""
    link_gb_per_second: float
    """Bandwidth to the other GPUs of its machine, one way."""
    bus_gb_per_second: float
    """Bandwidth to the host's memory, one way: PCI Express of 16 lanes."""
    capability: float
    """Compute capability, which says what it computes."""

    @property
    def has_bf16(self) -> bool:
        """Whether it has bf16 arithmetic and FlashAttention, as NVIDIA's have from 8.0 on."""
        return self.capability >= 8.0


_TEXT = resources.files("taut.plan").joinpath("gpus.toml").read_text(encoding="utf-8")
GPUS = {name: Gpu(*figures) for name, figures in tomllib.loads(_TEXT).items()}
"""Vendors' figures (SXM where it exists), not measured."""
_MAKER = re.compile(r"nvidia|geforce|tesla|quadro|rtx|amd|instinct|[\W_]+")


def find_gpu(name: str) -> str:
    """The GPU of the table that a name, or a part of it, means. Raises ConfigError where that is none, or several."""
    plain = {_MAKER.sub("", known.lower()): known for known in GPUS}
    wanted = _MAKER.sub("", name.lower())
    found = [wanted] if wanted in plain else [text for text in plain if wanted in text]
    if len(found) == 1:
        return plain[found[0]]
    near = found or difflib.get_close_matches(wanted, plain, n=2)
    hint = f"did you mean {' or '.join(plain[text] for text in near)}? " if near else ""
    raise ConfigError(
        f"gpu={name} is {'more than one GPU of' if found else 'not in'} the table; {hint}expected one of "
        f"{', '.join(GPUS)}; or set gpu_memory, as in gpu_memory=24GiB",
        code="invalid-value",
    )


class Work(NamedTuple):
    """The work of a micro-batch."""

    tokens: int
    pairs: int
    window_pairs: int
    targets: int

    def layers(self, flops: architecture.Flops) -> float:
        """Floating-point operations of all layers."""
        attention = flops.per_pair * self.pairs + flops.per_window_pair * self.window_pairs
        return flops.per_token * self.tokens + attention


def work_of(packed: Packed, window: int | None) -> Work:
    """The work of a micro-batch for a model with this sliding window."""
    layout = Layout(packed.reach_T.numpy())
    return Work(packed.num_tokens, layout.num_pairs(), layout.num_pairs(window), packed.num_targets)


@dataclass(frozen=True)
class Seconds:
    """Predicted seconds of one optimizer step."""

    compute: float
    update: float
    communication: float = 0.0
    transfer: float = 0.0
    """Between the device and its host."""
    generating: float = 0.0
    """Seconds of generating completions in this process."""
    source: str = "measured here on a few layers"

    @property
    def total(self) -> float:
        """Seconds of the whole step; communication and transfer overlap with computation."""
        return max(self.compute, self.communication, self.transfer) + self.update + self.generating


@dataclass(frozen=True)
class Rates:
    """The measured a, b, c and d of the equation."""

    per_flop: float
    per_microbatch: float
    per_target: float
    per_parameter: float

    def seconds(self, traced: Traced, works: Sequence[Work], *, recomputes: float) -> Seconds:
        """A step of these micro-batches on one rank. ``recomputes``: see ``recomputed``."""
        compute = sum(
            self.per_flop * _layers(traced, work, recomputes=recomputes)
            + self.per_microbatch
            + self.per_target * work.targets
            for work in works
        )
        trained = sum(model.num_trained for model in traced.models)
        return Seconds(compute, self.per_parameter * trained)


def from_data_sheet(
    name: str,
    traced: Traced,
    works: Sequence[Work],
    num_ranks: int,
    parallel: ParallelConfig = UNDIVIDED,
    *,
    recomputes: float,
) -> Seconds:
    """The seconds of a step on a GPU of ``GPUS``; ``works``: one rank's micro-batches."""
    gpu, models, together = GPUS[name], traced.models, parallel.tensor
    num_shards = num_ranks // parallel.replicas
    speed, bandwidth = UTILIZATION * gpu.tflops * 1e12, gpu.gb_per_second * 1e9
    weights = sum(moved(model) for model in models)
    activations = 2 * traced.parts()["activations"] / traced.num_tokens
    launches = LAUNCH * traced.operators * (1 + traced.passes / 3)
    # each micro-batch takes what bounds it: products, memory or launches
    compute = sum(
        max(
            operations(traced, work, recomputes=recomputes, together=together) / speed,
            (weights / together + activations * work.tokens) / bandwidth,
            launches,
        )
        for work in works
    )
    # the update reads and writes moments and weights
    written = sum(12 * model.num_trained + 2 * model.optimizer for model in models)
    share = sum(rank_of(m.trained.all, m.whole.trained, num_shards) for m in models)
    update = written * share / max(1, sum(m.trained.all for m in models))
    # what is offloaded crosses the bus
    tokens = sum(work.tokens for work in works)
    over_bus = 2 * traced.offloaded * tokens / traced.num_tokens  # there and back
    if parallel.cpu_offload:
        bandwidth = HOST
        over_bus += len(works) * sum(map(fetched, models)) / num_shards
    return Seconds(
        compute=compute,
        update=update / bandwidth,
        communication=communication(gpu, models, len(works), num_ranks, parallel)
        + summed(gpu, traced, tokens, together),
        transfer=over_bus / (gpu.bus_gb_per_second * 1e9),
        source=(
            f"{name}: {UTILIZATION:.0%} of its peak and {LAUNCH * 1e6:g} us an operator are assumed, not measured"
        ),
    )


def fetched(model: ModelFootprint) -> float:
    """The bytes of shards that a micro-batch fetches from the host, forward and backward, and of gradients that it
    brings there.
    """
    if not model.is_divided or model.flops is None:
        return 0.0
    gathers = 2 if model.num_trained else 1
    shards = model.weights.all - model.whole.weights
    return gathers * shards + model.trained.all - model.whole.trained


def communication(
    gpu: Gpu,
    models: Sequence[ModelFootprint],
    num_microbatches: int,
    num_ranks: int,
    parallel: ParallelConfig,
) -> float:
    """The seconds in which a rank sends what a step needs of it."""
    replicas = parallel.replicas
    models = [computed_together(model, parallel.tensor) for model in models]
    shards = num_ranks // replicas // parallel.tensor
    link = gpu.link_gb_per_second * 1e9
    # the slowest link on the way decides
    inside = link if shards <= PER_NODE else min(link, NETWORK)
    outside = link if num_ranks <= PER_NODE else min(link, NETWORK)
    seconds = 0.0
    for model in models:
        if not model.is_divided:
            continue
        gradients = (model.trained.all - model.whole.trained) / parallel.tensor
        gathers = 2 if model.num_trained else 1
        each = (gathers * model.gathered.all + gradients) * (shards - 1) / shards / inside
        each += 2 * gradients / shards * (replicas - 1) / replicas / outside
        seconds += num_microbatches * each
        seconds += 2 * model.whole.trained * (num_ranks - 1) / num_ranks / outside
    return seconds


def summed(gpu: Gpu, traced: Traced, tokens: int, together: int) -> float:
    """The seconds in which ranks that compute together sum what passes between layers: twice a layer forward, twice
    backward.
    """
    sent = 4 * NARROW * tokens * traced.policy.num_hidden
    return 2 * sent * (together - 1) / together / (gpu.link_gb_per_second * 1e9)


def moved(model: ModelFootprint) -> float:
    """The bytes of a model's weights and gradients that a micro-batch moves: each weight is read forward and, where
    anything trains, backward; one that is stored otherwise than it is multiplied is read and written once more.
    """
    if model.flops is None:
        return 0.0
    number, stored = model.num_parameters, model.weights.all
    reads = 2 if model.num_trained else 1
    if stored < 0.75 * NARROW * number:  # quantized: widened for each product
        return reads * (stored + 2 * NARROW * number)
    copied = stored + NARROW * number if stored > 1.5 * NARROW * number else 0
    return copied + reads * NARROW * number + 4 * model.num_trained


def recomputed(how: ActivationCheckpointing) -> float:
    """The part of the layers' forward that the backward pass does again."""
    return SELECTIVE if how == "selective" else float(bool(how))


def operations(traced: Traced, work: Work, *, recomputes: float, together: int = 1) -> float:
    """Floating-point operations of a rank for a micro-batch: of the layers, which so many ranks compute together, and
    of the heads of all models.
    """
    # heads of the other models: forward only, unless they train
    heads = traced.head_flops * work.targets
    for model in traced.models[1:]:
        if model.flops is not None and not model.num_trained:
            heads += model.flops.per_target / 2 * work.targets
    return _layers(traced, work, recomputes=recomputes) / together + heads


def _layers(traced: Traced, work: Work, *, recomputes: float) -> float:
    """Operations of the layers, with additional forwards: of activation checkpointing, a reference, statistics."""
    others = [model for model in traced.models[1:] if model.part in (CRITIC, TEACHER, REFERENCE)]
    has_reference = any(m.part == REFERENCE and m.flops is not None for m in others)
    total = _of_model(traced.policy, work, recomputes + traced.passes - has_reference)
    for model in others:
        # a critic also values a rollout before it is trained on
        total += _of_model(model, work, recomputes + 1 if model.part == CRITIC else 0)
    return total


def _of_model(model: ModelFootprint, work: Work, forwards: float) -> float:
    """Operations of a model's layers: forward, backward where it trains, and so many more forwards."""
    if model.flops is None:
        return 0.0
    share = forward_share(model.num_trained, model.num_parameters)
    if not model.num_trained:
        return work.layers(model.flops) * share
    return work.layers(model.flops) * (1 + share * forwards)


def forward_share(num_trained: int, num_parameters: int) -> float:
    """Return a forward as a fraction of all products: of three with full fine-tuning, of two with adapters."""
    return 1 / 3 if num_trained > num_parameters / 2 else 1 / 2


def calibrate(
    run: RunConfig,
    config: PreTrainedConfig,
    kernels: Kernels,
    packed: Packed,
    device: torch.device,
    clock: Clock = time.perf_counter,
) -> Rates:
    """Measure this machine with a micro-batch of the run."""

    def fastest(act: Callable[[], None]) -> float:
        """Seconds of the fastest of a few runs, after a warm-up."""
        times = []
        for _ in range(1 + REPEATS):
            began = clock()
            act()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(clock() - began)
        return min(times[1:])

    # a few layers with random weights, on the micro-batch with few targets and a small vocabulary
    build: Any = AutoModelForCausalLM.from_config
    with quiet_library(), device:
        base = build(
            _shortened(run, config, kernels),
            dtype=torch.float64 if kernels.dtype == torch.float64 else torch.float32,
            attn_implementation=kernels.attention,
            trust_remote_code=run.trust_remote_code,
        )
    faster_layers.install(base)
    model = adapted(run, base)
    flops, scorer = architecture.flops(model), Scorer(model)
    number = min(FEW, packed.num_targets)
    zero = torch.zeros(1, dtype=torch.int64)  # the target of a micro-batch that has none
    small = replace(
        packed,
        ids_T=packed.ids_T % SMALL_VOCABULARY,
        target_N=packed.target_N[:number] % SMALL_VOCABULARY if number else zero,
        predictor_N=packed.predictor_N[:number] if number else zero,
        weight_N=packed.weight_N[:number] if number else zero.double() + 1,
        row_N=packed.row_N[:number] if number else zero,
        read_R=torch.arange(packed.num_tokens),  # so that the last layer leaves no token out
    )
    # time the layers, the update, and the head with few and with all targets
    done = work_of(small, flops.window).layers(flops)
    optimizer = build_optimizer(
        scorer, run.resolved_optim, layers=architecture.layers(scorer.get_submodule("model"))
    )
    trained = sum(p.numel() for p in scorer.parameters() if p.requires_grad)
    share = forward_share(trained, sum(p.numel() for p in scorer.parameters()))
    done *= 1 + share * recomputed(run.activation_checkpointing)

    def step() -> None:
        with compute_context(kernels.dtype, scorer.device):
            total = scorer(small, -small.weight_N).linear_sum  # the weights of cross entropy
        with backward_context(kernels.dtype):
            total.backward()

    def update() -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    per_flop, per_parameter = fastest(step) / done, fastest(update) / trained
    few, many = (
        fastest(_head_step(run, config, kernels, packed.to(device), num_targets))
        for num_targets in (FEW, packed.num_targets)
    )
    per_target = max(0.0, (many - few) / max(1, packed.num_targets - FEW))
    return Rates(per_flop, few, per_target, per_parameter)


def _shortened(run: RunConfig, config: PreTrainedConfig, kernels: Kernels) -> PreTrainedConfig:
    """The configuration with a few layers, at least one period, and a small vocabulary."""
    model = planned_model(run, config, kernels)
    every, count = period(model), len(architecture.layers(model))
    short = with_layers(config, min(count, every * -(-PROBED // every)))
    text: Any = short.get_text_config()
    text.vocab_size = SMALL_VOCABULARY
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, name, None)
    return short


def _head_step(
    run: RunConfig,
    config: PreTrainedConfig,
    kernels: Kernels,
    packed: Packed,
    num_targets: int,
) -> Callable[[], None]:
    """Forward and backward of embedding and head alone, on the first targets of a micro-batch."""
    device = packed.ids_T.device
    model = planned_model(run, config, kernels)
    table = architecture.stored_table(architecture.embedding(model))
    assert table is not None
    if not architecture.has_head(model):  # the cost of a scalar head is negligible
        zeros = torch.zeros_like(table, device=device)

        def act_on_embedding() -> None:
            hidden_TD = nn.functional.embedding(packed.ids_T, zeros.clone().requires_grad_())
            hidden_TD.sum().backward()  # type: ignore[no-untyped-call]

        return act_on_embedding
    # tensors of the head's own shape, tied or not as the model's are
    passes, is_linear = run.extra_head_passes(), run.loss().linear_weights(packed) is not None
    planned = architecture.head(model)
    dtype = torch.promote_types(planned.weight.dtype, torch.float32)  # narrow ones are widened
    is_tied = architecture.is_tied(model)
    shape, trains = planned.weight.shape, (planned.weight.requires_grad, table.requires_grad)
    weight = nn.Parameter(torch.randn(shape, dtype=dtype, device=device) * 0.02, trains[0])
    embedding = (
        weight if is_tied else nn.Parameter(torch.zeros_like(weight), requires_grad=trains[1])
    )
    spec = replace(planned, weight=weight, bias=None, rows=None)
    ids_T, listed = packed.ids_T, slice(num_targets)
    predictor_N, target_N = packed.predictor_N[listed], packed.target_N[listed]
    weight_N = packed.weight_N[listed]

    def act() -> None:
        for parameter in (weight, embedding):
            parameter.grad = None
        hidden_TD = nn.functional.embedding(ids_T, embedding)
        if not hidden_TD.requires_grad:
            hidden_TD.requires_grad_()
        with compute_context(kernels.dtype, device):
            hidden_ND = hidden_TD.index_select(0, predictor_N)
            with torch.no_grad():
                for _ in range(passes):
                    score_hidden(hidden_ND, target_N, spec)
            scores = score_hidden(hidden_ND, target_N, spec, weight_N if is_linear else None)
            total = scores.logp_N.sum() if scores.linear_sum is None else scores.linear_sum
        with backward_context(kernels.dtype):
            total.backward()  # type: ignore[no-untyped-call]

    return act
