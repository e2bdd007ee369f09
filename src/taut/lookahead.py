"""Pictures are read in threads while others are computed: those of a step, and then those of the one after it.

Only of data that are there from the start, where the samples of a step are a pure function; what is asked in a roll-out
was read to be asked. Each rank reads its own. May import loop and below; build makes one.
"""

from __future__ import annotations

from dataclasses import dataclass

from taut.loop import Job, microbatches_of
from taut.vision.album import Album


@dataclass
class Lookahead:
    """Called before each step."""

    job: Job
    album: Album
    expected: int = 0
    """The last step whose pictures are expected: it was planned for that, and is not again."""

    def __call__(self, step: int) -> None:
        first = max(step, self.expected + 1)
        self.expected = min(step + 1, self.job.num_steps)
        for number in range(first, self.expected + 1):
            packs = microbatches_of(self.job.method.prepare(number), self.job)
            self.album.expect([one.picture for packed in packs for one in packed.media])
