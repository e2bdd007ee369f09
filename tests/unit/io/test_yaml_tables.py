"""YAML as TOML would have it, and what is refused with its line."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.chat_runs import chats, save_model, write_rows

import taut
from taut.config import load
from taut.errors import ConfigError
from taut.io.yaml_tables import NotRead, read
from taut.methods import METHODS

TOML = """
model = "m"
out = "no"
steps = 10
[data]
train = [ { path = "a.jsonl", weight = 0.5 }, "b.jsonl" ]
columns = { "a.b" = "x" }
[optim]
learning_rate = 1e-5
weight_decay = 0
[save]
merged = true
"""
YAML = """
# the same
model: m
out: no  # a text, as it looks
steps: 10
data:
  train:
    - path: a.jsonl
      weight: .5
    - b.jsonl
  columns: {"a.b": x}
optim.learning_rate: 1e-5
optim:
  weight_decay: 0
save: {merged: True}
"""


def test_a_document_is_what_toml_has() -> None:
    assert read(YAML) == tomllib.loads(TOML)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1.0e-5", 1e-5),
        ("2E+3", 2000.0),
        ("-3", -3),
        ("0777", 777),
        ("0x1f", 31),
        ("0o17", 15),
        ("12:30", "12:30"),
        ("2026-01-02", "2026-01-02"),
        ("no", "no"),
        ("on", "on"),
        ("Y", "Y"),
        ("False", False),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ('"true"', "true"),
        ("1_000", "1_000"),
        (".inf", float("inf")),
        ("5e", "5e"),
    ],
)
def test_a_value_is_what_it_looks_like(text: str, value: Any) -> None:
    found = read(f"key: {text}")["key"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: 1\na: 1", "line 2: the key 'a' is set twice"),
        ("a:\n  b: 1\n  c: 2\n  b: 1", "line 4: the key 'b' is set twice"),
        ("a.b: 1\na:\n  b: 1", "line 2: the key 'a' sets what another key sets"),
        ("a: 1\na.b: 1", "line 2: the key 'a.b' sets what another key sets"),
        ("a: &x [1]\nb: *x", "line 1: found an anchor"),
        ("a: !!python/object/apply:os.system ['true']", "line 1: found the tag"),
        ("- a\n- b", "line 1: found no keys"),
        ("text", "line 1: found no keys"),
        ("a: 1\n---\nb: 2", "line 2: "),
        ("a: [1\nb: 2", "line 2: "),
        ("a: 1\n\tb: 2", "line 2: "),
        ("true: 1", "line 1: found the key 'true'; expected a text"),
        ("[1, 2]: 1", "line 1: found a table or a list as a key"),
        ("a: " + "[" * 1500 + "]" * 1500, "nested too deeply|recursion"),
        ("a: " + "9" * 5000, "line 1: Exceeds the limit"),
    ],
)
def test_what_is_refused(text: str, reason: str) -> None:
    with pytest.raises(NotRead, match=reason):
        read(text)


def test_a_file_of_settings_may_be_either(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(TOML)
    for name in ("run.yaml", "run.yml"):
        (tmp_path / name).write_text(YAML)
        overrides = ["steps=5"]
        read_config = load(METHODS["sft"], tmp_path / name, overrides)
        assert read_config == load(METHODS["sft"], tmp_path / "run.toml", overrides)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("model: m\nsteps: ten", 'found steps="ten" at run.yaml; expected an integer'),
        ("model: m\nsave.merged: no", 'found save.merged="no" at run.yaml; expected true or false'),
        ("model: m\nstepz: 1", "unknown key 'stepz'"),
        (
            "model: m\nmodel: n",
            "run.yaml cannot be read as YAML: line 2: the key 'model' is set twice",
        ),
    ],
)
def test_an_error_names_key_or_line(text: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text + "\ndata: {train: a}\nout: o\n")
    with pytest.raises(ConfigError, match=error):
        load(METHODS["sft"], tmp_path / "run.yaml")


def test_a_run_and_its_resume_from_yaml(tmp_path: Path) -> None:
    file, out = tmp_path / "run.yaml", tmp_path / "out"
    train = write_rows(tmp_path / "train.jsonl", chats(6))
    file.write_text(
        f"model: {save_model(tmp_path / 'm')}\nout: {out}\nsteps: 1\ndata.train: {train}\ndevice: cpu\n"
        "check: off\noptim: {learning_rate: 1e-4}\ncheckpoint.every: 1\ncontract.prompts: 0\nstop_check.prompts: 0\n"
    )
    taut.sft(file)
    taut.sft(file, steps=2, resume=True)
    assert (out / "resolved.json").is_file()
    with pytest.raises(taut.TautError, match="out"):
        taut.sft(file)
