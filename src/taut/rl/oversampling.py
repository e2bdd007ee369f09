"""Over-sampling: more prompts are asked than are taken, and the first groups that finish are taken.
``rollout.oversample``.

The others are cancelled, so that no rollout waits for its slowest answers. Short answers are favored: the event of the
rollout has how long the cancelled answers were. Which further prompts are asked is a function of the seed and the
rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from taut.config import Decision
from taut.rl.dynamic_sampling import GroupChoice, other_prompts
from taut.rl.rollout import Rollout, RolloutRequest, WrappedSource


@dataclass(eq=False)
class Oversampling(WrappedSource):
    """Asks the inner source for further prompts in the first round."""

    num_more: int
    """Number of further prompts."""
    choice: GroupChoice
    num_prompts: int
    """Prompts of the data."""
    seed: int

    @property
    def decisions(self) -> Sequence[Decision]:  # type: ignore[override]  # of the instance
        value = f"{self.num_more} more prompts asked than taken"
        reason = (
            "rollout.oversample; it favors short answers: compare oversample_tokens_mean, of those dropped, with "
            "tokens_mean in the event rollout"
        )
        return [*self.inner.decisions, Decision("oversampling", value, reason)]

    def take(self, request: RolloutRequest) -> Rollout:
        request, prompts = request.resolved()
        if request.round == 0:
            random = np.random.default_rng([self.seed, request.number, 3])
            others = other_prompts(random, self.num_prompts, set(prompts))[: self.num_more]
            request = replace(
                request,
                prompts=[*prompts, *others],
                num_wanted=len(prompts),
                is_wanted=self.choice.keeps,
            )
        return self.inner.take(request)
