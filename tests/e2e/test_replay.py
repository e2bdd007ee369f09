"""A run on the rollouts of another: the same numbers to the bit, no engine and no reward; and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from tests.helpers.chat_runs import decisions, events
from tests.helpers.online_runs import LENGTH, TWICE, keys_of, make, save_models, train
from tests.helpers.run_directories import differences, left

from taut.data.order import Order
from taut.errors import ConfigError, DataError
from taut.io.tables import read_tables
from taut.rl.rollout import RolloutRequest
from taut.rl.worker import RolloutWorker

KINDS: dict[str, dict[str, Any]] = {
    "grpo": {
        "rollout.n": 2,
        "rollout.dynamic_sampling_rounds": 1,
        "rollout.minibatches": 2,
        "rollout.epochs": 2,
        "rollout.replay_groups": 2,
        "batch.samples_per_step": 2,
        "grpo.kl_coef": 0.1,
        "grpo.rollout_correction": "truncated",
        "steps": 8,
    },
    "ppo": {
        "rollout.environment.name": "twice.py:Twice",
        "rewards": [LENGTH],
        "ppo.kl_coef": 0.1,
        "ppo.kl_in": "reward",
        "ppo.kl_target": 0.01,
        "shaping.scale": "running",
        "rollout.minibatches": 2,
        "steps": 6,
    },
}
"""Dropped groups, a reference, importance weights, several steps on a rollout; and a critic, turns and their rewards,
controllers that remember."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models and the recorded runs are."""
    found = tmp_path_factory.mktemp("replay")
    own = TWICE.replace('"And then?"}])', '"And then?"}], reward={"short": -len(text) / 20})')
    (found / "twice.py").write_text(own)
    save_models(found)
    return found


def recorded(method: str, place: Path) -> dict[str, Any]:
    """The keys of a run of ``KINDS`` that has been trained."""
    own = KINDS[method]
    if "rollout.environment.name" in own:
        own = own | {"rollout.environment.name": f"{place / own['rollout.environment.name']}"}
    keys = keys_of(
        method, place / "policy", place, **{"checkpoint.every": 3, "log.tokens.every": 1, **own}
    )
    if not (place / method).exists():
        train(keys)
    return keys


def again(keys: dict[str, Any], out: Path, **more: Any) -> dict[str, Any]:
    """The same run, on the rollouts of the first."""
    return {**keys, "out": str(out), "rollout.replay_from": keys["out"], **more}


def asked(number: int) -> RolloutRequest:
    """A rollout, with whichever prompts."""
    return RolloutRequest(number, Order((), (), 3, 2))


def refuse_to_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no source of rollouts with an engine can be made, and no rewards opened."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something would be generated")

    monkeypatch.setattr(RolloutWorker, "__init__", refuse)
    monkeypatch.setattr("taut.rewards.reward_set.open_rewards", refuse)


def test_a_run_has_the_recorded_one_s_numbers_to_the_bit(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = recorded("grpo", place)
    rows = [row for batch in read_tables(place / "grpo/rollouts") for row in batch.to_pylist()]
    assert {row["is_kept"] for row in rows} == {True, False}
    assert any(value != float(np.float32(value)) for row in rows for value in row["logp_N"])
    refuse_to_sample(monkeypatch)
    out = train(again(keys, tmp_path / "out", check="quick", rewards=[])).out
    whole = left(place / "grpo")
    assert not differences(left(out), whole)
    assert whole.recorded and whole.tensors
    said = {event["name"]: event for event in events(out, "check")}
    assert said["rollout.opens"]["outcome"] == "skipped" and "generates none" in str(said)
    assert "failed" not in {event["outcome"] for event in said.values()}
    value, reason = decisions(out)["rollouts"]
    assert value == f"those that {place / 'grpo'} recorded" and "no engine is opened" in reason
    (first, *_) = events(out, "rollout")
    assert first["seconds_generating"] == first["seconds_judging"] == 0.0
    assert first["samples"] == events(place / "grpo", "rollout")[0]["samples"]


@pytest.mark.slow
def test_a_run_that_is_resumed_has_the_recorded_one_s_numbers_too(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = recorded("ppo", place)
    rows = [row for batch in read_tables(place / "ppo/rollouts") for row in batch.to_pylist()]
    assert any(len(row["turn_rewards"]) > 1 for row in rows)
    refuse_to_sample(monkeypatch)
    halfway = again(keys, tmp_path / "out", steps=3)  # in the middle of the second rollout
    train(halfway)
    shutil.copytree(place / "ppo", tmp_path / "moved")
    rest = again(keys | {"out": str(tmp_path / "moved")}, tmp_path / "out", resume=True)
    out = train(rest).out
    once, whole = (replace(left(o), measured=[]) for o in (out, place / "ppo"))
    assert not differences(once, whole)
    new = {key: value for key, value in rest.items() if key != "rollout.replay_from"}
    with pytest.raises(
        ConfigError, match=r"belongs to another run: .*rollouts: [0-9a-f]{12}\.\.\. then, none"
    ):
        train(new)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["best_of_n", "online_dpo", "gkd"])
def test_every_method_may_be_given_recorded_rollouts(
    method: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(method, place / "policy", tmp_path, steps=2, dtype="float32")
    train(keys)
    refuse_to_sample(monkeypatch)
    out = train(again(keys, tmp_path / "out")).out
    assert not differences(left(out), left(Path(keys["out"])))


def test_another_method_learns_from_the_same_answers(place: Path, tmp_path: Path) -> None:
    """The advantages are those of the run that learns: here of the best of each group, which is imitated."""
    keys = recorded("grpo", place)
    other = keys_of("best_of_n", place / "policy", tmp_path, **{"rollout.n": 2, "steps": 2})
    other |= {"batch.samples_per_step": 4, "rollout.replay_from": keys["out"]}
    out = train(other).out
    rows = [r for batch in read_tables(out / "rollouts") for r in batch.to_pylist()]
    theirs = [r for batch in read_tables(place / "grpo/rollouts") for r in batch.to_pylist()]
    assert [row["sample_id"] for row in rows] == [row["sample_id"] for row in theirs]
    assert {row["step"] for row in rows} == {1, 2} and {row["step"] for row in theirs} == {1, 5}
    best: dict[int, list[float]] = {}
    for row in rows:
        if row["step"] == 1 and row["is_kept"] and row["finish_reason"] == "stop":
            best.setdefault(row["group"], []).append(row["reward"])
    (told, _) = events(out, "rollout")
    assert told["kept"] == len(best)
    assert told["reward_kept"] == pytest.approx(np.mean([max(each) for each in best.values()]))


# -- what is refused


def edited(change: Callable[[Path], None], place: Path, tmp_path: Path) -> str:
    """A copy of the recorded run's records that has been changed."""
    copy = tmp_path / "recorded"
    for name in ("rollouts", "tokens"):
        shutil.copytree(place / "grpo" / name, copy / name)
    shutil.copy(place / "grpo/resolved.json", copy)
    change(copy)
    return str(copy)


def table_of(out: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    (part,) = (out / "rollouts").glob("*.parquet")
    pq.write_table(change(pq.read_table(part)), part)


def without_rewards(table: pa.Table) -> pa.Table:
    index = table.schema.get_field_index("rewards")
    none = pa.array([[]] * len(table), table.schema.field(index).type)
    return table.set_column(index, table.schema.field(index), none)


def without_words(out: Path) -> None:
    path = out / "tokens/vocabulary.parquet"
    pq.write_table(pa.table({"bytes": pa.array([b"a", b"b"], pa.binary())}), path)


def full(out: Path) -> None:
    resolved = json.loads((out / "resolved.json").read_text())
    resolved["config"]["log"]["rollouts"]["max_gib"] = 1e-6
    (out / "resolved.json").write_text(json.dumps(resolved))


BAD: dict[str, tuple[Callable[[Path], object], dict[str, Any], str]] = {
    "no run": (lambda out: (out / "resolved.json").unlink(), {}, "is not a taut run"),
    "no rollouts": (
        lambda out: shutil.rmtree(out / "rollouts"),
        {},
        "has no rollouts; expected a run that learns from completions and records them",
    ),
    "an older table": (
        lambda out: table_of(out, lambda table: table.drop_columns(["turn_rewards"])),
        {},
        r"rollouts/000001\.parquet has no column turn_rewards",
    ),
    "other words": (without_words, {}, "has 2 tokens with the hash .* expected the same tokenizer"),
    "too few": (
        lambda _: None,
        {"steps": 9},
        r"has 2 rollouts .*\(its last is of step 5\), and 9 steps of this run take 3; .* set steps=8 or less",
    ),
    "a full table": (
        full,
        {"steps": 9},
        r"its last is of step 5, as its table has reached log\.rollouts\.max_gib=1e-06",
    ),
    "a gap": (
        lambda out: table_of(out, lambda table: table.filter(pc.field("step") != 1)),
        {},
        "has 0 rollouts .*it has none of step 1, though one of step 5",
    ),
    "another group": (lambda _: None, {"rollout.n": 3}, "rollout.n=3, .* sampled with 2"),
    "another rollout": (
        lambda _: None,
        {"batch.samples_per_step": 3},
        "makes rollouts of 6 prompts, and .* has 4; set",
    ),
    "another temperature": (
        lambda _: None,
        {"rollout.temperature": 0.5},
        r"rollout\.temperature=0\.5, .* set rollout\.temperature=1$",
    ),
    "no rewards": (
        lambda out: table_of(out, without_rewards),
        {},
        "has completions without rewards",
    ),
    "itself": (
        lambda _: None,
        {"out": "recorded"},
        "rollout.replay_from=.* with out=.*: this run has yet to record",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_rollouts_that_cannot_be_trained_on_are_refused_before_a_model_is_loaded(
    bad: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, keys, says = BAD[bad]
    run = recorded("grpo", place) | {"out": edited(change, place, tmp_path)}
    run = again(
        run, tmp_path / keys.get("out", "out"), **{k: v for k, v in keys.items() if k != "out"}
    )

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("taut.run.setup.load_model", refuse)
    with pytest.raises(ConfigError, match=says) as error:
        train(run)
    assert "\n" not in str(error.value)
    assert bad == "itself" or not (tmp_path / "out").exists()


def test_rollouts_that_go_or_do_not_fit_stop_the_run_where_it_is(
    place: Path, tmp_path: Path
) -> None:
    """They are read one by one, as they are trained on."""
    out = edited(lambda _: None, place, tmp_path)
    built, _ = make(again(recorded("grpo", place) | {"out": out}, tmp_path / "out"))
    worker = built.trainer.source.worker  # type: ignore[attr-defined]  # it is Online
    assert worker.engine is None and len(worker.take(asked(1)).all_groups) >= 4
    with pytest.raises(
        DataError, match=r"rollout of step 1 in .*tokens, and a sample of this run may have 9"
    ):
        replace(worker, longest=9).take(asked(0))
    with pytest.raises(DataError, match=r"has token \d+, and the model has 5 rows"):
        replace(worker, num_rows=5).take(asked(0))
    logp = "logp_N"
    table_of(
        Path(out),
        lambda table: table.set_column(
            table.schema.get_field_index(logp),
            table.schema.field(logp),
            pa.array([[0.0]] * len(table), table.schema.field(logp).type),
        ),
    )
    with pytest.raises(
        DataError, match=r"sampled, with 1 logprobs and .* versions; expected one of each"
    ):
        worker.take(asked(0))
    shutil.rmtree(f"{out}/rollouts")
    with pytest.raises(DataError, match="there is no such rollout any more"):
        worker.take(asked(0))
