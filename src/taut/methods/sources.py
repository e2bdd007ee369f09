"""Sources of steps of the methods that train on given data: fixed rows, or a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import TypedDict

from taut.config import Decision
from taut.data.batching import Rows
from taut.data.dataset import Dataset
from taut.data.order import Cursor, Order
from taut.data.stream import Stream
from taut.losses.loss import Loss
from taut.train.trainer import Trainer
from taut.types import Tree

TELL_AFTER = 10.0
"""Seconds without a new row after which a waiting step is logged."""
STEPS_AHEAD = 32
"""Number of steps whose samples are announced ahead to the code that fetches them (``Dataset.expect``)."""


class FromData:
    """A source of steps whose samples are rows of data: the common part of such sources."""

    loss: Loss
    mismatched_length: int | None
    """Maximum tokens of a prompt combined with another's answer, on which the loss's statistics are computed (KTO);
    None uses the step's own trees."""

    def rows_at(self, step: int) -> tuple[Rows, list[int]]:
        """Return rows, and the indices of the rows that belong to the step."""
        raise NotImplementedError

    def prepare(self, step: int) -> list[Tree]:
        """Return the trees of a step (counted from 1)."""
        rows, indices = self.rows_at(step)
        return rows.trees(indices)

    def observed(self, step: int) -> list[Tree] | None:
        """Trees on which the loss's statistics of this step are computed; None uses the step's own trees."""
        return None if self.mismatched_length is None else self.observed_of(*self.rows_at(step))

    def observed_of(self, rows: Rows, indices: list[int]) -> list[Tree] | None:
        """Return the trees of ``observed`` for the given rows, which may be held-out ones."""
        if self.mismatched_length is None:
            return None
        return rows.mismatched(indices, self.mismatched_length)

    def open(self) -> Sequence[Decision]:
        """Nothing to open."""
        return ()

    def reject(self) -> None:
        """Nothing to discard: nothing is generated."""


@dataclass(frozen=True)
class Offline(FromData):
    """The source of steps of a method that trains on fixed data: the rows of each step, and their trees."""

    rows: Rows
    order: Order
    epochs: float | None
    """Number of epochs after which the run ends; None repeats the data for as long as steps are left."""
    loss: Loss
    mismatched_length: int | None = None

    def rows_at(self, step: int) -> tuple[Rows, list[int]]:
        return self.rows, self.order.step(step, self.epochs)

    def prepare(self, step: int) -> list[Tree]:
        known = (self.order.step(step + ahead, self.epochs) for ahead in range(STEPS_AHEAD))
        self.rows.expect(known)
        return super().prepare(step)

    def is_known(self, step: int) -> bool:
        """True: the data are fixed."""
        return True

    def cursor(self, step: int) -> Cursor:
        """The position in the data after a step."""
        return self.order.cursor(step, self.epochs)

    @property
    def epoch_size(self) -> int:
        """Samples in an epoch."""
        return self.order.epoch_size

    @property
    def state(self) -> None:
        """Return None: a resumed run needs only the cursor."""

    def close(self) -> None:
        """Nothing to close."""


class LastWindow(TypedDict):
    """The window of a stream that contains the last sample of a checkpoint."""

    number: int
    digest: str


@dataclass(frozen=True)
class Streamed(FromData):
    """The source of steps of a method that trains on a stream. Its state is the digest of all rows up to the window of
    the last trained sample.
    """

    stream: Stream
    rows_of: Callable[[Dataset], Rows]
    samples_per_step: int
    seed: int | None
    """Seed of the shuffle of each window; None keeps the order of arrival."""
    loss: Loss
    mismatched_length: int | None = None
    get_trainer: Callable[[], Trainer] | None = None
    """Returns the trainer; None if nothing is trained."""
    epoch_size: ClassVar[int] = 0
    """A stream has no epochs, and RunConfig refuses what counts them."""

    def rows_at(self, step: int) -> tuple[Rows, list[int]]:
        start, stop = self.cursor(step - 1).samples, self.cursor(step).samples
        remedy = "expected more; add them, and resume=true goes on"
        if step > 1:
            remedy += f", or resume=true steps={step - 1} ends the run here"
        told = False

        def follow(seconds: float) -> None:
            nonlocal told
            if self.get_trainer is None:
                return
            trainer = self.get_trainer()
            if seconds > TELL_AFTER and not told:
                told = True
                path = self.stream.recipe.path
                detail = f"step {step} waits for rows of {path}; the last one came {seconds:.0f} seconds ago"
                trainer.emit("warning", name="stream", step=step, detail=detail)
            trainer.ranks.doing(f"waiting for rows of step {step}")
            trainer.interrupts.agree(trainer.ranks)

        self.stream.require(stop, f"step {step}", remedy, follow)
        data, indices = self.stream.at(start, stop, self.seed)
        return self.rows_of(data), indices

    def is_known(self, step: int) -> bool:
        """Whether all ranks know that the rows of a step are there."""
        return self.cursor(step).samples <= self.stream.stop

    def cursor(self, step: int) -> Cursor:
        """The position in the stream after a step."""
        return Cursor(step, step * self.samples_per_step)

    @property
    def state(self) -> Streamed:
        return self

    @property
    def remembered(self) -> type[LastWindow]:
        return LastWindow

    def remember(self) -> LastWindow:
        assert self.get_trainer is not None, "a checkpoint is of a run that trains"
        if self.stream.expected is not None:  # no step was taken since the last checkpoint
            number, digest = self.stream.expected
            return {"number": number, "digest": digest}
        last = self.stream.holding(self.cursor(self.get_trainer().done).samples - 1)
        return {"number": last["number"], "digest": last["digest"]}

    def recall(self, remembered: LastWindow) -> None:
        self.stream.expected = remembered["number"], remembered["digest"]

    def leave(self, step: int, oldest: int) -> None:
        """Forget steps up to ``step``, which are taken; a resume may begin after ``oldest``."""
        self.stream.leave(self.cursor(step).samples, self.cursor(oldest).samples)

    def close(self) -> None:
        """Read no more."""
        self.stream.reader.close()
