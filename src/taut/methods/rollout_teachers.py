"""Teachers that score a student's own completions before they are trained on: the keys of ``[distill]`` of methods that
generate, and what opens the teachers (rl/teachers.py).

    teacher, url    one teacher, in this process or behind a server
    teachers        several, each for the rows that name it in the column ``column``
    privileged      the model itself, which sees in its prompt what the student does not: a right answer, a hint,
                    feedback (on-policy self-distillation; SDPO, arXiv 2601.20802; OPSD, 2601.18734; SDFT, 2601.19897)

The privileged prompt is the row's own, with ``privileged_template`` in place of the text of its last user message (or
of the whole prompt, where that is text). The completion is the student's, token for token.

The privileged teacher has the weights of the start by default: a fixed target. One whose weights are those that train
moves with the student, and what it taught by mistake comes back to it. ``update_every=1`` and a small ``update_mix``
make it a moving average, as in SDPO and SDFT.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from taut.config import Decision, changed, configclass
from taut.data.json_io import shown
from taut.data.prompts import PromptRow, PromptSet, with_privileged
from taut.errors import ConfigError, DataError
from taut.inference.engine import require_text
from taut.inference.teacher_server import TeacherServer
from taut.inference.vllm_client import EndpointConfig
from taut.methods.inputs import Inputs, Models
from taut.models.load import context_length
from taut.models.scorer import evaluating
from taut.rl.rollout import sample_of
from taut.rl.sampler import Trajectory
from taut.rl.teachers import ModelTeacher, RolloutTeacher, ServerTeacher, Teachers
from taut.types import IntArray, Sample

PROMPT, PRIVILEGED = "{prompt}", "{privileged}"


@configclass
class TeacherSource:
    """One of several teachers: a model in this process, or one behind a server."""

    teacher: str | None = None
    """Directory (or hub name) of a model with the student's tokenizer."""
    url: str | None = None
    """URL of a vLLM server with such a model."""
    server: EndpointConfig = EndpointConfig()


@configclass
class RolloutTeachersConfig:
    """Teachers of a student's own completions."""

    teacher: str | None = None
    """Directory (or hub name) of the model to learn from; it has the student's tokenizer."""
    url: str | None = None
    """Instead of a teacher in this process: URL of a vLLM server with one, as in http://127.0.0.1:8001/v1. It scores
    each rollout before it is trained on."""
    server: EndpointConfig = EndpointConfig()
    teachers: dict[str, TeacherSource] = field(default_factory=dict)
    """Instead of one teacher: several by name, each with a teacher or a url. A row names its teacher in a column."""
    column: str = "teacher"
    """For teachers: the column with the name of a row's teacher."""
    privileged: str | None = None
    """Instead of a teacher: the column with what the model itself sees as its own teacher, and as the student does not:
    a right answer, a hint, feedback."""
    privileged_template: str = "{prompt} For your information: {privileged}"
    """For privileged: the text of the teacher's last user message, or of its prompt. {prompt} is that of the student,
    {privileged} the column's."""
    weights: Literal["start", "now"] = "start"
    """For privileged: the teacher's weights. start: those of the start of the run, moved by update_every; now: those
    that train."""
    update_every: Annotated[int, Field(ge=0)] = 0
    """For weights=start: steps between updates of the teacher towards the policy; 0: never."""
    update_mix: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The policy's share in such an update: with update_every=1 the teacher is a moving average."""

    keys_of: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "url": ("server",),
        "teachers": ("column",),
        "privileged": ("privileged_template", "weights", "update_every", "update_mix"),
    }
    """Key -> the keys that are read with it alone."""

    def __post_init__(self) -> None:
        kinds = ("teacher", "url", "teachers", "privileged")
        chosen = [f"distill.{name}" for name in kinds if getattr(self, name)]
        if len(chosen) > 1:
            raise ConfigError(
                f"{chosen[0]} and {chosen[1]} are both set; expected one kind of teacher; keep one"
            )
        for kind, keys in self.keys_of.items():
            for key in changed(self, keys) if not getattr(self, kind) else ():
                raise ConfigError(
                    f"distill.{key} is set without distill.{kind}, and nothing reads it; expected both; set "
                    f"distill.{kind}, or take it out"
                )
        for name, source in self.teachers.items():
            if (source.teacher is None) == (source.url is None):
                raise ConfigError(
                    f"distill.teachers.{name} has {'no' if source.url is None else 'both'} teacher and url; expected "
                    "one of the two; set one"
                )
            if source.url is None and source.server != EndpointConfig():
                raise ConfigError(
                    f"distill.teachers.{name}.server is set without a url, and nothing reads it; expected both; set "
                    f"distill.teachers.{name}.url, or take it out"
                )
        if {PROMPT, PRIVILEGED} - _names_in(self.privileged_template):
            raise ConfigError(
                f"distill.privileged_template={shown(self.privileged_template)}; expected a text with {PROMPT} and "
                f"{PRIVILEGED}, once each; correct it"
            )
        if self.weights == "now" and self.update_every:
            raise ConfigError(
                f"distill.update_every={self.update_every} with distill.weights=now, which has no copy to update; "
                "expected weights=start; set that, or take update_every out"
            )
        if self.update_mix != 1.0 and not self.update_every:
            raise ConfigError(
                f"distill.update_mix={self.update_mix:g} has no effect with distill.update_every=0; expected both; set "
                "distill.update_every"
            )

    @property
    def is_on(self) -> bool:
        """Whether there is a teacher."""
        return any((self.teacher, self.url, self.teachers, self.privileged))

    @property
    def sources(self) -> Iterator[tuple[str, str, TeacherSource]]:
        """(name, section of the configuration, teacher) of each that is not the model itself."""
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


def open_teachers(
    config: RolloutTeachersConfig,
    inputs: Inputs,
    models: Models,
    *,
    top: int,
    temperature: float,
) -> Teachers:
    """The teachers of a run. ``top``: likeliest tokens of each target; ``temperature``: of the logprobs of models in
    this process.
    """
    assert isinstance(inputs.train, PromptSet)
    rows = inputs.train.prompt_rows
    num_rows = inputs.num_rows
    if top > num_rows:
        raise ConfigError(
            f"distill.top={top}; expected at most the {num_rows:,} tokens of the vocabulary; lower it"
        )
    local = partial(ModelTeacher, top=top, num_rows=num_rows, temperature=temperature)
    by_name: dict[str, RolloutTeacher] = {}
    decisions: list[Decision] = []
    if config.teachers:
        _require_named(rows, config)
    try:
        if config.privileged is not None:
            by_name[""], decision = _privileged(config, rows, inputs, models, local)
            decisions.append(decision)
        for name, section, source in config.sources:
            if source.url is None:
                by_name[name] = local(models.teachers[name])
                continue
            remedy = f"set {section}teacher to a model directory, in place of {section}url"
            require_text(inputs.train.prompts(), remedy)
            server = TeacherServer.open(
                source.url,
                source.server,
                inputs.tokenizer,
                top=top,
                num_rows=num_rows,
                longest=inputs.longest,
                section=section,
            )
            by_name[name] = ServerTeacher(server)
            decisions.append(server.decision)
    except BaseException:
        Teachers(by_name).close()
        raise
    return Teachers(by_name, config.column if config.teachers else None, decisions)


def _require_named(rows: list[PromptRow], config: RolloutTeachersConfig) -> None:
    """Raise DataError where a row names no teacher of the run."""
    for row in rows:
        name = row.columns.get(config.column)
        if not isinstance(name, str) or name not in config.teachers:
            raise DataError(
                f"{row.place}: {config.column} is {shown(name)}; expected the name of a teacher, one of "
                f"{', '.join(config.teachers)}; correct it, or name another column with distill.column"
            )


def _privileged(
    config: RolloutTeachersConfig,
    rows: list[PromptRow],
    inputs: Inputs,
    models: Models,
    local: Any,
) -> tuple[ModelTeacher, Decision]:
    """The model as its own teacher."""
    assert config.privileged is not None
    column, context = config.privileged, context_length(inputs.config)
    ids_of = with_privileged(rows, column, config.privileged_template, inputs.renderer)
    longest = max(ids_of, key=lambda place: ids_of[place].size)
    needed = ids_of[longest].size + inputs.grows
    if context is not None and needed > context:
        raise DataError(
            f"{longest}: the prompt with {column} and a completion may take {needed:,} tokens, and the model's context "
            f"has {context:,}; expected room for both; shorten the column, or lower rollout.max_new_tokens"
        )
    policy = models.scorer
    active: AbstractContextManager[Any] | Any = partial(evaluating, policy)
    value, reason = "the model, with the weights that train", "distill.weights=now"
    if models.self_teacher is not None:
        active = models.self_teacher.active
        value, reason = (
            "the model as at the start",
            "a teacher that moves with the student is no fixed target",
        )
        if config.update_every:
            value = f"the model, every {config.update_every} steps"
            reason = f"moves {config.update_mix:g} of the way (distill.update_every, update_mix)"
    teacher = local(policy, active=active, view=partial(_privileged_sample, ids_of))
    return teacher, Decision("distill.privileged", value, f"it sees {column}; {reason}")


def _privileged_sample(ids_of: Mapping[str, IntArray], trajectory: Trajectory) -> Sample:
    """A trajectory after the prompt with privileged information. Its targets are the same tokens."""
    sample, row = sample_of(trajectory), trajectory.row
    prompt_T, size = ids_of[row.place], row.ids_T.size
    assert (sample.ids_T[:size] == row.ids_T).all(), "a trajectory begins with its prompt"
    ids_T = np.concatenate([prompt_T, sample.ids_T[size:]])
    at_N = sample.target_at_N + (prompt_T.size - size)
    return Sample(sample.id, ids_T, at_N, sample.weight_N)


def _names_in(template: str) -> set[str]:
    return {name for name in (PROMPT, PRIVILEGED) if template.count(name) == 1}
