"""Supervised fine-tuning: rows of the data set, each a tree of its own; cross entropy on the listed targets.

Wiring, no maths: the loss is losses/sft.py, the order data/plan.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from taut.data.plan import Cursor, Order
from taut.losses import Loss
from taut.losses.sft import CrossEntropy
from taut.types import Sample, Tree


@dataclass(frozen=True)
class Sft:
    """Which samples each step trains on."""

    samples: Sequence[Sample]
    order: Order
    epochs: float | None
    """Where the data end; None: they go round and round."""
    loss: Loss = CrossEntropy()  # noqa: RUF009 (frozen)

    def prepare(self, step: int) -> list[Tree]:
        """The trees of a step (counted from 1)."""
        return [Tree((self.samples[index],)) for index in self.order.step(step, self.epochs)]

    def cursor(self, step: int) -> Cursor:
        """How far the data are after a step."""
        return self.order.cursor(step, self.epochs)
