"""The life of a run, with checks that are stubs: when they are asked, and what becomes of their answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest
from tests.helpers.chat_runs import QUIET, chats, events, save_model, write_rows

from taut.config import Decision, from_mapping
from taut.errors import CheckFailed, DataError
from taut.methods.method import RunConfig
from taut.methods.sft import Sft
from taut.run.lifecycle import Advisers, train
from taut.train.log import read_events


class Asked:
    """Answers of checks."""

    def __init__(self, name: str) -> None:
        self.name = name

    def as_events(self) -> list[dict[str, Any]]:
        return [{"name": self.name, "outcome": "passed", "value": None, "detail": ""}]


def run_in(place: Path) -> RunConfig:
    model, data = save_model(place / "model"), write_rows(place / "train.jsonl", chats(8))
    keys = {"model": str(model), "data.train": str(data), "data.cache": str(place / "cache")}
    once = {"steps": 1, "contract.prompts": 0, "out": str(place / "out")}
    return from_mapping(Sft, {**QUIET, **keys, **once})


def undecided(run: RunConfig, *_: object) -> tuple[RunConfig, list[Decision]]:
    return run, []


def refuse(*_: object) -> NoReturn:
    raise CheckFailed("it would train nothing")


def test_nodes_are_asked_before_the_data_and_the_run_before_out_is_claimed(tmp_path: Path) -> None:
    run, asked = run_in(tmp_path), list[str]()

    def look(*_: object) -> None:
        asked.append("nodes")

    with pytest.raises(CheckFailed, match="it would train nothing"):
        train(run, Advisers(look, refuse, lambda *_: "", undecided))
    assert asked == ["nodes"] and not (tmp_path / "out").exists()
    (tmp_path / "train.jsonl").write_text("{}\n")
    with pytest.raises(DataError):
        train(run, Advisers(look, refuse, lambda *_: "", undecided))
    assert asked == ["nodes", "nodes"] and not (tmp_path / "out").exists()


def test_answers_of_checks_follow_the_first_event_in_the_order_asked(tmp_path: Path) -> None:
    advisers = Advisers(
        lambda *_: Asked("nodes"), lambda *_: Asked("run"), lambda *_: "", undecided
    )
    result = train(run_in(tmp_path), advisers)
    kinds = [event["kind"] for event in read_events(result.out / "events.jsonl")]
    assert kinds[:3] == ["start", "check", "check"] and kinds[-1] == "end"
    assert [event["name"] for event in events(result.out, "check")][:2] == ["nodes", "run"]
    assert result.steps == 1 and (result.model / "config.json").is_file()
