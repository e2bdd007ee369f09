"""On-policy distillation (GKD, arXiv 2306.13649): the student learns the teacher's distribution on its own answers.

The section ``[distill]`` is that of methods/teacher.py, without the keys of a file of logprobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from taut.config import configclass
from taut.errors import ConfigError
from taut.losses.loss import Loss
from taut.methods.aux_models import AuxModels
from taut.methods.method import MethodName
from taut.methods.online import OnlineMethod
from taut.methods.teacher import DistillConfig
from taut.rewards.panel import PanelConfig
from taut.rl.advantages import Credit, TrainSample
from taut.rl.rollout import Group, ModelScores, RolloutConfig, sample_of
from taut.train.optim import DefaultRates


@configclass
class GkdRollout(RolloutConfig):
    """How completions are sampled, and for how many steps a rollout is trained on."""

    n: Annotated[int, Field(ge=1)] = 1
    """Completions per prompt."""


@configclass
class GkdConfig(DistillConfig):
    """On-policy distillation."""

    divergence: Literal["forward", "reverse", "js"] = "reverse"
    """reverse: KL(student || teacher), mode-seeking; forward: KL(teacher || student), mode-covering; js: the
    generalised Jensen-Shannon divergence."""

    def __post_init__(self) -> None:
        for key in ("top_logprobs", "eval_top_logprobs", "tail"):
            if getattr(self, key) is not None:
                raise ConfigError(
                    f"distill.{key}={getattr(self, key)}: a file knows nothing of completions that are yet to be "
                    "generated; expected a teacher alone; set distill.teacher=DIR, and leave it out"
                )
        if self.sft_weight:
            raise ConfigError(
                f"distill.sft_weight={self.sft_weight:g} weighs the data's own answers, and taut gkd learns on the "
                "student's, whose logprob has a mean gradient of 0; expected none; leave it out"
            )
        super().__post_init__()


class All(Credit):
    """Every answer unchanged: the teacher judges each token."""

    def assign(
        self, groups: Sequence[Group], scores: ModelScores
    ) -> tuple[list[TrainSample], dict[str, float]]:
        made = [[(t, sample_of(t)) for t in group.trajectories] for group in groups]
        return [TrainSample.of(samples) for samples in made], {}


@configclass
class Gkd(OnlineMethod):
    """A run of ``taut gkd``."""

    learning_rates: ClassVar[DefaultRates] = DefaultRates(
        1e-5, 1e-4, "tinker-cookbook with LoRA: 1e-4; TRL: 2e-5"
    )

    is_judged: ClassVar[bool] = False

    method: MethodName = "gkd"
    rollout: GkdRollout = GkdRollout()
    distill: GkdConfig = GkdConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distill.teacher is None:
            raise ConfigError(
                "distill.teacher is not set; expected a model directory; set distill.teacher=DIR"
            )
        self.distill.require_teacher(self.model, has_eval=False)
        for key in ("dynamic_sampling_rounds", "replay_groups"):
            if getattr(self.rollout, key):
                raise ConfigError(
                    f"rollout.{key}={getattr(self.rollout, key)} chooses completions by their rewards, and taut gkd "
                    f"learns from every one; expected 0; take rollout.{key} out"
                )
        if self.rewards:
            raise ConfigError(
                "rewards is set, and taut gkd learns from its teacher alone; expected none; take rewards out, or set "
                "eval.answers.rewards to judge held-out answers"
            )
        if self.grading != PanelConfig():
            raise ConfigError(
                "grading is set, and taut gkd has no rewards whose work it could share out; expected none; take "
                "grading out"
            )

    @property
    def ends_remedy(self) -> str:
        return "take a distill.teacher that ends its answers, or lower optim.learning_rate"

    def loss(self) -> Loss:
        return self.distill.make_loss()

    def models(self) -> AuxModels:
        return AuxModels(teacher=self.distill)

    def make_credit(self) -> All:
        return All(self.loss())
