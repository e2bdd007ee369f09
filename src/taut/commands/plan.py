"""``taut plan [RUN.toml] --gpus N --gpu-memory 80GiB``: whether a run fits, how it would, and how long a step takes.

From the model's configuration alone; no weight is loaded and nothing is written (tokenised data goes to the cache).
With data the micro-batches are those of the first steps, without it they are filled to ``batch.tokens_per_microbatch``.
It answers for what the run asks first, then for full training and LoRA, with and without activation checkpointing, with
the keys to set and the largest token budget that fits. Exit code 0: what is asked fits; 1: it does not.

Where no GPU is named and none is here, it plans for this machine's processor and memory, and measures a few layers.
The command line imports it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from transformers import PreTrainedConfig

from taut import parallel
from taut.attention.select import select
from taut.commands.plan_report import GIB, Machine, Planned, Way, show
from taut.config import configclass, load
from taut.data.dataset import DataConfig
from taut.errors import ConfigError
from taut.estimate import (
    FUSED,
    GPUS,
    Footprint,
    Kernels,
    Prediction,
    Rates,
    Seconds,
    Workload,
    calibrate,
    device_memory,
    footprint,
    from_data_sheet,
    predict,
    predict_steps,
    require_foretold,
    skeleton,
    stages,
    without_data,
    workload,
)
from taut.methods.method import RunConfig, class_of
from taut.models import anatomy
from taut.models.load import load_config
from taut.models.lora import LoraConfig
from taut.models.precision import DTYPES, resolve_dtype
from taut.parallel import Ranks
from taut.printing import told_when_slow
from taut.run import load_inputs
from taut.terminal import Terminal
from taut.types import Packed

UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12} | {
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
LORA_RANK = 16
MEASURED_FLOPS = 5e12
"""A micro-batch is cut to so many operations a layer before it is timed."""
ROUND = 64
"""A token budget is told in multiples of so many."""
MOST = 64
"""No further than so many times the budget asked for is told: bytes are known in proportion."""


@configclass
class Planning:
    """What is planned for."""

    gpus: Annotated[int, Field(ge=1)] = 1
    """How many GPUs (ranks)."""
    gpu_memory: str | None = None
    """Memory of each: 80GiB, 141GB. By default that of the GPU named or found, or of this machine."""
    gpu: str | None = None
    """A GPU of the table in docs/plan.md, for the seconds of a step: A100-40GB, A100-80GB, B200, H100, H200, L4, L40S,
    RTX4090."""
    headroom: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Part of the memory that is left free: for the driver, collectives and the allocator's fragments."""
    measure: bool = True
    """Where the plan is for this machine: time a few layers on it."""


@configclass
class Plan(Planning, RunConfig):
    """A run that is planned and not begun: all keys of ``taut sft`` (of another command where ``method`` names it),
    and"""

    data: DataConfig = DataConfig()


def main(path: Path | None, overrides: Sequence[str]) -> int:
    """The command; its exit code."""
    ours = [name.partition(".")[0] for name in Planning.__dataclass_fields__]
    rest = [word for word in overrides if word.partition("=")[0].strip() not in ours]
    return run(load(planned_class(class_of(path, rest)), path, overrides))


def planned_class(method: type[RunConfig]) -> type[Any]:
    """The configuration of a plan for the runs of a method."""
    body = {
        "__doc__": Plan.__doc__,
        "__module__": __name__,
        "__annotations__": {"data": DataConfig},
        "data": DataConfig(),
    }
    return configclass(type(f"Plan{method.__name__}", (Planning, method), body))


def run(config: Any) -> int:
    """Print the plan; 0 where it fits."""
    planned = plan(config)
    show(planned, Terminal())
    return 0 if planned.fits else 1


def plan(config: Plan) -> Planned:
    """The plan. Raises TautError for what cannot be planned."""
    model = load_config(config.model, config.trust_remote_code, needs_weights=False)
    require_foretold(config, model)
    machine = _machine(config, model)
    if config.data.train is not None:
        with told_when_slow("reading the data and laying out the first steps"):
            inputs = load_inputs(config, Ranks(0, 1, torch.device("cpu")))
            model, work = inputs.config, workload(config, inputs, config.gpus)
    else:
        work = without_data(config, model, config.gpus)
    limit = int(machine.memory * (1 - config.headroom))
    with told_when_slow("timing a few layers on this machine (measure=false leaves that out)"):
        rates = _rates(config, model, machine, work)
    ways, num_parameters = [], 0
    for name, other in _ways(config):
        with told_when_slow(f"counting the bytes of {name}"):
            planner = _Planner(other, model, machine, work, limit)
        ways.append(planner.way(name, config, rates))
        num_parameters = num_parameters or planner.full.traced.num_parameters
    return Planned(
        machine, config.gpus, limit, work, num_parameters, tuple(ways), tuple(config.decisions)
    )


def memory(text: str, key: str) -> int:
    """Bytes of "80GiB" and its like. Raises ConfigError for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B)\s*", text, re.IGNORECASE)
    if found is None or float(found[1]) == 0:
        raise ConfigError(
            f"{key}={text} is no amount of memory; expected a number and a unit, as in 80GiB or 141GB; correct it"
        )
    return int(float(found[1]) * UNITS[found[2].upper()])


def _machine(config: Plan, model: PreTrainedConfig) -> Machine:
    """What is planned for: a GPU by name, one of a given memory, or what is here."""
    if config.gpu is not None and config.gpu not in GPUS:
        raise ConfigError(
            f"gpu={config.gpu} is not in the table; expected one of {', '.join(GPUS)}; "
            "or leave it out and give gpu_memory"
        )
    given = None if config.gpu_memory is None else memory(config.gpu_memory, "gpu_memory")
    is_here = config.device == "cpu" or torch.cuda.is_available() or given is None
    if config.gpu is not None or not is_here:
        name = config.gpu or "GPU"
        size = given or int(GPUS[name].gib * GIB)
        return Machine(name, None, size, Kernels(DTYPES[config.dtype or "bfloat16"], FUSED))
    device = parallel.start(config.device).device
    compute = resolve_dtype(config.dtype, device).dtype
    chosen = select(config.attention, device, compute, model)
    size = given or device_memory(device)
    if device.type == "cuda":
        return Machine(torch.cuda.get_device_name(device), device, size, Kernels(compute, FUSED))
    return Machine("CPU", device, size, Kernels(compute, chosen.implementation))


def _ways(config: Plan) -> Iterator[tuple[str, Plan]]:
    """What is asked, then what might be done instead."""
    is_lora, is_again = config.lora.is_on, config.activation_checkpointing
    lora = config.lora if is_lora else LoraConfig(rank=LORA_RANK)
    choices = list(product((False, True), (False, True)))
    choices.sort(key=lambda choice: choice != (is_lora, is_again))
    for has_lora, again in choices:
        name = f"LoRA, rank {lora.rank or 'of the adapter'}" if has_lora else "all weights"
        other = replace(
            config, lora=lora if has_lora else LoraConfig(), activation_checkpointing=again
        )
        yield f"{name}, checkpointing" if again else name, other


def _rates(config: Plan, model: PreTrainedConfig, machine: Machine, work: Workload) -> Rates | None:
    """What this machine does, measured, if it is what is planned for."""
    if machine.device is None or config.gpus > 1 or not config.measure:
        return None
    bare = skeleton(config, model)
    per_token = anatomy.flops(bare).per_token / anatomy.text_config(bare).num_hidden_layers
    tokens = max(64, min(work.largest.num_tokens, int(MEASURED_FLOPS / per_token)))
    packed = work.largest
    if tokens < packed.num_tokens:
        packed = work.supply.filled(tokens)
    kernels = machine.kernels._replace(attention=_attention(config, machine, model))
    return calibrate(config, model, kernels, packed, machine.device)


def _attention(config: Plan, machine: Machine, model: PreTrainedConfig) -> str:
    """The attention that runs here."""
    assert machine.device is not None
    return select(config.attention, machine.device, machine.kernels.dtype, model).implementation


@dataclass
class _Planner:
    """One way to run: its traces, and what follows from them."""

    run: Plan
    model: PreTrainedConfig
    machine: Machine
    work: Workload
    limit: int

    def __post_init__(self) -> None:
        self.full = self._trace(self.work.fullest)
        kernels = self.machine.kernels
        is_same = self.work.largest is self.work.fullest
        self.now = self.full if is_same else predict_steps(self.run, self.model, kernels, self.work)
        self.half = self._trace(self.work.supply.filled(max(1, self.full.num_tokens // 2)))

    def way(self, name: str, asked: Plan, rates: Rates | None) -> Way:
        """What comes of it, on the GPUs there are."""
        found = self.footprint(self.full, asked.gpus)
        most = self._most_tokens(asked.gpus)
        counts = [n for n in _counts(asked.gpus) if self.footprint(self.full, n).peak <= self.limit]
        keys = []
        if self.run.lora != asked.lora:
            keys.append(f"lora.rank={self.run.lora.rank}")
        if self.run.activation_checkpointing != asked.activation_checkpointing:
            keys.append(
                f"activation_checkpointing={str(self.run.activation_checkpointing).lower()}"
            )
        if found.peak > self.limit and most:
            keys.append(f"batch.tokens_per_microbatch={most}")
        now = self.footprint(self.now, asked.gpus)
        least = min(counts, default=None)
        return Way(name, tuple(keys), found, now, most, least, self._seconds(asked.gpus, rates))

    def footprint(self, prediction: Prediction, num_ranks: int) -> Footprint:
        """Bytes of a rank."""
        is_staging = stages(self.run.checkpoint, self.run.steps)
        return footprint(
            prediction.traced,
            num_ranks,
            stages=is_staging,
            is_host=self.machine.device is not None and self.machine.device.type == "cpu",
        )

    def _trace(self, packed: Packed) -> Prediction:
        kernels, is_first = self.machine.kernels, self.work.later is None
        return predict(self.run, self.model, kernels, packed, is_first=is_first)

    def _most_tokens(self, num_ranks: int) -> int:
        """Bytes grow in proportion to tokens: from two sizes to the one that fills the memory."""
        high, low = (self.footprint(at, num_ranks).peak for at in (self.full, self.half))
        step = self.full.num_tokens - self.half.num_tokens
        slope = (high - low) / max(1, step)
        if self.footprint(self.full, num_ranks).loading > self.limit:
            return 0
        found = self.full.num_tokens + (self.limit - high) / slope if slope > 0 else 0
        most = int(min(found, MOST * self.full.num_tokens))
        most -= most % ROUND if most > ROUND else 0
        longest = self.work.supply.longest
        return most if most >= longest else 0

    def _seconds(self, num_ranks: int, rates: Rates | None) -> Seconds | None:
        """Mean over the first steps."""
        again, steps = self.run.activation_checkpointing, self.work.steps
        works = [work for step in steps for work in step]
        traced = self.full.traced
        if rates is not None:
            every = rates.seconds(traced, works, recomputes=again)
        elif self.machine.name in GPUS and self.machine.kernels.dtype == torch.bfloat16:
            every = from_data_sheet(self.machine.name, traced, works, num_ranks, recomputes=again)
        else:
            return None
        count = len(steps)
        return replace(
            every, compute=every.compute / count, communication=every.communication / count
        )


def _counts(num_ranks: int) -> list[int]:
    """Numbers of GPUs that are tried."""
    return sorted({1 << power for power in range(num_ranks.bit_length())} | {num_ranks})
