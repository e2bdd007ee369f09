"""What an OpenAI-compatible endpoint answers, as far as it is read: parsed strictly, and checked against what was sent.

May import errors and types. ``server.py`` imports it.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from taut.errors import EngineError
from taut.types import FloatArray, Prompt

ABOVE_ZERO = 1e-4
"""How far rounding may lift a log-prob above 0."""
BELOW_ALL = -9999.0
"""What vLLM writes for minus infinity, which no sampled token has."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
"""A server's log-prob further than this (nats) from taut's own in float32 is another model's, by the server's dtype.
Measured with vLLM 0.32 on a CPU, SmolLM2-135M-Instruct: 4.7e-5 and 0.33 at most (greedy: 0.17; docs/serving.md);
kernels differ elsewhere."""

T = TypeVar("T", bound=BaseModel)


class Card(BaseModel):
    id: str
    max_model_len: int | None = None


class Models(BaseModel):
    data: list[Card]


class LogProbs(BaseModel):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class Choice(BaseModel):
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: LogProbs | None = None


class Answer(BaseModel):
    choices: Annotated[list[Choice], Field(min_length=1, max_length=1)]


class Rendered(BaseModel):
    prompt_token_ids: list[int] | None = None


def parsed(kind: type[T], answer: Any) -> T:
    try:
        return kind.model_validate(answer, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the answer"
        raise EngineError(
            f"server: {place} in an answer is not as it should be ({first['msg']}); expected an OpenAI-compatible "
            "endpoint; serve the model with vLLM"
        ) from None


def checked(choice: Choice, prompt: Prompt) -> tuple[list[int], FloatArray | None]:
    """The ids of a completion and their log-probs, if there are any."""
    if choice.token_ids is None:
        raise no_ids("token_ids")
    sent = prompt.ids_T.tolist()
    if choice.prompt_token_ids is not None and choice.prompt_token_ids != sent:
        raise EngineError(
            f"{prompt.id}: the server read {len(choice.prompt_token_ids)} prompt ids that differ from the {len(sent)} "
            "sent; expected the same ids; serve it with an endpoint that takes token ids as they are"
        )
    if choice.logprobs is None:
        return choice.token_ids, None
    values = np.array(choice.logprobs.token_logprobs, dtype=np.float64)
    if values.size != len(choice.token_ids):
        raise EngineError(
            f"{prompt.id}: the server returned {values.size} log-probs for {len(choice.token_ids)} tokens; "
            "expected one each; serve the model with vLLM"
        )
    if not ((values > BELOW_ALL) & (values <= ABOVE_ZERO)).all():
        raise EngineError(
            f"{prompt.id}: the server returned {values.max():g} as a log-prob; expected at most 0; start vLLM with "
            "--logprobs-mode raw_logprobs"
        )
    return choice.token_ids, values


def no_ids(what: str) -> EngineError:
    return EngineError(
        f"server: an answer without {what}; expected the ids as sampled, since text is never tokenised again; "
        "serve the model with vLLM 0.10.2 or newer (return_token_ids)"
    )
