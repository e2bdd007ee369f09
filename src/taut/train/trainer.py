"""The one training loop. It knows no algorithm: a method prepares trees, a loss defines the sums.

    loss = sum over terms of  sum_i / count_i

``count_i`` is taken over all micro-batches and ranks before the first backward, and the gradient is divided by it in
exactly one place (``scales`` below), so any split of a step into micro-batches and ranks gives the same numbers.
The outputs of other models (roles) and the statistics of the whole step that a loss needs are also computed before the
first backward. So is what the routers of a mixture of experts choose, where their load-balancing loss is added to that
of the method (taut/losses/router.py).

Monitors examine each step before the update and may stop the run (taut/train/monitors.py). Events go to
``Trainer.emit``.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from taut import losses
from taut.config import Decision
from taut.data.batching import Budget, Rows, assign, divide, layouts, samples_of
from taut.data.order import Cursor
from taut.data.packing import PackPolicy
from taut.errors import NonFiniteError, OutOfMemory, RankFailed
from taut.losses import Loss
from taut.losses.router import slopes
from taut.models.noise import Noise
from taut.models.routers import RouterConfig
from taut.train import distributed, optim, random_state, step_statistics
from taut.train.checkpoint import Memory
from taut.train.distributed import Ranks
from taut.train.oom import Fit
from taut.train.recorder import Recorder
from taut.train.signals import Interrupts
from taut.train.utilisation import Meter, Told
from taut.types import LossSum, Packed, Picture, Sample, Scores, Tree, Wants, to_device, to_host

SIZES = ("num_targets", "num_tokens", "num_tokens_unshared")
"""The sizes that every step counts."""


class StepSource(Protocol):
    """The source of steps, as the loop sees it: fixed data, or rollouts."""

    @property
    def loss(self) -> Loss:
        """The loss to minimise."""

    def prepare(self, step: int) -> list[Tree]:
        """The trees of a step (counted from 1), with all streams that no role provides; empty to skip the step."""

    def is_known(self, step: int) -> bool:
        """Whether the trees of a step depend on no weights that are yet to be trained, so that ``prepare`` may be
        called for it before the one in front of it has ended.
        """

    def observed(self, step: int) -> list[Tree] | None:
        """The trees over which the loss's statistics are taken; None: those of the step."""

    def observed_of(self, rows: Rows, indices: list[int]) -> list[Tree] | None:
        """The same for given rows, e.g. held-out data."""

    def cursor(self, step: int) -> Cursor:
        """The position in the data after a step: with the seed, all that a resume needs."""

    def open(self) -> Sequence[Decision]:
        """Open the engine, rewards and other resources, so that a missing one is refused before training. Returns the
        decisions made on the way.
        """

    @property
    def state(self) -> Memory | None:
        """The state that checkpoints keep; None: the cursor is sufficient."""

    def reject(self) -> None:
        """Discard samples that no step has trained on yet: they may be the cause of the failure."""

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
        """The tensors that it holds in memory."""


class Planned(NamedTuple):
    """Trees, and this rank's micro-batches of them: what is known before any model runs."""

    trees: Sequence[Tree]
    microbatches: list[tuple[Packed, bool]]
    """Each with whether it counts."""
    observed: Planned | None = None
    """What the loss's statistics are taken over, if not these trees."""
    counts: Mapping[str, float] | None = None
    """Each term's denominator, where the ranks have told each other theirs already."""
    silent: Sequence[Sample] = ()
    """Samples that are counted and not computed (``Loss.is_silent``), of all ranks."""


class Scored(NamedTuple):
    """A micro-batch in host memory and the model's scores, kept for the monitors."""

    packed: Packed
    scores: Scores


class Gradients(NamedTuple):
    """What the backward passes of a step leave beside the gradient; nothing of it is read from the device."""

    scored: list[Scored]
    sums: list[LossSum]
    """The loss of each, without gradient."""
    scales: dict[str, float]
    """By which each term is multiplied."""
    logps: list[Tensor]
    """Of each: the sum of every sample's ``logp_N``, [S]; empty where there are no targets."""
    router_losses: list[Tensor]
    """Of each: its share of the routers' loss; empty without one."""


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
    signals: Sequence[str | None] = ()
    """What each rank has received."""
    trees: Sequence[Tree] = ()
    nll: Mapping[str, float] = field(default_factory=dict)
    """Each sample's mean -logprob of its targets, in nats, by id; of all ranks. Empty where nothing is predicted."""
    utilisation: Sequence[Told | None] = ()
    """What each rank has read of its host since the last step."""
    router_loss: float = 0.0
    """The part of ``loss`` that balances the routers."""

    @property
    def method_loss(self) -> float:
        """The loss without the routers' part: what the scores of the samples alone give."""
        return self.loss - self.router_loss


class Monitor(Protocol):
    """Called after the backward of each step and before the update; raises CheckFailed to stop the run."""

    def __call__(self, report: StepReport, trainer: Trainer) -> None: ...


def emit_nowhere(kind: str, **fields: Any) -> None:
    """Refuse an event: a run that only looks has no log."""
    raise AssertionError(f"an event without a log: {kind} {fields}")


@dataclass
class Trainer:
    """Everything that the loop works with, made whole by ``build_trainer`` (taut/run/setup.py). Nothing is assigned to
    it from outside: the loop itself advances ``budget`` and the fields from ``done`` on, all others are final.
    """

    scorer: Final[nn.Module]
    source: Final[StepSource]
    optimizer: Final[torch.optim.Optimizer]
    learning_rate: Final[Callable[[int], float]]
    num_steps: Final[int]
    budget: Budget
    """With the micro-batch size that is in use: the loop cuts it where memory runs out."""
    policy: Final[PackPolicy]
    ranks: Final[Ranks]
    compute: Final[Callable[[], AbstractContextManager[Any]]]
    """The precision context of a forward."""
    compute_backward: Final[Callable[[], AbstractContextManager[Any]]]
    """The precision context of a backward."""
    noise: Final[Noise | None]
    fit: Final[Fit]
    roles: Final[Sequence[Role]] = ()
    clip_grad_norm: Final[float | None] = None
    router: Final[RouterConfig] = RouterConfig()  # noqa: RUF009 (frozen)
    monitors: Final[Sequence[Monitor]] = ()
    before_planning: Final[Sequence[Callable[[int, Trainer], None]]] = ()
    """Called before a step is planned, e.g. to start reading images."""
    emit: Final[Callable[..., None]] = emit_nowhere
    """Writes an event: ``emit(kind, **fields)``."""
    recorder: Final[Recorder] = field(default_factory=Recorder)
    """Keeps tokens and rollouts."""
    meter: Final[Meter] = field(default_factory=Meter)
    """Reads how busy the hosts are."""
    interrupts: Final[Interrupts] = field(default_factory=Interrupts)
    done: int = field(default=0, init=False)
    """The last step whose update the weights have."""
    followed: int = field(default=0, init=False)
    """The last step after which ``after_step`` was called."""
    loss: float = field(default=float("nan"), init=False)
    """The loss of the last step that was not skipped."""
    plans: dict[tuple[int, Budget], Planned | Exception] = field(default_factory=dict, init=False)
    """The steps that are planned and not yet taken, by number and budget; an error is raised when its step begins."""
    random: random_state.State = field(init=False)
    """The generators' state at the start of the current step, or of the ``after_step`` calls."""

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def go_on_from(trainer: Trainer, step: int, loss: float, *, is_measured: bool) -> None:
    """Begin after ``step``, whose weights are restored. ``is_measured``: what follows the step was done as well."""
    trainer.done, trainer.followed = step, step - (not is_measured)
    trainer.loss = loss


def run_steps(trainer: Trainer, after_step: Sequence[Callable[[int], None]] = ()) -> None:
    """Take all remaining steps. ``after_step``: evaluation and checkpoints, called with each finished step. Raises
    Interrupt with the current step undone.
    """
    while True:
        trainer.random = random_state.capture(trainer.ranks.device)
        if trainer.followed < trainer.done:
            for act in after_step:
                act(trainer.done)
            trainer.followed = trainer.done
        elif trainer.done < trainer.num_steps:
            _take_step(trainer, trainer.done + 1)
        else:
            return


def _take_step(trainer: Trainer, step: int) -> None:
    began = time.perf_counter()
    report = _step_within_memory(trainer, step)
    trainer.done = step
    if report.sample_ids:
        trainer.loss = report.loss
    trainer.emit(
        "step",
        step=step,
        loss=report.loss,
        grad_norm=report.grad_norm,
        **optim.learning_rates(trainer.optimizer),
        num_targets=report.num_targets,
        num_tokens=report.num_tokens,
        num_tokens_unshared=report.num_tokens_unshared,
        seconds=time.perf_counter() - began,
        sample_ids=report.sample_ids,
        **_sample_nll(report),
        **_gpu_memory(trainer.ranks.device),
        **report.metrics,
    )
    if busy := trainer.meter.together(report.utilisation):
        trainer.emit("utilisation", step=step, **busy)


def _sample_nll(report: StepReport) -> dict[str, list[float]]:
    """The mean -logprob of each of ``sample_ids``, to five digits."""
    if not report.nll:
        return {}
    values = [report.nll.get(sample_id, math.nan) for sample_id in report.sample_ids]
    return {"sample_nll": [float(f"{value:.5g}") for value in values]}


def _gpu_memory(device: torch.device) -> dict[str, int]:
    """The GPU's peak memory; without a GPU the console measures the process."""
    if device.type != "cuda":
        return {}
    return {"memory_bytes": torch.cuda.max_memory_allocated(device)}


def _step_within_memory(trainer: Trainer, step: int) -> StepReport:
    """``train_step``; where memory runs out and batch.halve_when_out_of_memory is set, again with a smaller budget."""
    while True:
        use_budget(trainer, step)
        try:
            return train_step(trainer, step)
        except OutOfMemory as error:
            trainer.optimizer.zero_grad()
            if not trainer.fit.halve(step, error):
                raise
        random_state.restore(trainer.random, trainer.ranks.device)


def use_budget(trainer: Trainer, step: int, *, is_reported: bool = False) -> None:
    """Set the token budget of a step, and emit each new cut unless it ``is_reported`` already."""
    for halving in trainer.fit.begin(step):
        if not is_reported:
            trainer.emit("budget", **halving._asdict())
    trainer.budget = trainer.budget._replace(tokens_per_microbatch=trainer.fit.tokens)


def train_step(trainer: Trainer, step: int) -> StepReport:
    """One optimizer step. A step without trees is skipped: weights and optimizer state stay, the schedule advances."""
    trainer.ranks.doing(f"preparing step {step}")
    plan = take_plan(trainer, step)
    trainer.ranks.doing(f"taking step {step}")
    trees = plan.trees
    if trees:
        gradients = compute_gradients(trainer, plan, step)
        norms = optim.clip(trainer.optimizer, trainer.clip_grad_norm)
        plan_ahead(trainer, step + 1)  # the device still works; after this the host waits for it
        report = summarise(trainer, step, plan, gradients, norms)
        require_finite(report.loss, "loss", report, trainer)
        require_finite(report.grad_norm, "gradient norm", report, trainer)
    else:
        report = StepReport(step, 0.0, {"skipped": 1.0}, 0, 0, 0, [], [], grad_norm=0.0)
    # Before the monitors, which remember the steps they have seen.
    if trees:
        trainer.interrupts.obey(report.signals)
    else:
        trainer.interrupts.agree(trainer.ranks)
    if trees:  # first, so that a step which a monitor stops is recorded
        trainer.recorder.look(report, trainer)
    for monitor in trainer.monitors if trees else ():
        monitor(report, trainer)
    optim.set_learning_rate(trainer.optimizer, trainer.learning_rate(step), step)
    if trees:
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    for role in trainer.roles:
        role.follow(step)
    return report


def plan_ahead(trainer: Trainer, step: int) -> None:
    """Plan a step while the one in front of it is still to be updated, if its trees are known by now."""
    if step <= trainer.num_steps and trainer.source.is_known(step):
        with _errors_put_aside(trainer, step):
            _plan_step(trainer, step)


@contextmanager
def _errors_put_aside(trainer: Trainer, step: int) -> Iterator[None]:
    """An error in planning a step ahead is raised when the step begins: those in front of it are sound."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 (raised by take_plan)
        trainer.plans[step, trainer.budget] = error


def take_plan(trainer: Trainer, step: int) -> Planned:
    """The plan of a step that begins: the one that was made ahead, unless the budget has changed since."""
    found = trainer.plans.get((step, trainer.budget)) or _plan_step(trainer, step)
    trainer.plans = {key: plan for key, plan in trainer.plans.items() if key[0] > step}
    if isinstance(found, Exception):
        raise found
    return found


def _plan_step(trainer: Trainer, step: int) -> Planned:
    for prepare in trainer.before_planning:
        prepare(step, trainer)
    return keep_plan(trainer, step)


def keep_plan(trainer: Trainer, step: int) -> Planned:
    """The plan of a step, kept until it is taken."""
    key, source = (step, trainer.budget), trainer.source
    kept = trainer.plans.get(key)
    if isinstance(kept, Planned):
        return kept
    trees = source.prepare(step)
    plan = plan_trees(trainer, trees, source.observed(step)) if trees else Planned(trees, [])
    trainer.plans[key] = plan
    return plan


def plan_trees(
    trainer: Trainer, trees: Sequence[Tree], observed: Sequence[Tree] | None = None
) -> Planned:
    """``observed``: the trees over which the loss's statistics are taken, if not these."""
    computed, silent = list(trees), list[Sample]()
    if not trainer.router.aux_loss_coef:  # each token has a part in the routers' loss
        computed, silent = without_silent(trainer.source.loss, trees)
    plan = Planned(trees, plan_microbatches(computed, trainer), silent=silent)
    if observed is None or not trainer.source.loss.observes:
        return plan
    return plan._replace(observed=plan_trees(trainer, observed))


def without_silent(loss: Loss, trees: Sequence[Tree]) -> tuple[list[Tree], list[Sample]]:
    """The trees that are computed, and the samples of the others, all of which are silent. Where all trees are, the
    smallest one is computed, for a gradient of 0 and its metrics.
    """
    is_silent = [all(map(loss.is_silent, tree.samples)) for tree in trees]
    if all(is_silent):
        sizes = [sum(sample.num_tokens for sample in tree.samples) for tree in trees]
        is_silent[sizes.index(min(sizes))] = False
    computed = [tree for tree, silent in zip(trees, is_silent, strict=True) if not silent]
    left = [tree for tree, silent in zip(trees, is_silent, strict=True) if silent]
    return computed, samples_of(left)


def add_gradients(
    trainer: Trainer, trees: Sequence[Tree], step: int, observed: Sequence[Tree] | None = None
) -> StepReport:
    """Add the gradient of a step with these trees, and report the step. ``observed``: the trees over which the loss's
    statistics are taken, if not these.
    """
    plan = plan_trees(trainer, trees, observed)
    return summarise(trainer, step, plan, compute_gradients(trainer, plan, step))


def compute_gradients(trainer: Trainer, plan: Planned, step: int) -> Gradients:
    """``add_gradients``, before anything is read from the device."""
    trainer.scorer.train()
    planned = prepare_microbatches(trainer, plan, f"step {step}")
    microbatches = [packed for packed, is_real in planned if is_real]
    counts = plan.counts
    if counts is None:
        require_same_plan(step, trainer.ranks.gather_in_step(drawn_of(plan)))
        counts = denominators(trainer.source.loss, microbatches, trainer.ranks, plan.silent)
    scales = {term: 1.0 / count for term, count in counts.items()}
    nothing = dict.fromkeys(scales, 0.0)
    slope_LE = router_slopes(trainer, planned, plan.trees, f"step {step}")
    scored, sums, logps, router_losses = [], [], [], []
    with distributed.summing_gradients(trainer.trained, trainer.ranks):
        for packed, is_real in on_device(trainer, planned):
            if trainer.ranks.size == 1:
                trainer.interrupts.check()
            weights = scales if is_real else nothing
            slope = slope_LE if is_real or slope_LE is None else slope_LE * 0
            act = partial(backward, trainer, packed, weights, step, slope)
            scores, of_loss, router_loss = trainer.fit.attempt(
                act, packed, plan.trees, f"step {step}"
            )
            if is_real:
                scored.append(Scored(packed.on_host, scores))
                logp_N = scores.logp_N
                logps.append(packed.by_sample(logp_N) if logp_N.numel() else logp_N)
                sums.append(of_loss)
                if router_loss is not None:
                    router_losses.append(router_loss)
    return Gradients(scored, sums, scales, logps, router_losses)


def on_device(
    trainer: Trainer, planned: Sequence[tuple[Packed, bool]]
) -> Iterator[tuple[Packed, bool]]:
    """The micro-batches, ready for a forward; each is made so before the one in front of it runs."""
    scorer: Any = trainer.scorer
    ahead: tuple[Packed, bool] | None = None
    for packed, is_real in planned:
        next_one = scorer.ready(packed), is_real
        if ahead is not None:
            yield ahead
        ahead = next_one
    if ahead is not None:
        yield ahead


def router_slopes(
    trainer: Trainer, planned: Sequence[tuple[Packed, bool]], trees: Sequence[Tree], where: str
) -> Tensor | None:
    """The slopes of the routers' loss, [L, E], from the choices in all micro-batches; None: it is off. The choices are
    those without noise.
    """
    config, scorer = trainer.router, trainer.scorer
    if not config.aux_loss_coef:
        return None
    count_LE: list[Tensor] = []
    with torch.no_grad(), trainer.compute():
        for packed, is_real in on_device(trainer, planned):
            score = partial(scorer, packed, wants=Wants(logp=False, routers=True))
            scores = trainer.fit.attempt(score, packed, trees, where)
            count_LE.append(scores.router_count_LE * is_real)
    total_LE = torch.stack(to_host(count_LE)).double().sum(0)
    mine = sum(packed.num_tokens_unshared for packed, is_real in planned if is_real)
    num_tokens, *counts = trainer.ranks.sum_of_shares([mine, *total_LE.flatten().tolist()])
    total_LE = torch.tensor(counts, dtype=torch.float64).view_as(total_LE)
    recorder: Any = scorer.routers
    kind, coef = config.aux_loss, config.aux_loss_coef
    slope_LE = slopes(total_LE, num_tokens, recorder.top_k, kind, coef)
    return to_device([slope_LE], trainer.ranks.device)[0]


def backward(
    trainer: Trainer,
    packed: Packed,
    scales: dict[str, float],
    step: int,
    slope_LE: Tensor | None = None,
) -> tuple[Scores, LossSum, Tensor | None]:
    """Add one micro-batch's share, each term times its scale, to the gradient. ``slope_LE``: of the routers' loss.
    Returns the scores, the loss and the share of the routers' loss.
    """
    loss = trainer.source.loss
    wants = loss.wants if slope_LE is None else loss.wants._replace(routers=True)
    of_loss = router_loss = None
    linear = loss.linear_weights(packed)
    if trainer.noise is not None:
        trainer.noise.set(step, packed)
    with trainer.compute():
        if linear is not None:
            shares = [scales[term] * weight_N for term, weight_N in linear.items()]
            scores: Scores = trainer.scorer(packed, torch.stack(shares).sum(0), wants)
            total = scores.linear_sum
        else:
            scores = trainer.scorer(packed, wants=wants)
            with_gradient = loss(scores, packed)
            shares = [scales[term] * value for term, value in with_gradient.terms.items()]
            total, of_loss = torch.stack(shares).sum(), with_gradient.detach()
        assert total is not None
        if slope_LE is not None and (prob_LE := scores.router_prob_LE) is not None:
            of_routers = (slope_LE.to(prob_LE) * prob_LE).sum()
            total, router_loss = total + of_routers, of_routers.detach()
    with trainer.compute_backward():
        total.backward()  # type: ignore[no-untyped-call]
    scores = scores.detach()
    return scores, loss(scores, packed) if of_loss is None else of_loss, router_loss


def prepare_microbatches(trainer: Trainer, plan: Planned, where: str) -> list[tuple[Packed, bool]]:
    """This rank's micro-batches with the roles' streams and the step's statistics, and whether each counts."""
    loss = trainer.source.loss
    planned = fill_streams(trainer, plan, where)
    if not loss.observes:
        return planned
    observed = plan.observed or plan
    planned_observed = planned if observed is plan else fill_streams(trainer, observed, where)
    observations = []
    with torch.no_grad(), trainer.compute():
        for packed, _ in on_device(trainer, planned_observed):
            score = partial(trainer.scorer, packed, wants=loss.wants)
            scores = trainer.fit.attempt(score, packed, observed.trees, where)
            observations.append(loss.observe(scores, packed))
    pairs = zip(observations, planned_observed, strict=True)
    counted = [observation for observation, (_, is_real) in pairs if is_real]
    stats = step_statistics.compute_statistics(loss, counted, trainer.ranks)
    return step_statistics.attach_statistics(planned, stats, trainer.ranks)


def fill_streams(trainer: Trainer, plan: Planned, where: str) -> list[tuple[Packed, bool]]:
    """This rank's micro-batches with the roles' streams, and whether each counts. Starts reading the images."""
    planned = plan.microbatches
    for medium in (medium for packed, _ in planned for medium in packed.media):
        medium.picture.expect()
    missing = set(trainer.source.loss.needs) - planned[0][0].streams.keys()
    for role in (role for role in trainer.roles if role.gives in missing):
        with trainer.interrupts.held(), role.active(), torch.no_grad(), trainer.compute():
            streams = []
            for packed, _ in on_device(trainer, planned):
                if trainer.ranks.size == 1:
                    trainer.interrupts.check()
                compute_streams = partial(role.streams, packed)
                streams.append(trainer.fit.attempt(compute_streams, packed, plan.trees, where))
        planned = [
            (replace(packed, streams={**packed.streams, **more}), is_real)
            for (packed, is_real), more in zip(planned, streams, strict=True)
        ]
    return planned


def plan_microbatches(trees: Sequence[Tree], trainer: Trainer) -> list[tuple[Packed, bool]]:
    """This rank's micro-batches, and whether each counts: where another rank has more, ones that do not are added, so
    that all ranks run the same number of backward passes. Every rank plans for all, so none has to be asked.
    """
    how = trainer.policy, trainer.budget.tokens_per_microbatch
    shares = assign(trees, trainer.budget)
    most = max(sum(len(divide(planned, *how)) for planned in share) for share in shares)
    mine = shares[trainer.ranks.share]
    found = [(packed, True) for planned in mine for packed in layouts(planned, *how)]
    if missing := most - len(found):
        shortest = min(samples_of(trees), key=lambda sample: sample.num_tokens)
        (filler,) = layouts((Tree((shortest,)),), *how)
        found += [(filler, False)] * missing
    return found


def counts_of(
    loss: Loss, microbatches: Sequence[Packed], ranks: Ranks, silent: Sequence[Sample]
) -> list[float]:
    """This rank's share of each term's count; the silent samples are the first rank's."""
    if not ranks.is_counted:
        return [0.0] * len(loss.units)
    uncomputed = silent if ranks.rank == 0 else ()
    return [
        sum(losses.count(unit, packed) for packed in microbatches)
        + (losses.count_silent(unit, uncomputed) if uncomputed else 0.0)
        for unit in loss.units.values()
    ]


def denominators(
    loss: Loss, microbatches: Sequence[Packed], ranks: Ranks, silent: Sequence[Sample] = ()
) -> dict[str, float]:
    """Each term's count over all micro-batches and ranks, before any forward."""
    mine = counts_of(loss, microbatches, ranks, silent)
    totals = dict(zip(loss.units, ranks.sum(mine), strict=True))
    assert all(count > 0 for count in totals.values()), (
        f"a step without anything to learn: {totals}"
    )
    return totals


def summarise(
    trainer: Trainer,
    step: int,
    plan: Planned,
    gradients: Gradients,
    norms: Mapping[str, Tensor] = MappingProxyType({}),
) -> StepReport:
    """Sum the terms, metrics and sizes over micro-batches and ranks. Here the step's numbers are read from the device,
    all at once; ``norms``: those of the gradient, if it is known.
    """
    sums = step_statistics.Sums()
    for (packed, _), of_loss in zip(gradients.scored, gradients.sums, strict=True):
        for term, total in of_loss.terms.items():
            sums.add(f"term {term}", total)
        for name, (total, count) in of_loss.metrics.items():
            sums.add(name, total, count)
        for name, value in of_loss.largest.items():
            sums.add_largest(name, value)
        for name in SIZES:
            sums.add(name, getattr(packed, name))
    for share in gradients.router_losses:
        sums.add("router_aux_loss", share)

    def note(
        logps: Sequence[Tensor],
    ) -> tuple[str | None, list[float] | None, Drawn | None, dict[str, float], Told | None]:
        ahead = trainer.plans.get((step + 1, trainer.budget))
        drawn = drawn_of(ahead) if isinstance(ahead, Planned) else None
        nll = _nll_of_samples(gradients.scored, logps)
        counts = _counts_ahead(trainer, step + 1)
        return trainer.interrupts.received, counts, drawn, nll, trainer.meter.take()

    totals, largest, read, notes = sums.totals(
        trainer.ranks, list(norms.values()), gradients.logps, note
    )
    signals, counts, drawn, nlls, utilisation = zip(*notes, strict=True)
    require_same_plan(step + 1, drawn)
    _agree_on_counts(trainer, step + 1, counts)
    terms = {term: totals.pop(f"term {term}").total for term in gradients.scales}
    sizes = {name: int(totals.pop(name).total) for name in SIZES}
    router_loss, of_routers = 0.0, dict[str, float]()
    if "router_aux_loss" in totals:
        router_loss = totals.pop("router_aux_loss").total
        of_routers = {"router_aux_loss": router_loss / trainer.router.aux_loss_coef}
    metrics = {name: part.mean for name, part in totals.items() if part.over}
    norm_of = dict(zip(norms, read, strict=True))
    sample_ids = [sample.id for sample in samples_of(plan.trees)]
    silent = {"silent": len(plan.silent) / len(sample_ids)} if plan.silent else {}
    return StepReport(
        step=step,
        loss=sum(scale * terms[term] for term, scale in gradients.scales.items()) + router_loss,
        router_loss=router_loss,
        grad_norm=norm_of.pop("grad_norm", math.nan),
        metrics=metrics
        | trainer.source.loss.derived(metrics)
        | norm_of
        | largest
        | silent
        | of_routers,
        sample_ids=sample_ids,
        scored=gradients.scored,
        signals=signals,
        trees=plan.trees,
        nll={sample_id: value for nll in nlls for sample_id, value in nll.items()},
        utilisation=utilisation,
        **sizes,
    )


class Drawn(NamedTuple):
    """What all ranks must plan alike."""

    num_microbatches: int
    """Of each rank: what it does not fill itself is filled up."""
    num_samples: int
    digest: int
    """Of the samples' ids."""


def drawn_of(plan: Planned) -> Drawn:
    ids = [sample.id for tree in plan.trees for sample in tree.samples]
    return Drawn(len(plan.microbatches), len(ids), zlib.crc32("\n".join(ids).encode()))


def require_same_plan(step: int, of_ranks: Sequence[Drawn | None]) -> None:
    """Raise RankFailed where a rank has planned a step otherwise than the first: their collectives would not meet."""
    for rank, drawn in enumerate(of_ranks):
        if drawn is not None and of_ranks[0] is not None and drawn != of_ranks[0]:
            plans = [
                f"rank {number}: {some.num_microbatches} micro-batches of {some.num_samples} samples, checksum of ids "
                f"{some.digest:08x}"
                for number, some in ((0, of_ranks[0]), (rank, drawn))
            ]
            raise RankFailed(
                f"the ranks have planned step {step} differently ({'; '.join(plans)}); expected the same samples and "
                "the same number of micro-batches; see that data, settings and versions are the same on all ranks"
            )


def _nll_of_samples(scored: Sequence[Scored], logps: Sequence[Tensor]) -> dict[str, float]:
    """The mean -logprob of each sample's targets. ``logps``: the sums of each micro-batch's samples, on the host."""
    nll: dict[str, float] = {}
    for (packed, _), logp_S in zip(scored, logps, strict=True):
        if not logp_S.numel():
            continue
        num_targets_S = torch.bincount(packed.row_N, minlength=packed.num_samples)
        means = zip(packed.sample_ids, (-logp_S.double() / num_targets_S).tolist(), strict=True)
        nll |= {sample_id: value for sample_id, value in means if not math.isnan(value)}
    return nll


def _counts_ahead(trainer: Trainer, step: int) -> list[float] | None:
    """This rank's counts of a step, if it is planned."""
    plan = trainer.plans.get((step, trainer.budget))
    if not isinstance(plan, Planned) or not plan.microbatches:
        return None
    counted = [packed for packed, is_real in plan.microbatches if is_real]
    return counts_of(trainer.source.loss, counted, trainer.ranks, plan.silent)


def _agree_on_counts(trainer: Trainer, step: int, of_ranks: Sequence[list[float] | None]) -> None:
    """Keep a step's denominators with its plan, if every rank has planned it."""
    known = [counts for counts in of_ranks if counts is not None]
    plan = trainer.plans.get((step, trainer.budget))
    if len(known) < len(of_ranks) or not isinstance(plan, Planned):
        return
    counts = dict(zip(trainer.source.loss.units, map(sum, zip(*known, strict=True)), strict=True))
    trainer.plans[step, trainer.budget] = plan._replace(counts=counts)


def require_finite(value: float, what: str, report: StepReport, trainer: Trainer) -> None:
    """Stop before the update if ``value`` is not finite, and name the samples."""
    if math.isfinite(value):
        return
    mine = set()
    for packed, scores in report.scored:
        rows = []
        for value_N in (scores.logp_N, scores.divergence_N) if packed.num_targets else ():
            if value_N is not None:
                rows += packed.row_N[~torch.isfinite(value_N).cpu()].tolist()
        if scores.scalar_R is not None:
            rows += packed.row_R[~torch.isfinite(scores.scalar_R).cpu()].tolist()
        mine |= {packed.sample_ids[row] for row in rows}
    not_finite = sorted(set().union(*trainer.ranks.gather(mine)))
    named = not_finite or report.sample_ids
    whose = "samples with a score that is not finite" if not_finite else "the step's samples"
    raise NonFiniteError(
        f"step {report.step}: the {what} is {value}; the weights are those of step {report.step - 1}; "
        f"{whose}: {', '.join(named[:8])}{f' and {len(named) - 8} more' if len(named) > 8 else ''}; "
        "look at them with `taut show`, or lower optim.learning_rate"
    )


@dataclass
class Prefetch:
    """Called before a step is planned: starts threads that read the images of the step and of the next one.

    Only for offline data, where the samples of a step are a pure function; prompts of rollouts have read their images
    already. Each rank reads its own.
    """

    expect: Callable[[Sequence[Picture]], object]
    """Starts reading images (``ImageStore.expect``)."""
    last: int = 0
    """The last step whose images are requested already."""

    def __call__(self, step: int, trainer: Trainer) -> None:
        first = max(step, self.last + 1)
        self.last = min(step + 1, trainer.num_steps)
        for number in range(first, self.last + 1):
            with nullcontext() if number == step else _errors_put_aside(trainer, number):
                plan = keep_plan(trainer, number)
                self.expect(
                    [medium.picture for packed, _ in plan.microbatches for medium in packed.media]
                )
