"""Bad input is one line with place, expectation and remedy; exit code 2; no traceback; nothing written."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.chat_runs import QUIET, chats, words_of, write_rows

from taut.cli import main

Spoil = Callable[[Path, dict[str, Any]], None]


def lines(row: str, number: int = 3) -> Callable[[Path, dict[str, Any]], None]:
    """Put ``row`` in the place of line ``number`` of the data."""

    def spoil(place: Path, keys: dict[str, Any]) -> None:
        path = place / "train.jsonl"
        text = path.read_text().splitlines()
        text[number - 1] = row
        path.write_text("\n".join(text) + "\n")

    return spoil


def keys_are(**changes: Any) -> Spoil:
    def spoil(place: Path, keys: dict[str, Any]) -> None:
        keys.update({name.replace("__", "."): value for name, value in changes.items()})

    return spoil


def model_without(*patterns: str) -> Spoil:
    def spoil(place: Path, keys: dict[str, Any]) -> None:
        found = [path for pattern in patterns for path in (place / "model").glob(pattern)]
        assert found, patterns
        for path in found:
            path.unlink()

    return spoil


def without_template(place: Path, keys: dict[str, Any]) -> None:
    for path in (place / "model").glob("*template*"):
        path.unlink()
    path = place / "model" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("chat_template", None)
    path.write_text(json.dumps(config))


def out_below_a_file(place: Path, keys: dict[str, Any]) -> None:
    (place / "file").write_text("")
    keys["out"] = str(place / "file" / "run")


def out_is_a_file(place: Path, keys: dict[str, Any]) -> None:
    (place / "file").write_text("")
    keys["out"] = str(place / "file")


def out_not_empty(place: Path, keys: dict[str, Any]) -> None:
    (place / "run").mkdir()
    (place / "run" / "mine.txt").write_text("keep me")


def overwrite_what_is_no_run(place: Path, keys: dict[str, Any]) -> None:
    out_not_empty(place, keys)
    keys["overwrite"] = True


def overwrite_the_model(place: Path, keys: dict[str, Any]) -> None:
    (place / "resolved.json").write_text("{}")
    keys |= {"out": str(place), "overwrite": True}


def missing_in_toml(place: Path, keys: dict[str, Any]) -> None:
    (place / "run.toml").write_text('[data]\ntrian = "a.jsonl"\n')
    keys["TOML"] = str(place / "run.toml")


USER = '{"role": "user", "content": "hi"}'
ANSWER = '{"role": "assistant", "content": "ho"}'

CASES: dict[str, tuple[Spoil, str]] = {
    # name: (what is spoilt, the parts of the message in order: found, place, expectation or remedy)
    "unknown key": (
        keys_are(sede=1),
        r"unknown key 'sede' on the command line.*did you mean 'seed'",
    ),
    "unknown nested key": (keys_are(batch__sample=1), r"unknown key 'batch\.sample'"),
    "unknown key in a file": (
        missing_in_toml,
        r"unknown key 'data\.trian' at run\.toml; did you mean 'data\.train'",
    ),
    "wrong kind": (
        keys_are(steps="many"),
        r"found steps=\"many\" on the command line; expected an integer; correct",
    ),
    "steps below one": (keys_are(steps=0), r"found steps=0 on the command line; expected .*1"),
    "unknown dtype": (keys_are(dtype="float8"), r"found dtype=\"float8\".*expected .*'float32'"),
    "unknown device": (keys_are(device="tpu"), r"device=tpu.*expected auto, cpu"),
    "steps and epochs": (
        keys_are(epochs=2.0),
        r"steps=2 with epochs=2: .*; leave steps or epochs out",
    ),
    "resume and overwrite": (keys_are(resume=True, overwrite=True), r"resume.*overwrite.*keep one"),
    "missing file": (
        lambda place, keys: (place / "train.jsonl").unlink(),
        r"no file or directory train\.jsonl; expected.*; check the path",
    ),
    "broken line": (lines('{"messages": ['), r"train\.jsonl:3.*JSON.*;"),
    "row without targets": (lines(f'{{"messages": [{USER}]}}'), r"train\.jsonl:3.*;"),
    "unknown role": (
        lines(f'{{"messages": [{USER.replace("user", "usr")}, {ANSWER}]}}'),
        r"train\.jsonl:3.*'usr'.*expected.*user",
    ),
    "empty file": (
        lambda place, keys: (place / "train.jsonl").write_text(""),
        r"train\.jsonl.*no rows.*;",
    ),
    "too long": (keys_are(data__max_length=40), r"train\.jsonl:\d+.*\d+ tokens.*40.*;"),
    "no model": (
        keys_are(model="nowhere/at/all"),
        r"model=nowhere/at/all does not exist; expected",
    ),
    "no tokenizer": (model_without("*token*", "*.jinja"), r"model.*tokenizer.*;"),
    "no template": (without_template, r"template.*;"),
    "no weights": (model_without("*.safetensors"), r"no weights; expected model\.safetensors"),
    "broken config": (
        lambda place, keys: (place / "model" / "config.json").write_text("{"),
        r"config\.json is not JSON.*;",
    ),
    "out below a file": (
        out_below_a_file,
        r"out=.*file/run cannot be made.*is a file; name another",
    ),
    "out is a file": (out_is_a_file, r"out=.*file is a file; expected a directory"),
    "out not empty": (out_not_empty, r"out=.*run exists and is not empty; .*resume.*overwrite"),
    "overwriting no run": (overwrite_what_is_no_run, r"out=.*not a taut run.*name another"),
    "overwriting the model": (
        overwrite_the_model,
        r"overwrite=true would delete .*model, which this run reads.*name another out",
    ),
    "varlen on the CPU": (
        keys_are(attention="varlen"),
        r"attention=varlen cannot run.*CUDA.*attention=auto",
    ),
    "unknown attention": (
        keys_are(attention="flash"),
        r"attention=flash is not known; expected auto",
    ),
    "template file": (
        keys_are(data__template="none.jinja"),
        r"data\.template: cannot read none\.jinja.*;",
    ),
    "lora targets": (
        keys_are(lora__rank=2, lora__targets=["nothing"]),
        r"lora\.targets.*nothing.*;",
    ),
    "freeze pattern": (keys_are(freeze=["nothing*"]), r"freeze.*nothing.*;"),
    "nothing left to train": (keys_are(freeze=["*"]), r"freeze.*no parameter to train"),
}


def tree(place: Path) -> dict[str, str]:
    """Every file below a directory, with a hash."""
    return {
        str(path.relative_to(place)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "directory"
        for path in place.rglob("*")
    }


@pytest.mark.parametrize("name", CASES)
def test_one_line_exit_code_two_and_nothing_written(
    name: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = tmp_path / "place"
    shutil.copytree(model, place / "model")
    write_rows(place / "train.jsonl", chats(6))
    monkeypatch.chdir(place)
    keys = {
        **QUIET,
        "model": str(place / "model"),
        "data.train": "train.jsonl",
        "out": "run",
        "steps": 2,
    }
    spoil, message = CASES[name]
    spoil(place, keys)
    files = [keys.pop("TOML")] if "TOML" in keys else []
    before = tree(place)
    code = main(["sft", *files, *words_of(keys)])
    out, err = capsys.readouterr()
    assert code == 2, err
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("taut: error: ")
    assert "Traceback" not in err
    assert re.search(message, err), err
    assert tree(place) == before


def test_the_same_data_unspoilt_trains(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that the cases above fail for their own reason."""
    write_rows(tmp_path / "train.jsonl", chats(6))
    keys = {
        **QUIET,
        "model": str(model),
        "data.train": str(tmp_path / "train.jsonl"),
        "out": str(tmp_path / "run"),
        "steps": 2,
    }
    assert main(["sft", *words_of(keys)]) == 0
    assert capsys.readouterr() == ("", "")
