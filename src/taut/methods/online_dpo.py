"""Online DPO (arXiv 2402.04792): the best and the worst of several answers to a prompt are a preference pair.

The section ``[dpo]`` is shared with ``taut dpo`` (methods/preference.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Annotated, ClassVar

from pydantic import Field

from taut.config import configclass
from taut.errors import CheckFailed
from taut.losses.loss import Loss
from taut.methods.aux_models import AuxModels
from taut.methods.method import MethodName
from taut.methods.online import OnlineMethod, require_live_reference
from taut.methods.preference import DpoConfig
from taut.methods.reference import STREAM, ReferenceConfig
from taut.rl.advantages import Credit, TrainSample
from taut.rl.rollout import Group, ModelScores, RolloutConfig, sample_of
from taut.train.optim import DefaultRates


@configclass
class PairsRollout(RolloutConfig):
    """How completions are sampled, and for how many steps a rollout is trained on."""

    n: Annotated[int, Field(ge=2)] = 2
    """Completions per prompt; the best and the worst of them are a pair."""


class Pairs(Credit):
    """Preference pairs of the best and the worst answer of each group."""

    needs_one = True

    def assign(
        self, groups: Sequence[Group], scores: ModelScores
    ) -> tuple[list[TrainSample], dict[str, float]]:
        reward_of = attrgetter("reward")
        pairs = []
        for group in groups:
            best = max(group.trajectories, key=reward_of)
            worst = min(group.trajectories, key=reward_of)
            if best.reward > worst.reward:
                made = [
                    (t, replace(sample_of(t), values={"preference": t.reward, "margin": t.reward}))
                    for t in (best, worst)
                ]
                pairs.append(TrainSample.of(made, is_atom=True))
        if not pairs:
            raise CheckFailed(
                "in no group of a rollout is one answer better than another, so there is no pair to learn from; "
                "expected rewards that differ; set rollout.dynamic_sampling_rounds, or take easier or harder prompts"
            )
        return pairs, {"pairs": float(len(pairs))}


@configclass
class OnlineDpo(OnlineMethod):
    """A run of ``taut online-dpo``."""

    learning_rates: ClassVar[DefaultRates] = DefaultRates(5e-7, 5e-6, "TRL; open-instruct: 8e-7")

    method: MethodName = "online_dpo"
    rollout: PairsRollout = PairsRollout()
    dpo: DpoConfig = DpoConfig()
    reference: ReferenceConfig = ReferenceConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        is_read = STREAM in self.loss().needs
        require_live_reference(self.reference, "dpo.reference_free=true", is_read=is_read)

    def loss(self) -> Loss:
        return self.dpo.make_loss()

    def models(self) -> AuxModels:
        return AuxModels(self.reference if STREAM in self.loss().needs else None)

    def make_credit(self) -> Pairs:
        return Pairs(self.loss())
