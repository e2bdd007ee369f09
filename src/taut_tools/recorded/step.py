"""``taut show --step N RUN``: the samples of a step that was trained, with the losses that the run recorded.

Every sample of the step with the mean -logprob of its targets, the highest first; of those whose tokens were recorded
(``log.tokens``) the text, colored by each target's -logprob, and its least expected targets by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from taut.config import user_path
from taut.errors import OutputError
from taut.io.console import counted, one_line
from taut.io.terminal import Terminal
from taut.run.recorded import Recorded, Row
from taut.train.log.events import Event
from taut_tools.recorded.settings import ShowStep

SHADES = ((5.0, "bold red"), (2.0, "yellow"), (0.5, "green"), (0.0, "dim green"))
"""Color of a target by the least -logprob, in nats, that has it."""
CONTEXT = "dim"
LONGEST = 600
"""Maximum characters of text between targets shown whole; the middle of a longer one is left out."""
LEAST = 5
"""Number of least expected targets to name."""


def run(config: ShowStep) -> int:
    """Print the step."""
    recorded = Recorded(user_path(config.out, "out"))
    event = recorded.event_of("step", config.step)
    if event is None:
        last = max((e["step"] for e in recorded.events if e["kind"] == "step"), default=0)
        raise OutputError(
            f"{recorded.out} has no step {config.step}; expected one of its steps 1 to {last}"
        )
    terminal = Terminal()
    terminal.print(Text(_headline(event), "bold"))
    terminal.print(_samples(event))
    # tokens, of the samples that were recorded
    rows = recorded.tokens(config.step)
    if not rows:
        near = sorted(recorded.token_steps, key=lambda step: abs(step - config.step))[:5]
        places = (
            f"steps {', '.join(map(str, sorted(near)))} have some"
            if near
            else "log.tokens.samples=0"
        )
        terminal.print(Text(f"no tokens were recorded of this step; {places}", "yellow"))
    for row in rows[: config.samples]:
        for part in _tokens(row, recorded):
            terminal.print(part)
    return 0


def _headline(event: Event) -> str:
    if not event["sample_ids"]:
        return f"step {event['step']}: skipped, as there was nothing to learn from"
    return (
        f"step {event['step']}: loss {event['loss']:.5g}, gradient norm {event['grad_norm']:.4g}, "
        f"{counted(len(event['sample_ids']), 'samples')}, {counted(event['num_targets'], 'targets')}"
    )


def _samples(event: Event) -> Table:
    """Every sample with its mean -logprob, the highest first."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("nats a target", justify="right")
    table.add_column("sample", overflow="fold")
    values = event.get("sample_nll", [None] * len(event["sample_ids"]))
    # a sample without targets has none
    known = [v if isinstance(v, int | float) and not math.isnan(v) else None for v in values]
    pairs = zip(known, event["sample_ids"], strict=True)
    for value, sample_id in sorted(pairs, key=lambda pair: (pair[0] is None, -(pair[0] or 0))):
        table.add_row("" if value is None else f"{value:.4g}", one_line(sample_id))
    return table


def _tokens(row: Row, recorded: Recorded) -> Iterator[Text]:
    shared = ""
    if row["num_shared"]:
        shared = f", {row['num_shared']:,} tokens shared with {', '.join(row['shared_with'])}"
    yield Text(
        f"\n{one_line(row['sample_id'])}: {counted(len(row['ids_T']), 'tokens')}{shared} ({row['why']})",
        "bold",
    )
    # the text, and its least expected targets
    pieces = recorded.pieces(row["ids_T"])
    nll = {at: -logp for at, logp in zip(row["target_at_N"], row["logp_N"] or [], strict=False)}
    yield _colored(pieces, nll)
    least = sorted(nll, key=lambda at: -nll[at])[:LEAST]
    named = ", ".join(f"{one_line(pieces[at])!r} {nll[at]:.2f}" for at in least)
    if named:
        yield Text(f"least expected: {named}", "dim")
    # what else was recorded of it
    of_targets = [*row["streams"], ("entropy_N", row["entropy_N"]), ("scalar_R", row["scalar_R"])]
    for name, numbers in of_targets:
        found = [number for number in numbers or () if number is not None]
        ends = [f"{end:.4g}" for end in (min(found), max(found))] if found else ["none"]
        if numbers:
            yield Text(f"{name}: {' to '.join(dict.fromkeys(ends))}", "dim")
    for name, number in row["values"]:
        yield Text(f"{name}: {number:.4g}", "dim")


def _colored(pieces: Sequence[str], nll: dict[int, float]) -> Text:
    """The text; targets by their -logprob, and long context without its middle."""
    view, context = Text(), ""
    for at, piece in enumerate([*pieces, ""]):
        is_end = at == len(pieces)
        if at in nll or is_end:
            if len(context) > LONGEST:
                half = LONGEST // 2
                left = len(context) - 2 * half
                context = f"{context[:half]} [... {left:,} characters ...] {context[-half:]}"
            view.append(context, CONTEXT)
            context = ""
        if at in nll:
            style = next((style for limit, style in SHADES if nll[at] >= limit), SHADES[-1][1])
            view.append(piece, style)
        elif not is_end:
            context += piece
    view.rstrip()
    return view
