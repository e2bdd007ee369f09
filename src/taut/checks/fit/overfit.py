"""A few samples are learned by heart with an optimizer of the check's own, through the loop's own forward and backward;
the weights are put back. Several learning rates are tried, one that gets nowhere not for long.

A model that cannot even do that has too little that trains, or a gradient that does not belong to its loss.
"""

from __future__ import annotations

import math

import torch

from taut import loop
from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.fit.weights import put_back, restore
from taut.checks.session import Session
from taut.types import Sample, Tree

TOKENS = 96
SAMPLES = 4
RATE, FACTORS = 0.25, (1.0, 8.0, 0.125)
"""The first learning rate, to be divided by the hidden size (wider models take smaller ones); and what to try next."""
STEPS = 60
PART, LITTLE = 0.1, 0.1
"""Learned by heart: a loss below this part of the first, or below so many nats."""
ENOUGH = 0.86
"""The same where something is frozen: a frozen head, above all with a scale or softcap, bounds how sure one can be."""
WINDOW, SLOW = 10, 0.8
"""A rate is given up when the loss is still above this part of what it was so many steps ago."""


def ask(session: Session) -> Finding:
    """Can the run learn a few samples by heart?"""
    if session.job.noise is not None:
        return skipped("noise is on, and blurs what a few samples can be learned to")
    samples = _chosen(session.batch)
    first = RATE / session.language.config.get_text_config().hidden_size
    trees = [Tree((sample,)) for sample in samples]
    is_whole = all(p.requires_grad for p in session.scorer.model.parameters())
    part = PART if is_whole else ENOUGH
    curves: dict[float, list[float]] = {}
    with put_back(session) as copies:
        for rate in (first * factor for factor in FACTORS):
            curves[rate] = _curve(session, trees, rate)
            if _is_below(curves[rate], part):
                break
            restore(session, copies)
    rate, curve = min(curves.items(), key=lambda item: min(_finite(item[1])))
    targets = sum(sample.num_targets for sample in samples)
    if not _is_below(curve, part):
        return failed(
            f"{len(samples)} samples are not learned by heart: the loss goes from {curve[0]:.3g} to "
            f"{min(_finite(curve)):.3g} at best",
            number=min(_finite(curve)),
            unit="nats a target",
            evidence=[f"learning rate {r:.2g}: {_drawn(c)}" for r, c in curves.items()],
            remedy="what trains is too little to learn anything (see freeze and lora.targets), or the gradient is not "
            "that of the loss (see loss.packed)",
        )
    said = f"{len(samples)} samples, {targets} targets: {_drawn(curve)}"
    return passed(
        said, len(curve) - 1, "steps", [f"at a learning rate of {rate:.2g}; weights put back"]
    )


def _chosen(batch: list[Sample]) -> list[Sample]:
    """The shortest samples that do not contradict each other."""
    chosen: list[Sample] = []
    for sample in batch:
        is_new = all(not _contradict(sample, other) for other in chosen)
        fits = sum(one.num_tokens for one in chosen) + sample.num_tokens <= TOKENS
        if is_new and (fits or not chosen) and len(chosen) < SAMPLES:
            chosen.append(sample)
    return chosen


def _contradict(one: Sample, other: Sample) -> bool:
    """Whether they are the same, or part at a token that one of them has to predict."""
    size = min(one.num_tokens, other.num_tokens)
    differs = one.ids_T[:size] != other.ids_T[:size]
    if not differs.any():
        return True
    at = int(differs.argmax())
    return at in one.target_at_N or at in other.target_at_N


def _curve(session: Session, trees: list[Tree], rate: float) -> list[float]:
    """The loss before each update, until it is learned, stuck or late."""
    job = session.job
    optimizer = torch.optim.AdamW(job.trained, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    curve: list[float] = []
    for step in range(1, STEPS + 1):
        job.optimizer.zero_grad(set_to_none=True)
        curve.append(loop.add_gradients(job, trees, step).loss)
        is_stuck = step > WINDOW and not curve[-1] < SLOW * curve[-1 - WINDOW]
        if _is_below(curve, PART) or is_stuck or not math.isfinite(curve[-1]):
            break
        optimizer.step()
    return curve


def _is_below(curve: list[float], part: float) -> bool:
    return curve[-1] < max(part * curve[0], LITTLE)


def _finite(curve: list[float]) -> list[float]:
    return [value for value in curve if math.isfinite(value)] or [math.inf]


def _drawn(curve: list[float]) -> str:
    """Some of the curve."""
    kept = curve if len(curve) <= 6 else [*curve[: -1 : max(1, len(curve) // 5)], curve[-1]]
    return " ".join(f"{value:.3g}" for value in kept)
