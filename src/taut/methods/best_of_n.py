"""Rejection sampling (RAFT, arXiv 2304.06767): fine-tuning on the best of several answers to a prompt."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from taut.config import configclass
from taut.conflicts import conflict
from taut.methods.method import MethodName
from taut.methods.online import OnlineMethod
from taut.train.settings import DefaultRates

if TYPE_CHECKING:
    from taut.rl.credits import BestCredit


@configclass
class BestOfNConfig:
    """The choice of answers to train on."""

    keep: Annotated[int, Field(ge=1)] = 1
    """Number of answers to keep per prompt, the best first."""
    min_reward: float | None = None
    """Minimum reward of an answer; any reward is accepted if not set."""
    overlong: Literal["drop", "keep"] = "drop"
    """drop: leave out truncated completions. keep: treat them as candidates like the others; if one is chosen, the
    model learns not to stop."""


@configclass
class BestOfN(OnlineMethod):
    """A run of ``taut best-of-n``."""

    learning_rates: ClassVar[DefaultRates] = DefaultRates(
        2e-5, 2e-4, "as taut sft, whose loss it is"
    )

    method: MethodName = "best_of_n"
    best_of_n: BestOfNConfig = field(default_factory=BestOfNConfig)

    rules: ClassVar[str] = """
        rollout.dynamic_sampling_rounds needs best_of_n.min_reward best_of_n.overlong=drop: every answer may be learned,
            so that no prompt is replaced
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.best_of_n.keep > self.rollout.n:
            why = "more are kept than there are"
            remedy = "expected at most `rollout.n`; raise it, or lower `best_of_n.keep`"
            raise conflict(self, "best_of_n.keep rollout.n", why, remedy)

    def make_credit(self) -> BestCredit:
        from taut.rl.credits import BestCredit

        chosen = self.best_of_n
        drops_cut = chosen.overlong == "drop"
        return BestCredit(self.loss(), chosen.keep, chosen.min_reward, drops_cut=drops_cut)
