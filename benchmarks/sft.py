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
from data import LARGE, SMALL, Model, Row
from peers.environments import PEERS, python_of
from report import (
    CONTENDERS,
    TAUT,
    TAUT_UNSHARED,
    Contender,
    Measured,
    Result,
    Targets,
    print_case,
    print_scaling,
    ratios,
    summarise,
    utilisation,
)

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

    def rows(self) -> list[Row]:
        return self.make_rows(self.size, self.model.vocab)

    @property
    def packs_per_step(self) -> int:
        return SAMPLES_PER_STEP // self.rows_per_pack

    def contenders(self) -> tuple[Contender, ...]:
        is_shared = self.make_rows is data.reading_rows
        return (*CONTENDERS, TAUT_UNSHARED) if is_shared else CONTENDERS


CASES = (
    Case("chat, small", SMALL, data.chat_rows, 80, 8, Targets(5.3, 1.5, 0.40)),
    Case("reading, small", SMALL, data.reading_rows, 5, 2, Targets(8, 5, 0.40)),
    Case("chat, large-vocab", LARGE, data.chat_rows, 24, 8, Targets(3.5, 1.4, 0.60), 2),
    Case("reading, large-vocab", LARGE, data.reading_rows, 3, 2, Targets(8, 5, 0.60), 1),
)
QUICK = (
    Case("chat, small", SMALL, data.chat_rows, 32, 8, Targets(5.3, 1.5, 0.40), 1),
    Case("reading, small", SMALL, data.reading_rows, 3, 2, Targets(8, 5, 0.40), 1),
)


@dataclass(frozen=True)
class Bench:
    """Where things are and what all runs have in common."""

    cache: Path
    work: Path
    threads: int
    dtype: str

    def python(self, framework: str) -> Path:
        own = framework not in ("trl", "llamafactory")
        return Path(sys.executable) if own else python_of(framework, self.cache)

    def run(self, script: str, framework: str, job: dict[str, Any]) -> Any:
        """Run a worker on a job; its result, or a RuntimeError with the end of what it printed."""
        with tempfile.TemporaryDirectory(dir=self.work) as scratch:
            result, job_file = Path(scratch, "result.json"), Path(scratch, "job.json")
            whole = {
                "threads": self.threads,
                "dtype": self.dtype,
                "result": str(result),
                "scratch": str(Path(scratch, "out")),
                **job,
            }
            job_file.write_text(json.dumps(whole))
            command = [str(self.python(framework)), str(PEERS / script), str(job_file)]
            done = subprocess.run(
                command, env=self._environment(scratch), capture_output=True, text=True, check=False
            )
            if done.returncode or not result.exists():
                raise RuntimeError(f"{script} failed:\n" + "\n".join(done.stderr.splitlines()[-8:]))
            return json.loads(result.read_text())

    def _environment(self, scratch: str) -> dict[str, str]:
        return os.environ | {
            "OMP_NUM_THREADS": str(self.threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "CUDA_VISIBLE_DEVICES": "",
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
        "samples_per_step": SAMPLES_PER_STEP,
        "num_steps": ceil(len(rows) / SAMPLES_PER_STEP),
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
    measured = {contender: Measured(contender, bench.dtype) for contender in contenders}
    work = flops.necessary(list(steps_of(rows))[1:])
    limits: list[Result] = []
    for turn in range(case.num_rounds):
        for contender, into in measured.items():
            if into.error:
                continue
            try:
                script = f"train_{contender.framework}.py"
                run = bench.run(script, contender.framework, job | {"mode": contender.mode})
            except RuntimeError as error:
                into.error = str(error)
                print(f"{case.name}: {contender.label}: {error}", file=sys.stderr, flush=True)
                continue
            into.runs.append(run)
            speed = Measured(contender, bench.dtype, [run]).tokens_per_second(rows)
            print(
                f"{case.name}, round {turn + 1}: {contender.label:26} {speed:8.0f} tokens/s",
                flush=True,
            )
        limit_job = {
            "shapes": flops.shapes(case.model, work),
            "num_parameters": flops.num_parameters(case.model),
        }
        limits.append(bench.run("matmul.py", "taut", limit_job))
    done = [m for m in measured.values() if m.runs]
    compare_with_reference(bench, job, rows, done)
    table = {c.label: summarise(rows, one) for c, one in measured.items()}
    result: Result = {
        "model": asdict(case.model),
        "contenders": table,
        "ratios": ratios(table, case.targets),
    }
    if TAUT in measured and measured[TAUT].runs:
        seconds = measured[TAUT].step_seconds
        result["utilisation"] = utilisation(case.model, work, limits, seconds)
    return result


def steps_of(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    for start in range(0, len(rows), SAMPLES_PER_STEP):
        yield rows[start : start + SAMPLES_PER_STEP]


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
    case = Case("scaling", SMALL, data.reading_rows, 8, 2, Targets(0, 0, 0))
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
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--cache", type=Path, default=Path(".cache"), help="holds the peers' environments"
    )
    parser.add_argument("--out", type=Path, default=Path(f".cache/benchmarks/{name}.json"))
    return parser.parse_args()


def main() -> int:
    quick = "the small model, few steps, one round"
    arguments = parse_arguments(__doc__, "sft", quick, rounds=None)
    results: Result = {"threads": arguments.threads, "dtype": arguments.dtype, "cases": {}}
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(arguments.cache.absolute(), Path(work), arguments.threads, arguments.dtype)
        for case in QUICK if arguments.quick else CASES:
            if not matches(case.name, arguments.cases):
                continue
            chosen = [c for c in case.contenders() if matches(c.label, arguments.only)]
            case = replace(case, num_rounds=arguments.rounds or case.num_rounds)
            results["cases"][case.name] = measure(bench, case, chosen)
        if matches("scaling", arguments.cases) and matches(TAUT.label, arguments.only):
            results["scaling"] = scaling(bench)
    for name, result in results["cases"].items():
        print_case(name, result)
    if "scaling" in results:
        print_scaling(results["scaling"])
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=1))
    print(f"\n{arguments.out}")
    return int(any(has_missed(case) for case in results["cases"].values()))


def has_missed(case: Result) -> bool:
    """Whether taut missed a target, failed, or started at another loss than the reference."""
    ours = [row for label, row in case["contenders"].items() if label.startswith("taut")]
    return any(not row.get("is_correct") for row in ours) or any(
        not ratio["is_met"] for ratio in case["ratios"]
    )


def matches(name: str, words: Sequence[str]) -> bool:
    return not words or any(word in name for word in words)


if __name__ == "__main__":
    sys.exit(main())
