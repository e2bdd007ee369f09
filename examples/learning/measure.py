"""Five seeds each of GRPO at three lags, of GRPO with a coin as the reward, and of on-policy distillation.

    python examples/learning/measure.py WORK        everything; what is finished is not done again
    python examples/learning/measure.py WORK --ways lag_0 coin --seeds 0
    python examples/learning/measure.py WORK --ways --record examples/learning

Rows, model and warming are those of examples/grpo, the task is ``spell_backward``. Every run begins with the same
warmed model (``base``), is a process of one thread, and takes the same number of samples. ``WORK`` has a folder for
each. ``--record`` writes, of what is finished, runs.json (all that was measured), expected.json (``summary`` of it) and
curves.svg, and prints the tables of README.md.

Accuracy is that of greedy answers to 500 held-out questions; pass@k is estimated without bias from 32 answers to each
of them, sampled as in training. A mean over seeds has Student's 95% interval:

    mean +- t(n - 1) * s / sqrt(n)

A difference is taken seed by seed, since a seed asks the same prompts in the same order, and its interval is that of
its mean.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

HERE = Path(__file__).parent
GRPO = HERE.parent / "grpo"
TASK = "spell_backward"
WARM_STEPS, TEACHER_STEPS = 80, 320
SAMPLING = (
    "sampling.n=32",
    "sampling.temperature=0.6",
    "sampling.max_new_tokens=16",
    "local.sequences=256",
)
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}
"""97.5% quantiles of Student's distribution, by degrees of freedom."""
KS = ("1", "2", "4", "8", "16")
THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
Result = dict[str, Any]
Runs = dict[str, dict[str, Result]]
"""Way -> seed -> what was measured; base and teacher have seed 0."""


class Way(NamedTuple):
    """A way of learning."""

    method: str
    label: str
    settings: tuple[str, ...] = ()


COIN = f"{HERE / 'coin.py'}:coin"
LOCAL = ("rollout.local.sequences=256",)
SERVED = (
    "rollout.engine=server",
    "rollout.server.concurrency=64",
    f"log.sinks=[{HERE / 'settled.py'}:Settled]",
    "rewards=exact_match",
)
WHOLE = (*SERVED, "grpo.rollout_correction_level=sequence")
"""Under a lag, an answer is weighted as a whole: the exact weight of a short one."""
WAYS = {
    "lag_0": Way("grpo", "GRPO, lag 0", SERVED),
    "lag_1": Way("grpo", "GRPO, lag 1", (*WHOLE, "rollout.lag=1")),
    "lag_4": Way("grpo", "GRPO, lag 4", (*WHOLE, "rollout.lag=4")),
    "coin": Way("grpo", "GRPO, a coin as the reward", (*LOCAL, f"rewards={COIN}")),
    "gkd": Way("gkd", "on-policy distillation"),
}


class Lab:
    """Where runs are kept, and how they are made."""

    def __init__(self, work: Path, settings: Sequence[str]) -> None:
        self.work, self.settings = work, settings
        self.rows = work / "data" / TASK

    def prepare(self) -> None:
        """The rows, the warmed model that all runs begin with, and the teacher: the same, warmed for longer."""
        if not self.rows.exists():
            run([sys.executable, GRPO / "make.py", self.work / "data"])
        for name, steps in (("base", WARM_STEPS), ("teacher", TEACHER_STEPS)):
            words = [
                f"model={self.work / 'data' / 'model'}",
                f"data.train={self.rows / 'warm.jsonl'}",
                f"steps={steps}",
            ]
            self._train("sft", GRPO / "warm" / "run.toml", self.work / f"{name}-0", words)

    def learn(self, name: str, seed: int) -> None:
        """A run, unless it is there."""
        way, out = WAYS[name], self.work / f"{name}-{seed}"
        if (out / "result.json").exists():
            return
        base = self.work / "base-0" / "model"
        words = [
            f"model={base}",
            f"data.train={self.rows / 'train.jsonl'}",
            f"seed={seed}",
            *way.settings,
            *self.settings,
        ]
        if way.method == "gkd":
            words.append(f"distill.teacher={self.work / 'teacher-0' / 'model'}")
        with serving(base) if SERVED[0] in way.settings else nullcontext() as url:
            served = [f"rollout.urls={url}"] if url else []
            self._train(way.method, HERE / way.method / "run.toml", out, [*words, *served])

    def _train(self, command: str, toml: Path, out: Path, words: Sequence[str]) -> None:
        if (out / "result.json").exists():
            return
        sampled = out / "sampled"
        if not (sampled / "report.json").exists():
            print(out.name, flush=True)
            shutil.rmtree(sampled, ignore_errors=True)
            data = [f"eval.answers.data={self.rows / 'eval.jsonl'}"]
            judged = [*data, "eval.answers.rewards=exact_match", "log.every=20", "--overwrite"]
            taut = [sys.executable, "-m", "taut"]
            run([*taut, command, toml, *words, f"out={out}", *judged])
            asked = [f"data={self.rows / 'eval.jsonl'}", "rewards=exact_match", "samples=0"]
            run([*taut, "eval", out / "model", *asked, *SAMPLING, f"out={sampled}"])
        (out / "result.json").write_text(json.dumps(read(out)))


@contextmanager
def serving(model: Path) -> Iterator[str]:
    """The address of a server in a process of its own."""
    words = [sys.executable, str(HERE / "server.py"), str(model)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, text=True, env={**os.environ, **THREADS}, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()


def run(words: Sequence[str | Path]) -> None:
    """Run a command on one thread."""
    subprocess.run([str(word) for word in words], check=True, env={**os.environ, **THREADS})


def read(out: Path) -> Result:
    """What a run says of itself in its events, and what its answers say of it."""
    samples, curve, rollouts, steps = 0, [], [], []
    for line in (out / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "step":
            steps.append(event)
        elif event["kind"] == "rollout":
            samples += event["completions"]
            rollouts.append(event)
        elif event["kind"] == "eval" and "exact_match" in event:
            point = {"samples": samples, "accuracy": event["exact_match"]}
            curve.append({**point, "stopped": event["stopped"]})
    report = json.loads((out / "sampled" / "report.json").read_text())
    (metric,) = report["metrics"]
    found = {"curve": curve, "pass_at": {"1": metric["mean"], **metric["pass_at"]}}
    if "engine/corrected" in steps[-1]:
        found["age"] = [rollout["staleness_mean"] for rollout in rollouts]
        for name in ("difference", "weight", "corrected"):
            found[name] = fmean(step[f"engine/{name}"] for step in steps)
    found["rewards"] = [rollout["reward"] for rollout in rollouts if "reward" in rollout]
    return found


def gather(work: Path) -> Runs:
    """What is finished."""
    runs: Runs = {}
    for path in sorted(work.glob("*/result.json")):
        name, _, seed = path.parent.name.rpartition("-")
        runs.setdefault(name, {})[seed] = json.loads(path.read_text())
    return rounded(runs)


def rounded(values: Any) -> Any:
    """The same with four decimals."""
    return json.loads(json.dumps(values), parse_float=lambda text: round(float(text), 4))


# -- statistics


def interval(values: Sequence[float]) -> dict[str, float]:
    """The mean, and Student's 95% interval of it; of a single value no interval."""
    mean = fmean(values)
    if len(values) == 1:
        return {"mean": mean}
    half = STUDENT[len(values) - 1] * stdev(values) / math.sqrt(len(values))
    return {"mean": mean, "low": mean - half, "high": mean + half}


def accuracy(result: Result) -> float:
    """At the end."""
    return float(result["curve"][-1]["accuracy"])


def summary(runs: Runs) -> Result:
    """What expected.json has."""
    ways = [name for name in WAYS if name in runs]
    base = runs["base"]["0"]
    of_ways: Result = {}
    for name in ways:
        results = list(runs[name].values())
        of_ways[name] = {
            "seeds": len(results),
            "samples": results[0]["curve"][-1]["samples"],
            "accuracy": interval([accuracy(result) for result in results]),
            "raise": interval([accuracy(result) - accuracy(base) for result in results]),
            "pass_at": {k: interval([r["pass_at"][k] for r in results]) for k in KS},
        }
        if "age" in results[0]:
            of_ways[name]["age"] = fmean(fmean(result["age"]) for result in results)
            of_ways[name]["corrected"] = fmean(result["corrected"] for result in results)
    differences = {
        name: {
            "accuracy": interval([accuracy(r) - accuracy(o) for r, o in pairs(runs, name)]),
            "pass_at_1": interval(
                [r["pass_at"]["1"] - o["pass_at"]["1"] for r, o in pairs(runs, name)]
            ),
        }
        for name in ways
        if name != "lag_0"
    }
    single = {
        name: {
            "accuracy": accuracy(runs[name]["0"]),
            "pass_at": {k: runs[name]["0"]["pass_at"][k] for k in KS},
        }
        for name in ("base", "teacher")
    }
    return rounded({**single, "ways": of_ways, "less_lag_0": differences})


def pairs(runs: Runs, name: str) -> list[tuple[Result, Result]]:
    """The runs of a way and those of lag 0, by seed."""
    others = runs["lag_0"]
    return [(result, others[seed]) for seed, result in runs[name].items() if seed in others]


def shown(value: dict[str, float], sign: str = "") -> str:
    """A mean with its interval."""
    if "low" not in value:
        return f"{value['mean']:{sign}.3f}"
    return f"{value['mean']:{sign}.3f} ({value['low']:{sign}.3f} to {value['high']:{sign}.3f})"


def tables(found: Result) -> list[str]:
    """The lines of README.md's two tables."""
    ways, columns = (
        found["ways"],
        ("accuracy", "less lag 0", "reward", "less lag 0", "age", "corrected"),
    )
    lines = [f"| | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for name in ("base", "teacher"):
        cells = [f"{found[name]['accuracy']:.3f}", "", f"{found[name]['pass_at']['1']:.3f}"]
        lines.append(f"| {name} | {' | '.join(cells)} | | | |")
    for name, way in ways.items():
        less = found["less_lag_0"].get(name)
        cells = [WAYS[name].label]
        for key, value in (("accuracy", way["accuracy"]), ("pass_at_1", way["pass_at"]["1"])):
            cells += [shown(value), shown(less[key], "+") if less else ""]
        cells += [f"{way['age']:.2f}", f"{way['corrected']:.2%}"] if "age" in way else ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"| | {' | '.join(f'pass@{k}' for k in KS)} |", "|---" * (len(KS) + 1) + "|"]
    for name in ("base", "teacher"):
        cells = [f"{found[name]['pass_at'][k]:.3f}" for k in KS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for name, way in ways.items():
        cells = [shown(way["pass_at"][k]) for k in KS]
        lines.append(f"| {WAYS[name].label} | {' | '.join(cells)} |")
    return lines


def record(runs: Runs, folder: Path) -> None:
    """Everything that was measured, what it comes to, and a picture of it."""
    found = summary(runs)
    (folder / "runs.json").write_text(json.dumps(runs) + "\n")
    (folder / "expected.json").write_text(json.dumps(found, indent=2) + "\n")
    draw(runs, folder / "curves.svg")
    print("\n".join(tables(found)))


def draw(runs: Runs, path: Path) -> None:
    """Accuracy against samples, each seed a line; and pass@k, the mean of the seeds."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "learning"
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
    start = accuracy(runs["base"]["0"])
    for number, name in enumerate(name for name in WAYS if name in runs):
        for seed, result in runs[name].items():
            across = [0, *(point["samples"] for point in result["curve"])]
            up = [start, *(point["accuracy"] for point in result["curve"])]
            label = WAYS[name].label if seed == min(runs[name]) else None
            left.plot(across, up, color=f"C{number}", linewidth=0.8, label=label)
        means = [fmean(result["pass_at"][k] for result in runs[name].values()) for k in KS]
        right.plot(KS, means, color=f"C{number}", linewidth=0.8, marker=".")
    for name, style in (("base", ":"), ("teacher", "--")):
        values = runs[name]["0"]["pass_at"]
        right.plot(KS, [values[k] for k in KS], style, color="black", linewidth=0.8, label=name)
    left.set(xlabel="completions", ylabel="held-out accuracy, greedy")
    right.set(xlabel="k", ylabel="pass@k")
    for panel in (left, right):
        panel.legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument(
        "--set", nargs="*", default=[], help="further settings of the runs, KEY=VALUE"
    )
    parser.add_argument("--record", type=Path, help="a folder for what was measured")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    lab = Lab(arguments.work, arguments.set)
    if arguments.ways:
        lab.prepare()
    for seed in arguments.seeds:
        for name in arguments.ways:
            lab.learn(name, seed)
    if arguments.record:
        record(gather(arguments.work), arguments.record)


if __name__ == "__main__":
    main()
