"""What a run has recorded (taut/train/recorder.py), read back; also while it goes on.

    run = Recorded(out)
    run.rollout_steps                steps whose rollouts are there
    run.rollouts(12)                 the rows of taut/rl/records.py
    run.tokens(12)                   the samples of a step whose tokens are there
    run.pieces(row["ids_T"])         the text of each token

No torch here, and no tokenizer.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from taut.errors import OutputError
from taut.io import tables
from taut.train.log import Event, read_events
from taut.train.run_dir import EVENTS, ROLLOUTS, TOKENS, VOCABULARY, read_resolved

Row = dict[str, Any]


@dataclass(frozen=True)
class Recorded:
    """The records of the run in ``out``. Raises OutputError where it is no run."""

    out: Path

    def __post_init__(self) -> None:
        read_resolved(self.out)

    @cached_property
    def events(self) -> list[Event]:
        return read_events(self.out / EVENTS)

    @cached_property
    def rollout_steps(self) -> list[int]:
        """The steps before which a rollout was sampled that is recorded."""
        return _steps([self.out / ROLLOUTS])

    @cached_property
    def token_steps(self) -> list[int]:
        """The steps of which tokens are recorded."""
        return _steps(self._folders)

    def rollouts(self, step: int) -> list[Row]:
        """The trajectories of a step, in the order of prompts."""
        return _rows([self.out / ROLLOUTS], step)

    def tokens(self, step: int) -> list[Row]:
        """The samples of a step whose tokens are recorded, of all ranks."""
        return _rows(self._folders, step)

    def trained_on(self, step: int) -> set[str] | None:
        """The ids of the samples of a step's rollout that were trained on; None: no step has trained on it yet."""
        following = next((other for other in self.rollout_steps if other > step), math.inf)
        steps = [e for e in self.events if e["kind"] == "step" and step <= e["step"] < following]
        return {name for event in steps for name in event["sample_ids"]} if steps else None

    def event_of(self, kind: str, step: int) -> Event | None:
        """The event of a kind and a step."""
        return next((e for e in self.events if e["kind"] == kind and e.get("step") == step), None)

    def require_step(self, step: int | None, steps: Sequence[int], what: str, key: str) -> int:
        """``step``, or the newest one where it is None. Raises OutputError where nothing is recorded of it."""
        if not steps:
            raise OutputError(f"{self.out} has no {what}; expected a run that records them ({key})")
        if step is None or step in steps:
            return steps[-1] if step is None else step
        near = sorted(steps, key=lambda other: abs(other - step))[:5]
        raise OutputError(
            f"{self.out} has no {what} of step {step}; expected one of its {len(steps):,} steps that have some, such "
            f"as {', '.join(map(str, sorted(near)))}"
        )

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text that each token adds; a character of several tokens comes with its last one."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return [decoder.decode(self._vocabulary[index]) for index in ids]

    @cached_property
    def _vocabulary(self) -> list[bytes]:
        return tables.read_column(self.out / TOKENS / VOCABULARY, "bytes")

    @property
    def _folders(self) -> list[Path]:
        return sorted((self.out / TOKENS).glob("rank-*"))


def _steps(folders: Sequence[Path]) -> list[int]:
    batches = (batch for folder in folders for batch in tables.read_tables(folder, ["step"]))
    return sorted({step for batch in batches for step in batch["step"].to_pylist()})


def _rows(folders: Sequence[Path], step: int) -> list[Row]:
    batches = (batch for folder in folders for batch in tables.read_tables(folder, step=step))
    return [row for batch in batches for row in batch.to_pylist()]
