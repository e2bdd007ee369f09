"""``taut verify engine=server``: what a server does otherwise than the contract says is found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.chat_runs import chats, save_model, sft, write_rows
from tests.helpers.fake_vllm import FakeServer, Fault

from taut.commands.settings import Verify
from taut.commands.verify import run, verify
from taut.evals.contract import read_contract

END = 482


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose contract says what the fake server answers."""
    place = tmp_path_factory.mktemp("served")
    train = write_rows(place / "rows.jsonl", chats(1))
    keys: dict[str, Any] = {"steps": 1, "batch__samples_per_step": 1}
    model = sft(save_model(place / "qwen2"), train, place / "out", **keys).model
    tree = json.loads((model / "contract.json").read_text())
    (golden,) = tree["goldens"]
    first = golden["prompt"]["ids"][-1] + 1
    golden |= {
        "ids": [first, first + 1, first + 2, END],
        "logp": [-2.0] * 4,
        "margin": [1.0] * 4,
        "finish_reason": "stop",
    }
    (model / "contract.json").write_text(json.dumps(tree))
    return model


Ask = Callable[..., dict[str, str]]


@pytest.fixture
def ask(saved: Path) -> Ask:
    """The outcome of each question, put to a server that differs as told."""

    def asked(**keys: Any) -> dict[str, str]:
        ids = read_contract(saved).goldens[0].prompt.ids
        settings = {"ends": (END,), "rendered": ids, "max_model_len": 256} | keys
        with FakeServer(**settings) as server:
            config = Verify(model=str(saved), engine="server", urls=server.url)
            return {finding.name: finding.outcome for finding in verify(config)}

    return asked


def differing(outcomes: dict[str, str]) -> set[str]:
    return {name for name, outcome in outcomes.items() if outcome != "passed"}


def test_a_server_that_does_the_same(ask: Ask) -> None:
    outcomes = ask()
    assert differing(outcomes) == set()
    assert "server prompts" in outcomes


def test_a_server_that_renders_another_prompt(ask: Ask) -> None:
    assert differing(ask(rendered=[481, 5, 6])) == {"server prompts"}


def test_a_server_with_other_log_probs(ask: Ask) -> None:
    def change(choice: dict[str, Any]) -> None:
        choice["logprobs"]["token_logprobs"][-1] -= 0.8

    def later(body: Any, count: int) -> Fault | None:
        return Fault(changes=change) if body["temperature"] == 0 else None

    assert differing(ask(faults=later)) == {"logprobs"}


def test_a_server_that_answers_otherwise(ask: Ask) -> None:
    def change(choice: dict[str, Any]) -> None:
        choice["token_ids"][1] += 1

    def later(body: Any, count: int) -> Fault | None:
        return Fault(changes=change) if body["temperature"] == 0 else None

    found = ask(faults=later)
    assert found["continuations"] == "failed"
    assert found["stops"] == "skipped"


def test_a_server_that_does_not_stop_by_itself(ask: Ask) -> None:
    """It would, told the stop set: its own generation_config names another token."""

    def change(choice: dict[str, Any]) -> None:
        choice["token_ids"].append(5)
        choice["finish_reason"] = "length"
        choice["logprobs"]["token_logprobs"].append(-2.0)
        choice["logprobs"]["top_logprobs"].append({"a": -2.0})

    def later(body: Any, count: int) -> Fault | None:
        is_unaided = body["temperature"] == 0 and not body["stop_token_ids"]
        return Fault(changes=change) if is_unaided else None

    assert differing(ask(faults=later)) == {"stops"}


def test_log_probs_of_another_kind_are_not_compared(ask: Ask) -> None:
    assert ask(mode="processed")["logprobs"] == "skipped"


def test_the_exit_code_says_so(saved: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(saved, tmp_path / "copied")
    with FakeServer(ends=(END,), rendered=[1], max_model_len=256) as server:
        assert run(Verify(model=str(copied), engine="server", urls=server.url)) == 1
