"""On-policy distillation (GKD, arXiv 2306.13649): the student learns the teacher's distribution on its own answers.

The section ``[distill]`` is that of methods/teacher.py, without the keys of a file of logprobs. A teacher in this
process runs with the student, on each micro-batch, and gives its whole distribution; one behind a server, one of
several and the model as its own teacher score each rollout once, by their likeliest tokens
(methods/rollout_teachers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from taut.config import configclass
from taut.data.dataset import Dataset, Split, load_dataset
from taut.data.prompts import PromptSet
from taut.data.render import Renderer
from taut.errors import ConfigError, DataError
from taut.inference.local import LocalEngine
from taut.losses.loss import Loss
from taut.methods.aux_models import AuxModels
from taut.methods.inputs import Inputs, Language, Models
from taut.methods.method import MethodName
from taut.methods.online import OnlineMethod
from taut.methods.rollout_teachers import RolloutTeachersConfig, open_teachers
from taut.methods.teacher import DistillConfig
from taut.rewards.panel import PanelConfig
from taut.rl.advantages import Credit, TrainSample
from taut.rl.data_answers import DataAnswers
from taut.rl.online import Online
from taut.rl.rollout import (
    Group,
    ModelScores,
    RolloutConfig,
    sample_of,
)
from taut.rl.sampler import Trajectory
from taut.rl.teachers import Teachers
from taut.train.distributed import Ranks
from taut.train.optim import DefaultRates
from taut.train.trainer import StepSource, Trainer
from taut.types import Sample


@configclass
class GkdRollout(RolloutConfig):
    """How completions are sampled, and for how many steps a rollout is trained on."""

    n: Annotated[int, Field(ge=1)] = 1
    """Completions per prompt."""


@configclass
class GkdConfig(DistillConfig, RolloutTeachersConfig):
    """On-policy distillation."""

    divergence: Literal["forward", "reverse", "js"] = "reverse"
    """reverse: KL(student || teacher), mode-seeking; forward: KL(teacher || student), mode-covering; js: the
    generalised Jensen-Shannon divergence."""
    top: Annotated[int, Field(ge=1)] = 20
    """For url, teachers and privileged: number of likeliest tokens that a teacher lists at each token of a completion.
    vLLM allows 20, or what its --max-logprobs says."""

    lmbda: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the prompts that the student answers (GKD's lambda). The others have their answers in the data, as
    taut sft learns them, and are learned from in the same way. Chosen by seed and rollout."""

    list_key: ClassVar[str] = "distill.url, teachers or privileged"

    def __post_init__(self) -> None:
        for key in ("top_logprobs", "eval_top_logprobs"):
            if getattr(self, key) is not None:
                raise ConfigError(
                    f"distill.{key}={getattr(self, key)}: a file knows nothing of completions that are yet to be "
                    "generated; expected a teacher alone; set distill.teacher=DIR or distill.url=URL, and leave it out"
                )
        if self.sft_weight:
            raise ConfigError(
                f"distill.sft_weight={self.sft_weight:g} weighs the data's own answers, and taut gkd learns on the "
                "student's, whose logprob has a mean gradient of 0; expected none; leave it out"
            )
        if not self.is_listed and self.top != GkdConfig.top:
            raise ConfigError(
                f"distill.top is set without {self.list_key}, and nothing reads it; expected both; set one of them, or "
                "take it out"
            )
        DistillConfig.__post_init__(self)
        RolloutTeachersConfig.__post_init__(self)

    @property
    def is_listed(self) -> bool:
        return bool(self.url or self.teachers or self.privileged)


class All(Credit):
    """Every answer unchanged: the teacher judges each token, while the student trains or, with its likeliest tokens as
    streams, before.
    """

    def __init__(self, loss: Loss, num_listed: int = 0) -> None:
        super().__init__(loss)
        self.num_listed = num_listed

    def assign(
        self, groups: Sequence[Group], scores: ModelScores
    ) -> tuple[list[TrainSample], dict[str, float]]:
        def sample(trajectory: Trajectory) -> Sample:
            streams = {name: scores[trajectory.name][name] for name in self.loss.needs}
            return replace(sample_of(trajectory), streams=streams)

        made = [[(t, sample(t)) for t in group.trajectories] for group in groups]
        return [TrainSample.of(samples) for samples in made], {}


@configclass
class Gkd(OnlineMethod):
    """A run of ``taut gkd``."""

    learning_rates: ClassVar[DefaultRates] = DefaultRates(
        1e-5, 1e-4, "tinker-cookbook with LoRA: 1e-4; TRL: 2e-5"
    )

    method: MethodName = "gkd"
    rollout: GkdRollout = GkdRollout()
    distill: GkdConfig = GkdConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.distill.is_on:
            raise ConfigError(
                "distill.teacher is not set; expected a model directory; set distill.teacher=DIR, distill.url=URL, "
                "distill.teachers or distill.privileged=COLUMN"
            )
        if self.distill.teacher is not None:
            self.distill.require_teacher(self.model, has_eval=False)
        self.require_rollouts_for(self.distill)
        others = {
            "rollout.replay_from": (self.is_replayed, "what was recorded was sampled"),
            "rollout.environment": (
                self.rollout.environment.is_on,
                "an environment's turns have no answers in the data",
            ),
            "distill.privileged": (
                self.distill.privileged is not None,
                "the data's answers were given to the student's prompt",
            ),
        }
        for other, (is_set, why) in others.items() if self.distill.lmbda < 1 else ():
            if is_set:
                raise ConfigError(
                    f"distill.lmbda={self.distill.lmbda:g} with {other}: {why}; expected lmbda=1; take one of the two "
                    "out"
                )
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

    @property
    def is_judged(self) -> bool:
        return False

    def load_data(
        self,
        split: Split,
        renderer: Renderer,
        language: Language,
        *,
        looks_again: bool = True,
        ranks: Ranks | None = None,
    ) -> Dataset:
        prompts = super().load_data(split, renderer, language, looks_again=looks_again, ranks=ranks)
        if split == "eval" or self.distill.lmbda == 1:
            return prompts
        assert isinstance(prompts, PromptSet)
        longest = self.longest_sample(language.config) + self.rollout.max_new_tokens
        answered = replace(self.data, without_targets="drop")
        data = load_dataset(answered, split, renderer, longest, looks_again=looks_again)
        prompts.answers = {sample.id: sample for sample in (data[i] for i in range(len(data)))}
        for row in prompts.prompt_rows:
            if row.place not in prompts.answers:
                raise DataError(
                    f"{row.place}: the row has no answer of its own, and distill.lmbda={self.distill.lmbda:g} learns "
                    "from the data's answers too; expected an assistant message at its end; add it, or take "
                    "distill.lmbda out"
                )
        return prompts

    def connect(
        self,
        source: StepSource,
        inputs: Inputs,
        models: Models,
        make_engine: Callable[..., LocalEngine],
        ranks: Ranks,
        get_trainer: Callable[[], Trainer],
    ) -> Online:
        online = super().connect(source, inputs, models, make_engine, ranks, get_trainer)
        if self.distill.lmbda == 1:
            return online
        assert isinstance(inputs.train, PromptSet)
        answers = DataAnswers(inputs.train, self.distill.lmbda, self.seed)
        return replace(online, data_answers=answers)

    def models(self) -> AuxModels:
        scored = self.distill if self.distill.is_listed else None
        return AuxModels(teacher=self.distill, completions=scored)

    def teachers_opener(self, inputs: Inputs, models: Models) -> Callable[[], Teachers] | None:
        if not self.distill.is_listed:
            return None
        return partial(
            open_teachers, self.distill, inputs, models, top=self.distill.top, temperature=1.0
        )

    def make_credit(self) -> All:
        return All(self.loss(), self.distill.top if self.distill.is_listed else 0)
