"""What was measured, and what it comes to: rates, ratios against the targets, where a step's time
goes, the printed table. Imported by ``benchmarks/sft.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median
from typing import Any

import flops
from data import Model, Row
from machine import not_compared, print_memory, verdict

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-3}
"""How far a first loss may be from the (float32) reference, relatively."""
Result = dict[str, Any]


def median_of_steps(runs: Sequence[Result], what: str) -> float:
    """Of a step: the median of all but the first, and of runs."""
    return median(median(step[what] for step in run["steps"][1:]) for run in runs)


def memory_of(runs: Sequence[Result]) -> Result:
    """The most of a process, and what of it the libraries alone do not take."""
    return {
        "peak_mb": median(run["peak_mb"] for run in runs),
        "peak_mb_above_imports": median(run["peak_mb"] - run["import_mb"] for run in runs),
    }


@dataclass(frozen=True)
class Contender:
    framework: str
    mode: str
    cpu_matmul: str | None = None
    """The library of taut's products, where it has turns with each; None: as the run chooses."""

    @property
    def label(self) -> str:
        return f"{self.framework} {self.mode}" + (
            f" ({self.cpu_matmul})" if self.cpu_matmul else ""
        )

    @property
    def job(self) -> dict[str, str]:
        """Its part of a worker's job."""
        return {"mode": self.mode} | ({"cpu_matmul": self.cpu_matmul} if self.cpu_matmul else {})


def with_cpu_matmul(contenders: Sequence[Contender], cpu_matmul: str | None) -> list[Contender]:
    """``both``: taut's contenders once with each library."""
    if cpu_matmul != "both":
        return list(contenders)
    return [
        replace(one, cpu_matmul=name)
        for one in contenders
        for name in (("mkl", "onednn") if one.framework == "taut" else (None,))
    ]


def is_taut(label: str) -> bool:
    """Whether it is taut as it is, with whichever products."""
    return label.startswith("taut shared")


TAUT = Contender("taut", "shared")
TAUT_UNSHARED = Contender("taut", "unshared")
TRL_DEFAULT = Contender("trl", "padded")
CONTENDERS = (
    TAUT,
    TRL_DEFAULT,
    Contender("trl", "padding_free"),
    Contender("trl", "bfd"),
    Contender("llamafactory", "neat_packing"),
)


@dataclass(frozen=True)
class Targets:
    """What taut is measured against."""

    over_default: float | None = None
    """tokens/s over those of TRL's default, at least."""
    over_best: float | None = None
    """tokens/s over those of the best correct peer mode, at least."""
    peak_mb: float | None = None
    """Peak memory, at most; None: not known yet."""
    products: float | None = None
    """The fraction of the matmul rate, at least."""


@dataclass
class Measured:
    """A contender's runs on a case."""

    contender: Contender
    dtype: str
    runs: list[Result] = field(default_factory=list)
    error: str | None = None
    reference_loss: float | None = None

    def tokens_per_second(self, rows: Sequence[Row]) -> float:
        rates = [
            sum(len(rows[k].ids) for step in steps for k in step["rows"])
            / sum(step["seconds"] for step in steps)
            for steps in self._timed_steps()
        ]
        return float(median(rates))

    @property
    def step_seconds(self) -> float:
        means = [mean(step["seconds"] for step in steps) for steps in self._timed_steps()]
        return float(median(means))

    @property
    def peak_mb(self) -> float:
        return float(median(run["peak_mb"] for run in self.runs))

    @property
    def own_mb(self) -> float:
        return float(median(run["peak_mb"] - run["import_mb"] for run in self.runs))

    @property
    def first(self) -> Result:
        first: Result = self.runs[0]["steps"][0]
        return first

    @property
    def deviation(self) -> float:
        assert self.reference_loss is not None, "compare with the reference first"
        return abs(float(self.first["loss"]) / self.reference_loss - 1)

    def _timed_steps(self) -> list[list[Result]]:
        """Per run, all steps but the first."""
        return [run["steps"][1:] for run in self.runs]


def summarize(rows: Sequence[Row], one: Measured, state: Result) -> Result:
    """A contender's line of the table."""
    if not one.runs:
        return {"error": one.error}
    return {
        **state,
        "tokens_per_second": one.tokens_per_second(rows),
        "step_seconds": one.step_seconds,
        "peak_mb": one.peak_mb,
        "peak_mb_above_imports": one.own_mb,
        "first_loss": one.first["loss"],
        "reference_loss": one.reference_loss,
        "deviation": one.deviation,
        "is_correct": one.deviation <= TOLERANCE[one.dtype],
        "rows_per_step": [len(step["rows"]) for step in one.runs[0]["steps"]],
        "runs": one.runs,
    }


def ratios(table: dict[str, Result], targets: Targets) -> list[Result]:
    """Every comparison that the targets name, as far as it was measured."""
    peers = {k: v for k, v in table.items() if not k.startswith("taut") and v.get("is_correct")}
    default = peers.get(TRL_DEFAULT.label)
    found = []
    for label, ours in table.items():
        if not label.startswith("taut") or not ours.get("is_correct") or not peers:
            continue
        # The targets are for taut as it is; with sharing off or products by name the same ratios are only reported.
        goals = targets if label == TAUT.label else None
        speed = ours["tokens_per_second"]
        best = max(peers, key=lambda label: float(peers[label]["tokens_per_second"]))
        over_best = speed / peers[best]["tokens_per_second"]
        # A peer in another state could have been the best one in this state.
        rows = [ours, *peers.values()]
        compared = [(f"tokens/s of the best correct peer ({best})", over_best, "over_best", rows)]
        if default:
            over_default = speed / default["tokens_per_second"]
            memory = ours["peak_mb"] / default["peak_mb"]
            rows = [ours, default]
            compared.append(("tokens/s of TRL's default", over_default, "over_default", rows))
            compared.append(("memory of TRL's default", memory, "", []))
        for to, value, name, rows in compared:
            goal = getattr(goals, name) if goals and name else None
            why = not_compared(rows)
            is_met = bool(why) or goal is None or value >= goal
            line = {"of": label, "to": to, "value": value, "target": goal}
            found.append({**line, "not_compared": why, "is_met": is_met})
    return found


def utilization(
    model: Model,
    work: flops.Work,
    limits: Sequence[Result],
    step_seconds: float,
    target: float | None,
    why: str,
) -> Result:
    """Where a step's time goes, as fractions: necessary products, AdamW, the rest."""
    products = [
        median(times) for times in zip(*(limit["products"] for limit in limits), strict=True)
    ]
    ideal = flops.ideal_seconds(model, work, products)
    fractions = {name: value / step_seconds for name, value in ideal.items()}
    fractions["adamw"] = median(limit["adamw"] for limit in limits) / step_seconds
    fractions["rest"] = 1 - sum(fractions.values())
    necessary = sum(flops.flops(model, work).values())
    fraction = sum(ideal.values()) / step_seconds
    return {
        "fraction_of_matmul_rate": fraction,
        "target": target,
        "not_compared": why,
        "is_met": bool(why) or target is None or fraction >= target,
        "matmul_gflops": necessary / sum(ideal.values()) / 1e9,
        "step_gflops": necessary / step_seconds / 1e9,
        "fractions": fractions,
    }


def print_case(name: str, result: Result) -> None:
    columns = (
        f"{'tokens/s':>9}{'peak MB':>9}{'w/o imports':>13}{'first loss':>12}  correct, products"
    )
    print(f"\n{name}\n{'':28}{columns}")
    for label, row in result["contenders"].items():
        if "error" in row:
            print(f"  {label:26}  failed: {row['error'].splitlines()[-1]}")
            continue
        right = "yes" if row["is_correct"] else f"NO, off by {row['deviation']:.1e}"
        print(
            f"  {label:26}{row['tokens_per_second']:9.0f}{row['peak_mb']:9.0f}"
            f"{row['peak_mb_above_imports']:13.0f}{row['first_loss']:12.5f}  {right}, {row['cpu_matmul']}"
        )
    for ratio in result["ratios"]:
        target = f" (target {ratio['target']:g}: {verdict(ratio)})" if ratio["target"] else ""
        if ratio["not_compared"] and not target:
            target = f" ({verdict(ratio)})"
        print(f"  {ratio['of']}: {ratio['value']:.2f} x {ratio['to']}{target}")
    print_memory(result["memory"])
    if "utilization" in result:
        used = result["utilization"]
        goal = f" (target {used['target']:.0%}: {verdict(used)})" if used["target"] else ""
        parts = ", ".join(f"{part} {value:.0%}" for part, value in used["fractions"].items())
        print(
            f"  necessary products at {used['step_gflops']:.0f} of {used['matmul_gflops']:.0f} "
            f"GFLOP/s: {used['fraction_of_matmul_rate']:.0%} of the matmul rate{goal}\n"
            f"  a step: {parts}"
        )


def print_scaling(found: Sequence[Result]) -> None:
    print("\ntime per step against distinct tokens (taut, reading, small)")
    for row in found:
        per_token = 1e6 * row["seconds"] / row["distinct_tokens"]
        print(
            f"  {row['documents']} x: {row['distinct_tokens']:6.0f} distinct tokens of "
            f"{row['tokens']:6.0f}, "
            f"{row['seconds']:7.3f} s  {per_token:5.0f} us a distinct token"
        )
