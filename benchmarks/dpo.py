"""taut and TRL train on the same pairs, and have the same losses: ``python benchmarks/dpo.py [--quick]``.

    full, lora    32 pairs a step, prompts of 512 tokens, answers of 64: how fast, in how much memory
    long          the same with prompts of 1,024
    loss: NAME    the losses that TRL has: a tiny model, 8 short pairs a step of uneven lengths, six steps with a large
                  learning rate

Each run is a process of its own, in its own environment, on CPU with the same threads; the contenders take turns, round
after round. The first step warms up and is not timed. Reported per contender:

    pairs/s    pairs over the median seconds of a step, median of rounds
    CPU s      seconds of processor time of such a step, which other work on the machine disturbs less
    memory     largest resident set of the process, and what of it came after the imports
    correct    whether every step had the same tokens, loss and metrics as TRL's

TRL is the oracle: the losses of all steps must be equal to 1e-4 (of a loss above one: relatively) in float32.
Results go to a JSON file and a table. Exit status 1 if a target was measured and missed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

import data
from data import SMALL, Model
from machine import memory_line, not_compared, print_memory, print_uncompared, take_turns, verdict
from objectives import OBJECTIVES, SIGMOID, Objective
from pairs import Lengths, Pair, make_pairs, write_pairs
from report import Contender, is_taut, median_of_steps, memory_of, with_cpu_matmul
from sft import Bench, begin, make_bench, matches, parse_arguments
from taut.models.lora.adapters import apply_lora
from taut.models.lora.merge import save_adapter
from taut.models.settings import LoraConfig

Result = dict[str, Any]

TAUT, UNSHARED = Contender("taut", "shared"), Contender("taut", "unshared")
ORACLE = Contender("trl", "batch")
TRL = (
    ORACLE,
    Contender("trl", "accumulated"),
    Contender("trl", "checkpointed"),
    Contender("trl", "defaults"),
)
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)
"""What both log of a step, by TRL's names. The accuracies differ on purpose: TRL counts a tie for nothing."""

TINY = Model("tiny", num_layers=2, hidden=128, vocab=1024, has_tied_embeddings=False)
BETA = 0.1
PAIRS_AT_A_TIME = 8
"""The library's default batch, which TRL is given in two modes; taut is given as many tokens as these have."""
LORA = {"r": 16, "lora_alpha": 32}


@dataclass(frozen=True)
class Case:
    """Pairs, what is trained, and on which loss."""

    name: str
    lengths: Lengths
    model: Model = SMALL
    pairs_per_step: int = 32
    num_steps: int = 4
    learning_rate: float = 3e-5
    lora: bool = False
    objective: Objective = SIGMOID
    contenders: tuple[Contender, ...] = (TAUT, *TRL, UNSHARED)
    is_timed: bool = True
    target: float | None = None
    """pairs/s over those of TRL's fastest mode, at least."""
    peak_mb: float | None = None
    """Peak memory, at most; None: not known yet."""

    def pairs(self) -> list[Pair]:
        return make_pairs(self.pairs_per_step * self.num_steps, self.model.vocab, self.lengths)


ISSUE = Lengths((512, 512), (64, 64))
TIMED = (
    Case("full", ISSUE, target=5, peak_mb=1537),
    Case("lora", ISSUE, lora=True, learning_rate=3e-4, target=5, peak_mb=1517),
    Case(
        "long",
        Lengths((1024, 1024), (64, 64)),
        num_steps=3,
        contenders=(TAUT, TRL[1], UNSHARED),
        target=5,
    ),
)
SHORT = Case(
    "loss",
    Lengths((16, 96), (4, 40)),
    model=TINY,
    pairs_per_step=8,
    num_steps=6,
    learning_rate=1e-3,
    contenders=(TAUT, ORACLE),
    is_timed=False,
)
CASES = (
    *TIMED,
    *(replace(SHORT, name=f"loss: {name}", objective=one) for name, one in OBJECTIVES.items()),
)
QUICK = tuple(replace(case, pairs_per_step=8, num_steps=3) for case in TIMED[:2])


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
        return {
            "pairs_per_second": self.case.pairs_per_step / self.step(),
            "step_seconds": self.step(),
            "step_cpu_seconds": self.step("cpu_seconds"),
            **memory_of(self.runs),
            "losses": [step["loss"] for step in self.runs[0]["steps"]],
            "num_tokens": [step["num_tokens"] for step in self.runs[0]["steps"]],
            "runs": self.runs,
        }


def measure(bench: Bench, case: Case, contenders: Sequence[Contender], rounds: int) -> Result:
    """All contenders on one case, in alternation."""
    job = prepare(bench, case)

    def run_of(contender: Contender) -> Callable[[int], Result]:
        return lambda _: run_once(bench, case, contender, job)

    turns = take_turns(
        case.name,
        {one.label: run_of(one) for one in contenders},
        rate=bench.rate if case.is_timed else None,
        show=lambda run: f"{Measured(case, [run]).step():7.2f} s a step, {run['peak_mb']:6.0f} MB",
        rounds=rounds,
        tries=bench.tries if case.is_timed else 0,
    )
    table = {
        label: Measured(case, turns.chosen(label), turns.errors.get(label)).summary
        | turns.state(label)
        for label in turns.runs
    }
    compare(case, table, bench.dtype)
    found = {"contenders": table, "pairs": asdict(case.lengths), "target": case.target}
    ours = table.get(TAUT.label, {})
    return found | {
        "ratios": ratios(case, table) if case.is_timed else [],
        "memory": memory_line(ours, case.peak_mb),
    }


def prepare(bench: Bench, case: Case) -> Result:
    """Pairs, model and adapter on disk, and the part of the job that all contenders have in common."""
    model, adapter = bench.work / case.model.name, bench.work / "adapter"
    folder = bench.work / case.name.replace(": ", "-")
    if not model.exists():
        data.write_model(case.model, model)
    if case.lora and not adapter.exists():
        write_adapter(model, adapter)
    pairs = case.pairs()
    write_pairs(pairs, folder)
    longest = max(len(pair.prompt) + pair.num_targets for pair in pairs)
    return {
        "model": str(model),
        "adapter": str(adapter),
        "data": str(folder),
        "samples_per_step": case.pairs_per_step,
        "pairs_at_a_time": PAIRS_AT_A_TIME,
        "tokens_at_a_time": PAIRS_AT_A_TIME * longest,
        "num_steps": case.num_steps,
        "learning_rate": case.learning_rate,
        "lora": LORA if case.lora else None,
        "beta": BETA,
        "pad": data.PAD,
        "bos": data.BOS,
    }


def write_adapter(model: Path, adapter: Path) -> None:
    """The adapter with which taut begins, for TRL to begin with."""
    plain = AutoModelForCausalLM.from_pretrained(model)
    config = LoraConfig(rank=LORA["r"], alpha=LORA["lora_alpha"])
    save_adapter(apply_lora(plain, config), adapter)


def run_once(bench: Bench, case: Case, contender: Contender, job: Result) -> Result:
    """One run of one contender, its metrics by TRL's names, and each step's tokens."""
    loss = case.objective.taut if contender.framework == "taut" else case.objective.trl
    whole = job | {"loss": dict(loss)} | contender.job
    run: Result = bench.run(f"train_{contender.framework}_dpo.py", contender.framework, whole)
    pairs = case.pairs()
    wanted = [
        pairs[start : start + case.pairs_per_step]
        for start in range(0, len(pairs), case.pairs_per_step)
    ]
    if len(run["steps"]) != len(wanted):
        raise RuntimeError(f"{contender.label}: {len(run['steps'])} steps, not {len(wanted)}")
    for number, (step, some) in enumerate(zip(run["steps"], wanted, strict=True)):
        rows = range(2 * number * case.pairs_per_step, 2 * (number + 1) * case.pairs_per_step)
        if sorted(step["rows"]) != list(rows):
            raise RuntimeError(f"{contender.label}: step {number + 1} has rows {step['rows']}")
        step.setdefault("num_tokens", sum(pair.num_tokens for pair in some))
        if step["num_tokens"] != sum(pair.num_tokens for pair in some):
            raise RuntimeError(f"{contender.label}: step {number + 1}: {step['num_tokens']} tokens")
    return run


def compare(case: Case, table: dict[str, Result], dtype: str) -> None:
    """Hold every contender's losses and metrics against TRL's, step for step."""
    oracle = next(
        (row for label, row in table.items() if label.startswith("trl") and "error" not in row),
        None,
    )
    for row in table.values():
        if "error" in row:
            continue
        if oracle is None:
            row["is_correct"] = None
            continue
        pairs = list(zip(row["losses"], oracle["losses"], strict=True))
        row["deviation"] = max(distance(ours, theirs) for ours, theirs in pairs)
        row["is_correct"] = row["deviation"] <= TOLERANCE[dtype]
        row["metric_deviations"] = {
            name: max(distance(ours, theirs) for ours, theirs in both)
            for name in METRICS
            if case.objective.has_plain_rewards or name.startswith("logps")
            if (both := metric_pairs(row, oracle, name))
        }


def metric_pairs(row: Result, oracle: Result, name: str) -> list[tuple[float, float]]:
    """What both logged under a name, step for step; empty where one of them did not."""
    ours, theirs = ([step.get(name) for step in one["runs"][0]["metrics"]] for one in (row, oracle))
    if None in ours or None in theirs:
        return []
    return list(zip(ours, theirs, strict=True))


def distance(ours: float, theirs: float) -> float:
    """Absolute, of what is larger than one relative."""
    return abs(ours - theirs) / max(1.0, abs(theirs))


def ratios(case: Case, table: dict[str, Result]) -> list[Result]:
    """taut beside TRL's fastest correct mode: the targets; and beside the others."""
    peers = {
        label: row
        for label, row in table.items()
        if label.startswith("trl") and row.get("is_correct")
    }
    if not peers:
        return []
    fastest = max(peers, key=lambda label: float(peers[label]["pairs_per_second"]))
    found = []
    shared = [name for name in table if is_taut(name) and table[name].get("is_correct")]
    for name, (label, row) in product(shared, peers.items()):
        ours = table[name]
        speed = ours["pairs_per_second"] / row["pairs_per_second"]
        cpu = row["step_cpu_seconds"] / ours["step_cpu_seconds"]
        memory = ours["peak_mb"] / row["peak_mb"]
        is_goal = label == fastest and name == TAUT.label and case.target is not None
        why = not_compared([ours, *peers.values()] if is_goal else [ours, row])
        is_met = not is_goal or bool(why) or speed >= (case.target or 0)
        found.append({
            "of": name, "to": label, "not_compared": why, "speed": speed, "cpu": cpu, "memory": memory,
            "is_goal": is_goal, "is_met": is_met,
        })  # fmt: skip
    return found


def print_case(name: str, result: Result, is_timed: bool) -> None:
    columns = (
        f"{'pairs/s':>9}{'s a step':>10}{'CPU s':>8}{'peak MB':>9}{'w/o imports':>13}"
        if is_timed
        else ""
    )
    print(f"\n{name}\n{'':20}{columns}  losses", flush=True)
    for label, row in result["contenders"].items():
        if "error" in row:
            print(f"  {label:18}  failed: {row['error'].splitlines()[-1]}")
            continue
        speed = (
            f"{row['pairs_per_second']:9.2f}{row['step_seconds']:10.2f}"
            f"{row['step_cpu_seconds']:8.1f}{row['peak_mb']:9.0f}{row['peak_mb_above_imports']:13.0f}"
        )
        losses = " ".join(f"{loss:.5f}" for loss in row["losses"])
        right = {True: "", False: "  WRONG", None: "  not compared"}[row["is_correct"]]
        off = f"  off by {row['deviation']:.1e}" if "deviation" in row else ""
        print(f"  {label:18}{speed if is_timed else ''}  {losses}{off}{right}  {row['cpu_matmul']}")
        others = [f"{k} {v:.0e}" for k, v in row.get("metric_deviations", {}).items()]
        if label.startswith("taut") and others:
            print(f"  {'':18}  off by: {', '.join(others)}")
    for ratio in result["ratios"]:
        goals = f" (target {result['target']:g}: {verdict(ratio)})" if ratio["is_goal"] else ""
        if ratio["not_compared"] and not goals:
            goals = f" ({verdict(ratio)})"
        print(
            f"  {ratio['of']}: {ratio['speed']:.2f} x the pairs/s of {ratio['to']} ({ratio['cpu']:.2f} by CPU s),"
            f" {ratio['memory']:.0%} of its memory"
            f"{goals}"
        )
    print_memory(result["memory"])


def has_missed(result: Result) -> bool:
    """Whether taut missed a target, failed, or had another loss than TRL."""
    ours = [row for label, row in result["contenders"].items() if label.startswith("taut")]
    lines = [*result["ratios"], *([result["memory"]] if result["memory"] else [])]
    return any(not row.get("is_correct") for row in ours) or any(
        not line["is_met"] for line in lines
    )


def main() -> int:
    arguments = parse_arguments(__doc__, "dpo", "8 pairs a step, three steps")
    results = begin(arguments)
    chosen = [
        case
        for case in (QUICK if arguments.quick else CASES)
        if matches(case.name, arguments.cases)
    ]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        bench = make_bench(arguments, Path(work))
        for case in chosen:
            every = with_cpu_matmul(case.contenders, arguments.cpu_matmul)
            contenders = [c for c in every if matches(c.label, arguments.only)]
            found = measure(bench, case, contenders, arguments.rounds if case.is_timed else 1)
            print_case(case.name, found, case.is_timed)
            results["cases"][case.name] = found
            arguments.out.write_text(json.dumps(results, indent=1))
    print_uncompared(
        [line for case in results["cases"].values() for line in case["ratios"] if line["is_goal"]]
    )
    print(f"\n{arguments.out}")
    return int(any(has_missed(case) for case in results["cases"].values()))


if __name__ == "__main__":
    sys.exit(main())
