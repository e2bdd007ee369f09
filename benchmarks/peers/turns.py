"""The environment of ``benchmarks/grpo.py``: says one and the same word to each of the policy's turns, and ends
after as many as the row says.
"""

from __future__ import annotations

from typing import Any

from taut.rl.environment import Step


class Turns:
    """Of one trajectory."""

    def reset(self, row: dict[str, Any]) -> None:
        self.left, self.word = row["turns"], row["word"]

    def step(self, text: str, calls: list[Any]) -> Step:
        self.left -= 1
        if not self.left:
            return Step(done=True)
        return Step([{"role": "user", "content": self.word}])
