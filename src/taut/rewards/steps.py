"""Rewards of the steps of an answer, by a process reward model.

    spans   = split_steps(text, separator)          where each step lies in the answer
    value   = aggregate(values, how)                the reward, of the probability that each step is right
    charges = charged(values, how)                  what each step is charged with; their sum is the reward

    min      the least of them             the step that lowers it is charged with the difference
    product  that all of them are right    each step with its difference
    last     the last one                  each step with its difference: its progress (arXiv 2410.08146)
    mean     their mean                    each step with its share
    sum      their sum                     each step with its own

For the first three a step's charge is A(steps up to it) - A(steps before it), and the first one's is its own value. By
hand: 0.9, 0.5, 0.8 are charged 0.9, -0.4, 0 for min; 0.9, -0.45, -0.09 for product, which is 0.36; 0.9, -0.4, 0.3 for
last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field
from itertools import accumulate, pairwise
from operator import mul
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field

from taut.config import configclass
from taut.errors import ConfigError
from taut.rewards.verifier import Explained

Aggregation: TypeAlias = Literal["min", "mean", "last", "product", "sum"]


@configclass
class StepsConfig:
    """A process reward model's reading of an answer, step by step."""

    separator: Annotated[str, Field(min_length=1)] | None = None
    """The text between two steps, as that of the model's training data. By default the whole answer gets one number."""
    mark: Annotated[str, Field(min_length=1)] | None = None
    """A text that stands after each step where the model reads it, before the separator or in place of one that it ends
    with: its number is read at the last token of it. For models that were trained so. By default it is read at the last
    token of the step."""
    tokens: list[str] = field(default_factory=list)
    """For a causal language model that judges a step by the token after it: that of right and that of wrong, as in
    ["+", "-"]. Its number is the difference of their logits. By default the model has a head for numbers."""
    aggregate: Aggregation = "min"
    """The reward, from the probability of each step to be right. min, mean, last, product, sum."""
    charge: bool = False
    """Charge each step's tokens with its part of the reward, as turns are with the rewards of an environment's steps.
    For taut ppo, and taut grpo with advantage_level=turn. The default charges the whole answer."""

    def __post_init__(self) -> None:
        is_set = self.charge or self.aggregate != "min" or self.mark or self.tokens
        if self.separator is None and is_set:
            raise ConfigError(
                "steps is set without steps.separator, and nothing is divided into steps; expected the text between "
                'two of them; set steps.separator, such as "\\n\\n"'
            )
        if len(self.tokens) not in (0, 2):
            raise ConfigError(
                f"steps.tokens={self.tokens}; expected two, that of right and that of wrong, as in ['+', '-']; set both"
            )


class Stepped(Explained):
    """A reward with what its steps are charged with."""

    @classmethod
    def of(cls, text: str, values: Sequence[float], config: StepsConfig) -> Self:
        """The reward of an answer by the probability of each of its steps. Nothing written is worth 0."""
        assert config.separator is not None
        spans = split_steps(text, config.separator)
        assert len(spans) == len(values), f"{len(values)} values of {len(spans)} steps"
        words = "no step" if not values else f"steps {' '.join(f'{value:.3f}' for value in values)}"
        made = cls(aggregate(values, config.aggregate), words)
        ends = (end for _, end in spans)
        charges = charged(values, config.aggregate) if config.charge else ()
        made.steps = tuple(zip(ends, charges, strict=False))
        return made


def split_steps(text: str, separator: str) -> list[tuple[int, int]]:
    """Span [start, stop) of each step, without white space around it; parts without text are no steps."""
    spans, start = [], 0
    for part in text.split(separator):
        if part.strip():
            spans.append((start + len(part) - len(part.lstrip()), start + len(part.rstrip())))
        start += len(part) + len(separator)
    return spans


def marked(text: str, separator: str, mark: str) -> tuple[str, list[tuple[int, int]]]:
    """The text as it is read by a model with a mark, and the span of each step there, its mark included."""
    steps = [text[start:stop] + mark for start, stop in split_steps(text, separator)]
    between = "" if mark.endswith(separator) else separator
    starts = accumulate((len(step) + len(between) for step in steps), initial=0)
    return between.join(steps), [
        (at, at + len(step)) for at, step in zip(starts, steps, strict=False)
    ]


def aggregate(values: Sequence[float], how: Aggregation) -> float:
    """The reward; 0 of no step."""
    if not values:
        return 0.0
    match how:
        case "min":
            return min(values)
        case "mean":
            return math.fsum(values) / len(values)
        case "last":
            return values[-1]
        case "product":
            return math.prod(values)
        case "sum":
            return math.fsum(values)


def charged(values: Sequence[float], how: Aggregation) -> list[float]:
    """What each step is charged with."""
    if how == "sum":
        return list(values)
    if how == "mean":
        return [value / len(values) for value in values]
    so_far = values if how == "last" else accumulate(values, min if how == "min" else mul)
    return [after - before for before, after in pairwise([0.0, *so_far])]


def probability(logit: float) -> float:
    """That a step is right, by the number that a process reward model gives it."""
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    return math.exp(logit) / (1 + math.exp(logit))
