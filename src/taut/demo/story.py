"""The demo from first to last: fetch, build the data, ask, train, ask again, show.

Deliberately not here: how any of it is done (``fetch``, ``reading``, ``ask``, ``taut.sft``) or
printed (``show``). May be imported by ``taut.demo`` only.
"""

from __future__ import annotations

import hashlib
import json
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import transformers.utils.logging as transformers_logging

from taut.api import sft
from taut.demo import fetch, show
from taut.demo.ask import Report, ask
from taut.demo.reading import Document, read_documents, split_documents, write_rows
from taut.errors import ConfigError, OutputError

NUM_TRAIN, NUM_EVAL = 40, 9

RECIPE: dict[str, Any] = {
    "steps": 40,
    "seed": 0,
    "dtype": "bfloat16",
    "batch": {"samples_per_step": 16, "group_prefixes": True, "share_prefixes": True},
    "optim": {"learning_rate": 1e-4, "warmup_ratio": 0.1},
}
"""What is trained; ``examples/reading/run.toml`` says the same and a test compares them."""


@dataclass(frozen=True)
class Plan:
    """What was asked for on the command line."""

    out: Path
    questions: int | None = None
    """How many held-out questions are asked; None: all."""
    run: dict[str, Any] = field(default_factory=dict)
    """The training run's keys: ``RECIPE`` and what overrides it."""


@dataclass(frozen=True)
class Data:
    """The rows on disk and the held-out documents."""

    train: Path
    eval: Path
    num_train_rows: int
    held_out: list[Document]


def parse(overrides: Sequence[str]) -> Plan:
    """``key=value`` pairs over ``RECIPE``."""
    run: dict[str, Any] = json.loads(json.dumps(RECIPE))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"found {override!r} after taut demo; expected key=value; write e.g. steps=10"
            )
        *path, name = key.split(".")
        node = run
        for part in path:
            node = node.setdefault(part, {})
        if isinstance(node.get(name), dict):
            raise ConfigError(
                f"found {override} after taut demo; expected one of its keys; "
                f"write {name}.KEY=VALUE"
            )
        node[name] = _value(text)
    for key in {"model", "data"} & run.keys():
        raise ConfigError(
            f"found {key} after taut demo; expected the demo's own; use taut sft for other {key}"
        )
    if "epochs" in run:
        del run["steps"]
    out, questions = run.pop("out", None), run.pop("questions", None)
    if questions is not None and (type(questions) is not int or questions < 1):
        raise ConfigError(
            f"found questions={questions}; expected a whole number from 1; write questions=50"
        )
    path_out = _free_out() if out is None else Path(str(out))
    if path_out.exists() and not run.get("overwrite") and any(path_out.iterdir()):
        raise OutputError(
            f"found files at out={path_out}; expected a new or empty folder; "
            "choose another or overwrite=true"
        )
    return Plan(path_out, questions, run)


def tell(plan: Plan) -> None:
    """Run it all and print it."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    started = time.monotonic()
    cache = fetch.cache_dir()
    show.opening(cache)
    model = fetch.get_model(cache)
    data = build_data(fetch.read_reading(cache), cache, plan.questions)
    show.data(data.num_train_rows, NUM_TRAIN, data.held_out)
    with show.asking("before training", data.held_out) as progress:
        before = ask(model, data.held_out, progress)
    show.report("before", before)
    sft(
        model=str(model),
        data={"train": str(data.train), "eval": str(data.eval)},
        out=str(plan.out),
        **plan.run,
    )
    with show.asking("after training", data.held_out) as progress:
        after = ask(plan.out / "model", data.held_out, progress)
    steps = read_steps(plan.out)
    numbers = summary(before, after, steps)
    numbers["seconds"] = round(time.monotonic() - started, 1)
    text = json.dumps(numbers, indent=1, ensure_ascii=False)
    (plan.out / "demo.json").write_text(text + "\n", "utf-8")
    show.closing(before, after, steps, plan.out, numbers["seconds"])


def build_data(lines: Sequence[str], cache: Path, questions: int | None) -> Data:
    """Write the train and held-out rows into a folder of ``cache`` named by their content."""
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
    """The first ``limit`` questions of ``documents``, documents without any left out; None: all."""
    kept: list[Document] = []
    for document in documents:
        left = None if limit is None else limit - sum(len(d.questions) for d in kept)
        if left is None or left > 0:
            kept.append(replace(document, questions=document.questions[:left]))
    return kept


def read_steps(out: Path) -> list[dict[str, Any]]:
    """The ``step`` events of a run."""
    lines = (out / "events.jsonl").read_text("utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == "step"]


def summary(before: Report, after: Report, steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What ``demo.json`` keeps."""
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
                "question": old.question.text,
                "references": list(old.question.references),
                "before": old.text,
                "after": new.text,
            }
            for old, new in zip(before.answers, after.answers, strict=True)
        ],
    }


def _value(text: str) -> Any:
    """``text`` as TOML has it, else the string itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _free_out() -> Path:
    """``runs/demo``, or the first of ``runs/demo-2``, ``runs/demo-3``, ... that does not exist."""
    path, number = Path("runs/demo"), 1
    while path.exists():
        number += 1
        path = Path(f"runs/demo-{number}")
    return path
