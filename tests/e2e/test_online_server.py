"""Training against a server: weights pushed, in step and with a lag, and every way in which the server may fail."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.chat_runs import column, events, save_model, write_rows
from tests.helpers.fake_vllm import Body, Fault
from tests.helpers.fake_weight_sync import PARTS, tiny
from tests.helpers.online_runs import keys_of, questions, train
from tests.helpers.sampling_server import SamplingServer
from tests.tools.score.test_score import save_reward
from transformers import AutoModelForCausalLM

from taut.errors import CheckFailed, EngineError, Interrupted
from taut.inference.reward_model import open_judge, rater
from taut.inference.settings import JudgeUse
from taut.io import tables
from taut.models.settings import NewHead
from taut.rewards import RewardInput
from taut.run.recorded import Recorded

COMMON: dict[str, Any] = {
    "dtype": "float32",
    "rollout__engine": "server",
    "rollout__n": 2,
    "rollout__server__backoff": 0.001,
    "rollout__server__retries": 1,
    "batch__samples_per_step": 2,
    "optim__learning_rate": 2e-3,
    "steps": 4,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "llama", "llama")


def serving(model: Path, **options: Any) -> SamplingServer:
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return SamplingServer(model=loaded, **options)


@pytest.fixture
def server(model: Path) -> Iterator[SamplingServer]:
    with serving(model) as server:
        yield server


def keys_for(server: SamplingServer, model: Path, place: Path, **keys: Any) -> dict[str, Any]:
    return keys_of("grpo", model, place, **{**COMMON, "rollout__urls": server.url, **keys})


def feeds() -> list[str]:
    """Threads that generate."""
    return [thread.name for thread in threading.enumerate() if thread.name == "feed"]


def trained_on(out: Path) -> list[tuple[int, list[str]]]:
    """The step of each rollout, and its prompts in their order."""
    rollouts: dict[int, dict[str, None]] = {}
    for batch in tables.read_tables(out / "rollouts", ["step", "prompt_id"]):
        for row in batch.to_pylist():
            rollouts.setdefault(row["step"], {})[row["prompt_id"]] = None
    return [(step, list(prompts)) for step, prompts in sorted(rollouts.items())]


def test_the_server_has_the_weights_of_each_step(
    server: SamplingServer, model: Path, tmp_path: Path
) -> None:
    keys = keys_for(server, model, tmp_path)
    train(keys)
    out = Path(keys["out"])
    assert max(column(out, "engine/difference")) < 1e-5
    assert max(column(out, "engine/largest")) < 1e-4
    tensors = [(e["push_equal"], e["push_unread"]) for e in events(out, "rollout")]
    assert tensors == [(len(list(server.model.parameters())), 0)] * 4
    pushed = [(e["staleness_max"], e["push_change"] > 0) for e in events(out, "rollout")]
    assert pushed == [(0, False), (0, True), (0, True), (0, True)]
    assert [s["version"] for e in events(out, "rollout") for s in e["samples"][:1]] == [0, 1, 2, 3]
    assert "engine/corrected" in events(out, "step")[0]
    (start,) = events(out, "start")
    recorded = {name: value for name, value, _ in start["decisions"]}
    assert recorded["grpo.rollout_correction"] == "truncated"
    assert recorded["grpo.rollout_correction_level"] == "token"


def test_a_server_sleeps_while_the_model_trains(
    server: SamplingServer, model: Path, tmp_path: Path
) -> None:
    server.has = ("full", "sleep")
    keys = keys_for(server, model, tmp_path, rollout__server__sync__sleep=True, steps=3)
    seen = []
    with patch_updates(lambda: seen.append(server.asleep)):
        train(keys)
    assert seen == [PARTS] * 3
    assert "a request while it sleeps" not in server.told
    assert max(column(Path(keys["out"]), "engine/largest")) < 1e-4


@contextmanager
def patch_updates(look: Callable[[], None]) -> Iterator[None]:
    """Inside, ``look`` is called before each update of the model."""
    real = torch.optim.AdamW.step

    def step(optimizer: torch.optim.AdamW, *args: Any, **keys: Any) -> Any:
        look()
        return real(optimizer, *args, **keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", step)
        yield


def test_with_a_lag_groups_are_of_older_weights_and_corrected(
    server: SamplingServer, model: Path, tmp_path: Path
) -> None:
    """13 prompts; 3 rollouts of 4: each prompt once. Two updates train on a rollout, so one that was begun while they
    did is 2 old.
    """
    keys = keys_for(server, model, tmp_path, rollout__lag=2, rollout__minibatches=2, steps=6)
    train(keys)
    out = Path(keys["out"])
    rollouts = events(out, "rollout")
    assert [e["step"] for e in rollouts] == [1, 3, 5]
    assert all(0 <= e["staleness_mean"] <= e["staleness_max"] <= 2 for e in rollouts)
    assert rollouts[0]["staleness_max"] == 0
    draws = [draw for e in rollouts for draw in e["draws"]]
    assert sorted(draws) == list(range(12)) and [len(e["draws"]) for e in rollouts] == [4] * 3
    prompts = [prompt for _, of_step in trained_on(out) for prompt in of_step]
    assert len(set(prompts)) == 12
    apart = column(out, "engine/difference")
    assert max(apart[:2]) < 1e-5
    weight = column(out, "engine/weight")
    assert weight[0] == pytest.approx(1.0, abs=1e-5)
    assert feeds() == []


def test_with_a_lag_a_reward_model_in_this_process_judges_what_is_taken(
    server: SamplingServer, model: Path, tmp_path: Path
) -> None:
    """Its numbers are those that it gives the same answers alone."""
    judge = save_reward(tmp_path, NewHead(seed=3))
    options = {"model": str(judge), "dtype": "float64"}
    rewards = [{"name": "reward_model", "options": options}]
    keys = keys_for(server, model, tmp_path, rollout__lag=1, steps=3, rewards=rewards)
    train(keys)
    out = Path(keys["out"])
    rows = [row for step in (1, 2, 3) for row in Recorded(out).rollouts(step)]
    assert len(rows) == 3 * 4 and any(column(out, "loss"))
    rate = rater(open_judge(JudgeUse(model=str(judge), dtype="float64")))
    for row in rows:
        prompt = tuple(json.loads(row["prompt"]))
        (score,) = rate([RewardInput(text=row["text"], prompt=prompt)])
        assert row["reward"] == pytest.approx(score.value, abs=1e-9)
    assert len({row["reward"] for row in rows}) > 4
    (start,) = events(out, "start")
    recorded = {name: value for name, value, _ in start["decisions"]}
    assert recorded["reward models"] == "judge between updates, on the first rank"
    assert feeds() == []


def test_with_a_lag_a_teacher_in_this_process_learns_what_is_taken(
    server: SamplingServer, model: Path, tmp_path: Path
) -> None:
    """Answers of weights an update old; the divergence is computed when they are trained on."""
    teacher = save_model(tmp_path / "teacher", "llama", seed=1)
    keys = keys_of(
        "gkd",
        model,
        tmp_path,
        **{**COMMON, "rollout__urls": server.url, "rollout__lag": 1, "rollout__n": 1},
        distill__teacher=str(teacher),
    )
    train(keys)
    out = Path(keys["out"])
    rollouts = events(out, "rollout")
    assert rollouts[0]["staleness_max"] == 0
    assert {e["staleness_max"] for e in rollouts[1:]} <= {0, 1}
    draws = [draw for e in rollouts for draw in e["draws"]]
    assert sorted(draws) == list(range(8))
    assert min(column(out, "loss")) > 0
    assert feeds() == []


def test_with_a_lag_the_datas_answers_join_the_rollout_of_their_place(
    server: SamplingServer, model: Path, tmp_path: Path
) -> None:
    """As many in each rollout as at lag=0: a function of the seed."""
    teacher = save_model(tmp_path / "teacher", "llama", seed=1)
    rows = [
        {**row, "messages": [*row["messages"], {"role": "assistant", "content": row["answer"]}]}
        for row in questions(8)
    ]
    lag = {**COMMON, "rollout__urls": server.url, "rollout__lag": 1, "rollout__n": 1}
    keys = keys_of(
        "gkd",
        model,
        tmp_path,
        **lag,
        distill__teacher=str(teacher),
        distill__lmbda=0.5,
        data__train=str(write_rows(tmp_path / "rows.jsonl", rows)),
    )
    train(keys)
    rollouts = events(Path(keys["out"]), "rollout")
    size = COMMON["batch__samples_per_step"]
    drawn = [np.random.default_rng([0, phase, 4]).random(size) < 0.5 for phase in range(4)]
    own = [phase * size + k for phase, some in enumerate(drawn) for k in np.flatnonzero(some)]
    assert [e.get("from_data", 0) for e in rollouts] == [size - some.sum() for some in drawn]
    assert sorted(draw for e in rollouts for draw in e.get("draws", [])) == own
    assert 0 < len(own) < 4 * size
    assert max(e.get("staleness_max", 0) for e in rollouts) <= 1
    assert feeds() == []


def test_a_group_that_takes_too_long_is_asked_again(model: Path, tmp_path: Path) -> None:
    """A prompt whose first answer comes once the third rollout is due, of weights two updates old: the server freezes
    it at each push. One that cannot pause is not given new weights before.
    """
    late: list[Any] = []

    def fault(body: Body, count: int) -> Fault | None:
        if "prompt_logprobs" in body or body["logprobs"] == 1:
            return None
        late.append(body["prompt"])
        if late.count(late[0]) > 1 or body["prompt"] != late[0]:
            return None
        began = time.monotonic()
        while len(pushes(server)) < 3 and time.monotonic() - began < 120:
            time.sleep(0.01)
        return Fault(slow=0.2)

    with serving(model, has=("full", "pause"), faults=fault) as server:
        keys = keys_for(server, model, tmp_path, rollout__lag=1, rollout__n=1, steps=5)
        keys |= {"optim.learning_rate": 1e-3, "grpo.advantage": "reinforce_pp"}
        train(keys)
    out = Path(keys["out"])
    assert sum(e["stale_groups"] for e in events(out, "rollout")) == 1
    assert all(e["staleness_max"] <= 1 for e in events(out, "rollout"))
    draws = [draw for e in events(out, "rollout") for draw in e["draws"]]
    assert sorted(draws) == list(range(10))


def test_of_more_prompts_than_are_taken_the_first_that_finish_are(
    server: SamplingServer, model: Path, tmp_path: Path
) -> None:
    """The first prompt of each rollout is not answered before the rollout is done."""
    keys = keys_for(server, model, tmp_path, rollout__oversample=2, steps=2)
    late: list[Any] = []

    def fault(body: Body, count: int) -> Fault | None:
        if "prompt_logprobs" in body or body["logprobs"] == 1:
            return None
        if len(late) < len(pushes(server)):
            late.append(body["prompt"])
        return Fault(slow=3.0) if body["prompt"] == late[-1] else None

    server.faults = fault
    train(keys)
    out = Path(keys["out"])
    for event in events(out, "rollout"):
        assert (event["groups"], event["oversample_dropped"]) == (2, 2)
        assert event["oversample_tokens_mean"] > 0
    assert [len(prompts) for _, prompts in trained_on(out)] == [2, 2]
    (start,) = events(out, "start")
    (reason,) = [why for name, _, why in start["decisions"] if name == "oversampling"]
    assert "favors short answers" in reason


@pytest.mark.parametrize("lag", [0, 1])
def test_ctrl_c_ends_with_a_saved_state_and_no_thread(
    lag: int, server: SamplingServer, model: Path, tmp_path: Path
) -> None:
    """It comes while the server is asked, which then takes its time."""
    calls = {"left": 17}

    def fault(body: Body, count: int) -> Fault | None:
        calls["left"] -= "prompt_logprobs" not in body
        if calls["left"] == 0:
            os.kill(os.getpid(), signal.SIGINT)
            return Fault(slow=0.5)
        return None

    server.faults = fault
    keys = keys_for(server, model, tmp_path, rollout__lag=lag, steps=6)
    out = Path(keys["out"])
    with pytest.raises(Interrupted, match=r"by SIGINT: the state after step \d is in"):
        train(keys)
    done = column(out, "step")[-1]
    assert feeds() == [] and 0 < done < 6
    train({**keys, "resume": True})
    assert column(out, "step") == [1, 2, 3, 4, 5, 6]
    assert [e["step"] for e in events(out, "rollout")] == [1, 2, 3, 4, 5, 6]
    if lag:
        draws = [draw for e in events(out, "rollout") for draw in e["draws"]]
        assert sorted(draws) == list(range(12))


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("dies", "no answer"),
        ("late", r"no answer within 0\.6 s"),
        ("keeps its weights", "weights after step 2: .* has checksum"),
        ("is started again", "started again while it answered"),
    ],
)
def test_a_server_that_fails_ends_the_run_which_goes_on(
    kind: str, told: str, server: SamplingServer, model: Path, tmp_path: Path
) -> None:
    """In the middle of the third rollout; what is done is kept, and another server takes over."""

    def fault(body: Body, count: int) -> Fault | None:
        if kind == "keeps its weights" and len(pushes(server)) == 2:
            server.worker.keeps = lambda name: True
        if "prompt_logprobs" in body or len(pushes(server)) < 3:
            return None
        if kind == "dies":
            server.is_gone = True
            return Fault(hangs_up=True)
        if kind == "is started again":
            server.restart()
        return Fault(slow=1.5) if kind == "late" else None

    server.faults = fault
    keys = keys_for(
        server,
        model,
        tmp_path,
        rollout__server__timeout=0.6 if kind == "late" else 5.0,
        rollout__server__concurrency=1,  # or another request restarts it while it is given its weights again
    )
    out = Path(keys["out"])
    with pytest.raises(EngineError, match=told) as failed:
        train(keys)
    assert f"the state after step 2 is in {out}/checkpoints/step-000002" in str(failed.value)
    assert column(out, "step") == [1, 2]
    with serving(model) as other:
        train({**keys, "rollout.urls": other.url, "rollout.server.timeout": 5.0, "resume": True})
    assert column(out, "step") == [1, 2, 3, 4]
    assert max(column(out, "engine/difference")) < 1e-5


def pushes(server: SamplingServer) -> list[str]:
    """The server's prefix cache is emptied after each push."""
    return [path for path in server.told if path.startswith("/reset_prefix_cache")]


@pytest.mark.parametrize("lag", [0, 1])
def test_of_three_servers_one_is_killed_one_slow_and_one_stale(
    lag: int, model: Path, tmp_path: Path
) -> None:
    """Amid the run: no answer is lost, and what is learned from is of weights that are proven."""
    three = [serving(model, has=("full", "pause")) for _ in range(3)]
    killed, slow, stale = three

    def fault(body: Body, count: int) -> Fault | None:
        if "prompt_logprobs" in body or len(pushes(killed)) < 2:
            return None
        killed.is_gone = True
        return Fault(hangs_up=True)

    killed.faults = fault
    slow.faults = lambda body, count: Fault(slow=0.05)

    def keeps(name: str) -> bool:
        return len(pushes(stale)) >= 2

    with killed, slow, stale:
        stale.worker.keeps = keeps
        keys = keys_for(slow, model, tmp_path, rollout__lag=lag, rollout__server__retries=0)
        keys |= {"rollout.urls": [server.url for server in three]}
        train(keys)
    out = Path(keys["out"])
    rollouts = events(out, "rollout")
    assert column(out, "step") == [1, 2, 3, 4] and [e["errors"] for e in rollouts] == [0] * 4
    assert [e["completions"] for e in rollouts] == [4] * 4
    left_out = [reason for e in rollouts for reason in e.get("servers_left_out", ())]
    assert any(killed.url in reason and "no answer" in reason for reason in left_out)
    assert any(stale.url in reason and "has checksum" in reason for reason in left_out)
    assert rollouts[0]["servers"] == 3 and rollouts[-1]["servers"] == 1
    assert {e["name"] for e in events(out, "warning")} >= {"server"}
    if not lag:
        assert max(column(out, "engine/difference")) < 1e-5


def test_completions_of_another_model_are_found_before_the_update(
    server: SamplingServer, model: Path, tmp_path: Path
) -> None:
    """A server that shows the right weights and samples from others."""
    keys = keys_for(server, model, tmp_path)
    server.other = tiny(seed=5)
    with pytest.raises(
        CheckFailed, match=r"step 1: engine and trainer differ .*max_logprob_difference"
    ):
        train(keys)
    out = Path(keys["out"])
    assert events(out, "step") == [] and not (out / "model").exists()
