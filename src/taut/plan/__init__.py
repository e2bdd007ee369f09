"""Memory and time of a run, predicted from its model's shapes and from measurements of its parts.

    prediction = predict_steps(run, config, kernels, work)      bytes by part, of one rank
    measured = measure(built, packed, is_first=...)             the same, measured on a real micro-batch

No weights are loaded. tracing.py traces a micro-batch, measuring.py adds the effect of several ranks, rates.py predicts
seconds, steps.py makes the micro-batches. docs/plan.md has the equations and their errors against measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig

from taut.methods.method import RunConfig
from taut.plan.ledger import PARTS, Parts
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
from taut.plan.tracing import FUSED, Kernels, Traced, require_predictable, skeleton, trace
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
    "require_predictable",
    "skeleton",
    "stages",
    "trace",
    "without_data",
    "workload",
]


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
    num_ranks: int = 1,
) -> Prediction:
    """Memory of one micro-batch, without checkpoint buffers. ``is_first``: no gradients exist before it.

    Raises ModelError where the model cannot run on fake tensors.
    """
    traced = trace(run, config, kernels, packed, is_first=is_first)
    return Prediction(packed.num_tokens, traced, footprint(traced, num_ranks))


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
