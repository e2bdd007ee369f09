"""What the checks of the engine share: the engine that evaluations use, or roll-outs, and a few prompts of the run's
own data. A run that generates is asked at its own temperature, with its own ends; a server is sent the weights before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from taut.checks.rollout.opened import roller
from taut.checks.samples import part
from taut.checks.session import Session
from taut.errors import ModelError
from taut.inference import vllm_client
from taut.inference.engine import Sampling
from taut.inference.local import LocalEngine
from taut.inference.vllm import ServerEngine
from taut.run.setup import engine_of
from taut.train.monitors import TOLERANCE
from taut.types import Completion, FloatArray, Prompt, Sample

PROMPTS = 4
PROMPT_TOKENS = 48
NEW_TOKENS = 8


class Asked(NamedTuple):
    """An engine, what it is asked, and what it answers; or why there is none."""

    engine: LocalEngine | ServerEngine | None
    obstacle: str
    prompts: list[Prompt]
    answers: list[Completion]


def asked(session: Session) -> Asked:
    """The engine's answers to the run's first prompts."""
    if session.is_scalar:
        return Asked(None, "a reward model generates nothing", [], [])
    try:
        engine = _engine(session)
    except ModelError as error:
        return Asked(None, str(error).partition(";")[0], [], [])
    prompts = prompts_of(session, engine.context)
    if not prompts:
        return Asked(None, "no prompt leaves room for an answer", [], [])
    if isinstance(engine, ServerEngine):
        engine.update(0)
    return Asked(engine, "", prompts, engine.generate(prompts, sampling(session)))


def _engine(session: Session) -> LocalEngine | ServerEngine:
    if not session.is_generated:
        return engine_of(session.built)()
    engine = session.once(roller).engine
    assert isinstance(engine, LocalEngine | ServerEngine)
    return engine


def temperature_of(session: Session) -> float:
    """What the run's roll-outs are drawn at; 1 where there are none."""
    online = session.run.objective.online
    return 1.0 if online is None else online.rollout.temperature


def sampling(session: Session) -> Sampling:
    """Every token can be drawn: from the model's own distribution, or as the run's roll-outs are."""
    online, seed = session.run.objective.online, session.run.seed
    if online is None:
        return Sampling(max_new_tokens=NEW_TOKENS, seed=seed)
    return Sampling(
        n=min(2, online.rollout.n),
        max_new_tokens=min(NEW_TOKENS, online.rollout.max_new_tokens),
        temperature=online.rollout.temperature,
        stop=online.rollout.stop,
        seed=seed,
    )


def prompts_of(session: Session, context: int | None) -> list[Prompt]:
    """The beginnings of the first samples, up to their first target, cut from the left and not within
    a picture. Prompts end where they end.
    """
    found: dict[bytes, Prompt] = {}
    most = PROMPT_TOKENS if context is None else min(PROMPT_TOKENS, context - NEW_TOKENS)
    for index in session.looked_at[: 4 * PROMPTS]:
        sample = session.train[index]
        if most < 1 or len(found) == PROMPTS:
            break
        end = sample.num_tokens if session.is_generated else max(1, int(sample.target_at_N[0]))
        ids_T, media = part(sample, end - most, end)
        if ids_T.size + NEW_TOKENS <= (context or math.inf):
            seen = "".join(one.picture.digest for one in media).encode()
            found.setdefault(ids_T.tobytes() + seen, Prompt(sample.id, ids_T, media=media))
    return list(found.values())


def scored(
    session: Session, prompts: Sequence[Prompt], answers: Sequence[Completion]
) -> list[tuple[Sample, FloatArray]]:
    """Prompts with their answers as ids, and what the trainer says of the answers' tokens."""
    asked = {prompt.id: prompt for prompt in prompts}
    paths = [_path(asked[one.prompt_id], one) for one in answers if one.ids_N.size]
    found = session.numbers(paths, temperature=temperature_of(session))
    return [(path, found[path.id].double().numpy()) for path in paths]


def _path(prompt: Prompt, done: Completion) -> Sample:
    """Prompt and completion; the completion is to be predicted."""
    ids_T = np.concatenate([prompt.ids_T, done.ids_N])
    at_N = np.arange(prompt.ids_T.size, ids_T.size)
    name = f"{prompt.id}#{done.index}" if done.index else prompt.id
    return Sample(name, ids_T, at_N, np.ones(at_N.size), prompt.media)


def limit(session: Session, engine: LocalEngine | ServerEngine) -> float:
    """Largest mean difference that is rounding; a server computes in a precision of its own."""
    own = TOLERANCE[session.dtype]
    return (
        max(own, vllm_client.TOLERANCE["bfloat16"] / 4) if isinstance(engine, ServerEngine) else own
    )
