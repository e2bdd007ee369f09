"""Alarms: what the first steps must show, and what no step may show.

- ``FirstStep``: the first step's log-probs equal those of the same samples run one at a time through the library's own
  attention and head (taken before training); a difference stops the run before the update.
- ``Untouched``: after the first backward every trainable tensor has a gradient, and within ``PATIENCE`` steps one
  that is not zero; a tensor outside the graph stops the run, one that is always zero is reported. A step whose
  advantages are all 0, as where all rewards are equal, is not counted: it moves no tensor (taut/online/guard.py warns).
- ``Spikes``: a gradient norm far above the recent median is reported.
- ``ChangedSources``: a data file that changes under the run is reported.

What they remember goes into checkpoints, so that a resumed run reports what an uninterrupted one would.

Called by the loop through its ``Alarm`` protocol.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from taut.data.dataset import Dataset
from taut.errors import CheckFailed
from taut.loop import Job, StepReport
from taut.models import parts

PATIENCE = 3
"""Steps after which a trainable tensor whose gradient was always zero is reported (LoRA's A is zero at step 1)."""
ADVANTAGE = "advantage/size"
"""The metric of policy gradients that is 0 where there is nothing to learn."""
LOOK_EVERY = 60.0
"""Seconds between two looks at the data files."""
SPIKE = 10.0
"""A gradient norm this many times the recent median is reported."""

TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 0.15}
"""Largest mean difference of a sample's log-probabilities (nats per target) that is rounding, by compute dtype."""

STEADY_TARGETS = 32
"""The mean over fewer targets wanders: its difference counts by sqrt(targets / STEADY_TARGETS). SmolLM2 in bfloat16,
packed and right, differs by up to 0.17 over 2 targets and 0.10 over 12."""


@dataclass
class FirstStep:
    """Compares the first step with the same samples alone."""

    alone: Mapping[str, Tensor]
    """Sample id -> logp_N of the sample run alone."""
    tolerance: float

    def __call__(self, report: StepReport, job: Job) -> None:
        if not self.alone or report.step != 1:  # a resumed run has other weights
            return
        worst, worst_id, compared = 0.0, "", 0
        for packed, scores in report.scored:
            logp_N = scores.logp_N.cpu()
            for row, sample_id in enumerate(packed.sample_ids):
                if sample_id not in self.alone:
                    continue
                difference = logp_N[packed.row_N == row] - self.alone[sample_id]
                compared += 1
                gap = float(difference.abs().mean().nan_to_num(nan=torch.inf))
                gap *= min(1.0, len(difference) / STEADY_TARGETS) ** 0.5
                if gap > worst:
                    worst, worst_id = gap, sample_id
        found = job.ranks.max([worst])[0]
        total = int(job.ranks.sum([compared])[0])
        self.alone = {}
        is_sound = found <= self.tolerance
        job.emit(
            "check",
            name="first_step",
            outcome="passed" if is_sound else "failed",
            value=found,
            detail=f"{total} samples: packed against alone, mean |difference| of log-probs, worst sample",
        )
        if not is_sound:
            raise CheckFailed(
                f"step {report.step}: the log-probs of {worst_id or 'a sample on another rank'} differ by "
                f"{found:.3g} nats a token from the same sample run alone (at most {self.tolerance:g} is rounding); "
                "the packed forward does not compute this model; nothing was updated; set attention=reference, and "
                "please report the model"
            )


@dataclass
class Untouched:
    """Finds trainable tensors that training does not reach."""

    names: dict[nn.Parameter, str]
    silent: set[str] = field(default_factory=set)
    steps: int = 0

    @classmethod
    def watching(cls, model: nn.Module) -> Untouched:
        """Watch every trainable tensor of a model."""
        names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        return cls(names, set(names.values()))

    def __call__(self, report: StepReport, job: Job) -> None:
        if self.steps > PATIENCE or not self.silent:
            return
        absent = sorted(name for p, name in self.names.items() if p.grad is None)
        if absent:
            raise CheckFailed(
                f"step {report.step}: {len(absent)} trainable tensors get no gradient ({', '.join(absent[:4])}); "
                "every trainable tensor is expected to take part in the loss; leave them out with the key freeze"
            )
        flags = [float(bool(p.grad.any())) for p in self.names]  # type: ignore[union-attr]
        reached = job.ranks.max(flags)
        if report.metrics.get(ADVANTAGE) == 0:
            return
        self.steps += 1
        self.silent -= {
            name for name, flag in zip(self.names.values(), reached, strict=True) if flag
        }
        if self.silent and self.steps == PATIENCE:
            some = sorted(self.silent)
            scorer: Any = job.scorer
            blind = parts.unreached(scorer.model, self.names.values(), self.silent)
            why = f"; no picture was seen: set freeze={json.dumps(blind)}" if blind else ""
            job.emit(
                "warning",
                name="zero_gradient",
                step=report.step,
                detail=f"{len(some)} trainable tensors have had a gradient of exactly zero for {PATIENCE} steps{why}",
                tensors=some[:20],
            )

    def remember(self) -> dict[str, Any]:
        return {"steps": self.steps, "silent": sorted(self.silent)}

    def recall(self, remembered: dict[str, Any]) -> None:
        self.steps, self.silent = remembered["steps"], set(remembered["silent"])


@dataclass
class Spikes:
    """Reports gradient norms far above the recent median."""

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=50))

    def __call__(self, report: StepReport, job: Job) -> None:
        if len(self.recent) >= 10:
            median = statistics.median(self.recent)
            if report.grad_norm > SPIKE * median:
                job.emit(
                    "warning",
                    name="grad_norm_spike",
                    step=report.step,
                    detail=f"gradient norm {report.grad_norm:.3g}, "
                    f"{report.grad_norm / median:.0f} times the recent median",
                    sample_ids=report.sample_ids,
                )
        self.recent.append(report.grad_norm)

    def remember(self) -> list[float]:
        return list(self.recent)

    def recall(self, remembered: list[float]) -> None:
        self.recent = deque(remembered, maxlen=self.recent.maxlen)


@dataclass
class ChangedSources:
    """Tells once if a data file is no longer what was read. The run goes on with what it read; called after steps."""

    data: Sequence[Dataset]
    job: Job
    is_told: bool = False
    looked: float = field(default_factory=time.monotonic)

    def __call__(self, step: int) -> None:
        if time.monotonic() - self.looked > LOOK_EVERY:
            self.look()

    def look(self) -> None:
        self.looked = time.monotonic()
        changed = [path for data in self.data for path in data.changed_sources()]
        if changed and not self.is_told:
            self.is_told = True
            detail = (
                f"{', '.join(dict.fromkeys(changed))}: not what was read when this run began; it goes on with what was "
                "read, but cannot be resumed unless that is brought back"
            )
            self.job.emit("warning", name="data", step=self.job.done, detail=detail)


def ids_to_compare(sizes: Sequence[tuple[str, int]], most_tokens: int) -> list[str]:
    """Which samples of the first step are run alone: the shortest, up to ``most_tokens`` in all, at least one."""
    chosen: list[str] = []
    used = 0
    for sample_id, size in sorted(sizes, key=lambda item: item[1]):
        if chosen and used + size > most_tokens:
            break
        chosen.append(sample_id)
        used += size
    return chosen
