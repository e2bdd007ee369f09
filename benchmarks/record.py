"""What recording costs a run: ``python benchmarks/record.py``.

    sft     chats, 4 layers of 256, a vocabulary of 8,192, 8 samples a step
    grpo    8 prompts of 256 tokens, 8 completions of 64 tokens each

Each case is one run with the settings as they come (``log.tokens``, ``log.rollouts``) in a process of its own. The
seconds within the recorder are measured and compared with those of the steps, so that other work on the machine
disturbs both alike:

    of a step    seconds of the recorder / seconds of all steps but the first, in %
    CPU          the same by the thread's processor seconds
    bytes        of the sealed tables, per recorded token

Exit status 1 if recording takes more than 2% of the steps' time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from asked import write_prompts
from data import SMALL, chat_rows, write_model, write_rows
from taut.commands.train import train
from taut.config import from_mapping
from taut.io.tables import read_tables
from taut.methods import METHODS
from taut.train.log import read_events
from taut.train.recorder import Recorder

Result = dict[str, Any]

LIMIT = 0.02
OFF = {"check": "off", "stop_check.prompts": 0, "contract.prompts": 0, "checkpoint.every": 0}
COMMON = {"dtype": "float32", "device": "cpu", "log.console": False, **OFF}
CASES: dict[str, Result] = {
    "sft": {"batch.samples_per_step": 8, "steps": 150},
    "grpo": {
        "batch.samples_per_step": 8,
        "steps": 12,
        "rollout.n": 8,
        "rollout.max_new_tokens": 64,
        "rewards": f"{Path(__file__).with_name('peers') / 'reward.py'}:share_of_marks",
        "grading.workers": 1,
    },
}
TIMED = ("look", "__call__", "add_rollouts", "sync", "close")
"""The recorder's methods that a run calls."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=Path(".cache/benchmarks/record.json"))
    given = parser.parse_args()
    results = []
    for name in given.cases:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            results.append(pool.submit(measure, name, given.threads).result())
        print_case(results[-1])
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(results, indent=1))
    return int(any(result["share"] > LIMIT for result in results))


def measure(name: str, threads: int) -> Result:
    """One run."""
    torch.set_num_threads(threads)
    spent = {"seconds": 0.0, "cpu_seconds": 0.0}
    for method in TIMED:
        setattr(Recorder, method, timed(getattr(Recorder, method), spent))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_model(SMALL, place / "model")
        out, source = place / "out", place / "messages.jsonl"
        if name == "sft":
            write_rows(chat_rows(8 * CASES[name]["steps"], SMALL.vocab), place)
        else:
            write_prompts(source, place / "model", count=96, length=256)
        fixed = {"model": str(place / "model"), "data.train": str(source), "out": str(out)}
        train(from_mapping(METHODS[name], {**fixed, **COMMON, **CASES[name]}))
        steps = [e for e in read_events(out / "events.jsonl") if e["kind"] == "step"]
        whole = sum(event["seconds"] for event in steps[1:])
        tables = {t: table(out / t) for t in ("tokens/rank-00000", "rollouts")}
    return {
        "case": name,
        "steps": len(steps),
        "seconds": whole,
        "recorder": spent["seconds"],
        "recorder_cpu": spent["cpu_seconds"],
        "share": spent["seconds"] / whole,
        "tables": {key: value for key, value in tables.items() if value is not None},
    }


def timed(method: Callable[..., Any], spent: dict[str, float]) -> Callable[..., Any]:
    """The method, which adds its seconds."""

    def call(*arguments: Any, **options: Any) -> Any:
        began, cpu_began = time.perf_counter(), time.thread_time()
        try:
            return method(*arguments, **options)
        finally:
            spent["seconds"] += time.perf_counter() - began
            spent["cpu_seconds"] += time.thread_time() - cpu_began

    return call


def table(folder: Path) -> Result | None:
    """The size of a table: its rows, their tokens, the bytes of its files."""
    if not folder.is_dir():
        return None
    sizes = [len(ids) for b in read_tables(folder, ["ids_T"]) for ids in b["ids_T"].to_pylist()]
    num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    return {"rows": len(sizes), "tokens": sum(sizes), "bytes": num_bytes}


def print_case(result: Result) -> None:
    print(
        f"{result['case']}: {result['steps']} steps in {result['seconds']:.1f} s, recorder "
        f"{result['recorder']:.2f} s ({result['recorder_cpu']:.2f} s CPU): {result['share']:.2%} of them "
        f"(at most {LIMIT:.0%}: {'met' if result['share'] <= LIMIT else 'MISSED'})"
    )
    for name, size in result["tables"].items():
        print(
            f"  {name}: {size['rows']:,} rows, {size['tokens']:,} tokens, {size['bytes']:,} bytes: "
            f"{size['bytes'] / size['tokens']:.1f} a token"
        )


if __name__ == "__main__":
    sys.exit(main())
