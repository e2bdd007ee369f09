"""What saves took, and what it comes to: medians, costs, the share of a synchronous save, the printed table.

Imported by ``benchmarks/checkpoint.py``, which says what each number means.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

Result = dict[str, Any]

TARGET = 0.10
"""The most a background save may keep training waiting, as a part of a synchronous save."""
WAYS = ("background", "synchronous", "torch.save", "async_save")
BESIDE = ("background", "async_save")
"""The ways beside which training goes on."""


class Took(NamedTuple):
    """Time that something took."""

    seconds: float
    cpu: float
    """Of this process, all threads."""


class Clock:
    """What has been taken since it was made."""

    def __init__(self) -> None:
        self.began = time.perf_counter(), time.process_time()

    def __call__(self) -> Took:
        return Took(time.perf_counter() - self.began[0], time.process_time() - self.began[1])


class Save(NamedTuple):
    """One save."""

    waits: float
    cpu: float
    """Until it is written, the steps beside included."""
    steps: list[Took]
    """Beside the writing."""
    writes: float


def summarize(turns: Sequence[dict[str, Save]], quiet: Sequence[Took]) -> Result:
    """The lines of the table, and whether the target is met."""
    usual = Took(median(took.seconds for took in quiet), median(took.cpu for took in quiet))
    rows = {}
    for label in WAYS:
        saves = [turn[label] for turn in turns]
        if label in BESIDE and len(saves) > 1:
            rows[f"{label}, first"] = row(saves[:1], usual)
            rows[f"{label}, later"] = row(saves[1:], usual)
        else:
            rows[label] = row(saves, usual)
    whole = rows["synchronous"]["waits"]
    share = max(row["waits"] for label, row in rows.items() if "background" in label) / whole
    beside = median(took.seconds for turn in turns for took in turn["background"].steps)
    return {
        "step": usual.seconds,
        "step while writing": beside,
        "ways": rows,
        "share": share,
        "is_met": share < TARGET,
        "rounds": [{label: save._asdict() for label, save in turn.items()} for turn in turns],
        "quiet steps": quiet,
    }


def row(saves: Sequence[Save], usual: Took) -> dict[str, float]:
    """Medians of some saves; what the steps beside them would have taken anyway is no cost."""
    longer = [sum(took.seconds - usual.seconds for took in save.steps) for save in saves]
    return {
        "waits": median(save.waits for save in saves),
        "writes": median(save.writes for save in saves),
        "costs": median(save.waits + more for save, more in zip(saves, longer, strict=True)),
        "CPU s": median(save.cpu - len(save.steps) * usual.cpu for save in saves),
    }


def print_case(name: str, found: Result) -> None:
    staging, resumed = found["staging"], found["resume"]
    print(
        f"\n{name}: {staging['bytes'] / 1e6:,.0f} MB; a step takes {found['step']:.2f} s, while taut writes "
        f"{found['step while writing']:.2f} s"
    )
    whole = found["ways"]["synchronous"]["waits"]
    columns = next(iter(found["ways"].values()))
    print(f"{'':22}{''.join(f'{key:>9}' for key in columns)}   waits / synchronous")
    for label, cells in found["ways"].items():
        text = "".join(f"{value:9.3f}" for value in cells.values())
        print(f"  {label:20}{text}{cells['waits'] / whole:22.1%}")
    print(
        f"  staging: {staging['bytes'] / 1e6:,.0f} MB, once {staging['seconds']:.2f} s\n"
        f"  resume: {resumed['bytes'] / 1e6:,.0f} MB checked in {resumed['verify']:.2f} s, loaded in "
        f"{resumed['load']:.2f} s\n"
        f"  waits at most {found['share']:.1%} of a synchronous save (target {TARGET:.0%}: "
        f"{'met' if found['is_met'] else 'MISSED'}); what is saved is the state: "
        f"{'yes' if found['is_right'] else 'NO'}"
    )
