"""Reward models in the processes that train, under several ranks: every rank has a copy, and scores its part.

    rating = SharedRating(read_parts(rewards), open_rater, ranks)     all ranks
    reward_set = open_rewards(rewards, open_rater=rating.given)       the writer
    rating.rate(answers)                                              all ranks, with the same answers
    reward_set.grade(answers)                                         the writer: with the scores of all ranks

Rank r of R scores the answers from r * n / R to (r + 1) * n / R, so that answers to one prompt, whose prefix is
computed once, stay together as far as possible. To within rounding, a score does not depend on the other answers of its
batch. Nothing is generated and nothing trains meanwhile. A copy on each rank costs its memory; a larger model needs a
server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from taut.rewards.registry import Part
from taut.rewards.reward_set import Rater
from taut.rewards.verifier import RewardInput, Score, Verifier
from taut.train.distributed import Ranks


class SharedRating:
    """The copies of this rank."""

    def __init__(
        self, parts: Sequence[Part], open_rater: Callable[[Verifier], Rater], ranks: Ranks
    ) -> None:
        """Load the models; raises on all ranks the first error of one."""
        self._parts = [part for part in parts if part.verifier.runs == "model"]
        self._ranks = ranks
        self._raters: list[Rater] = []
        self._scores: list[list[Score]] = []

        def load() -> None:
            self._raters = [open_rater(part.verifier) for part in self._parts]

        ranks.run_everywhere(load)

    def given(self, verifier: Verifier) -> Rater:
        """Return a rater with the scores of the last ``rate``, for the answers of that call."""
        number = [part.verifier for part in self._parts].index(verifier)
        return lambda answers: self._scores[number][: len(answers)]

    def rate(self, answers: Sequence[RewardInput], *, extract: bool = True) -> None:
        """Score the answers, a part on each rank; raises on all ranks the first error of one.

        ``extract``: as for ``RewardSet.grade``.
        """
        rank, size = self._ranks.rank, self._ranks.size
        mine = answers[rank * len(answers) // size : (rank + 1) * len(answers) // size]
        gathered = self._ranks.run_everywhere(
            lambda: [
                rater([part.read(answer, extract) for answer in mine])
                for part, rater in zip(self._parts, self._raters, strict=True)
            ]
        )
        self._scores = [
            [score for of_rank in gathered for score in of_rank[number]]
            for number in range(len(self._parts))
        ]
