"""``taut show``: a preview of a run.

Prints the keys that are set, the automatic decisions with reasons, the data report with all dropped and cut rows, the
savings of packing and shared prefixes in the first steps, the first samples with marked targets, and the keys left at
their defaults. Of a large file that no command has tokenized yet, the first rows alone are read. Targets are in
brackets and in green, so that pipes and color-blind readers see them; special tokens are written out, and a target that
ends a turn has its own mark.

The steps have the order, budget and policy of the run, on a skeleton of the model. No weights are loaded, nothing is
computed and nothing is written (tokenized data goes to the cache).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from itertools import groupby
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.config import describe, to_dict, written
from taut.data.batching import StepPlan, lay_out, step_plan
from taut.data.dataset import Dataset
from taut.data.growing import FIRST_ROWS
from taut.data.packing import PackPolicy
from taut.data.read.json_io import shown
from taut.data.render.render import Incident
from taut.data.rows.prompts import PromptSet
from taut.io.console import counted
from taut.io.terminal import Terminal
from taut.methods.inputs import Inputs
from taut.methods.method import RunConfig
from taut.methods.online import OnlineMethod
from taut.models.self_test import one_sample_reasons
from taut.plan.models import skeleton
from taut.run.inputs import load_inputs
from taut.run.setup import build_budget, build_policy, choose, use_cpu_matmul
from taut.train import distributed
from taut.train.distributed import Ranks
from taut.types import Sample

NUM_SAMPLES = 3
NUM_STEPS = 5
"""Steps to preview."""
NUM_INCIDENTS = 10
"""Dropped or cut rows to list."""
NUM_BEFORE = 8
"""Number of tokens decoded before a segment, so that its text is the same as in context."""
LONGEST_CONTEXT = 600
LONGEST_TARGET = 2_000
"""Maximum characters of a segment shown whole; the middle of a longer one is omitted."""


def show(run: RunConfig, console: Console | None = None) -> None:
    """Print the decisions of ``run``, its first samples with the learned tokens marked, and its first steps."""
    ranks = distributed.start(run.device, run.parallel)
    inputs = load_inputs(run, ranks, first_rows=FIRST_ROWS)
    use_cpu_matmul(run, ranks)
    if ranks.is_writer:
        console = console or Terminal()
        set_keys, defaults = _configuration(run)
        _section(console, "configuration", set_keys)
        _print(run, inputs, ranks, console)
        _section(console, "defaults", defaults)
    distributed.stop(ranks)


def _print(run: RunConfig, inputs: Inputs, ranks: Ranks, console: Console) -> None:
    # how the run would lay out its samples, on a skeleton of the model
    model = skeleton(run, inputs.config)
    reasons = one_sample_reasons(model, inputs.longest)
    one_sample = "; ".join(reasons) or None
    has_dropout = run.lora.dropout > 0 and bool(run.lora.rank or run.lora.adapter)
    has_noise = run.noise.neftune_alpha > 0 or has_dropout
    policy, obstacles = build_policy(run, one_sample, has_noise=has_noise)
    decisions = [*inputs.decisions, *choose(run, inputs, ranks.device)[2], *obstacles]
    budget = build_budget(run, model, ranks, one_sample=one_sample is not None)
    method, num_steps, _ = run.plan(inputs.train)

    decisions_table = _grid(3)
    for name, value, reason in decisions:
        decisions_table.add_row(Text(name, "bold"), Text(value), Text(reason, "dim"))
    _section(console, "decisions", decisions_table)
    reports = _grid(2)
    for split, data in (("train", inputs.train), ("eval", inputs.eval)):
        for number, line in enumerate(_report(data) if data is not None else ()):
            reports.add_row(Text("" if number else split, "bold"), line)
    _section(console, "data", reports)
    # of a run that generates: rollouts and prompts, and nothing more
    rollouts = run.describe_rollouts(num_steps)
    if rollouts is not None and isinstance(run, OnlineMethod):
        _section(console, "plan", Text(rollouts))
        _section(console, "prompts", *_prompts(run, inputs))
        return
    # the first steps
    plans = []
    for step in range(1, 1 + min(num_steps, NUM_STEPS)):
        if step > 1 and not method.is_known(step):  # of a stream
            break
        trees = method.prepare(step)
        plans.append(step_plan(step, trees, lay_out(trees, budget, policy)))
    is_first_look = any(part.is_first_look for part in inputs.train.parts)
    title = "plan, of the first rows alone" if is_first_look else "plan"
    _section(console, title, *_plan(plans, num_steps, ranks.num_shares, policy))
    # the first samples
    marks = marks_for(console)
    legend = Text.assemble(
        (f"{marks.left}a target, to be learned{marks.right}", "green"),
        "   ",
        ("context", "dim"),
        "   ",
        ("<special>", "cyan"),
        "   ",
        (f"{marks.end} ends a turn: what the model stops with", "bold green"),
    )
    _section(console, "samples", legend)
    ends = frozenset(inputs.stops.ids)
    for sample in inputs.train[:NUM_SAMPLES]:
        shown_sample = _read(sample) if run.has_scalar_head else sample
        if run.has_scalar_head:
            where = (
                "the last" if sample.read_at_R is None else f"{shown_sample.num_targets} of them"
            )
            about = f"no targets; the head is read at {where}, in brackets"
        else:
            num_ends = sum(int(token) in ends for token in sample.ids_T[sample.target_at_N])
            taught = (
                f"{num_ends} of them an end of turn" if num_ends else "NO end of turn among them"
            )
            about = f"{counted(sample.num_targets, 'targets')}, {taught}"
        values = "".join(f", {name} {value:g}" for name, value in sample.values.items())
        title = f"{sample.id}: {counted(sample.num_tokens, 'tokens')}, {about}{values}"
        console.print(Text(f"\n  {title}", "bold"))
        console.print(_indented(view_of(shown_sample, inputs.tokenizer, ends, marks)))


def _prompts(run: OnlineMethod, inputs: Inputs) -> Iterator[Text]:
    """The first prompts, as the policy gets them, with their reference answers."""
    marks, nowhere = Marks("", "", "", "\n"), np.empty(0, dtype=np.int64)
    assert isinstance(inputs.train, PromptSet)
    rows = inputs.train.prompt_rows[:NUM_SAMPLES]
    for row, prompt in zip(rows, run.first_prompts(inputs, rows), strict=True):
        answers = ", ".join(shown(text) for text in row.references) or "no right answer"
        if isinstance(prompt, str):
            yield Text(f"\n{row.id}: not known, {prompt}; {answers}", "bold yellow")
            continue
        yield Text(f"\n{row.id}: {counted(prompt.ids_T.size, 'tokens')}; {answers}", "bold")
        sample = Sample(row.id, prompt.ids_T, nowhere, np.empty(0), prompt.media)
        yield view_of(sample, inputs.tokenizer, frozenset(), marks)


def _section(console: Console, title: str, *parts: Any) -> None:
    console.print(Text(f"\n{title}", "bold underline"))
    for part in parts:
        console.print(_indented(part))


def _indented(part: Any) -> Padding:
    return Padding(part, (0, 0, 0, 2), expand=False)


def _configuration(run: RunConfig) -> tuple[Table, Table]:
    """The set keys, one per line with the default; and the default keys, one table per line."""
    tree = to_dict(run)
    set_keys, defaults_by_table = _grid(3), _grid(2)
    defaults: dict[str, list[str]] = {}
    for row in describe(type(run)):
        value = written(reduce(getitem, row.key.split("."), tree))
        if value == row.default:
            table, _, name = row.key.rpartition(".")
            pair = f"{name}={value.replace(' ', chr(0xA0))}"  # which no line breaks in two
            defaults.setdefault(table or "run", []).append(pair)
        else:
            was = "" if row.default == "required" else f"default {row.default}"
            set_keys.add_row(Text(row.key, "bold"), Text(value, "yellow"), Text(was, "dim"))
    for table, pairs in defaults.items():
        defaults_by_table.add_row(Text(table, "dim"), Text("  ".join(pairs), "dim"))
    return set_keys, defaults_by_table


def _report(data: Dataset) -> Iterator[Text]:
    report = data.report
    for decision in report.decisions:
        yield Text(decision)
    if isinstance(data, PromptSet):
        yield Text(report.sizes)
    else:
        yield Text(
            f"{counted(report.num_rows, 'rows')}, {counted(report.num_samples, 'samples')}, "
            f"{counted(report.num_tokens, 'tokens')}, {report.num_targets:,} of them targets "
            f"({report.num_targets / report.num_tokens:.0%}){report.pictures}"
        )
    lengths = data.lengths
    yield Text(
        f"tokens of a sample: {lengths.shortest:,} to {lengths.longest:,}, median {lengths.median:,}"
    )
    if not report.dropped and not report.cut:
        yield Text("nothing dropped, nothing cut")
    for name, incidents in (("dropped", report.dropped), ("cut", report.cut)):
        if incidents:
            yield Text(f"{len(incidents):,} {name}:", "bold yellow")
            yield from _listed(incidents)


def _listed(incidents: Sequence[Incident]) -> Iterator[Text]:
    for incident in incidents[:NUM_INCIDENTS]:
        yield Text(f"  {incident.place}: {incident.reason}", "yellow")
    if len(incidents) > NUM_INCIDENTS:
        yield Text(
            f"  and {len(incidents) - NUM_INCIDENTS:,} more; a run's events.jsonl lists all",
            "yellow",
        )


def _plan(
    plans: Sequence[StepPlan], num_steps: int, num_ranks: int, policy: PackPolicy
) -> Iterator[Table | Text]:
    """The first steps, and the savings of packing and shared prefixes."""
    ranks = f" on {num_ranks} ranks" if num_ranks > 1 else ""
    which = f"; the first {len(plans)}" if len(plans) < num_steps else ""
    yield Text(f"{num_steps:,} step{'s' if num_steps > 1 else ''}{ranks}{which}, in tokens:")
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for name in ("step", "samples", "targets", "if padded", "packed", "computed", "micro-batches"):
        table.add_column(name, justify="right")
    for plan in plans:
        table.add_row(*(f"{number:,}" for number in vars(plan).values()))
    yield table
    padded, unshared, computed = (
        sum(getattr(plan, name) for plan in plans) for name in ("padded", "unshared", "computed")
    )
    sharing = "prefixes are not shared"
    if policy.share_prefixes:
        sharing = f"sharing prefixes {1 - computed / unshared:.0%} fewer than packing alone"
    saved = f"{1 - unshared / padded:.0%}"
    yield Text(
        f"packing computes {saved} fewer tokens than padding a step to its longest sample;\n{sharing}"
    )


class Marks(NamedTuple):
    """Marks around targets, after a target that ends a turn, and at line ends."""

    left: str
    right: str
    end: str
    newline: str


def marks_for(console: Console) -> Marks:
    """Marks in the console's encoding."""
    if console.encoding.lower().startswith("utf"):
        return Marks("⟦", "⟧", "■", "↵\n")
    return Marks("[[", "]]", "(END)", "\n")


def _read(sample: Sample) -> Sample:
    """Copy the sample with the tokens at which a scalar head is read as its targets."""
    last = np.array([sample.num_tokens - 1])
    at = last if sample.read_at_R is None else sample.read_at_R
    return replace(sample, target_at_N=at, weight_N=np.ones(at.size), streams={})


class _Kind(NamedTuple):
    """Display of a token."""

    is_target: bool
    is_special: bool
    is_end: bool
    picture: int
    """Index of the sample's picture that the token is part of; -1 if none."""

    @property
    def style(self) -> str:
        if self.picture >= 0:
            return "magenta"
        if self.is_target:
            return "bold green" if self.is_special or self.is_end else "green"
        return "cyan" if self.is_special else "dim"


def view_of(
    sample: Sample, tokenizer: PreTrainedTokenizerBase, ends: frozenset[int], marks: Marks
) -> Text:
    """A sample's text with targets in brackets and green, and pictures by name."""
    # what each token is
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    targets = frozenset(sample.target_at_N.tolist())
    ids = sample.ids_T.tolist()
    pictures = {
        at: number
        for number, medium in enumerate(sample.media)
        for at in range(medium.start, medium.stop)
    }

    def kind(at: int) -> _Kind:
        if at in pictures:
            return _Kind(False, False, False, pictures[at])
        is_target = at in targets
        is_end = is_target and ids[at] in ends
        return _Kind(is_target, ids[at] in special, is_end, -1)

    # runs of tokens of one kind, with marks where targets begin and end
    view, was_target = Text(), False
    for segment, run in groupby(range(len(ids)), kind):
        places = list(run)
        if segment.is_target != was_target:
            view.append(marks.left if segment.is_target else marks.right, "green")
            was_target = segment.is_target
        if segment.picture >= 0:
            name = Path(sample.media[segment.picture].picture.source).name
            name = name[:12] if len(name) == 64 else name  # no file: it is stored under its SHA-256
            view.append(f"[{name}: {counted(len(places), 'tokens')}]", segment.style)
            continue
        text = _shortened(_decoded(ids, places[0], places[-1] + 1, tokenizer), segment.is_target)
        view.append(text.replace("\n", marks.newline), segment.style)
        if segment.is_end:
            view.append(marks.end, "bold green")
    if was_target:
        view.append(marks.right, "green")
    view.rstrip()
    return view


def _decoded(ids: list[int], start: int, stop: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text that the tokens [start, stop) add in context: some decoders drop a leading space."""
    first = max(0, start - NUM_BEFORE)
    before, through = (str(tokenizer.decode(ids[first:at])) for at in (start, stop))
    is_prefix = through.startswith(before)
    return through[len(before) :] if is_prefix else str(tokenizer.decode(ids[start:stop]))


def _shortened(text: str, is_target: bool) -> str:
    """Long text without its middle."""
    max_length = LONGEST_TARGET if is_target else LONGEST_CONTEXT
    if len(text) <= max_length:
        return text
    head, tail = max_length * 2 // 3, max_length // 4
    return f"{text[:head]} [... {len(text) - head - tail:,} characters ...] {text[-tail:]}"


def _grid(num_columns: int) -> Table:
    """A table without lines; long words (paths) are folded, never truncated."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    for _ in range(num_columns - 1):
        table.add_column(overflow="fold")
    return table
