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

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from taut.config import Decision
from taut.data.read.json_io import shown
from taut.data.rows.prompts import PromptRow, PromptSet, with_privileged
from taut.errors import ConfigError, DataError
from taut.inference.engine import require_text
from taut.inference.teacher_server import TeacherServer
from taut.methods.inputs import Inputs, Models
from taut.methods.settings import RolloutTeachersConfig
from taut.models.load import context_length
from taut.models.scorer import evaluating
from taut.rl.rollout import sample_of
from taut.rl.sampler import Trajectory
from taut.rl.teachers import ModelTeacher, RolloutTeacher, ServerTeacher, Teachers
from taut.types import IntArray, Sample


def open_teachers(
    config: RolloutTeachersConfig,
    inputs: Inputs,
    models: Models,
    *,
    top: int,
    temperature: float,
) -> Teachers:
    """Open the teachers of a run. ``top``: likeliest tokens of each target; ``temperature``: for the logprobs of models
    in this process.
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
    """Raise DataError if a row names no teacher of the run."""
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
