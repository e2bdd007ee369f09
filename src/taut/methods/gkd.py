"""On-policy distillation (GKD, arXiv 2306.13649): the student learns the teacher's distribution on its own answers.

The section ``[distill]`` is that of methods/teacher.py, without the keys of a file of logprobs. A teacher in this
process runs with the student, on each micro-batch, and gives its whole distribution; one behind a server scores each
rollout once, by its likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from taut.config import configclass
from taut.data.prompts import PromptSet
from taut.errors import ConfigError
from taut.inference.engine import require_text
from taut.inference.teacher_server import TeacherServer
from taut.inference.vllm_client import EndpointConfig
from taut.losses.loss import Loss
from taut.methods.aux_models import AuxModels
from taut.methods.inputs import Inputs
from taut.methods.method import MethodName
from taut.methods.online import OnlineMethod
from taut.methods.teacher import DistillConfig
from taut.rewards.panel import PanelConfig
from taut.rl.advantages import Credit, TrainSample
from taut.rl.rollout import Group, ModelScores, RolloutConfig, sample_of
from taut.rl.sampler import Trajectory
from taut.rl.teachers import ServerTeacher, Teachers
from taut.train.optim import DefaultRates
from taut.types import Sample


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

    url: str | None = None
    """Instead of a teacher in this process: URL of a vLLM server with one, as in http://127.0.0.1:8001/v1. It scores
    completions by its likeliest tokens."""
    top: Annotated[int, Field(ge=1)] = 20
    """For url: number of likeliest tokens asked for at each token of a completion. vLLM allows 20, or what its
    --max-logprobs says."""
    server: EndpointConfig = EndpointConfig()

    list_key: ClassVar[str] = "distill.url"

    def __post_init__(self) -> None:
        for key in ("top_logprobs", "eval_top_logprobs"):
            if getattr(self, key) is not None:
                raise ConfigError(
                    f"distill.{key}={getattr(self, key)}: a file knows nothing of completions that are yet to be "
                    "generated; expected a teacher alone; set distill.teacher=DIR or distill.url=URL, and leave it out"
                )
        if self.teacher is not None and self.url is not None:
            raise ConfigError(
                "distill.teacher and distill.url are both set; expected one teacher; keep one"
            )
        for key in ("top", "server") if self.url is None else ():
            if getattr(self, key) != getattr(GkdConfig, key):
                raise ConfigError(
                    f"distill.{key} is set without distill.url, and nothing reads it; expected both; set distill.url, "
                    "or take it out"
                )
        if self.sft_weight:
            raise ConfigError(
                f"distill.sft_weight={self.sft_weight:g} weighs the data's own answers, and taut gkd learns on the "
                "student's, whose logprob has a mean gradient of 0; expected none; leave it out"
            )
        super().__post_init__()

    @property
    def is_listed(self) -> bool:
        return self.url is not None


class All(Credit):
    """Every answer unchanged: the teacher judges each token, while the student trains or, with its likeliest tokens as
    streams, before.
    """

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

    is_judged: ClassVar[bool] = False

    method: MethodName = "gkd"
    rollout: GkdRollout = GkdRollout()
    distill: GkdConfig = GkdConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distill.url is None:
            if self.distill.teacher is None:
                raise ConfigError(
                    "distill.teacher is not set; expected a model directory; set distill.teacher=DIR, or "
                    "distill.url=URL"
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

    def teachers_opener(self, inputs: Inputs) -> Callable[[], Teachers] | None:
        return partial(self._open_teachers, inputs) if self.distill.is_listed else None

    def _open_teachers(self, inputs: Inputs) -> Teachers:
        distill = self.distill
        assert distill.url is not None
        remedy = "set distill.teacher to a model directory, in place of distill.url"
        assert isinstance(inputs.train, PromptSet)
        require_text(inputs.train.prompts(), remedy)
        server = TeacherServer.open(
            distill.url,
            distill.server,
            inputs.tokenizer,
            top=distill.top,
            num_rows=inputs.num_rows,
            longest=inputs.longest,
            section="distill.",
        )
        return Teachers(ServerTeacher(server), [server.decision])

    def make_credit(self) -> All:
        return All(self.loss())
