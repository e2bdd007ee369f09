"""``import taut``: what its functions take, return and raise."""

from __future__ import annotations

import inspect
import subprocess
import sys
import traceback
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import pytest
from tests.helpers.chat_runs import chats, save_model, write_rows

import taut
from taut.commands import functions
from taut.commands.functions import plain_keys
from taut.config import from_mapping
from taut.data.settings import DataConfig
from taut.errors import ConfigError
from taut.io.user_code import GIVEN
from taut.methods import METHODS
from taut.methods.method import RunConfig


def reward(text: str) -> float:
    return float(len(text))


class Sink:
    def __call__(self, event: dict[str, Any]) -> None: ...


class Environment:
    def step(self, text: str, calls: list[Any]) -> None: ...


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


# -- keys


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ("a.jsonl", {"data.train": "a.jsonl"}),
        (Path("a.jsonl"), {"data.train": Path("a.jsonl")}),
        (["a.jsonl", "b.jsonl"], {"data.train": ["a.jsonl", "b.jsonl"]}),
        ({"path": "a", "weight": 2}, {"data.train": {"path": "a", "weight": 2}}),
        ({"train": "a.jsonl"}, {"data": {"train": "a.jsonl"}}),
        ({}, {"data": {}}),
        (DataConfig(train="a.jsonl"), {"data": DataConfig(train="a.jsonl")}),
    ],
)
def test_data_alone_is_what_trains(given: Any, plain: dict[str, Any]) -> None:
    assert plain_keys(RunConfig, {"data": given}) == plain
    more = plain_keys(RunConfig, {"data": given, "data.eval": "e"})
    assert more == {**plain, "data.eval": "e"}


def test_paths_and_numbers_of_numpy_are_values(tmp_path: Path) -> None:
    keys = {"model": tmp_path, "out": tmp_path / "o", "steps": np.int64(3), "data": Path("a.jsonl")}
    run = from_mapping(METHODS["sft"], plain_keys(METHODS["sft"], keys))
    assert (run.model, run.out, run.steps) == (str(tmp_path), str(tmp_path / "o"), 3)
    assert run.data.train == "a.jsonl"


def test_code_has_a_name_where_a_key_takes_it() -> None:
    keys = {
        "model": "m",
        "data": "a.jsonl",
        "rewards": [reward, "math", {"name": lambda text: 1.0, "weight": 0.5}],
        "log": {"sinks": [Sink, Sink()]},
        "rollout.environment": {"name": Environment},
        "grpo": {"advantage": reward, "loss": Sink},
        "eval.answers.rewards": reward,
    }
    run: Any = from_mapping(METHODS["grpo"], plain_keys(METHODS["grpo"], keys))
    here = str(Path(__file__).relative_to(Path.cwd()))
    assert run.rewards[:2] == [f"{here}:reward", "math"]
    assert (run.rewards[2].metric, run.rewards[2].weight) == ("lambda", 0.5)
    assert run.log.sinks[0] == f"{here}:Sink"
    assert run.log.sinks[1].startswith(GIVEN)
    assert run.rollout.environment.name == f"{here}:Environment"
    assert (run.grpo.advantage, run.grpo.loss) == (f"{here}:reward", f"{here}:Sink")
    assert run.eval.answers.rewards == f"{here}:reward"
    # the fingerprint reads files, and objects have none
    assert set(map(str, run.user_code())) == {here}


def test_a_function_as_an_environment_is_an_agent() -> None:
    keys = plain_keys(METHODS["grpo"], {"rollout.environment.by_row": {"a": reward, "b": "tools"}})
    by_row = keys["rollout.environment.by_row"]
    assert by_row["a"].startswith("agent:")
    assert by_row["a"].endswith("test_functions.py:reward")
    assert by_row["b"] == "tools"


@pytest.mark.parametrize(
    ("keys", "code", "text"),
    [
        ({"model": reward}, "config-error", "where a key names code, FILE.py:name"),
        ({"rewards": [reward]}, "unknown-key", "unknown key 'rewards'"),
        ({"log": {"sinks": [3]}}, "invalid-value", r"found log.sinks\[0\]=3"),
    ],
)
def test_code_elsewhere_is_refused(keys: dict[str, Any], code: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as raised:
        taut.sft(**{"model": "m", "data": "a.jsonl", **keys})
    assert raised.value.code == code


# -- words


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("generate", ("runs/a/model",), (None, {"model": "runs/a/model"})),
        ("generate", ("g.toml",), ("g.toml", {})),
        ("generate", ("g.yaml", "m"), ("g.yaml", {"model": "m"})),
        ("merge", ("BASE", Path("A")), (None, {"model": "BASE", "adapter": Path("A")})),
        ("data stats", ("a.jsonl", "b.jsonl"), (None, {"data": ["a.jsonl", "b.jsonl"]})),
        ("data stats", (), (None, {})),
        ("sft", ("anything",), ("anything", {})),
    ],
)
def test_words_are_those_of_the_command(name: str, words: Any, expected: Any) -> None:
    command = functions.registry.find(name)
    assert command is not None
    assert functions._words(command, words) == expected


def test_too_many_words_are_refused() -> None:
    with pytest.raises(ConfigError, match="found 3 words; expected MODEL ADAPTER out=DIR"):
        taut.merge("a", "b", "c")
    with pytest.raises(ConfigError, match="found int by position; expected Sft"):
        taut.sft(3)


# -- errors


def raised_by(**keys: Any) -> tuple[ConfigError, list[str]]:
    try:
        taut.sft(**keys)
    except ConfigError as error:
        return error, [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    raise AssertionError("nothing is raised")


def test_an_error_has_the_users_line_and_no_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(functions.TRACEBACK, raising=False)
    error, frames = raised_by(model=3, data="a.jsonl")
    text = "".join(traceback.format_exception(error))
    assert frames == ["raised_by", "call"]
    assert error.__suppress_context__
    assert error.__cause__ is None
    assert "pydantic" not in text
    assert len(text) < 1000
    monkeypatch.setenv(functions.TRACEBACK, "1")
    error, frames = raised_by(model=3, data="a.jsonl")
    assert len(frames) > 3
    assert error.__cause__ is not None


# -- names


def test_a_room_of_a_public_name_is_both() -> None:
    program = (
        "import taut, sys; assert callable(taut.plan); import taut.plan.memory; assert callable(taut.plan); "
        "from taut.plan import memory; import taut.plan.workload as workload; import taut.data.order as order; "
        "print(taut.plan.memory is memory, workload.__name__, order.__name__, taut.data.stats.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True taut.plan.workload taut.data.order data.stats\n"


def test_the_tools_of_data_are_functions() -> None:
    assert [taut.data.dedup.__name__, taut.data.filter.__name__] == ["data.dedup", "data.filter"]
    with pytest.raises(AttributeError, match=r"'taut\.data' has no attribute 'nothing'"):
        taut.data.nothing  # noqa: B018 - the access is the test


@pytest.mark.parametrize("name", [name for name in taut.__all__ if name[0] in ascii_lowercase])
def test_every_function_says_what_it_does(name: str) -> None:
    function = getattr(taut, name)
    assert inspect.getdoc(function)
    assert name == "data" or callable(function)


# -- results


def test_chat_answers_and_keeps_the_conversation(model: Path) -> None:
    sampling = {"max_new_tokens": 4, "temperature": 0}
    with taut.chat(model, sampling=sampling, device="cpu", system="you are a cat") as chat:
        first = chat("hello cat")
        assert chat.messages == [
            {"role": "user", "content": "hello cat"},
            {"role": "assistant", "content": first},
        ]
        assert chat.note.startswith("cut after 4 tokens")
        second = chat("and then?")
        assert [message["content"] for message in chat.messages[1::2]] == [first, second]
        assert repr(chat) == f"Conversation({model}, 4 messages)"
        # a list is the whole conversation, with a system message of its own
        again = [{"role": "system", "content": "you are a cat"}, chat.messages[0]]
        assert chat(again) == first
        assert len(chat.messages) == 3
        for wrong in ([], chat.messages):
            with pytest.raises(taut.DataError, match="no message of the role user at the end"):
                chat(wrong)
        assert len(chat.messages) == 3


def test_reprs_are_short(model: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "a.jsonl", chats(8))
    run = {"model": model, "data": rows, "device": "cpu", "out": tmp_path / "out", "steps": 1}
    found = taut.check(**run)
    assert repr(found).startswith("Examination(quick: ")
    assert len(repr(found)) < 400
    assert "<table>" in found._repr_html_()
    planned = taut.plan(**run, measure=False, alternatives=False, gpus=2, gpu_memory="1GiB")
    assert repr(planned).startswith("Planned(2 x ")
    assert len(repr(planned)) < 300
    assert planned.num_ranks == 2
    assert len(repr(from_mapping(RunConfig, plain_keys(RunConfig, run)))) < 300
    stats = taut.data.stats(rows)
    assert stats["rows"] == 8
    assert repr(stats).startswith("8 rows (8 conversation), 0 exact duplicates\n")


def test_a_plan_of_a_run_is_that_of_its_keys(model: Path) -> None:
    config = from_mapping(METHODS["dpo"], {"model": str(model), "data.train": "none.jsonl"})
    with pytest.raises(taut.DataError, match=r"none\.jsonl"):
        taut.plan(config, measure=False)
    with pytest.raises(ConfigError, match="unknown key 'gpuz'"):
        taut.plan(model=model, gpuz=1)
