"""Every method that learns from what it generates, from the command line to a model that loads; environments, tools."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.helpers.chat_runs import (
    QUIET,
    column,
    decisions,
    events,
    largest_difference,
    sft,
    weights,
    write_rows,
)
from tests.helpers.online_runs import (
    METHODS_KEYS,
    OWN_CODE,
    TWICE,
    keys_of,
    questions,
    save_models,
    train,
)
from tests.helpers.refusals import ErrorCode, refused
from tests.helpers.run_directories import differences, left
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_models import save_tiny
from tests.helpers.tiny_tokenizers import tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import taut
from taut import cli
from taut.data.render.render import Renderer
from taut.errors import ConfigError, Interrupted
from taut.models.scorer import Scorer
from taut.rl.environments.tools import load_tool
from taut.run.recorded import Recorded


class Done(NamedTuple):
    """A run of the command line."""

    keys: dict[str, Any]
    out: Path
    printed: str


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", params=slow_except(["grpo"], METHODS_KEYS))
def done(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Done:
    """``taut METHOD run.toml steps=2``."""
    place = tmp_path_factory.mktemp(request.param)
    given = {"log__console": True, "checkpoint__every": 2, "check": "quick"}
    keys = keys_of(request.param, model, place, **given)
    rewards = "[[rewards]]\nname = 'length_target'\noptions = { target = 5 }\n"
    words = {key: value for key, value in keys.items() if key not in ("method", "rewards", "steps")}
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in words.items())
    (place / "run.toml").write_text(text + (rewards if "rewards" in keys else ""))
    command = request.param.replace("_", "-")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = cli.main([command, str(place / "run.toml"), "steps=2"])
    assert code == 0, printed.getvalue()
    return Done(keys, Path(keys["out"]), printed.getvalue())


def test_it_trains_and_says_so(done: Done) -> None:
    updates = 2 if done.keys["method"] == "ppo" else 1
    assert column(done.out, "step") == [1, 2]
    assert [e["step"] for e in events(done.out, "rollout")] == list(range(1, 3, updates))
    assert all(np.isfinite(column(done.out, "loss"))) and min(column(done.out, "grad_norm")) > 0
    assert not events(done.out, "warning")
    asked = {e["name"]: e["outcome"] for e in events(done.out, "check") if e.get("part")}
    assert asked and "failed" not in asked.values()
    (state,) = taut.runs(done.out)
    assert (state.state, state.method) == ("finished", done.keys["method"])
    lines = done.printed.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[:2] for line in steps] == [["step", "1/2"], ["step", "2/2"]]
    is_judged = "rewards" in done.keys
    assert all((" reward 0." in line) == is_judged and " ends " in line for line in steps)
    assert f"model     {done.out / 'model'}" in lines


def test_the_model_is_another_and_loads(done: Done) -> None:
    AutoTokenizer.from_pretrained(done.out / "model")
    found = AutoModelForCausalLM.from_pretrained(done.out / "model", dtype=torch.float64)
    begun = weights(Path(done.keys["model"]))
    assert 0 < largest_difference(weights(done.out / "model"), begun) < 0.1
    assert all(torch.isfinite(p).all() for p in found.parameters())
    assert (done.out / "critic").is_dir() == (done.keys["method"] == "ppo")


def test_a_roll_out_is_told_token_for_token(done: Done) -> None:
    """What the event shows of the first step are ids and logprobs of the model as it was."""
    rollout = events(done.out, "rollout")[0]
    assert rollout["completions"] == rollout["groups"] * done.keys["rollout.n"]
    assert 0 < rollout["stopped"] < 1 and rollout["tokens_max"] == 8 and rollout["errors"] == 0
    assert rollout["staleness_max"] == 0
    model = AutoModelForCausalLM.from_pretrained(done.keys["model"], dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(done.keys["model"])
    asked = questions(13)
    for sample in rollout["samples"]:
        row = next(row for row in asked if sample["id"].startswith(f"{row['id']}#"))
        prompt = Renderer(tokenizer).prompt_ids(row["messages"]).tolist()
        ids = sample["ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        logp = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        assert sample["logp"] == pytest.approx(logp.tolist(), abs=1e-4)
        assert sample["references"] == [row["answer"]]
        assert tokenizer.decode(ids).startswith(sample["text"].rstrip("\ufffd"))
        if done.keys["method"] in ("grpo", "ppo"):
            assert len(sample["advantage"]) == len(ids)
        if "rewards" in done.keys:
            worth = max(0.0, 1 - abs(len(ids) - 5) / 5)
            assert sample["reward"] == pytest.approx(worth)
            assert sample["rewards"] == {"length_target": sample["reward"]}


def test_metrics_of_the_method(done: Done) -> None:
    method = done.keys["method"]
    first = events(done.out, "rollout" if method == "best_of_n" else "step")[0]
    wanted = {
        "grpo": {"engine/difference", "engine/effective", "engine/largest", "entropy_estimate"},
        "ppo": {"ratio", "clip/low", "value/explained", "grad_norm/critic", "engine/difference"},
        "online_dpo": {"rewards/margin", "kl"},
        "best_of_n": {"kept", "reward_kept"},
        "gkd": {"divergence", "cross_entropy"},
    }[method]
    assert wanted <= first.keys()
    if "engine/difference" in first:
        assert first["engine/difference"] < 1e-12 and first["engine/largest"] < 1e-10
        assert first["engine/effective"] == pytest.approx(1.0)


def test_it_is_shown_and_gone_on_with(done: Done, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {**done.keys, "log.console": False}
    taut.show(**{**keys, "steps": 2})
    text = " ".join(capsys.readouterr().out.split())
    assert f"{done.keys['rollout.n']} completions each, of at most 8 tokens" in text
    assert "What is 0 and 1?" in text and "a target, to be learned" not in text
    longer = taut.resume(done.out, **{"steps": 3, "log.console": False})
    assert longer.steps == 3
    assert column(done.out, "step") == [1, 2, 3]


def test_held_out_answers_are_judged_as_in_training_and_the_best_is_kept(
    model: Path, tmp_path: Path
) -> None:
    held_out = str(write_rows(tmp_path / "held_out.jsonl", questions(4)))
    given = {"data__eval": held_out, "eval__answers__every": 2, "eval__best": "length_target"}
    keys = keys_of("grpo", model, tmp_path, steps=4, optim__learning_rate=1e-2, **given)
    result = train(keys)
    out = Path(keys["out"])
    measured = {e["step"]: e["length_target"] for e in events(out, "eval")}
    assert list(measured) == [2, 4] and result.metrics["length_target"] == measured[4]
    best = json.loads((out / "best" / "best.json").read_text())
    assert best["value"] == max(measured.values())


def test_rollouts_in_bfloat16_are_told_as_such_and_corrected_for(
    model: Path, tmp_path: Path
) -> None:
    """The recorded logprobs are nearer to those of the model in bfloat16 than to those of the one that trains."""
    narrow = {"dtype": "float32", "rollout__dtype": "bfloat16"}
    keys = keys_of("grpo", model, tmp_path, steps=2, **narrow)
    train(keys)
    how = decisions(tmp_path / "grpo")["grpo.rollout_correction"]
    assert how == ("truncated", "rollouts are of bfloat16")
    first = events(tmp_path / "grpo", "step")[0]
    assert 1e-5 < first["engine/difference"] < 0.1
    assert first["engine/effective"] < 1 and first["engine/weight"] != 1
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer, asked = AutoTokenizer.from_pretrained(model), questions(13)
    gaps: dict[bool, list[float]] = {False: [], True: []}
    for sample in Recorded(tmp_path / "grpo").rollouts(1):
        row = next(row for row in asked if sample["prompt_id"] == row["id"])
        prompt = Renderer(tokenizer).prompt_ids(row["messages"]).tolist()
        assert sample["sampled_at_N"][0] == len(prompt)
        ids = sample["ids_T"][len(prompt) :]
        for is_narrow, gap in gaps.items():
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_narrow):
                logits = loaded(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            logp = logits.float().log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
            gap += (logp - torch.tensor(sample["logp_N"])).abs().tolist()
    assert sum(gaps[True]) < 0.8 * sum(gaps[False])  # sums are rounded in another order


@pytest.mark.parametrize("number", [2, 12])
def test_ctrl_c_in_the_middle_of_generation(
    number: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first rollout there is nothing to keep; later the last step is, and the run goes on as if left alone."""
    keys = keys_of("grpo", model, tmp_path)
    whole, out, calls = tmp_path / "whole", Path(keys["out"]), []
    train(keys | {"out": str(whole)})
    with monkeypatch.context() as patch:
        step = Scorer.next_logits

        def interrupted(self: Scorer, *given: Any, **named: Any) -> Any:
            calls.append(given)
            if len(calls) == number:
                os.kill(os.getpid(), signal.SIGINT)
            return step(self, *given, **named)

        patch.setattr(Scorer, "next_logits", interrupted)
        with pytest.raises(Interrupted, match="by SIGINT"):
            train(keys)
    assert len(calls) == number
    train(keys | {"resume": True})
    assert column(out, "loss") == column(whole, "loss")
    assert largest_difference(weights(out / "model"), weights(whole / "model")) == 0


def test_an_environment_of_one_s_own_rewards(model: Path, tmp_path: Path) -> None:
    """And there is no room to keep the first turns, which is said once."""
    (tmp_path / "twice.py").write_text(TWICE)
    environment = {
        "rollout__environment__name": f"{tmp_path / 'twice.py'}:Twice",
        "rollout__local__prefix_cache_gib": 1e-6,
    }
    keys = keys_of("grpo", model, tmp_path, rewards=None, steps=2, check="quick", **environment)
    train(keys)
    rollout = events(tmp_path / "grpo", "rollout")[0]
    assert rollout["reward/there"] == 1.0 and rollout["reward/short"] < 0
    assert 1 < rollout["turns_mean"] <= 2 and rollout["errors"] == 0
    assert "reward/environment" not in rollout
    shown = next(s for s in rollout["samples"] if len(s["messages"]) == 3)
    assert [m["role"] for m in shown["messages"]] == ["assistant", "user", "assistant"]
    assert shown["messages"][1]["content"] == "And then?"
    assert len(shown["ids"]) == len(shown["advantage"]) == len(shown["logp"])
    assert events(tmp_path / "grpo", "step")[0]["engine/difference"] < 1e-12
    assert all(e["prefix_recomputed"] > 16 for e in events(tmp_path / "grpo", "rollout"))
    (warning,) = [e for e in events(tmp_path / "grpo", "warning") if e["name"] == "prefix_cache"]
    assert warning["step"] == 1
    assert f"{rollout['prefix_gib']:.3g} GiB hold all; raise rollout.local" in warning["detail"]


def test_turns_are_charged_and_several_rewards_are_normalized(model: Path, tmp_path: Path) -> None:
    """Twice rewards the second turn alone, so nothing is left for the whole path: both turns have the same advantage,
    and with a discount of 0 the first turn has none. gdpo normalizes the environment's two rewards.
    """
    (tmp_path / "twice.py").write_text(TWICE)
    environment = {"rollout__environment__name": f"{tmp_path / 'twice.py'}:Twice"}
    for own, sizes in (
        ({"grpo__advantage_level": "turn"}, (1, 1)),
        ({"grpo__advantage_level": "turn", "grpo__turn_discount": 0.0}, (0, 1)),
        ({"grpo__advantage": "gdpo"}, (1, 1)),
    ):
        place = tmp_path / "-".join(own)
        keys = keys_of("grpo", model, place, rewards=None, steps=1, **environment, **own)
        train(keys)
        (rollout,) = events(Path(keys["out"]), "rollout")
        assert rollout["groups_with_signal"]
        shown = next(
            s for s in rollout["samples"] if len(s["messages"]) == 3 and any(s["advantage"])
        )
        first, second = shown["advantage"][0], shown["advantage"][-1]
        assert (first == second, first == 0.0) == (sizes == (1, 1), sizes == (0, 1))
    keys = keys_of("grpo", model, tmp_path / "no", grpo__advantage_level="turn", steps=1)
    code = "grpo.advantage_level/rollout.environment.name/rewards/rollout.replay_from"
    with refused(ErrorCode(code)):
        train(keys)
    assert not Path(keys["out"]).exists()


def test_an_advantage_and_a_loss_of_ones_own(model: Path, tmp_path: Path) -> None:
    """They are those of taut: so are the weights. Their file is a part of the run: with another a resume is refused."""
    own = tmp_path / "own.py"
    own.write_text(OWN_CODE)
    named = {"grpo__advantage": f"{own}:centered", "grpo__loss": f"{own}:Own"}
    kept = {"checkpoint__every": 1, "checkpoint__keep": 9}
    keys = keys_of("grpo", model, tmp_path / "own", steps=2, **named, **kept)
    train(keys)
    plain = {"grpo__advantage": "mean", "grpo__loss": "reinforce"}
    theirs = keys_of("grpo", model, tmp_path / "theirs", steps=2, **plain)
    train(theirs)
    model_of = [weights(Path(k["out"]) / "model") for k in (keys, theirs)]
    assert largest_difference(*model_of) < 1e-12
    said = decisions(Path(keys["out"]))["rollout_monitor.max_logprob_difference"]
    assert said == ("not compared", "grpo.loss gives no metric engine/difference")
    own.write_text(OWN_CODE.replace("-packed", "-2 * packed"))
    with pytest.raises(ConfigError, match=r"belongs to another run: code .*own\.py: other content"):
        train(keys | {"resume": True, "steps": 3})
    own.write_text(OWN_CODE.replace("cost_N.sum()", "cost_N.mean()"))
    wrong = keys_of("grpo", model, tmp_path / "wrong", **named)
    with pytest.raises(ConfigError, match=r"own.py:Own: its term policy of packed samples differs"):
        train(wrong)
    assert not Path(wrong["out"]).exists()


def test_a_process_model_that_was_trained_here_charges_the_steps_of_answers(
    model: Path, tmp_path: Path
) -> None:
    """Words are the steps. What they are charged adds up to the reward, and a step's tokens have one advantage."""
    labeled = [
        {
            "prompt": [{"role": "user", "content": "What is 2 and 3?"}],
            "completions": ["It", "is", f"{number}"],
            "labels": [True, True, number == 5],
        }
        for number in range(8)
    ]
    keys = {
        **QUIET,
        "data.train": str(write_rows(tmp_path / "steps.jsonl", labeled)),
        "data.step_separator": " ",
        "reward.loss": "process",
        "steps": 2,
    }
    taut.reward(**keys, model=str(model), out=str(tmp_path / "prm"))
    steps = {"separator": " ", "aggregate": "product", "charge": True}
    options = {"model": str(tmp_path / "prm" / "model"), "dtype": "float64", "steps": steps}
    rewards = [{"name": "reward_model", "weight": 2.0, "options": options}]
    more = {"rewards": rewards, "steps": 1}
    for method, own in (
        ("grpo", {"grpo.advantage_level": "turn"}),
        ("ppo", {"ppo.gae_lambda": 0.0}),
    ):
        keys = keys_of(method, model, tmp_path, **more, **own)
        train(keys)
        rows = Recorded(Path(keys["out"])).rollouts(1)
        several = [row for row in rows if len(row["turn_rewards"]) > 1]
        assert several
        for row in rows:
            charges = [part["reward"] for part in row["turn_rewards"]]
            assert sum(charges) == pytest.approx(row["reward"], abs=1e-9)
            assert row["rewards"][0]["reply"].startswith("steps 0." if charges else "no step")
        for row in several:
            ends = [part["n"] for part in row["turn_rewards"]]
            assert ends[-1] == len(row["sampled_at_N"]) - 1
            if method == "grpo":
                advantages = np.split(row["advantage_N"], np.array(ends[:-1]) + 1)
                assert all(len(set(part)) == 1 for part in advantages)
    for method, own in (("grpo", {}), ("online_dpo", {})):
        keys = keys_of(method, model, tmp_path / "no", **more, **own)
        with refused(ErrorCode("rewards/method/rollout.replay_from")):
            train(keys)
        assert not Path(keys["out"]).exists()


def test_a_tool_is_called_and_its_answer_read(tmp_path: Path) -> None:
    """A model that was taught to call the calculator does so, and what it is told is no target."""
    tools = tiny_tokenizer("qwen2.5")
    model = save_tiny("qwen2", tmp_path / "model", tools, max_position_embeddings=1024)
    asked = {"role": "user", "content": "What is 2 + 3?"}
    arguments = {"name": "calculator", "arguments": {"expression": "2 + 3"}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": arguments}]}
    said = [{"role": "tool", "content": "5"}, {"role": "assistant", "content": "5"}]
    row = {"messages": [asked, call, *said], "tools": [load_tool("calculator").schema]}
    train_file = write_rows(tmp_path / "train.jsonl", [row])
    how = {"dtype": "float32", "check": "off", "contract__prompts": 0, "data__max_length": 1000}
    one = {"batch__samples_per_step": 1, "optim__learning_rate": 1e-2, "steps": 50}
    taught = sft(model, train_file, tmp_path / "taught", **how, **one).model
    environment = {"name": "tools", "tools": ["calculator"], "max_turns": 3}
    keys = keys_of(
        "grpo",
        taught,
        tmp_path,
        data__train=str(write_rows(tmp_path / "asked.jsonl", [{"prompt": [asked], "answer": "5"}])),
        rewards="numeric",
        steps=1,
        rollout__n=2,
        batch__samples_per_step=1,
        rollout__stop=None,
        rollout__temperature=0.2,  # what was taught, and not what rounding may make of a rare draw
        rollout__max_new_tokens=64,
        dtype="float32",
        **{f"rollout__environment__{key}": value for key, value in environment.items()},
    )
    train(keys)
    (rollout,) = events(tmp_path / "grpo", "rollout")
    assert rollout["calls"] >= 2 and rollout["turns_mean"] >= 2 and rollout["errors"] == 0
    best = rollout["samples"][0]
    assert best["reward"] == 1.0
    assert [m["role"] for m in best["messages"]] == ["assistant", "tool", "assistant"]
    assert best["messages"][1]["content"] == "5"
    (step,) = events(tmp_path / "grpo", "step")
    assert step["num_targets"] == rollout["tokens_mean"] * 2
    assert step["engine/difference"] < 1e-5
    replayed = {"out": str(tmp_path / "again"), "rollout.replay_from": keys["out"]}
    assert not differences(left(train(keys | replayed).out), left(tmp_path / "grpo"))


@contextlib.contextmanager
def reward_server() -> Iterator[str]:
    """The address of a server that scores an answer by its length."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/score":
                answer: Any = {"scores": [len(asked["completions"][0]) % 5]}
            else:  # a judge, which repeats what it was shown
                shown = asked["messages"][0]["content"]
                message = {
                    "content": f"{shown.partition('<reference>')[0]} Score: {len(shown) % 9}"
                }
                answer = {"choices": [{"message": message}]}
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        listening.daemon_threads = True
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_address[1]}"
        finally:
            listening.shutdown()
            thread.join()


def test_a_judge_sees_all_turns_and_its_replies_are_kept(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "twice.py").write_text(TWICE)
    environment = {"rollout__environment__name": f"{tmp_path / 'twice.py'}:Twice"}
    with reward_server() as url:
        options = {"url": f"{url}/v1", "model": "m", "sees": "conversation"}
        rewards = [{"name": "judge", "options": options}]
        keys = keys_of("grpo", model, tmp_path, rewards=rewards, steps=1, **environment)
        train(keys)
    rows = Recorded(Path(keys["out"])).rollouts(1)
    twice = [row for row in rows if row["num_turns"] == 2]
    assert twice
    for row in twice:
        reply = {part["name"]: part["reply"] for part in row["rewards"]}["judge"]
        assert reply.count("[assistant]") == 2 and "[user]\nAnd then?" in reply
        assert " Score: " in reply
    assert cli.main(["rollouts", keys["out"], "groups=99"]) == 0
    assert "judge: Judge how well the assistant did" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_run_goes_on_with_a_reward_server_at_another_address(model: Path, tmp_path: Path) -> None:
    def rewards(url: str) -> list[dict[str, Any]]:
        return [{"name": "reward_server", "options": {"url": url}}]

    keys = keys_of(
        "grpo", model, tmp_path, steps=2, checkpoint__every=2, optim__schedule="constant"
    )
    with reward_server() as first:
        whole = train(
            {**keys, "out": str(tmp_path / "whole"), "steps": 4, "rewards": rewards(first)}
        )
        train({**keys, "rewards": rewards(first)})
    with reward_server() as second:
        resumed = train({**keys, "steps": 4, "resume": True, "rewards": rewards(second)})
    (warning,) = [it for it in events(resumed.out, "warning") if it["name"] == "address"]
    says = f"reward reward_server: {first} then, {second} now: asked there from step 3 on"
    assert warning["detail"] == says
    config = json.loads((resumed.out / "resolved.json").read_text())["config"]
    assert config["rewards"][0]["options"]["url"] == second
    assert column(resumed.out, "loss") == column(whole.out, "loss")
    assert largest_difference(weights(resumed.model), weights(whole.model)) == 0.0
