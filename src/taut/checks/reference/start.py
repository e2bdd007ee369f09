"""The reference that the loss, or the reward, is measured by, before the first update: it is the policy, so that every
log-ratio is 0 and the loss is what its formula gives there.

Compared is what the loop's own first step has of the two, the policy in training mode, where what is random in it would
show. The loss is compared with numbers worked out by hand, as far as they are in ``THEORY``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from taut.checks.differ import gap
from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.loss.step import step
from taut.checks.session import Session
from taut.methods.reference import STREAM
from taut.train.trainer import StepReport
from taut.types import Packed

LN2 = math.log(2)
THEORY: dict[str, tuple[str, Callable[[float], float]]] = {
    "sigmoid": ("ln 2", lambda _: LN2),
    "robust": ("ln 2", lambda _: LN2),
    "aot": ("ln 2", lambda _: LN2),
    "aot_unpaired": ("ln 2", lambda _: LN2),
    "bco": ("2 ln 2", lambda _: 2 * LN2),
    "hinge": ("1", lambda _: 1.0),
    "apo_zero": ("1", lambda _: 1.0),
    "apo_down": ("1", lambda _: 1.0),
    "nca": ("2 ln 2", lambda _: 2 * LN2),
    "ipo": ("1 / (2 beta)^2", lambda beta: 0.25 / beta**2),
    "sppo": ("2 / (2 beta)^2", lambda beta: 0.5 / beta**2),
}
"""A pair's loss where policy and reference are one, of a single term without a margin."""
EXACT = 1e-3
"""Relative difference of a loss that is rounding."""


def ask(session: Session) -> Finding:
    """Is the reference the policy, before the first update?"""
    reference = session.run.objective.reference
    if reference is None:
        return skipped("the loss has no reference")
    if reference.model is not None:
        return skipped("reference.model names another model")
    report = session.once(step).report
    assert report is not None, "asked after loss.reached"
    apart, where, number = _compared(session, report)
    if apart > session.exact:
        return failed(
            f"policy and reference differ by {apart:.3g} nats before the first update",
            number=apart,
            unit="nats",
            evidence=[where, f"at most {session.exact:g} is rounding in {session.dtype}"],
            remedy="log-ratios would not begin at 0: the reference has other weights (an adapter left out?), another "
            "precision or layout, or something random; name the model that is meant with reference.model, or please "
            "report this",
        )
    said = f"the same on {number} targets; the loss is {report.loss:.6g}"
    theory = _theory(session.job.method.loss)
    if theory is None:
        return passed(said, apart, "nats")
    formula, value = theory
    if not abs(report.loss - value) <= EXACT * value:
        return failed(
            f"policy and reference agree, and the loss is {report.loss:.6g} instead of {value:.6g} = {formula}",
            number=report.loss - value,
            unit="off",
            evidence=[f"{len(session.trees)} rows"],
            remedy="the loss is not the one it is named after, or it is divided by another count; please report this",
        )
    equals = "" if formula.isdigit() else f" = {formula}"
    return passed(f"{said}{equals}, as in theory", apart, "nats")


def _compared(session: Session, report: StepReport) -> tuple[float, str, int]:
    """The largest difference, the target where it is, and how many there are."""
    worst, where, number = 0.0, "", 0
    for packed, scores in report.scored:
        logp_N, theirs_N = scores.logp_N.cpu(), _by_reference(session, packed)
        number += packed.num_targets
        apart = gap(logp_N.double(), theirs_N.double())
        if apart > worst or not where:
            at = int((logp_N - theirs_N).abs().nan_to_num(nan=torch.inf).argmax())
            token = session.inputs.token(int(packed.target_N[at]))
            name = packed.sample_ids[int(packed.row_N[at])]
            said = f"{float(logp_N[at]):.6g}, by the reference {float(theirs_N[at]):.6g}"
            worst, where = apart, f"{name}, target {token!r}: {said}"
    return worst, where, number


def _by_reference(session: Session, packed: Packed) -> Tensor:
    """What the loss is told; where the divergence is a part of the reward, the reference is asked anew."""
    if STREAM in packed.streams:
        return packed.streams[STREAM]
    (role,) = session.job.roles
    with session.quiet(), role.active():
        return role.streams(packed)[STREAM].cpu()


def _theory(loss: Any) -> tuple[str, float] | None:
    """What a loss is where all log-ratios are 0; None: it was not worked out."""
    (name, *others) = loss.units
    if (
        name not in THEORY
        or others
        or loss.units[name] != "pair"
        or getattr(loss, "margin", 0)
        or getattr(loss, "gamma", 0)
    ):
        return None
    weight = dict(getattr(loss, "terms", ())).get(name, 1.0)
    formula, value = THEORY[name]
    prefix = "" if weight == 1.0 else f"{weight:g} * "
    return f"{prefix}{formula}", weight * value(loss.beta)
