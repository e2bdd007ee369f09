"""One update of the run's own optimizer at its highest learning rate, with the gradient of a small batch; the weights
are put back. Whether the loss falls by it is told, not judged: a cold optimizer's first step may overshoot.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from taut.checks.finding import Finding, failed, passed
from taut.checks.fit.weights import local, put_back
from taut.checks.loss.step import trained
from taut.checks.session import Session
from taut.train import distributed, optim, trainer

LARGEST = 0.5
"""A step that moves the weights by this part of their norm leaves little of what they knew."""
ROUNDING = 1e-2
"""Of a norm that was clipped."""


def ask(session: Session) -> Finding:
    """Does an update at the highest learning rate move the weights, downhill, and not too far?"""
    job = session.job
    rate = max(job.learning_rate(step) for step in range(1, min(job.num_steps, 10_000) + 1))
    with put_back(session) as copies:
        before = trainer.add_gradients(job, session.trees, 1).loss
        optim.clip(job.optimizer, job.clip_grad_norm)
        parts = optim.parts(job.optimizer).values()
        length = max(distributed.clip_gradients(part, None) for part in parts)
        slopes = {
            name: local(p.grad).clone()
            for name, p in trained(session).items()
            if p.grad is not None
        }
        _update(session, rate)
        moves = _moves(session, copies, slopes)
        job.optimizer.zero_grad(set_to_none=True)
        after = trainer.add_gradients(job, session.trees, 1).loss
    moved, size, slope, changed = session.ranks.sum(moves)
    part = math.sqrt(moved / size) if size else 0.0
    at = f"at a learning rate of {rate:g}"
    clip = job.clip_grad_norm
    if clip is not None and not length <= clip * (1 + ROUNDING):
        said = f"the gradient has a norm of {length:.4g} after it was clipped to {clip:g}"
        return _wrong(said, length, "optim.clip_grad_norm is not in force; please report this")
    if not changed:
        return _wrong(f"no weight changes {at}", 0.0, "raise optim.learning_rate")
    if not slope < 0:
        said = f"the update {at} goes uphill"
        return _wrong(
            said,
            slope,
            "the optimizer adds the gradient where it should subtract it; please report this",
        )
    if not (part <= LARGEST and math.isfinite(after)):
        said = f"one update {at} moves the weights by {100 * part:.3g}% of their norm"
        return _wrong(
            said,
            part,
            "lower optim.learning_rate",
            f"the loss goes from {before:.4g} to {after:.4g}",
        )
    has_fallen = after < before or session.is_policy_gradient
    notes = [] if has_fallen else ["the loss rises: a warm-up, or a lower rate, may be wanted"]
    return passed(
        f"loss {before:.4g} -> {after:.4g} in one update {at}", before - after, "nats less", notes
    )


def _wrong(says: str, number: float, remedy: str, *evidence: str) -> Finding:
    return failed(says, number=number, evidence=evidence, remedy=remedy)


def _update(session: Session, rate: float) -> None:
    """One step of an optimizer with the run's own settings, which leaves the run's own as it is."""
    mine: Any = session.job.optimizer
    twin = type(mine)([{**group} for group in mine.param_groups])
    optim.set_learning_rate(twin, rate)
    twin.step()


def _moves(session: Session, copies: dict[str, Tensor], slopes: dict[str, Tensor]) -> list[float]:
    """Squares of the move and of the weights, where they were not zero; the move along the gradient; values changed."""
    moved = size = slope = changed = 0.0
    for name, parameter in trained(session).items():
        old = copies[name].to(parameter.device)
        move = (local(parameter) - old).to(torch.promote_types(old.dtype, torch.float32))
        changed += float(torch.count_nonzero(move))
        if name in slopes:
            slope += float((move * slopes[name]).sum())
        if bool(torch.any(old)):
            moved += float(move.square().sum())
            size += float(old.to(move.dtype).square().sum())
    return [moved, size, slope, changed]
