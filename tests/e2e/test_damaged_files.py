"""Damaged and hostile files at every command that reads them: one line, exit code 2, no traceback, no waiting.

The kinds of damage are those of tests/unit (checkpoints, model directories, data sets, the cache); here each command
meets some of them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.chat_runs import QUIET, chats, save_model, sft, words_of, write_rows
from tests.helpers.time_limits import time_limit

from taut.cli import main

SECONDS = 40
Change = Callable[[Path], object]


def told(*words: str) -> tuple[int, str]:
    """The exit code of a command, and what it printed on stderr."""
    errors = io.StringIO()
    with (
        time_limit(SECONDS),
        contextlib.redirect_stderr(errors),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        code = main(words)
    return code, errors.getvalue()


def require_one_line(message: str, *words: str) -> None:
    code, errors = told(*words)
    assert code == 2, (code, errors)
    assert errors.startswith("taut: error: ") and errors.count("\n") == 1, errors
    assert re.search(message, errors), errors


def fifo(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def text(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


def edit(name: str, **changes: Any) -> Change:
    def change(folder: Path) -> None:
        found = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(found | changes))

    return change


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, data, prompts, and a finished run with two checkpoints."""
    place = tmp_path_factory.mktemp("place")
    model = save_model(place / "model")
    train = write_rows(place / "train.jsonl", chats(12))
    write_rows(place / "prompts.jsonl", [{"prompt": "the cat", "answer": "dog"}])
    sft(model, train, place / "run", steps=4, checkpoint__every=2)
    return place


MODELS: dict[str, tuple[Change, str]] = {
    "1e9 layers": (
        edit("config.json", num_hidden_layers=10**9, layer_types=None),
        r"config\.json: found num_hidden_layers=1000000000; expected at most 2,000 layers",
    ),
    "nested deeply": (text("config.json", "[" * 100_000), r"config\.json is not JSON .*nested"),
    "NaN": (edit("config.json", rms_norm_eps=float("nan")), "found rms_norm_eps=nan"),
    "an end of text": (edit("config.json", eos_token_id="x"), "found eos_token_id=x"),
    "an unknown family": (edit("config.json", model_type="nosuch"), "nosuch"),
    "a FIFO as weights": (fifo("model.safetensors"), "it is a FIFO; expected a regular file"),
    "a FIFO as generation_config": (fifo("generation_config.json"), "it is a FIFO; expected a reg"),
    "a broken tokenizer": (
        text("tokenizer.json", "{"),
        "cannot be loaded as a tokenizer|has no scalar head",
    ),
}
READERS: dict[str, Callable[[Path, Path, Path], list[str]]] = {
    "generate": lambda model, place, out: [
        *("generate", str(model), f"prompts={place}/prompts.jsonl", f"out={out}/o.jsonl"),
    ],
    "eval": lambda model, place, out: [
        *("eval", str(model), f"data={place}/prompts.jsonl", "rewards=exact_match"),
    ],
    "export": lambda model, place, out: ["export", str(model), f"out={out}/x.gguf"],
    "show": lambda model, place, out: [
        *(
            "show",
            f"model={model}",
            f"data.train={place}/train.jsonl",
            f"out={out}/r",
            "device=cpu",
        ),
    ],
    "sft": lambda model, place, out: ["sft", *run_of(model, place, out)],
    "plan": lambda model, place, out: ["plan", *run_of(model, place, out)],
    "score": lambda model, place, out: [
        *("score", str(model), f"data={place}/train.jsonl", f"out={out}/s.jsonl"),
    ],
    "chat": lambda model, place, out: ["chat", str(model)],
}


def run_of(model: Path, place: Path, out: Path) -> list[str]:
    keys = {
        "model": str(model),
        "data.train": f"{place}/train.jsonl",
        "out": f"{out}/r",
        "steps": 1,
    }
    return words_of({**QUIET, **keys})


@pytest.mark.parametrize("command", READERS)
def test_a_hostile_model_directory(
    command: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    for number, (change, message) in enumerate(MODELS.values()):
        model = tmp_path / str(number)
        shutil.copytree(place / "model", model)
        change(model)
        require_one_line(message, *READERS[command](model, place, tmp_path))


def test_check_names_a_hostile_model_directory(place: Path, tmp_path: Path) -> None:
    for number, (change, message) in enumerate(MODELS.values()):
        model = tmp_path / str(number)
        shutil.copytree(place / "model", model)
        change(model)
        output = io.StringIO()
        with (
            time_limit(SECONDS),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
        ):
            code = main(["check", *run_of(model, place, tmp_path)])
        assert code in (1, 2)
        assert "Traceback" not in output.getvalue()
        flat = " ".join(output.getvalue().split())
        assert re.search(message, flat), flat


RUNS: dict[str, tuple[Change, str]] = {
    "resolved.json is a FIFO": (
        fifo("resolved.json"),
        r"resolved\.json cannot be read: it is a FIFO",
    ),
    "resolved.json is nested": (text("resolved.json", "[" * 100_000), r"resolved\.json is damaged"),
    "a day of text": (edit("resolved.json", day="xx"), r"resolved\.json is damaged: day: "),
    "steps of text": (edit("resolved.json", num_steps="a"), "damaged: num_steps: found"),
    "an identity of a number": (edit("resolved.json", identity=5), "damaged: identity: found 5"),
    "a configuration of a list": (edit("resolved.json", config=[1]), "found no 'config'"),
    "the lock is a FIFO": (fifo(".lock"), r"cannot be written: \.lock: it is not a regular file"),
    "the events are a FIFO": (fifo("events.jsonl"), r"events\.jsonl: it is not a regular file"),
    "meta.json is a FIFO": (
        fifo("checkpoints/step-000004/meta.json"),
        r"meta\.json cannot be read \(it is a FIFO",
    ),
    "the index is a FIFO": (fifo("checkpoints/step-000004/.metadata"), r"\.metadata is missing"),
    "the tensors are a FIFO": (fifo("checkpoints/step-000004/__0_0.distcp"), "distcp is missing"),
    "the tensors are cut": (
        text("checkpoints/step-000004/__0_0.distcp", "x"),
        r"__0_0\.distcp is damaged: its SHA-256",
    ),
}


@pytest.mark.parametrize("kind", RUNS)
def test_a_damaged_run_is_not_gone_on_with(kind: str, place: Path, tmp_path: Path) -> None:
    change, message = RUNS[kind]
    shutil.copytree(place / "run", tmp_path / "run")
    change(tmp_path / "run")
    require_one_line(message, "resume", str(tmp_path / "run"), "steps=6")
    code, errors = told("runs", str(tmp_path))
    assert (code, errors) == (0, "")


LAST: dict[str, dict[str, Any]] = {
    "a cursor of text": {"cursor": "x"},
    "three cursors": {"cursor": [1, 2, 3]},
    "a loss of text": {"loss": "x"},
    "metrics of a number": {"metrics": 3},
}


@pytest.mark.parametrize("kind", LAST)
def test_a_last_event_that_is_not_ours(kind: str, place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "run", tmp_path / "run")
    path = tmp_path / "run" / "events.jsonl"
    *lines, last = path.read_text().splitlines()
    changed = json.dumps(json.loads(last) | LAST[kind])
    path.write_text("\n".join([*lines, changed]) + "\n")
    require_one_line(r"events\.jsonl: its last event: ", "resume", str(tmp_path / "run"), "steps=6")


def test_a_fifo_in_the_place_of_any_file_that_a_command_is_given(
    place: Path, tmp_path: Path
) -> None:
    for name in ("t.jinja", "run.toml", "a.jsonl", "k", "r.yaml", "r.py"):
        os.mkfifo(tmp_path / name)
    run = ["sft", *run_of(place / "model", place, tmp_path)]
    generate = READERS["generate"](place / "model", place, tmp_path)
    for message, words in (
        ("template.*FIFO", [*run, f"data.template={tmp_path}/t.jinja"]),
        ("template.*FIFO", [*generate, f"template={tmp_path}/t.jinja"]),
        (r"run\.toml: it is a FIFO", ["sft", f"{tmp_path}/run.toml"]),
        ("found no file", [word.replace(f"{place}/train", f"{tmp_path}/a") for word in run]),
        ("found no file", [word.replace(f"{place}/prompts", f"{tmp_path}/a") for word in generate]),
        ("key_file.*FIFO", ["serve-reward", str(place / "model"), f"key_file={tmp_path}/k"]),
        (r"r\.yaml cannot be read .it is a FIFO", ["check", "--recipe", f"trl:{tmp_path}/r.yaml"]),
    ):
        require_one_line(message, *words)


def test_honest_files_are_read(place: Path, tmp_path: Path) -> None:
    """The same commands on what is not damaged."""
    short = "sampling.max_new_tokens=2"
    for name in ("generate", "eval", "export", "show"):
        words = READERS[name](place / "model", place, tmp_path)
        code, errors = told(*words, *([short] if name in ("generate", "eval") else []))
        assert (code, errors) == (0, ""), name
    shutil.copytree(place / "run", tmp_path / "run")
    assert told("resume", str(tmp_path / "run"), "steps=6") == (0, "")
