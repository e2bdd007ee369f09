"""When something is due while a run trains: every so many steps, epochs or minutes (``Every`` in taut/config.py).

    cadence = Cadence("0.5 epochs", trainer)
    cadence.is_due(step)        after each step, on every rank

Steps and epochs are functions of the step: a resumed run does at the same steps what the whole run does. Of minutes the
writer's clock decides for all ranks. They count from the last time it was due, or from the start or resume of the run,
so another run, or a resumed one, does it at other steps. What is done between steps changes none of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

from taut.config import read_cadence
from taut.train.trainer import Trainer


@dataclass
class Cadence:
    """How often something is done."""

    every: int | str
    trainer: Trainer
    clock: Callable[[], float] = time.monotonic
    """Seconds."""
    _last: float = field(init=False)
    _number: Fraction = field(init=False)
    """Exact: 0.1 of 30 samples are 3."""
    _unit: str = field(init=False)

    def __post_init__(self) -> None:
        self._last = self.clock()
        number, self._unit = read_cadence(self.every)
        self._number = Fraction(number)

    @property
    def recurs(self) -> bool:
        """Whether it is meant to be due before the last step."""
        source = self.trainer.source
        if self._unit == "epoch":
            before_last = source.cursor(self.trainer.num_steps - 1).samples
            return before_last >= self._number * source.epoch_size
        return self._number > 0

    def is_due(self, step: int) -> bool:
        """Whether it is due after a step. Every rank asks after each step."""
        if self._unit == "step":
            return self._number > 0 and step % self._number == 0
        if self._unit == "epoch":
            source = self.trainer.source
            size = self._number * source.epoch_size
            return source.cursor(step).samples // size > source.cursor(step - 1).samples // size
        is_over = self.clock() - self._last >= 60 * self._number
        is_due: bool = self.trainer.ranks.gather_in_step(is_over)[0]
        if is_due:
            self._last = self.clock()
        return is_due
