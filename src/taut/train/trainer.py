"""The one training loop. It knows no algorithm: a method prepares trees, a loss defines the sums.

    loss = sum over terms of  sum_i / count_i

    train_step      plan -> gradients -> report -> monitors -> update
    Planned         the trees of a step, and this rank's micro-batches of them
    Gradients       the scores and sums that the backward passes leave, all still on the device
    StepReport      the numbers of the step, over all ranks

``count_i`` is taken over all micro-batches and ranks before the first backward, and the gradient is divided by it in
exactly one place (``scales`` in ``compute_gradients``), so any split of a step into micro-batches and ranks gives the
same numbers. Everything else that needs the whole step also precedes the first backward: outputs of other models
(roles), the loss's statistics, and the choices of routers where they have a loss (taut/losses/router.py).

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

from taut.config import Decision
from taut.data.batching import Budget, Rows, assign, divide, layouts, samples_of
from taut.data.order import Cursor
from taut.data.packing import PackPolicy
from taut.errors import NonFiniteError, OutOfMemory, RankFailed
from taut.io import allocator
from taut.losses.loss import Loss, count_silent, count_units
from taut.losses.router import slopes
from taut.models.noise import Noise
from taut.models.settings import RouterConfig
from taut.train import distributed, optim, random_state, step_statistics
from taut.train.checkpoint import Memory
from taut.train.distributed import Ranks
from taut.train.oom import Fit
from taut.train.recorder import Recorder
from taut.train.signals import Interrupts
from taut.train.utilization import HostLoad, Meter
from taut.types import LossSum, Packed, Picture, Sample, Scores, Tree, Wants, to_device, to_host

SIZES = ("num_targets", "num_tokens", "num_tokens_unshared")
"""Sizes that every step reports."""


class StepSource(Protocol):
    """Where the steps come from: fixed data, a stream or rollouts."""

    @property
    def loss(self) -> Loss:
        """The loss to minimize."""

    def prepare(self, step: int) -> list[Tree]:
        """The trees of a step (counted from 1), with all streams that no role provides. Empty: the step is skipped."""

    def is_known(self, step: int) -> bool:
        """Whether ``prepare`` may be called for a step before the previous one has ended: its trees do not depend on
        weights that are still to be trained.
        """

    def observed(self, step: int) -> list[Tree] | None:
        """The trees over which the loss takes its statistics; None: the trees of the step."""

    def observed_of(self, rows: Rows, indices: list[int]) -> list[Tree] | None:
        """``observed`` for some rows, e.g. of held-out data."""

    def cursor(self, step: int) -> Cursor:
        """The position in the data after a step: all that a resume needs beside the seed."""

    @property
    def epoch_size(self) -> int:
        """The number of samples, as the cursor counts them, in a pass over the data."""

    def open(self) -> Sequence[Decision]:
        """Open the engine, rewards and other resources, so that a missing one is refused before training. Returns the
        decisions made on the way.
        """

    @property
    def state(self) -> Memory | None:
        """The state that checkpoints keep; None: the cursor is sufficient."""

    def reject(self) -> None:
        """Discard samples that no step has trained on yet: they may have caused a failure."""

    def close(self) -> None:
        """Release its resources."""


class Role(Protocol):
    """A second model whose outputs the loss needs, e.g. the reference."""

    gives: str
    """Name of the stream that it computes for samples that lack it."""

    def active(self) -> AbstractContextManager[Any]:
        """Context around the computation of streams; entered once per step, on every rank."""

    def streams(self, packed: Packed) -> dict[str, Tensor]:
        """Streams of a micro-batch. Called equally often on every rank, without gradient."""

    def follow(self, step: int) -> None:
        """Follow the update of a step; called on every rank."""

    def tensors(self) -> list[Tensor]:
        """Tensors that the role holds in memory."""


class Planned(NamedTuple):
    """A step before any model runs: its trees, and this rank's micro-batches of them."""

    trees: Sequence[Tree]
    microbatches: list[tuple[Packed, bool]]
    """Micro-batches, and whether each counts: the others only keep this rank in step (``plan_microbatches``)."""
    observed: Planned | None = None
    """The plan over which the loss takes its statistics; None: this one."""
    counts: Mapping[str, float] | None = None
    """The denominator of each term, if the ranks have exchanged their counts already."""
    silent: Sequence[Sample] = ()
    """Samples of all ranks that are counted and not computed (``Loss.is_silent``)."""


class Scored(NamedTuple):
    """A micro-batch in host memory and the model's scores, kept for the monitors."""

    packed: Packed
    scores: Scores


class Gradients(NamedTuple):
    """Scores and sums of a step after its backward passes, all still on the device."""

    scored: list[Scored]
    sums: list[LossSum]
    """Loss sums of each micro-batch, without gradient."""
    scales: dict[str, float]
    """Term -> factor of its sums: 1 / denominator."""
    logps: list[Tensor]
    """Of each micro-batch the sum of every sample's ``logp_N``, [S]; empty where there are no targets."""
    router_losses: list[Tensor]
    """Of each micro-batch its share of the routers' loss; empty without such a loss."""


@dataclass(frozen=True)
class StepReport:
    """Numbers of a step after its backward passes and before the update, over all ranks; ``scored`` is this rank's."""

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
    """The signal that each rank has received, if any."""
    trees: Sequence[Tree] = ()
    nll: Mapping[str, float] = field(default_factory=dict)
    """Sample id -> mean -logprob of its targets, in nats. Empty where nothing is predicted."""
    utilization: Sequence[HostLoad | None] = ()
    """Load of its host that each rank has read since the last step."""
    router_loss: float = 0.0
    """The routers' part of ``loss``."""

    @property
    def method_loss(self) -> float:
        """The loss without the routers' part."""
        return self.loss - self.router_loss


class Monitor(Protocol):
    """Examines each step after its backward passes and before the update. Raises CheckFailed to stop the run."""

    def __call__(self, report: StepReport, trainer: Trainer) -> None: ...


def emit_nowhere(kind: str, **fields: Any) -> None:
    """Refuse an event: a trainer that takes no step has no log."""
    raise AssertionError(f"an event without a log: {kind} {fields}")


@dataclass
class Trainer:
    """Everything that the loop works with, built by ``build_trainer`` (taut/run/setup.py). The loop alone assigns to
    ``budget`` and to the fields from ``done`` on; the others are final.
    """

    scorer: Final[nn.Module]
    source: Final[StepSource]
    optimizer: Final[torch.optim.Optimizer]
    learning_rate: Final[Callable[[int], float]]
    num_steps: Final[int]
    budget: Budget
    """How a step is divided, with the current size of a micro-batch, which the loop cuts where memory runs out."""
    policy: Final[PackPolicy]
    ranks: Final[Ranks]
    compute: Final[Callable[[], AbstractContextManager[Any]]]
    """Context that sets the precision of a forward."""
    compute_backward: Final[Callable[[], AbstractContextManager[Any]]]
    """Context that sets the precision of a backward."""
    noise: Final[Noise | None]
    fit: Final[Fit]
    roles: Final[Sequence[Role]] = ()
    clip_grad_norm: Final[float | None] = None
    router: Final[RouterConfig] = RouterConfig()  # noqa: RUF009 (frozen)
    monitors: Final[Sequence[Monitor]] = ()
    before_planning: Final[Sequence[Callable[[int, Trainer], None]]] = ()
    """Called with each step before it is planned, e.g. to start reading images."""
    emit: Final[Callable[..., None]] = emit_nowhere
    """Emits an event: ``emit(kind, **fields)``."""
    recorder: Final[Recorder] = field(default_factory=Recorder)
    """Records tokens and rollouts."""
    meter: Final[Meter] = field(default_factory=Meter)
    """Reads the load of the hosts."""
    interrupts: Final[Interrupts] = field(default_factory=Interrupts)
    done: int = field(default=0, init=False)
    """The last step whose update is in the weights."""
    followed: int = field(default=0, init=False)
    """The last step for which ``after_step`` was called."""
    loss: float = field(default=float("nan"), init=False)
    """The loss of the last step that was not skipped."""
    plans: dict[tuple[int, Budget], Planned | Exception] = field(default_factory=dict, init=False)
    """Plans of coming steps by step and budget. An error in planning is kept and raised when its step begins."""
    random: random_state.State = field(init=False)
    """State of the random generators at the start of the current step, or of the ``after_step`` calls."""

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def restore_progress(trainer: Trainer, step: int, loss: float, *, is_measured: bool) -> None:
    """Continue after ``step``, whose weights are restored. ``is_measured``: ``after_step`` was called for it too."""
    trainer.done, trainer.followed = step, step - (not is_measured)
    trainer.loss = loss


def run_steps(
    trainer: Trainer,
    after_step: Sequence[Callable[[int], None]] = (),
    why_over: Callable[[], str | None] = lambda: None,
) -> None:
    """Take all remaining steps. ``after_step``: called with each finished step, to evaluate and to save checkpoints.
    ``why_over``: returns a reason, the same on every rank, where the run ends before its last step. Raises Interrupt;
    the step that was in progress is then undone.
    """
    while True:
        trainer.random = random_state.capture(trainer.ranks.device)
        if trainer.followed < trainer.done:
            for act in after_step:
                act(trainer.done)
            trainer.followed = trainer.done
        elif trainer.done < trainer.num_steps and why_over() is None:
            _take_step(trainer, trainer.done + 1)
        else:
            return


def _take_step(trainer: Trainer, step: int) -> None:
    """Take a step and emit its event."""
    began = time.perf_counter()
    allocator.give_back_surplus()
    report = _step_within_memory(trainer, step)
    trainer.done = step
    if report.sample_ids:
        trainer.loss = report.loss

    # the event: numbers over all ranks, and to five digits the mean -logprob of each of `sample_ids`
    sample_nll = [float(f"{report.nll.get(i, math.nan):.5g}") for i in report.sample_ids]
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
        **({"sample_nll": sample_nll} if report.nll else {}),
        **_gpu_memory(trainer.ranks.device),
        **report.metrics,
    )
    if busy := trainer.meter.combine(report.utilization):
        trainer.emit("utilization", step=step, **busy)


def _gpu_memory(device: torch.device) -> dict[str, int]:
    """The GPU's peak memory; without a GPU the console measures the process."""
    if device.type != "cuda":
        return {}
    return {"memory_bytes": torch.cuda.max_memory_allocated(device)}


def _step_within_memory(trainer: Trainer, step: int) -> StepReport:
    """``train_step``. Where memory runs out, with batch.halve_when_out_of_memory the step begins again with a smaller
    token budget and the same random numbers.
    """
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
    """Set the token budget of a step. Emits each new cut unless it ``is_reported`` already."""
    for halving in trainer.fit.begin(step):
        if not is_reported:
            trainer.emit("budget", **halving._asdict())
    trainer.budget = trainer.budget._replace(tokens_per_microbatch=trainer.fit.tokens)


def train_step(trainer: Trainer, step: int) -> StepReport:
    """One optimizer step. A step without trees is skipped: weights and optimizer state stay, the schedule advances."""
    # the trees of the step, and this rank's micro-batches of them; usually planned during the previous step
    trainer.ranks.doing(f"preparing step {step}")
    plan = take_plan(trainer, step)
    trainer.ranks.doing(f"taking step {step}")
    trees = plan.trees
    if trees:
        # forward and backward, micro-batch by micro-batch, all terms divided by one denominator for all ranks
        gradients = compute_gradients(trainer, plan, step)
        norms = optim.clip(trainer.optimizer, trainer.clip_grad_norm)

        # plan the next step while the device works; then wait for it and read the numbers of all ranks
        plan_ahead(trainer, step + 1)
        report = summarize(trainer, step, plan, gradients, norms)

        # stop before the update where a number is not finite
        require_finite(report.loss, "loss", report, trainer)
        require_finite(report.grad_norm, "gradient norm", report, trainer)
    else:
        report = StepReport(step, 0.0, {"skipped": 1.0}, 0, 0, 0, [], [], grad_norm=0.0)

    # a signal to any rank ends the run here, before the monitors remember the step
    if trees:
        trainer.interrupts.obey(report.signals)
    else:
        trainer.interrupts.agree(trainer.ranks)

    # the recorder sees the step before the monitors, which may stop the run
    if trees:
        trainer.recorder.look(report, trainer)
    for monitor in trainer.monitors if trees else ():
        monitor(report, trainer)

    # update
    optim.set_learning_rate(trainer.optimizer, trainer.learning_rate(step), step)
    if trees:
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    for role in trainer.roles:
        role.follow(step)
    return report


def plan_ahead(trainer: Trainer, step: int) -> None:
    """Plan a step before the update of the previous one, if its trees are known by then."""
    if step <= trainer.num_steps and trainer.source.is_known(step):
        with _errors_put_aside(trainer, step):
            _plan_step(trainer, step)


@contextmanager
def _errors_put_aside(trainer: Trainer, step: int) -> Iterator[None]:
    """Keep an error in planning a step until the step begins: the steps before it are sound."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 (raised by take_plan)
        trainer.plans[step, trainer.budget] = error


def take_plan(trainer: Trainer, step: int) -> Planned:
    """The plan of the step that begins: the one made ahead, or a new one if the budget has changed since."""
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
    """Plan a step unless it is planned, and keep the plan until the step is taken."""
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
    """Divide trees into micro-batches. ``observed``: the trees over which the loss takes its statistics, if not
    these.
    """
    loss, computed, silent = trainer.source.loss, list(trees), list[Sample]()
    if not trainer.router.aux_loss_coef:  # each token has a part in the routers' loss
        # silent trees are not computed; if all are, the smallest is, for its metrics: its gradient is 0
        is_silent = [all(map(loss.is_silent, tree.samples)) for tree in trees]
        if all(is_silent):
            sizes = [sum(sample.num_tokens for sample in tree.samples) for tree in trees]
            is_silent[sizes.index(min(sizes))] = False
        computed = [tree for tree, is_left in zip(trees, is_silent, strict=True) if not is_left]
        left = [tree for tree, is_left in zip(trees, is_silent, strict=True) if is_left]
        silent = samples_of(left)
    plan = Planned(trees, plan_microbatches(computed, trainer), silent=silent)
    if observed is None or not loss.observes:
        return plan
    return plan._replace(observed=plan_trees(trainer, observed))


def add_gradients(
    trainer: Trainer, trees: Sequence[Tree], step: int, observed: Sequence[Tree] | None = None
) -> StepReport:
    """Add the gradient of a step with these trees, and report the step. ``observed``: as for ``plan_trees``."""
    plan = plan_trees(trainer, trees, observed)
    return summarize(trainer, step, plan, compute_gradients(trainer, plan, step))


def compute_gradients(trainer: Trainer, plan: Planned, step: int) -> Gradients:
    """Add the gradient of a step. Nothing is read from the device."""
    trainer.scorer.train()

    # what the loss needs of the whole step: outputs of other models, statistics
    planned = prepare_microbatches(trainer, plan, f"step {step}")
    microbatches = [packed for packed, is_real in planned if is_real]

    # one denominator for all micro-batches and ranks, before the first backward; a plan made ahead has it already
    counts = plan.counts
    if counts is None:
        require_same_plan(step, trainer.ranks.gather_in_step(drawn_of(plan)))
        counts = denominators(trainer.source.loss, microbatches, trainer.ranks, plan.silent)
    scales = {term: 1.0 / count for term, count in counts.items()}
    nothing = dict.fromkeys(scales, 0.0)
    slope_LE = router_slopes(trainer, planned, plan.trees, f"step {step}")

    # forward and backward, micro-batch by micro-batch; those that fill up this rank's share count 0
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
    """The micro-batches on the device, each copied there before the previous one runs."""
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
    """Slopes of the routers' loss, [L, E], from the choices of the routers, without noise, in all micro-batches. None
    without such a loss.
    """
    config, scorer = trainer.router, trainer.scorer
    if not config.aux_loss_coef:
        return None
    # a forward of its own: how often each expert is chosen in the whole step
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
    """Add a micro-batch's share, each term times its scale, to the gradient. ``slope_LE``: of the routers' loss.
    Returns scores, loss and the share of the routers' loss, without gradient.
    """
    loss = trainer.source.loss
    wants = loss.wants if slope_LE is None else loss.wants._replace(routers=True)
    of_loss = router_loss = None
    linear = loss.linear_weights(packed)
    if trainer.noise is not None:
        trainer.noise.set(step, packed)
    with trainer.compute():
        if linear is not None:  # the head forms the gradient of the logits in the forward
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
    """This rank's micro-batches with the roles' streams and the statistics of the step, and whether each counts."""
    loss = trainer.source.loss
    # outputs of other models
    planned = fill_streams(trainer, plan, where)
    if not loss.observes:
        return planned
    # a forward without gradient over what the statistics are taken over, exchanged among the ranks
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
    """This rank's micro-batches, and whether each counts. Where another rank has more, micro-batches that do not count
    are added, so that all ranks run equally many. Every rank plans for all, so no collective is needed.
    """
    limits = trainer.policy, trainer.budget.tokens_per_microbatch
    shares = assign(trees, trainer.budget)
    most = max(sum(len(divide(planned, *limits)) for planned in share) for share in shares)
    mine = shares[trainer.ranks.share]
    found = [(packed, True) for planned in mine for packed in layouts(planned, *limits)]
    if missing := most - len(found):
        shortest = min(samples_of(trees), key=lambda sample: sample.num_tokens)
        (filler,) = layouts((Tree((shortest,)),), *limits)
        found += [(filler, False)] * missing
    return found


def counts_of(
    loss: Loss, microbatches: Sequence[Packed], ranks: Ranks, silent: Sequence[Sample]
) -> list[float]:
    """This rank's share of each term's count; the first rank counts the silent samples."""
    if not ranks.is_counted:
        return [0.0] * len(loss.units)
    uncomputed = silent if ranks.rank == 0 else ()
    return [
        sum(count_units(unit, packed) for packed in microbatches)
        + (count_silent(unit, uncomputed) if uncomputed else 0.0)
        for unit in loss.units.values()
    ]


def denominators(
    loss: Loss, microbatches: Sequence[Packed], ranks: Ranks, silent: Sequence[Sample] = ()
) -> dict[str, float]:
    """The count of each term over all micro-batches and ranks."""
    mine = counts_of(loss, microbatches, ranks, silent)
    totals = dict(zip(loss.units, ranks.sum(mine), strict=True))
    assert all(count > 0 for count in totals.values()), (
        f"a step without anything to learn: {totals}"
    )
    return totals


def summarize(
    trainer: Trainer,
    step: int,
    plan: Planned,
    gradients: Gradients,
    norms: Mapping[str, Tensor] = MappingProxyType({}),
) -> StepReport:
    """Sum terms, metrics and sizes over micro-batches and ranks. All numbers of the step are read from the device here,
    at once. ``norms``: norms of the gradient, where they are known.
    """
    # sums over this rank's micro-batches, still on the device
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

    # over the ranks, in one collective, which also carries signals, counts of the next step, and the hosts' load
    def note(
        logps: Sequence[Tensor],
    ) -> tuple[str | None, list[float] | None, Drawn | None, dict[str, float], HostLoad | None]:
        ahead = trainer.plans.get((step + 1, trainer.budget))
        drawn: Drawn | None = None
        counts: list[float] | None = None
        if isinstance(ahead, Planned):
            drawn = drawn_of(ahead)
        if isinstance(ahead, Planned) and ahead.microbatches:
            counted = [packed for packed, is_real in ahead.microbatches if is_real]
            counts = counts_of(trainer.source.loss, counted, trainer.ranks, ahead.silent)
        nll = _nll_of_samples(gradients.scored, logps)
        return trainer.interrupts.received, counts, drawn, nll, trainer.meter.sample()

    totals, largest, read, notes = sums.totals(
        trainer.ranks, list(norms.values()), gradients.logps, note
    )
    signals, counts, drawn, nlls, utilization = zip(*notes, strict=True)

    # the next step, if every rank has planned it: its denominators
    require_same_plan(step + 1, drawn)
    known = [counts_of_rank for counts_of_rank in counts if counts_of_rank is not None]
    following = trainer.plans.get((step + 1, trainer.budget))
    if len(known) == len(counts) and isinstance(following, Planned):
        units, sums_of = trainer.source.loss.units, map(sum, zip(*known, strict=True))
        agreed = following._replace(counts=dict(zip(units, sums_of, strict=True)))
        trainer.plans[step + 1, trainer.budget] = agreed

    # the report
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
        utilization=utilization,
        **sizes,
    )


class Drawn(NamedTuple):
    """The part of a plan that must be the same on all ranks."""

    num_microbatches: int
    """Micro-batches of each rank, including those that do not count."""
    num_samples: int
    digest: int
    """Checksum of the samples' ids."""


def drawn_of(plan: Planned) -> Drawn:
    ids = [sample.id for tree in plan.trees for sample in tree.samples]
    return Drawn(len(plan.microbatches), len(ids), zlib.crc32("\n".join(ids).encode()))


def require_same_plan(step: int, of_ranks: Sequence[Drawn | None]) -> None:
    """Raise RankFailed where two ranks have planned a step differently: their collectives would not match."""
    for rank, drawn in enumerate(of_ranks):
        if drawn is not None and of_ranks[0] is not None and drawn != of_ranks[0]:
            plans = [
                f"rank {number}: {some.num_microbatches} micro-batches of {some.num_samples} samples, checksum of ids "
                f"{some.digest:08x}"
                for number, some in ((0, of_ranks[0]), (rank, drawn))
            ]
            raise RankFailed(
                f"the ranks have planned step {step} differently ({'; '.join(plans)}); expected the same; see that "
                "data, settings and versions are the same on all ranks"
            )


def _nll_of_samples(scored: Sequence[Scored], logps: Sequence[Tensor]) -> dict[str, float]:
    """Sample id -> mean -logprob of its targets. ``logps``: sums by sample of each micro-batch, on the host."""
    nll: dict[str, float] = {}
    for (packed, _), logp_S in zip(scored, logps, strict=True):
        if not logp_S.numel():
            continue
        num_targets_S = torch.bincount(packed.row_N, minlength=packed.num_samples)
        means = zip(packed.sample_ids, (-logp_S.double() / num_targets_S).tolist(), strict=True)
        nll |= {sample_id: value for sample_id, value in means if not math.isnan(value)}
    return nll


def require_finite(value: float, what: str, report: StepReport, trainer: Trainer) -> None:
    """Raise NonFiniteError, with the samples at fault, if ``value`` is not finite."""
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
    """Starts threads that read the images of a step and of the next one; called before a step is planned.

    For offline data, whose steps are known ahead; rollouts have read the images of their prompts already. Each rank
    reads its own images.
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
