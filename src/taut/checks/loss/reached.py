"""One backward of the loop's. A tensor outside the graph fails; one whose gradient is exactly zero does too, unless the
batch or the start explains it:

- the first matrix of an adapter whose second one is zero and has a gradient;
- what is behind a critic's head that starts at zero;
- a vision tower and its projector, where the batch has no picture and the data have some;
- the ends of a picture's rows, where no picture has any;
- experts and routers, which a token may not be routed to; single rows, whose token may not be there;
- everything, where each target's predictor sees one token alone: attention has nothing to choose then.

One that has a gradient and that the optimizer does not have fails too: something lets it train that was not asked to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import torch
from torch import nn

from taut.checks.finding import Finding, failed, passed
from taut.checks.loss.step import Step, norm, step, trained
from taut.checks.session import Session
from taut.models import architecture
from taut.models.critic import PART, OwnCritic
from taut.models.heads import scalar_head

SHOWN = 4
SPARSE = re.compile(r"expert|router|\.gate\.|trainable_tokens|image_newline")
"""Names of tensors that a batch may leave alone."""
FIRST = re.compile(r"\.lora_(embedding_)?A\b")


def ask(session: Session) -> Finding:
    """Does every tensor that trains get a gradient, and no other?"""
    seen = session.once(step)
    every = len(seen.norms) + len(seen.absent)
    if seen.stray:
        return failed(
            f"{len(seen.stray)} tensors get a gradient that are not to train",
            number=len(seen.stray),
            unit="tensors",
            evidence=_shortened(session, seen.stray),
            remedy="a step would compute more than it learns: something in the model's code sets requires_grad while "
            "it runs; take it out, or train these too (freeze), and please report the model",
        )
    outside = [name for name in seen.absent if not SPARSE.search(name)]
    if outside:
        return failed(
            f"{len(outside)} of {every} trained tensors get no gradient",
            number=len(outside),
            unit=f"of {every} tensors",
            evidence=_shortened(session, outside),
            remedy="they take no part in the loss: leave them out with the key freeze; where adapters or layers are "
            "cut off from the loss, set activation_checkpointing=false, and please report the model",
        )
    if seen.report is not None and seen.report.loss == 0.0:
        said = "the batch is learned already: its loss is 0, and so are all gradients"
        return passed(said, every, "tensors")
    parameters = trained(session)
    zero = [name for name, value in seen.norms.items() if value == 0.0]
    still = [
        name
        for name in zero
        if not SPARSE.search(name)
        and not _is_first(parameters, name, seen)
        and not _is_behind_zero(session, name)
    ]
    blind = architecture.unreached(session.scorer.model, seen.norms, still)
    num_pictures = session.train.report.num_pictures
    if blind and num_pictures and not _sees_a_picture(session):
        still = [name for name in still if architecture.part_of(name) not in blind]
    if still and _sees_more_than_one(session):
        remedy = (
            f"the data have no picture: set freeze={json.dumps(blind)}"
            if blind and not num_pictures
            else "the loss does not depend on them: leave them out with the key freeze, or look for a weight or "
            "gate of zero behind them"
        )
        return failed(
            f"the gradient of {len(still)} of {every} trained tensors is exactly zero",
            number=len(still),
            unit=f"of {every} tensors",
            evidence=_shortened(session, still),
            remedy=remedy,
        )
    notes = (
        [f"{len(zero)} are zero in this batch, as expected: {', '.join(zero[:2])}"] if zero else []
    )
    if architecture.has_parts(session.scorer.model):
        notes.append(architecture.counted(parameters))
    return passed("all trained tensors get a gradient", every, "tensors", notes)


def _is_first(parameters: Mapping[str, nn.Parameter], name: str, seen: Step) -> bool:
    """Whether this is the first matrix of an adapter that starts at zero."""
    second = FIRST.sub(lambda found: found[0][:-1] + "B", name)
    parameter = parameters.get(second)
    if second == name or parameter is None or seen.norms.get(second, 0.0) == 0.0:
        return False
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return not bool(torch.any(local.detach()))


def _is_behind_zero(session: Session, name: str) -> bool:
    """Whether this is of an own critic that says 0 yet."""
    critic = session.scorer.critic
    if not isinstance(critic, OwnCritic) or not name.startswith(f"{PART}."):
        return False
    return norm(scalar_head(critic.model).weight) == 0.0


def _sees_a_picture(session: Session) -> bool:
    """Whether something is said of a picture."""
    return any(one.stop < sample.num_tokens for sample in session.batch for one in sample.media)


def _sees_more_than_one(session: Session) -> bool:
    if session.is_scalar:
        return any(sample.num_tokens > 1 for sample in session.batch)
    return any(bool((sample.target_at_N > 1).any()) for sample in session.batch)


def _shortened(session: Session, names: list[str]) -> list[str]:
    more, model = len(names) - SHOWN, session.scorer.model
    counted = [architecture.counted(names)] if architecture.has_parts(model) else []
    return [*counted, *names[:SHOWN], *([f"and {more} more"] if more > 0 else [])]
