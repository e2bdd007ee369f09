"""A step's loss, and how it changes with what the model says, from its samples one by one: the loss's own formula on
numbers that come from anywhere, in one list in which nothing is shared or cut.

A reference that is the policy's start says before the first update what the policy says. ``loss.first`` and
``loss.packed`` compare the step with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from taut import losses
from taut.checks.session import Session
from taut.data.packing import ALONE, pack
from taut.methods.reference import STREAM
from taut.models.self_test import library_logps, library_scalars
from taut.types import Sample, Scores


class Expected(NamedTuple):
    """What samples alone give."""

    loss: float
    slopes: dict[str, Tensor]
    """Sample -> the derivative of the loss by each of its numbers."""


def obstacle(session: Session) -> str | None:
    """Why the loss cannot be had from its samples alone; None: it can."""
    objective = session.run.objective
    if objective.teacher is not None:
        return "the loss is measured against a teacher, which is not asked here"
    if objective.reference is not None and objective.reference.model is not None:
        return "the loss is measured against reference.model, which is not asked here"
    if objective.online is not None and objective.online.critic is not None:
        return "the loss is also that of a critic, which is not asked here"
    if objective.loss.wants.entropy:
        return "the loss reads entropies, which are not asked here"
    if objective.loss.wants.temperature != 1:
        return "the loss reads log-probs at another temperature than the library's"
    return None


def library_numbers(session: Session, sample: Sample) -> Tensor:
    """What the library's own path says of a sample alone: log-probs, or scores where it is read."""
    say = library_scalars if session.is_scalar else library_logps
    return say(session.scorer.model, sample, session.ranks.device)


def expected(
    session: Session, samples: Sequence[Sample], numbers: Mapping[str, Tensor]
) -> Expected:
    """The loss of these samples where the model says ``numbers`` of them."""
    loss, packed = session.job.method.loss, pack(list(samples), ALONE)
    given = {name: numbers[name].detach().double().requires_grad_() for name in packed.sample_ids}
    joined = torch.cat(list(given.values()))
    if STREAM in loss.needs:
        packed = replace(packed, streams={**packed.streams, STREAM: joined.detach()})
    scores = Scores(joined, entropy_N=torch.zeros_like(joined) if loss.wants.entropy else None)
    if session.is_scalar:
        scores = Scores(joined.new_empty(0), scalar_R=joined)
    if loss.observes:
        observed = {name: value.detach() for name, value in loss.observe(scores, packed).items()}
        packed = replace(packed, stats=loss.statistics(observed))
    terms = loss(scores, packed).terms
    parts = [value / losses.count(loss.units[term], packed) for term, value in terms.items()]
    total = torch.stack(parts).sum()
    slopes = torch.autograd.grad(total, list(given.values()))
    return Expected(float(total.detach()), dict(zip(given, slopes, strict=True)))
