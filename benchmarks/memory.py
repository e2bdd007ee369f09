"""What each setting for little memory takes, beside plain and beside others: ``python benchmarks/memory.py [--quick]``.

    full     all weights: plain, activation_checkpointing, moments in bf16 and int8, Muon; transformers, TRL
    lora     adapters of rank 16 over a base in float32, in the checkpoint's dtype, in int8 and in nf4; transformers
             with peft, TRL
    ranks    all weights, and adapters, on two ranks (FSDP2)

One model of random weights (bfloat16 on disk) and rows of one length, so that nobody pads. Each run is a process of its
own, on the same threads; the contenders take turns, round after round. The first step warms up and is not timed:

    memory     the most that a process took until the end of its last step, less what it took after its imports: the
               resident set, on a GPU what torch handed out. Saving comes later. Of several ranks the one with the most
    loaded     the same until the first step: reading, quantizing, taut's checks
    tokens/s   of the rows, over the median of the timed steps
    correct    whether the first loss is that of the plain run, or with a base of int8 or nf4 that of transformers and
               peft with the same base (int8: none of the peers computes the same products; printed, not judged)

Results go to a table and a JSON file. Exit status 1 if a run of taut failed, or began at another loss.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

import data
from data import Model
from machine import describe, not_compared, print_machine, take_turns
from peers.environments import folder_of
from report import TOLERANCE, Result, median_of_steps
from sft import Bench, matches

RANK = 16
MODEL = Model("memory", num_layers=8, hidden=512, vocab=8192, has_tied_embeddings=False)
ROWS, LENGTH, NUM_STEPS = 4, 256, 5
"""Of a step: rows, their tokens; steps of a run."""
TINY = Model("tiny", num_layers=2, hidden=128, vocab=1024, has_tied_embeddings=False)


@dataclass(frozen=True)
class Setting:
    """A contender: whose run, with what."""

    name: str
    framework: str = "taut"
    rank: int = 0
    """Of adapters; 0: all weights train."""
    quantize: str | None = None
    checkpointing: bool = False
    keys: dict[str, Any] = field(default_factory=dict)
    """taut's own, besides."""
    num_ranks: int = 1
    is_of_gpu: bool = False
    """Moves to the host what a CPU has there already."""

    @property
    def label(self) -> str:
        return f"{self.framework}, {self.name}"

    @property
    def job(self) -> Result:
        """Its part of a worker's job."""
        named = {"activation_checkpointing": True} if self.checkpointing else {}
        return {
            "rank": self.rank,
            "quantize": self.quantize,
            "checkpointing": self.checkpointing,
            "keys": {**named, **self.keys},
        }


def adapted(name: str, framework: str = "taut", **fields: Any) -> Setting:
    return Setting(name, framework, RANK, **fields)


CASES: dict[str, tuple[Setting, ...]] = {
    "full": (
        Setting("plain"),
        Setting("activation_checkpointing", checkpointing=True),
        Setting("selective checkpointing", keys={"activation_checkpointing": "selective"}),
        Setting(
            "checkpointing, offload", keys={"activation_checkpointing": "offload"}, is_of_gpu=True
        ),
        Setting("parallel.cpu_offload", keys={"parallel.cpu_offload": True}, is_of_gpu=True),
        Setting("optim.state=bf16", keys={"optim.state": "bf16"}),
        Setting("optim.state=int8", keys={"optim.state": "int8"}),
        Setting("muon", keys={"optim.name": "muon"}),
        Setting("muon, bf16", keys={"optim.name": "muon", "optim.state": "bf16"}),
        Setting(
            "int8, checkpointing",
            checkpointing=True,
            keys={"optim.state": "int8"},
        ),
        Setting("plain", "transformers"),
        Setting("checkpointing", "transformers", checkpointing=True),
        Setting("plain", "trl"),
    ),
    "lora": (
        adapted("base in float32", keys={"frozen_dtype": "float32"}),
        adapted("base as on disk", keys={"frozen_dtype": "checkpoint"}),
        adapted("base in int8", quantize="int8"),
        adapted("base in nf4", quantize="nf4"),
        adapted("base in nf4, checkpointing", quantize="nf4", checkpointing=True),
        adapted("peft", "transformers"),
        adapted("peft, nf4", "transformers", quantize="nf4"),
        adapted("peft", "trl"),
        adapted("peft, nf4", "trl", quantize="nf4"),
    ),
    "ranks": (
        Setting("plain"),
        Setting("two ranks", num_ranks=2),
        Setting("two ranks, checkpointing", num_ranks=2, checkpointing=True),
        adapted("lora", keys={"frozen_dtype": "float32"}),
        adapted("lora, two ranks", num_ranks=2, keys={"frozen_dtype": "float32"}),
    ),
}
"""Case -> its contenders; the first is what the others of taut are compared with. A setting more is a row more."""


def packages_of(setting: Setting, bench: Bench) -> list[str]:
    """Folders for the path of a peer that its environment lacks."""
    is_peer = setting.framework != "taut" and bench.device == "cpu"
    return [str(folder_of("quant", bench.cache))] if is_peer and setting.quantize else []


def why_not(setting: Setting, device: str) -> str:
    """Why this machine cannot run a setting; empty if it can."""
    if device == "cpu":
        return "needs a GPU" if setting.is_of_gpu else ""
    if setting.num_ranks > torch.cuda.device_count():
        return f"needs {setting.num_ranks} devices, found {torch.cuda.device_count()}"
    wanted = {setting.framework, *(["peft"] if setting.rank else [])}
    wanted |= {"bitsandbytes"} if setting.quantize else set()
    missing = [name for name in sorted(wanted) if importlib.util.find_spec(name) is None]
    return f"needs {', '.join(missing)}" if missing else ""


def measure(
    bench: Bench, case: str, model: Model, settings: Sequence[Setting], rounds: int
) -> Result:
    """The contenders of a case, in alternation."""
    job = prepare(bench, model)

    def run_of(setting: Setting) -> Callable[[int], Result]:
        def run(_: int) -> Result:
            if why := why_not(setting, bench.device):
                raise RuntimeError(why)
            # The peers' loops share TRL's environment.
            environment = "taut" if setting.framework == "taut" else "trl"
            script = f"train_{setting.framework}_memory.py"
            own = {"packages": packages_of(setting, bench), **setting.job}
            found: Result = bench.run(script, environment, job | own, setting.num_ranks)
            return found

        return run

    def show(run: Result) -> str:
        return f"{own_mb(run):6.0f} MB, {tokens_per_second([run]):6.0f} tokens/s"

    turns = take_turns(
        case,
        {one.label: run_of(one) for one in settings},
        rate=bench.rate if bench.device == "cpu" else None,
        show=show,
        rounds=rounds,
        tries=bench.tries,
    )
    table: dict[str, Result] = {}
    for one in settings:
        runs = turns.chosen(one.label)
        table[one.label] = {"setting": asdict(one)} | (
            {"error": turns.errors[one.label]} if not runs else summary(runs)
        )
        table[one.label] |= turns.state(one.label)
    judge(table, bench.dtype)
    return {"model": asdict(model), "contenders": table}


def prepare(bench: Bench, model: Model) -> Result:
    """Rows and model on disk, and the part of the job that all contenders have in common."""
    folder = bench.work / model.name
    if not folder.exists():
        data.write_model(model, folder, torch.bfloat16)
        data.write_rows(data.even_rows(ROWS * NUM_STEPS, LENGTH, model.vocab), folder / "rows")
    return {
        "model": str(folder),
        "data": str(folder / "rows"),
        "device": bench.device,
        "samples_per_step": ROWS,
        "num_steps": NUM_STEPS,
        "learning_rate": 1e-4,
        "pad": data.PAD,
        "bos": data.BOS,
    }


def own_mb(run: Result) -> float:
    return float(run["peak_mb"] - run["import_mb"])


def tokens_per_second(runs: Sequence[Result]) -> float:
    return ROWS * LENGTH / median_of_steps(runs, "seconds")


def summary(runs: Sequence[Result]) -> Result:
    """A contender's line of the table."""
    return {
        "memory_mb": median(map(own_mb, runs)),
        "loaded_mb": median(run["loaded_mb"] - run["import_mb"] for run in runs),
        "tokens_per_second": tokens_per_second(runs),
        "first_loss": runs[0]["steps"][0]["loss"],
        "last_loss": runs[0]["steps"][-1]["loss"],
        "runs": list(runs),
    }


def judge(table: dict[str, Result], dtype: str) -> None:
    """Whether those with the same numbers in their base began at the same loss; None where there is nobody to ask."""
    done = [row for row in table.values() if "error" not in row]
    for row in done:
        base = row["setting"]["quantize"]
        same = [other for other in done if other["setting"]["quantize"] == base]
        peers = [other for other in same if other["setting"]["framework"] == "transformers"]
        reference = (peers or same)[0]
        row["is_correct"] = None
        if reference is not row:
            off = abs(row["first_loss"] / reference["first_loss"] - 1)
            row["is_correct"] = off <= TOLERANCE[dtype]


def print_case(name: str, result: Result) -> None:
    columns = f"{'memory, MB':>11}{'of plain':>9}{'loaded':>8}{'tokens/s':>10}{'of plain':>9}{'first loss':>12}"
    print(f"\n{name}\n{'':42}{columns}")
    rows = result["contenders"]
    plain = next(iter(rows.values()))
    for label, row in rows.items():
        if "error" in row:
            print(f"  {label:40}  not run: {row['error'].splitlines()[-1]}")
            continue
        shares = f"{'':9}", f"{'':9}"
        if "error" not in plain:
            speed = row["tokens_per_second"] / plain["tokens_per_second"]
            is_alike = not not_compared([row, plain])
            shares = (
                f"{row['memory_mb'] / plain['memory_mb']:9.0%}",
                f"{speed:9.0%}" if is_alike else f"{'?':>9}",
            )
        wrong = "  WRONG" if row["is_correct"] is False else ""
        print(
            f"  {label:40}{row['memory_mb']:11.0f}{shares[0]}{row['loaded_mb']:8.0f}"
            f"{row['tokens_per_second']:10.0f}{shares[1]}{row['first_loss']:12.5f}{wrong}"
        )
    alone = [label for label, row in rows.items() if "error" not in row and not row["is_in_state"]]
    if alone:
        print(f"  speed not compared, as the machine changed (?): {'; '.join(alone)}")


def has_failed(result: Result) -> bool:
    """Whether a run of taut failed where the machine could run it, or any began at another loss."""
    return any(
        ("error" in row and not row["error"].startswith("needs "))
        if label.startswith("taut")
        else False
        for label, row in result["contenders"].items()
    ) or any(row.get("is_correct") is False for row in result["contenders"].values())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a model of two layers")
    parser.add_argument("--cases", nargs="*", default=[], help="words: full, lora, ranks")
    parser.add_argument(
        "--only", nargs="*", default=[], help="words: contenders whose name has one of them"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--tries", type=int, default=1, help="rounds more, at most, of speeds not comparable"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="to compute in; default: bfloat16 on cuda"
    )
    parser.add_argument(
        "--cache", type=Path, default=Path(".cache"), help="holds the peers' environments"
    )
    parser.add_argument("--out", type=Path, default=Path(".cache/benchmarks/memory.json"))
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    dtype = arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32")
    machine = describe(arguments.threads)
    print_machine(machine)
    results: Result = {"machine": machine, "dtype": dtype, "cases": {}}
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(
            arguments.cache.absolute(),
            Path(work),
            arguments.threads,
            dtype,
            tries=arguments.tries,
            device=arguments.device,
        )
        model = TINY if arguments.quick else MODEL
        for case, settings in CASES.items():
            chosen = [one for one in settings if matches(one.label, arguments.only)]
            if chosen and matches(case, arguments.cases):
                results["cases"][case] = measure(bench, case, model, chosen, arguments.rounds)
                print_case(case, results["cases"][case])
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=1))
    print(f"\n{arguments.out}")
    return int(any(has_failed(case) for case in results["cases"].values()))


if __name__ == "__main__":
    sys.exit(main())
