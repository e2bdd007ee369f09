"""``taut plan [RUN.toml | RUN.yaml] --gpus N --gpu-memory 80GiB``: predict whether a run fits, and how fast it is.

Reads the model's configuration only; no weights are loaded and nothing is written (tokenized data goes to the cache).
Plans the micro-batches of the first steps if there are data, otherwise micro-batches filled to
``batch.tokens_per_microbatch``. Covers the run as configured first, then full fine-tuning and LoRA, with and without
activation checkpointing, each with the keys to set and the largest token budget that fits. Exit code 0 if the
configured run fits, 1 if it does not.

Without a GPU, named or present, plans for this machine's processor and memory, and measures a few layers.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedConfig

from taut.commands.settings import Plan, Planning
from taut.config import Decision, configclass, load
from taut.data.settings import DataConfig
from taut.errors import ConfigError
from taut.io.console import warn_if_slow
from taut.io.terminal import Terminal
from taut.methods.method import RunConfig, class_of
from taut.models import architecture
from taut.models.attention_backends import select
from taut.models.cpu import cpu_matmul
from taut.models.load import has_tokenizer, load_config
from taut.models.precision import DTYPES, no_bf16
from taut.models.quantized.quantized_layers import format_of
from taut.models.recompute import require_possible
from taut.models.settings import ActivationCheckpointing, LoraConfig, Quantize
from taut.plan import memory_options
from taut.plan.allocations import PARTS
from taut.plan.memory import (
    Footprint,
    Prediction,
    device_memory,
    footprint_of,
    predict,
    predict_steps,
)
from taut.plan.models import FUSED, Kernels, skeleton
from taut.plan.rates import GPUS, Rates, Seconds, calibrate, find_gpu, from_data_sheet, recomputed
from taut.plan.rollouts import Rollout, rollout_of, scoring_of, seconds_of
from taut.plan.workload import Workload, without_data, workload
from taut.run.inputs import load_inputs
from taut.train import distributed
from taut.train.distributed import Ranks
from taut.types import Packed

GIB = 2**30
ABOUT: dict[str, str] = tomllib.loads(
    resources.files("taut.commands").joinpath("plan_parts.toml").read_text(encoding="utf-8")
)
UNITS = {
    f"{letter}{end}": base**power
    for power, letter in enumerate("KMGT", 1)
    for end, base in (("B", 1000), ("IB", 1024))
}
CHECKPOINTING: dict[ActivationCheckpointing, str] = {
    False: "",
    True: ", checkpointing",
    "selective": ", selective checkpointing",
    "offload": ", checkpointing on the host",
}
NAME_WIDTH = 24
"""Columns of a part's name, at most."""
LORA_RANK = 16
MEASURED_FLOPS = 5e12
"""Maximum operations per layer of a timed micro-batch."""
ROUND = 64
"""Unit of token budgets."""
MAX_RATIO = 64
"""Maximum predicted token budget, as a multiple of the configured one: the prediction is an extrapolation."""


class Machine(NamedTuple):
    """The machine of the plan."""

    name: str
    device: torch.device | None
    """The device for measurements; None if the plan is for another machine."""
    memory: int
    """Bytes per device."""
    kernels: Kernels


@dataclass(frozen=True)
class Way:
    """One configuration of the run, and its prediction."""

    name: str
    keys: tuple[str, ...]
    """The keys to set for it."""
    footprint: Footprint
    """Bytes with the largest micro-batch of the token budget."""
    now: Footprint
    """Bytes with the largest micro-batch of the first steps."""
    most_tokens: int
    """Tokens of the largest micro-batch that fits; 0 if not even the longest sample does."""
    least_ranks: int | None
    """Minimum number of GPUs on which the configured micro-batches fit; None if more are needed than there are."""
    seconds: Seconds | None


@dataclass(frozen=True)
class Planned:
    """The plan of a run."""

    machine: Machine
    num_ranks: int
    limit: int
    work: Workload
    num_parameters: int
    ways: tuple[Way, ...]
    """All configurations, the configured one first."""
    decisions: tuple[Decision, ...] = ()
    """Settings that the run leaves open."""
    advice: str = ""
    """Where no way fits, what other settings take."""

    @property
    def fits(self) -> bool:
        """Whether the configured run fits."""
        return self.ways[0].footprint.peak <= self.limit

    def __repr__(self) -> str:
        return f"Planned({self.num_ranks} x {self.machine.name}: {_verdict(self)})"


def main(path: Path | None, overrides: Sequence[str]) -> int:
    """The command; its exit code."""
    ours = [name.partition(".")[0] for name in Planning.__dataclass_fields__]
    rest = [word for word in overrides if word.partition("=")[0].strip() not in ours]
    return run(load(class_for(class_of(path, rest)), path, overrides))


def class_for(method: type[RunConfig]) -> type[Any]:
    """The keys of a plan for runs of a method."""
    body = {
        "__doc__": Plan.__doc__,
        "__module__": __name__,
        "__annotations__": {"data": DataConfig},
        "data": DataConfig(),
        "needs_weights": False,
        "unasked": ("rewards",),  # they take no memory but that of reward models
    }
    cls: type[Any] = configclass(type(f"Plan{method.__name__}", (Planning, method), body))
    return cls


def run(config: Any) -> int:
    """Print the plan; 0 where it fits."""
    planned = plan(config)
    show(planned, Terminal())
    return 0 if planned.fits else 1


def plan(config: Plan) -> Planned:
    """Make the plan. Raises TautError for a run that cannot be planned."""
    # the machine, and what it can do
    distributed.require_divisors(config.gpus, config.parallel)
    model = load_config(config.model, config.trust_remote_code, needs_weights=False)
    machine = _machine(config, model)
    require_possible(
        config.activation_checkpointing,
        machine.device or torch.device("cuda"),
        config.attention,
        compiles=config.compile,
    )
    if config.parallel.cpu_offload:
        distributed.require_offloadable(machine.device or torch.device("cuda"))
    num_shares = config.gpus // config.parallel.tensor
    decisions = config.decisions
    if machine.device is None and config.dtype is None and machine.kernels.dtype == torch.float32:
        reason = f"{machine.name} has neither bf16 arithmetic nor FlashAttention"
        decisions.append(Decision("dtype", "float32", reason))
    is_elsewhere = not Path(config.model).exists()  # at the hub, which has a tokenizer
    if config.data.train is not None and (is_elsewhere or has_tokenizer(config.model)):
        with warn_if_slow("reading the data and laying out the first steps"):
            inputs = load_inputs(config, Ranks(0, 1, torch.device("cpu")))
            model, work = inputs.config, workload(config, inputs, num_shares)
    else:
        work = without_data(config, model, num_shares)
        if config.data.train is not None:
            why = f"{config.model} has no tokenizer, so data.train is not read"
            work = work._replace(source=work.source.replace("no data given", why))
    limit = int(machine.memory * (1 - config.headroom))
    with warn_if_slow("timing a few layers on this machine (measure=false leaves that out)"):
        rates = _rates(config, model, machine, work)
    # whether layers are recomputed where the run leaves it open, as the run decides it
    if config.activation_checkpointing is None:
        without = replace(config, activation_checkpointing=False)
        with warn_if_slow("counting the bytes of a step"):
            planner = _Planner(without, model, machine, work, limit)
        step, device = planner.footprint(planner.full, config.gpus).step, machine.kernels.device
        decision = memory_options.recomputation(step, machine.memory, device, config.headroom)
        config = replace(config, activation_checkpointing=decision.value == "true")
        decisions.append(decision)
    # the configurations to compare: the configured one first
    ways, num_parameters = list[Way](), 0
    is_lora, lora = config.lora.is_on, config.lora
    lora = lora if is_lora else LoraConfig(rank=LORA_RANK)
    bases: list[tuple[bool, Quantize | None]] = [(False, None), (True, None)]
    offloads = config.parallel.cpu_offload
    may_round = machine.kernels.dtype != torch.float64 and format_of(model) is None
    if may_round and not lora.dora and not offloads:
        bases.append((True, config.quantize or "nf4"))
    others: list[ActivationCheckpointing] = [False, True]
    if config.activation_checkpointing not in others:
        others.append(config.activation_checkpointing)
    choices = list(product(bases, others))
    configured = ((is_lora, config.quantize), config.activation_checkpointing)
    choices.sort(key=lambda choice: choice != configured)
    if not config.alternatives:
        choices = choices[:1]
    for (has_lora, quantize), recomputes in choices:  # the configured run first
        other = replace(
            config,
            lora=lora if has_lora else LoraConfig(),
            quantize=quantize,
            frozen_dtype=config.frozen_dtype if has_lora else "auto",
            save=config.save if has_lora else replace(config.save, merged=True),
            activation_checkpointing=recomputes,
        )
        name = f"LoRA, rank {lora.rank or 'of the adapter'}" if has_lora else "all weights"
        name += f", {quantize}" if quantize else ""
        name += CHECKPOINTING[recomputes]
        with warn_if_slow(f"counting the bytes of {name}"):
            planner = _Planner(other, model, machine, work, limit)
        ways.append(planner.way(name, config, rates))
        num_parameters = num_parameters or planner.full.traced.policy.num_parameters
    # where none of them fits: every other setting that takes less memory
    advice = ""
    if not any(way.most_tokens for way in ways):
        packed = work.supply.filled(work.supply.longest)
        there = memory_options.Memory(
            model, machine.kernels, packed, work, machine.memory, config.gpus, limit
        )
        with warn_if_slow("trying other settings that take less memory"):
            advice = f"with {packed.num_tokens:,} tokens, {memory_options.settings_that_help(config, there)}"
    return Planned(
        machine, config.gpus, limit, work, num_parameters, tuple(ways), tuple(decisions), advice
    )


def memory(text: str, key: str) -> int:
    """The bytes of an amount such as 80GiB. Raises ConfigError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B)\s*", text, re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise ConfigError(
            f"{key}={text} is no amount of memory; expected a number and a unit, as in 80GiB or 141GB; correct it"
        )
    return int(float(match[1]) * UNITS[match[2].upper()])


def _machine(config: Plan, model: PreTrainedConfig) -> Machine:
    """The machine of the plan: a named GPU, one of the given memory, or this machine."""
    size_set = None if config.gpu_memory is None else memory(config.gpu_memory, "gpu_memory")
    is_here = config.device == "cpu" or torch.cuda.is_available() or size_set is None
    if config.gpu is not None or not is_here:
        # a GPU that is not here: one of the table, or one that has bf16
        name = "GPU" if config.gpu is None else find_gpu(config.gpu)
        has_bf16 = config.gpu is None or GPUS[name].has_bf16
        if config.dtype == "bfloat16" and not has_bf16:
            raise no_bf16(name)
        size = size_set or int(GPUS[name].gib * GIB)
        dtype = config.dtype or ("bfloat16" if has_bf16 else "float32")
        capability = 8.0 if config.gpu is None else GPUS[name].capability
        select(config.attention, torch.device("cuda"), DTYPES[dtype], model, capability)
        return Machine(name, None, size, Kernels(DTYPES[dtype], FUSED, size))
    device = distributed.start(config.device).device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    size, kernels = (
        size_set or device_memory(device),
        memory_options.kernels_of(config, model, device),
    )
    return Machine(name, device, size, kernels)


def _rates(config: Plan, model: PreTrainedConfig, machine: Machine, work: Workload) -> Rates | None:
    """This machine's measured rates, if the plan is for it."""
    is_whole = config.gpus == 1 and not config.parallel.cpu_offload
    if machine.device is None or not is_whole or not config.measure:
        return None
    bare = skeleton(config, model)
    num_layers = architecture.text_config(bare).num_hidden_layers
    per_token = architecture.flops(bare).per_token / num_layers
    tokens = max(64, min(work.largest.num_tokens, int(MEASURED_FLOPS / per_token)))
    packed = work.largest
    if tokens < packed.num_tokens:
        packed = work.supply.filled(tokens)
    attention = select(config.attention, machine.device, machine.kernels.dtype, model)
    kernels = machine.kernels._replace(attention=attention.implementation)
    cpu_matmul.use(cpu_matmul.select(config.cpu_matmul, machine.device, kernels.dtype))
    return calibrate(config, model, kernels, packed, machine.device)


@dataclass
class _Planner:
    """The traces of one configuration, and the predictions from them."""

    run: Plan
    model: PreTrainedConfig
    machine: Machine
    work: Workload
    limit: int

    def __post_init__(self) -> None:
        self.full = self._trace(self.work.fullest)
        kernels = self.machine.kernels
        self.now = self.full
        if self.work.largest is not self.work.fullest:
            ranks = self.run.gpus
            self.now = predict_steps(self.run, self.model, kernels, self.work, num_ranks=ranks)
        self.half = self._trace(self.work.supply.filled(max(1, self.full.num_tokens // 2)))
        self._around: dict[int, tuple[Rollout | None, int]] = {}

    def way(self, name: str, configured: Plan, rates: Rates | None) -> Way:
        """The prediction on the given number of GPUs."""
        full = self.footprint(self.full, configured.gpus)
        max_tokens = self._max_tokens(configured.gpus)
        # on how many GPUs it fits; one GPU computes differently from several
        each = configured.parallel.replicas * configured.parallel.tensor
        most = configured.gpus
        counts = []
        for count in {1 << power for power in range(most.bit_length())} | {most}:
            if count % each == 0:
                is_alike = (count > 1) == (self.run.gpus > 1)
                traced = self.full if is_alike else self._trace(self.work.fullest, count)
                if self.footprint(traced, count).peak <= self.limit:
                    counts.append(count)
        # the keys that make the configured run into this one
        keys = []
        if self.run.lora != configured.lora:
            keys.append(f"lora.rank={self.run.lora.rank}")
        if self.run.quantize != configured.quantize and self.run.quantize is not None:
            keys.append(f"quantize={self.run.quantize}")
        if self.run.activation_checkpointing != configured.activation_checkpointing:
            keys.append(
                f"activation_checkpointing={str(self.run.activation_checkpointing).lower()}"
            )
        if full.peak > self.limit and max_tokens:
            keys.append(f"batch.tokens_per_microbatch={max_tokens}")
        now = self.footprint(self.now, configured.gpus)
        least = min(counts, default=None)
        seconds = self._seconds(configured.gpus, rates)
        return Way(name, tuple(keys), full, now, max_tokens, least, seconds)

    def footprint(self, prediction: Prediction, num_ranks: int) -> Footprint:
        """The bytes of a rank."""
        kernels = self.machine.kernels
        rollout, scoring = self._around_on(num_ranks)
        return footprint_of(self.run, prediction.traced, kernels, num_ranks, rollout, scoring)

    def _around_on(self, num_ranks: int) -> tuple[Rollout | None, int]:
        """Memory and time that generating and scoring take on each of this many ranks."""
        if num_ranks not in self._around:
            run, kernels, supply = self.run, self.machine.kernels, self.work.supply
            rollout = rollout_of(run, self.model, kernels, supply, num_ranks)
            self._around[num_ranks] = rollout, scoring_of(run, kernels, supply, num_ranks)
        return self._around[num_ranks]

    def _trace(self, packed: Packed, num_ranks: int | None = None) -> Prediction:
        kernels, is_first = self.machine.kernels, self.work.later is None
        ranks = num_ranks or self.run.gpus
        return predict(self.run, self.model, kernels, packed, is_first=is_first, num_ranks=ranks)

    def _max_tokens(self, num_ranks: int) -> int:
        """The tokens that fill the memory, extrapolated linearly from two sizes."""
        full, half = (self.footprint(at, num_ranks) for at in (self.full, self.half))
        if full.around > self.limit:
            return 0
        high, low = full.step, half.step
        slope = (high - low) / max(1, self.full.num_tokens - self.half.num_tokens)
        fitting = self.full.num_tokens + (self.limit - high) / slope if slope > 0 else 0
        max_tokens = int(min(fitting, MAX_RATIO * self.full.num_tokens))
        max_tokens -= max_tokens % ROUND if max_tokens > ROUND else 0
        return max_tokens if max_tokens >= self.work.supply.longest else 0

    def _seconds(self, num_ranks: int, rates: Rates | None) -> Seconds | None:
        """Seconds of a step: a mean over the first steps."""
        # by this machine's rates, or a data sheet's
        recomputes, steps = recomputed(self.run.activation_checkpointing), self.work.steps
        works = [work for step in steps for work in step]
        traced = self.full.traced
        if rates is not None:
            total = rates.seconds(traced, works, recomputes=recomputes)
        elif self.machine.name in GPUS and self.machine.kernels.dtype == torch.bfloat16:
            total = from_data_sheet(
                self.machine.name,
                traced,
                works,
                num_ranks,
                self.run.parallel,
                recomputes=recomputes,
            )
        else:
            return None
        # completions before the steps
        count, generating, source = len(steps), 0.0, total.source
        if self.run.generates:
            source += f"; at most, for every completion has {self.run.grows:,} tokens"
        rollout, _ = self._around_on(num_ranks)
        if rollout is not None and rates is None:
            replicas = self.run.parallel.replicas
            generating = seconds_of(self.machine.name, traced, rollout, num_ranks, replicas)
        elif self.run.generates and not self.run.is_replayed:
            source += "; of training alone"
        return replace(
            total,
            source=source,
            generating=generating,
            compute=total.compute / count,
            communication=total.communication / count,
            transfer=total.transfer / count,
        )


def show(planned: Planned, console: Console) -> None:
    """Print the plan, in at most 100 columns; in 80 no word and no number is cut."""
    machine, configured, work = planned.machine, planned.ways[0], planned.work
    dtype = str(machine.kernels.dtype).removeprefix("torch.")
    console.print(
        f"{planned.num_parameters:,} parameters, {dtype}, on {planned.num_ranks} x {machine.name} of "
        f"{_gib(machine.memory)} GiB, of which {_gib(planned.limit)} may be used"
    )
    console.print(f"micro-batches: {work.source}")
    for decision in planned.decisions:
        console.print(f"{decision.name}: {decision.value}, {decision.reason}")
    console.print()
    console.print(_parts(planned))
    console.print(_verdict(planned) + "\n", style="bold green" if planned.fits else "bold red")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("", "GiB", "fits", "tokens that fit", "fits from", "s/step"):
        # Where the lines are short, names are broken between words, and numbers nowhere.
        is_name = name == ""
        justify: Literal["left", "right"] = "left" if is_name or name == "fits" else "right"
        table.add_column(name, justify=justify, no_wrap=not is_name)
    for way in planned.ways:
        fits, least = way.footprint.peak <= planned.limit, way.least_ranks
        table.add_row(
            way.name,
            _gib(way.footprint.peak),
            "yes" if fits else "no",
            f"{way.most_tokens:,}" if way.most_tokens else "-",
            "-" if least is None else f"{least} GPU{'s' * (least > 1)}",
            "-" if way.seconds is None else f"{way.seconds.total:.3g}",
            style="" if fits else "dim",
        )
    console.print(table)
    settings = _settings(planned)
    if settings.row_count:
        console.print("\nto do it that way, set")
        console.print(settings)
    if configured.seconds is not None:
        console.print(f"\nseconds: {configured.seconds.source}; a mean of {len(work.steps)} steps")
    else:
        reason = "measured where weights are whole on one rank, and with measure=true"
        if machine.name in GPUS:
            reason = "the table of GPUs has rates for bfloat16 only"
        elif machine.device is None:
            reason = "name a GPU of the table (--gpu H100)"
        console.print(f"\nseconds: not known; {reason}")


def _parts(planned: Planned) -> Table:
    """The configured run by part: in the first steps, and at the token budget."""
    configured, work = planned.ways[0], planned.work
    columns = {f"{work.fullest.num_tokens:,} tokens": configured.footprint}
    if work.largest is not work.fullest:
        columns = {f"{work.largest.num_tokens:,} tokens": configured.now, **columns}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(f"GiB on each, {configured.name}", max_width=NAME_WIDTH)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", style="dim", overflow="fold")

    def add(name: str, about: str, sizes: list[int], style: str = "") -> None:
        table.add_row(f"  {name}", *map(_gib, sizes), about, style=style)

    # parts at the peak of a step, then what is around the steps
    footprints = list(columns.values())
    for name in (*PARTS, "staging"):
        if configured.footprint.parts.get(name):
            add(name, ABOUT[name], [size.parts[name] for size in footprints])
    about = "with the largest micro-batch of the first steps; with a full one" * (
        len(footprints) > 1
    )
    add("a step", about, [size.step for size in footprints], "bold")
    if planned.num_ranks > 1:
        add("loading", ABOUT["loading"], [size.loading for size in footprints])
    for name in ("generating", "scoring"):
        if getattr(configured.footprint, name):
            add(name, ABOUT[name], [getattr(size, name) for size in footprints])
    add("saving", ABOUT["ending"], [size.ending for size in footprints])
    for name in ("reading", "saving", "staging", "offloaded"):
        size = getattr(configured.footprint, name)
        is_host = planned.machine.kernels.device.type == "cpu"
        if size and name not in configured.footprint.parts and not is_host:
            add("on the host", ABOUT[name], [getattr(size, name) for size in footprints])
    return table


def _verdict(planned: Planned) -> str:
    """Say whether the configured run fits, and otherwise the remedy."""
    configured = planned.ways[0]
    need = f"{_gib(configured.footprint.peak)} of {_gib(planned.limit)} GiB"
    if planned.fits:
        return f"fits: {need}, with up to {configured.most_tokens:,} tokens a micro-batch"
    other = next((way for way in planned.ways if way.most_tokens), None)
    if other is None:
        why = f"; {ABOUT['loading']}" * (configured.footprint.loading > planned.limit)
        others = f", nor does any way below{why}" if len(planned.ways) > 1 else why
        return f"does not fit: {need}{others}; {planned.advice}"
    verdict = f"does not fit: {need}; set {' '.join(other.keys)}"
    if configured.now.peak <= planned.limit:
        verdict += f" (the first steps would fit: {_gib(configured.now.peak)} GiB)"
    return verdict


def _settings(planned: Planned) -> Table:
    """The keys to set for each configuration."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for way in planned.ways:
        if way.keys and way.most_tokens:
            table.add_row(way.name, Text(" ".join(way.keys), "cyan", overflow="fold"))
    return table


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f}" if size < 100 * GIB else f"{size / GIB:,.0f}"
