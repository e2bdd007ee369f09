"""taut and TRL train a vision-language model on the same pictures: ``python benchmarks/vision.py [--quick]``.

    full      16 rows a step, four pictures of mixed sizes with four questions each; all of the model is trained
    frozen    the same, the vision tower frozen

Each run is a process of its own, in its own environment, on CPU with the same threads; the contenders take turns, round
after round. A run goes once over its rows; the first step warms up and is not timed. Reported per contender:

    samples/s    rows over the seconds of a step (reading of pictures included), median of steps and rounds
    tokens/s     the same in the rows' own tokens, those of pictures included: no pads, a picture counted for every row
    CPU s        seconds of processor time of a step, which other work on the machine disturbs less
    memory       largest resident set of the process, and what of it came after the imports
    off by       how far its losses are from TRL's

Both learn the same tokens, those of the answers. TRL with the step as one batch is the oracle: the losses of all steps
must be equal to 1e-4 (of a loss above one: relatively) in float32. TRL's modes that accumulate have another loss: for
these models the library takes the mean of the batches' means, whatever number of targets each has. They count as peers
all the same, for their work is the same. Results go to a JSON file and a table. Exit status 1 if a target was measured
and missed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import data
from machine import memory_line, not_compared, print_memory, print_uncompared, take_turns, verdict
from peers.environments import folder_of
from pictures import QUESTIONS, Asked, make_rows, write_model, write_rows
from report import Contender, is_taut, median_of_steps, memory_of, with_cpu_matmul
from sft import Bench, begin, make_bench, matches, parse_arguments

Result = dict[str, Any]

TAUT, UNSHARED = Contender("taut", "shared"), Contender("taut", "unshared")
TRL = tuple(Contender("trl", mode) for mode in ("batch", "accumulated", "defaults"))
ORACLE = TRL[0]
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
MIN_SPEED = 5.0
"""samples/s over those of TRL's fastest mode."""


@dataclass(frozen=True)
class Case:
    """Pictures, and what is trained."""

    name: str
    is_tower_frozen: bool = False
    pictures_per_step: int = 4
    num_steps: int = 6
    sides: tuple[int, int] = (8, 20)
    """The least and the largest side of a picture, in tokens of 28 pixels."""
    peak_mb: float | None = None
    """Peak memory, at most; None: not known yet."""

    @property
    def rows_per_step(self) -> int:
        return self.pictures_per_step * QUESTIONS

    def rows(self) -> list[Asked]:
        return make_rows(self.pictures_per_step * self.num_steps, self.sides)


CASES = (Case("full", peak_mb=1381), Case("frozen", is_tower_frozen=True))
QUICK = (replace(CASES[0], num_steps=3),)


@dataclass
class Measured:
    """A contender's runs on a case."""

    case: Case
    runs: list[Result] = field(default_factory=list)
    error: str | None = None

    def step(self, what: str = "seconds") -> float:
        """Of a step."""
        return median_of_steps(self.runs, what)

    @property
    def summary(self) -> Result:
        """Its line of the table."""
        if not self.runs:
            return {"error": self.error}
        tokens = mean(step["num_tokens"] for step in self.runs[0]["steps"][1:])
        return {
            "samples_per_second": self.case.rows_per_step / self.step(),
            "tokens_per_second": tokens / self.step(),
            "step_seconds": self.step(),
            "step_cpu_seconds": self.step("cpu_seconds"),
            **memory_of(self.runs),
            "losses": [step["loss"] for step in self.runs[0]["steps"]],
            "runs": self.runs,
        }


def measure(bench: Bench, case: Case, contenders: Sequence[Contender], rounds: int) -> Result:
    """All contenders on one case, in alternation."""
    rows, job = prepare(bench, case)

    def run_of(contender: Contender) -> Callable[[int], Result]:
        return lambda _: run_once(bench, case, contender, job, rows)

    turns = take_turns(
        case.name,
        {one.label: run_of(one) for one in contenders},
        rate=bench.rate,
        show=lambda run: f"{Measured(case, [run]).step():7.2f} s a step, {run['peak_mb']:6.0f} MB",
        rounds=rounds,
        tries=bench.tries,
    )
    table = {
        label: Measured(case, turns.chosen(label), turns.errors.get(label)).summary
        | turns.state(label)
        for label in turns.runs
    }
    compare(table, TOLERANCE[bench.dtype])
    return {
        "contenders": table,
        "rows": describe(rows),
        "ratios": ratios(table),
        "memory": memory_line(table.get(TAUT.label, {}), case.peak_mb),
    }


def prepare(bench: Bench, case: Case) -> tuple[list[Asked], Result]:
    """Rows, pictures and model on disk, and the part of the job that all contenders have in common."""
    model, folder = bench.work / "model", bench.work / case.name
    if not model.exists():
        write_model(model)
    rows = case.rows()
    write_rows(rows, folder)
    return rows, {
        "model": str(model),
        "data": str(folder),
        "packages": str(folder_of("pictures", bench.cache)),
        "samples_per_step": case.rows_per_step,
        "rows_per_picture": QUESTIONS,
        "num_steps": case.num_steps,
        "is_tower_frozen": case.is_tower_frozen,
        "learning_rate": 1e-4,
        "pad": data.PAD,
        "bos": data.BOS,
    }


def describe(rows: Sequence[Asked]) -> Result:
    """What there is to learn."""
    sizes = {row.picture: row.size[0] * row.size[1] for row in rows}
    return {
        "samples": len(rows),
        "pictures": len(sizes),
        "picture_tokens": [min(sizes.values()), mean(sizes.values()), max(sizes.values())],
        "tokens": sum(len(row.ids) for row in rows),
        "targets": sum(row.num_targets for row in rows),
    }


def run_once(
    bench: Bench, case: Case, contender: Contender, job: Result, rows: Sequence[Asked]
) -> Result:
    """One run of one contender, and each step's tokens; RuntimeError where its steps have other rows or tokens."""
    script, whole = f"train_{contender.framework}_vision.py", job | contender.job
    run: Result = bench.run(script, contender.framework, whole)
    if len(run["steps"]) != case.num_steps:
        raise RuntimeError(f"{contender.label}: {len(run['steps'])} steps, not {case.num_steps}")
    for number, step in enumerate(run["steps"]):
        wanted = range(number * case.rows_per_step, (number + 1) * case.rows_per_step)
        if sorted(step["rows"]) != list(wanted):
            raise RuntimeError(f"{contender.label}: step {number + 1} has rows {step['rows']}")
        num_tokens = sum(len(rows[row].ids) for row in wanted)
        if step.setdefault("num_tokens", num_tokens) != num_tokens:
            raise RuntimeError(f"{contender.label}: step {number + 1}: {step['num_tokens']} tokens")
    return run


def compare(table: dict[str, Result], tolerance: float) -> None:
    """Hold every contender's losses against the oracle's, step for step."""
    oracle = table.get(ORACLE.label, {}).get("losses")
    for label, row in table.items():
        if oracle is None or "error" in row:
            continue
        both = zip(row["losses"], oracle, strict=True)
        row["deviation"] = max(abs(a - b) / max(1.0, abs(b)) for a, b in both)
        row["is_wrong"] = label.startswith("taut") and row["deviation"] > tolerance


def ratios(table: dict[str, Result]) -> list[Result]:
    """taut beside TRL's fastest mode, which is the target, and beside the others."""
    peers = {k: row for k, row in table.items() if k.startswith("trl") and "error" not in row}
    if not peers:
        return []
    fastest = max(peers, key=lambda label: float(peers[label]["samples_per_second"]))
    found = []
    shared = [name for name in table if is_taut(name) and "error" not in table[name]]
    for name, (label, row) in product(shared, peers.items()):
        ours, is_goal = table[name], label == fastest and name == TAUT.label
        why = not_compared([ours, *peers.values()] if is_goal else [ours, row])
        speed = ours["samples_per_second"] / row["samples_per_second"]
        found.append({
            "of": name,
            "to": label,
            "not_compared": why,
            "speed": speed,
            "cpu": row["step_cpu_seconds"] / ours["step_cpu_seconds"],
            "memory": ours["peak_mb"] / row["peak_mb"],
            "is_goal": is_goal,
            "is_met": not is_goal or bool(why) or speed >= MIN_SPEED,
        })  # fmt: skip
    return found


def print_case(name: str, result: Result) -> None:
    rows = result["rows"]
    least, middle, most = rows["picture_tokens"]
    print(
        f"\n{name}: {rows['samples']} rows on {rows['pictures']} pictures of {least} to {most} tokens"
        f" (mean {middle:.0f}), {rows['tokens']} tokens, {rows['targets']} targets\n"
        f"{'':20}{'samples/s':>10}{'tokens/s':>10}{'s a step':>10}{'CPU s':>8}{'peak MB':>9}"
        f"{'w/o imports':>13}  losses",
        flush=True,
    )
    for label, row in result["contenders"].items():
        if "error" in row:
            print(f"  {label:18}  failed: {row['error'].splitlines()[-1]}")
            continue
        losses = " ".join(f"{loss:.5f}" for loss in row["losses"])
        off = f"  off by {row['deviation']:.1e}" if "deviation" in row else "  not compared"
        wrong = "  WRONG" if row.get("is_wrong") else ""
        print(
            f"  {label:18}{row['samples_per_second']:10.2f}{row['tokens_per_second']:10.0f}"
            f"{row['step_seconds']:10.2f}{row['step_cpu_seconds']:8.1f}{row['peak_mb']:9.0f}"
            f"{row['peak_mb_above_imports']:13.0f}  {losses}{off}{wrong}  {row['cpu_matmul']}"
        )
    for ratio in result["ratios"]:
        goal = f" ({verdict(ratio)})" if ratio["not_compared"] else ""
        if ratio["is_goal"]:
            goal = f" (target {MIN_SPEED:g}: {verdict(ratio)})"
        print(
            f"  {ratio['of']}: {ratio['speed']:.2f} x the samples/s of {ratio['to']} ({ratio['cpu']:.2f} by CPU s),"
            f" {ratio['memory']:.0%} of its memory{goal}"
        )
    print_memory(result["memory"])


def has_missed(result: Result) -> bool:
    """Whether taut missed the target, failed, or had another loss than TRL."""
    ours = [row for label, row in result["contenders"].items() if label.startswith("taut")]
    lines = [*result["ratios"], *([result["memory"]] if result["memory"] else [])]
    return any("error" in row or row.get("is_wrong") for row in ours) or any(
        not line["is_met"] for line in lines
    )


def main() -> int:
    arguments = parse_arguments(__doc__, "vision", "three steps, everything trained")
    results = begin(arguments)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        bench = make_bench(arguments, Path(work))
        for case in QUICK if arguments.quick else CASES:
            if not matches(case.name, arguments.cases):
                continue
            contenders = with_cpu_matmul((TAUT, *TRL, UNSHARED), arguments.cpu_matmul)
            chosen = [c for c in contenders if matches(c.label, arguments.only)]
            found = measure(bench, case, chosen, arguments.rounds)
            print_case(case.name, found)
            results["cases"][case.name] = found
            arguments.out.write_text(json.dumps(results, indent=1))
    print_uncompared(
        [line for case in results["cases"].values() for line in case["ratios"] if line["is_goal"]]
    )
    print(f"\n{arguments.out}")
    return int(any(has_missed(case) for case in results["cases"].values()))


if __name__ == "__main__":
    sys.exit(main())
