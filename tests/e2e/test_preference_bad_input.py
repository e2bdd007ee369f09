"""What does not fit a method is one line with place, expectation and remedy; exit code 2; nothing written."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.test_bad_input import tree
from tests.helpers.chat_runs import chats, save_model, words_of, write_rows
from tests.helpers.judged_runs import keys_of, pairs, train
from tests.helpers.tiny_models import save_tiny
from tests.helpers.tiny_tokenizers import tiny_tokenizer

from taut.cli import main

Spoil = Callable[[Path, dict[str, Any]], str | None]
"""Changes the place or the keys; a word that it returns is the command."""


def with_keys(**changes: Any) -> Spoil:
    return lambda place, keys: keys.update(
        {name.replace("__", "."): value for name, value in changes.items()}
    )


def with_rows(rows: list[dict[str, Any]]) -> Spoil:
    def spoil(place: Path, keys: dict[str, Any]) -> None:
        write_rows(Path(keys["data.train"]), rows)

    return spoil


def to_sft(place: Path, keys: dict[str, Any]) -> str:
    return "sft"


def method_in_a_file(place: Path, keys: dict[str, Any]) -> str:
    (place / "run.toml").write_text('method = "dpo"\n')
    keys["TOML"] = str(place / "run.toml")
    return "sft"


def other_tokenizer(place: Path, keys: dict[str, Any]) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<mine>"])
    tokenizer.save_pretrained(keys["model"])
    save_model(place / "beside")
    keys["reference.model"] = str(place / "beside")


def stateful(place: Path, keys: dict[str, Any]) -> None:
    shutil.rmtree(keys["model"])
    save_tiny("bamba", Path(keys["model"]), tiny_tokenizer())


def stateful_reference(place: Path, keys: dict[str, Any]) -> None:
    save_tiny("bamba", place / "beside", tiny_tokenizer())
    keys["reference.model"] = str(place / "beside")


def reward_model(place: Path, keys: dict[str, Any]) -> None:
    keys["model"] = str(place / "reward")


def reward_reference(place: Path, keys: dict[str, Any]) -> None:
    keys["reference.model"] = str(place / "reward")


def equal_answers(place: Path, keys: dict[str, Any]) -> None:
    write_rows(Path(keys["data.train"]), [{"prompt": "a cat", "chosen": " b", "rejected": " b"}])


CASES: dict[str, tuple[str, Spoil, str]] = {
    # name: (method, what is spoilt, the message)
    "chats to dpo": ("dpo", with_rows(chats(6)), r"pairs\.jsonl:1: .*chosen.*rejected.*;"),
    "chats to kto": ("kto", with_rows(chats(6)), r"labels\.jsonl:1: .*label.*;"),
    "pairs to sft": ("dpo", to_sft, r"pairs\.jsonl:1.*chosen.*;"),
    "pairs to regression": ("regression", with_rows(pairs(4)), r"scores\.jsonl:1: .*score.*;"),
    "pairs to process": ("process", with_rows(pairs(4)), r"steps\.jsonl:1: .*labels.*;"),
    "equal answers": ("dpo", equal_answers, r"pairs\.jsonl:1.*same, token for token; expected .*;"),
    "dropout": (
        "dpo",
        with_keys(lora__rank=2, lora__dropout=0.1),
        r"lora\.dropout=0\.1 with method=dpo: .*; leave",
    ),
    "noise": (
        "reward",
        with_keys(noise__neftune_alpha=5.0),
        r"noise\.neftune_alpha=5 with method=reward: .*; leave",
    ),
    "kto of one": (
        "kto",
        with_keys(batch__samples_per_step=1),
        r"samples_per_step=1 with kto\.loss=kto.*loss=apo_zero",
    ),
    "kto and a file": (
        "kto",
        with_keys(reference__file="kept"),
        r"reference\.file=kept with kto\.loss=kto: .*set kto\.loss=",
    ),
    "reference with other tokens": (
        "dpo",
        other_tokenizer,
        r"reference\.model=.*its tokenizer has None for '<mine>'.*;",
    ),
    "no such reference": (
        "dpo",
        with_keys(reference__model="nowhere/at/all"),
        r"reference\.model: model=nowhere/at/all does not exist; expected",
    ),
    "state across tokens": (
        "dpo",
        stateful,
        r"one sample at a time.*taut dpo compares samples; expected",
    ),
    "a reference with state": (
        "dpo",
        stateful_reference,
        r"reference\.model=.*one sample at a time.*; expected",
    ),
    "dpo of a reward model": ("dpo", reward_model, r"reward.*;"),
    "a reward model as reference": (
        "dpo",
        reward_reference,
        r"reference\.model=.* is a reward model.*;",
    ),
    "method of another command": (
        "dpo",
        method_in_a_file,
        r"method=dpo: this is taut sft; expected sft; give the run to taut dpo",
    ),
    "key of another method": ("dpo", with_keys(kto__beta=1.0), r"unknown key 'kto"),
    "answers of a reward model": (
        "reward",
        with_keys(eval__answers__rewards="exact_match"),
        r"eval\.answers\.rewards or eval\.metrics is set and a reward model writes no answers.*;",
    ),
    "no such metric": (
        "dpo",
        with_keys(eval__best="rewards/accurate", eval__every=1),
        r"eval\.best=rewards/accurate; expected one of loss, rewards/accuracy, rewards/margin;",
    ),
    "no margins": (
        "reward",
        with_keys(reward__margin=1.0),
        r"no answer has a margin, and reward\.margin is set; exp",
    ),
    "beta": ("dpo", with_keys(dpo__beta=0), r"dpo\.beta=0.*expected.*greater than 0"),
    "loss": ("dpo", with_keys(dpo__loss="sigmoidal"), r"dpo\.loss=\"sigmoidal\""),
}


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A reward model's directory, as a run leaves it."""
    place = tmp_path_factory.mktemp("reward")
    return train(keys_of("reward", model, place, steps=1)).model


@pytest.mark.parametrize("name", CASES)
def test_one_line_exit_code_two_and_nothing_written(
    name: str,
    model: Path,
    reward: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = tmp_path / "place"
    shutil.copytree(model, place / "model")
    shutil.copytree(reward, place / "reward")
    monkeypatch.chdir(place)
    method, spoil, message = CASES[name]
    keys = keys_of(method, place / "model", place, steps=2)
    command, keys["out"] = keys.pop("method"), "run"
    command = spoil(place, keys) or command
    files = [keys.pop("TOML")] if "TOML" in keys else []
    before = tree(place)
    code = main([command, *files, *words_of(keys)])
    out, err = capsys.readouterr()
    assert code == 2, err
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("taut: error: ")
    assert re.search(message, err), err
    assert tree(place) == before


@pytest.mark.parametrize("command", ["generate", "eval", "chat"])
def test_a_reward_model_writes_no_answers(
    command: str, reward: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "a cat", "answer": "b"}])
    words = {
        "generate": [f"prompts={prompts}", f"out={tmp_path / 'answers.jsonl'}"],
        "eval": [f"data.path={prompts}", f"out={tmp_path / 'answers'}"],
        "chat": [],
    }
    before = tree(tmp_path)
    code = main([command, f"model={reward}", *words[command]])
    out, err = capsys.readouterr()
    assert code == 2, (out, err)
    assert re.search(r"taut: error: .*reward.*;", err), err
    assert err.count("\n") == 1, err
    assert tree(tmp_path) == before
