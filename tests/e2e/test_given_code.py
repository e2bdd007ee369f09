"""A run with functions and objects from Python: what it trains on, what it records, and what a resume asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.online_runs import keys_of, save_models

import taut
from taut.cli import main
from taut.errors import ConfigError
from taut.io import user_code


class Seen:
    """A sink that is an object."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.is_closed = False

    def __call__(self, event: dict[str, Any]) -> None:
        self.kinds.append(event["kind"])

    def close(self) -> None:
        self.is_closed = True


def factory(scale: float) -> Any:
    def scaled(text: str) -> float:
        return -scale * len(text)

    return scaled


def test_a_run_with_functions_is_resumed_with_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen = save_models(tmp_path), Seen()
    rewards = [factory(0.5), {"name": lambda text: text.count("a"), "weight": 0.25}]
    keys = keys_of("grpo", model, tmp_path, rewards=rewards, steps=1, checkpoint__every=1)
    keys |= {"log.sinks": [seen]}
    del keys["method"]
    taut.grpo(**keys)
    assert (seen.kinds[0], seen.kinds[-1], seen.is_closed) == ("start", "end", True)
    # what is recorded: texts that hold a digest
    out = tmp_path / "grpo"
    config = json.loads((out / "resolved.json").read_text())["config"]
    names = [config["rewards"][0], config["rewards"][1]["name"], config["log"]["sinks"][0]]
    assert [name.partition(":")[2] for name in names] == ["scaled", "lambda", "Seen"]
    assert all(len(name.partition(".py:")[0]) == len("python-") + 16 for name in names)
    # another process, as the command line, has none of them
    with monkeypatch.context() as other:
        other.setattr(user_code, "_given", {})
        assert main(["resume", str(out), "steps=2", "log.sinks=[]"]) == 2
    said = capsys.readouterr().err
    assert f"the reward {names[0]}: it was given from Python as an object" in said
    assert "resume from Python, with the same scaled and resume=True" in said
    # the same functions go on, others do not
    again = [factory(0.5), {"name": lambda text: text.count("a"), "weight": 0.25}]
    assert taut.resume(out, steps=2, rewards=again).steps == 2
    with pytest.raises(ConfigError, match=r"belongs to another run: rewards: \['python-"):
        taut.resume(out, steps=3, rewards=[factory(0.75), again[1]])


class Counts:
    """A hook that is an object: it ends the run after its second step."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, event: dict[str, Any]) -> str | None:
        self.steps += event["kind"] == "step"
        return "two steps" if self.steps == 2 else None


def test_a_hook_may_be_an_object(tmp_path: Path) -> None:
    model = save_models(tmp_path)
    hook = Counts()
    keys = keys_of("grpo", model, tmp_path, steps=9, hooks=[hook])
    del keys["method"]
    assert taut.grpo(**keys).steps == 2
    assert hook.steps == 2
