"""``taut tokenize`` makes what a run then finds in the cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.helpers.chat_runs import chats, save_model, sft, write_rows

from taut.cli import main
from taut.train.log import read_events


def test_a_run_finds_what_was_tokenized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, cache = save_model(tmp_path / "model"), tmp_path / "cache"
    train = write_rows(tmp_path / "a.jsonl", chats(8))
    held_out = write_rows(tmp_path / "b.jsonl", chats(3, seed=1))
    words = [
        f"model={model}",
        f"data.train={train}",
        f"data.eval={held_out}",
        f"data.cache={cache}",
    ]
    assert main(["tokenize", *words, "data.max_length=200"]) == 0
    said = capsys.readouterr().out
    assert f"data.train: {train}: tokenized (not in the cache)" in said
    assert "data.eval: 3 rows, 3 samples" in said and f"kept in {cache}" in said
    keys = {"data__eval": str(held_out), "data__cache": str(cache)}
    done = sft(model, train, tmp_path / "out", steps=1, check="off", contract__prompts=0, **keys)
    assert len(list(cache.iterdir())) == 2
    (started,) = (e for e in read_events(done.out / "events.jsonl") if e["kind"] == "start")
    assert str(started).count("from the cache") >= 1


def test_prompts_are_not_tokenized_ahead(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["tokenize", "method=grpo", "model=DIR", "data.train=a.jsonl", "rewards=length"]) == 2
    )
    assert "method=grpo learns from completions that it generates" in capsys.readouterr().err
