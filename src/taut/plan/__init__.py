"""Memory and time of a run, foretold from its model's shapes and measured on its parts.

    found = predict_steps(run, config, kernels, work)           bytes by part, of one rank
    measured = measure(built, packed, is_first=...)             the same, of a micro-batch that is really run

No weight is loaded. How it is done: ``tracing``; what several ranks change: ``memory``; seconds: ``rates``; what is
computed: ``steps``. docs/plan.md has the equations, and how far they were from what was measured.

Imports build and below. Checks and commands import it.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig

from taut.methods.method import RunConfig
from taut.plan.footprint import PARTS, Parts
from taut.plan.measuring import (
    Footprint,
    Measured,
    device_memory,
    footprint,
    measure,
    measured_parts,
    stages,
)
from taut.plan.rates import GPUS, Rates, Seconds, calibrate, from_data_sheet
from taut.plan.steps import Supply, Workload, without_data, workload
from taut.plan.tracing import FUSED, Kernels, Traced, require_foretold, skeleton, trace
from taut.types import Packed

__all__ = [
    "FUSED",
    "GPUS",
    "PARTS",
    "Footprint",
    "Kernels",
    "Measured",
    "Parts",
    "Prediction",
    "Rates",
    "Seconds",
    "Supply",
    "Traced",
    "Workload",
    "calibrate",
    "device_memory",
    "footprint",
    "from_data_sheet",
    "measure",
    "measured_parts",
    "predict",
    "predict_steps",
    "require_foretold",
    "skeleton",
    "stages",
    "trace",
    "without_data",
    "workload",
]


@dataclass(frozen=True)
class Prediction:
    """What a micro-batch needs on each of the ranks."""

    num_tokens: int
    num_ranks: int
    kernels: Kernels
    traced: Traced
    footprint: Footprint

    @property
    def peak(self) -> int:
        """Bytes at the fullest moment."""
        return self.footprint.peak


def predict(
    run: RunConfig,
    config: PreTrainedConfig,
    kernels: Kernels,
    packed: Packed,
    *,
    is_first: bool,
    num_ranks: int = 1,
) -> Prediction:
    """Memory of one micro-batch, without checkpoints' buffers. ``is_first``: with no gradient there before it.

    Raises ModelError where the model cannot be run without contents.
    """
    traced = trace(run, config, kernels, packed, is_first=is_first)
    return Prediction(packed.num_tokens, num_ranks, kernels, traced, footprint(traced, num_ranks))


def predict_steps(
    run: RunConfig,
    config: PreTrainedConfig,
    kernels: Kernels,
    work: Workload,
    *,
    num_ranks: int = 1,
) -> Prediction:
    """Memory of the first steps: of the micro-batch that needs most."""
    first, later = work.first, work.later
    cases = [] if later is None else [(later, False)]
    if later is None or later.num_tokens < first.num_tokens:  # else gradients make it the fuller
        cases.append((first, True))
    found = [
        predict(run, config, kernels, packed, is_first=is_first, num_ranks=num_ranks)
        for packed, is_first in cases
    ]
    return max(found, key=lambda one: one.peak)
