"""taut and transformers continue the same prompts with the same model: ``python benchmarks/generate.py``.

    shared    8 prompts of 256 tokens, 8 samples of each, 64 new tokens
    mixed     32 prompts of 32 to 512 tokens with nothing in common, 8 to 128 new tokens, each its own number

Each run is a process of its own, on CPU with the same threads; the contenders take turns, round after round, and draw
from the model's own distribution. No token ends a completion, so all generate equally many, which is checked. Reported
per contender, medians of rounds:

    tokens/s   new tokens over the time of the whole call, prompts included
    prefill    seconds until the prompts are computed, where that is a time of its own
    CPU s      seconds of processor time, which other work on the machine disturbs less
    memory     largest resident set of the process, and what of it came after the imports
    correct    greedy: no chosen token's logit is further below the largest than rounding goes; sampled: the ids are as
               likely as ids drawn from the model are; taut's log-probabilities are the model's

all of which the plain model says, on the same ids, one completion at a time in float32.
Results go to a JSON file and a table. Exit status 1 if a target was measured and missed, or taut is not correct.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from machine import (
    describe,
    memory_line,
    not_compared,
    print_machine,
    print_memory,
    print_uncompared,
    take_turns,
)
from machine import verdict as verdict_on
from sft import Bench, matches
from taut_tools.demo.fetch import get_model

Result = dict[str, Any]

TAUT, PADDED, CONTINUOUS = "taut", "transformers generate", "transformers continuous batching"
SCRIPTS = {
    TAUT: ("generate_taut.py", ""),
    PADDED: ("generate_transformers.py", "padded"),
    CONTINUOUS: ("generate_transformers.py", "continuous"),
}
GREEDY = {"prompts": 4, "tokens": 16}
NUM_SCORED = 8
"""Sampled completions of each contender that are held against the plain model."""
MAX_BELOW_TOP = {"float32": 1e-3, "bfloat16": 0.5}
MAX_LOGP_ERROR = 1e-4
"""In float32; in bfloat16 the plain model's own error there, and half as much again, is allowed (root mean squares)."""
MAX_DEVIATION = 5.0
"""Standard deviations by which the sampled ids may be less or more likely than ids of the model are."""
FIRST_ID, LAST_ID = 100, 49_000
"""Prompts are random ids: what they mean does not matter to the speed."""


@dataclass(frozen=True)
class Case:
    """What is continued, and how much faster than the faster peer taut shall be."""

    name: str
    dtype: str
    target: float
    peak_mb: float
    """Peak memory of taut, at most."""
    num_samples: int
    prompts: list[list[int]] = field(repr=False)
    new_tokens: list[int] = field(repr=False)

    @property
    def num_new(self) -> int:
        return self.num_samples * sum(self.new_tokens)


def shared(dtype: str) -> Case:
    rng = random.Random(0)
    prompts = [_ids(rng, 256) for _ in range(8)]
    return Case(
        f"shared, {dtype}",
        dtype,
        2.8,
        {"float32": 1280, "bfloat16": 1169}[dtype],
        8,
        prompts,
        [64] * 8,
    )


def mixed(dtype: str) -> Case:
    rng = random.Random(1)
    lengths = [round(math.exp(rng.uniform(math.log(32), math.log(512)))) for _ in range(32)]
    prompts = [_ids(rng, length) for length in lengths]
    new_tokens = [rng.randint(8, 128) for _ in range(32)]
    return Case(
        f"mixed, {dtype}",
        dtype,
        1.6,
        {"float32": 1312, "bfloat16": 1169}[dtype],
        1,
        prompts,
        new_tokens,
    )


def _ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(FIRST_ID, LAST_ID) for _ in range(length)]


def measure(bench: Bench, model: Path, case: Case, labels: Sequence[str], rounds: int) -> Result:
    """All contenders on one case, in alternation."""

    def run_of(label: str) -> Callable[[int], Result]:
        return lambda turn: run_once(bench, model, case, label, turn)

    turns = take_turns(
        case.name,
        {label: run_of(label) for label in labels},
        rate=bench.rate,
        show=lambda run: f"{case.num_new / run['seconds']:7.1f} tokens/s",
        rounds=rounds,
        tries=bench.tries,
    )
    found = {
        label: summarize(case, turns.chosen(label)) | turns.state(label)
        for label, some in turns.runs.items()
        if some
    }
    for label, right in check(bench, model, case, turns.runs).items():
        found[label] |= right
    found |= {label: {"error": turns.errors[label]} for label in turns.errors if label not in found}
    return {
        "contenders": found,
        "ratio": ratio(case, found),
        "memory": memory_line(found.get(TAUT, {}), case.peak_mb),
    }


def run_once(bench: Bench, model: Path, case: Case, label: str, turn: int) -> Result:
    """One run of one contender, with the right number of tokens."""
    script, mode = SCRIPTS[label]
    job = {
        "model": str(model),
        "dtype": case.dtype,
        "mode": mode,
        "prompts": case.prompts,
        "new_tokens": case.new_tokens,
        "num_samples": case.num_samples,
        "seed": turn,
        "greedy": GREEDY if turn == 0 else None,
    }
    run: Result = bench.run(script, "taut", job)
    lengths = [[len(ids) for ids in some] for some in run["completions"]]
    if lengths != [[length] * case.num_samples for length in case.new_tokens]:
        raise RuntimeError(f"{label}: not as many tokens as asked for: {lengths}")
    return run


def summarize(case: Case, runs: Sequence[Result]) -> Result:
    """A contender's line of the table."""
    seconds = median(run["seconds"] for run in runs)
    prefills = [run["prefill_seconds"] for run in runs if run["prefill_seconds"] is not None]
    prefill = median(prefills) if prefills else None
    return {
        "tokens_per_second": case.num_new / seconds,
        "seconds": seconds,
        "prefill_seconds": prefill,
        "cpu_seconds": median(run["cpu_seconds"] for run in runs),
        "decode_seconds": None if prefill is None else seconds - prefill,
        "all_seconds": [run["seconds"] for run in runs],
        "peak_mb": median(run["peak_mb"] for run in runs),
        "peak_mb_above_imports": median(run["peak_mb"] - run["import_mb"] for run in runs),
    }


def check(
    bench: Bench, model: Path, case: Case, runs: dict[str, list[Result]]
) -> dict[str, Result]:
    """What the plain model says to each contender's first run."""
    rows, owners = [], []
    for label, some in runs.items():
        if not some:
            continue
        every = max(1, len(case.prompts) // NUM_SCORED)
        for number in range(0, len(case.prompts), every):
            ids = some[0]["completions"][number][0]
            rows.append({"prompt": case.prompts[number], "completion": ids})
            owners.append((label, "sampled", number))
        for number, (ids,) in enumerate(some[0]["greedy"]):
            rows.append({"prompt": case.prompts[number], "completion": ids})
            owners.append((label, "greedy", number))
    job = {"model": str(model), "dtype": case.dtype, "rows": rows}
    scored = list(zip(owners, bench.run("generate_reference.py", "taut", job), strict=True))
    return {
        label: judge(case, some[0], [(kind, at, row) for (who, kind, at), row in scored if who == label])
        for label, some in runs.items()
        if some
    }  # fmt: skip


def judge(case: Case, run: Result, scored: Sequence[tuple[str, int, Result]]) -> Result:
    """One contender's completions, held against the plain model."""
    below = [x for kind, _, row in scored if kind == "greedy" for x in row["below_top"]]
    sampled = [(at, row) for kind, at, row in scored if kind == "sampled"]
    surplus = sum(sum(row["logp"]) + sum(row["entropy"]) for _, row in sampled)
    deviation = surplus / math.sqrt(sum(sum(row["variance"]) for _, row in sampled))
    found: Result = {
        "greedy_same": sum(x == 0 for x in below) / len(below),
        "greedy_max_below_top": max(below),
        "sampled_deviation": deviation,
    }
    found["is_correct"] = max(below) <= MAX_BELOW_TOP[case.dtype] and abs(deviation) < MAX_DEVIATION
    if run["logp"]:
        ours = [x for at, _ in sampled for x in run["logp"][at][0]]
        exact, plain = (
            [x for _, row in sampled for x in row[key]] for key in ("logp", "logp_in_dtype")
        )
        found["max_logp_error"] = max(abs(a - b) for a, b in zip(ours, exact, strict=True))
        found["rms_logp_error"] = rms(ours, exact)
        found["rms_logp_error_of_plain"] = rms(plain, exact)
        limit, value = MAX_LOGP_ERROR, found["max_logp_error"]
        if case.dtype == "bfloat16":
            limit, value = 1.5 * found["rms_logp_error_of_plain"], found["rms_logp_error"]
        found["is_correct"] &= value <= limit
    return found


def rms(found: Sequence[float], expected: Sequence[float]) -> float:
    return math.sqrt(fmean((a - b) ** 2 for a, b in zip(found, expected, strict=True)))


def ratio(case: Case, table: dict[str, Result]) -> Result | None:
    """taut's speed over that of the faster correct peer."""
    peers = {k: v for k, v in table.items() if k != TAUT and v.get("is_correct")}
    if not peers or "tokens_per_second" not in table.get(TAUT, {}):
        return None
    best = max(peers, key=lambda label: float(peers[label]["tokens_per_second"]))
    value = table[TAUT]["tokens_per_second"] / peers[best]["tokens_per_second"]
    why = not_compared([table[TAUT], *peers.values()])
    is_met = bool(why) or value >= case.target
    return {
        "to": best,
        "value": value,
        "target": case.target,
        "not_compared": why,
        "is_met": is_met,
    }


def print_case(name: str, result: Result) -> None:
    columns = f"{'tokens/s':>9}{'seconds':>9}{'prefill':>9}{'decode':>8}{'CPU s':>8}{'peak MB':>9}{'w/o imports':>13}"
    print(f"\n{name}\n{'':36}{columns}  correct")
    for label, row in result["contenders"].items():
        if "error" in row:
            print(f"  {label:34}  failed: {row['error'].splitlines()[-1]}")
            continue
        split = [row["prefill_seconds"], row["decode_seconds"]]
        prefill, decode = (f"{'' if x is None else format(x, '.1f')}" for x in split)
        print(
            f"  {label:34}{row['tokens_per_second']:9.1f}{row['seconds']:9.1f}{prefill:>9}{decode:>8}"
            f"{row['cpu_seconds']:8.1f}{row['peak_mb']:9.0f}{row['peak_mb_above_imports']:13.0f}"
            f"  {verdict(row)}; {row['cpu_matmul']}"
        )
    if result["ratio"]:
        to, value, target = (result["ratio"][key] for key in ("to", "value", "target"))
        print(f"  taut: {value:.2f} x {to} (target {target:g}: {verdict_on(result['ratio'])})")
    print_memory(result["memory"])


def verdict(row: Result) -> str:
    """What the plain model said, in a few words."""
    parts = [
        f"greedy {row['greedy_same']:.0%} the same, at most {row['greedy_max_below_top']:.1e} below",
        f"sampled {row['sampled_deviation']:+.1f} sigma",
    ]
    if "max_logp_error" in row:
        parts.append(
            f"logprobs to {row['max_logp_error']:.1e}, rms {row['rms_logp_error']:.1e} "
            f"(plain in this dtype {row['rms_logp_error_of_plain']:.1e})"
        )
    return ("yes" if row["is_correct"] else "NO") + " (" + "; ".join(parts) + ")"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--cases", nargs="*", default=[], help="words: cases whose name has one of them"
    )
    parser.add_argument(
        "--only", nargs="*", default=[], help="words: contenders whose name has one of them"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--tries", type=int, default=3, help="rounds more, at most, of what cannot be compared"
    )
    parser.add_argument(
        "--cache", type=Path, default=Path("~/.cache/taut"), help="where the demo keeps the model"
    )
    parser.add_argument("--out", type=Path, default=Path(".cache/benchmarks/generate.json"))
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    model = get_model(arguments.cache.expanduser())
    cases = [make(dtype) for dtype in ("float32", "bfloat16") for make in (shared, mixed)]
    labels = [label for label in SCRIPTS if matches(label, arguments.only)]
    machine = describe(arguments.threads)
    print_machine(machine)
    results: Result = {"machine": machine, "threads": arguments.threads, "cases": {}}
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(
            arguments.cache.expanduser(),
            Path(work),
            arguments.threads,
            "float32",
            tries=arguments.tries,
        )
        for case in cases:
            if matches(case.name, arguments.cases):
                result = measure(bench, model, case, labels, arguments.rounds)
                results["cases"][case.name] = result
    for name, result in results["cases"].items():
        print_case(name, result)
    print_uncompared([one["ratio"] for one in results["cases"].values() if one["ratio"]])
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=1))
    print(f"\n{arguments.out}")
    return int(any(has_missed(result) for result in results["cases"].values()))


def has_missed(result: Result) -> bool:
    """Whether taut missed its target, failed, or is not correct."""
    ours = result["contenders"].get(TAUT)
    is_wrong = ours is not None and not ours.get("is_correct")
    lines = [line for line in (result["ratio"], result["memory"]) if line]
    return is_wrong or any(not line["is_met"] for line in lines)


if __name__ == "__main__":
    sys.exit(main())
