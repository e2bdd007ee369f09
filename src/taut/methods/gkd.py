"""On-policy distillation (GKD, arXiv 2306.13649): the student learns the teacher's distribution on its own answers.

The section ``[distill]`` is that of methods/teacher.py, without the keys of a file of logprobs. A teacher in this
process runs with the student, on each micro-batch, and gives its whole distribution; one behind a server, one of
several and the model as its own teacher score each rollout once, by their likeliest tokens
(methods/rollout_teachers.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from taut.config import configclass
from taut.data.settings import Split
from taut.errors import DataError
from taut.methods.method import MethodName
from taut.methods.online import OnlineMethod
from taut.methods.settings import DistillConfig, RolloutTeachersConfig, require_another
from taut.rl.settings import RolloutConfig
from taut.train.settings import DefaultRates

if TYPE_CHECKING:
    from taut.data.dataset import Dataset
    from taut.data.render.render import Renderer
    from taut.inference.local import LocalEngine
    from taut.losses.loss import Loss
    from taut.methods.aux_models import AuxModels
    from taut.methods.inputs import Inputs, Language, Models
    from taut.rl.credits import AllCredit
    from taut.rl.online import Online
    from taut.rl.teachers import Teachers
    from taut.train.distributed import Ranks
    from taut.train.trainer import StepSource, Trainer


@configclass
class GkdRollout(RolloutConfig):
    """Sampling of completions, and the number of steps that train on a rollout."""

    n: Annotated[int, Field(ge=1)] = 1
    """Completions per prompt."""


@configclass
class GkdConfig(DistillConfig, RolloutTeachersConfig):
    """On-policy distillation."""

    divergence: Literal["forward", "reverse", "js"] = "reverse"
    """reverse: KL(student || teacher), mode-seeking; forward: KL(teacher || student), mode-covering; js: the
    generalized Jensen-Shannon divergence."""
    top: Annotated[int, Field(ge=1)] = 20
    """For url, teachers and privileged: number of likeliest tokens that a teacher lists at each token of a completion.
    vLLM allows 20, or its --max-logprobs."""

    lmbda: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the prompts that the student answers (GKD's lambda). The other prompts keep the data's answers, which
    are learned from in the same way. The choice depends on seed and rollout."""

    rules: ClassVar[str] = """
        top_logprobs eval_top_logprobs unread: a file knows nothing of completions that are yet to be generated
        sft_weight unread: the student learns on its own answers, whose logprob has a mean gradient of 0
        top needs url teachers privileged
    """

    @property
    def is_listed(self) -> bool:
        return bool(self.url or self.teachers or self.privileged)


@configclass
class Gkd(OnlineMethod):
    """A run of ``taut gkd``."""

    learning_rates: ClassVar[DefaultRates] = DefaultRates(
        1e-5, 1e-4, "tinker-cookbook with LoRA: 1e-4; TRL: 2e-5"
    )

    method: MethodName = "gkd"
    rollout: GkdRollout = field(default_factory=GkdRollout)
    distill: GkdConfig = field(default_factory=GkdConfig)

    rules: ClassVar[str] = """
        required distill.teacher distill.url distill.teachers distill.privileged: there is no teacher to learn from
        distill.privileged excludes rollout.environment.name[is_on]: an environment may begin a conversation by itself,
            and the prompt is what the teacher sees otherwise
        distill.lmbda<1 excludes rollout.replay_from: what was recorded was sampled
        distill.lmbda<1 excludes rollout.environment.name[is_on]: an environment's turns have no answers in the data
        distill.lmbda<1 excludes distill.privileged: the data's answers were given to the student's prompt
        rollout.dynamic_sampling_rounds rollout.replay_groups rollout.difficulty_filter unread: no reward chooses
        rewards unread: the teacher alone judges; leave `rewards` out, or set `eval.answers.rewards`
        grading unread: there are no rewards whose work it could share out
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        require_another(self, self.distill)

    @property
    def ends_remedy(self) -> str:
        return "take a distill.teacher that ends its answers, or lower optim.learning_rate"

    def loss(self) -> Loss:
        from taut.losses.supervised import DistillLoss

        return DistillLoss.of(self.distill)

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
        first_rows: int | None = None,
    ) -> Dataset:
        from taut.data.dataset import load_dataset
        from taut.data.rows.prompts import PromptSet

        prompts = super().load_data(split, renderer, language, looks_again=looks_again, ranks=ranks)
        if split == "eval" or self.distill.lmbda == 1:
            return prompts
        assert isinstance(prompts, PromptSet)
        longest = self.longest_sample(language.config) + self.rollout.max_new_tokens
        config = replace(self.data, without_targets="drop")
        data = load_dataset(config, split, renderer, longest, looks_again=looks_again)
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
        return replace(online, policy_share=self.distill.lmbda)

    def models(self) -> AuxModels:
        from taut.methods.aux_models import AuxModels

        scored = self.distill if self.distill.is_listed else None
        return AuxModels(teacher=self.distill, completions=scored)

    def teachers_opener(self, inputs: Inputs, models: Models) -> Callable[[], Teachers] | None:
        from taut.methods.rollout_teachers import open_teachers

        if not self.distill.is_listed:
            return None
        return partial(
            open_teachers, self.distill, inputs, models, top=self.distill.top, temperature=1.0
        )

    def make_credit(self) -> AllCredit:
        from taut.rl.credits import AllCredit

        return AllCredit(self.loss(), self.distill.top if self.distill.is_listed else 0)
