"""What a run that generates trains on if every completion has all the tokens it may have: the trees of its steps.

The prompts are those the run begins with. Completions are tokens drawn at random, no two alike; their rewards differ,
so that all is learned from that can be; what is replayed of earlier roll-outs is there in full; and nothing is scored:
what models would say of them is 0. What generation itself takes, time and the keys and values that it keeps, is not
foretold.

Imports build and below. ``steps`` calls it.
"""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedConfig

from taut.data.prompts import PromptRow
from taut.loop import Method
from taut.models.load import context_length
from taut.online.credit import paths_of
from taut.online.method import Online, Phase
from taut.online.rollouts import Group, distinct
from taut.online.scoring import POLICY, REFERENCE, VALUE
from taut.rewards.panel import Verdict
from taut.rewards.verifier import Score
from taut.rollout.episode import Episode
from taut.types import IntArray, Tree


def prepared(method: Method, config: PreTrainedConfig, step: int) -> list[Tree]:
    """The trees of a step (counted from 1)."""
    assert isinstance(method, Online), "the source of steps of a run that generates"
    number = (step - 1) // method.config.updates
    if method.phase is None or method.phase.number != number:
        trees = _assumed(method, config, number)
        most = _num_trees(method, len(trees))
        others = number
        while len(trees) < most:  # other roll-outs stand for those before
            others += 1
            trees += _assumed(method, config, others)
        method.phase = Phase(number, trees[:most])
    return method.prepare(step)


def _num_trees(method: Online, fresh: int) -> int:
    """Trees of a roll-out of so many, with all that are trained on again beside it."""
    config, replayed = method.config, method.config.replay
    if config.max_staleness is not None:
        before = (config.max_staleness + 1) // config.updates - 1 - config.ahead
        replayed = min(replayed, before * fresh)
    return fresh + replayed


def _assumed(method: Online, config: PreTrainedConfig, number: int) -> list[Tree]:
    """The trees of a roll-out."""
    draw = np.random.default_rng([method.seed, number])
    context, vocabulary = context_length(config), int(config.get_text_config().vocab_size)
    rows = distinct([method.prompts.asked[index] for index in method.order.step(number + 1)])
    groups = []
    for row in rows:
        most = method.config.grows
        size = most if context is None else max(1, min(most, context - row.ids_T.size))
        ids_SN = draw.integers(0, vocabulary, (method.config.n, size))
        worth = [method.credit.good + index / method.config.n for index in range(len(ids_SN))]
        episodes = tuple(_episode(row, index, ids_N) for index, ids_N in enumerate(ids_SN))
        groups.append(Group(episodes, tuple(Verdict({"assumed": Score(w)}, w) for w in worth)))
    paths = paths_of(groups, number)
    names = (POLICY, REFERENCE, VALUE)
    said = {
        path.name: {name: np.zeros(path.episode.sampled_at_N.size) for name in names}
        for path in paths
    }
    return method.credit.trees(paths, said).trees


def _episode(row: PromptRow, index: int, ids_N: IntArray) -> Episode:
    return Episode(
        row=row,
        index=index,
        ids_T=np.concatenate([row.ids_T, ids_N]),
        sampled_at_N=np.arange(row.ids_T.size, row.ids_T.size + ids_N.size),
        logp_N=np.zeros(ids_N.size),
        version_N=np.zeros(ids_N.size, dtype=np.int64),
        finish_reason="stop",
        text="",
    )
