"""The one training loop. It knows no algorithm: a method prepares trees, a loss defines the sums.

    loss = sum over terms of  sum_i / count_i

``count_i`` is taken over all micro-batches and ranks before the first backward, and the gradient is divided by it in
exactly one place (``scales`` below), so any split of a step into micro-batches and ranks gives the same numbers.
The outputs of other models (roles) and the statistics of the whole step that a loss needs are also computed before the
first backward.

Monitors examine each step before the update and may stop the run (taut/train/monitors.py). Events go to ``Job.emit``.
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

from taut import losses
from taut.config import Decision
from taut.data.batching import Budget, Cursor, Rows, assign, layouts
from taut.data.packing import PackPolicy
from taut.errors import NonFiniteError, OutOfMemory
from taut.losses import Loss
from taut.models.noise import Noise
from taut.train import optim, random_state, step_statistics
from taut.train.checkpoint import Memory
from taut.train.distributed import Ranks
from taut.train.oom import Fit
from taut.train.signals import Interrupts
from taut.types import Packed, Sample, Scores, Tree
from taut.vision.image_store import Album

SIZES = ("num_targets", "num_tokens", "num_tokens_unshared")
"""The sizes that every step counts."""


class StepSource(Protocol):
    """Where steps come from, as far as the loop knows: fixed data, or rollouts."""

    @property
    def loss(self) -> Loss:
        """The loss to minimise."""

    def prepare(self, step: int) -> list[Tree]:
        """The trees of a step (counted from 1), with all streams that no role provides; empty to skip the step."""

    def observed(self, step: int) -> list[Tree] | None:
        """The trees over which the loss's statistics are taken; None: those of the step."""

    def observed_of(self, rows: Rows, indices: list[int]) -> list[Tree] | None:
        """The same for given rows, e.g. held-out data."""

    def cursor(self, step: int) -> Cursor:
        """The position in the data after a step: with the seed, all that a resume needs."""

    def open(self) -> Sequence[Decision]:
        """Make ready what it needs besides the model, so that what is not available is refused before training;
        (name, value, reason) of what was settled on the way.
        """

    @property
    def state(self) -> Memory | None:
        """What checkpoints keep of it; None: the cursor is all."""

    def reject(self) -> None:
        """Forget what no step has trained on yet: what stopped the run may be its fault."""

    def close(self) -> None:
        """Release its resources."""


class Role(Protocol):
    """A second model whose outputs the loss needs, e.g. the reference."""

    gives: str
    """The stream that it computes where samples do not have it."""

    def active(self) -> AbstractContextManager[Any]:
        """A context around the computation of streams: once per step, on every rank."""

    def streams(self, packed: Packed) -> dict[str, Tensor]:
        """The role's streams of a micro-batch. Called equally often on every rank, without gradient."""

    def follow(self, step: int) -> None:
        """Called after the update of a step, on every rank."""

    def tensors(self) -> list[Tensor]:
        """What it holds in memory."""


class Scored(NamedTuple):
    """A micro-batch and the model's scores, kept for the monitors."""

    packed: Packed
    scores: Scores


@dataclass(frozen=True)
class StepReport:
    """A step after its backward passes and before the update. Sums are over all ranks; ``scored`` is this rank's."""

    step: int
    loss: float
    metrics: dict[str, float]
    num_targets: int
    num_tokens: int
    num_tokens_unshared: int
    sample_ids: list[str]
    scored: list[Scored]
    grad_norm: float = float("nan")


class Monitor(Protocol):
    """Called after the backward of each step and before the update; raises CheckFailed to stop the run."""

    def __call__(self, report: StepReport, job: Job) -> None: ...


@dataclass
class Job:
    """Everything a run needs, built by taut.run.setup."""

    scorer: nn.Module
    method: StepSource
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
    roles: Sequence[Role] = ()
    clip_grad_norm: float | None = None
    monitors: Sequence[Monitor] = ()
    before_step: Sequence[Callable[[int], None]] = ()
    """Preparation of the next step, e.g. reading images."""
    after_step: Sequence[Callable[[int], None]] = ()
    """Evaluation and checkpoints: called with the finished step."""
    done: int = 0
    """The last step whose update the weights have."""
    followed: int = 0
    """The last step after which ``after_step`` was called."""
    loss: float = float("nan")
    """The loss of the last step that was not skipped."""
    interrupts: Interrupts = field(default_factory=Interrupts)
    emit: Callable[..., None] = field(init=False)
    """Writes an event: ``emit(kind, **fields)``. Set once the output directory is claimed."""
    trained: list[nn.Parameter] = field(init=False)
    random: random_state.State = field(init=False)
    """The generators' state at the start of the current step, or of the ``after_step`` calls."""

    def __post_init__(self) -> None:
        self.trained = [p for group in self.optimizer.param_groups for p in group["params"]]


def run_steps(job: Job) -> None:
    """Take all remaining steps with their ``after_step`` calls. Raises Interrupt with the current step undone."""
    while True:
        job.random = random_state.capture(job.ranks.device)
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
    report = _step_within_memory(job, step)
    job.done = step
    if report.sample_ids:
        job.loss = report.loss
    job.emit(
        "step",
        step=step,
        loss=report.loss,
        grad_norm=report.grad_norm,
        **optim.learning_rates(job.optimizer),
        num_targets=report.num_targets,
        num_tokens=report.num_tokens,
        num_tokens_unshared=report.num_tokens_unshared,
        seconds=time.perf_counter() - began,
        sample_ids=report.sample_ids,
        **_gpu_memory(job.ranks.device),
        **report.metrics,
    )


def _step_within_memory(job: Job, step: int) -> StepReport:
    """``train_step``; where memory runs out and batch.halve_when_out_of_memory is set, again with a smaller budget."""
    while True:
        use_budget(job, step)
        try:
            return train_step(job, step)
        except OutOfMemory as error:
            job.optimizer.zero_grad()
            if not job.fit.halve(step, error):
                raise
        random_state.restore(job.random, job.ranks.device)


def use_budget(job: Job, step: int, *, is_reported: bool = False) -> None:
    """Set the token budget of a step, and emit each new cut unless it ``is_reported`` already."""
    for halving in job.fit.begin(step):
        if not is_reported:
            job.emit("budget", **halving._asdict())
    job.budget = job.budget._replace(tokens_per_microbatch=job.fit.tokens)


def _gpu_memory(device: torch.device) -> dict[str, int]:
    """The GPU's peak memory; without a GPU the console measures the process."""
    if device.type != "cuda":
        return {}
    return {"memory_bytes": torch.cuda.max_memory_allocated(device)}


def train_step(job: Job, step: int) -> StepReport:
    """One optimizer step. A step without trees is skipped: weights and optimizer state stay, the schedule advances."""
    for act in job.before_step:
        act(step)
    trees = job.method.prepare(step)
    if not trees:
        return _skipped(job, step)
    report = add_gradients(job, trees, step, job.method.observed(step))
    require_finite(report.loss, "loss", report, job)
    norms = optim.clip(job.optimizer, job.clip_grad_norm)
    report = replace(report, grad_norm=norms.pop("grad_norm"), metrics=report.metrics | norms)
    require_finite(report.grad_norm, "gradient norm", report, job)
    job.interrupts.agree(job.ranks)  # before the monitors, which remember the steps they saw
    for monitor in job.monitors:
        monitor(report, job)
    optim.set_learning_rate(job.optimizer, job.learning_rate(step), step)
    job.optimizer.step()
    job.optimizer.zero_grad()
    for role in job.roles:
        role.follow(step)
    return report


def _skipped(job: Job, step: int) -> StepReport:
    """A step without trees. Monitors do not see it: it has no gradient."""
    job.interrupts.agree(job.ranks)
    optim.set_learning_rate(job.optimizer, job.learning_rate(step), step)
    for role in job.roles:
        role.follow(step)
    return StepReport(step, 0.0, {"skipped": 1.0}, 0, 0, 0, [], [], grad_norm=0.0)


def add_gradients(
    job: Job, trees: Sequence[Tree], step: int, observed: Sequence[Tree] | None = None
) -> StepReport:
    """Add the gradient of a step with these trees. ``observed``: the trees over which the loss's statistics are taken,
    if not these.
    """
    job.scorer.train()
    planned = prepare_microbatches(job, trees, observed, f"step {step}")
    microbatches = [packed for packed, is_real in planned if is_real]
    counts = denominators(job.method.loss, microbatches, job.ranks)
    scales = {term: 1.0 / count for term, count in counts.items()}
    nothing = dict.fromkeys(scales, 0.0)
    scored = []
    for packed, is_real in planned:
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
            scores: Scores = job.scorer(packed, torch.stack(shares).sum(0), loss.wants)
            total = scores.linear_sum
        else:
            scores = job.scorer(packed, wants=loss.wants)
            terms = loss(scores, packed.to(scores.device)).terms
            total = torch.stack([scales[term] * value for term, value in terms.items()]).sum()
    assert total is not None
    with job.compute_backward():
        total.backward()  # type: ignore[no-untyped-call]
    return scores.detach()


def prepare_microbatches(
    job: Job, trees: Sequence[Tree], observed: Sequence[Tree] | None, where: str
) -> list[tuple[Packed, bool]]:
    """This rank's micro-batches with the roles' streams and the step's statistics, and whether each counts."""
    loss = job.method.loss
    planned = fill_streams(job, trees, where)
    if not loss.observes:
        return planned
    planned_observed = planned if observed is None else fill_streams(job, observed, where)
    observations = []
    with torch.no_grad(), job.compute():
        for packed, _ in planned_observed:
            score = partial(job.scorer, packed, wants=loss.wants)
            scores = job.fit.attempt(score, packed, observed or trees, where)
            observations.append(loss.observe(scores, packed.to(scores.device)))
    counted = [
        observation
        for observation, (_, is_real) in zip(observations, planned_observed, strict=True)
        if is_real
    ]
    stats = step_statistics.compute_statistics(loss, counted, job.ranks)
    return step_statistics.attach_statistics(planned, stats, job.ranks)


def fill_streams(job: Job, trees: Sequence[Tree], where: str) -> list[tuple[Packed, bool]]:
    """This rank's micro-batches with the roles' streams, and whether each counts. Starts reading the images."""
    planned = pad_microbatches(plan_microbatches(trees, job), trees, job)
    for medium in (medium for packed, _ in planned for medium in packed.media):
        medium.picture.expect()
    missing = set(job.method.loss.needs) - planned[0][0].streams.keys()
    for role in (role for role in job.roles if role.gives in missing):
        with job.interrupts.held(), role.active(), torch.no_grad(), job.compute():
            streams = []
            for packed, _ in planned:
                if job.ranks.size == 1:
                    job.interrupts.check()
                compute_streams = partial(role.streams, packed)
                streams.append(job.fit.attempt(compute_streams, packed, trees, where))
        planned = [
            (replace(packed, streams={**packed.streams, **more}), is_real)
            for (packed, is_real), more in zip(planned, streams, strict=True)
        ]
    return planned


def plan_microbatches(trees: Sequence[Tree], job: Job) -> list[Packed]:
    """This rank's micro-batches of a step."""
    max_tokens = job.budget.tokens_per_microbatch
    mine = assign(trees, job.budget)[job.ranks.rank]
    return [packed for planned in mine for packed in layouts(planned, job.policy, max_tokens)]


def pad_microbatches(
    microbatches: list[Packed], trees: Sequence[Tree], job: Job
) -> list[tuple[Packed, bool]]:
    """The micro-batches, padded with ones that do not count until all ranks run the same number of backward passes."""
    missing = int(job.ranks.max([len(microbatches)])[0]) - len(microbatches)
    shortest: Sample = min((s for tree in trees for s in tree.samples), key=lambda s: s.num_tokens)
    filler = layouts((Tree((shortest,)),), job.policy, job.budget.tokens_per_microbatch)
    return [(packed, True) for packed in microbatches] + [(filler[0], False)] * missing


def denominators(loss: Loss, microbatches: Sequence[Packed], ranks: Ranks) -> dict[str, float]:
    """Each term's count over all micro-batches and ranks, before any forward."""
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
    """Sum the terms, metrics and sizes over micro-batches and ranks."""
    sums = step_statistics.Sums()
    for packed, scores in scored:
        loss = job.method.loss(scores, packed.to(scores.device))
        for term, total in loss.terms.items():
            sums.add(f"term {term}", total)
        for name, (total, count) in loss.metrics.items():
            sums.add(name, total, count)
        for name in SIZES:
            sums.add(name, getattr(packed, name))
    totals = sums.totals(job.ranks)
    terms = {term: totals.pop(f"term {term}").total for term in scales}
    sizes = {name: int(totals.pop(name).total) for name in SIZES}
    metrics = {name: part.mean for name, part in totals.items() if part.over}
    return StepReport(
        step=step,
        loss=sum(scale * terms[term] for term, scale in scales.items()),
        metrics=metrics | job.method.loss.derived(metrics),
        sample_ids=[sample.id for tree in trees for sample in tree.samples],
        scored=list(scored),
        **sizes,
    )


def require_finite(value: float, what: str, report: StepReport, job: Job) -> None:
    """Stop before the update if ``value`` is not finite, and name the samples."""
    if torch.isfinite(torch.tensor(value)):
        return
    mine = set()
    for packed, scores in report.scored:
        rows = []
        if packed.num_targets:
            rows += packed.row_N[~torch.isfinite(scores.logp_N).cpu()].tolist()
        if scores.scalar_R is not None:
            rows += packed.row_R[~torch.isfinite(scores.scalar_R).cpu()].tolist()
        mine |= {packed.sample_ids[row] for row in rows}
    guilty = sorted(set().union(*job.ranks.gather(mine)))
    named = guilty or report.sample_ids
    whose = "samples with a score that is not finite" if guilty else "the step's samples"
    raise NonFiniteError(
        f"step {report.step}: the {what} is {value}; the weights are those of step {report.step - 1}; "
        f"{whose}: {', '.join(named[:8])}{f' and {len(named) - 8} more' if len(named) > 8 else ''}; "
        "look at them with `taut show`, or lower optim.learning_rate"
    )


@dataclass
class Lookahead:
    """Called before each step: starts threads that read the images of the step and of the next one.

    Only for offline data, where the samples of a step are a pure function; prompts of rollouts have read their images
    already. Each rank reads its own.
    """

    job: Job
    album: Album
    expected: int = 0
    """The last step whose images are requested already."""

    def __call__(self, step: int) -> None:
        first = max(step, self.expected + 1)
        self.expected = min(step + 1, self.job.num_steps)
        for number in range(first, self.expected + 1):
            packs = plan_microbatches(self.job.method.prepare(number), self.job)
            self.album.expect([medium.picture for packed in packs for medium in packed.media])
