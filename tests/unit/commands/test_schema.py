"""``taut schema``, and the files in which the keys of every command are kept."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import jsonschema
import pytest
from tests.docs.pages import ROOT

from taut.cli import WITH_KEY, commands, config_class, main
from taut.commands import keys
from taut.methods import METHODS
from taut.methods.method import class_of

EXAMPLES = sorted((ROOT / "examples").rglob("run.toml"))


def validator(method: str) -> jsonschema.Draft202012Validator:
    schema = keys.schema_of(method)
    assert schema is not None
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_the_examples_are_what_their_schema_allows(path: Path) -> None:
    method = class_of(path, []).method
    assert [error.message for error in validator(method).iter_errors(_read(path))] == []


@pytest.mark.parametrize("method", METHODS)
def test_no_key_is_required_and_none_may_be_misspelt(method: str) -> None:
    allowed = validator(method)
    for run in ({}, {"method": method, "dtype": "bf16", "data": {"eval": "a.jsonl"}, "optim": {}}):
        assert allowed.is_valid(run), run
    for run in ({"stpes": 3}, {"steps": "3"}, {"optim": {"lr": 1e-4}}, {"method": "other"}):
        assert not allowed.is_valid(run), run


@pytest.mark.parametrize("words", [["online-dpo"], ["method=online_dpo"]])
def test_the_command_prints_the_schema(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["schema", *words]) == 0
    assert json.loads(capsys.readouterr().out) == keys.schema_of("online_dpo")


def test_a_method_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "gpro"]) == 2
    assert "found method=gpro, which has no schema here; did you mean grpo" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("name", [name for name, it in commands().items() if it.config])
def test_the_kept_keys_are_those_of_the_class(name: str) -> None:
    for command in (commands()[name], WITH_KEY["check", "recipe"]):
        assert command.config is not None
        assert keys.rows_of(command.config) == keys.described(config_class(command))


def test_the_help_of_a_method_from_outside_is_made_from_its_class(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(METHODS, "entries", dict(METHODS.entries))
    METHODS.register("own", "tests.picture_runs:Own", "a method of mine")
    monkeypatch.setattr("tests.picture_runs.Own", METHODS["sft"], raising=False)
    assert main(["own", "--help", "all"]) == 0
    kept = capsys.readouterr().out
    assert main(["sft", "--help", "all"]) == 0
    assert kept.splitlines()[1:] == capsys.readouterr().out.splitlines()[1:]


def _read(path: Path) -> object:
    return tomllib.loads(path.read_text())
