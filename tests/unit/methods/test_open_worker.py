"""Engine, rewards and environment: had when needed, refused with the reason, and closed where one of them fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.helpers.chat_runs import save_model, write_rows
from tests.helpers.fake_vllm import FakeServer
from tests.helpers.online_runs import TWICE, keys_of, make
from tests.helpers.sampling_server import SamplingServer
from transformers import AutoModelForCausalLM

from taut.config import from_mapping
from taut.errors import ConfigError, DataError, EngineError
from taut.inference.local import LocalEngine
from taut.inference.vllm import ServerEngine
from taut.methods.grpo import Grpo
from taut.rewards.reward_set import RewardSet
from taut.rl.environment import EnvironmentPool
from taut.rl.online import Online
from taut.rl.worker import RolloutWorker


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "llama", "llama")


def opened(model: Path, place: Path, method: str = "grpo", **keys: Any) -> RolloutWorker:
    built, _ = make(keys_of(method, model, place, dtype="float32", **keys))
    source = built.trainer.source
    assert isinstance(source, Online)
    return source.worker


def at(server: FakeServer, **keys: Any) -> dict[str, Any]:
    return {"rollout__engine": "server", "rollout__urls": server.url, **keys}


def test_a_server_must_say_the_log_probs_of_what_it_samples_from(
    model: Path, tmp_path: Path
) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with (
        SamplingServer(model=loaded, mode="raw") as server,
        pytest.raises(EngineError, match=r"gives raw logprobs; .* temperature 0\.7; .*processed"),
    ):
        opened(model, tmp_path, **at(server, rollout__temperature=0.7))
    with SamplingServer(model=loaded, mode="raw") as server:  # at 1 they are the same
        worker = opened(model, tmp_path, **at(server))
        assert ("server logprobs", "raw") in [it[:2] for it in worker.decisions]
        worker.close()


def noted(closed: list[str], name: str, close: Callable[[Any], None]) -> Callable[[Any], None]:
    def act(self: Any) -> None:
        closed.append(name)
        close(self)

    return act


def test_what_was_opened_is_closed_where_the_next_cannot_be_had(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    for one in (RewardSet, ServerEngine):
        monkeypatch.setattr(one, "close", noted(closed, one.__name__, one.close))
    with (
        FakeServer(max_model_len=256) as plain,
        pytest.raises(EngineError, match="takes no weights"),
    ):
        opened(model, tmp_path, **at(plain))
    assert closed == ["ServerEngine", "RewardSet"]
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    closed.clear()
    own = tmp_path / "own.py"
    own.write_text(f"{TWICE}\n    def cut(self):\n        return -1.0\n")
    keys = {"method": "ppo", "critic__kind": "shared", "ppo__bootstrap_truncated": True}
    keys["rollout__environment__name"] = f"{own}:Twice"
    with SamplingServer(model=loaded) as server, pytest.raises(ConfigError, match="method cut"):
        opened(model, tmp_path, **at(server, **keys))
    assert closed == ["RewardSet", "ServerEngine"]


def test_an_environment_that_rewards_cut_paths_is_refused_where_values_replace_that_reward(
    model: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own.py"
    own.write_text(TWICE)
    keys = {"method": "ppo", "critic__kind": "shared", "ppo__bootstrap_truncated": True}
    keys["rollout__environment__name"] = f"{own}:Twice"
    opened(model, tmp_path, **keys).close()
    own.write_text(f"{TWICE}\n    def cut(self):\n        return -1.0\n")
    with pytest.raises(ConfigError, match=r"own\.py:Twice has a method cut, which says what"):
        opened(model, tmp_path, **keys)
    opened(model, tmp_path, **{**keys, "ppo__bootstrap_truncated": False}).close()


def test_rewards_that_need_an_answer(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "1?", "answer": "1"}, {"prompt": "2?"}]
    data = str(write_rows(tmp_path / "some.jsonl", rows))
    worker = opened(model, tmp_path, data__train=data, rewards="numeric")
    (told,) = worker.decisions
    assert told[:2] == ("numeric", "nothing of 1 of 2 rows") and "some.jsonl:2" in told[2]
    none = str(write_rows(tmp_path / "none.jsonl", rows[1:]))
    with pytest.raises(DataError, match=r"none\.jsonl:1: the row has no right answer"):
        opened(model, tmp_path, data__train=none, rewards=["numeric", "exact_match"])
    worker = opened(model, tmp_path, data__train=none, rewards=["numeric", "stop"])
    assert worker.decisions[0][1] == "nothing of 1 of 1 rows"


def test_what_holds_programs_is_what_the_reward_asks_for() -> None:
    reward_set = SimpleNamespace(decisions=[("sandbox", "landlock", "asked for")])
    python = SimpleNamespace(decisions=(("sandbox", "first", "it holds"),))  # as it was opened
    keys = {"model": "m", "data.train": "d.jsonl", "method": "grpo", "rewards": "code"}
    for tools, wanted in (([], ["landlock"]), (["python"], ["first", "landlock"])):
        environment = {"rollout.environment.name": "tools", "rollout.environment.tools": tools}
        run = from_mapping(Grpo, keys | (environment if tools else {}))
        opened = cast(EnvironmentPool, python) if tools else None
        found = run.rollout_decisions(cast(RewardSet, reward_set), cast(LocalEngine, None), opened)
        assert [(name, value) for name, value, _ in found] == [("sandbox", it) for it in wanted]
