"""What ``taut plan`` answers, and how it is printed: 100 columns are enough.

Imports estimate. commands/plan.py imports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from taut.estimate import GPUS, PARTS, Footprint, Kernels, Seconds, Workload
from taut.methods.inputs import Decision

GIB = 2**30
ABOUT = {
    "weights": "float32 masters, adapters, buffers",
    "reference": "what the policy is measured against",
    "gradients": "float32, of what trains",
    "optimizer": "AdamW's two moments",
    "casts": "autocast's copies of weights, kept for the backward",
    "activations": "kept for the backward",
    "logits": "the head's rows over the vocabulary, a chunk at a time",
    "temporary": "what a layer or the head has while it runs",
    "staging": "checkpoints written in the background are staged there",
    "loading": "each rank has the whole float32 model before it is sharded",
}


class Machine(NamedTuple):
    """What is planned for."""

    name: str
    device: torch.device | None
    """Where it can be measured; None: it is not here."""
    memory: int
    """Bytes of each."""
    kernels: Kernels


@dataclass(frozen=True)
class Way:
    """One way to run, and what comes of it."""

    name: str
    keys: tuple[str, ...]
    """What to set for it."""
    footprint: Footprint
    """With micro-batches as large as the token budget lets them be."""
    now: Footprint
    """With the largest micro-batch of the first steps."""
    most_tokens: int
    """The largest micro-batch that fits; 0: not even the longest sample does."""
    least_ranks: int | None
    """Micro-batches as asked fit on so many GPUs; None: not on those there are."""
    seconds: Seconds | None


@dataclass(frozen=True)
class Planned:
    """All of the answer."""

    machine: Machine
    num_ranks: int
    limit: int
    work: Workload
    num_parameters: int
    ways: tuple[Way, ...]
    """As asked first."""
    decisions: tuple[Decision, ...] = ()
    """What the configuration leaves to the method."""

    @property
    def fits(self) -> bool:
        """Whether what is asked fits."""
        return self.ways[0].footprint.peak <= self.limit


def show(planned: Planned, console: Console) -> None:
    """The plan, for people."""
    machine, asked, work = planned.machine, planned.ways[0], planned.work
    dtype = str(machine.kernels.dtype).removeprefix("torch.")
    console.print(
        f"{planned.num_parameters:,} parameters, {dtype}, on {planned.num_ranks} x {machine.name} of "
        f"{_gib(machine.memory)} GiB, of which {_gib(planned.limit)} may be used"
    )
    console.print(f"micro-batches: {work.source}")
    for decision in planned.decisions:
        console.print(f"{decision.name}: {decision.value}, {decision.reason}")
    console.print()
    console.print(_parts(planned))
    console.print(_verdict(planned) + "\n", style="bold green" if planned.fits else "bold red")
    console.print(_table(planned))
    settings = _settings(planned)
    if settings.row_count:
        console.print("\nto do it that way, set")
        console.print(settings)
    if asked.seconds is not None:
        console.print(f"\nseconds: {asked.seconds.source}; a mean of {len(work.steps)} steps")
    else:
        console.print(f"\nseconds: not known; {_why_no_seconds(planned)}")


def _parts(planned: Planned) -> Table:
    """What is asked, part by part: in the first steps, and at the token budget."""
    asked, work = planned.ways[0], planned.work
    columns = {f"{work.fullest.num_tokens:,} tokens": asked.footprint}
    if work.largest is not work.fullest:
        columns = {f"{work.largest.num_tokens:,} tokens": asked.now, **columns}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(f"GiB on each, {asked.name}", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", style="dim", overflow="fold")

    def add(name: str, about: str, sizes: list[int], style: str = "") -> None:
        table.add_row(f"  {name}", *map(_gib, sizes), about, style=style)

    found = list(columns.values())
    for name in (*PARTS, "staging"):
        if asked.footprint.parts.get(name):
            add(name, ABOUT[name], [some.parts[name] for some in found])
    about = "with the largest micro-batch of the first steps; with a full one" * (len(found) > 1)
    add("a step", about, [sum(some.parts.values()) for some in found], "bold")
    if planned.num_ranks > 1:
        add("loading", ABOUT["loading"], [some.loading for some in found])
    if asked.footprint.staging and "staging" not in asked.footprint.parts:
        add("on the host", ABOUT["staging"], [some.staging for some in found])
    return table


def _verdict(planned: Planned) -> str:
    """Whether what is asked fits, and what to do where not."""
    asked = planned.ways[0]
    need = f"{_gib(asked.footprint.peak)} of {_gib(planned.limit)} GiB"
    if planned.fits:
        return f"fits: {need}, with up to {asked.most_tokens:,} tokens a micro-batch"
    other = next((way for way in planned.ways if way.most_tokens), None)
    if other is None:
        why = f"; {ABOUT['loading']}" * (asked.footprint.loading > planned.limit)
        return f"does not fit: {need}, nor does any way below{why}; take larger GPUs, or a smaller model"
    found = f"does not fit: {need}; set {' '.join(other.keys)}"
    if asked.now.peak <= planned.limit:
        found += f" (the first steps would fit: {_gib(asked.now.peak)} GiB)"
    return found


def _table(planned: Planned) -> Table:
    """All ways, side by side."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("", "GiB", "fits", "tokens that fit", "fits from", "s/step"):
        table.add_column(name, justify="left" if name in ("", "fits") else "right", no_wrap=True)
    for way in planned.ways:
        fits, least = way.footprint.peak <= planned.limit, way.least_ranks
        table.add_row(
            way.name,
            _gib(way.footprint.peak),
            "yes" if fits else "no",
            f"{way.most_tokens:,}" if way.most_tokens else "-",
            "-" if least is None else f"{least} GPU{'s' * (least > 1)}",
            "-" if way.seconds is None else f"{way.seconds.total:.3g}",
            style="" if fits else "dim",
        )
    return table


def _settings(planned: Planned) -> Table:
    """What to set for each way."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for way in planned.ways:
        if way.keys and way.most_tokens:
            table.add_row(way.name, Text(" ".join(way.keys), "cyan", overflow="fold"))
    return table


def _why_no_seconds(planned: Planned) -> str:
    if planned.machine.name in GPUS:
        return "the table of GPUs has rates for bfloat16 only"
    if planned.machine.device is None:
        return "name a GPU of the table (--gpu H100)"
    return "measured on one rank only, and with measure=true"


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f}" if size < 100 * GIB else f"{size / GIB:,.0f}"
