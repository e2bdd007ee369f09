"""The optimizer: its schedule, one update of it, and whether a few samples can be learned by heart.

Weights are put back bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch

from taut.checks.measure import local, restore_weights, trained, weights_put_back
from taut.checks.registry import Finding, check, failed, passed, skip_if, warned
from taut.checks.session import Session, num_tokens
from taut.train import distributed, optim
from taut.train.trainer import StepReport, add_gradients
from taut.types import Sample, Tree


@check("fit.schedule", after=["model.trains"])
def the_learning_rate_reaches_its_peak(session: Session) -> Finding:
    """Does the learning rate rise to what was asked for, and is it never zero?

    The rate of every step, as the loop will ask for it.
    """
    trainer, peak = session.trainer, optim.highest(session.run.resolved_optim)
    stride = math.ceil(trainer.num_steps / 20_000)
    rates = {step: trainer.learning_rate(step) for step in range(1, trainer.num_steps + 1, stride)}
    wrong = [step for step, rate in rates.items() if not 0.0 < rate <= peak * (1 + 1e-9)]
    if wrong:
        return failed(
            f"the learning rate of {len(wrong)} of {len(rates)} steps is not above 0 and at most {peak:g}",
            measured=(
                [f"step {step}: {rates[step]:g}" for step in wrong],
                f"of {len(rates)} steps",
            ),
            remedy="those steps would teach nothing, or too much; set another optim.schedule, and please report this",
        )
    at, highest = max(rates.items(), key=lambda item: item[1])
    says = f"{rates[1]:.3g} first, highest at step {at}, {rates[max(rates)]:.3g} last"
    if highest < 0.999 * peak and stride == 1:
        return warned(
            f"the highest learning rate is {highest:.3g} of {peak:g}: the warm-up is as long as the run",
            measured=(highest, "highest"),
            remedy="set a lower optim.warmup_ratio or optim.warmup_steps, or more steps",
            notes=[says],
        )
    return passed(says, highest, "highest")


@check("fit.update", part="full", after=["loss.gradient", "fit.schedule"])
def one_update_moves_the_weights_downhill(session: Session) -> Finding:
    """Does an update at the highest learning rate move the weights, downhill, and not too far?

    One update of the run's own optimizer with the gradient of a small batch. Whether the loss falls by it is a note and
    no failure: a cold optimizer's first step may overshoot.
    """
    trainer, clip = session.trainer, session.trainer.clip_grad_norm
    rate = max(trainer.learning_rate(step) for step in range(1, min(trainer.num_steps, 10_000) + 1))
    with weights_put_back(session) as copies:
        # the gradient of a small batch, clipped as the run clips
        before = add_gradients(trainer, session.trees, 1).loss
        optim.clip(trainer.optimizer, clip)
        groups = optim.parts(trainer.optimizer).values()
        length = max(float(distributed.clip_gradients(group, None)) for group in groups)
        gradients = {
            name: local(p.grad).clone()
            for name, p in trained(session).items()
            if p.grad is not None
        }
        mine: Any = trainer.optimizer
        # a twin leaves the run's own optimizer as it is
        twin = type(mine)([{**group} for group in mine.param_groups])
        optim.set_learning_rate(twin, rate)
        twin.step()
        # how far the weights moved, and whether along the gradient
        moved = size = slope = num_changed = 0.0
        for name, parameter in trained(session).items():
            old = copies[name].to(parameter.device)
            move = (local(parameter) - old).to(torch.promote_types(old.dtype, torch.float32))
            num_changed += float(torch.count_nonzero(move))
            if name in gradients:
                slope += float((move * gradients[name]).sum())
            if bool(torch.any(old)):  # new adapters start at zero
                moved += float(move.square().sum())
                size += float(old.to(move.dtype).square().sum())
        trainer.optimizer.zero_grad(set_to_none=True)
        after = add_gradients(trainer, session.trees, 1).loss
    # over all ranks
    moved, size, slope, num_changed = session.ranks.sum([moved, size, slope, num_changed])
    part = math.sqrt(moved / size) if size else 0.0
    at = f"at a learning rate of {rate:g}"
    if clip is not None and not length <= clip * 1.01:
        return failed(
            f"the gradient has a norm of {length:.4g} after it was clipped to {clip:g}",
            measured=(length, ""),
            remedy="optim.clip_grad_norm is not applied; please report this",
        )
    if not num_changed:
        return failed(
            f"no weight changes {at}", measured=(0.0, ""), remedy="raise optim.learning_rate"
        )
    if not slope < 0:
        return failed(
            f"the update {at} goes uphill",
            measured=(slope, ""),
            remedy="the optimizer adds the gradient where it should subtract it; please report this",
        )
    # a larger move leaves little of what the weights knew
    if not (part <= 0.5 and math.isfinite(after)):
        return failed(
            f"one update {at} moves the weights by {100 * part:.3g}% of their norm",
            measured=(part, ""),
            evidence=[f"the loss goes from {before:.4g} to {after:.4g}"],
            remedy="lower optim.learning_rate",
        )
    has_fallen = after < before or session.is_policy_gradient
    notes = [] if has_fallen else ["the loss rises: a warm-up, or a lower rate, may be wanted"]
    says = f"loss {before:.4g} -> {after:.4g} in one update {at}"
    return passed(says, before - after, "nats less", notes)


BY_HEART = 0.1
"""Bounds of a loss that is learned by heart: this part of the first loss, or this many nats."""


@check("fit.overfit", part="full", after=["loss.splits"])
def a_few_samples_are_learned_by_heart(session: Session) -> Finding:
    """Can the run learn a few samples by heart?

    With an optimizer of the check's own, through the loop's own forward and backward. Several learning rates are tried;
    one without progress is soon given up.

    A model that cannot even do that has too little that trains, or a gradient that does not belong to its loss. Losses
    on judged answers have floors of their own (a policy's log-ratios are bounded, smoothed labels never certain): there
    it is enough that every pair comes out in order, or every answer on its side.
    """
    is_noisy = session.trainer.noise is not None
    skip_if(is_noisy, "noise is on, and blurs what a few samples can be learned to")
    skip_if(session.is_policy_gradient, "a policy gradient's loss does not say what was learned")
    trees = _consistent_trees(session.trees)
    samples = [sample for tree in trees for sample in tree.samples]
    if session.trainer.source.loss.mismatched:
        labels = {sample.values["label"] > 0.5 for sample in samples}
        skip_if(
            len(labels) < 2, "the shortest rows are all good, or all bad: alone they teach nothing"
        )
    # how low the loss can come
    is_whole = all(p.requires_grad for p in session.scorer.model.parameters())
    is_bounded = not is_whole or session.run.loss_has_floor
    # a frozen head, above all with a scale or softcap, bounds how sure one can be; a teacher is not sure either
    part = 0.86 if is_bounded else BY_HEART
    hidden_size = session.language.config.get_text_config().hidden_size
    trained_tensors = session.trainer.trained
    curves: dict[float, list[float]] = {}
    with weights_put_back(session) as copies:
        # learning rates in turn, the likeliest first
        for factor in (0.25, 2.0, 0.03125):
            rate = factor / hidden_size  # wider models take smaller ones
            groups = [{"params": some} for some in distributed.by_placement(trained_tensors)]
            optimizer = torch.optim.AdamW(groups, rate, betas=(0.9, 0.95), weight_decay=0)
            curve = curves[rate] = []
            for step in range(1, 61):
                session.trainer.optimizer.zero_grad(set_to_none=True)
                report = add_gradients(session.trainer, trees, step)
                curve.append(report.method_loss)
                is_stuck = step > 10 and not curve[-1] < 0.8 * curve[-11]
                if is_stuck or not math.isfinite(curve[-1]):
                    break
                if _is_learned(session, report, curve, BY_HEART):
                    break
                optimizer.step()
            if is_learned := _is_learned(session, report, curve, part):
                break
            restore_weights(session, copies)
    if not is_learned:
        # none of them learned it: the best one is named
        lowest = {
            rate: min((value for value in curve if math.isfinite(value)), default=math.inf)
            for rate, curve in curves.items()
        }
        best = min(lowest, key=lowest.__getitem__)
        return failed(
            f"{len(samples)} samples are not learned by heart: the loss goes from {curves[best][0]:.3g} to "
            f"{lowest[best]:.3g} at best",
            measured=(lowest[best], "nats a target"),
            evidence=[f"learning rate {rate:.2g}: {_drawn(it)}" for rate, it in curves.items()],
            remedy="what trains is too little to learn anything (see freeze and lora.targets), or the gradient is not "
            "that of the loss (see loss.packed)",
        )
    rate, curve = list(curves.items())[-1]
    if session.is_scalar:
        learned = f"{num_tokens(samples)} tokens"
    else:
        learned = f"{sum(sample.num_targets for sample in samples)} targets"
    says = f"{len(samples)} samples, {learned}: {_drawn(curve)}"
    notes = [f"at a learning rate of {rate:.2g}; weights put back"]
    return passed(says, len(curve) - 1, "steps", notes)


def _consistent_trees(trees: Sequence[Tree]) -> list[Tree]:
    """The shortest trees whose samples do not contradict the samples of another; good and bad answers in turn."""

    def contradict(one: Sample, other: Sample) -> bool:
        """Whether two samples are equal, or first differ at a token that one of them has to predict."""
        size = min(one.num_tokens, other.num_tokens)
        differs = one.ids_T[:size] != other.ids_T[:size]
        at = int(differs.argmax())
        return not differs.any() or at in one.target_at_N or at in other.target_at_N

    # good and bad answers in turn
    by_label: dict[bool, list[Tree]] = {}
    for tree in trees:
        by_label.setdefault(tree.samples[0].values.get("label", 0.0) > 0.5, []).append(tree)
    chosen: list[Tree] = []
    for tree in (tree for turn in zip_longest(*by_label.values()) for tree in turn):
        if tree is None:
            continue
        others = [sample for earlier in chosen for sample in earlier.samples]
        is_new = not any(contradict(sample, other) for sample in tree.samples for other in others)
        together = [*others, *tree.samples]
        fits = num_tokens(together) <= 96 and len(together) <= 4
        if is_new and (fits or not chosen):
            chosen.append(tree)
    return chosen


def _is_learned(session: Session, report: StepReport, curve: list[float], part: float) -> bool:
    """Whether the loss is low enough, or all answers are in order and it has fallen."""
    if session.run.row_kind == "sft":
        return curve[-1] < max(part * curve[0], BY_HEART)
    if curve[-1] < part * curve[0] or curve[-1] == 0.0:
        return True
    names = ("rewards/accuracy", "accuracy")
    in_order = [report.metrics[name] for name in names if name in report.metrics]
    return in_order == [1.0] and curve[-1] < 0.99 * curve[0]


def _drawn(curve: list[float]) -> str:
    """A few points of the curve, as text."""
    kept = curve if len(curve) <= 6 else [*curve[: -1 : max(1, len(curve) // 5)], curve[-1]]
    return " ".join(f"{value:.3g}" for value in kept)
