"""Monitors of the training steps: they warn, or stop the run before an update.

- ``FirstStep``: the first step's logprobs must equal those of the same samples run one at a time through the library's
  own attention and head (taken before training); a difference stops the run before the update.
- ``Untouched``: after the first backward every trainable tensor must have a gradient, and within ``PATIENCE`` steps a
  nonzero one. A tensor outside the graph stops the run; a gradient that is always zero is a warning. Two kinds of steps
  do not count: those whose advantages are all 0, which move no tensor (taut/rl/monitors.py warns), and those in which
  the critic trains alone, which leave an adapter's B at 0, and so the gradient of A.
- ``Spikes``: warns of a gradient norm far above the recent median.
- ``Divergence``: warns of, and then stops, a run whose loss stays far above its first value, or whose gradient stays
  exactly zero.
- ``ChangedSources``: warns of a data file that changes during the run.

Their state goes into checkpoints, so that a resumed run reports what an uninterrupted one would. The loop calls them
through its ``Monitor`` protocol.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import TypedDict

from taut.data.dataset import Dataset
from taut.errors import CheckFailed, DivergenceError
from taut.models import architecture
from taut.train.distributed import local
from taut.train.settings import LossMonitorConfig
from taut.train.trainer import StepReport, Trainer
from taut.types import to_host

PATIENCE = 3
"""Steps after which a gradient that was always zero is reported; at step 1 that of LoRA's A is zero."""
LOOK_EVERY = 60.0
"""Seconds between two checks of the data files."""
SPIKE = 10.0
"""Multiple of the recent median above which a gradient norm is reported."""

TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 0.15}
"""Largest mean difference of a sample's logprobs (nats per target) that rounding explains, by compute dtype."""

STEADY_TARGETS = 32
"""The mean over fewer targets is noisy: its difference is weighted by sqrt(targets / STEADY_TARGETS). SmolLM2 in
bfloat16, packed correctly, differs by up to 0.17 over 2 targets and 0.10 over 12."""
FIRST_SAMPLES = 4
"""Samples whose steps define the first value of the loss: a single sample may be unusually easy."""
WARN_HIGH, WARN_ZERO = 3, 2
"""Consecutive steps with a loss above its limit, and with a gradient of zero, that cause a warning."""


@dataclass
class FirstStep:
    """Compares the first step with the same samples run alone."""

    alone: Mapping[str, Tensor]
    """Sample id -> logp_N of the sample run alone."""
    tolerance: float

    def __call__(self, report: StepReport, trainer: Trainer) -> None:
        if not self.alone or report.step != 1:  # a resumed run has other weights
            return
        # the largest mean difference of a sample, over all ranks
        worst, worst_id, compared = 0.0, "", 0
        for packed, scores in report.scored:
            logp_N = scores.logp_N.cpu()  # in the first step only
            for row, sample_id in enumerate(packed.sample_ids):
                if sample_id not in self.alone:
                    continue
                differences = logp_N[packed.row_N == row] - self.alone[sample_id]
                compared += 1
                gap = float(differences.abs().mean().nan_to_num(nan=torch.inf))
                gap *= min(1.0, len(differences) / STEADY_TARGETS) ** 0.5
                if gap > worst:
                    worst, worst_id = gap, sample_id
        difference = trainer.ranks.max([worst])[0]
        total = int(trainer.ranks.sum_of_shares([compared])[0])
        self.alone = {}
        is_sound = difference <= self.tolerance
        trainer.emit(
            "check",
            name="first_step",
            outcome="passed" if is_sound else "failed",
            value=difference,
            detail=f"{total} samples: packed against alone, mean |difference| of logprobs, worst sample",
        )
        if not is_sound:
            raise CheckFailed(
                f"step {report.step}: the logprobs of {worst_id or 'a sample on another rank'} differ by "
                f"{difference:.3g} nats a token from the same sample run alone (at most {self.tolerance:g} is "
                "rounding); nothing was updated; set attention=reference, and please report the model"
            )


class UntouchedState(TypedDict):
    """The saved state of Untouched."""

    steps: int
    silent: list[str]


@dataclass
class Untouched:
    """Finds trainable tensors without a gradient."""

    remembered: ClassVar[Any] = UntouchedState
    names: dict[nn.Parameter, str]
    silent: set[str] = field(default_factory=set)
    steps: int = 0

    @classmethod
    def watching(cls, model: nn.Module) -> Untouched:
        """A monitor of every trainable tensor of a model."""
        names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        return cls(names, set(names.values()))

    def __call__(self, report: StepReport, trainer: Trainer) -> None:
        if self.steps > PATIENCE or not self.silent:
            return
        # no gradient at all: outside of the graph
        absent = sorted(name for p, name in self.names.items() if p.grad is None)
        if absent:
            raise CheckFailed(
                f"step {report.step}: {len(absent)} trainable tensors get no gradient ({', '.join(absent[:4])}); "
                "every trainable tensor is expected to take part in the loss; leave them out with the key freeze"
            )
        # a gradient of zero so far, on every rank
        flags = to_host([local(p.grad).any() for p in self.names if p.grad is not None])
        reached = trainer.ranks.max([float(flag) for flag in flags])
        if not (trainer.source.loss.is_cost or _has_advantages(report, trainer)):
            return
        if any(report.step <= group["waits"] for group in trainer.optimizer.param_groups):
            return
        self.steps += 1
        self.silent -= {
            name for name, flag in zip(self.names.values(), reached, strict=True) if flag
        }
        if self.silent and self.steps == PATIENCE:
            names = sorted(self.silent)
            scorer: Any = trainer.scorer
            blind = architecture.parts_without_gradient(
                scorer.model, self.names.values(), self.silent
            )
            why = f"; no picture was seen: set freeze={json.dumps(blind)}" if blind else ""
            trainer.emit(
                "warning",
                name="zero_gradient",
                step=report.step,
                detail=f"{len(names)} trainable tensors have had a gradient of exactly zero for {PATIENCE} steps{why}",
                tensors=names[:20],
            )

    def remember(self) -> dict[str, Any]:
        return {"steps": self.steps, "silent": sorted(self.silent)}

    def recall(self, remembered: dict[str, Any]) -> None:
        self.steps, self.silent = remembered["steps"], set(remembered["silent"])


@dataclass
class Spikes:
    """Reports gradient norms far above the recent median."""

    remembered: ClassVar[Any] = list[float]
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=50))

    def __call__(self, report: StepReport, trainer: Trainer) -> None:
        if len(self.recent) >= 10:
            median = statistics.median(self.recent)
            if 0.0 < SPIKE * median < report.grad_norm:  # Divergence reports a median of zero
                trainer.emit(
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


class DivergenceState(TypedDict, total=False):
    """The saved state of Divergence: its fields without the configuration."""

    first: float | None
    baseline: float | None
    num_samples: int
    is_high: list[bool]
    zero_steps: int
    sound_step: int
    found: str | None
    has_learned: bool


@dataclass
class Divergence:
    """Stops a run whose loss stays far above its first value, or whose gradient stays exactly zero.

    The loss of step 1 precedes any update, but may be that of a single easy sample. ``baseline`` is therefore the
    highest loss of the steps with the first ``FIRST_SAMPLES`` samples, capped at the limit that step 1 gives, since the
    other steps may follow an update that went wrong.

    Saturated logits or scores give a gradient of exactly zero. It is no fault where the loss is satisfied
    (``Loss.may_be_satisfied``), nor in policy gradients where every advantage of the step is zero.
    """

    remembered: ClassVar[Any] = DivergenceState
    config: LossMonitorConfig
    first: float | None = None
    """The loss of step 1."""
    baseline: float | None = None
    """The first value of the loss, which defines its limit."""
    num_samples: int = 0
    """Number of samples so far."""
    is_high: list[bool] = field(default_factory=list)
    """Whether the loss was above its limit, for each of the last steps."""
    zero_steps: int = 0
    """Consecutive steps with a gradient of exactly zero."""
    sound_step: int = 0
    """The last step after which the next loss and gradient looked sound."""
    found: str | None = None
    """The reported problem, while it lasts."""
    has_learned: bool = False
    """Whether any step had a gradient, and of policy gradients an advantage that is not zero."""

    @classmethod
    def of(cls, trainer: Trainer) -> Divergence:
        """The monitor of this kind that a trainer has."""
        return next(monitor for monitor in trainer.monitors if isinstance(monitor, cls))

    def __call__(self, report: StepReport, trainer: Trainer) -> None:
        # a loss above its limit, of losses that are a cost
        loss = trainer.source.loss
        if loss.is_cost:
            if self.first is None or self.baseline is None:
                self.first = self.baseline = report.loss
            elif self.num_samples < FIRST_SAMPLES:
                self.baseline = max(self.baseline, min(report.loss, self._limit_of(self.first)))
            self.num_samples += len(report.sample_ids)
            kept = max(self.config.loss_steps, WARN_HIGH)
            self.is_high = [*self.is_high, report.loss > self.limit][-kept:]
        # a gradient of zero, unless the loss is satisfied or every advantage is zero
        if report.grad_norm != 0.0 and not self.has_learned:
            self.has_learned = loss.is_cost or _has_advantages(report, trainer)
        is_satisfied = loss.may_be_satisfied and report.loss == 0.0
        if report.grad_norm != 0.0 or is_satisfied:
            self.zero_steps = 0
        elif loss.is_cost or _has_advantages(report, trainer):
            self.zero_steps += 1
        self._stop_or_warn(report, trainer)

    @property
    def limit(self) -> float:
        """The loss above which a step counts as high."""
        return math.inf if self.baseline is None else self._limit_of(self.baseline)

    @property
    def is_suspected(self) -> bool:
        """Whether recent steps look diverged, so that their state must not replace a good checkpoint."""
        return self.zero_steps > 0 or any(self.is_high[-WARN_HIGH:])

    def _limit_of(self, loss: float) -> float:
        return max(self.config.loss_ratio * loss, loss + self.config.loss_margin)

    def _stop_or_warn(self, report: StepReport, trainer: Trainer) -> None:
        """Raise or warn, depending on the last steps; forget the reported problem once it is over."""
        high, zero, config = sum(self.is_high), self.zero_steps, self.config
        if not self.is_suspected:
            self.found, self.sound_step = None, report.step - 1
            return
        # the problem, and whether it has lasted too long
        if zero:
            key, is_over = "zero_gradient_steps", zero >= config.zero_gradient_steps > 0
            problem = f"the gradient was exactly zero in the last {zero} steps (the loss is {report.loss:.4g})"
        else:
            key, is_over = "loss_steps", 2 * high > config.loss_steps > 0
            problem = (
                f"the loss was above {self.limit:.4g} in {high} of the last {len(self.is_high)} steps (it is "
                f"{report.loss:.4g}, and was {self.baseline:.4g} at first)"
            )
        remedy = (
            f"lower optim.learning_rate (here {trainer.learning_rate(report.step):.3g}), warm up for longer "
            "(optim.warmup_steps), or clip the gradient to a smaller norm (optim.clip_grad_norm)"
        )
        if is_over:
            raise DivergenceError(
                f"step {report.step}: training has diverged: {problem}; this step was not taken and no model is "
                f"written; {remedy}; with loss_monitor.{key}=0 it only warns"
            )
        # a warning, once while it lasts
        was_reported = self.found is not None
        is_reported = zero >= WARN_ZERO or self.is_high[-WARN_HIGH:] == [True] * WARN_HIGH
        if was_reported or is_reported:
            self.found = problem
        if is_reported and not was_reported:
            detail = (
                f"training may have diverged: {problem}; no checkpoint is saved meanwhile; {remedy}"
            )
            trainer.emit("warning", name="divergence", step=report.step, detail=detail)

    def remember(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "config"}

    def recall(self, remembered: Mapping[str, Any]) -> None:
        vars(self).update({"has_learned": True, **remembered})  # older checkpoints do not say


def _has_advantages(report: StepReport, trainer: Trainer) -> bool:
    """Whether any advantage of the step is nonzero, on any rank."""
    has_any = any(bool(packed.streams["advantage_N"].any()) for packed, _ in report.scored)
    return trainer.ranks.max([float(has_any)])[0] > 0


@dataclass
class ChangedSources:
    """Warns once if a data file no longer has the content that was read. Called after steps."""

    data: Sequence[Dataset]
    trainer: Trainer
    is_reported: bool = False
    looked: float = field(default_factory=time.monotonic)

    def __call__(self, step: int) -> None:
        if time.monotonic() - self.looked > LOOK_EVERY:
            self.look()

    def look(self) -> None:
        self.looked = time.monotonic()
        changed = [path for data in self.data for path in data.changed_sources()]
        if changed and not self.is_reported:
            self.is_reported = True
            detail = (
                f"{', '.join(dict.fromkeys(changed))}: changed since this run read it; the run continues with what was "
                "read, but cannot be resumed unless the old content is brought back"
            )
            self.trainer.emit("warning", name="data", step=self.trainer.done, detail=detail)


def ids_to_compare(sizes: Sequence[tuple[str, int]], most_tokens: int) -> list[str]:
    """Choose the samples of the first step to run alone: the shortest, up to ``most_tokens`` in total, at least one."""
    chosen: list[str] = []
    used = 0
    for sample_id, size in sorted(sizes, key=lambda item: item[1]):
        if chosen and used + size > most_tokens:
            break
        chosen.append(sample_id)
        used += size
    return chosen
