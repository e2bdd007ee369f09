"""Interface of engines: what they take and return; sampled ids -> text, cut at a stop string.

    engine.generate(prompts, sampling) -> completions
    engine.update(version)                                 from now on with the weights after that step

Tokens are drawn from the model's distribution after, in this order (the library's): the repetition penalty
(arXiv:1909.05858) over the ids of prompt and completion, temperature, top-k, top-p (arXiv:1904.09751), min-p
(arXiv:2407.01082); then it is renormalized. Temperature 0 takes the most likely token.

A character may take several tokens, so text is decoded from all ids so far. What follows a stop string is cut from the
text; the ids stay as they were sampled. Special tokens other than the one that ended the completion stay visible:
hiding them would hide a fault.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.errors import DataError, EngineError
from taut.inference.settings import Sampling
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
        fault = ""
        if prompt.ids_T.size == 0:
            fault = "the prompt has no token; expected at least one; remove it or fill it in"
        elif prompt.id in seen:
            fault = "two prompts have this id; expected each once; rename one"
        elif context is not None and prompt.ids_T.size >= context:
            fault = (
                f"the prompt has {prompt.ids_T.size:,} tokens and the model's context is {context:,}; expected room "
                "for an answer; shorten the prompt or remove it"
            )
        if fault:
            raise DataError(f"{prompt.id}: {fault}")
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
                f"{prompt.id}: the prompt has {len(prompt.media)} picture(s), of which a server's own processor may "
                f"make other tokens; expected text alone; {remedy}"
            )


def room(prompt: Prompt, sampling: Sampling, context: int | None) -> int:
    """The number of tokens that a completion of ``prompt`` may have."""
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
