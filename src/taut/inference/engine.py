"""What every engine takes and returns; sampled ids -> text, and where a stop string ends it.

    engine.generate(prompts, sampling) -> completions
    engine.update(version)                                 from now on with the weights after that step

Tokens are drawn from the model's distribution after, in this order (the library's): the repetition penalty
(arXiv:1909.05858) over the ids of prompt and completion, temperature, top-k, top-p (arXiv:1904.09751), min-p
(arXiv:2407.01082); then it is renormalised. Temperature 0 takes the most likely token.

A character may take several tokens, so text is decoded from all ids so far. What follows a stop string is cut from the
text; the ids stay as they were sampled. Special tokens other than the one that ended the completion stay visible:
hiding them would hide a fault.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import field
from typing import Annotated, Protocol

from pydantic import Field
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.config import configclass
from taut.errors import ConfigError, DataError, EngineError
from taut.types import Completion, Prompt

TAIL = 8
"""Tokens decoded beyond a stop string's own length when it is looked for at the end of a completion."""


class Texts:
    """Texts of completions of one model."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int]) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids)

    def has_stop(self, ids: Sequence[int], stops: Sequence[str]) -> bool:
        """Whether the last token completed one of the stop strings."""
        if not stops:
            return False
        longest = max(len(stop.encode()) for stop in stops)  # a token is at least a byte
        tail = ids[-(longest + TAIL) :]
        now, before = self._decode(tail), self._decode(tail[:-1])
        return any(now.count(stop) > before.count(stop) for stop in stops)

    def text(self, ids: Sequence[int], stops: Sequence[str] = ()) -> str:
        """The text of a finished completion, up to its end."""
        if ids and ids[-1] in self.stop_ids:
            ids = ids[:-1]
        text = self._decode(ids)
        ends = [at for stop in stops if (at := text.find(stop)) >= 0]
        return text[: min(ends, default=None)]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(
            self.tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )


OnDone = Callable[[Completion], None]


COLDEST = 1e-6
"""The lowest temperature but 0: logits divided by less may not fit into float32."""


@configclass
class Sampling:
    """How completions are drawn."""

    n: Annotated[int, Field(ge=1)] = 1
    """Completions of each prompt."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 256
    """Tokens a completion may have; then it is cut."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Divides the logits; 0: always the most likely token."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Keep the k most likely tokens; 0: all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keep the fewest tokens that together have this probability."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Keep tokens at least this many times as likely as the most likely one."""
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Divides positive and multiplies negative logits of tokens that are in the prompt or the completion."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a completion, in addition to the model's own stop set."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the random streams; each prompt and sample has its own, whatever else is in the batch."""

    def __post_init__(self) -> None:
        if self.n > 1 and self.temperature == 0:
            raise ConfigError(
                f"sampling.n={self.n} with temperature=0 gives {self.n} times the same completion; "
                "set n=1, or a temperature"
            )
        if 0 < self.temperature < COLDEST:
            raise ConfigError(
                f"sampling.temperature={self.temperature:g} is too low to divide by; expected at least {COLDEST:g}, "
                "or 0 for the most likely token"
            )
        if any(not text for text in self.stop):
            raise ConfigError("sampling.stop has an empty text; it would stop at once; remove it")

    @property
    def is_plain(self) -> bool:
        """Whether tokens are drawn from the model's own distribution."""
        return self.temperature == 1 and self.is_untruncated and self.repetition_penalty == 1

    @property
    def is_untruncated(self) -> bool:
        """Whether every token can be drawn."""
        return self.top_k == 0 and self.top_p == 1 and self.min_p == 0


class Engine(Protocol):
    """Continues prompts."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, on_done: OnDone | None = None
    ) -> list[Completion]:
        """``sampling.n`` completions of each prompt, in the order of prompts and samples.

        ``on_done`` is called with each completion as soon as it is finished, so that what is done is not lost when
        a later one fails. Raises DataError for an empty prompt, one that repeats another's id, or one that leaves no
        room in the model's context.
        """

    def update(self, version: int) -> None:
        """From now on the weights are those after step ``version``, and completions carry it.

        Every rank calls it, when nothing is being generated. Raises EngineError where the weights did not arrive.
        """


def require_usable(prompts: Sequence[Prompt], context: int | None) -> None:
    """Raise DataError for prompts no engine can continue. ``context``: the model's, in tokens."""
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.ids_T.size == 0:
            raise DataError(
                f"{prompt.id}: the prompt has no token; expected at least one; remove it or fill it in"
            )
        if prompt.id in seen:
            raise DataError(
                f"{prompt.id}: two prompts have this id; expected each once; rename one"
            )
        if context is not None and prompt.ids_T.size >= context:
            raise DataError(
                f"{prompt.id}: the prompt has {prompt.ids_T.size:,} tokens and the model's context is {context:,}; "
                "expected room for an answer; shorten the prompt or remove it"
            )
        seen.add(prompt.id)


def require_text(
    prompts: Sequence[Prompt],
    remedy: str = "set engine=local (rollout.engine=local where it trains)",
) -> None:
    """Raise EngineError for a prompt with pictures, which a server would scale and count for itself: its ids would not
    be those that are trained on.
    """
    for prompt in prompts:
        if prompt.media:
            raise EngineError(
                f"{prompt.id}: the prompt has {len(prompt.media)} picture(s), and a server makes of them what its own "
                f"processor makes, so its tokens need not be taut's; expected text alone; {remedy}"
            )


def room(prompt: Prompt, sampling: Sampling, context: int | None) -> int:
    """How many tokens a completion of ``prompt`` may have."""
    limits = [sampling.max_new_tokens]
    if prompt.max_new_tokens is not None:
        limits.append(prompt.max_new_tokens)
    if context is not None:
        limits.append(context - prompt.ids_T.size)
    return min(limits)


def stream_seed(seed: int, prompt_id: str, index: int) -> int:
    """The seed of a completion's random stream, below 2**63: the same in every process, engine and batch."""
    digest = hashlib.sha256(f"{seed}/{index}/{prompt_id}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1
