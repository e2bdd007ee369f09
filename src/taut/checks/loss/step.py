"""What the run's first forward and backward do to a small batch: measured once, read by every quick check of the loss.

The gradient is taken by the loop's own function with the run's own budget, policy, precision and noise, and forgotten
again: only the norm of each tensor's stays. While the model runs, a hook on the backbone computes each target's
log-prob in the plainest way, from all logits of its predictor, for ``model.head`` to compare.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from taut.checks.session import Session
from taut.models import architecture
from taut.models.scorer import score_hidden
from taut.train import trainer
from taut.train.trainer import StepReport
from taut.types import Packed, Scores

ROWS = 64
"""Logits that exist at a time."""


@dataclass
class Step:
    """What was seen."""

    report: StepReport | None = None
    """None: nothing the loss depends on can be trained."""
    norms: dict[str, float] = field(default_factory=dict)
    """Trained tensor -> norm of its gradient, over all ranks. Without those that have none."""
    absent: list[str] = field(default_factory=list)
    """Trained tensors without a gradient."""
    stray: list[str] = field(default_factory=list)
    """Tensors with a gradient that the optimizer does not have."""
    heads: list[Head] = field(default_factory=list)
    """One a micro-batch of this rank; none of a scalar head."""


@dataclass
class Head:
    """The log-probs of a micro-batch's targets, [N], and what they were predicted from."""

    packed: Packed
    hidden_ND: Tensor
    plain_N: Tensor
    """From all logits, by log_softmax."""
    recomputed_N: Tensor
    """By the way through the head that computes logits again in backward."""
    logp_N: Tensor | None = None
    """By the way the run takes."""


def step(session: Session) -> Step:
    """One forward and backward of ``session.batch``; gradients are gone when it returns."""
    job, scorer, seen = session.job, session.scorer, Step()
    was_training = scorer.training
    try:
        with _watching(session, seen):
            seen.report = trainer.add_gradients(job, session.trees, 1)
        for name, parameter in trained(session).items():
            if parameter.grad is None:
                seen.absent.append(name)
            else:
                seen.norms[name] = norm(parameter.grad)
        seen.stray = _stray(session)
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        seen.absent = list(trained(session))
    finally:
        forget(session)
        scorer.train(was_training)
    return seen


def trained(session: Session) -> dict[str, nn.Parameter]:
    """The tensors that train, by name; a critic's names begin with ``critic.``"""
    named = session.scorer.named_parameters()
    return {name.removeprefix("model."): p for name, p in named if p.requires_grad}


def _stray(session: Session) -> list[str]:
    """Tensors whose gradient nobody uses. It is forgotten at once: the optimizer would not do so."""
    known, found = {id(parameter) for parameter in session.job.trained}, []
    for name, parameter in session.scorer.named_parameters():
        if parameter.grad is not None and id(parameter) not in known:
            found.append(name.removeprefix("model."))
            parameter.grad = None
    return found


def forget(session: Session) -> None:
    """No gradients; the root's weights gathered."""
    session.job.optimizer.zero_grad(set_to_none=True)
    gather(session)


def gather(session: Session) -> None:
    """The root's sharded weights whole, as a forward without gradient leaves them."""
    root: Any = session.scorer
    if session.ranks.size > 1:
        root.unshard()


def scatter(session: Session) -> None:
    """The root's weights in their parts, as the optimizer has them and a backward leaves them."""
    root: Any = session.scorer
    if session.ranks.size > 1:
        root.reshard()


def norm(tensor: Tensor) -> float:
    """The norm over all ranks. Not 0 where squares underflow and an entry is not 0."""
    for order in (2.0, torch.inf):
        found: Any = torch.linalg.vector_norm(tensor.detach(), order)
        value = float(found.full_tensor() if hasattr(found, "full_tensor") else found)
        if value != 0.0:
            break
    return value


@contextmanager
def _watching(session: Session, seen: Step) -> Iterator[None]:
    """Keep what goes into the head and what comes out of it. A sharded head is whole only while the scorer runs."""
    scorer, given = session.scorer, list[Packed]()
    if session.is_scalar:
        yield
        return

    def begin(_: nn.Module, args: tuple[Any, ...]) -> None:
        given.append(args[0])

    def look(_: nn.Module, __: Any, output: Any) -> None:
        if torch.is_grad_enabled():  # else it is a reference's, or a statistic's
            seen.heads.append(_head(session, given[-1], output.last_hidden_state))

    def end(_: nn.Module, __: Any, scores: Scores) -> None:
        if torch.is_grad_enabled():
            seen.heads[-1].logp_N = scores.logp_N.detach()

    hooks = [
        scorer.register_forward_pre_hook(begin),
        architecture.decoder(scorer.model).register_forward_hook(look),
        scorer.register_forward_hook(end),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def head_of(session: Session) -> architecture.HeadSpec:
    """The head, at the temperature at which the loss reads it."""
    warmth = session.job.method.loss.wants.temperature
    return replace(architecture.head(session.scorer.model), temperature=warmth)


@torch.no_grad()
def _head(session: Session, packed: Packed, hidden: Tensor) -> Head:
    spec = head_of(session)
    hidden_ND = hidden.squeeze(0).index_select(0, packed.predictor_N.to(hidden.device))
    target_N = packed.target_N.to(hidden.device)
    parts = zip(torch.split(hidden_ND, ROWS), torch.split(target_N, ROWS), strict=True)
    plain = [
        torch.log_softmax(spec.logits(some), -1).gather(1, targets[:, None]).squeeze(1)
        for some, targets in parts
    ]
    recomputed_N = score_hidden(hidden_ND, target_N, spec).logp_N
    return Head(packed, hidden_ND, torch.cat(plain), recomputed_N)
