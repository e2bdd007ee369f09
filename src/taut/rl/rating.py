"""Reward models in the processes that train, under several ranks: every rank has a copy, and scores its part.

    rating = SharedRating(read_parts(rewards), open_rater, ranks)     all ranks
    panel  = open_panel(rewards, open_rater=rating.given)             the writer
    rating.rate(answers)                                              all ranks, with the same answers
    panel.grade(answers)                                              the writer: with the scores of all ranks

Rank r of R scores the answers from r * n / R to (r + 1) * n / R, so those to one prompt, whose prefix is computed once,
stay together as far as they can. A score does not depend on what it is computed with, to within rounding. Nothing is
generated and nothing trains meanwhile. A copy on each rank costs its memory; a model that is too large for that goes to
a server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from taut.errors import TautError
from taut.rewards.panel import Rater
from taut.rewards.registry import Part
from taut.rewards.verifier import Answered, Score, Verifier
from taut.train.distributed import Ranks

T = TypeVar("T")


class SharedRating:
    """The copies of this rank."""

    def __init__(
        self, parts: Sequence[Part], open_rater: Callable[[Verifier], Rater], ranks: Ranks
    ) -> None:
        """Load the models; raises on all ranks the first error of one."""
        self._parts = [part for part in parts if part.verifier.runs == "model"]
        self._ranks = ranks
        self._raters = self._together(lambda: [open_rater(p.verifier) for p in self._parts])
        self._scores: list[list[Score]] = []

    def given(self, verifier: Verifier) -> Rater:
        """What gives a panel the scores of the last ``rate``, for the answers of that call."""
        number = [part.verifier for part in self._parts].index(verifier)
        return lambda answers: self._scores[number][: len(answers)]

    def rate(self, answers: Sequence[Answered], *, are_bare: bool = False) -> None:
        """Score the answers, a part on each rank; raises on all ranks the first error of one.

        ``are_bare``: as for ``Panel.grade``.
        """
        rank, size = self._ranks.rank, self._ranks.size
        mine = answers[rank * len(answers) // size : (rank + 1) * len(answers) // size]
        scores = self._together(
            lambda: [
                rater([part.read(answered, are_bare) for answered in mine])
                for part, rater in zip(self._parts, self._raters, strict=True)
            ]
        )
        gathered = self._ranks.gather(scores)
        self._scores = [
            [score for of_rank in gathered for score in of_rank[number]]
            for number in range(len(self._parts))
        ]

    def _together(self, make: Callable[[], list[T]]) -> list[T]:
        """What this rank makes, once all have made theirs."""
        made: list[T] = []
        raised: TautError | None = None
        try:
            made = make()
        except TautError as error:
            raised = error
        for failure in self._ranks.gather(raised):
            if failure is not None:
                raise failure
        return made
