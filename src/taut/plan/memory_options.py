"""Settings that take less memory, in the order of the time they cost: what a run could set that had too little.

Each is predicted by the planner's arithmetic (memory.py) for the micro-batch that did not fit: alone, and where none
fits alone one after the other until they fit together. A new setting is a row of ``SETTINGS``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import float32, promote_types
from transformers import PreTrainedConfig

from taut.config import Decision, replace, to_dict
from taut.errors import ConfigError, ModelError
from taut.methods.inputs import Inputs
from taut.methods.method import RunConfig
from taut.models.attention_backends import select
from taut.models.precision import resolve_dtype
from taut.models.recompute import require_possible
from taut.plan.memory import coarse_bound, device_memory, needs, predict
from taut.plan.models import FUSED, Kernels, planned_model
from taut.plan.workload import Workload, without_data, workload
from taut.train.distributed import Ranks, require_offloadable
from taut.types import Packed

GIB = 2**30
SPARE = 0.1
"""Share of a device that the driver, collectives and the allocator's fragments take."""
HOST_SHARE = 0.5
"""Share of a machine's memory that a step may take on a CPU before layers are recomputed: others run there too."""
RECOMPUTES = "activation_checkpointing"
WORTH = 0.01
"""A setting that saves a smaller share is left out."""
TOKENS = "batch.tokens_per_microbatch"


class Setting(NamedTuple):
    """A setting that takes less memory."""

    keys: Mapping[str, Any]
    cost: str


SETTINGS = (
    Setting({"checkpoint.background": False}, "steps wait for checkpoints"),
    Setting({"optim.state": "int8"}, "rounded moments; a new run"),
    Setting({"frozen_dtype": "checkpoint"}, "1% of time, on a CPU"),
    Setting({TOKENS: "half"}, "more micro-batches"),
    Setting({"activation_checkpointing": "selective"}, "all but products again"),
    Setting({"activation_checkpointing": True}, "a third more products"),
    Setting({"activation_checkpointing": "offload"}, "the same, and transfers"),
    Setting({"parallel.cpu_offload": True}, "weights and moments cross the bus in every step"),
    Setting({"quantize": "nf4"}, "a rounded base, widened for each product; a new run"),
    Setting({"lora.rank": 16}, "trains adapters only: another run"),
    Setting({"lora.rank": 16, "quantize": "nf4"}, "adapters on a rounded base: another run"),
)
"""Settings that save memory: the cheapest in time first, those that change the run last."""


@dataclass(frozen=True)
class Memory:
    """The memory of a run, and of the micro-batch that it has to hold."""

    config: PreTrainedConfig
    kernels: Kernels
    packed: Packed
    """The micro-batch that did not fit."""
    work: Workload
    """Material for a smaller one."""
    size: int
    """Bytes of the device."""
    num_ranks: int
    limit: int
    """Bytes of it that a run may take."""

    def peak(self, run: RunConfig) -> int:
        """Bytes of a rank. Raises ConfigError and ModelError for a run that cannot be."""
        device = self.kernels.device
        how = run.activation_checkpointing
        require_possible(how, device, run.attention, compiles=run.compile)
        if run.parallel.cpu_offload:
            require_offloadable(device)
        packed, budget = self.packed, run.batch.tokens_per_microbatch
        if budget < packed.num_tokens:
            packed = self.work.supply.filled(max(budget, self.work.supply.longest))
        footprint = needs(
            run, self.config, self.kernels, self.work, num_ranks=self.num_ranks, packed=packed
        )
        return footprint.peak


def decide_recomputation(
    run: RunConfig, inputs: Inputs, ranks: Ranks, before: Mapping[str, Any] | None = None
) -> tuple[RunConfig, list[Decision]]:
    """The run with ``activation_checkpointing`` set, where it is not, by the memory of a full micro-batch; every rank
    calls it, and takes the first one's choice. ``before``: resolved.json of the run to resume, which goes on as it was.
    """
    if run.activation_checkpointing is not None:
        return run, []
    how = None if before is None else before["config"].get(RECOMPUTES)
    decision = Decision(RECOMPUTES, str(how).lower(), "that of the run to resume")
    if how is None:
        decision = ranks.gather(_decide(run, inputs, ranks))[0]
        how = decision.value == "true"
    return run.amended(activation_checkpointing=how), [decision]


def recomputation(
    step: int, size: int, device: torch.device, spare: float = SPARE, most: str = ""
) -> Decision:
    """Whether layers are recomputed where a step takes so many bytes, or at ``most`` so many, without."""
    share = min(HOST_SHARE, 1 - spare) if device.type == "cpu" else 1 - spare
    reason = (
        f"a step takes {most}{_gib(step)} GiB without; {share:.0%} of {_gib(size)} may be taken"
    )
    return Decision(RECOMPUTES, str(step > int(share * size)).lower(), reason)


def _decide(run: RunConfig, inputs: Inputs, ranks: Ranks) -> Decision:
    """Whether a full micro-batch needs layers that are recomputed; of a model that cannot be planned, no."""
    device, config, num_ranks = ranks.device, inputs.config, ranks.size
    size, kernels = device_memory(device), kernels_of(run, config, device)
    try:
        # a bound, which is quick, and where it is too much the plan
        model, wide = planned_model(run, config, kernels), promote_types(kernels.dtype, float32)
        bound = coarse_bound(run, inputs, model, device, wide)
        decision = recomputation(bound or size, size, device, most="at most ")
        if decision.value == "false":
            return decision
        if run.data.is_stream:  # its rows are not known before its steps
            work = without_data(run, config, ranks.num_shares)
        else:
            work = workload(run, inputs, ranks.num_shares)
        is_first = work.later is None
        found = predict(run, config, kernels, work.fullest, is_first=is_first, num_ranks=num_ranks)
    except ModelError as error:
        return Decision(RECOMPUTES, "false", f"what a step takes is not known: {error}")
    return recomputation(found.footprint.step, size, device)


def kernels_of(run: RunConfig, config: PreTrainedConfig, device: torch.device) -> Kernels:
    """The settings of the computation of a run on a device that is here."""
    dtype = resolve_dtype(run.dtype, device).dtype
    chosen = select(run.attention, device, dtype, config)
    if device.type == "cuda":
        return Kernels(dtype, FUSED, device_memory(device))
    return Kernels(dtype, chosen.implementation)


def suggest_settings(run: RunConfig, inputs: Inputs, ranks: Ranks, num_tokens: int | None) -> str:
    """``settings_that_help`` for a run on this device; for a model that cannot be planned, why it is not known.
    ``num_tokens``: of the micro-batch that did not fit; None: the largest of the first steps.
    """
    try:
        work, size = workload(run, inputs, ranks.num_shares), device_memory(ranks.device)
        packed = work.largest if num_tokens is None else work.supply.filled(num_tokens)
        kernels, limit = kernels_of(run, inputs.config, ranks.device), int(size * (1 - SPARE))
        memory = Memory(inputs.config, kernels, packed, work, size, ranks.size, limit)
        return settings_that_help(run, memory)
    except ModelError as error:
        return f"what its settings take is not known: {error}"


def settings_that_help(run: RunConfig, memory: Memory) -> str:
    """Describe the planned memory of the run, and that with each setting that saves some, for the error that ends it.
    Raises ModelError for a model that cannot be planned.
    """
    # each setting alone; those that are needed together, until they fit
    now = memory.peak(run)
    limit = min(memory.limit, now - 1)
    found, together = [], run
    sizes: list[int] = []
    for setting in SETTINGS:
        keys = dict(setting.keys)
        if "lora.rank" in keys and run.lora.is_on:
            continue
        if TOKENS in keys:
            keys[TOKENS] = max(1, memory.packed.num_tokens // 2)
        try:
            changed = replace(run, keys)
            peak = now if to_dict(changed) == to_dict(run) else memory.peak(changed)
        except (ConfigError, ModelError):  # the run cannot have it
            continue
        if peak > (1 - WORTH) * now:
            continue
        words = " ".join(f"{key}={str(value).lower()}" for key, value in keys.items())
        fits = ", fits" if peak <= limit else ""
        found.append(f"{words}: {_gib(peak)} GiB{fits} ({setting.cost})")
        sizes.append(peak)
        if min(sizes) > limit:
            together = replace(together, keys)
    # say it in the order of what the settings cost
    text = f"by plan a rank takes {_gib(now)} GiB of {_gib(memory.size)}"
    if not found:
        return f"{text}, and no setting makes it smaller: take more ranks, or a smaller model"
    text += f"; with, in the order of what they cost, {'; '.join(found)}"
    if min(sizes) > limit:
        peak = memory.peak(together)
        ending = "fits" if peak <= limit else "does not fit: take more ranks, or a smaller model"
        text += f"; all of them together: {_gib(peak)} GiB, which {ending}"
    return text


def _gib(size: float) -> str:
    return f"{size / GIB:.3g}"
