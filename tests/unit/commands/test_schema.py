"""``taut schema``, and the classes of keys, which are read without torch."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.docs.pages import ROOT
from tests.helpers.all_commands import ALL

from taut.cli import config_class, main
from taut.commands.help import rows_of
from taut.commands.schema import schema_of
from taut.methods import METHODS
from taut.methods.method import class_of

EXAMPLES = sorted((ROOT / "examples").rglob("run.toml"))


@cache
def validator(method: str) -> jsonschema.Draft202012Validator:
    schema = schema_of(method)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_the_examples_are_what_their_schema_allows(path: Path) -> None:
    method = class_of(path, []).method
    assert [error.message for error in validator(method).iter_errors(_read(path))] == []


@pytest.mark.parametrize("method", METHODS)
def test_no_key_is_required_and_none_may_be_misspelled(method: str) -> None:
    allowed = validator(method)
    for run in ({}, {"method": method, "dtype": "bf16", "data": {"eval": "a.jsonl"}, "optim": {}}):
        assert allowed.is_valid(run), run
    for run in ({"stpes": 3}, {"steps": "3"}, {"optim": {"lr": 1e-4}}, {"method": "other"}):
        assert not allowed.is_valid(run), run


@pytest.mark.parametrize(
    ("method", "run", "is_valid"),
    [
        ("grpo", {"rollout": {"lag": 2, "engine": "local"}}, False),
        ("grpo", {"rollout": {"lag": 0, "engine": "local"}}, True),
        ("grpo", {"rollout": {"lag": 2}}, True),  # the engine may stand on the command line
        ("grpo", {"grpo": {"pass_k": 2, "advantage": "group"}}, False),
        ("grpo", {"grpo": {"pass_k": 2}}, True),
        ("grpo", {"shaping": {"clip": 1.0}, "grpo": {"advantage": "gdpo"}}, False),
        ("sft", {"parallel": {"tensor": 2}, "optim": {"name": "muon"}}, False),
        ("sft", {"parallel": {"tensor": 1}, "optim": {"name": "muon"}}, True),
        ("sft", {"optim": {"warmup_steps": 3, "warmup_ratio": 0.1}}, False),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(
    method: str, run: dict[str, Any], is_valid: bool
) -> None:
    assert validator(method).is_valid(run) == is_valid


def test_help_says_what_a_key_excludes_and_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grpo", "--help", "rollout.lag"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Excludes grpo.rollout_correction=none, " in said and "rollout.engine=local" in said
    assert main(["gkd", "--help", "rollout.max_staleness"]) == 0
    assert "Needs rollout.replay_groups." in capsys.readouterr().out


@pytest.mark.parametrize("words", [["online-dpo"], ["method=online_dpo"]])
def test_the_command_prints_the_schema(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["schema", *words]) == 0
    assert json.loads(capsys.readouterr().out) == schema_of("online_dpo")


def test_a_method_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "gpro"]) == 2
    assert "found method=gpro, which is no method; did you mean grpo" in (capsys.readouterr().err)


HEAVY = ("torch", "transformers", "numpy", "PIL", "jinja2", "httpx2")


def test_no_class_of_keys_loads_a_library_but_pydantic() -> None:
    """``taut COMMAND --help``, ``taut schema``, completion and refused keys take the time of these imports."""
    classes = [command.config for command in ALL.values() if command.config]
    code = (
        "import sys; from taut.io.user_code import named; from taut.commands.help import rows_of\n"
        "assert all(rows_of(named(name)) is not None for name in sys.argv[1:])\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, *classes], capture_output=True, text=True, check=True
    )
    assert len(classes) > 40 and ran.stdout == "[]\n"


@pytest.mark.parametrize("name", [name for name, it in ALL.items() if it.config])
def test_every_key_is_documented(name: str) -> None:
    assert [row.key for row in rows_of(config_class(ALL[name])) if not row.doc] == []


def test_the_help_of_a_method_from_outside_is_made_from_its_class(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(METHODS, "entries", dict(METHODS.entries))
    METHODS.register("own", "tests.helpers.picture_runs:Own", "a method of mine")
    monkeypatch.setattr("tests.helpers.picture_runs.Own", METHODS["sft"], raising=False)
    assert main(["own", "--help", "all"]) == 0
    kept = capsys.readouterr().out
    assert main(["sft", "--help", "all"]) == 0
    assert kept.splitlines()[1:] == capsys.readouterr().out.splitlines()[1:]


def _read(path: Path) -> object:
    return tomllib.loads(path.read_text())
