"""The norm of the gradient, tensor by tensor and layer by layer, in the one backward that the quick checks share."""

from __future__ import annotations

import math
from collections import defaultdict

from taut.checks.finding import Finding, failed, passed
from taut.checks.loss.step import step
from taut.checks.session import Session
from taut.models import architecture

SHOWN = 4


def ask(session: Session) -> Finding:
    """Is the gradient of every tensor finite?"""
    seen = session.once(step)
    assert seen.report is not None, "asked after loss.reached"
    wrong = [name for name, value in seen.norms.items() if not math.isfinite(value)]
    if wrong:
        return failed(
            f"the gradient of {len(wrong)} of {len(seen.norms)} tensors is not finite",
            number=len(wrong),
            unit=f"of {len(seen.norms)} tensors",
            evidence=[*wrong[:SHOWN], f"the loss is {seen.report.loss:.4g}"],
            remedy="an operation's derivative overflows or divides by zero, nearest to the loss in the last tensor "
            "named; set dtype=float32, and please report the model",
        )
    total = math.hypot(*seen.norms.values())
    layers = _by_layer(session, seen.norms)
    ordered = sorted(layers, key=layers.__getitem__)
    told = [
        f"{'smallest' if i else 'largest'} in {n}: {layers[n]:.3g}"
        for i, n in enumerate((ordered[-1], ordered[0]))
    ]
    clip = session.job.clip_grad_norm
    if clip is not None and total > clip:
        told.append(f"clipped to {clip:g}")
    return passed(f"{len(seen.norms)} tensors, loss {seen.report.loss:.4g}", total, "norm", told)


def _by_layer(session: Session, norms: dict[str, float]) -> dict[str, float]:
    """The norm of each decoder layer, and of each tensor outside them."""
    model = session.scorer.model
    names = {module: name for name, module in model.named_modules()}
    prefix = names[architecture.layers(model)] + "."
    squares: dict[str, float] = defaultdict(float)
    for name, value in norms.items():
        inside = name.removeprefix(prefix)
        owner = name if inside == name else f"layer {inside.partition('.')[0]}"
        squares[owner] += value * value
    return {owner: math.sqrt(value) for owner, value in squares.items()}
