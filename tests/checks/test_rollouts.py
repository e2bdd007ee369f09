"""Runs that learn from what they generate: no false alarm for any method, and nothing asked of answers not there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.checks.faults.rollout import generating, sums
from tests.checks.planting import Place
from tests.checks.test_compared_answers import answers
from tests.checks.test_planted import told
from tests.helpers.fake_executors import serving
from tests.helpers.online_runs import OWN_CODE
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_models import save_tiny
from tests.helpers.tiny_tokenizers import tiny_tokenizer

from taut.checks.examine import examine
from taut.checks.rollouts import close, prompts_leave_room_for_answers
from taut.inference.vllm import ServerEngine
from taut.rl import worker

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {"grpo__kl_coef": 0.1, "lora__rank": 2, "rollout__temperature": 0.7}),
    "grpo, a penalty": (
        "grpo",
        {"grpo__kl_coef": 9.0, "grpo__kl_in": "reward", "reference__model": "other"},
    ),
    "grpo in bfloat16": ("grpo", {"dtype": "bfloat16", "grpo__advantage": "maxrl"}),
    "grpo, a loss and an advantage of one's own": (
        "grpo",
        {"grpo__loss": "own.py:Own", "grpo__advantage": "own.py:plain", "dtype": "float64"},
    ),
    "grpo, dropout": ("grpo", {"grpo__kl_coef": 0.1, "lora__rank": 2, "lora__dropout": 0.1}),
    "grpo, a tree": ("grpo", {"grpo__advantage": "tree"}),
    "grpo, each reward": ("grpo", {"grpo__advantage": "gdpo"}),
    "ppo": ("ppo", {"rollout__minibatches": 2}),
    "online dpo": ("online_dpo", {}),
    "best of n": ("best_of_n", {"best_of_n__min_reward": 2.0}),
    "gkd": ("gkd", {}),
}
OWN = "grpo, a loss and an advantage of one's own"
FULL = {"grpo in bfloat16", OWN, "ppo", "online dpo"}
NOT_ASKED = ("template.targets", "data.targets", "stop.targets", "template.parts")


@pytest.mark.parametrize("name", slow_except(["ppo", "gkd"], RUNS))
def test_no_method_raises_a_false_alarm(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, keys = RUNS[name]
    place = Place(tmp_path, monkeypatch)
    if method == "gkd":
        keys = {**keys, "distill__teacher": str(place.model("llama"))}
    else:
        keys = {**keys, "rewards": "exact_match"}
    if "reference__model" in keys:
        keys = {**keys, "reference__model": str(place.model("llama"))}
    if name == OWN:
        (tmp_path / "own.py").write_text(OWN_CODE)
        keys = {
            key: str(value).replace("own.py", f"{tmp_path}/own.py") for key, value in keys.items()
        }
    keys |= {"batch__samples_per_step": 3, "rollout__max_new_tokens": 12}
    session = place.session(data=place.data(sums()), method=method, **keys)
    examination = examine(session, "full" if name in FULL else "quick")
    close(session)
    assert not examination.failures, told(examination)
    found = answers(examination)
    assert {found[one].outcome for one in NOT_ASKED} == {"skipped"}
    for one in ("data.packing", "loss.gradient", "rollout.opens", "rollout.groups", "rollout.text"):
        assert found[one].outcome == "passed", found[one]
    assert found["rewards.gold"].outcome == ("skipped" if method == "gkd" else "passed")
    has_reference = "grpo__kl_coef" in keys or method == "online_dpo"
    has_start = has_reference and "reference__model" not in keys
    assert found["reference.start"].outcome == ("passed" if has_start else "skipped")
    if name == OWN:
        for one in ("loss.first", "loss.packed", "loss.splits"):
            assert found[one].outcome == "passed", found[one]
    if name in FULL:
        assert found["rollout.update"].outcome == found["engine.logps"].outcome == "passed"


def test_prompts_may_be_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(tmp_path, monkeypatch)
    rows = [{"text": f"the cat and {at} birds", "answer": str(at)} for at in range(12)]
    session = place.session(data=place.data(rows), method="grpo", rewards="exact_match")
    examination = examine(session)
    close(session)
    assert not examination.failures, told(examination)
    found = answers(examination)
    assert found["data.columns"].says == "text; rewards read the other columns"
    assert found["rewards.gold"].outcome == found["rollout.groups"].outcome == "passed"


def test_answers_that_the_context_cuts_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path, monkeypatch)
    keys = {"method": "grpo", "rewards": "exact_match", "rollout__max_new_tokens": 240}
    session = place.session(data=place.data(sums()), **keys)
    (note,) = answers(examine(session, only=["rollout.room"]))["rollout.room"].notes
    assert note == "after 12 prompts the context of 256 cuts answers earlier"


WORLDS = """
from taut.rl.environment import Step

MADE = []

class Plain:
    def step(self, text, calls):
        return Step(done=True, reward=1.0)

    def cut(self):
        return 0.0

class Begins(Plain):
    def reset(self, row):
        return [{"role": "user", "content": "Guess my number."}]

class Fails(Plain):
    def reset(self, row):
        MADE.append(row)
        if len(MADE) % 3 == 1:
            raise RuntimeError("gone")
"""


@pytest.mark.parametrize("name", ["Begins", "Fails"])
def test_no_environment_raises_a_false_alarm(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One begins with messages of its own; of another the first path of each prompt fails."""
    place = Place(tmp_path, monkeypatch)
    (tmp_path / "worlds.py").write_text(WORLDS)
    keys = {"rewards": [], "rollout__environment__name": f"{tmp_path}/worlds.py:{name}"}
    examination = examine(generating(place, **keys))
    assert not examination.failures, told(examination)
    found = answers(examination)
    for one in ("rollout.groups", "rollout.text", "rollout.turns"):
        assert found[one].outcome == "passed", found[one]


def test_tools_raise_no_false_alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their schemas are put before the row's messages."""
    model = save_tiny(
        "qwen2", tmp_path / "model", tiny_tokenizer("qwen2.5"), max_position_embeddings=1024
    )
    keys: dict[str, Any] = {"rollout__environment__name": "tools"}
    keys["rollout__environment__tools"] = ["calculator"]
    keys["data__max_length"] = 900  # the schemas are part of the prompts
    session = generating(Place(tmp_path, monkeypatch), model=model, **keys)
    examination = examine(session)
    close(session)
    assert not examination.failures, told(examination)
    assert answers(examination)["rollout.groups"].outcome == "passed"


def test_a_small_roll_out_is_drawn_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody judges it, so that nothing in it is good enough; and no other prompts are asked for that."""
    place, played = Place(tmp_path, monkeypatch), []
    original = worker.sample_trajectories
    monkeypatch.setattr(
        worker, "sample_trajectories", lambda *args: played.append(args) or original(*args)
    )
    session = generating(place, method="best_of_n", best_of_n__min_reward=0.5)
    (found,) = answers(examine(session, only=["rollout.groups"])).values()
    close(session)
    assert found.outcome == "passed" and len(played) == 1


@pytest.mark.parametrize(("own", "outcome"), [(None, "failed"), (100, "passed"), (103, "failed")])
def test_a_server_that_takes_less_than_it_may_be_sent(
    own: int | None, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cuts no answer, it refuses the prompt; what the model's own context cuts it is not sent."""
    engine = ServerEngine(*[None] * 5, own, 102)  # type: ignore[arg-type]
    worker = SimpleNamespace(engine=engine, environments=None, config=SimpleNamespace(grows=8))
    train = SimpleNamespace(
        sizes=lambda of: iter([np.array([50, 96])]), sample_id=lambda at: f"q{at}"
    )
    train = type("Train", (SimpleNamespace,), {"__len__": lambda self: 2})(**vars(train))
    monkeypatch.setattr("taut.checks.rollouts.rollout_worker", lambda _: worker)
    session = SimpleNamespace(is_generated=True, train=train)
    found = prompts_leave_room_for_answers(session)  # type: ignore[arg-type]
    assert found.outcome == outcome
    if outcome == "failed":
        longest = 104 if own is None else 103
        assert found.evidence == (f"q1: 96 tokens, with an answer up to {longest}",)
        assert f"--max-model-len {longest}" in found.remedy


def test_a_limit_beyond_the_context_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are short; it is the answer that may be longer than the model's context."""
    worker = SimpleNamespace(
        engine=SimpleNamespace(context=128),
        environments={"": object()},
        config=SimpleNamespace(grows=4096),
    )
    train = SimpleNamespace(sizes=lambda of: iter([np.array([8])]), sample_id=lambda at: f"q{at}")
    train = type("Train", (SimpleNamespace,), {"__len__": lambda self: 1})(**vars(train))
    monkeypatch.setattr("taut.checks.rollouts.rollout_worker", lambda _: worker)
    found = prompts_leave_room_for_answers(SimpleNamespace(train=train))  # type: ignore[arg-type]
    assert found.outcome == "failed"
    assert "set rollout.environment.max_tokens, now 4,096, to at most 120" in found.remedy


def test_where_programs_run_is_told_and_a_service_that_is_down_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path, monkeypatch)
    with serving("piston") as fake:
        remote = {"service": "piston", "addresses": [fake.url], "wait_seconds": 2.0}
        rewards = [{"name": "code", "options": {"remote": remote}}]
        for is_down in (False, True):
            fake.faults = ["400"] * is_down
            session = generating(place, rewards=rewards)
            found = answers(examine(session, only=["rollout.opens"]))["rollout.opens"]
            close(session)
            assert found.outcome == ("failed" if is_down else "passed"), found
            told_of = f"programs and tests are sent to {fake.url}"
            assert (
                is_down
                or f"sandbox is piston: remote.service asks for it; {told_of}" in found.notes
            )
            assert not is_down or f"{fake.url}/execute answered HTTP 400" in found.says
