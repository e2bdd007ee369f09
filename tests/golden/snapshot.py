"""What a user sees of taut: the log and the files of a tiny run of each method, help, keys, checks and the public API.

Everything is read through the public surface: ``import taut``, the command line, the files in ``out`` and the pages in
docs/. Values that differ between machines or between two runs (times, paths, digests, versions) become ``<...>``, and
so does prose, which may be reworded: names, numbers and the order of events are what is pinned.

``test_picture.py`` compares a new snapshot with the pinned one in ``picture/``; ``record.py`` writes that one.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tests.golden.renames import Renames
from tests.helpers import judged_runs as judged
from tests.helpers import online_runs as online
from tests.helpers import picture_runs as shown
from tests.helpers.chat_runs import chats, save_model, write_rows
from tests.helpers.vision_models import tiny_vlm

import taut
from taut.cli import main

ROOT = Path(__file__).parents[2]
PICTURE = Path(__file__).with_name("picture")
STUB = ast.parse((ROOT / "src" / "taut" / "__init__.pyi").read_text(encoding="utf-8"))
"""The types of ``import taut``."""
RUNS: dict[str, Any] = tomllib.loads((PICTURE / "runs.toml").read_text(encoding="utf-8"))
"""The runs, with their keys as they were called when the picture was taken."""
EXAMINED = ("sft", "reward", "grpo")
"""The runs that ``taut check --full --json`` is asked about."""
RESUMED = "sft"
"""The run that goes on for a step after it has ended."""

VOLATILE = {
    *("time", "seconds", "seconds_blocked", "seconds_generating", "seconds_judging"),
    *("seconds_scoring", "version", "taut"),
}
"""Fields of events and of ``taut check --json``: times, durations and taut's version."""
PROSE = {"detail", "evidence", "remedy", "notes", "reason", "unit", "cause", "says", "question"}
PROSE |= {"data"}  # of the event `start`: rows, samples and tokens, counted in a sentence
"""Fields whose text may be reworded: pinned is whether there is any, and of a list how many."""
SIZES = {"run.output", "memory.peak", "memory.measured", "loss.dtype"}
"""Checks that give bytes: of the machine, or of files, whose format is not pinned; or how many operations there are,
which each version of a library has its own number of.
"""
RESOLVED_VOLATILE = ("taut", "directory", "day", "identity.environment")
"""Names in resolved.json, with what is under them."""

Json = Any


def write_inputs() -> None:
    """Models and rows of all runs, in the current directory."""
    rows = Path("rows")
    for folder in ("models", "rows", "out"):
        Path(folder).mkdir()
    save_model(Path("models/policy"), dtype=torch.float64)
    save_model(Path("models/other"), dtype=torch.float64, seed=1)
    tiny_vlm("qwen2_5_vl", Path("models/vision"))
    for number, directory in enumerate(sorted(Path("models").iterdir())):
        draw_weights(directory / "model.safetensors", number)
    write_rows(rows / "chats.jsonl", chats(13))
    write_rows(rows / "eval_chats.jsonl", chats(4, seed=9))
    for kind, make_rows in {"pairs": judged.pairs, "labels": judged.labels}.items():
        write_rows(rows / f"{kind}.jsonl", make_rows(12))
        write_rows(rows / f"eval_{kind}.jsonl", make_rows(5, seed=9))
    questions = online.questions(17)
    write_rows(rows / "questions.jsonl", questions[:13])
    write_rows(rows / "eval_questions.jsonl", questions[13:])
    write_rows(rows / "pictures.jsonl", shown.conversations(rows))


def draw_weights(file: Path, seed: int) -> None:
    """Other weights of the same shapes, which every processor draws alike: torch's normal numbers differ in their last
    bits, and a few steps make that a difference of 1e-5.
    """
    random = np.random.default_rng(seed)
    tensors = load_file(file)
    for name, tensor in sorted(tensors.items()):
        drawn = torch.from_numpy(random.random(tuple(tensor.shape))) - 0.5
        if tensor.ndim == 1 and name.endswith("weight"):  # of a norm
            drawn = 1 + drawn / 2
        tensors[name] = drawn.to(tensor.dtype)
    save_file(tensors, file, metadata={"format": "pt"})


def keys_of_run(name: str) -> dict[str, Any]:
    """The keys of a run under their old names, without ``out``."""
    return RUNS["common"] | RUNS["runs"][name]


def method_of_run(name: str) -> str:
    return "sft" if name.startswith("sft_") else name


def take_run(name: str, keys: Mapping[str, Any], renames: Renames) -> dict[str, Json]:
    """Train, and what is then in ``out``. ``renames`` give the present names of what is not pinned."""
    out = Path("out", name)
    getattr(taut, method_of_run(name))(out=str(out), **keys)
    if name == RESUMED:
        taut.resume(out, steps=keys["steps"] + 1)
    lines = (out / "events.jsonl").read_text(encoding="utf-8").splitlines()
    tree = json.loads((out / "resolved.json").read_text(encoding="utf-8"))
    return {
        "resolved": _normal_resolved(tree, renames),
        "events": [_normal_event(json.loads(line), renames) for line in lines],
        "files": list_files(out),
    }


def take_check(name: str, keys: Mapping[str, Any], renames: Renames) -> dict[str, Json]:
    """``taut check --full --json`` about a run: its exit code and its report."""
    words = [f"{key}={_word(value)}" for key, value in keys.items()]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main(["check", f"method={method_of_run(name)}", *words, "--full", "--json"])
    report = json.loads(printed.getvalue())
    return {"exit_code": code, **_normal_event(report, renames)}


def _word(value: Any) -> str:
    """A value as TOML, which for these is JSON but for tables."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_word(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_word, value)) + "]"
    return json.dumps(value)


def list_files(out: Path) -> list[str]:
    """Files and links, relative to ``out``; the name that TensorBoard makes has a time in it."""
    found = (path for path in out.rglob("*") if path.is_file() or path.is_symlink())
    names = sorted(path.relative_to(out).as_posix() for path in found)
    return [re.sub(r"tfevents\..*", "tfevents.<time>", name) for name in names]


def _normal_event(event: Mapping[str, Json], renames: Renames) -> dict[str, Json]:
    """An event, or a report of checks, without what differs between machines; names are not changed."""
    volatile, prose = renames.fields_now(VOLATILE), renames.fields_now(PROSE)
    decisions, numbers = renames.fields_now({"decisions"}), renames.fields_now({"value", "number"})
    sizes = {renames.tables["checks"].get(name, name) for name in SIZES}

    def normal(name: str, value: Json) -> Json:
        if name in volatile and not isinstance(value, int):
            return "<varies>"
        if name in prose:
            return f"<{len(value)} texts>" if isinstance(value, list) else value and "<text>"
        if isinstance(value, dict):
            is_size = not sizes.isdisjoint(it for it in value.values() if isinstance(it, str))
            return {
                key: "<varies>" if is_size and key in numbers and item else normal(key, item)
                for key, item in value.items()
            }
        if name in decisions:
            return [[title, _without_prose(choice), "<text>"] for title, choice, _ in value]
        if isinstance(value, list):
            return [normal("", item) for item in value]
        return value

    normalized: dict[str, Json] = normal("", event)
    return normalized


def _without_prose(value: str) -> str:
    """A decision's value: a name, a number or a path; words in a row may be reworded."""
    return "<text>" if " " in value else value


def _normal_resolved(tree: Mapping[str, Json], renames: Renames) -> dict[str, Json]:
    """resolved.json as dotted names."""
    flat = dict(flatten(tree))
    volatile = [renames.resolved(name) for name in RESOLVED_VOLATILE]
    decisions = renames.resolved("decisions")
    flat[decisions] = [
        [item["name"], _without_prose(item["value"]), item["reason"] and "<text>"]
        for item in flat[decisions]
    ]
    for path, value in flat.items():
        if any(path == prefix or path.startswith(f"{prefix}.") for prefix in volatile):
            flat[path] = "<varies>"
        elif isinstance(value, str) and re.fullmatch("[0-9a-f]{32,64}", value):
            flat[path] = "<digest>"
    return flat


def flatten(tree: Mapping[str, Json], prefix: str = "") -> Iterator[tuple[str, Json]]:
    """Every leaf with its dotted name; an empty table is a leaf."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def take_surface() -> dict[str, Json]:
    """What is seen without a run."""
    return {
        "commands": take_commands(),
        "keys": take_keys(),
        "checks": take_checks(),
        "api": {name: take_signature(name, getattr(taut, name)) for name in taut.__all__},
    }


def take_commands() -> dict[str, Json]:
    """Of every command in the order of ``taut --help``: how it is used, and its options with type and default."""
    names = r"^(?:usage:)? +taut (data [a-z]+|[a-z][a-z-]*)\b"
    listed = re.findall(names, _help("--help"), re.MULTILINE)
    found = {}
    for command in dict.fromkeys(listed):
        page = _help(*command.split(), "--help", "all")
        text = re.sub(r"\n {10}(?=\S)", " ", page)  # lines of 80 columns
        usage = re.search(r"^usage: (.*)$", text, re.MULTILINE)
        assert usage, f"taut {command} --help says no usage"
        options = re.findall(r"^  ([\w.]+)  \((.*?); (.*?)\)(?:, .*)?$", text, re.MULTILINE)
        told = {name: [kind, _default(default)] for name, kind, default in options}
        found[command] = {"usage": usage[1], "options": told}
    return found


def _default(text: str) -> str:
    """A default that is a sentence may be reworded."""
    return "<text>" if re.search(r"[a-z] [a-z]", text) and "[" not in text else text


def _help(*words: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(words) == 0
    return printed.getvalue()


def take_keys() -> dict[str, list[str]]:
    """docs/config.md: key -> type and default."""
    text = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    rows = [re.split(r" (?<!\\)\| ", row) for row in re.findall(r"^\| (`.*) \|$", text, re.M)]
    return {row[0].strip("`"): [row[1].replace("\\|", "|"), row[2]] for row in rows}


def take_checks() -> dict[str, list[str]]:
    """docs/check.md, in its order: name -> question and part."""
    text = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \| (.*) \| (quick|full) \|$", text, re.MULTILINE)
    return {name: [question, part] for name, question, part in rows}


def take_signature(name: str, value: Any) -> Json:
    """How a public name is called, by its types; of an exception its bases, of a data class its fields and properties.

    ``Run`` is a class of keys, which are pinned as keys.
    """
    if isinstance(value, str):
        return "text"
    if not callable(value):
        return "module"
    if not isinstance(value, type):
        return _signature(name, value)
    if issubclass(value, BaseException):
        bases = [base.__name__ for base in value.__mro__ if issubclass(base, taut.TautError)]
        return {"bases": bases, "exit_code": getattr(value, "exit_code", None)}
    if value is taut.Run:
        return "class"
    assert is_dataclass(value), f"{value} is a class of another kind: say how to pin it"
    properties = [name for name, it in vars(value).items() if isinstance(it, property)]
    return {"fields": {it.name: str(it.type) for it in fields(value)}, "properties": properties}


def _signature(name: str, function: Callable[..., Any]) -> str:
    """The parameters in ``taut/__init__.pyi``, with the keys of a run, which are pinned as keys, in one. Words of the
    command that may stand for keys, whose names end in ``_``, are left out.
    """
    (node,) = (it for it in STUB.body if isinstance(it, ast.FunctionDef) and it.name == name)
    names = [it.arg for it in node.args.kwonlyargs]
    words = [*node.args.posonlyargs, *node.args.args]
    inspect.signature(function).bind(*(None for _ in words), **dict.fromkeys(names))
    parameters = [
        f"positional_only {it.arg}: {ast.unparse(it.annotation)} = None"
        for it in node.args.posonlyargs
        if it.annotation and not it.arg.endswith("_")
    ]
    parameters += [
        f"positional_or_keyword {it.arg}: {ast.unparse(it.annotation)}"
        for it in node.args.args
        if it.annotation
    ]
    if (many := node.args.vararg) and many.annotation:
        parameters.append(f"var_positional {many.arg}: {ast.unparse(many.annotation)}")
    parameters += ["keyword_only full: bool = False"] if "full" in names else []
    parameters += ["var_keyword keys: Any"] if names else []
    assert node.returns is not None
    text = f"({', '.join(parameters)}) -> {ast.unparse(node.returns)}"
    return text.replace("_Text", "str | PathLike[str]")


@contextlib.contextmanager
def working_in(directory: Path) -> Iterator[None]:
    """Relative paths are meant from there, so that no path of a machine is in a run."""
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)
