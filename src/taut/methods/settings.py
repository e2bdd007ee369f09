"""Sections that several methods share, and which keys a resume may change. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from taut.config import Every, configclass, home_path
from taut.conflicts import conflict
from taut.evals.settings import AnswersConfig
from taut.inference.settings import EndpointConfig
from taut.losses.settings import DivergenceConfig
from taut.rl.settings import OwnCode
from taut.train.settings import Repeated

PROMPT, PRIVILEGED = "{prompt}", "{privileged}"


class MayChange(NamedTuple):
    """The configuration keys that a resume may change, by what follows. A key includes all keys below it. A change of
    any other key makes another run.
    """

    freely: tuple[str, ...] = ()
    """Keys that do not affect the steps, or whose target is compared by content."""
    rounding: tuple[str, ...] = ()
    """Keys that change losses by rounding only, no longer bit for bit."""
    schedule: tuple[str, ...] = ()
    """Keys that change the learning rate of the remaining steps."""

    def plus(self, other: MayChange) -> MayChange:
        """The union of these keys and the keys of ``other``."""
        return MayChange(*(keys + more for keys, more in zip(self, other, strict=True)))


@configclass
class EvalConfig(Repeated):
    """Evaluation during training. The end of a run is always evaluated as well."""

    every: Every | None = None
    """Steps between evaluations, or a text: 0.5 epochs, 30 minutes; 0 evaluates only at the end. Default: 1 epoch where
    there are held-out rows."""
    best: str | None = None
    """Keep the best model so far in out/best, by this metric: loss, stopped, the name of a reward or of one of metrics,
    NAME_pass_K, or for data with judged answers rewards/accuracy, rewards/margin, accuracy, score/margin."""
    metrics: list[OwnCode] = field(default_factory=list)
    """Metrics of your own, FILE.py:function each, of the tokens of data.eval or of generated answers (docs/eval.md)."""
    stop_after: Annotated[int, Field(ge=0)] = 0
    """Early stopping: end the run after this many evaluations in a row without a better value of ``best``; 0: never."""
    answers: AnswersConfig = field(default_factory=AnswersConfig)

    rules: ClassVar[str] = """
        stop_after needs best: it is the value of which one has to be better
        stop_after excludes every=0 where answers.every=0: nothing is measured before the end
        stop_after excludes every=10minutes[counts_minutes] answers.every=10minutes[counts_minutes]: the step at which
            the run ends would depend on the speed of the machine
    """


@configclass
class ChecksConfig:
    """Selection of the checks that run before training."""

    skip: list[str] = field(default_factory=list)
    """Names of checks (docs/check.md) to leave out, as ["rewards.gold"]; the report and the run log name them."""


STREAM = "ref_logp_N"


@configclass
class ReferenceConfig:
    """The reference model that the policy is compared with: by default the initial policy."""

    model: str | None = None
    """Directory (or hub name) of another model to use as the reference, with the same tokenizer."""
    file: str | None = None
    """Cache the logprobs of the reference in this file (.safetensors). It is computed before training if it does not
    exist, and refused if it belongs to another model, data or setting. No reference is then held while training."""
    update_every: Annotated[int, Field(ge=0)] = 0
    """Steps between updates of the reference towards the policy (TR-DPO); 0 never updates it."""
    update_mix: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the policy in such an update; 1 replaces the reference by the policy."""

    rules: ClassVar[str] = """
        update_every excludes model file: what is updated is the policy's own start
        update_mix needs update_every
    """


@configclass
class TeacherConfig:
    """The teacher of a run."""

    teacher: str | None = None
    """Directory (or hub name) of the model to learn from, with the student's tokenizer."""
    top_logprobs: str | None = None
    """Instead of a teacher: the file that ``taut teach`` wrote for data.train."""
    eval_top_logprobs: str | None = None
    """Instead of a teacher: the file that ``taut teach`` wrote for data.eval."""

    rules: ClassVar[str] = """
        at most one of teacher top_logprobs: the file stands for the teacher
        eval_top_logprobs needs top_logprobs
    """


@configclass
class DistillConfig(DivergenceConfig, TeacherConfig):
    """Distillation on fixed data."""

    rules: ClassVar[str] = """
        tail needs top_logprobs[is_listed]: the teacher is no list of likeliest tokens; expected `top_logprobs` (taut
            gkd: url, teachers or privileged); set it, or leave `tail` out
        temperature!=1 needs tail=renormalize where top_logprobs[is_listed]: what tokens that are not listed have at
            another temperature is not known
    """

    @property
    def is_listed(self) -> bool:
        """Whether the teacher is a list of its likeliest tokens at each target."""
        return self.top_logprobs is not None


def require_another(run: Any, config: DistillConfig) -> None:
    """Raise Conflict where the teacher of a run is the model that trains, which has nothing to teach."""
    if config.teacher is None or config.sft_weight:
        return
    paths = home_path(config.teacher), home_path(run.model)
    is_same = all(path.is_dir() for path in paths) and paths[0].samefile(paths[1])
    if is_same or config.teacher == run.model:
        why = "the model that trains has nothing to teach"
        remedy = "expected another; name one, or set `distill.sft_weight` to train with a tie to the start"
        raise conflict(run, "distill.teacher model", why, remedy)


@configclass
class TeacherSource:
    """One of several teachers: a model in this process, or one behind a server."""

    teacher: str | None = None
    """Directory (or hub name) of a model with the student's tokenizer."""
    url: str | None = None
    """URL of a vLLM server with a model that has the student's tokenizer."""
    server: EndpointConfig = field(default_factory=EndpointConfig)

    rules: ClassVar[str] = """
        exactly one of teacher url: a teacher is in this process, or behind a server
        server needs url
    """


@configclass
class RolloutTeachersConfig:
    """Teachers of a student's own completions."""

    teacher: str | None = None
    """Directory (or hub name) of the model to learn from, with the student's tokenizer."""
    url: str | None = None
    """Instead of a teacher in this process: URL of a vLLM server with one, as in http://127.0.0.1:8001/v1. It scores
    each rollout before it is trained on."""
    server: EndpointConfig = field(default_factory=EndpointConfig)
    teachers: dict[str, TeacherSource] = field(default_factory=dict)
    """Instead of one teacher: several by name, each with a teacher or a url. A row names its teacher in a column."""
    column: str = "teacher"
    """For teachers: the column with the name of a row's teacher."""
    privileged: str | None = None
    """Instead of a teacher: the column with information (a right answer, a hint, feedback) that the model sees as its
    own teacher and not as the student."""
    privileged_template: str = "{prompt} For your information: {privileged}"
    """For privileged: the text of the teacher's last user message, or of its prompt. {prompt} is the student's text,
    {privileged} the column's."""
    weights: Literal["start", "now"] = "start"
    """For privileged: the teacher's weights. start: the initial weights, moved by update_every; now: the weights that
    train."""
    update_every: Annotated[int, Field(ge=0)] = 0
    """For weights=start: steps between updates of the teacher towards the policy; 0 never updates it."""
    update_mix: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the policy in such an update: with update_every=1 the teacher is a moving average."""

    rules: ClassVar[str] = """
        at most one of teacher url teachers privileged: there is one kind of teacher
        server needs url
        column needs teachers
        privileged_template weights update_every update_mix needs privileged
        update_every excludes weights=now: there is no copy to update
        update_mix needs update_every
    """

    def __post_init__(self) -> None:
        text = self.privileged_template
        if any(text.count(name) != 1 for name in (PROMPT, PRIVILEGED)):
            remedy = f"expected a text with {PROMPT} and {PRIVILEGED}, once each; correct it"
            raise conflict(self, "privileged_template", "a placeholder is missing", remedy)

    @property
    def is_served(self) -> bool:
        """Whether a server has a teacher."""
        return any(source.url is not None for _, _, source in self.sources)

    @property
    def is_on(self) -> bool:
        """Whether there is a teacher."""
        return any((self.teacher, self.url, self.teachers, self.privileged))

    @property
    def sources(self) -> Iterator[tuple[str, str, TeacherSource]]:
        """(name, section of the configuration, teacher) of each teacher other than the model itself."""
        if self.teacher is not None or self.url is not None:
            yield (
                "",
                "distill.",
                TeacherSource(teacher=self.teacher, url=self.url, server=self.server),
            )
        for name, source in self.teachers.items():
            yield name, f"distill.teachers.{name}.", source

    @property
    def directories(self) -> Iterator[tuple[str, str, str]]:
        """(name, configuration key, path) of each model that is loaded."""
        for name, section, source in self.sources:
            if source.teacher is not None:
                yield name, f"{section}teacher", source.teacher

    @property
    def has_copy(self) -> bool:
        """Whether there is a copy of the trained tensors."""
        return self.privileged is not None and self.weights == "start"
