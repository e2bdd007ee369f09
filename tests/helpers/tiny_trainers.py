"""A trainer as ``taut.run.setup.build`` makes it, on a tiny model, with its events in a list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tests.helpers.chat_runs import QUIET, chats, save_model, write_rows

from taut.config import from_mapping
from taut.data.batching import Rows
from taut.data.dataset import Dataset
from taut.data.order import Cursor
from taut.losses.loss import Loss
from taut.losses.supervised import CrossEntropy
from taut.methods.method import RunConfig
from taut.run.inputs import load_inputs
from taut.run.setup import Built, build
from taut.train import distributed
from taut.types import Sample, Tree


@dataclass(frozen=True)
class Fixed:
    """A method whose every step has the same trees."""

    trees: Sequence[Tree]
    loss: Loss = CrossEntropy()  # noqa: RUF009 (frozen)

    def prepare(self, step: int) -> list[Tree]:
        return list(self.trees)

    def is_known(self, step: int) -> bool:
        return True

    def observed(self, step: int) -> list[Tree] | None:
        return None

    def observed_of(self, rows: Rows, indices: list[int]) -> list[Tree] | None:
        return None

    def cursor(self, step: int) -> Cursor:
        return Cursor(step, step * len(self.trees))


def singles(samples: Sequence[Sample]) -> Rows:
    """Samples as the rows of a data set, each a tree of its own."""
    return Rows(cast(Dataset, samples))


def make(
    place: Path, architecture: str = "qwen2", **keys: Any
) -> tuple[Built, list[dict[str, Any]]]:
    """A built run of six chats a step, and the events its trainer will emit."""
    dotted = {key.replace("__", "."): value for key, value in keys.items()}
    model = save_model(place / architecture, architecture)
    train = write_rows(place / "train.jsonl", chats(10))
    fixed = {"model": str(model), "data.train": str(train), "out": str(place / "out"), "steps": 20}
    run = from_mapping(RunConfig, {**QUIET, **fixed, **dotted})
    ranks = distributed.start("cpu")
    inputs = load_inputs(run, ranks)
    events: list[dict[str, Any]] = []

    def emit(kind: str, **fields: Any) -> None:
        events.append({"kind": kind, **fields})

    return build(run, inputs, run.plan(inputs.train), ranks, emit), events
