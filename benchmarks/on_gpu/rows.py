"""The rows of a step, and the work that they are.

    packed    chats with skewed lengths (data.chat_rows); nothing to share
    shared    documents with eight questions each (data.reading_rows), side by side
    grpo      prompts with a group of completions each

A step's own tokens are those of its rows, no pads, a shared prefix counted for every row. Its counted products are what
it needs: every distinct token through the layers once, attention over visible pairs, the head on targets; forward
and backward, without the gradient of frozen weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from data import Row, chat_rows, draw_words, make_row, reading_rows

GROUP = 8
NUM_STEPS = 3
"""Distinct steps; they are taken in turn."""


class Work(NamedTuple):
    """A mean step."""

    tokens: float
    """Of the rows."""
    products: float
    """Counted floating-point operations."""


def steps_of(kind: str, rows_per_step: int, vocab: int) -> list[list[Row]]:
    """The rows of each step."""
    num_rows = NUM_STEPS * rows_per_step
    if kind == "packed":
        rows = chat_rows(num_rows, vocab)
    elif kind == "shared":
        rows = reading_rows(num_rows // 8, vocab)
    else:
        rng = np.random.default_rng(5)
        prompts = [draw_words(rng, vocab, 254) for _ in range(num_rows // GROUP)]
        rows = [
            make_row(prompt, draw_words(rng, vocab, 255))
            for prompt in prompts
            for _ in range(GROUP)
        ]
    return [rows[start : start + rows_per_step] for start in range(0, num_rows, rows_per_step)]


def samples_of(rows: Sequence[Row], *, has_advantages: bool) -> list[Any]:
    """The rows as taut's samples; ``has_advantages``: as completions that were sampled and judged."""
    from taut.types import Sample

    rng = np.random.default_rng(6)
    samples = []
    for number, row in enumerate(rows):
        at_N = np.arange(row.num_prompt, len(row.ids))
        streams = {}
        if has_advantages:
            logp_N = rng.uniform(-4, -2, at_N.size)
            streams = {
                "advantage_N": np.full(at_N.size, rng.normal()),
                "old_logp_N": logp_N,
                "engine_logp_N": logp_N,
                "ref_logp_N": logp_N,
            }
        samples.append(
            Sample(
                f"row:{number}",
                np.array(row.ids),
                at_N,
                np.ones(at_N.size),
                streams=streams,
            )
        )
    return samples


def work_of(steps: Sequence[Sequence[Row]], model: Any) -> Work:
    """Of a mean step, for a model whose parameters say which of them train."""
    from taut.attention.layout import Layout
    from taut.data.packing import PackPolicy, pack
    from taut.models.architecture import flops

    cost, products = flops(model), 0.0
    for rows in steps:
        packed = pack(samples_of(rows, has_advantages=False), PackPolicy(share_prefixes=True))
        pairs = Layout(packed.reach_T.numpy()).num_pairs()
        products += cost.per_token * packed.num_tokens + cost.per_pair * pairs
        products += cost.per_target * packed.num_targets
    tokens = sum(len(row.ids) for rows in steps for row in rows)
    return Work(tokens / len(steps), products / len(steps))
