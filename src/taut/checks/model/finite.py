"""Every weight, and the log-probs of two samples: an infinity or a NaN would look like a leak further on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from taut.checks.finding import Finding, failed, passed
from taut.checks.session import Session
from taut.models import architecture

SHOWN = 3


def ask(session: Session) -> Finding:
    """Are all weights, and the log-probs they give, finite numbers?"""
    tensors = list(session.scorer.model.named_parameters())
    wrong = [name for name, tensor in tensors if not _is_finite(tensor)]
    if wrong:
        return failed(
            f"{len(wrong)} tensors have values that are not finite",
            number=len(wrong),
            unit="tensors",
            evidence=wrong[:SHOWN],
            remedy="the checkpoint is damaged; copy it again, or take the one before it",
        )
    found = session.alone if session.loaded.one_sample is not None else session.packed
    for name, logp_N in found.items():
        if not bool(torch.isfinite(logp_N).all()):
            bad = int((~torch.isfinite(logp_N)).sum())
            return failed(
                f"{bad} of {len(logp_N)} {session.says.many} of {name} are not finite",
                number=bad,
                unit=f"of {len(logp_N)}",
                evidence=[_first_layer(session)],
                remedy=f"the model overflows in {str(session.dtype).removeprefix('torch.')}; set dtype=float32, or "
                "take another checkpoint",
            )
    return passed(f"weights and {session.says.many} are", len(tensors), "tensors")


def _is_finite(tensor: Tensor) -> bool:
    """A sum is finite unless a part is not, or it overflows: then each value is looked at."""
    local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if not local.is_floating_point() or bool(torch.isfinite(local.detach().sum())):
        return True
    return bool(torch.isfinite(local).all())


def _first_layer(session: Session) -> str:
    """Where the first value that is not finite comes from."""
    found: list[str] = []
    names = {module: name for name, module in session.scorer.model.named_modules()}

    def look(module: nn.Module, _: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if not found and not _is_finite(hidden):
            found.append(names[module])

    hooks = [
        layer.register_forward_hook(look) for layer in architecture.layers(session.scorer.model)
    ]
    try:
        session.numbers(session.pair[:1])
    finally:
        for hook in hooks:
            hook.remove()
    return f"first in the output of {found[0]}" if found else "not in any layer, but in the head"
