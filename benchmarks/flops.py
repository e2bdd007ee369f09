"""The floating-point operations a step cannot do without, and their time at the machine's own rate.

Necessary is: every distinct token through every layer once, attention over the pairs that are
visible, the head on targets only; each as three products (forward, gradient of the input, gradient
of the weight). Nothing recomputed, nothing padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from data import Model, Row

HEAD_ROWS = 512
"""Rows of the head product that is timed; its time is scaled to the step's targets."""


@dataclass(frozen=True)
class Work:
    """What a mean step has to do."""

    tokens: float
    pairs: float
    targets: float


def common_prefix(left: Row, right: Row) -> int:
    shortest = min(len(left.ids), len(right.ids))
    return next((k for k in range(shortest) if left.ids[k] != right.ids[k]), shortest)


def necessary(steps: Sequence[Sequence[Row]]) -> Work:
    """Means over steps. Rows that share a prefix are neighbors: each is compared with the last."""
    tokens = pairs = targets = 0
    for rows in steps:
        for number, row in enumerate(rows):
            shared = common_prefix(rows[number - 1], row) if number else 0
            length = len(row.ids)
            tokens += length - shared
            pairs += (length * (length + 1) - shared * (shared + 1)) // 2
            targets += row.num_targets
    return Work(tokens / len(steps), pairs / len(steps), targets / len(steps))


def shapes(model: Model, work: Work) -> list[tuple[int, int, int]]:
    """(m, k, n) of the products to be timed: those of a layer, then the head's."""
    layer = sorted(set(model.layer_products()))
    return [(round(work.tokens), *product) for product in layer] + [
        (HEAD_ROWS, model.hidden, model.vocab)
    ]


def num_parameters(model: Model) -> int:
    layers = model.num_layers * sum(k * n for k, n in model.layer_products())
    return layers + model.vocab * model.hidden * (1 if model.has_tied_embeddings else 2)


def flops(model: Model, work: Work) -> dict[str, float]:
    layers = model.num_layers * sum(k * n for k, n in model.layer_products())
    return {
        "layers": 6 * work.tokens * layers,
        "attention": 12 * work.pairs * model.hidden * model.num_layers,
        "head": 6 * work.targets * model.hidden * model.vocab,
    }


def ideal_seconds(model: Model, work: Work, products: Sequence[float]) -> dict[str, float]:
    """Seconds of a step of nothing but its necessary products, each at the rate of its own shape.

    Attention has no matmul of its own to compare with: it is put at the layers' rate.
    """
    *layer, head = products
    times = dict(zip(sorted(set(model.layer_products())), layer, strict=True))
    layers = model.num_layers * sum(times[product] for product in model.layer_products())
    needed = flops(model, work)
    return {
        "layers": layers,
        "attention": layers * needed["attention"] / needed["layers"],
        "head": head * work.targets / HEAD_ROWS,
    }
