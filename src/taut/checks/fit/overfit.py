"""A few samples are learned by heart with an optimizer of the check's own, through the loop's own forward and backward;
the weights are put back. Several learning rates are tried, one that gets nowhere not for long.

A model that cannot even do that has too little that trains, or a gradient that does not belong to its loss. Losses on
answers that are judged have floors of their own (a policy's log-ratios are bounded, smoothed labels never certain):
there it is enough that every pair comes out in order, or every answer on its side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest

import torch

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.fit.weights import put_back, restore
from taut.checks.session import Session
from taut.train import trainer
from taut.train.trainer import StepReport
from taut.types import Sample, Tree

TOKENS = 96
SAMPLES = 4
RATE, FACTORS = 0.25, (1.0, 8.0, 0.125)
"""The first learning rate, to be divided by the hidden size (wider models take smaller ones); and what to try next."""
STEPS = 60
PART, LITTLE = 0.1, 0.1
"""Learned by heart: a loss below this part of the first, or below so many nats."""
ENOUGH = 0.86
"""The same where something is frozen: a frozen head, above all with a scale or softcap, bounds how sure one can be. And
of losses on answers that are judged, or beside a teacher, who is not sure either."""
FALLEN = 0.99
"""The same where all is in order besides."""
ORDERED = ("rewards/accuracy", "accuracy")
"""Metrics of what is in order."""
WINDOW, SLOW = 10, 0.8
"""A rate is given up when the loss is still above this part of what it was so many steps ago."""


def ask(session: Session) -> Finding:
    """Can the run learn a few samples by heart?"""
    if session.job.noise is not None:
        return skipped("noise is on, and blurs what a few samples can be learned to")
    if session.is_policy_gradient:
        return skipped("a policy gradient's loss does not say what was learned")
    trees = _chosen(_by_turns(session.trees))
    samples = [sample for tree in trees for sample in tree.samples]
    if session.run.objective.is_mismatched and len({s.values["label"] > 0.5 for s in samples}) < 2:
        return skipped("the shortest rows are all good, or all bad: alone they teach nothing")
    first = RATE / session.language.config.get_text_config().hidden_size
    is_whole = all(p.requires_grad for p in session.scorer.model.parameters())
    objective = session.run.objective
    is_bounded = objective.kind != "sft" or objective.teacher is not None
    part = PART if is_whole and not is_bounded else ENOUGH
    curves: dict[float, list[float]] = {}
    learned = False
    with put_back(session) as copies:
        for rate in (first * factor for factor in FACTORS):
            curves[rate], learned = _curve(session, trees, rate, part)
            if learned:
                break
            restore(session, copies)
    rate, curve = min(curves.items(), key=lambda item: min(_finite(item[1])))
    if not learned:
        return failed(
            f"{len(samples)} samples are not learned by heart: the loss goes from {curve[0]:.3g} to "
            f"{min(_finite(curve)):.3g} at best",
            number=min(_finite(curve)),
            unit="nats a target",
            evidence=[f"learning rate {r:.2g}: {_drawn(c)}" for r, c in curves.items()],
            remedy="what trains is too little to learn anything (see freeze and lora.targets), or the gradient is not "
            "that of the loss (see loss.packed)",
        )
    rate, curve = list(curves.items())[-1]
    what = "tokens" if session.is_scalar else "targets"
    number = sum(s.num_tokens if session.is_scalar else s.num_targets for s in samples)
    said = f"{len(samples)} samples, {number} {what}: {_drawn(curve)}"
    return passed(
        said, len(curve) - 1, "steps", [f"at a learning rate of {rate:.2g}; weights put back"]
    )


def _by_turns(trees: Sequence[Tree]) -> list[Tree]:
    """The trees, of answers that are good or bad one of each in turn."""
    kinds: dict[bool, list[Tree]] = {}
    for tree in trees:
        kinds.setdefault(tree.samples[0].values.get("label", 0.0) > 0.5, []).append(tree)
    turns = zip_longest(*kinds.values())
    return [tree for turn in turns for tree in turn if tree is not None]


def _chosen(trees: Sequence[Tree]) -> list[Tree]:
    """The shortest trees whose samples do not contradict those of another."""
    chosen: list[Tree] = []
    for tree in trees:
        others = [sample for one in chosen for sample in one.samples]
        is_new = all(not _contradict(one, other) for one in tree.samples for other in others)
        num_tokens = sum(one.num_tokens for one in (*others, *tree.samples))
        fits = num_tokens <= TOKENS and len(others) + len(tree.samples) <= SAMPLES
        if is_new and (fits or not chosen):
            chosen.append(tree)
    return chosen


def _contradict(one: Sample, other: Sample) -> bool:
    """Whether they are the same, or part at a token that one of them has to predict."""
    size = min(one.num_tokens, other.num_tokens)
    differs = one.ids_T[:size] != other.ids_T[:size]
    if not differs.any():
        return True
    at = int(differs.argmax())
    return at in one.target_at_N or at in other.target_at_N


def _curve(
    session: Session, trees: list[Tree], rate: float, part: float
) -> tuple[list[float], bool]:
    """The loss before each update, until it is learned, stuck or late; and whether it is learned."""
    job = session.job
    optimizer = torch.optim.AdamW(job.trained, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    curve: list[float] = []
    for step in range(1, STEPS + 1):
        job.optimizer.zero_grad(set_to_none=True)
        report = trainer.add_gradients(job, trees, step)
        curve.append(report.loss)
        is_stuck = step > WINDOW and not curve[-1] < SLOW * curve[-1 - WINDOW]
        is_learned = _is_learned(session, report, curve, PART)
        if is_learned or is_stuck or not math.isfinite(curve[-1]):
            break
        optimizer.step()
    return curve, _is_learned(session, report, curve, part)


def _is_learned(session: Session, report: StepReport, curve: list[float], part: float) -> bool:
    """Whether the loss is low enough, or all is in order and it has fallen."""
    if session.run.objective.kind == "sft":
        return curve[-1] < max(part * curve[0], LITTLE)
    if curve[-1] < part * curve[0] or curve[-1] == 0.0:
        return True
    in_order = [report.metrics[name] for name in ORDERED if name in report.metrics]
    return in_order == [1.0] and curve[-1] < FALLEN * curve[0]


def _finite(curve: list[float]) -> list[float]:
    return [value for value in curve if math.isfinite(value)] or [math.inf]


def _drawn(curve: list[float]) -> str:
    """Some of the curve."""
    kept = curve if len(curve) <= 6 else [*curve[: -1 : max(1, len(curve) // 5)], curve[-1]]
    return " ".join(f"{value:.3g}" for value in kept)
