"""taut and its peers train the same models on the same rows: ``python benchmarks/sft.py [--quick]``.

Each run is a process of its own, in its own environment, on CPU with the same threads; the
contenders take turns, round after round. A run goes once over its rows; the first step warms up and
is not timed. Reported per contender:

    tokens/s   the rows' own tokens (no pads; a shared prefix counted for every row) over the timed
               seconds, median of rounds
    memory     largest resident set of the process, and what of it came after the imports
    correct    whether the first step's loss is that of its rows run one at a time through the
               plain model

Also: how much of the machine's own matmul rate taut's step reaches, and how its time grows with
distinct tokens.
Results go to a JSON file and a table. Exit status 1 if a target was measured and missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from statistics import mean, median
from typing import Any

import data
import flops
from data import LARGE, LONG, SMALL, WIDE, Model, Row
from machine import (
    Rate,
    describe,
    memory_line,
    not_compared,
    print_machine,
    print_uncompared,
    take_turns,
)
from peers.environments import PEERS, python_of
from report import (
    CONTENDERS,
    TAUT,
    TAUT_UNSHARED,
    TRL_DEFAULT,
    Contender,
    Measured,
    Result,
    Targets,
    print_case,
    print_scaling,
    ratios,
    summarize,
    utilization,
    with_cpu_matmul,
)
from taut.io import threads

SAMPLES_PER_STEP = 8


@dataclass(frozen=True)
class Case:
    """Rows, a model, and how the peers that pack shall pack."""

    name: str
    model: Model
    make_rows: Callable[[int, int], list[Row]]
    size: int
    """Rows of chats, or documents."""
    rows_per_pack: int
    """How many mean rows a packed block holds: chosen so that blocks come out full."""
    targets: Targets
    num_rounds: int = 3
    samples_per_step: int = SAMPLES_PER_STEP
    peers: tuple[Contender, ...] = CONTENDERS[1:]

    def rows(self) -> list[Row]:
        return self.make_rows(self.size, self.model.vocab)

    @property
    def packs_per_step(self) -> int:
        return self.samples_per_step // self.rows_per_pack

    def contenders(self) -> tuple[Contender, ...]:
        is_shared = self.make_rows is data.reading_rows
        return (TAUT, *self.peers, *([TAUT_UNSHARED] if is_shared else []))


CHAT = Targets(6.5, 1.8, peak_mb=1162, products=0.65)
READING = Targets(10, 10, peak_mb=836)
FEW = (TRL_DEFAULT, CONTENDERS[-1])
CASES = (
    Case("chat, small", SMALL, data.chat_rows, 80, 8, CHAT),
    Case("reading, small", SMALL, data.reading_rows, 5, 2, READING),
    Case("chat, 1024", WIDE, data.chat_rows, 24, 8, Targets(products=0.80), 1, peers=FEW),
    Case(
        "long, small",
        LONG,
        data.long_rows,
        6,
        2,
        Targets(),
        1,
        samples_per_step=2,
        # What packs or pads has a dense mask of 10^9 numbers here.
        peers=(Contender("trl", "single"),),
    ),
    Case("chat, large-vocab", LARGE, data.chat_rows, 24, 8, Targets(4, 1.6), 2),
    Case("reading, large-vocab", LARGE, data.reading_rows, 3, 2, Targets(10, 10), 1),
)
QUICK = (
    Case("chat, small", SMALL, data.chat_rows, 32, 8, CHAT, 1),
    Case("reading, small", SMALL, data.reading_rows, 3, 2, READING, 1),
)


@dataclass(frozen=True)
class Bench:
    """Where things are and what all runs have in common."""

    cache: Path
    work: Path
    threads: int
    dtype: str
    cpu_matmul: str | None = None
    """The library of taut's products; None: as each run chooses."""
    tries: int = 3
    """Rounds more, at most, of what cannot be compared."""
    device: str = "cpu"
    """On another one every worker runs in this interpreter, whose torch knows the device."""

    def python(self, framework: str) -> Path:
        own = framework not in ("trl", "llamafactory") or self.device != "cpu"
        return Path(sys.executable) if own else python_of(framework, self.cache)

    def run(self, script: str, framework: str, job: dict[str, Any], num_ranks: int = 1) -> Any:
        """Run a worker on a job; its result, or a RuntimeError with the end of what it printed.

        Several ranks divide the threads, and the first one writes the result.
        """
        with tempfile.TemporaryDirectory(dir=self.work) as scratch:
            result, job_file = Path(scratch, "result.json"), Path(scratch, "job.json")
            num_threads = max(1, self.threads // num_ranks)
            whole = {
                "threads": num_threads,
                "dtype": self.dtype,
                "result": str(result),
                "scratch": str(Path(scratch, "out")),
                **({"cpu_matmul": self.cpu_matmul} if self.cpu_matmul else {}),
                **job,
            }
            job_file.write_text(json.dumps(whole))
            ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
            launcher = [*ranks, str(num_ranks)] if num_ranks > 1 else []
            command = [str(self.python(framework)), *launcher, str(PEERS / script), str(job_file)]
            environment = self._environment(scratch, num_threads)
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode or not result.exists():
                raise RuntimeError(f"{script} failed:\n" + "\n".join(done.stderr.splitlines()[-8:]))
            return json.loads(result.read_text())

    def rate(self) -> Rate:
        """How fast the machine is now."""
        return Rate(**self.run("rate.py", "taut", {}))

    def _environment(self, scratch: str, num_threads: int) -> dict[str, str]:
        return os.environ | {
            "OMP_NUM_THREADS": str(num_threads),
            # For all contenders what the taut command sets on a quiet machine: threads that sleep at once slow each
            # of them down.
            threads.ROUNDS: str(threads.QUIET_ROUNDS),
            **({"CUDA_VISIBLE_DEVICES": ""} if self.device == "cpu" else {}),
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(Path(scratch, "hub")),
            "TOKENIZERS_PARALLELISM": "false",
        }


def prepare(bench: Bench, case: Case) -> tuple[list[Row], dict[str, Any]]:
    """Rows and model on disk, and the part of the job that all contenders have in common."""
    rows = case.rows()
    model, folder = bench.work / case.model.name, bench.work / case.name.replace(", ", "-")
    if not model.exists():
        data.write_model(case.model, model)
    data.write_rows(rows, folder)
    lengths = [len(row.ids) for row in rows]
    # A multiple of 8, which LLaMA-Factory needs; 2% of room, or the last rows would start a
    # block of their own.
    full = ceil(1.02 * mean(lengths) * case.rows_per_pack / 8) * 8
    job = {
        "model": str(model),
        "data": str(folder),
        "samples_per_step": case.samples_per_step,
        "num_steps": ceil(len(rows) / case.samples_per_step),
        "pack_length": max(full, ceil(max(lengths) / 8) * 8),
        "packs_per_step": case.packs_per_step,
        "learning_rate": 1e-4,
        "pad": data.PAD,
        "bos": data.BOS,
    }
    return rows, job


def measure(bench: Bench, case: Case, contenders: Sequence[Contender]) -> Result:
    """All contenders on one case, in alternation."""
    rows, job = prepare(bench, case)
    work = flops.necessary(list(steps_of(rows, case.samples_per_step))[1:])
    limit_job = {
        "shapes": flops.shapes(case.model, work),
        "num_parameters": flops.num_parameters(case.model),
    }

    def run_of(contender: Contender) -> Callable[[int], Result]:
        def run(_: int) -> Result:
            script = f"train_{contender.framework}.py"
            done: Result = bench.run(script, contender.framework, job | contender.job)
            if contender == TAUT:
                # At once, so that it is of the same state.
                done["limit"] = bench.run("matmul.py", "taut", limit_job)
            return done

        return run

    def show(run: Result) -> str:
        speed = Measured(TAUT, bench.dtype, [run]).tokens_per_second(rows)
        return f"{speed:8.0f} tokens/s"

    turns = take_turns(
        case.name,
        {one.label: run_of(one) for one in contenders},
        rate=bench.rate,
        show=show,
        rounds=case.num_rounds,
        tries=bench.tries,
    )
    measured = [
        Measured(one, bench.dtype, turns.chosen(one.label), turns.errors.get(one.label))
        for one in contenders
    ]
    compare_with_reference(bench, job, rows, [one for one in measured if one.runs])
    table = {
        one.contender.label: summarize(rows, one, turns.state(one.contender.label))
        for one in measured
    }
    ours = table.get(TAUT.label, {})
    result: Result = {
        "model": asdict(case.model),
        "contenders": table,
        "ratios": ratios(table, case.targets),
        "memory": memory_line(ours, case.targets.peak_mb),
    }
    if "error" not in ours and ours:
        limits = [run["limit"] for run in ours["runs"]]
        result["utilization"] = utilization(
            case.model,
            work,
            limits,
            ours["step_seconds"],
            case.targets.products,
            not_compared([ours]),
        )
    return result


def steps_of(rows: Sequence[Row], size: int) -> Iterator[Sequence[Row]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def compare_with_reference(
    bench: Bench, job: dict[str, Any], rows: Sequence[Row], measured: Sequence[Measured]
) -> None:
    """The plain model's loss over the rows of each first step (packing chooses its own)."""
    wanted = sorted({k for one in measured for k in one.first["rows"]})
    sums = bench.run("reference.py", "taut", job | {"rows": wanted})
    for one in measured:
        chosen = one.first["rows"]
        num_targets = sum(rows[k].num_targets for k in chosen)
        one.reference_loss = sum(sums[str(k)] for k in chosen) / num_targets


def scaling(bench: Bench) -> list[Result]:
    """taut's seconds per step on 1, 2, 4 and 8 documents a step."""
    case = Case("scaling", SMALL, data.reading_rows, 8, 2, Targets())
    rows, job = prepare(bench, case)
    found = []
    for documents in (1, 2, 4, 8):
        sizes = {"samples_per_step": 8 * documents, "num_steps": max(4, 8 // documents)}
        run = bench.run("train_taut.py", "taut", job | sizes | {"mode": TAUT.mode})
        steps = run["steps"][1:]
        found.append({
            "documents": documents,
            "tokens": mean(sum(len(rows[k].ids) for k in step["rows"]) for step in steps),
            "distinct_tokens": mean(step["num_tokens"] for step in steps),
            "seconds": median(step["seconds"] for step in steps),
        })  # fmt: skip
    return found


def parse_arguments(
    doc: str | None, name: str, quick: str, rounds: int | None = 1
) -> argparse.Namespace:
    """The words of ``NAME.py``, with the first line of its docstring and what its ``--quick`` is."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument(
        "--cases", nargs="*", default=[], help="words: cases whose name has one of them"
    )
    parser.add_argument(
        "--only", nargs="*", default=[], help="words: contenders whose name has one of them"
    )
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds of every case")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--tries", type=int, default=3, help="rounds more, at most, of what cannot be compared"
    )
    parser.add_argument(
        "--cpu-matmul",
        choices=["auto", "mkl", "onednn", "both"],
        help="taut's library of float32 products; both: turns with each",
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--cache", type=Path, default=Path(".cache"), help="holds the peers' environments"
    )
    parser.add_argument("--out", type=Path, default=Path(f".cache/benchmarks/{name}.json"))
    return parser.parse_args()


def begin(arguments: argparse.Namespace) -> Result:
    """Name the machine; the results that are to be filled."""
    machine = describe(arguments.threads)
    print_machine(machine)
    return {
        "machine": machine,
        "threads": arguments.threads,
        "dtype": arguments.dtype,
        "cpu_matmul": arguments.cpu_matmul,
        "cases": {},
    }


def make_bench(arguments: argparse.Namespace, work: Path) -> Bench:
    cpu_matmul = None if arguments.cpu_matmul == "both" else arguments.cpu_matmul
    return Bench(
        arguments.cache.absolute(),
        work,
        arguments.threads,
        arguments.dtype,
        cpu_matmul,
        arguments.tries,
    )


def main() -> int:
    quick = "the small model, few steps, one round"
    arguments = parse_arguments(__doc__, "sft", quick, rounds=None)
    results = begin(arguments)
    with tempfile.TemporaryDirectory() as work:
        bench = make_bench(arguments, Path(work))
        for case in QUICK if arguments.quick else CASES:
            if not matches(case.name, arguments.cases):
                continue
            contenders = with_cpu_matmul(case.contenders(), arguments.cpu_matmul)
            chosen = [c for c in contenders if matches(c.label, arguments.only)]
            case = replace(case, num_rounds=arguments.rounds or case.num_rounds)
            results["cases"][case.name] = measure(bench, case, chosen)
        if matches("scaling", arguments.cases) and matches(TAUT.label, arguments.only):
            results["scaling"] = scaling(bench)
    for name, result in results["cases"].items():
        print_case(name, result)
    if "scaling" in results:
        print_scaling(results["scaling"])
    print_uncompared([line for case in results["cases"].values() for line in with_targets(case)])
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=1))
    print(f"\n{arguments.out}")
    return int(any(has_missed(case) for case in results["cases"].values()))


def has_missed(case: Result) -> bool:
    """Whether taut missed a target, failed, or started at another loss than the reference."""
    ours = [row for label, row in case["contenders"].items() if label.startswith("taut")]
    return any(not row.get("is_correct") for row in ours) or any(
        not line["is_met"] for line in with_targets(case)
    )


def with_targets(case: Result) -> list[Result]:
    """The lines that have a target."""
    lines = [*case["ratios"], case["memory"], case.get("utilization")]
    return [line for line in lines if line and line["target"]]


def matches(name: str, words: Sequence[str]) -> bool:
    return not words or any(word in name for word in words)


if __name__ == "__main__":
    sys.exit(main())
