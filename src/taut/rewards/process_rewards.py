"""Rewards of the steps of an answer, by a process reward model.

    spans   = split_steps(text, separator)          where each step lies in the answer
    value   = aggregate(values, how)                the reward, of the probability that each step is right
    charges = spread_over_steps(values, how)        the part of each step; their sum is the reward

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
from itertools import accumulate, pairwise
from operator import mul
from typing import Self

from taut.rewards.settings import Aggregation, StepsConfig
from taut.rewards.verifier import Explained


class Stepped(Explained):
    """A reward with the part of it that each step gets."""

    @classmethod
    def of(cls, text: str, values: Sequence[float], config: StepsConfig) -> Self:
        """The reward of an answer by the probability that each of its steps is right; 0 for an answer without steps."""
        assert config.separator is not None
        spans = split_steps(text, config.separator)
        assert len(spans) == len(values), f"{len(values)} values of {len(spans)} steps"
        words = "no step" if not values else f"steps {' '.join(f'{value:.3f}' for value in values)}"
        reward = cls(aggregate(values, config.aggregate), words)
        ends = (end for _, end in spans)
        charges = spread_over_steps(values, config.aggregate) if config.charge else ()
        reward.steps = tuple(zip(ends, charges, strict=False))
        return reward


def split_steps(text: str, separator: str) -> list[tuple[int, int]]:
    """Span [start, stop) of each step, without white space around it; parts without text are no steps."""
    spans, start = [], 0
    for part in text.split(separator):
        if part.strip():
            spans.append((start + len(part) - len(part.lstrip()), start + len(part.rstrip())))
        start += len(part) + len(separator)
    return spans


def marked(text: str, separator: str, mark: str) -> tuple[str, list[tuple[int, int]]]:
    """The text that a model with a mark reads, and the span of each step there, its mark included."""
    steps = [text[start:stop] + mark for start, stop in split_steps(text, separator)]
    between = "" if mark.endswith(separator) else separator
    starts = accumulate((len(step) + len(between) for step in steps), initial=0)
    return between.join(steps), [
        (at, at + len(step)) for at, step in zip(starts, steps, strict=False)
    ]


def aggregate(values: Sequence[float], kind: Aggregation) -> float:
    """The reward of an answer by the values of its steps; 0 without steps."""
    if not values:
        return 0.0
    match kind:
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


def spread_over_steps(values: Sequence[float], kind: Aggregation) -> list[float]:
    """Return the part of the reward that is assigned to each step."""
    if kind == "sum":
        return list(values)
    if kind == "mean":
        return [value / len(values) for value in values]
    so_far = values if kind == "last" else accumulate(values, min if kind == "min" else mul)
    return [after - before for before, after in pairwise([0.0, *so_far])]


def probability(logit: float) -> float:
    """The probability that a step is right, by the number that a process reward model gives it."""
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    return math.exp(logit) / (1 + math.exp(logit))
