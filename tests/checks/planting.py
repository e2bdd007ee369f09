"""Planted faults: a run with something wrong in it, and its innocent twin.

A fault is a function ``(place, is_faulty) -> Session`` marked with the check that has to catch it. With ``is_faulty``
the session has the fault, without it the same session has not. ``tests/checks/test_planted.py`` asks every check of
both: of the first exactly that check fails (or warns), of the second none does. A fault is planted in the user's things
(data, template, model, settings) or in the library's or our code that is under test, never in the check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.chat_runs import QUIET, chats, save_model, write_rows

from taut.checks import Part
from taut.checks.registry import Outcome
from taut.checks.session import Session
from taut.config import from_mapping
from taut.methods import METHODS
from taut.train import distributed


@dataclass(frozen=True)
class Place:
    """Where a fault is planted."""

    directory: Path
    patch: pytest.MonkeyPatch

    def model(self, architecture: str = "qwen2", **options: Any) -> Path:
        """A tiny model with a ChatML tokenizer, in ``directory``."""
        return save_model(self.directory / architecture, architecture, **options)

    def data(
        self, rows: Sequence[Mapping[str, Any]] | None = None, name: str = "train.jsonl"
    ) -> Path:
        """Rows in a file; without any, twelve sound chats."""
        return write_rows(self.directory / name, chats(12) if rows is None else rows)

    def session(self, model: Path | None = None, data: Path | None = None, **keys: Any) -> Session:
        """A session; a key with ``__`` stands for one with a dot."""
        dotted = {key.replace("__", "."): value for key, value in keys.items()}
        fixed = {
            "model": str(model or self.model()),
            "data.train": str(data or self.data()),
            "steps": 20,
        }
        kind = METHODS[dotted.get("method", "sft")]
        return Session(from_mapping(kind, {**QUIET, **fixed, **dotted}), distributed.start("cpu"))


Plant = Callable[[Place, bool], Session]


@dataclass(frozen=True)
class Fault:
    """A fault, and the check that has to catch it."""

    check: str
    plant: Plant
    says: str
    """Words of the finding: the evidence or the remedy must name the cause."""
    part: Part = "full"
    """What is asked of both: quick where the fault is one of data, of which the full part asks no more."""
    outcome: Outcome = "failed"
    """What the check answers: failed, or warning where only the user knows whether it is a fault."""

    @property
    def name(self) -> str:
        return f"{self.check}: {self.plant.__name__}"


FAULTS: list[Fault] = []


def fault(
    check: str, says: str, part: Part = "full", outcome: Outcome = "failed"
) -> Callable[[Plant], Plant]:
    """Lists a function as a fault that ``check`` catches; ``says`` occurs in what the finding says."""

    def mark(plant: Plant) -> Plant:
        FAULTS.append(Fault(check, plant, says, part, outcome))
        return plant

    return mark
