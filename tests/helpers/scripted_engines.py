"""An engine that says what it is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from taut.inference.engine import OnDone
from taut.inference.settings import Sampling
from taut.types import Completion, FinishReason, Prompt

Say = Callable[[str, int], str]


@dataclass
class FakeEngine:
    """``say(prompt_id, index)`` is the text of a completion, of a token for each word and one that ends it."""

    say: Say
    finish: Callable[[str], FinishReason] = lambda text: "stop"
    asked: list[Prompt] = field(default_factory=list)
    version: int = 0

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, on_done: OnDone | None = None
    ) -> list[Completion]:
        self.asked += prompts
        completions = [
            self._completion(prompt, index) for prompt in prompts for index in range(sampling.n)
        ]
        for completion in completions:
            if on_done is not None:
                on_done(completion)
        return completions

    def update(self, version: int) -> None:
        self.version = version

    def _completion(self, prompt: Prompt, index: int) -> Completion:
        text = self.say(prompt.id, index)
        ids_N = np.arange(1, len(text.split()) + 2)
        zeros = np.zeros(ids_N.size)
        reason = self.finish(text)
        error = "the server went away" if reason == "error" else None
        return Completion(prompt.id, index, ids_N, zeros, zeros, reason, text, error, self.version)
