"""Does it learn? The held-out accuracy of a small model under GRPO, PPO and TRL's GRPO, and under GRPO with each
optimizer and format of its state: five seeds of each, a table.

    python benchmarks/learning.py                                   everything; two hours on one quiet core
    python benchmarks/learning.py --tasks spell_backward --methods grpo trl --seeds 0 1
    python benchmarks/learning.py --tasks spell_backward --methods grpo_bf16 grpo_int8 grpo_muon
    python benchmarks/learning.py --tasks --record examples/grpo      what there is, written down

Tasks, model and settings are those of examples/grpo. Each run is a process of one thread; what is finished under
``--work`` is not done again. Accuracy is that of greedy answers to 500 held-out questions, before and after. A raise is
shown where it, its standard error over the seeds and the worst seed are as examples/grpo/expected.json asks; of another
optimizer it asks what it asks of AdamW.

TRL's GRPOTrainer starts from the same warmed model with the same prompts, reward, group, rate and number of prompts a
step, in its own environment: with as many steps, and with as many as it makes in the same time: CPU time, for each runs
on one thread and others may use the machine. Evaluations are in neither's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from peers.environments import PEERS, python_of

Result = dict[str, Any]
Found = dict[str, dict[str, dict[str, Result]]]

EXAMPLE = Path(__file__).parents[1] / "examples" / "grpo"
EXPECTED: dict[str, Any] = json.loads((EXAMPLE / "expected.json").read_text())
RANGE = (0.1, 0.5)
"""Where a warmed model's accuracy has to be."""


OPTIMIZERS = ("grpo_bf16", "grpo_int8", "grpo_muon")
"""GRPO as in run.toml, with another optimizer or format of its state than AdamW in float32."""


class Task(NamedTuple):
    """A task of examples/grpo."""

    reward: str
    measured: str
    """The reward that says 1 where an answer is right, else 0."""
    warm_steps: int
    methods: tuple[str, ...] = ("grpo",)
    settings: tuple[str, ...] = ()
    """Further ones, of GRPO and PPO."""


SOLVED = f"{EXAMPLE / 'solved.py'}:solved"
TASKS = {
    "spell_backward": Task(
        "exact_match", "exact_match", 80, ("grpo", *OPTIMIZERS, "trl", "trl_timed")
    ),
    "palindrome_generation": Task(SOLVED, SOLVED, 105),
    "decimals": Task("math", "math", 71, ("grpo", "ppo"), ("shaping.missing_eos_penalty=1",)),
    "number_sorting": Task("reasoning_gym", "reasoning_gym", 90),
}


class Method(NamedTuple):
    """A run of taut's."""

    command: str
    toml: Path
    settings: tuple[str, ...] = ()


METHODS = {
    "grpo": Method("grpo", EXAMPLE / "run.toml"),
    "grpo_bf16": Method("grpo", EXAMPLE / "run.toml", ("optim.state=bf16",)),
    "grpo_int8": Method("grpo", EXAMPLE / "run.toml", ("optim.state=int8",)),
    "grpo_muon": Method(
        "grpo", EXAMPLE / "run.toml", ("optim.name=muon", "optim.muon_learning_rate=0.001")
    ),
    "ppo": Method("ppo", EXAMPLE / "ppo" / "run.toml"),
}
LABELS = {
    "grpo": "taut grpo",
    "grpo_bf16": "taut grpo, bf16 moments",
    "grpo_int8": "taut grpo, int8 moments",
    "grpo_muon": "taut grpo, Muon",
    "ppo": "taut ppo",
    "trl": "TRL, equal samples",
    "trl_timed": "TRL, equal seconds",
}
THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}


class Lab:
    """Where runs are kept, and how they are made."""

    def __init__(self, work: Path, cache: Path) -> None:
        self.work, self.cache = work, cache
        self.data = work / "data"

    def prepare(self, name: str) -> Path:
        """The warmed model of a task."""
        if not self.data.exists():
            run([sys.executable, EXAMPLE / "make.py", self.data])
        out = self.work / name / "warm"
        words = [
            f"model={self.data / 'model'}",
            f"data.train={self.data / name / 'warm.jsonl'}",
            f"steps={TASKS[name].warm_steps}",
        ]
        self._taut("sft", EXAMPLE / "warm" / "run.toml", name, out, words)
        return out / "model"

    def train(self, name: str, method: str, seed: int) -> None:
        """A run, unless it is there."""
        model, out = self.prepare(name), self.work / name / f"{method}-{seed}"
        if method.startswith("trl"):
            self._trl(name, method, model, out, seed)
            return
        words = [
            f"model={model}",
            f"data.train={self.data / name / 'train.jsonl'}",
            f"rewards={TASKS[name].reward}",
            f"seed={seed}",
            *TASKS[name].settings,
            *METHODS[method].settings,
        ]
        self._taut(METHODS[method].command, METHODS[method].toml, name, out, words)

    def pace(self, name: str) -> float:
        """CPU seconds of a step of taut grpo: a run of 41 steps less one of a single step, without evaluations."""
        kept = self.work / name / "pace.json"
        if not kept.exists():
            bare = (
                "check=off",
                "stop_check.prompts=0",
                "contract.prompts=0",
                "eval.answers.every=0",
            )
            words = [
                f"model={self.prepare(name)}",
                f"data.train={self.data / name / 'train.jsonl'}",
                f"rewards={TASKS[name].reward}",
                f"out={self.work / name / 'pace'}",
                "--overwrite",
                *bare,
            ]
            train = [sys.executable, "-m", "taut", "grpo", METHODS["grpo"].toml, *words]
            one, many = (run([*train, f"steps={steps}"]) for steps in (1, 41))
            kept.write_text(json.dumps({"cpu_seconds_a_step": (many - one) / 40}))
        return float(json.loads(kept.read_text())["cpu_seconds_a_step"])

    def _taut(self, command: str, toml: Path, name: str, out: Path, words: Sequence[str]) -> None:
        if (out / "result.json").exists():
            return
        words = [
            *words,
            f"out={out}",
            f"eval.answers.data={self.data / name / 'eval.jsonl'}",
            f"eval.answers.rewards={TASKS[name].measured}",
            "log.every=20",
        ]
        print(f"{name} {out.name}", flush=True)
        seconds = run([sys.executable, "-m", "taut", command, toml, *words, "--overwrite"])
        result = read_taut(out, TASKS[name].measured.rpartition(":")[2])
        (out / "result.json").write_text(json.dumps(result | {"cpu_seconds": seconds}))

    def _trl(self, name: str, method: str, model: Path, out: Path, seed: int) -> None:
        if (out / "result.json").exists():
            return
        assert TASKS[name].reward == "exact_match", "TRL's side knows this reward only"
        runs = gather(self.work)[name]
        steps = [int(point["step"]) for point in runs["grpo"][str(seed)]["curve"]]
        if method == "trl_timed":
            steps = [round(steps[-1] * self.pace(name) / pace_of(runs.get("trl", {})))]
        job = {
            "model": str(model),
            "train": str(self.data / name / "train.jsonl"),
            "eval": str(self.data / name / "eval.jsonl"),
            "out": str(out),
            "seed": seed,
            "steps": steps,
            **settings_of_trl(),
        }
        out.mkdir(parents=True, exist_ok=True)
        (out / "job.json").write_text(json.dumps(job))
        print(f"{name} {out.name}", flush=True)
        python = python_of("trl", self.cache)
        run([python, PEERS / "train_trl_learning.py", out / "job.json"])


def pace_of(runs: dict[str, Result]) -> float:
    """CPU seconds of a step of TRL's, without evaluations."""
    assert runs, "TRL's run as long as taut's is the measure: train trl first"
    ends = [it["curve"][-1] for it in runs.values()]
    return sum(end["cpu_seconds"] for end in ends) / sum(end["step"] for end in ends)


def settings_of_trl() -> Result:
    """What must be equal for both, as run.toml says it."""
    ours = tomllib.loads((EXAMPLE / "run.toml").read_text())
    return {
        "prompts": ours["batch"]["samples_per_step"],
        "group": ours["rollout"]["n"],
        "new_tokens": ours["rollout"]["max_new_tokens"],
        "temperature": ours["rollout"]["temperature"],
        "learning_rate": ours["optim"]["learning_rate"],
        "warmup_steps": ours["optim"]["warmup_steps"],
    }


def run(words: Sequence[str | Path]) -> float:
    """Run a command on one thread; the CPU seconds it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([str(word) for word in words], check=True, env={**os.environ, **THREADS})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def read_taut(out: Path, metric: str) -> Result:
    """A run's curve from its events: accuracy, stop rate, samples, and seconds of training until then."""
    seconds, samples, curve, rewards, stops = 0.0, 0, [], [], []
    for line in (out / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "step":
            seconds += event["seconds"]
        elif event["kind"] == "rollout":
            samples += event["completions"]
            rewards.append(event["reward"])
            stops.append(event["stopped"])
        elif event["kind"] == "eval" and metric in event:
            curve.append(
                {
                    "step": event["step"],
                    "samples": samples,
                    "seconds": round(seconds, 2),
                    "accuracy": event[metric],
                    "stopped": event["stopped"],
                }
            )
    return {"curve": curve, "rewards": rewards, "stops": stops}


def gather(work: Path) -> Found:
    """task -> method -> seed -> what came of it; the warmed model under ``warm`` and seed 0."""
    found: Found = {}
    for name in TASKS:
        for path in sorted((work / name).glob("*/result.json")):
            method, _, seed = path.parent.name.partition("-")
            found.setdefault(name, {}).setdefault(method, {})[seed or "0"] = json.loads(
                path.read_text()
            )
    return found


def rows_of(name: str, methods: dict[str, dict[str, Result]]) -> list[Result]:
    """What the table says of a task."""
    start = methods["warm"]["0"]["curve"][-1]
    ends = {
        method: {seed: it["curve"][-1] for seed, it in runs.items()}
        for method, runs in methods.items()
    }
    return [row(name, method, start, ends[method]) for method in LABELS if method in ends]


def row(
    task: str, method: str, start: dict[str, float], ends: dict[str, dict[str, float]]
) -> Result:
    """The raise over the seeds, and whether it is shown."""
    raises = [end["accuracy"] - start["accuracy"] for end in ends.values()]
    error = stdev(raises) / math.sqrt(len(raises)) if len(raises) > 1 else math.inf
    mean, least = fmean(raises), min(end["accuracy"] for end in ends.values())
    floors = EXPECTED["after_at_least"].get(task, {})
    floor = floors.get(METHODS[method].command if method in METHODS else method, 0)
    return {
        "task": task,
        "method": method,
        "seeds": len(raises),
        "before": start["accuracy"],
        "after": fmean(end["accuracy"] for end in ends.values()),
        "least": least,
        "raise": mean,
        "standard_error": error,
        "stopped_before": start["stopped"],
        "stopped_after_least": min(end["stopped"] for end in ends.values()),
        "samples": fmean(end["samples"] for end in ends.values()),
        "is_shown": mean >= EXPECTED["raise_at_least"]
        and mean >= EXPECTED["standard_errors"] * error
        and least >= floor
        and RANGE[0] <= start["accuracy"] <= RANGE[1],
    }


def show(rows: Sequence[Result]) -> None:
    """The table, as examples/grpo/README.md has it."""
    print("| task | | seeds | before | after | raise | least | stopped | samples | shown |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for it in rows:
        print(line(it))


def line(it: Result) -> str:
    """A line of the table."""
    return (
        f"| {it['task']} | {LABELS[it['method']]} | {it['seeds']} | {it['before']:.3f} | {it['after']:.3f} "
        f"| {it['raise']:.3f} +- {it['standard_error']:.3f} | {it['least']:.3f} "
        f"| {it['stopped_before']:.3f} -> {it['stopped_after_least']:.3f} "
        f"| {it['samples']:.0f} | {'yes' if it['is_shown'] else 'no'} |"
    )


def rounded(values: Any) -> Any:
    """The same with four decimals."""
    return json.loads(json.dumps(values), parse_float=lambda text: round(float(text), 4))


def record(found: Found, rows: Sequence[Result], folder: Path) -> None:
    """Everything that was measured, and a picture of it."""
    (folder / "curves.json").write_text(json.dumps({"table": rows, "runs": found}) + "\n")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "learning"
    figure, reward_sets = plt.subplots(1, len(found), figsize=(3.2 * len(found), 2.6), sharey=True)
    for reward_set, (name, methods) in zip(reward_sets, found.items(), strict=True):
        reward_set.set(title=name, xlabel="completions", ylim=(0, 1))
        start = methods["warm"]["0"]["curve"][-1]["accuracy"]
        for label in (label for label in LABELS if label in methods):
            runs = [run["curve"] for run in methods[label].values()]
            ends = [[0, *(point["samples"] for point in curve)] for curve in runs]
            heights = [[start, *(point["accuracy"] for point in curve)] for curve in runs]
            color = f"C{list(LABELS).index(label)}"
            for number, (across, up) in enumerate(zip(ends, heights, strict=True)):
                reward_set.plot(
                    across, up, color=color, linewidth=0.8, label=None if number else LABELS[label]
                )
        reward_set.legend(fontsize=7, loc="lower right", frameon=False)
    reward_sets[0].set_ylabel("held-out accuracy")
    figure.tight_layout()
    figure.savefig(folder / "curves.svg", metadata={"Date": None})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--methods", nargs="*", choices=list(LABELS), default=list(LABELS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--work", type=Path, default=Path(".cache/benchmarks/learning"))
    parser.add_argument("--cache", type=Path, default=Path(".cache"), help="peers' environments")
    parser.add_argument("--record", type=Path, help="a folder for curves.json and curves.svg")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    lab = Lab(arguments.work.absolute(), arguments.cache.absolute())
    for name in arguments.tasks:
        for method in [it for it in TASKS[name].methods if it in arguments.methods]:
            for seed in arguments.seeds:
                lab.train(name, method, seed)
    found = rounded(gather(lab.work))
    rows = rounded([it for name, methods in found.items() for it in rows_of(name, methods)])
    show(rows)
    if arguments.record:
        record(found, rows, arguments.record)
    return int(not all(it["is_shown"] for it in rows if not it["method"].startswith("trl")))


if __name__ == "__main__":
    sys.exit(main())
