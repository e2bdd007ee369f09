"""The one training loop. It is blind to algorithms: a method prepares trees, a loss says what to sum.

    loss = sum over terms of  sum_i / count_i

``count_i`` is taken over all micro-batches and ranks before the first backward, and the gradient is divided by it in
exactly one place (``scales`` below). So any split of a step into micro-batches and ranks gives the same numbers.

Alarms watch the steps and may stop the run (taut/alarms.py); events go to the sinks the caller passed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from taut import losses, optim, parallel, randomness
from taut.data.pack import PackPolicy
from taut.data.plan import Budget, Cursor, assign, layouts
from taut.errors import NonFiniteError, OutOfMemory
from taut.interrupts import Interrupts
from taut.losses import Loss
from taut.memory import Fit
from taut.models.noise import Noise
from taut.parallel import Ranks
from taut.types import Packed, Sample, Scores, Tree


class Method(Protocol):
    """What the loop knows of a training method."""

    @property
    def loss(self) -> Loss:
        """What is minimised."""

    def prepare(self, step: int) -> list[Tree]:
        """The trees of a step (counted from 1), every stream the loss needs included."""

    def cursor(self, step: int) -> Cursor:
        """How far the data are after a step: with the seed, all that a resumed run needs of them."""


class Scored(NamedTuple):
    """A micro-batch and what the model said of it, kept for the alarms."""

    packed: Packed
    scores: Scores


@dataclass(frozen=True)
class StepReport:
    """What a step saw, before the update. Sums are over all ranks; ``scored`` is this rank's."""

    step: int
    loss: float
    metrics: dict[str, float]
    num_targets: int
    num_tokens: int
    num_tokens_unshared: int
    sample_ids: list[str]
    scored: list[Scored]
    grad_norm: float = float("nan")


class Alarm(Protocol):
    """Called after the backward of each step and before the update; raises CheckFailed to stop the run."""

    def __call__(self, report: StepReport, job: Job) -> None: ...


@dataclass
class Job:
    """Everything a run needs, built by taut.build."""

    scorer: nn.Module
    method: Method
    optimizer: torch.optim.Optimizer
    learning_rate: Callable[[int], float]
    num_steps: int
    budget: Budget
    policy: PackPolicy
    ranks: Ranks
    compute: Callable[[], AbstractContextManager[Any]]
    """The precision context of a forward."""
    compute_backward: Callable[[], AbstractContextManager[Any]]
    """The precision context of a backward."""
    noise: Noise | None
    fit: Fit
    clip_grad_norm: float | None = None
    alarms: Sequence[Alarm] = ()
    after_step: Sequence[Callable[[int], None]] = ()
    """Evaluation and checkpoints: called with the step just finished."""
    done: int = 0
    """The step whose update the weights have."""
    followed: int = 0
    """The step after which ``after_step`` has been called."""
    loss: float = float("nan")
    """Of the step last done."""
    interrupts: Interrupts = field(default_factory=Interrupts)
    emit: Callable[..., None] = field(init=False)
    """Writes an event: ``emit(kind, **fields)``. Set once the output directory is claimed."""
    trained: list[nn.Parameter] = field(init=False)
    random: randomness.State = field(init=False)
    """Where the generators stood when the open step, or what follows the last, began."""

    def __post_init__(self) -> None:
        self.trained = [p for group in self.optimizer.param_groups for p in group["params"]]


def train(job: Job) -> None:
    """Every step that is not done, and what follows each. Raises Interrupt with the open step undone."""
    while True:
        job.random = randomness.capture(job.ranks.device)
        if job.followed < job.done:
            for act in job.after_step:
                act(job.done)
            job.followed = job.done
        elif job.done < job.num_steps:
            _take_step(job, job.done + 1)
        else:
            return


def _take_step(job: Job, step: int) -> None:
    began = time.perf_counter()
    report = _fitted_step(job, step)
    job.done, job.loss = step, report.loss
    job.emit(
        "step",
        step=step,
        loss=report.loss,
        grad_norm=report.grad_norm,
        learning_rate=job.learning_rate(step),
        num_targets=report.num_targets,
        num_tokens=report.num_tokens,
        num_tokens_unshared=report.num_tokens_unshared,
        seconds=time.perf_counter() - began,
        sample_ids=report.sample_ids,
        **_gpu_memory(job.ranks.device),
        **report.metrics,
    )


def _fitted_step(job: Job, step: int) -> StepReport:
    """``train_step``, begun again with a smaller budget where memory runs out and that is asked for."""
    while True:
        use_budget(job, step)
        try:
            return train_step(job, step)
        except OutOfMemory as error:
            job.optimizer.zero_grad()
            if not job.fit.halve(step, error):
                raise
        randomness.restore(job.random, job.ranks.device)


def use_budget(job: Job, step: int, *, is_told: bool = False) -> None:
    """Put the token budget of a step into force, and tell of it where that is new."""
    for halving in job.fit.begin(step):
        if not is_told:
            job.emit("budget", **halving._asdict())
    job.budget = job.budget._replace(tokens_per_microbatch=job.fit.tokens)


def _gpu_memory(device: torch.device) -> dict[str, int]:
    """The most memory of the GPU so far; elsewhere the console asks the process."""
    if device.type != "cuda":
        return {}
    return {"memory_bytes": torch.cuda.max_memory_allocated(device)}


def train_step(job: Job, step: int) -> StepReport:
    """One optimizer step."""
    report = add_gradients(job, job.method.prepare(step), step)
    require_finite(report.loss, "loss", report, job)
    report = replace(report, grad_norm=parallel.clip_gradients(job.trained, job.clip_grad_norm))
    require_finite(report.grad_norm, "gradient norm", report, job)
    job.interrupts.agree(job.ranks)  # before the alarms: they remember the steps they saw
    for alarm in job.alarms:
        alarm(report, job)
    optim.set_learning_rate(job.optimizer, job.learning_rate(step))
    job.optimizer.step()
    job.optimizer.zero_grad()
    return report


def add_gradients(job: Job, trees: Sequence[Tree], step: int) -> StepReport:
    """Add the gradient of a step that has these trees, and say what was seen."""
    loss = job.method.loss
    microbatches = microbatches_of(trees, job)
    counts = denominators(loss, microbatches, job.ranks)
    scales = {term: 1.0 / count for term, count in counts.items()}
    nothing = dict.fromkeys(scales, 0.0)
    job.scorer.train()
    scored = []
    for packed, is_real in padded(microbatches, trees, job):
        if job.ranks.size == 1:
            job.interrupts.check()
        act = partial(backward, job, packed, scales if is_real else nothing, step)
        scores = job.fit.attempt(act, packed, trees, f"step {step}")
        if is_real:
            scored.append(Scored(packed, scores))
    return summarise(job, step, trees, scored, scales)


def backward(job: Job, packed: Packed, scales: dict[str, float], step: int) -> Scores:
    """Add one micro-batch's share, each term times its scale, to the gradient."""
    loss = job.method.loss
    linear = loss.linear_weights(packed)
    if job.noise is not None:
        job.noise.set(step, packed)
    with job.compute():
        if linear is not None:
            shares = [scales[term] * weight_N for term, weight_N in linear.items()]
            scores: Scores = job.scorer(packed, torch.stack(shares).sum(0))
            total = scores.linear_sum
        else:
            scores = job.scorer(packed)
            terms = loss(scores, packed.to(scores.logp_N.device)).terms
            total = torch.stack([scales[term] * value for term, value in terms.items()]).sum()
    assert total is not None
    with job.compute_backward():
        total.backward()  # type: ignore[no-untyped-call]
    return Scores(scores.logp_N.detach())


def microbatches_of(trees: Sequence[Tree], job: Job) -> list[Packed]:
    """This rank's micro-batches of a step."""
    mine = assign(trees, job.budget)[job.ranks.rank]
    return [
        packed
        for planned in mine
        for packed in layouts(planned, job.policy, job.budget.tokens_per_microbatch)
    ]


def padded(
    microbatches: list[Packed], trees: Sequence[Tree], job: Job
) -> list[tuple[Packed, bool]]:
    """The micro-batches, and as many that count for nothing as it takes for all ranks to run equally many backwards."""
    most = int(job.ranks.max([len(microbatches)])[0])
    shortest: Sample = min((s for tree in trees for s in tree.samples), key=lambda s: s.num_tokens)
    filler = layouts((Tree((shortest,)),), job.policy, job.budget.tokens_per_microbatch)
    missing = most - len(microbatches)
    return [(packed, True) for packed in microbatches] + [(filler[0], False)] * missing


def denominators(loss: Loss, microbatches: Sequence[Packed], ranks: Ranks) -> dict[str, float]:
    """Each term's count over all micro-batches and ranks, from what is listed, before any forward."""
    units = loss.units
    counts = [sum(losses.count(unit, packed) for packed in microbatches) for unit in units.values()]
    totals = dict(zip(units, ranks.sum(counts), strict=True))
    assert all(count > 0 for count in totals.values()), (
        f"a step without anything to learn: {totals}"
    )
    return totals


def summarise(
    job: Job,
    step: int,
    trees: Sequence[Tree],
    scored: Sequence[Scored],
    scales: dict[str, float],
) -> StepReport:
    """Sum what the micro-batches and ranks saw."""
    terms = dict.fromkeys(scales, 0.0)
    metrics: dict[str, list[float]] = {}
    for packed, scores in scored:
        sums = job.method.loss(scores, packed.to(scores.logp_N.device))
        for term, total in sums.terms.items():
            terms[term] += float(total)
        for name, (total, number) in sums.metrics.items():
            have = metrics.setdefault(name, [0.0, 0.0])
            have[:] = [have[0] + float(total), have[1] + float(number)]
    sizes = [
        float(sum(packed.num_targets for packed, _ in scored)),
        float(sum(packed.num_tokens for packed, _ in scored)),
        float(sum(packed.num_tokens_unshared for packed, _ in scored)),
    ]
    names = sorted(set().union(*job.ranks.gather(set(metrics))))
    pairs = [value for name in names for value in metrics.get(name, [0.0, 0.0])]
    *rest, targets, tokens, unshared = job.ranks.sum([*terms.values(), *pairs, *sizes])
    totals, pairs = rest[: len(terms)], rest[len(terms) :]
    means = dict(zip(names, zip(pairs[::2], pairs[1::2], strict=True), strict=True))
    return StepReport(
        step=step,
        loss=sum(scale * total for scale, total in zip(scales.values(), totals, strict=True)),
        metrics={name: total / count for name, (total, count) in means.items() if count},
        num_targets=int(targets),
        num_tokens=int(tokens),
        num_tokens_unshared=int(unshared),
        sample_ids=[sample.id for tree in trees for sample in tree.samples],
        scored=list(scored),
    )


def require_finite(value: float, what: str, report: StepReport, job: Job) -> None:
    """Stop before the update if ``value`` is not finite, and name the samples."""
    if torch.isfinite(torch.tensor(value)):
        return
    mine = {id_ for packed, scores in report.scored for id_ in _not_finite(packed, scores.logp_N)}
    guilty = sorted(set().union(*job.ranks.gather(mine)))
    named = guilty or report.sample_ids
    whose = "samples with a log-probability that is not finite" if guilty else "the step's samples"
    raise NonFiniteError(
        f"step {report.step}: the {what} is {value}; the weights are those of step {report.step - 1}; "
        f"{whose}: {', '.join(named[:8])}{f' and {len(named) - 8} more' if len(named) > 8 else ''}; "
        "look at them with `taut show`, or lower optim.learning_rate"
    )


def _not_finite(packed: Packed, logp_N: Tensor) -> set[str]:
    rows = packed.row_N[~torch.isfinite(logp_N).cpu()]
    return {packed.sample_ids[row] for row in rows.tolist()}
