"""``taut show``: what a run would do, before it does it.

In this order: the configuration in force (what was set first, the defaults after), what was decided for the user and
why, the data report with everything dropped or cut, what packing and sharing prefixes save in the first steps, and the
first samples with their targets marked. Targets stand in brackets as well as in green, so that pipes and every eye can
tell them; special tokens are written out, and a target that ends a turn has a mark of its own.

The plan is the run's own: the same order, budget and policy, on a skeleton of the model. No weight is loaded, nothing
is computed and nothing is written (tokenised data goes to the cache). May be imported by ``taut.commands.train`` only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.config import Decision, describe, to_dict, written
from taut.data.batching import StepPlan, lay_out, step_plan
from taut.data.dataset import Dataset
from taut.data.json_io import shown
from taut.data.packing import PackPolicy
from taut.data.prompts import PromptSet
from taut.data.render import Incident
from taut.io.console import counted
from taut.io.terminal import Terminal
from taut.methods.inputs import Inputs
from taut.methods.method import RunConfig
from taut.models.self_test import one_sample_reasons
from taut.plan import skeleton
from taut.run.inputs import load_inputs
from taut.run.setup import build_budget, build_policy, choose
from taut.train import distributed
from taut.train.distributed import Ranks
from taut.types import Media, Sample

NUM_SAMPLES = 3
NUM_STEPS = 5
"""How many steps are planned."""
NUM_INCIDENTS = 10
"""How many dropped or cut rows are listed."""
NUM_BEFORE = 8
"""Tokens decoded before a stretch, for its own text to come out as in its place."""
LONGEST_CONTEXT = 600
LONGEST_TARGET = 2_000
"""Characters of a stretch of text that are shown before its middle is left out."""


def show(run: RunConfig, console: Console | None = None) -> None:
    """Print what ``run`` would do."""
    ranks = distributed.start(run.device)
    inputs = load_inputs(run, ranks)
    if ranks.is_writer:
        _print(run, inputs, ranks, console or Terminal())
    distributed.stop(ranks)


def _print(run: RunConfig, inputs: Inputs, ranks: Ranks, console: Console) -> None:
    model = skeleton(run, inputs.config)
    reasons = one_sample_reasons(model, inputs.longest)
    one_sample = "; ".join(reasons) or None
    has_dropout = run.lora.dropout > 0 and bool(run.lora.rank or run.lora.adapter)
    has_noise = run.noise.neftune_alpha > 0 or has_dropout
    policy, obstacles = build_policy(run, one_sample, has_noise=has_noise)
    decisions = [*inputs.decisions, *choose(run, inputs, ranks.device)[2], *obstacles]
    budget = build_budget(run, model, ranks, one_sample=one_sample is not None)
    method, num_steps, _ = run.plan(inputs.train)

    _section(console, "configuration", *_configuration(run))
    _section(console, "decisions", _decisions(decisions))
    _section(console, "data", _data(inputs))
    rollouts = run.describe_rollouts(num_steps)
    if rollouts is not None and isinstance(inputs.train, PromptSet):
        _section(console, "plan", Text(rollouts))
        _section(console, "prompts", *_prompts(inputs.train, inputs.tokenizer))
        return
    plans = []
    for step in range(1, 1 + min(num_steps, NUM_STEPS)):
        trees = method.prepare(step)
        plans.append(step_plan(step, trees, lay_out(trees, budget, policy)))
    _section(console, "plan", *_plan(plans, num_steps, ranks.size, policy))
    marks = marks_for(console)
    _section(console, "samples", _legend(marks))
    ends = frozenset(inputs.stops.ids)
    is_read = run.has_scalar_head
    for sample in inputs.train[:NUM_SAMPLES]:
        view = view_of(_read(sample) if is_read else sample, inputs.tokenizer, ends, marks)
        title = _title_of_read(sample) if is_read else _title(sample, ends)
        console.print(Text(f"\n  {title}", "bold"))
        console.print(_indented(view))


def _prompts(data: PromptSet, tokenizer: PreTrainedTokenizerBase) -> Iterator[Text]:
    """The first prompts, with their answers."""
    marks = Marks("", "", "", "\n")
    for sample, row in zip(data[:NUM_SAMPLES], data.asked, strict=False):
        said = ", ".join(shown(text) for text in row.references) or "no right answer"
        yield Text(f"\n{row.id}: {counted(sample.num_tokens, 'tokens')}; {said}", "bold")
        nothing = replace(sample, target_at_N=np.empty(0, dtype=np.int64), weight_N=np.empty(0))
        yield view_of(nothing, tokenizer, frozenset(), marks)


def _section(console: Console, title: str, *parts: Any) -> None:
    console.print(Text(f"\n{title}", "bold underline"))
    for part in parts:
        console.print(_indented(part))


def _indented(part: Any) -> Padding:
    return Padding(part, (0, 0, 0, 2), expand=False)


def _configuration(run: RunConfig) -> Iterator[Table]:
    """What was set, one key a line with its default beside it; then the defaults, a table of keys a line."""
    values = dict(_flat(to_dict(run), {row.key for row in describe(type(run))}))
    given, rest = _grid(3), _grid(2)
    defaults: dict[str, list[str]] = {}
    for row in describe(type(run)):
        value = written(values[row.key])
        if value == row.default:
            table, _, name = row.key.rpartition(".")
            defaults.setdefault(table or "run", []).append(
                f"{name}={value.replace(' ', chr(0xA0))}"
            )
        else:
            was = "" if row.default == "required" else f"default {row.default}"
            given.add_row(Text(row.key, "bold"), Text(value, "yellow"), Text(was, "dim"))
    for table, pairs in defaults.items():
        rest.add_row(Text(table, "dim"), Text("  ".join(pairs), "dim"))
    yield given
    rest.title, rest.title_justify, rest.title_style = "\ndefaults in force", "left", "dim italic"
    yield rest


def _decisions(decisions: Sequence[Decision]) -> Table:
    """What was settled for the user, and why."""
    table = _grid(3)
    for decision in decisions:
        table.add_row(
            Text(decision.name, "bold"), Text(decision.value), Text(decision.reason, "dim")
        )
    return table


def _flat(tree: dict[str, Any], keys: set[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in keys:
            yield key, value
        else:
            yield from _flat(value, keys, f"{key}.")


def _data(inputs: Inputs) -> Table:
    table = _grid(2)
    for split, data in (("train", inputs.train), ("eval", inputs.eval)):
        if data is not None:
            for number, line in enumerate(_report(data)):
                table.add_row(Text("" if number else split, "bold"), line)
    return table


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
    shortest, middle, longest = np.quantile(data.lengths, [0, 0.5, 1]).astype(int)
    yield Text(f"tokens of a sample: {shortest:,} to {longest:,}, median {middle:,}")
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
    """The first steps, and what they save."""
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
    """What is written around targets, after a target that ends a turn, and at a line's end."""

    left: str
    right: str
    end: str
    newline: str


def marks_for(console: Console) -> Marks:
    """Marks that the console's encoding has."""
    if console.encoding.lower().startswith("utf"):
        return Marks("⟦", "⟧", "■", "↵\n")
    return Marks("[[", "]]", "(END)", "\n")


def _legend(marks: Marks) -> Text:
    return Text.assemble(
        (f"{marks.left}a target, to be learned{marks.right}", "green"),
        "   ",
        ("context", "dim"),
        "   ",
        ("<special>", "cyan"),
        "   ",
        (f"{marks.end} ends a turn: what the model stops with", "bold green"),
    )


def _title(sample: Sample, ends: frozenset[int]) -> str:
    num_ends = sum(int(token) in ends for token in sample.ids_T[sample.target_at_N])
    taught = f"{num_ends} of them an end of turn" if num_ends else "NO end of turn among them"
    return (
        f"{sample.id}: {counted(sample.num_tokens, 'tokens')}, {counted(sample.num_targets, 'targets')}, {taught}"
        f"{_said(sample)}"
    )


def _title_of_read(sample: Sample) -> str:
    reads = _read(sample).num_targets
    where = "the last" if sample.read_at_R is None else f"{reads} of them"
    return (
        f"{sample.id}: {counted(sample.num_tokens, 'tokens')}, no targets; the head is read at {where}, in brackets"
        f"{_said(sample)}"
    )


def _said(sample: Sample) -> str:
    """What the data say of it."""
    return "".join(f", {name} {value:g}" for name, value in sample.values.items())


def _read(sample: Sample) -> Sample:
    """The sample with the tokens at which a scalar head is read in the place of its targets."""
    last = np.array([sample.num_tokens - 1])
    at = last if sample.read_at_R is None else sample.read_at_R
    return replace(sample, target_at_N=at, weight_N=np.ones(at.size), streams={})


class _Kind(NamedTuple):
    """What a token is shown as."""

    is_target: bool
    is_special: bool
    is_end: bool
    picture: int
    """Which of the sample's it is part of; -1: of none."""

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
    """A sample's text with targets in brackets and in green, and its pictures by name."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    targets = frozenset(sample.target_at_N.tolist())
    ids = sample.ids_T.tolist()
    pictures = {
        at: number for number, one in enumerate(sample.media) for at in range(one.start, one.stop)
    }

    def kind(at: int) -> _Kind:
        if at in pictures:
            return _Kind(False, False, False, pictures[at])
        is_target = at in targets
        is_end = is_target and ids[at] in ends
        return _Kind(is_target, ids[at] in special, is_end, -1)

    view, was_target = Text(), False
    for found, run in groupby(range(len(ids)), kind):
        places = list(run)
        if found.is_target != was_target:
            view.append(marks.left if found.is_target else marks.right, "green")
            was_target = found.is_target
        if found.picture >= 0:
            view.append(_named(sample.media[found.picture], len(places)), found.style)
            continue
        text = _shortened(_decoded(ids, places[0], places[-1] + 1, tokenizer), found.is_target)
        view.append(text.replace("\n", marks.newline), found.style)
        if found.is_end:
            view.append(marks.end, "bold green")
    if was_target:
        view.append(marks.right, "green")
    view.rstrip()
    return view


def _named(one: Media, num_tokens: int) -> str:
    """By its file; one that had none is kept in a file named by its SHA-256."""
    name = Path(one.picture.source).name
    name = name[:12] if len(name) == 64 else name
    return f"[{name}: {counted(num_tokens, 'tokens')}]"


def _decoded(ids: list[int], start: int, stop: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """What the tokens [start, stop) add to the text before them: some decoders drop a text's first space."""
    first = max(0, start - NUM_BEFORE)
    before, through = (str(tokenizer.decode(ids[first:at])) for at in (start, stop))
    is_prefix = through.startswith(before)
    return through[len(before) :] if is_prefix else str(tokenizer.decode(ids[start:stop]))


def _shortened(text: str, is_target: bool) -> str:
    """Long text without its middle."""
    most = LONGEST_TARGET if is_target else LONGEST_CONTEXT
    if len(text) <= most:
        return text
    head, tail = most * 2 // 3, most // 4
    return f"{text[:head]} [... {len(text) - head - tail:,} characters ...] {text[-tail:]}"


def _grid(num_columns: int) -> Table:
    """Columns without lines; long words (paths) are folded, never cut."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    for _ in range(num_columns - 1):
        table.add_column(overflow="fold")
    return table
