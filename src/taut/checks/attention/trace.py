"""Where a change spreads: the first layer whose output differs at tokens that should not know of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from taut.checks.differ import gap
from taut.checks.session import Session
from taut.models import architecture
from taut.types import Packed


def first_that_moves(session: Session, left: Packed, right: Packed, at: Sequence[int]) -> str:
    """The first layer whose output at the tokens ``at`` differs between two micro-batches of one shape."""
    layers = list(architecture.layers(session.scorer.model))
    outputs = zip(_outputs(session, layers, left), _outputs(session, layers, right), strict=True)
    names = {module: name for name, module in session.scorer.named_modules()}
    index = torch.as_tensor(list(at))
    for layer, (one, other) in zip(layers, outputs, strict=True):
        if gap(one[index], other[index]) > session.exact:
            return f"first seen after {names[layer]} ({type(layer).__name__})"
    return "first seen after the last layer"


def _outputs(session: Session, layers: Sequence[nn.Module], packed: Packed) -> list[Tensor]:
    """[T, D] that each layer gives."""
    found: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        found.append(hidden.detach().reshape(-1, hidden.shape[-1]).cpu())

    hooks = [layer.register_forward_hook(keep) for layer in layers]
    try:
        with session.quiet():
            session.said(packed)
    finally:
        for hook in hooks:
            hook.remove()
    return found
