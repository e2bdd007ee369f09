"""``taut rollouts RUN``: the rollout of a step, group by group: the prompt once, and its answers with their rewards.

Reads what the run recorded in ``out/rollouts`` (taut/rl/records.py), also while it goes on. Nothing is loaded but that:
neither the model nor its tokenizer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import fmean
from typing import Annotated, Literal

from pydantic import Field
from rich.table import Table
from rich.text import Text

from taut.config import configclass, user_path
from taut.errors import OutputError
from taut.io.console import counted, one_line
from taut.io.terminal import Terminal
from taut.run.recorded import Recorded, Row, answer_text, is_judged, prompt_text, why_unlearned
from taut.train.log.events import to_json

PROMPT_SHOWN = 400
"""Characters of a prompt that are shown; of its end, where the question is."""
REASON_SHOWN = 200
"""Characters of a reward's error or reply that are shown; ``--json`` has what is recorded."""


@configclass
class Rollouts:
    """Print the rollouts of a step."""

    out: str
    """Directory of the run."""
    step: Annotated[int, Field(ge=1)] | None = None
    """The first step that trained on them. Default: the newest."""
    prompt: str | None = None
    """Only the prompt with this id."""
    sort: Literal["index", "reward", "length"] = "index"
    """The order of the answers to a prompt: as sampled, best first, or longest first."""
    groups: Annotated[int, Field(ge=1)] = 4
    """Prompts to print."""
    json: bool = False
    """Print the rows as JSON lines, with their tokens and logprobs, in place of a report."""


KEYS = {
    "index": lambda row: row["index"],
    "reward": lambda row: (row["reward"] is None, -(row["reward"] or 0.0)),
    "length": lambda row: -len(row["sampled_at_N"]),
}


def run(config: Rollouts) -> int:
    """Print the rollouts."""
    recorded = Recorded(user_path(config.out, "out"))
    key = "taut grpo and the like, with log.rollouts.max_gib above 0"
    step = recorded.require_step(config.step, recorded.rollout_steps, "rollouts", key)
    rows, trained = recorded.rollouts(step), recorded.trained_on(step)
    whole = [list(group) for _, group in groupby(rows, key=lambda row: row["group"])]
    chosen = [g for g in whole if config.prompt in (None, g[0]["prompt_id"])]
    if not chosen:
        ids = ", ".join(group[0]["prompt_id"] for group in whole[:5])
        raise OutputError(
            f"found prompt={config.prompt}, which step {step} has not; expected one of its {len(whole)}, such as {ids}"
        )
    chosen = [sorted(group, key=KEYS[config.sort]) for group in chosen]
    if config.json:
        for row in (row for group in chosen for row in group):
            sys.stdout.write(json.dumps(to_json(row), ensure_ascii=False) + "\n")
        return 0
    terminal = Terminal()
    terminal.print(Text(_summary(step, rows, whole, trained), "bold"))
    for group in chosen[: config.groups]:
        for part in _group(group, trained):
            terminal.print(part)
    left = len(chosen) - config.groups
    if left > 0:
        more = f"\nand {counted(left, 'prompts')} more: groups=N, prompt=ID"
        terminal.print(Text(more, "dim"))
    return 0


def _summary(
    step: int, rows: Sequence[Row], groups: Sequence[Sequence[Row]], trained: set[str] | None
) -> str:
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    reward = f", mean reward {fmean(rewards):.4g}" if rewards and is_judged(rows) else ""
    num_useful = sum(why_unlearned(group, trained) is None for group in groups)
    return (
        f"step {step}: {counted(len(groups), 'prompts')}, {counted(len(rows), 'answers')}{reward}, "
        f"something to learn from in {num_useful}"
    )


def _group(group: Sequence[Row], trained: set[str] | None) -> Iterator[Text | Table]:
    first, nothing = group[0], why_unlearned(group, trained)
    expected = (
        f"  expected: {one_line(' | '.join(first['references']))}" if first["references"] else ""
    )
    yield Text(f"\n{first['prompt_id']}{expected}", "bold cyan")
    yield Text(one_line(prompt_text(first))[-PROMPT_SHOWN:], "dim")
    if nothing is not None:
        replaced = "" if first["is_kept"] else "; left out for other prompts"
        yield Text(f"nothing is learned from it: {nothing}{replaced}", "yellow")
    names = list(dict.fromkeys(part["name"] for row in group for part in row["rewards"]))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("", "reward", *(names if len(names) > 1 else ()), "advantage", "tokens", "end"):
        table.add_column(name, justify="right")
    table.add_column("answer", overflow="fold")
    for row in group:
        parts = {part["name"]: part["value"] for part in row["rewards"]}
        columns = [parts.get(name) for name in names] if len(names) > 1 else []
        advantages = row["advantage_N"]
        numbers = [row["reward"], *columns, fmean(advantages) if advantages else None]
        reasons = [
            f"{part['name']}: {one_line(why)[:REASON_SHOWN]}"
            for part in row["rewards"]
            if (why := part["error"] or part["reason"] or part["reply"])
        ]
        said = "; ".join(filter(None, [row["error"], *reasons]))
        table.add_row(
            str(row["index"]),
            *("" if number is None else f"{number:.4g}" for number in numbers),
            str(len(row["sampled_at_N"])),
            row["finish_reason"],
            Text(one_line(answer_text(row)) + (f"  [{one_line(said)}]" if said else "")),
        )
    yield table
