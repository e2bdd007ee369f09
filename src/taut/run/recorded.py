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
import json
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
NO_TEXT = b"\xff"
"""Bytes that are no UTF-8."""


@dataclass(frozen=True)
class Recorded:
    """The records of the run in ``out``. Raises OutputError where it is no run."""

    out: Path

    def __post_init__(self) -> None:
        read_resolved(self.out)

    @cached_property
    def events(self) -> list[Event]:
        return read_events(self.out / EVENTS)

    @property
    def rollout_steps(self) -> list[int]:
        """The steps before which a rollout was sampled that is recorded."""
        return self.rollout_table.steps

    @property
    def token_steps(self) -> list[int]:
        """The steps of which tokens are recorded."""
        return sorted({step for table in self.token_tables for step in table.steps})

    def rollouts(self, step: int, columns: Sequence[str] | None = None) -> list[Row]:
        """The trajectories of a step, in the order of prompts. ``columns``: only these."""
        rows = [row for b in self.rollout_table.read(columns, step) for row in b.to_pylist()]
        for part in (part for row in rows for part in row.get("rewards", ())):
            part.setdefault("reply", None)  # runs of earlier versions did not record it
        return rows

    def tokens(self, step: int, columns: Sequence[str] | None = None) -> list[Row]:
        """The samples of a step whose tokens are recorded, of all ranks. ``columns``: only these."""
        batches = (b for table in self.token_tables for b in table.read(columns, step))
        return [row for batch in batches for row in batch.to_pylist()]

    def rollouts_of(
        self, prompt_id: str, columns: Sequence[str] | None = None, most_steps: int | None = None
    ) -> tuple[list[Row], int]:
        """The trajectories of a prompt in its newest steps, in their order, and the number of the steps before."""
        return self.rollout_table.rows_where("prompt_id", prompt_id, columns, most_steps)

    def mean_rewards(self) -> dict[str, dict[int, float]]:
        """The mean reward of each prompt by step; without those that have none."""
        means: dict[str, dict[int, float]] = {}
        columns = ["prompt_id", "step", "reward"]
        read = [batch.select(columns) for batch in self.rollout_table.read(columns)]
        found = tables.means(read, columns[:2], "reward")
        for prompt_id, step, mean in sorted(found, key=lambda entry: entry[1]):
            means.setdefault(prompt_id, {})[step] = mean
        return means

    @cached_property
    def rollout_table(self) -> tables.TableReader:
        return tables.TableReader(self.out / ROLLOUTS)

    @property
    def token_tables(self) -> list[tables.TableReader]:
        """A table of each rank."""
        for folder in sorted((self.out / TOKENS).glob("rank-*")):
            self._token_tables.setdefault(folder, tables.TableReader(folder))
        return list(self._token_tables.values())

    @cached_property
    def _token_tables(self) -> dict[Path, tables.TableReader]:
        return {}

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
        """The text that each token adds; a character of several tokens comes with its last one. A row of the model that
        the tokenizer has no token for, but which can be sampled, is "\ufffd".
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        known = self._vocabulary
        return [decoder.decode(known[i] if i < len(known) else NO_TEXT) for i in ids]

    @cached_property
    def _vocabulary(self) -> list[bytes]:
        return tables.read_column(self.out / TOKENS / VOCABULARY, "bytes")


def why_unlearned(group: Sequence[Row], trained: set[str] | None) -> str | None:
    """Why nothing is learned from a group of rollouts; None where something is. ``trained``: what was trained on; None:
    that is to come, and the rewards alone are looked at.
    """
    learned = [
        row
        for row in group
        if trained is not None
        and row["sample_id"] in trained
        and (row["advantage_N"] is None or any(row["advantage_N"]))
    ]
    if learned:
        return None
    rewards = [row["reward"] for row in group]
    known = {reward for reward in rewards if reward is not None}
    if not known:
        return "no answer has a reward"
    if is_judged(group) and len(known) == 1 and len(rewards) > 1:
        return f"all rewards are {known.pop():g}"
    return None if trained is None else "none of its answers was chosen, or all advantages are 0"


def is_judged(rows: Sequence[Row]) -> bool:
    """Whether completions get rewards in this run: where none does, all are learned from."""
    return any(row["rewards"] for row in rows)


def prompt_text(row: Row) -> str:
    """The prompt: its text, or its messages one after another."""
    prompt: Any = json.loads(row["prompt"])
    if isinstance(prompt, str):
        return prompt
    return " ".join(f"{message['role']}: {content_of(message)}" for message in prompt)


def answer_text(row: Row) -> str:
    """What was sampled: the completion, or the turns of a conversation."""
    messages = json.loads(row["messages"])
    if len(messages) < 2:
        return str(row["text"])
    return " ".join(f"{message['role']}: {content_of(message)}" for message in messages)


def content_of(message: dict[str, Any]) -> str:
    """A message's text, with its tool calls as JSON."""
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    calls = message.get("tool_calls")
    return text if not calls else f"{text} {json.dumps(calls, ensure_ascii=False)}"
