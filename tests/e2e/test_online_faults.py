"""Rewards and environments that fail: counted, told, bounded; a run that stops learned nothing of it, and goes on."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.chat_runs import column, events, largest_difference, weights
from tests.helpers.online_runs import keys_of, save_models, train

import taut
from taut.cli import main
from taut.errors import CheckFailed, ConfigError, UserCodeError
from taut.inference.local import LocalEngine

REWARD = """
import time

def worth(row, num_tokens, bad=()):
    kind = {value: key for key, value in enumerate(bad)}
    match kind.get(row["id"]):
        case 0:
            raise KeyError("budget")
        case 1:
            time.sleep(60)
        case 2:
            return float("nan")
        case 3:
            raise ValueError("good")
        case _:
            return num_tokens / 8
"""
STEP = """
class Bad:
    def __init__(self):
        self.reward = None

    def reset(self, row):
        self.row = row

    def step(self, text, calls):
        from taut.rl.environment import Step
        if self.row["id"] in ("q0", "q3"):
            raise RuntimeError("the board is gone")
        return Step(done=True, reward=len(text))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))


def own(place: Path, *bad: str, **spec: Any) -> list[dict[str, Any]]:
    """A reward of the user's: rows that it raises for, hangs at, says NaN of, and raises for again."""
    (place / "own.py").write_text(REWARD)
    return [{"name": f"{place}/own.py:worth", "options": {"bad": list(bad)}, **spec}]


def test_what_a_reward_cannot_say_is_counted_and_told(model: Path, tmp_path: Path) -> None:
    """All four faults in one rollout: the rest is learned from, and nothing became 0."""
    keys = keys_of(
        "grpo",
        model,
        tmp_path,
        rewards=own(tmp_path, "q0", "q1", "q2", "q3", timeout=0.5),
        rollout_monitor__max_errors=0.5,
        grading__workers=2,
        batch__samples_per_step=13,
        rollout__n=2,
        steps=1,
    )
    train(keys)
    out = Path(keys["out"])
    (rollout,) = events(out, "rollout")
    assert (rollout["completions"], rollout["errors"]) == (26, 8)
    assert 0 < rollout["reward"] <= 1 and rollout["reward/worth"] == rollout["reward"]
    (warning,) = [e for e in events(out, "warning") if e["name"] == "rewards"]
    assert "8 completions have no reward because of an error" in warning["detail"]
    (names,) = column(out, "sample_ids")
    assert len(names) == 18
    assert not {name.partition("#")[0] for name in names} & {"q0", "q1", "q2", "q3"}


@pytest.mark.slow
def test_too_many_errors_stop_the_run_and_it_goes_on(model: Path, tmp_path: Path) -> None:
    """Weights are those before; resumed with a wider bound it is the run that never stopped."""
    keys = keys_of("grpo", model, tmp_path, rewards=own(tmp_path), grading__workers=1, steps=3)
    whole, out = tmp_path / "whole", Path(keys["out"])
    train(keys | {"out": str(tmp_path / "before")})
    asked = [
        [name.partition("#")[0] for name in n] for n in column(tmp_path / "before", "sample_ids")
    ]
    keys["rewards"] = own(tmp_path, asked[1][0])  # of the second rollout
    wide = {"rollout_monitor.max_errors": 0.25}
    train({**keys, **wide, "out": str(whole)})
    with pytest.raises(CheckFailed) as stopped:
        train(keys)
    told = str(stopped.value)
    assert (
        "step 2: 4 of 16 completions have no reward because of an error; expected at most 10%"
        in told
    )
    assert "nothing was updated" in told and told.count("KeyError: 'budget' (own.py:8)") == 3
    assert f"the state after step 1 is in {out}/checkpoints/step-000001; resume=true" in told
    (end,) = events(out, "end")
    assert (end["outcome"], end["step"], end["reason"]) == ("stopped", 1, told)
    train({**keys, **wide, "resume": True})
    assert column(out, "loss") == column(whole, "loss")
    assert largest_difference(weights(out / "model"), weights(whole / "model")) == 0
    (tmp_path / "own.py").write_text(REWARD.replace("num_tokens / 8", "num_tokens / 4"))
    with pytest.raises(ConfigError, match=r"own\.py.*other content"):
        train({**keys, **wide, "resume": True, "steps": 4})


SOMETIMES = """
from pathlib import Path

def worth(row, num_tokens, without=(), wrong=(), mark=""):
    if row["id"] in wrong and Path(mark).exists():
        return "good"
    return None if row["id"] in without else num_tokens / 8
"""


def test_a_skipped_step_and_a_wrong_type_after_it_are_gone_on_from_exactly(
    model: Path, tmp_path: Path
) -> None:
    """No reward applies to the second rollout: its update is skipped. A text as a reward stops the third at once."""
    (tmp_path / "own.py").write_text(SOMETIMES)
    mark, name = tmp_path / "mark", f"{tmp_path / 'own.py'}:worth"
    keys = keys_of("grpo", model, tmp_path, rewards=name, grading__workers=1, steps=4)
    keys["rollout_monitor.max_errors"] = 1.0
    train(keys | {"out": str(tmp_path / "before")})
    asked = [{it.partition("#")[0] for it in n} for n in column(tmp_path / "before", "sample_ids")]
    wrong = sorted(asked[2] - asked[1])[:1]
    options = {"without": sorted(asked[1]), "wrong": wrong, "mark": str(mark)}
    keys["rewards"] = [{"name": name, "options": options}]
    whole, out = tmp_path / "whole", Path(keys["out"])
    train(keys | {"out": str(whole)})
    assert column(whole, "sample_ids")[1] == [] and column(whole, "grad_norm")[1] == 0.0
    assert [event.get("skipped") for event in events(whole, "step")] == [None, 1.0, None, None]
    warned = [e["step"] for e in events(whole, "warning") if "none of 16" in e["detail"]]
    assert warned == [2]
    mark.touch()
    with pytest.raises(UserCodeError, match=r"worth returned 'good' of type str; .*after step 2"):
        train(keys)
    mark.unlink()
    train({**keys, "resume": True})
    assert column(out, "loss") == column(whole, "loss")
    assert largest_difference(weights(out / "model"), weights(whole / "model")) == 0


def test_rewards_that_never_differ_stop_the_run(model: Path, tmp_path: Path) -> None:
    same = [{"name": "length_overlong", "options": {"max_tokens": 100, "buffer": 1}}]
    keys = keys_of(
        "grpo", model, tmp_path, rewards=same, rollout_monitor__max_without_signal=5, steps=6
    )
    with pytest.raises(
        CheckFailed, match=r"step 5: in the last 5 rollouts no group .*max_without_signal"
    ):
        train(keys)
    out = Path(keys["out"])
    assert column(out, "grad_norm") == [0.0] * 4
    assert [e["groups_with_signal"] for e in events(out, "rollout")] == [0] * 5
    (warning,) = events(out, "warning")  # and none of tensors whose gradient is zero
    assert (warning["name"], warning["step"]) == ("equal_rewards", 3)
    assert "the rewards of every group were equal" in warning["detail"]


def test_an_environment_that_raises_is_an_error_of_its_paths(model: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(STEP)
    keys = keys_of(
        "grpo",
        model,
        tmp_path,
        rewards=None,
        steps=1,
        batch__samples_per_step=13,
        rollout__n=2,
        rollout__environment__name=f"{tmp_path / 'bad.py'}:Bad",
        rollout_monitor__max_errors=0.2,
    )
    train(keys)
    (rollout,) = events(Path(keys["out"]), "rollout")
    assert 0 < rollout["errors"] <= 4 and "the board is gone" in rollout["first_error"]
    keys |= {"rollout_monitor.max_errors": 0.0, "out": str(tmp_path / "other")}
    with pytest.raises(CheckFailed, match="the board is gone"):
        train(keys)
    assert not (tmp_path / "other" / "model").exists()


def test_errors_of_groups_that_are_replaced_count(model: Path, tmp_path: Path) -> None:
    """Groups whose every reward is an error have no signal; replacing them does not hide it."""
    keys = keys_of(
        "grpo",
        model,
        tmp_path,
        rewards=own(tmp_path, "q0", "", "q1", "q2"),
        rollout__dynamic_sampling_rounds=3,
        batch__samples_per_step=10,
        grading__workers=1,
        steps=1,
    )
    with pytest.raises(CheckFailed, match=r"rollout_monitor\.max_errors"):
        train(keys)
    assert taut.runs(Path(keys["out"]))[0].state == "stopped"


def test_an_engine_that_is_mended_goes_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it said before, and its logprobs with it, is drawn anew."""
    keys = keys_of("grpo", model, tmp_path)
    whole, out = tmp_path / "whole", Path(keys["out"])
    train(keys | {"out": str(whole)})
    make = LocalEngine._completion

    def wrong(self: LocalEngine, *args: Any) -> Any:
        made = make(self, *args)
        assert made.logp_N is not None
        return replace(made, logp_N=made.logp_N - 2 * (self.version == 1))

    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "_completion", wrong)
        with pytest.raises(
            CheckFailed, match=r"step 2: .*max_logprob_difference.*state after step 1"
        ):
            train(keys)
    train(keys | {"resume": True})
    assert column(out, "loss") == column(whole, "loss")
    assert largest_difference(weights(out / "model"), weights(whole / "model")) == 0


def test_a_reward_that_an_advantage_cannot_be_taken_of_loses_no_step(
    model: Path, tmp_path: Path
) -> None:
    """That it is below 0 is known when there is one."""
    (tmp_path / "own.py").write_text(
        "def worth(row, bad=''):\n    return -1.0 if row['id'] == bad else 1.0\n"
    )
    spec: dict[str, Any] = {"name": f"{tmp_path}/own.py:worth"}
    keys = keys_of("grpo", model, tmp_path, grading__workers=1, rewards=[spec], steps=2)
    train(keys | {"out": str(tmp_path / "before")})
    asked = [n[0].partition("#")[0] for n in column(tmp_path / "before", "sample_ids")]
    keys |= {"grpo.advantage": "maxrl", "rewards": [{**spec, "options": {"bad": asked[1]}}]}
    with pytest.raises(ConfigError, match=r"a reward of -1 .*the state after step 1 is in"):
        train(keys)


@pytest.mark.parametrize("method", ["grpo", pytest.param("ppo", marks=pytest.mark.slow)])
def test_a_run_whose_rewards_never_differ_has_learned_nothing_and_says_why(
    method: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its model is saved, its exit code is 1 unless a key says otherwise, and a resume goes on."""
    keys = keys_of(method, model, tmp_path, rewards="exact_match", steps=2, checkpoint__every=1)
    result, out = train(keys), Path(keys["out"])
    (end,) = events(out, "end")
    assert end["outcome"] == "learned_nothing" and result.model.is_dir()
    why = end["learned_nothing"]
    assert "in no rollout did the rewards of answers differ" in why
    assert "rewards of different answers are the same" in why
    assert result.learned_nothing == why and why in str(result.failure) and not result.warning
    assert main(["runs", str(tmp_path)]) == 0
    assert "learned_nothing  2/2" in capsys.readouterr().out
    assert main(["resume", str(out)]) == 1
    assert f"taut: error: {why}"[:200] in capsys.readouterr().err
    assert main(["resume", str(out), "loss_monitor.nothing_learned=warn"]) == 0
    assert f"taut: warning: {why}"[:200] in capsys.readouterr().err
    assert main(["resume", str(out), "steps=3"]) == 1
    assert [(e["outcome"], e["step"]) for e in events(out, "end")] == [
        ("learned_nothing", 2),
        ("learned_nothing", 3),
    ]


@pytest.mark.slow
def test_a_run_whose_environment_always_fails_has_learned_nothing(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad.py").write_text(STEP.replace('self.row["id"] in ("q0", "q3")', "True"))
    lax = {"rollout_monitor__max_errors": 1.0, "rollout_monitor__max_unrewarded": 9}
    name = {"rollout__environment__name": f"{tmp_path / 'bad.py'}:Bad"}
    keys = keys_of("grpo", model, tmp_path, rewards=None, steps=2, **name, **lax)
    result = train(keys)
    assert result.learned_nothing is not None and result.model.is_dir()
    assert re.search(r"an environment or a reward fails, 2\d of 32", result.learned_nothing)
    assert "raised RuntimeError: the board is gone" in result.learned_nothing


def test_a_run_that_has_learned_ends_as_ever(model: Path, tmp_path: Path) -> None:
    keys = keys_of("grpo", model, tmp_path, steps=1)
    result = train(keys)
    assert (result.learned_nothing, result.failure, result.warning) == (None, None, None)
    assert [end["outcome"] for end in events(Path(keys["out"]), "end")] == ["finished"]
