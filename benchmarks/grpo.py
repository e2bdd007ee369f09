"""taut and TRL roll out, judge and train on the same prompts: ``python benchmarks/grpo.py [--quick]``.

    small       4 layers of 256, a vocabulary of 8,192; 8 prompts of 256 and of 1,024 tokens, 8 completions of each
    reference   the same at 256 with a reference model and a divergence from it in the loss
    135M        SmolLM2-135M-Instruct, as the demo converts it
    long        4 prompts of 64 tokens, 8 completions of 512 tokens each
    silent      small, at 256; all answers to every other prompt get one reward, and their groups teach nothing
    agents      2 prompts of 8,000 tokens, 4 trajectories of each: 8 turns of 32 tokens, and a short message after each.
                TRL generates and trains on as many tokens in one turn
    group       4, 16 and 32 completions of each prompt
    losses      the losses that both have, on one rollout of TRL's: values and gradients, in float64

Every completion has 64 tokens (long: 512, agents: 32 a turn): no token ends one. Each run is a process of its own, in
its own environment, on CPU with the same threads; the contenders take turns, round after round. The first step warms up
and is not timed. Reported per contender, of the other steps and of rounds the median:

    s a step     whole, and of it: generation; scoring (rewards, logprobs of a reference, credit); training (the rest)
    CPU s        seconds of processor time, which other work on the machine disturbs less
    memory       largest resident set of the process and its helpers, and what of it came after the imports
    correct      every step has the tokens it should have, and what is sampled is as likely as what TRL samples

The peer is TRL's fastest mode. Results go to a JSON file and a table. Exit status 1 if a target was measured and
missed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import data
from asked import write_prompts
from data import LONG, SMALL, Model
from machine import memory_line, not_compared, print_memory, print_uncompared, take_turns, verdict
from policies import POLICIES
from report import Contender, is_taut, median_of_steps, memory_of, with_cpu_matmul
from sft import Bench, begin, make_bench, matches, parse_arguments
from taut_tools.demo.fetch import get_model

Result = dict[str, Any]

TAUT, UNSHARED = Contender("taut", "shared"), Contender("taut", "unshared")
EVERYTHING = Contender("taut", "everything")
ACCUMULATED = Contender("trl", "accumulated")
TRL = (
    ACCUMULATED,
    Contender("trl", "pairs"),
    Contender("trl", "batch"),
    Contender("trl", "defaults"),
)
PHASES = ("generation", "scoring", "training")
NEW_TOKENS = 64
PROMPTS = 8
MESSAGE = 3
"""Tokens of a message of ``peers/turns.py``: the end of the turn before, a word, and the end of the message."""
ENTROPY, ENTROPY_OF_WORDS = 0.02, 0.05
"""How far the mean of -log p of what is sampled may be from the entropy that TRL reports, relatively; and of a model
that has learned a language: there one answer's entropy is far from another's.
"""
TOLERANCE = 1e-6
"""Of losses (above one: relative) and of gradients (relative to their length)."""

TINY = Model("tiny", num_layers=2, hidden=128, vocab=1024, has_tied_embeddings=False)


@dataclass(frozen=True)
class Case:
    """What is asked, and how much faster than the peer taut shall be."""

    name: str
    length: int
    model: Model | None = SMALL
    """None: the one of the demo."""
    group: int = 8
    num_steps: int = 3
    divergence: float = 0.0
    is_half_silent: bool = False
    prompts: int = PROMPTS
    new_tokens: int = NEW_TOKENS
    """Of each turn."""
    turns: int = 1
    target: float | None = None
    peak_mb: float | None = None
    """Peak memory, at most: what the version before took on an Intel machine. None: not known yet."""
    contenders: tuple[Contender, ...] = (TAUT, ACCUMULATED)

    @property
    def num_completions(self) -> int:
        return self.prompts * self.group

    @property
    def num_distinct(self) -> int:
        """Tokens of a step, each prompt counted once."""
        return self.prompts * self.length + self.num_completions * self.after

    @property
    def after(self) -> int:
        """Tokens after the prompt of a trajectory: its turns, and the messages between them."""
        return self.turns * self.new_tokens + (self.turns - 1) * MESSAGE


def _groups(length: int, contenders: tuple[Contender, ...]) -> list[Case]:
    return [
        Case(f"group {size}, {length}", length, group=size, contenders=contenders)
        for size in (4, 16, 32)
    ]


CASES = (
    Case("small, 256", 256, target=5.0, peak_mb=858, contenders=(TAUT, *TRL, UNSHARED)),
    Case("small, 1024", 1024, target=9.0, peak_mb=900, contenders=(TAUT, *TRL[:2])),
    Case("long answers", 64, num_steps=2, prompts=4, new_tokens=512),
    Case(
        "agents, 8000",
        8000,
        model=LONG,
        prompts=2,
        group=4,
        turns=8,
        new_tokens=32,
        num_steps=2,
        contenders=(TAUT, UNSHARED, Contender("trl", "batch")),
    ),
    Case("silent, 256", 256, is_half_silent=True, contenders=(TAUT, EVERYTHING, ACCUMULATED)),
    Case("reference, 256", 256, divergence=0.04, target=4.0),
    Case("135M, 256", 256, model=None, num_steps=2, target=4.0),
    Case("135M, 1024", 1024, model=None, num_steps=2, target=6.0),
    *_groups(256, (TAUT, ACCUMULATED)),
    *_groups(1024, (TAUT,)),
)
QUICK = (replace(CASES[0], contenders=(TAUT, ACCUMULATED)),)


@dataclass
class Measured:
    """A contender's runs on a case."""

    runs: list[Result] = field(default_factory=list)
    error: str | None = None

    def of_step(self, what: str) -> float:
        """Of a step."""
        return median_of_steps(self.runs, what)

    def summary(self) -> Result:
        """Its line of the table."""
        if not self.runs:
            return {"error": self.error}
        names = ["seconds", "cpu_seconds", "reward"]
        names += [f"{phase}{suffix}" for phase in PHASES for suffix in ("", "_cpu")]
        return {
            **{name: self.of_step(name) for name in names},
            # Of all steps: each contender has the same prompts in an order of its own.
            "entropy": median(fmean(s["entropy"] for s in run["steps"]) for run in self.runs),
            **memory_of(self.runs),
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
        rate=bench.rate,
        show=lambda run: (
            f"{Measured([run]).of_step('seconds'):7.2f} s a step, {run['peak_mb']:6.0f} MB"
        ),
        rounds=rounds,
        tries=bench.tries,
    )
    table = {
        label: Measured(turns.chosen(label), turns.errors.get(label)).summary() | turns.state(label)
        for label in turns.runs
    }
    compare(table, ENTROPY_OF_WORDS if case.model is None else ENTROPY)
    return {
        "case": asdict(case),
        "contenders": table,
        "ratios": ratios(case, table),
        "memory": memory_line(table.get(TAUT.label, {}), case.peak_mb),
    }


def prepare(bench: Bench, case: Case) -> Result:
    """Prompts and model on disk, and the part of the job that all contenders have in common."""
    model = model_of(bench, case.model)
    prompts = bench.work / f"{case.name.replace(', ', '-')}.jsonl"
    count, half = case.prompts * case.num_steps, case.is_half_silent
    write_prompts(
        prompts,
        model,
        count=count,
        length=case.length,
        are_half_silent=half,
        turns=case.turns,
    )
    return {
        "model": str(model),
        "data": str(prompts),
        "prompts_per_step": case.prompts,
        "group": case.group,
        "new_tokens": case.new_tokens,
        "turns": case.turns,
        "tokens_after": case.after,
        "num_steps": case.num_steps,
        "learning_rate": 1e-5,
        "tokens_at_a_time": case.num_distinct // case.prompts,
        "trl": {"beta": case.divergence},
        "taut": {"kl_coef": case.divergence},
    }


def model_of(bench: Bench, model: Model | None) -> Path:
    if model is None:
        return get_model(Path("~/.cache/taut").expanduser())
    folder = bench.work / model.name
    if not folder.exists():
        data.write_model(model, folder)
    return folder


def run_once(bench: Bench, case: Case, contender: Contender, job: Result) -> Result:
    """One run of one contender, with as many tokens in every step as there should be."""
    script = f"train_{contender.framework}_grpo.py"
    run: Result = bench.run(script, contender.framework, job | contender.job)
    computed = case.num_completions
    if case.is_half_silent and contender == TAUT:
        computed //= 2
    sampled = case.turns * case.new_tokens if contender.framework == "taut" else case.after
    wanted = [computed * (case.length + case.after - sampled), computed * sampled]
    for number, step in enumerate(run["steps"], start=1):
        found = [step["prompt_tokens"], step["completion_tokens"]]
        if found != wanted:
            raise RuntimeError(f"{contender.label}: step {number}: {found} tokens, not {wanted}")
    if len(run["steps"]) != case.num_steps:
        raise RuntimeError(f"{contender.label}: {len(run['steps'])} steps, not {case.num_steps}")
    return run


def compare(table: dict[str, Result], most: float) -> None:
    """Whether what is sampled is as likely as what TRL samples."""
    done = {label: row for label, row in table.items() if "error" not in row}
    oracle = next((row for label, row in done.items() if label.startswith("trl")), None)
    for row in done.values():
        row["is_correct"] = None
        if oracle is not None:
            row["is_correct"] = abs(row["entropy"] / oracle["entropy"] - 1) <= most


def ratios(case: Case, table: dict[str, Result]) -> list[Result]:
    """taut beside TRL's fastest mode: the targets; and beside the others."""
    peers = {k: row for k, row in table.items() if k.startswith("trl") and row.get("is_correct")}
    if not peers:
        return []
    fastest = min(peers, key=lambda label: float(peers[label]["seconds"]))
    found = []
    shared = [name for name in table if is_taut(name) and table[name].get("is_correct")]
    for name, (label, row) in product(shared, peers.items()):
        ours = table[name]
        speed, memory = row["seconds"] / ours["seconds"], ours["peak_mb"] / row["peak_mb"]
        is_goal = label == fastest and name == TAUT.label and case.target is not None
        why = not_compared([ours, *peers.values()] if is_goal else [ours, row])
        is_met = not is_goal or bool(why) or speed >= (case.target or 0)
        cpu = row["cpu_seconds"] / ours["cpu_seconds"]
        found.append({
            "of": name, "to": label, "not_compared": why, "speed": speed, "cpu": cpu, "memory": memory,
            "is_goal": is_goal, "is_met": is_met,
        })  # fmt: skip
    return found


def measure_losses(bench: Bench) -> Result:
    """The losses of ``policies.py`` and their gradients, on one rollout of TRL's."""
    model, folder = model_of(bench, TINY), bench.work / "losses"
    folder.mkdir()
    prompts = folder / "prompts.jsonl"
    write_prompts(prompts, model, count=4, length=48)
    job = {
        "model": str(model),
        "data": str(prompts),
        "folder": str(folder),
        "group": 6,
        "new_tokens": 24,
        "moved": 0.5,
        "ends": list(range(data.EOS, 64)),
        "losses": {name: asdict(policy) for name, policy in POLICIES.items()},
    }
    theirs = bench.run("loss_trl_grpo.py", "trl", job)
    ours = bench.run("loss_taut_grpo.py", "taut", job)
    rows = {}
    for name, policy in POLICIES.items():
        expected, found = theirs["losses"][name], ours["losses"][name]
        off = abs(found["loss"] - expected) / max(1.0, abs(expected))
        is_equal = found["gradient"] <= TOLERANCE and (off <= TOLERANCE or not policy.has_value)
        rows[name] = found | {"trl": expected, "off": off, "is_equal": is_equal}
    return {"losses": rows, "num_targets": ours["num_targets"], "num_samples": ours["num_samples"]}


def print_case(name: str, result: Result) -> None:
    names = {
        "s a step": 10,
        "generation": 12,
        "scoring": 9,
        "training": 10,
        "CPU s": 8,
        "peak MB": 9,
        "w/o imports": 13,
    }
    columns = "".join(f"{name:>{width}}" for name, width in names.items())
    print(f"\n{name}\n{'':20}{columns}", flush=True)
    for label, row in result["contenders"].items():
        if "error" in row:
            print(f"  {label:18}  failed: {row['error'].splitlines()[-1]}")
            continue
        print(
            f"  {label:18}{row['seconds']:10.2f}{row['generation']:12.2f}{row['scoring']:9.2f}{row['training']:10.2f}"
            f"{row['cpu_seconds']:8.1f}{row['peak_mb']:9.0f}{row['peak_mb_above_imports']:13.0f}"
            f"  {'WRONG' if row['is_correct'] is False else ''}  {row['cpu_matmul']}"
        )
    for ratio in result["ratios"]:
        goals = f" ({verdict(ratio)})" if ratio["not_compared"] else ""
        if ratio["is_goal"]:
            goals = f" (target {result['case']['target']:g}: {verdict(ratio)})"
        print(
            f"  {ratio['of']}: {ratio['speed']:.2f} x as fast as {ratio['to']} ({ratio['cpu']:.2f} by CPU s), "
            f"{ratio['memory']:.0%} of its memory{goals}"
        )
    print_memory(result["memory"])


def print_growth(cases: dict[str, Result]) -> None:
    """taut's step against the size of a group: what one completion more costs."""
    rows = [
        (one["case"], one["contenders"][TAUT.label])
        for name, one in cases.items()
        if name.startswith(("small", "group"))
        and "seconds" in one["contenders"].get(TAUT.label, {})
    ]
    for length in sorted({case["length"] for case, _ in rows}):
        some = sorted((c["group"], row) for c, row in rows if c["length"] == length)
        print(
            f"\ntaut, prompts of {length}: a step by the size of a group, in CPU s; one completion more, in ms"
        )
        before: tuple[int, Result] | None = None
        for size, row in some:
            split = " ".join(f"{phase} {row[f'{phase}_cpu']:.2f}" for phase in PHASES)
            more = ""
            if before is not None:
                gap = row["cpu_seconds"] - before[1]["cpu_seconds"]
                more = f"  {1000 * gap / (PROMPTS * (size - before[0])):6.1f} ms"
            print(
                f"  {size:3}  {row['cpu_seconds']:6.2f}  ({split})  {row['peak_mb']:6.0f} MB{more}"
            )
            before = size, row


def print_losses(result: Result) -> None:
    sizes = f"{result['num_samples']} completions, {result['num_targets']} tokens"
    print(f"\nlosses ({sizes}): TRL's, ours, difference; gradients, distance / length; tokens held")
    for name, row in result["losses"].items():
        verdict = "" if row["is_equal"] else "  WRONG"
        print(
            f"  {name:14}{row['trl']:12.8f}{row['loss']:12.8f}{row['off']:10.1e}{row['gradient']:10.1e}"
            f"{row['held']:7.0%}{verdict}"
        )


def has_missed(result: Result) -> bool:
    """Whether taut missed a target, failed, or is not correct."""
    if "losses" in result:
        return not all(row["is_equal"] for row in result["losses"].values())
    ours = [row for label, row in result["contenders"].items() if label.startswith("taut")]
    lines = [*result["ratios"], *([result["memory"]] if result["memory"] else [])]
    return any("error" in row or row["is_correct"] is False for row in ours) or any(
        not line["is_met"] for line in lines
    )


def main() -> int:
    arguments = parse_arguments(__doc__, "grpo", "small, 256, beside one mode of TRL")
    results = begin(arguments)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        bench = make_bench(arguments, Path(work))
        for case in QUICK if arguments.quick else CASES:
            every = with_cpu_matmul(case.contenders, arguments.cpu_matmul)
            contenders = [c for c in every if matches(c.label, arguments.only)]
            if not matches(case.name, arguments.cases) or not contenders:
                continue
            found = measure(bench, case, contenders, arguments.rounds)
            print_case(case.name, found)
            results["cases"][case.name] = found
            arguments.out.write_text(json.dumps(results, indent=1))
        print_growth(results["cases"])
        if matches("losses", arguments.cases) and not arguments.only:
            results["losses"] = measure_losses(bench)
            print_losses(results["losses"])
    arguments.out.write_text(json.dumps(results, indent=1))
    print_uncompared(
        [line for case in results["cases"].values() for line in case["ratios"] if line["is_goal"]]
    )
    print(f"\n{arguments.out}")
    measured = [*results["cases"].values(), *([results["losses"]] if "losses" in results else [])]
    return int(any(has_missed(one) for one in measured))


if __name__ == "__main__":
    sys.exit(main())
