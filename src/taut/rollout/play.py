"""Prompts and an engine -> episodes: paths from a prompt to its end, token for token as they were sampled.

Random streams are keyed by (seed, prompt's id, index): a prompt that is asked again is to be asked with another seed.
What an engine could not complete is an episode with its reason, and nothing is learned from it.

May import rollout and what it may. Methods import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from taut.data.formats import Message
from taut.data.prompts import PromptRow
from taut.rollout.engine import Engine, Sampling
from taut.rollout.episode import Episode
from taut.types import Completion, FinishReason, FloatArray, IntArray, Prompt


@dataclass(eq=False, slots=True)
class Path:
    """An episode under way."""

    row: PromptRow
    index: int
    ids: list[int]
    sampled_at: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    num_turns: int = 0
    text: str = ""
    finish: FinishReason | None = None
    """None while it goes on."""
    error: str | None = None

    def take(self, completion: Completion) -> None:
        """Append what was sampled. A path goes on only after a completion that ended by itself."""
        size = completion.ids_N.size
        logp_N = np.full(size, np.nan) if completion.logp_N is None else completion.logp_N
        self.sampled_at += range(len(self.ids), len(self.ids) + size)
        self.ids += completion.ids_N.tolist()
        self.logp += logp_N.tolist()
        self.version += [completion.version] * size
        self.text = completion.text
        self.num_turns += 1
        self.messages.append({"role": "assistant", "content": completion.text})
        if completion.finish_reason == "error":
            self.fail(completion.error or "the engine gives no reason")
        elif completion.finish_reason == "length":
            self.finish = "length"

    def fail(self, reason: str) -> None:
        """End it as an error: nothing is to be learned from it."""
        self.finish, self.error = "error", reason

    def episode(self) -> Episode:
        """What has come of it."""
        assert self.finish is not None, f"{self.row.id}: the path has not ended"
        return Episode(
            row=self.row,
            index=self.index,
            ids_T=_integers(self.ids),
            sampled_at_N=_integers(self.sampled_at),
            logp_N=_numbers(self.logp),
            version_N=_integers(self.version),
            finish_reason=self.finish,
            text=self.text,
            messages=tuple(self.messages),
            num_turns=self.num_turns,
            error=self.error,
        )


def play(engine: Engine, rows: Sequence[PromptRow], sampling: Sampling) -> list[Episode]:
    """``sampling.n`` episodes of each row, in the order of rows and samples."""
    paths = [Path(row, index, row.ids_T.tolist()) for row in rows for index in range(sampling.n)]
    prompts = [Prompt(row.id, row.ids_T) for row in rows]
    for path, completion in zip(paths, engine.generate(prompts, sampling), strict=True):
        assert (completion.prompt_id, completion.index) == (path.row.id, path.index)
        path.take(completion)
        path.finish = path.finish or "stop"
    return [path.episode() for path in paths]


def _integers(values: Sequence[int]) -> IntArray:
    return np.asarray(values, dtype=np.int64)


def _numbers(values: Sequence[float]) -> FloatArray:
    return np.asarray(values, dtype=np.float64)
