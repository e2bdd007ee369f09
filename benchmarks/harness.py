"""taut's engine and lm-evaluation-harness's own ``hf`` model answer the same questions: ``python benchmarks/harness.py
--model DIR``.

    questions of four choices with five examples before each, which the questions of a task share

Both are loaded before the clock begins, and take turns in one process. Reported are medians of rounds of wall seconds
and of processor seconds, which other work on the machine disturbs less, and the largest difference of a logprob. Exit
status 1 where that is more than rounding.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from taut.inference.factory import open_engine, open_renderer
from taut.inference.settings import ModelUse
from taut_tools.lm_eval.harness import EngineModel

WORDS = [
    "the",
    "cat",
    "dog",
    "ran",
    "over",
    "a",
    "big",
    "red",
    "house",
    "and",
    "then",
    "saw",
    "some",
    "birds",
    "in",
    "the",
    "blue",
    "sky",
]
ROUNDING = 1e-4
"""Nats of a continuation, in float32."""


def write_task(folder: Path, num_questions: int) -> str:
    """A task of drawn words; returns the path of its YAML."""
    draw = random.Random(0)

    def text(count: int) -> str:
        return " ".join(draw.choices(WORDS, k=count))

    rows = [
        {"question": text(40), "choices": [text(4) for _ in range(4)], "answer": draw.randrange(4)}
        for _ in range(num_questions + 5)
    ]
    for name, part in (("examples", rows[:5]), ("test", rows[5:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    task = {
        "task": "drawn",
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {name: str(folder / f"{name}.jsonl") for name in ("examples", "test")}
        },
        "test_split": "test",
        "fewshot_split": "examples",
        "fewshot_config": {"sampler": "first_n"},
        "num_fewshot": 5,
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "drawn.yaml").write_text(yaml.safe_dump(task))
    return str(folder / "drawn.yaml")


def asked(model: Any, path: str) -> tuple[float, float, list[float]]:
    """Wall seconds, processor seconds, and the logprob of each choice."""
    tasks = TaskManager(include_defaults=False).load([path])
    wall, processor = time.perf_counter(), time.process_time()
    found: Any = evaluate(lm=model, task_dict=tasks, bootstrap_iters=0)
    seconds = time.perf_counter() - wall, time.process_time() - processor
    samples = found["samples"]["drawn"]
    return *seconds, [float(answer[0][0]) for sample in samples for answer in sample["resps"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--questions", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    use = ModelUse(model=options.model, device="cpu", dtype="float32")
    theirs = HFLM(options.model, device="cpu", dtype="float32", batch_size=options.batch_size)
    with open_engine(use, open_renderer(use)) as opened, tempfile.TemporaryDirectory() as folder:
        path = write_task(Path(folder), options.questions)
        names = {"taut": EngineModel(opened), f"hf, batch {options.batch_size}": theirs}
        rounds = [
            {name: asked(model, path) for name, model in names.items()}
            for _ in range(options.rounds)
        ]
    for name in names:
        wall, processor = (median(one[name][part] for one in rounds) for part in (0, 1))
        print(f"{name:14} {wall:8.2f} s {processor:8.2f} CPU s")
    ours, hf = (rounds[0][name][2] for name in names)
    difference = max(abs(a - b) for a, b in zip(ours, hf, strict=True))
    print(f"largest difference of a logprob: {difference:.2g} nats")
    return int(difference > ROUNDING)


if __name__ == "__main__":
    sys.exit(main())
