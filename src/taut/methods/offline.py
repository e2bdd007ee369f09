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
    """The source of steps of a method that trains on fixed data."""

    rows: Rows
    order: Order
    epochs: float | None
    """Number of epochs after which the run ends; None: the data are repeated as long as steps are left."""
    loss: Loss
    mismatched_length: int | None = None
    """If set, the loss's statistics are computed on the step's prompts combined with each other's answers, of at most
    this many tokens; None: on the step's own trees."""

    def prepare(self, step: int) -> list[Tree]:
        """The trees of a step (counted from 1)."""
        return self.rows.trees(self.order.step(step, self.epochs))

    def observed(self, step: int) -> list[Tree] | None:
        """The trees on which the loss's statistics of this step are computed; None: the step's own trees."""
        return self.observed_of(self.rows, self.order.step(step, self.epochs))

    def observed_of(self, rows: Rows, indices: list[int]) -> list[Tree] | None:
        """Like ``observed``, for the given rows, which may be held-out ones."""
        if self.mismatched_length is None:
            return None
        return rows.mismatched(indices, self.mismatched_length)

    def cursor(self, step: int) -> Cursor:
        """The position in the data after a step."""
        return self.order.cursor(step, self.epochs)

    def open(self) -> Sequence[Decision]:
        """Nothing to open."""
        return ()

    @property
    def state(self) -> None:
        """None: a resumed run needs only the cursor."""

    def reject(self) -> None:
        """Nothing to discard: nothing is generated."""

    def close(self) -> None:
        """Nothing to close."""
