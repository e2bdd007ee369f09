"""Samples for tests: random token ids, shared prefixes, nested trees."""

from __future__ import annotations

import numpy as np

from taut.types import Sample


def sample(name: str, ids: list[int], first_target: int = 1, seed: int = 0) -> Sample:
    """A sample whose tokens from ``first_target`` on are targets with random weights."""
    targets = np.arange(first_target, len(ids))
    weights = np.random.default_rng(seed).uniform(0.5, 1.5, targets.size)
    return Sample(name, np.array(ids), targets, weights)


def nested_family(vocab_size: int, seed: int = 0) -> list[Sample]:
    """Six samples: a prompt with two answers, a third below a longer prefix with two more, one alone, one a prefix.

    Targets lie in shared prefixes too, and one sample ends where others branch.
    """
    random = np.random.default_rng(seed)

    def draw(count: int) -> list[int]:
        return [int(token) for token in random.integers(0, vocab_size, count)]

    prompt = draw(17)
    deeper = prompt + draw(8)
    return [
        sample("a", prompt + draw(6), 15, seed=1),
        sample("b", deeper + draw(5), 3, seed=2),
        sample("c", deeper + draw(7), 22, seed=3),
        sample("alone", draw(13), 1, seed=4),
        sample("d", prompt + draw(2), 17, seed=5),
        sample("inner", prompt, 9, seed=6),
    ]
