"""Imported recipes beside the framework itself: ``python -m benchmarks.recipes_beside [NAME ...] [--out FILE]``.

Each file of ``benchmarks/beside`` is a recipe in its framework's own form. It is run twice on the same model and the
same rows, in float32 on a CPU: by the framework itself, and as ``taut import`` writes it, without a change but for the
machine's keys ``out`` and ``device``. What GRPO samples is the framework's in both. Printed are the loss of the first
step and of the last one, which the learning rate, the schedule and the optimizer have a part in.

Exit status 1 where the first losses differ by more than 1e-5 of the framework's, or of 1 where that is smaller.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.beside_data import likelihoods, write_data, write_models
from benchmarks.peers.environments import python_of

HERE = Path(__file__).parent
TOLERANCE = 1e-5
FRAMEWORKS = ("trl", "llamafactory", "swift")
COMMANDS = {"trl": ("trl", "python", "accelerate"), "swift": ("swift",), "llamafactory": ()}
"""Words with which the command of a script starts."""
NAMED = {
    "LLM-Research/Meta-Llama-3-8B-Instruct": "tiny",
    "LLM-Research/Meta-Llama-3-70B-Instruct": "teacher",
}
"""ms-swift knows a model's template by the model's name."""


EXPLAINED: dict[str, tuple[str, Callable[[float, dict[str, float]], float]]] = {
    "trl_orpo": (
        "TRL's likelihood term has the tokens of the prompts too",
        lambda loss, mean: loss - (mean["all"] - mean["answers"]),
    ),
    "llamafactory_pretrain": (
        "transformers 5.6 divides by 252 tokens, of which 8 are the first of a row: nothing predicts them",
        lambda loss, mean: loss * 252 / 244,
    ),
    "llamafactory_orpo": (
        "the likelihood term is the mean of the answers' means",
        lambda loss, mean: loss - (mean["rows"] - mean["answers"]),
    ),
    "llamafactory_dpo_lora": (
        "the likelihood term, of weight 0.1, is the mean of the answers' means",
        lambda loss, mean: loss - 0.1 * (mean["rows"] - mean["answers"]),
    ),
    "swift_gkd": (
        "taut multiplies the divergence by the squared temperature, 0.9",
        lambda loss, mean: 0.81 * loss,
    ),
}
"""Losses that are known to differ: why, and the framework's without the difference."""


class Case(NamedTuple):
    """A recipe and the folder that it runs in."""

    recipe: Path
    folder: Path

    @property
    def framework(self) -> str:
        return self.recipe.stem.partition("_")[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("names", nargs="*", help="recipes; all of them without a name")
    parser.add_argument(
        "--cache", type=Path, default=Path(".cache"), help="holds the peers' environments"
    )
    parser.add_argument("--out", type=Path, help="a JSON file; those of these recipes are replaced")
    options = parser.parse_args()
    recipes = sorted(HERE.glob("beside/*.yaml")) + sorted(HERE.glob("beside/*.sh"))
    chosen = [path for path in recipes if not options.names or path.stem in options.names]
    with tempfile.TemporaryDirectory() as scratch:
        cases = [prepared(path, Path(scratch)) for path in sorted(chosen)]
        for framework in FRAMEWORKS:
            jobs = [(case, words_of(case)) for case in cases if case.framework == framework]
            if jobs:
                run_worker(
                    python_of(framework, options.cache.absolute()), f"beside_{framework}.py", jobs
                )
        run_worker(
            Path(sys.executable), "beside_taut.py", [(case, imported(case)) for case in cases]
        )
        found = [(case, losses_of(case)) for case in cases]
        return report(found, likelihoods(Path(scratch) / "models"), options.out)


def prepared(recipe: Path, scratch: Path) -> Case:
    """A folder with the recipe, the models and the rows."""
    models = scratch / "models"
    if not models.exists():
        write_models(models)
        write_data(models / "data")
    folder = scratch / recipe.stem
    folder.mkdir()
    (folder / "LLM-Research").mkdir()
    for path in models.iterdir():
        (folder / path.name).symlink_to(path)
    for name, model in NAMED.items():
        (folder / name).symlink_to(models / model)
    shutil.copy(recipe, folder)
    return Case(recipe, folder)


def words_of(case: Case) -> list[str]:
    """The words of the framework's command, as bash itself reads them in a script."""
    name = case.recipe.name
    if name.endswith(".yaml"):
        if case.framework == "llamafactory":
            return ["train", name]
        method = case.recipe.stem.split("_")[1]
        return [method, "--config", name]
    stubs = case.folder / "stubs"
    stubs.mkdir()
    for word in COMMANDS[case.framework]:
        stub = stubs / word
        stub.write_text('#!/bin/bash\nprintf "%s\\0" "$@" > words\n')
        stub.chmod(0o755)
    paths = f"{stubs}:{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-e", name], cwd=case.folder, env=os.environ | {"PATH": paths}, check=True
    )
    words = (case.folder / "words").read_text().split("\0")[:-1]
    at = next((at for at, word in enumerate(words) if word.endswith(".py")), 0)
    return [Path(words[at]).stem, *words[at + 1 :]]


def imported(case: Case) -> list[str]:
    """The words of ``taut`` that import the recipe."""
    source = f"{case.framework}:{case.recipe.name}"
    if case.framework == "trl" and case.recipe.suffix == ".yaml":
        source = f"trl.{case.recipe.stem.split('_')[1]}:{case.recipe.name}"
    return ["import", source]


def run_worker(python: Path, name: str, jobs: list[tuple[Case, list[str]]]) -> None:
    listed = [{"folder": str(case.folder), "words": words} for case, words in jobs]
    path = jobs[0][0].folder.parent / f"{name}.json"
    path.write_text(json.dumps(listed))
    variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "USE_HF": "1"}
    subprocess.run([python, HERE / "peers" / name, path], env=os.environ | variables, check=True)


def losses_of(case: Case) -> tuple[list[float], list[float]]:
    """The losses of all steps: the framework's and taut's. An empty list where a run failed."""
    states = sorted(case.folder.glob("out/**/checkpoint-*/trainer_state.json"))
    theirs = [
        entry["loss"]
        for path in states[-1:]
        for entry in json.loads(path.read_text())["log_history"]
        if "loss" in entry
    ]
    events = case.folder / "taut" / "events.jsonl"
    lines = events.read_text().splitlines() if events.exists() else []
    ours = [event["loss"] for event in map(json.loads, lines) if event["kind"] == "step"]
    return theirs, ours


def distance(theirs: float, ours: float) -> float:
    return abs(ours - theirs) / max(1.0, abs(theirs))


def report(
    found: list[tuple[Case, tuple[list[float], list[float]]]],
    mean: dict[str, float],
    out: Path | None,
) -> int:
    """Print the losses; 1 where one differs and the difference is not explained to the same precision."""
    print(f"{'recipe':24}{'framework':>14}{'taut':>14}{'first step':>12}{'last step':>12}")
    num_failed = 0
    for case, (theirs, ours) in found:
        name = case.recipe.stem
        if not theirs or not ours:
            num_failed += 1
            who = case.framework if not theirs else "taut"
            print(f"{name:24}{who} took no step:")
            print((case.folder / f"beside_{who}.txt").read_text()[-2000:])
            continue
        first, last = distance(theirs[0], ours[0]), distance(theirs[-1], ours[-1])
        print(f"{name:24}{theirs[0]:14.7f}{ours[0]:14.7f}{first:12.1e}{last:12.1e}")
        if name in EXPLAINED and first > TOLERANCE:
            why, without = EXPLAINED[name]
            rest = without(theirs[0], mean)
            first = distance(rest, ours[0])
            print(f"{'':24}{rest:14.7f}{'':14}{first:12.1e}  {why}")
        num_failed += first > TOLERANCE
    if out is not None:
        record = recorded(found, mean)
        if out.exists():
            record["cases"] = json.loads(out.read_text())["cases"] | record["cases"]
        out.write_text(f"{json.dumps(record, indent=1, sort_keys=True)}\n")
    return 1 if num_failed else 0


def recorded(
    found: list[tuple[Case, tuple[list[float], list[float]]]], mean: dict[str, float]
) -> dict[str, Any]:
    """What ``tests/golden`` compares with: what the frameworks lost and sampled, and their releases."""
    cases: dict[str, Any] = {}
    for case, (theirs, _) in found:
        rollouts = case.folder / "rollouts.jsonl"
        lines = rollouts.read_text().splitlines() if rollouts.exists() else []
        cases[case.recipe.stem] = {"losses": theirs, "rollouts": lines}
    pins = {name: (HERE / f"peers/{name}.txt").read_text().split() for name in FRAMEWORKS}
    return {"versions": pins, "means": mean, "cases": cases}


if __name__ == "__main__":
    raise SystemExit(main())
