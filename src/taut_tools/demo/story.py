"""The steps of the demo: fetch, build the data, ask, train, ask again, show."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import transformers.utils.logging as transformers_logging

import taut
from taut.config import load
from taut.data.store.cache import default_directory
from taut.errors import ConfigError
from taut.methods.sft import Sft
from taut.train.log.events import read_events
from taut.train.run_dir import require_usable
from taut_tools.demo import fetch, show
from taut_tools.demo.ask import Report, ask
from taut_tools.demo.reading import Document, read_documents, split_documents, write_rows

NUM_TRAIN, NUM_EVAL = 40, 8

RECIPE = {
    "steps": "40",
    "batch.samples_per_step": "16",
    "batch.group_prefixes": "true",
    "batch.share_prefixes": "true",
    "optim.learning_rate": "1e-4",
    "optim.warmup_ratio": "0.1",
    "checkpoint.every": "0",
}
"""Keys of the training run, as on a command line; equal to ``examples/reading/run.toml``."""


@dataclass(frozen=True)
class Plan:
    """Settings of the command line."""

    out: Path
    questions: int | None
    """Number of held-out questions to ask, or None for all."""
    run: tuple[str, ...]
    """Words ``key=value`` of the training run: ``RECIPE`` with overrides."""


@dataclass(frozen=True)
class Data:
    """The rows on disk and the held-out documents."""

    train: Path
    eval: Path
    num_train_rows: int
    held_out: list[Document]


def parse(overrides: Sequence[str]) -> Plan:
    """Read the command line. Invalid settings are refused before anything is fetched."""
    given: dict[str, str] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or key in given:
            raise ConfigError(
                f"found {override!r} after taut demo; expected each key=value once; "
                "write e.g. steps=10"
            )
        if key.partition(".")[0] in ("model", "data"):
            raise ConfigError(
                f"found {override!r} after taut demo; expected the demo's own {key}; "
                "use taut sft for another"
            )
        given[key] = text
    named, number = given.pop("out", ""), 1
    out = Path(named or "runs/demo")
    while not named and out.exists():
        number += 1
        out = Path(f"runs/demo-{number}")
    count = given.pop("questions", None)
    if count is not None and (not count.isdecimal() or int(count) < 1):
        raise ConfigError(
            f"found questions={count}; expected a whole number from 1; write questions=50"
        )
    questions = None if count is None else int(count)
    # Load the run once with paths that need not exist, so that a mistake in a key shows here.
    recipe = {key: text for key, text in RECIPE.items() if key != "steps" or "epochs" not in given}
    plan = Plan(out, questions, tuple(f"{k}={v}" for k, v in {**recipe, **given}.items()))
    run = configure(plan, Path("demo"), Path("train.jsonl"), Path("eval.jsonl"))
    require_usable(out, resume=run.resume, overwrite=run.overwrite)
    return plan


def configure(plan: Plan, model: Path, train: Path, held_out: Path) -> Sft:
    """The training run of a plan."""
    fixed = [f"model={model}", f"data.train={train}", f"data.eval={held_out}", f"out={plan.out}"]
    return load(Sft, None, [*fixed, *plan.run])


def tell(plan: Plan) -> None:
    """Run the demo and print its results."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    started = time.monotonic()
    # Fetch the model, and build the data.
    cache = default_directory()
    show.opening(cache)
    model = fetch.get_model(cache)
    data = build_data(fetch.read_reading(cache), cache, plan.questions)
    show.data(data.num_train_rows, NUM_TRAIN, data.held_out)
    # Ask, train, and ask again.
    with show.asking("before training", data.held_out) as progress:
        before = ask(model, data.held_out, progress)
    show.report("before", before)
    taut.sft(configure(plan, model, data.train, data.eval))
    with show.asking("after training", data.held_out) as progress:
        after = ask(plan.out / "model", data.held_out, progress)
    # Write the numbers, and show them.
    steps = [event for event in read_events(plan.out / "events.jsonl") if event["kind"] == "step"]
    numbers = summary(before, after, steps)
    numbers["seconds"] = round(time.monotonic() - started, 1)
    text = json.dumps(numbers, indent=1, ensure_ascii=False)
    (plan.out / "demo.json").write_text(text + "\n", "utf-8")
    show.closing(before, after, steps, plan.out, numbers["seconds"])


def build_data(lines: Sequence[str], cache: Path, questions: int | None) -> Data:
    """Write the train and held-out rows into a folder of ``cache`` that is named by their hash."""
    train, held_out = split_documents(read_documents(lines), NUM_TRAIN, NUM_EVAL)
    held_out = first_questions(held_out, questions)
    content = json.dumps([[asdict(d) for d in part] for part in (train, held_out)])
    folder = cache / "reading" / hashlib.sha256(content.encode()).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    train_path, eval_path = folder / "train.jsonl", folder / "eval.jsonl"
    num_rows = write_rows(train_path, train)
    write_rows(eval_path, held_out)
    return Data(train_path, eval_path, num_rows, held_out)


def first_questions(documents: Sequence[Document], limit: int | None) -> list[Document]:
    """Cut documents to ``limit`` questions in total and drop empty ones; None keeps all questions."""
    kept: list[Document] = []
    for document in documents:
        left = None if limit is None else limit - sum(len(d.questions) for d in kept)
        if left is None or left > 0:
            kept.append(replace(document, questions=document.questions[:left]))
    return kept


def summary(before: Report, after: Report, steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The content of ``demo.json``."""
    return {
        "before": before.as_dict(),
        "after": after.as_dict(),
        "loss_first": steps[0]["loss"],
        "loss_last": steps[-1]["loss"],
        "num_tokens": sum(step["num_tokens"] for step in steps),
        "num_tokens_unshared": sum(step["num_tokens_unshared"] for step in steps),
        "train_seconds": round(sum(step["seconds"] for step in steps), 1),
        "answers": [
            {
                "question": old.row.columns["question"],
                "references": list(old.row.references),
                "before": old.completion.text.strip(),
                "after": new.completion.text.strip(),
            }
            for old, new in zip(before.answers, after.answers, strict=True)
        ],
    }
