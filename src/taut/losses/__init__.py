"""The losses: frozen dataclasses of pure maths. A new loss is one small file and one line in ``LOSSES``.

What a loss is: losses/loss.py. May import types, errors and torch only.
"""

from __future__ import annotations

from taut.losses.loss import Loss, Unit, count
from taut.losses.sft import CrossEntropy

__all__ = ["LOSSES", "Loss", "Unit", "count"]

LOSSES: dict[str, Loss] = {"cross_entropy": CrossEntropy()}
"""name -> an instance. Every entry is held to tests/invariants."""
