"""Pictures are read in threads while others are computed: those of a step, and then those of the one after it.

Only of data that are there from the start, where the samples of a step are a pure function; what is asked in a roll-out
was read to be asked. Each rank reads its own. May import loop and below; build makes one.
"""

from __future__ import annotations

from dataclasses import dataclass

from taut.loop import Job, microbatches_of
from taut.vision.album import Album


@dataclass(frozen=True)
class Lookahead:
    """Called before each step."""

    job: Job
    album: Album

    def __call__(self, step: int) -> None:
        for number in range(step, min(step + 1, self.job.num_steps) + 1):
            packs = microbatches_of(self.job.method.prepare(number), self.job)
            self.album.expect([one.picture for packed in packs for one in packed.media])
