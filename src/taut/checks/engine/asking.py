"""What the checks of the engine share: the engine that evaluations use, and a few prompts of the run's own data."""

from __future__ import annotations

from typing import NamedTuple

from taut.build import engine_of
from taut.checks.session import Session
from taut.errors import ModelError
from taut.rollout.engine import Sampling
from taut.rollout.local import LocalEngine
from taut.types import Completion, Prompt

PROMPTS = 4
PROMPT_TOKENS = 48
NEW_TOKENS = 8


class Asked(NamedTuple):
    """An engine, what it is asked, and what it answers; or why there is none."""

    engine: LocalEngine | None
    obstacle: str
    prompts: list[Prompt]
    answers: list[Completion]


def asked(session: Session) -> Asked:
    """The engine's answers to the run's first prompts, drawn at temperature 1."""
    if session.is_scalar:
        return Asked(None, "a reward model generates nothing", [], [])
    try:
        engine = engine_of(session.built)()
    except ModelError as error:
        return Asked(None, str(error).partition(";")[0], [], [])
    prompts = prompts_of(session, engine.context)
    if not prompts:
        return Asked(None, "no prompt leaves room for an answer", [], [])
    return Asked(engine, "", prompts, engine.generate(prompts, sampling(session)))


def sampling(session: Session) -> Sampling:
    """Plain: every token can be drawn, from the model's own distribution."""
    return Sampling(max_new_tokens=NEW_TOKENS, seed=session.run.seed)


def prompts_of(session: Session, context: int | None) -> list[Prompt]:
    """The beginnings of the first samples, up to their first target, cut from the left."""
    found: dict[bytes, Prompt] = {}
    most = PROMPT_TOKENS if context is None else min(PROMPT_TOKENS, context - NEW_TOKENS)
    for index in range(min(len(session.train), 4 * PROMPTS)):
        sample = session.train[index]
        if most < 1 or len(found) == PROMPTS:
            break
        ids_T = sample.ids_T[: max(1, int(sample.target_at_N[0]))][-most:]
        found.setdefault(ids_T.tobytes(), Prompt(sample.id, ids_T))
    return list(found.values())
