"""What the first step lists and sums, in three comparisons with the samples themselves: the targets and weights of the
micro-batches; the loss from the step's own log-probs (a reward model's scores), to the last digits; those with the
samples alone through the library's own attention and head.

Cross entropy is summed here anew. Another loss is taken at its word, on all samples in one list: what is asked is
whether cutting, packing and dividing leave it as it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.loss.alone import Expected, expected, library_numbers, obstacle
from taut.checks.loss.step import step
from taut.checks.session import Session
from taut.train.monitors import STEADY_TARGETS, TOLERANCE
from taut.train.trainer import Scored
from taut.types import Sample

EXACT = 1e-5
"""Relative difference of two sums of the same float32 numbers."""
CROSS_ENTROPY = {"cross_entropy"}
"""The terms of the loss that is summed here."""


def ask(session: Session) -> Finding:
    """Is the first step's loss the one that its samples alone give?"""
    why_not = obstacle(session)
    if why_not is not None:
        return skipped(why_not)
    report = session.once(step).report
    assert report is not None, "asked after loss.reached"
    samples = [sample for tree in session.trees for sample in tree.samples]
    listed = _listed(session, report.scored)
    unlike = [line for sample in samples if (line := _unlike(sample, listed.get(sample.id)))]
    if unlike:
        return failed(
            f"{len(unlike)} of {len(samples)} samples are not summed as they are",
            number=len(unlike),
            unit=f"of {len(samples)} samples",
            evidence=unlike[:3],
            remedy="packing loses or changes targets; set batch.share_prefixes=false, and please report this",
        )
    loss = _loss(session, samples, {name: values[2] for name, values in listed.items()}).loss
    if abs(report.loss - loss) > EXACT * max(1.0, abs(loss)):
        return failed(
            f"the step's loss is {report.loss:.6g}, and {loss:.6g} from its own {session.says.many}",
            number=report.loss - loss,
            unit=_unit(session),
            evidence=[f"{len(samples)} samples, {sum(s.num_targets for s in samples)} targets"],
            remedy="the loss is divided by another count, or leaves targets out; please report this",
        )
    return _against_alone(session, samples, loss)


def _against_alone(session: Session, samples: list[Sample], loss: float) -> Finding:
    if session.job.noise is not None:
        said = "from what the step lists; samples alone would have other noise"
        return passed(said, loss, _unit(session))
    with session.quiet():
        alone = {sample.id: _array(library_numbers(session, sample)) for sample in samples}
    found = _loss(session, samples, alone)
    number = sum(len(values) for values in alone.values())
    slope = sum(float(values.abs().sum()) for values in found.slopes.values())
    limit = TOLERANCE[session.dtype] * max(1.0, slope) / min(1.0, number / STEADY_TARGETS) ** 0.5
    if not abs(loss - found.loss) <= limit:
        return failed(
            f"the step's loss is {loss:.6g}, and {found.loss:.6g} from its samples alone (rounding: {limit:.2g})",
            number=loss - found.loss,
            unit=_unit(session),
            evidence=[f"{one.id}: {float(alone[one.id].mean()):.6g} alone" for one in samples[:3]],
            remedy="the training forward does not compute this model; set batch.share_prefixes=false and "
            "attention=reference, and please report the model",
        )
    what = "reads" if session.is_scalar else "targets"
    said = f"{found.loss:.6g} from {len(samples)} samples alone, {number} {what}"
    return passed(said, loss, _unit(session))


def _loss(session: Session, samples: list[Sample], numbers: dict[str, Any]) -> Expected:
    """The loss of samples of which the model says ``numbers``."""
    if set(session.job.method.loss.units) == CROSS_ENTROPY:
        return Expected(_mean(samples, numbers), {})
    return expected(session, samples, {n: torch.from_numpy(it) for n, it in numbers.items()})


def _unit(session: Session) -> str:
    is_mean = set(session.job.method.loss.units) == CROSS_ENTROPY
    return "nats a target" if is_mean else ""


def _listed(session: Session, scored: list[Scored]) -> dict[str, Any]:
    """Sample id -> its targets, weights and log-probs (or scores) in the micro-batches of all ranks."""
    mine: dict[str, list[Any]] = {}
    for packed, scores in scored:
        said, rows = scores.logp_N.cpu(), packed.row_N
        if scores.scalar_R is not None:
            said, rows = scores.scalar_R.cpu(), packed.row_R
        for row, name in enumerate(packed.sample_ids):
            at = packed.row_N == row
            columns = (packed.target_N[at], packed.weight_N[at], said[rows == row])
            parts = mine.setdefault(name, [np.empty(0)] * 3)
            mine[name] = [
                np.concatenate([part, _array(values)])
                for part, values in zip(parts, columns, strict=True)
            ]
    return {name: found for each in session.ranks.gather(mine) for name, found in each.items()}


def _unlike(sample: Sample, found: list[Any] | None) -> str | None:
    """How a sample's targets differ from what was summed; None where they do not."""
    if found is None:
        return f"{sample.id}: left out"
    targets, weights, _ = found
    if len(targets) != sample.num_targets:
        return f"{sample.id}: {len(targets)} targets summed of {sample.num_targets}"
    if (targets != sample.ids_T[sample.target_at_N]).any():
        return f"{sample.id}: other tokens are predicted than its targets"
    if not np.allclose(weights, sample.weight_N):
        return f"{sample.id}: other weights than its own"
    return None


def _mean(samples: list[Sample], logps: dict[str, Any]) -> float:
    """-sum of weight * logp / sum of weights."""
    total = sum(float(-(sample.weight_N * logps[sample.id]).sum()) for sample in samples)
    return total / sum(float(sample.weight_N.sum()) for sample in samples)


def _array(values: Tensor) -> Any:
    return values.detach().to("cpu", torch.float64).numpy()
