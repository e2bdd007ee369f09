"""A fresh adapter starts as nothing: the pair's log-probs with it and with all of it switched off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from taut.checks.differ import drift, gap
from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.session import Session
from taut.models.lora import is_adapted


def ask(session: Session) -> Finding:
    """Does a new adapter change nothing before it has learned?"""
    if not is_adapted(session.scorer.model):
        return skipped("there is no adapter")
    if session.run.lora.adapter is not None:
        return skipped("lora.adapter goes on from an adapter that has learned")
    says = session.says
    samples = session.pair if session.loaded.one_sample is None else session.pair[:1]
    with_it = session.numbers(samples)
    with _switched_off(session):
        without = session.numbers(samples)
    is_exact = not session.run.lora.dora  # DoRA divides by a norm and multiplies with it
    differ, limit = (gap, session.exact) if is_exact else (drift, session.tolerance)
    name, moved = max(
        ((name, differ(with_it[name], without[name])) for name in with_it),
        key=lambda item: item[1],
    )
    if moved > limit:
        return failed(
            f"the {says.many} of {name} are {moved:.3g} {says.unit} from those of the model without its new adapter",
            number=moved,
            unit=says.unit,
            evidence=_not_zero(session),
            remedy="training would begin from another model than asked for; check the version of peft, and please "
            "report this",
        )
    return passed(f"{says.many} with the adapter are those without", moved, says.unit)


def _not_zero(session: Session) -> list[str]:
    """Second matrices that are not zero."""
    wrong = [
        name
        for name, parameter in session.scorer.model.named_parameters()
        if ".lora_B" in name and bool(torch.any(parameter.detach()))
    ]
    shown = [f"{name} is not zero" for name in wrong[:3]]
    return shown or [
        "no second matrix is: a row or a module trained whole differs from the model's own"
    ]


@contextmanager
def _switched_off(session: Session) -> Iterator[None]:
    """Without the adapter. peft sets what requires a gradient anew on the way back, frozen tensors too."""
    model: Any = session.scorer.model
    required = {p: p.requires_grad for p in model.parameters()}
    try:
        with model.disable_adapter():
            yield
    finally:
        for parameter, is_required in required.items():
            parameter.requires_grad_(is_required)
