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

from rich.table import Table
from rich.text import Text

from taut.config import user_path
from taut.errors import OutputError
from taut.io.console import counted, one_line
from taut.io.terminal import Terminal
from taut.run.recorded import Recorded, Row, answer_text, is_judged, why_unlearned
from taut.train.log.events import to_json
from taut_tools.recorded.settings import Rollouts

MAX_PROMPT_CHARS = 600
"""Maximum characters shown of a prompt's beginning, where tools are; twice as many are shown of its end."""
MAX_REASON_CHARS = 200
"""Maximum characters shown of a reward's error or reply; ``--json`` has all that was recorded."""


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
    # the groups that are asked for
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
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    reward = f", mean reward {fmean(rewards):.4g}" if rewards and is_judged(rows) else ""
    num_useful = sum(why_unlearned(group, trained) is None for group in whole)
    summary = (
        f"step {step}: {counted(len(whole), 'prompts')}, {counted(len(rows), 'answers')}{reward}, something to learn "
        f"from in {num_useful}"
    )
    terminal.print(Text(summary, "bold"))
    for group in chosen[: config.groups]:
        for part in _group(group, recorded.asked(group[0]), trained):
            terminal.print(part)
    left = len(chosen) - config.groups
    if left > 0:
        more = f"\nand {counted(left, 'prompts')} more: groups=N, prompt=ID"
        terminal.print(Text(more, "dim"))
    return 0


def _group(
    group: Sequence[Row], asked: Sequence[str], trained: set[str] | None
) -> Iterator[Text | Table]:
    """Print a group. ``asked``: the pieces of the prompt."""
    first, nothing = group[0], why_unlearned(group, trained)
    expected = (
        f"  expected: {one_line(' | '.join(first['references']))}" if first["references"] else ""
    )
    size = counted(len(asked), "tokens")
    yield Text(f"\n{first['prompt_id']}, a prompt of {size}{expected}", "bold cyan")
    text = one_line("".join(asked))
    if len(text) > MAX_PROMPT_CHARS:
        text = f"{text[: MAX_PROMPT_CHARS // 3]} [...] {text[-MAX_PROMPT_CHARS * 2 // 3 :]}"
    yield Text(text, "dim")
    if nothing is not None:
        replaced = "" if first["is_kept"] else "; left out for other prompts"
        yield Text(f"nothing is learned from it: {nothing}{replaced}", "yellow")
    # a row of the table for each answer
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
            f"{part['name']}: {one_line(why)[:MAX_REASON_CHARS]}"
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
