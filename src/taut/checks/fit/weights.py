"""Trained tensors put back bit for bit, so that a check may train. The copies are on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from taut.checks.loss.step import forget, scatter, trained
from taut.checks.session import Session


@contextmanager
def put_back(session: Session) -> Iterator[dict[str, Tensor]]:
    """Name -> a copy of this rank's part of every trained tensor; what they hold is put back at the end."""
    was_training = session.scorer.training
    scatter(session)
    copies = {name: local(p).to("cpu", copy=True) for name, p in trained(session).items()}
    try:
        yield copies
    finally:
        restore(session, copies)
        forget(session)
        session.scorer.train(was_training)


@torch.no_grad()
def restore(session: Session, copies: dict[str, Tensor]) -> None:
    """The weights as they were when ``copies`` were made."""
    scatter(session)
    for name, parameter in trained(session).items():
        local(parameter).copy_(copies[name])


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach()
