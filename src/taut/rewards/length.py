"""Rewards for the length of an answer, in tokens n as they were sampled. They do not apply to answers that were not
sampled.

    length_target     max(0, 1 - |n - target| / width)
    length_overlong   0 up to max_tokens - buffer; then linear down to -1 at max_tokens, and beyond
                      (soft overlong punishment, DAPO, arXiv:2503.14476, equation 13)
    length_cosine     over(exceed) if n >= max_tokens; else with t = n / max_tokens
                      end + (start - end) (1 + cos(pi t)) / 2
                      start, end = right[0], right[1] of a right answer, wrong[0], wrong[1] of a wrong one
                      (arXiv:2502.03373, section 4.1): right answers should be short, wrong ones long
    stop              1 if the answer ended by itself
"""

from __future__ import annotations

import math
from dataclasses import field, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import Field

from taut.config import Decision, configclass, fields_of
from taut.conflicts import conflict
from taut.errors import ConfigError, DataError
from taut.rewards.settings import Judged, Place
from taut.rewards.verifier import RewardInput, Verifier


@configclass
class LengthTarget(Verifier):
    """``length_target``: near a number of tokens."""

    judges: ClassVar[Judged] = "form"

    target: Annotated[int, Field(ge=1)] | None = None
    """The target length in tokens."""
    column: str | None = None
    """The column with each row's own target."""
    width: Annotated[int, Field(ge=1)] | None = None
    """Distance from the target, in tokens, at which the reward is 0. By default the target itself."""

    rules: ClassVar[str] = """
        exactly one of target column: the target is given here, or in a column of each row
    """

    def __call__(self, answer: RewardInput) -> float | None:
        if answer.num_tokens is None:
            return None
        target = self.target if self.column is None else answer.row.get(self.column)
        if not isinstance(target, int) or target < 1:
            raise DataError(
                f"found {target!r:.40} in column {self.column!r}; expected a number of tokens; correct the row"
            )
        return max(0.0, 1 - abs(answer.num_tokens - target) / (self.width or target))


@configclass
class LengthOverlong(Verifier):
    """``length_overlong``: not much longer than allowed."""

    judges: ClassVar[Judged] = "form"

    max_tokens: Annotated[int, Field(ge=1)]
    """Length in tokens from which the reward is -1."""
    buffer: Annotated[int, Field(ge=1)]
    """Number of tokens before max_tokens over which the reward falls from 0 to -1."""

    def __post_init__(self) -> None:
        if self.buffer > self.max_tokens:
            remedy = "expected at most `max_tokens`; set a smaller `buffer`"
            raise conflict(self, "buffer max_tokens", "it begins before the answer does", remedy)

    def __call__(self, answer: RewardInput) -> float | None:
        if answer.num_tokens is None:
            return None
        over = answer.num_tokens - (self.max_tokens - self.buffer)
        return -min(max(over / self.buffer, 0.0), 1.0)


@configclass
class LengthCosine(Verifier):
    """``length_cosine``: right answers short, wrong ones long."""

    runs: ClassVar[Place] = "process"

    max_tokens: Annotated[int, Field(ge=1)]
    """Length in tokens at which answers are cut, or ought to be."""
    judge: str
    """The reward that judges correctness, such as math; at least 0.5 is right."""
    judge_options: dict[str, Any] = field(default_factory=dict)
    """Options of that reward."""
    right: tuple[float, float] = (2.0, 1.0)
    """Reward of a right answer of length 0, and of length max_tokens."""
    wrong: tuple[float, float] = (-10.0, 0.0)
    """Reward of a wrong answer of length 0, and of length max_tokens."""
    exceed: float = -10.0
    """Reward of an answer of max_tokens or more."""

    def resolve_defaults(self) -> tuple[Verifier, Decision | None]:
        """Resolve the defaults of the reward that judges, such as the sandbox."""
        judge = self._judge
        resolved, decision = judge.resolve_defaults()
        chosen = {
            name: getattr(resolved, name)
            for name in fields_of(type(resolved))
            if getattr(resolved, name) != getattr(judge, name)
        }
        return replace(self, judge_options={**self.judge_options, **chosen}), decision

    def prepare(self) -> None:
        """Prepare the reward that judges, which has to judge correctness."""
        self._judge.prepare()
        if self._judge.judges == "form":
            raise ConfigError(
                f"found judge={self.judge} of length_cosine; expected a reward that judges correctness, such as math; "
                "name another"
            )

    def __call__(self, answer: RewardInput) -> float | None:
        """None if the judging reward does not apply."""
        return self._scaled(answer, self._judge(answer))

    def when_unjudged(self, answer: RewardInput) -> float | None:
        """The value of a wrong answer of this length."""
        return self._scaled(answer, self._judge.when_unjudged(answer))

    def _scaled(self, answer: RewardInput, value: float | None) -> float | None:
        if answer.num_tokens is None or value is None:
            return None
        if answer.num_tokens >= self.max_tokens:
            return self.exceed
        start, end = self.right if value >= 0.5 else self.wrong
        share = (1 + math.cos(math.pi * answer.num_tokens / self.max_tokens)) / 2
        return end + (start - end) * share

    @property
    def seconds(self) -> float:  # type: ignore[override]  # of this verifier's options, so of the instance
        """The time limit of the reward that judges."""
        return self._judge.seconds

    @property
    def max_memory(self) -> int | None:  # type: ignore[override]  # the same
        """The memory limit of the reward that judges."""
        return self._judge.max_memory

    @property
    def trivial(self) -> str:  # type: ignore[override]  # the same
        """The trivial answer of the reward that judges."""
        return self._judge.trivial

    @property
    def needs_reference(self) -> bool:  # type: ignore[override]  # the same
        """Whether the reward that judges needs a reference."""
        return self._judge.needs_reference

    @cached_property
    def _judge(self) -> Verifier:
        from taut.rewards.registry import verifier_of  # the registry has this one too

        verifier = verifier_of(self.judge, self.judge_options)
        if verifier.runs not in ("here", "process"):
            raise ConfigError(
                f"found judge={self.judge} of length_cosine, which asks a model or a server; expected a reward that "
                "computes, such as math; name another"
            )
        return verifier


@configclass
class Stop(Verifier):
    """``stop``: 1 if the answer ended by itself, ``otherwise`` if it was cut."""

    judges: ClassVar[Judged] = "form"

    ended: float = 1.0
    """Reward of an answer that ends by itself."""
    otherwise: float = 0.0
    """Reward of an answer that was cut."""

    def __call__(self, answer: RewardInput) -> float:
        return self.ended if answer.finish_reason == "stop" else self.otherwise
