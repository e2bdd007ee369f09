"""Training on a data set that is there from the start: SFT, preferences, reward models, distillation.

Which rows each step has and the trees they make (data/batching.py), and the loss. Wiring, no maths. What a loss needs
of another model is filled in by roles (train/trainer.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from taut.config import Decision
from taut.data.batching import Cursor, Order, Rows
from taut.losses import Loss
from taut.types import Tree


@dataclass(frozen=True)
class Offline:
    """Which trees each step trains on."""

    rows: Rows
    order: Order
    epochs: float | None
    """Where the data end; None: they go round and round."""
    loss: Loss
    mismatched_length: int | None = None
    """Statistics of a step are taken over prompts with each other's answers, of at most so many tokens; None: over the
    step itself."""

    def prepare(self, step: int) -> list[Tree]:
        """The trees of a step (counted from 1)."""
        return self.rows.trees(self.order.step(step, self.epochs))

    def observed(self, step: int) -> list[Tree] | None:
        """The trees that the loss's statistics are taken over; None: those of the step."""
        return self.observed_of(self.rows, self.order.step(step, self.epochs))

    def observed_of(self, rows: Rows, indices: list[int]) -> list[Tree] | None:
        """The same of any rows, as of held-out ones."""
        if self.mismatched_length is None:
            return None
        return rows.mismatched(indices, self.mismatched_length)

    def cursor(self, step: int) -> Cursor:
        """How far the data are after a step."""
        return self.order.cursor(step, self.epochs)

    def open(self) -> Sequence[Decision]:
        """It needs nothing but its data."""
        return ()

    @property
    def state(self) -> None:
        """The cursor is all that a resumed run needs."""

    def reject(self) -> None:
        """Nothing is generated."""

    def close(self) -> None:
        """It holds nothing."""
