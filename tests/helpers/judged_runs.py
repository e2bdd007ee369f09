"""Rows whose answers are judged, and small runs of every method that reads them.

``good`` answers have the word cat and others the word dog, so that a tiny model learns which is which.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.helpers.chat_runs import QUIET, WORDS, write_rows

import taut
from taut.config import from_mapping
from taut.methods import METHODS as RUNS
from taut.run.inputs import load_inputs
from taut.run.setup import Built, build
from taut.train import distributed

Rows = list[dict[str, Any]]

METHODS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dpo": ("dpo", "pairs", {}),
    "lists": ("dpo", "lists", {}),
    "kto": ("kto", "labels", {}),
    "orpo": ("orpo", "pairs", {}),
    "simpo": ("simpo", "pairs", {}),
    "cpo": ("cpo", "pairs", {}),
    "reward": ("reward", "pairs", {"reward.loss": "bradley_terry"}),
    "regression": ("reward", "scores", {"reward.loss": "regression"}),
    "process": ("reward", "steps", {"reward.loss": "process"}),
}
"""name -> the command, the rows it reads, the keys it is given."""


def pairs(num_rows: int, seed: int = 0) -> Rows:
    """A prompt with two answers, the better one called chosen; lengths are skewed."""
    return [
        {"prompt": prompt, "chosen": good, "rejected": bad}
        for prompt, good, bad in _drawn(num_rows, seed)
    ]


def lists(num_rows: int, seed: int = 0) -> Rows:
    """A prompt with three answers and their scores, two of which are equal in some rows."""
    return [
        {"prompt": prompt, "responses": [bad, good, f"{bad} {good}"], "scores": [0, 2, row % 3]}
        for row, (prompt, good, bad) in enumerate(_drawn(num_rows, seed))
    ]


def labels(num_rows: int, seed: int = 0) -> Rows:
    """A prompt with one answer that is good or bad."""
    return [
        {"prompt": prompt, "completion": (bad, good)[row % 2], "label": bool(row % 2)}
        for row, (prompt, good, bad) in enumerate(_drawn(num_rows, seed))
    ]


def scores(num_rows: int, seed: int = 0) -> Rows:
    """The same with a number."""
    return [
        {"prompt": prompt, "completion": (bad, good)[row % 2], "score": row % 2 + 0.5}
        for row, (prompt, good, bad) in enumerate(_drawn(num_rows, seed))
    ]


def steps(num_rows: int, seed: int = 0) -> Rows:
    """A prompt with an answer in steps, each labeled."""
    return [
        {"prompt": prompt, "completions": [good, bad, good], "labels": [True, False, True]}
        for prompt, good, bad in _drawn(num_rows, seed)
    ]


ROWS = {"pairs": pairs, "lists": lists, "labels": labels, "scores": scores, "steps": steps}


def keys_of(name: str, model: Path, place: Path, **keys: Any) -> dict[str, Any]:
    """Keys of a quiet run in float64 of one of ``METHODS``, on 12 rows in ``place``; ``__`` stands for a dot."""
    method, kind, given = METHODS[name]
    place.mkdir(exist_ok=True)
    files = {
        "data.train": write_rows(place / f"{kind}.jsonl", ROWS[kind](12)),
        "data.eval": write_rows(place / f"held_out_{kind}.jsonl", ROWS[kind](5, seed=9)),
    }
    paths = {"model": str(model), "out": str(place / name)}
    dotted = {key.replace("__", "."): value for key, value in keys.items()}
    named = {key: str(path) for key, path in files.items()}
    return {
        "method": method,
        **QUIET,
        **paths,
        **named,
        "check": "off",
        "steps": 6,
        **given,
        **dotted,
    }


def train(keys: Mapping[str, Any]) -> taut.Result:
    """A run of the method that the keys name."""
    result: taut.Result = getattr(taut, keys["method"])(**keys)
    return result


def make(keys: Mapping[str, Any]) -> Built:
    """The same run, built and not begun; its events go nowhere."""
    run = from_mapping(RUNS[keys["method"]], keys)
    ranks = distributed.start("cpu")
    inputs = load_inputs(run, ranks)
    return build(run, inputs, run.plan(inputs.train), ranks, emit=lambda kind, **fields: None)


def _drawn(num_rows: int, seed: int) -> list[tuple[str, str, str]]:
    """(prompt, good answer, bad answer); the answers begin alike."""
    draw = random.Random(seed)

    def text(most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))

    found = []
    for _ in range(num_rows):
        begin = text(3)
        found.append((f"{text(15)}\n", f"{begin} cat {text(5)}", f"{begin} dog {text(7)}"))
    return found
