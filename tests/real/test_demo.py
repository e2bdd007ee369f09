"""The demo on the real model, in a minute: conversion, answers, two steps, what is left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from taut.data.render.render import Renderer
from taut.data.store.cache import default_directory
from taut.models.load import load_tokenizer
from taut_tools.demo import fetch, main
from taut_tools.demo.reading import MAX_ANSWER_WORDS, read_documents, split_documents
from taut_tools.demo.story import NUM_EVAL, NUM_TRAIN

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(
            (default_directory() / "wheels" / wheel.file).exists()
            for wheel in (fetch.MODEL_WHEEL, fetch.READING_WHEEL)
        ),
        reason="the demo's wheels are not in the cache; run make demo once",
    ),
]

EXPECTED = json.loads((Path(__file__).parents[2] / "examples/reading/expected.json").read_text())


def test_the_model_is_converted_once_and_speaks_its_template() -> None:
    folder = fetch.get_model(default_directory())
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert fetch.get_model(default_directory()) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    tokenizer = load_tokenizer(str(folder))
    stops = Renderer(tokenizer).stop_ids
    assert tokenizer.convert_ids_to_tokens(list(stops)) == ["<|im_end|>"]


def test_the_set_is_large_enough_and_its_parts_are_apart() -> None:
    documents = read_documents(fetch.read_reading(default_directory()))
    train, held_out = split_documents(documents, NUM_TRAIN, NUM_EVAL)
    assert len(train) == EXPECTED["train_documents"]
    assert sum(len(d.questions) for d in train) == EXPECTED["train_questions"]
    assert sum(len(d.questions) for d in held_out) == EXPECTED["questions"] >= 100
    assert not {d.text for d in train} & {d.text for d in held_out}
    for asked in (question for d in train for question in d.questions):
        assert len(asked.answer.split()) <= 2 * MAX_ANSWER_WORDS
        assert any(asked.answer in d.text for d in train)


def test_a_short_demo_trains_and_leaves_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main([f"out={out}", "steps=2", "questions=3"]) == 0
    numbers = json.loads((out / "demo.json").read_text("utf-8"))
    assert numbers["before"]["questions"] == numbers["after"]["questions"] == 3
    assert numbers["loss_first"] == pytest.approx(EXPECTED["loss_first"], rel=0.02)
    assert numbers["num_tokens_unshared"] > EXPECTED["sharing_at_least"] * numbers["num_tokens"]
    assert numbers["answers"][0]["before"] != ""
    assert (out / "model" / "model.safetensors").exists()
    printed = capsys.readouterr().out
    assert "exact match" in printed
    assert "tokens computed instead of" in printed


def test_the_whole_demo_reaches_what_is_expected(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert main([f"out={out}"]) == 0
    numbers = json.loads((out / "demo.json").read_text("utf-8"))
    before, after = numbers["before"], numbers["after"]
    assert after["questions"] == EXPECTED["questions"]
    assert before["exact_match"] <= EXPECTED["exact_match_before_at_most"]
    assert after["exact_match"] >= EXPECTED["exact_match_after_at_least"]
    assert after["ended_share"] >= EXPECTED["ended_after_at_least"]
    assert numbers["loss_last"] < numbers["loss_first"] / 2
