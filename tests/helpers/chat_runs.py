"""A small run for tests: a tiny model directory, JSONL chats, and ``taut.sft`` on them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from tests.helpers.tiny_models import save_tiny
from tests.helpers.tiny_tokenizers import tiny_tokenizer

import taut
from taut.train.log import Event, read_events

SENTENCE = "the cat dog ran over a big red house and then saw some birds in the blue sky"
WORDS = SENTENCE.split()
SYSTEM = "you are a helpful cat and you answer"
QUIET: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float64",
    "data.max_length": 200,
    "log.console": False,
    "optim.learning_rate": 1e-3,
    "optim.schedule": "constant",
    "batch.samples_per_step": 6,
    "stop_check.prompts": 0,
    "checkpoint.every": 0,
}

PLAIN: dict[str, Any] = {"check": "off", "contract__prompts": 0}
"""For ``sft``, of tests of training alone: no checks before it, no answers of the saved model after it, which take half
the time of so small a run.
"""


SAVED: dict[str, dict[str, bytes]] = {}
"""Models that this process has made -> their files."""


def save_model(directory: Path, name: str = "qwen2", **options: Any) -> Path:
    """A tiny model with a ChatML tokenizer."""
    key = repr((name, sorted(options.items())))
    if key not in SAVED:
        with TemporaryDirectory() as folder:
            made = save_tiny(name, Path(folder), tiny_tokenizer(), **options)
            SAVED[key] = {path.name: path.read_bytes() for path in made.iterdir()}
    directory.mkdir(parents=True, exist_ok=True)
    for file, content in SAVED[key].items():
        (directory / file).write_bytes(content)
    return directory


def chats(num_rows: int, seed: int = 0, words: int = 20) -> list[dict[str, Any]]:
    """Chats with one system prompt and skewed lengths."""
    draw = random.Random(seed)

    def text(most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))

    return [
        {
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": text(words)},
                {"role": "assistant", "content": text(8)},
            ]
        }
        for _ in range(num_rows)
    ]


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def words_of(keys: Mapping[str, Any]) -> list[str]:
    """Keys as words of the command line."""
    plain = {key: json.dumps(v) if isinstance(v, bool | list) else v for key, v in keys.items()}
    return [f"{key}={value}" for key, value in plain.items()]


def sft(model: Path, train: Path | str, out: Path, **keys: Any) -> taut.Result:
    """A quiet run in float64 on the CPU; a key with ``__`` stands for one with a dot."""
    dotted = {key.replace("__", "."): value for key, value in keys.items()}
    return taut.sft(
        **{"model": str(model), "data.train": str(train), "out": str(out), **QUIET, **dotted}
    )


def events(out: Path, kind: str) -> list[Event]:
    return [event for event in read_events(out / "events.jsonl") if event["kind"] == kind]


def column(out: Path, name: str) -> list[Any]:
    """One field of every step."""
    return [event[name] for event in events(out, "step")]


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a saved model or adapter."""
    (file,) = directory.glob("*.safetensors")
    return load_file(file)


def largest_difference(
    left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]
) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def decisions(out: Path) -> dict[str, tuple[str, str]]:
    """name -> (value, reason), from resolved.json."""
    found = json.loads((out / "resolved.json").read_text())["decisions"]
    return {item["name"]: (item["value"], item["reason"]) for item in found}
