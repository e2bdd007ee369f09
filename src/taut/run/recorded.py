"""Read what a run has recorded (taut/train/recorder.py), also while it is running.

    run = Recorded(out)
    run.rollout_steps                steps whose rollouts are recorded
    run.rollouts(12)                 their rows (taut/rl/records.py)
    run.tokens(12)                   samples of a step whose tokens are recorded
    run.pieces(row["ids_T"])         the text of each token
    why_unlearned(group, trained)    why nothing is learned from a group

No torch here, and no tokenizer.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from taut.errors import OutputError
from taut.io import tables
from taut.train.log import Event, read_events
from taut.train.run_dir import EVENTS, ROLLOUTS, TOKENS, VOCABULARY, read_resolved

Row = dict[str, Any]
EVEN = "rewards of different answers are the same"
"""The reason that is named last, since it has no cause of its own."""
NO_TEXT = b"\xff"
"""A byte that is no UTF-8."""


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
        """Steps with a recorded rollout, sampled before the step."""
        return self.rollout_table.steps

    @property
    def token_steps(self) -> list[int]:
        """Steps with recorded tokens."""
        return sorted({step for table in self.token_tables for step in table.steps})

    def rollouts(self, step: int, columns: Sequence[str] | None = None) -> list[Row]:
        """The trajectories of a step, in the order of prompts. ``columns``: only these."""
        rows = [row for b in self.rollout_table.read(columns, step) for row in b.to_pylist()]
        for part in (part for row in rows for part in row.get("rewards", ())):
            part.setdefault("reply", None)  # runs of earlier versions did not record it
        return rows

    def tokens(self, step: int, columns: Sequence[str] | None = None) -> list[Row]:
        """The samples of a step whose tokens are recorded, from all ranks. ``columns``: only these."""
        batches = (b for table in self.token_tables for b in table.read(columns, step))
        return [row for batch in batches for row in batch.to_pylist()]

    def rollouts_of(
        self, prompt_id: str, columns: Sequence[str] | None = None, most_steps: int | None = None
    ) -> tuple[list[Row], int]:
        """The trajectories of a prompt in its newest steps, in order, and the number of steps left out."""
        return self.rollout_table.rows_where("prompt_id", prompt_id, columns, most_steps)

    @cached_property
    def rollout_table(self) -> tables.TableReader:
        return tables.TableReader(self.out / ROLLOUTS)

    @property
    def token_tables(self) -> list[tables.TableReader]:
        """A table for each rank."""
        for folder in sorted((self.out / TOKENS).glob("rank-*")):
            self._token_tables.setdefault(folder, tables.TableReader(folder))
        return list(self._token_tables.values())

    @cached_property
    def _token_tables(self) -> dict[Path, tables.TableReader]:
        return {}

    def trained_on(self, step: int) -> set[str] | None:
        """Ids of the samples that the rollout of a step was trained with; None before the first such step."""
        following = next((other for other in self.rollout_steps if other > step), math.inf)
        steps = [e for e in self.events if e["kind"] == "step" and step <= e["step"] < following]
        return {name for event in steps for name in event["sample_ids"]} if steps else None

    def event_of(self, kind: str, step: int) -> Event | None:
        """The event of this kind and step."""
        return next((e for e in self.events if e["kind"] == kind and e.get("step") == step), None)

    def require_step(self, step: int | None, steps: Sequence[int], what: str, key: str) -> int:
        """Resolve ``step``: None is the newest. Raises OutputError for a step without records."""
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
        """The text that each token adds; a character of several tokens comes with the last. An id for which the
        tokenizer has no token, but which can be sampled, is "\ufffd".
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        known = self._vocabulary
        return [decoder.decode(known[i] if i < len(known) else NO_TEXT) for i in ids]

    def asked(self, row: Row) -> list[str]:
        """The text of each token of a trajectory's prompt, as the template wrote it."""
        end = row["sampled_at_N"][0] if row["sampled_at_N"] else len(row["ids_T"])
        return self.pieces(row["ids_T"][:end])

    @cached_property
    def _vocabulary(self) -> list[bytes]:
        return tables.read_column(self.out / TOKENS / VOCABULARY, "bytes")


def why_unlearned(group: Sequence[Row], trained: set[str] | None) -> str | None:
    """Why nothing is learned from a group of rollouts; None where something is. ``trained``: the ids that were trained
    with; None before training, where rewards alone decide.
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


def frequent_reasons(rows: Sequence[Row]) -> list[str]:
    """The three most frequent reasons why these rollouts teach nothing, each with an example."""
    found: dict[str, list[str]] = {}  # reason -> examples
    for _, of_group in groupby(rows, key=lambda row: (row["step"], row["group"])):
        group = list(of_group)
        # rewards that do not differ
        texts = list(dict.fromkeys(map(answer_text, group)))
        if len(group) > 1 and len({row["reward"] for row in group} - {None}) == 1:
            why = EVEN if len(texts) > 1 else "all answers to a prompt are the same"
            example = " and ".join(f"{text!r:.60}" for text in texts[:2])
            found.setdefault(why, []).extend([example] * len(group))
        # an error, a reward that misses the right answer, an answer that was cut
        for row in group:
            text, reward = answer_text(row), row["reward"]
            said = f"{row['prompt_id']}#{row['index']}: {text!r:.60}"
            error = row["error"] or next((p["error"] for p in row["rewards"] if p["error"]), None)
            held = next((right for right in row["references"] if _holds(text, right)), None)
            if error or reward is None:
                why = "an environment or a reward fails" if error else "no reward applies"
                found.setdefault(why, []).append(f"{said}: {error}" if error else said)
            elif held is not None and reward <= 0:
                said = f"{said} holds the right answer {held!r:.40} and gets {reward:g}"
                found.setdefault("a reward is too strict", []).append(said)
            if row["finish_reason"] == "length":
                why = "answers are cut (rollout.max_new_tokens)"
                found.setdefault(why, []).append(f"...{text[-60:]!r}")
    common = sorted(found.items(), key=lambda pair: (pair[0] == EVEN, -len(pair[1])))
    return [f"{why}, {len(of)} of {len(rows)} answers ({of[0]})" for why, of in common[:3]]


def _holds(text: str, reference: str) -> bool:
    """Whether an answer contains the words of the reference, whatever their case and punctuation."""
    said, right = (" ".join(re.findall(r"\w+", part.casefold())) for part in (text, reference))
    return bool(right) and f" {right} " in f" {said} "


def is_judged(rows: Sequence[Row]) -> bool:
    """Whether completions get rewards in this run; without rewards all of them are learned from."""
    return any(row["rewards"] for row in rows)


def prompt_text(row: Row) -> str:
    """The prompt of a trajectory as text, its messages one after another."""
    prompt: Any = json.loads(row["prompt"])
    if isinstance(prompt, str):
        return prompt
    return " ".join(f"{message['role']}: {content_of(message)}" for message in prompt)


def answer_text(row: Row) -> str:
    """The answer of a trajectory as text, the turns of a conversation one after another."""
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
