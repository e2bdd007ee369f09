"""What a resume may change."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.helpers.tiny_trainers import make

from taut.config import describe, from_mapping, to_dict
from taut.conflicts import default_of
from taut.errors import ConfigError
from taut.methods import METHODS
from taut.run import fingerprint as module
from taut.run.fingerprint import (
    differences,
    identity_of,
    moved_servers,
    require_same,
)
from taut.run.setup import Built


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return make(tmp_path_factory.mktemp("identity"))[0]


def identity(built: Built, **changes: Any) -> dict[str, Any]:
    return identity_of(replace(built.run, **changes), built.inputs, built.trainer.ranks)


def test_the_same_run_is_the_same(built: Built) -> None:
    assert differences(identity(built), identity(built)) == ([], [], [])


def test_every_key_is_of_one_kind_and_every_name_is_a_key(built: Built) -> None:
    keys = {row.key for cls in METHODS.values() for row in describe(cls)}
    for cls in METHODS.values():
        for name in (name for kind in cls.may_change for name in kind):
            assert any(key == name or key.startswith(f"{name}.") for key in keys), name
    left = identity(built)["config"]
    assert not set(built.run.may_change.freely) & set(left)
    assert {"seed", "optim", "lora", "batch", "noise", "data", "freeze"} <= set(left)
    assert "eval" not in left["data"]
    assert to_dict(built.run)["data"]["cache"] is None


def test_a_default_learning_rate_is_compared_by_its_value(built: Built) -> None:
    def with_rate(rate: float | None) -> dict[str, Any]:
        return identity(built, optim=replace(built.run.optim, learning_rate=rate))

    assert differences(with_rate(None), with_rate(2e-5)) == ([], [], [])
    found = differences(with_rate(1e-5), with_rate(None)).schedule
    assert found == ["optim.learning_rate: 1e-05 then, 2e-05 now"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 7}, r"seed: 0 then, 7 now"),
        ({"freeze": ["*norm*"]}, r"freeze: \[\] then, \['\*norm\*'\] now"),
        ({"dtype": "float32"}, r"dtype: 'float64' then, 'float32' now"),
    ],
)
def test_what_changes_what_is_learned_is_refused(
    changes: dict[str, Any], message: str, built: Built
) -> None:
    with pytest.raises(
        ConfigError, match=rf"step-000003 belongs to another run: {message}; resume"
    ):
        require_same(identity(built), identity(built, **changes), Path("step-000003"))


def test_code_of_the_model_counts_where_it_is_run(built: Built) -> None:
    trusted = identity(built, trust_remote_code=True)
    code = Path(built.run.model) / "modeling_own.py"
    before = identity(built)
    code.write_text("scale = 2")
    try:
        assert differences(before, identity(built)) == ([], [], [])
        with pytest.raises(ConfigError, match=r"modeling_own\.py"):
            require_same(trusted, identity(built, trust_remote_code=True), Path("step-000003"))
    finally:
        code.unlink()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"learning_rate": 0.5}, "optim.learning_rate: 0.001 then, 0.5 now"),
        ({"schedule": "linear"}, "optim.schedule: 'constant' then, 'linear' now"),
        (
            {"group_learning_rates": {"*embed*": 1e-4}},
            "optim.group_learning_rates.*embed*: none then, 0.0001 now",
        ),
        ({"warmup_steps": 3}, "optim.warmup_steps: none then, 3 now"),
    ],
)
def test_the_learning_rate_of_the_steps_to_come_may_change(
    changes: dict[str, Any], told: str, built: Built
) -> None:
    optim = replace(built.run.optim, **changes)
    found = require_same(identity(built), identity(built, optim=optim), Path("x"))
    assert found == ([], [], [told])


def settings(method: str, **keys: Any) -> dict[str, Any]:
    """The configuration of a run with rewards, as its identity holds it."""
    base = {"model": "m", "data": {"train": "x.jsonl"}, "rewards": ["stop"]}
    return {"config": module._settings(from_mapping(METHODS[method], {**base, **keys}))}


def test_a_critic_s_rate_that_follows_the_policy_s_is_told() -> None:
    began, resumed = settings("ppo"), settings("ppo", optim={"learning_rate": 1e-6})
    assert require_same(began, resumed, Path("x")) == (
        [],
        [],
        ["critic.learning_rate: 1e-05 then, 1e-06 now"],
    )
    set_too = settings("ppo", optim={"learning_rate": 1e-6}, critic={"learning_rate": 1e-5})
    assert require_same(began, set_too, Path("x")) == ([], [], [])


@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_bounds_of_a_correction_are_compared_as_they_are_in_force(method: str) -> None:
    stored = {"rollout_correction_cap": 2.0, "rollout_correction_floor": 0.0}
    now = settings(method)
    before = json.loads(json.dumps(now))
    before["config"][method] |= stored  # the numbers that were once the defaults of every level
    assert require_same(before, now, Path("x")) == ([], [], [])
    geometric = settings(method, **{method: {"rollout_correction": "masked"}})
    before = json.loads(json.dumps(geometric))
    before["config"][method] |= stored
    with pytest.raises(
        ConfigError, match=rf"{method}\.rollout_correction_cap: 2\.0 then, 1\.1 now"
    ):
        require_same(before, geometric, Path("x"))


def test_what_adamw_remembers_by_may_not_change(built: Built) -> None:
    optim = replace(built.run.optim, beta2=0.95)
    with pytest.raises(ConfigError, match=r"optim\.beta2: 0\.999 then, 0\.95 now; resume with"):
        require_same(identity(built), identity(built, optim=optim), Path("x"))


def test_what_changes_rounding_is_told(built: Built) -> None:
    now = identity(built, attention="reference")
    now["environment"] = {**now["environment"], "threads": 99}
    told = require_same(identity(built), now, Path("x")).rounding
    assert len(told) == 2
    assert told[0] == "attention: 'auto' then, 'reference' now"
    assert told[1].startswith("environment threads: ")


@pytest.mark.parametrize("key", ["steps", "out", "resume", "check"])
def test_what_has_no_part_in_the_steps_is_free(key: str, built: Built) -> None:
    value = {"steps": 999, "out": "elsewhere", "resume": True, "check": "off"}[key]
    assert differences(identity(built), identity(built, **{key: value})) == ([], [], [])


def test_many_differences_are_counted() -> None:
    old = {"config": {str(n): n for n in range(9)}}
    new = {"config": {str(n): -n for n in range(9)}}
    with pytest.raises(ConfigError, match=r" 5: 5 then, -5 now; and 3 more; resume with"):
        require_same(old, new, Path("x"))


def test_hashes_are_shortened() -> None:
    found = differences({"model": {"a": "0" * 64}}, {"model": {"a": "f" * 64}})
    assert found.refused == ["model a: other content, 000000000000... then, ffffffffffff... now"]
    assert differences({"a": None}, {"a": 1}).refused == ["a: none then, 1 now"]


def test_a_file_is_told_by_its_name() -> None:
    one, other = ({"content": digit * 64, "weight": 1.0} for digit in "0f")
    old, new = {"data": {"a.jsonl": one}}, {"data": {"a.jsonl": other, "b.jsonl": one}}
    assert differences(old, new).refused == [
        "data a.jsonl: other content, 000000000000... then, ffffffffffff... now",
        "data b.jsonl: none then, 000000000000... now",
    ]


def test_a_key_that_the_run_had_not_yet_counts_as_its_default(built: Built) -> None:
    now = identity(built)
    older = json.loads(json.dumps(now))
    del older["config"]["optim"]["clip_grad_norm"]
    del older["config"]["freeze"]
    assert require_same(older, now, Path("x")) == ([], [], [])
    with pytest.raises(ConfigError, match=r"freeze: \[\] then, \['a'\] now"):
        require_same(older, identity(built, freeze=["a"]), Path("x"))
    older["config"]["gone"] = 3
    with pytest.raises(ConfigError, match=r"gone: 3 then, none now"):
        require_same(older, now, Path("x"))


def test_another_version_of_a_library_that_gives_the_same_samples_is_told_only(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    then = identity(built)
    before = built.inputs.renderer.identity()
    monkeypatch.setattr("taut.run.fingerprint.version", lambda name: "9.9")
    monkeypatch.setattr("taut.data.render.chat_template.version", lambda name: "9.9")
    assert built.inputs.renderer.identity() != before, "tokenized anew"
    (told,) = require_same(then, identity(built), Path("x")).rounding
    assert told.startswith("environment transformers: ")


def test_a_key_of_a_methods_own_that_was_not_there_then_had_its_default() -> None:
    now = {"config": {"method": "dpo", "dpo": to_dict(default_of(METHODS["dpo"], "dpo"))}}
    before = json.loads(json.dumps(now))
    del before["config"]["dpo"]["log_entropy"]
    assert require_same(before, now, Path("x")) == ([], [], [])
    now["config"]["dpo"]["log_entropy"] = True
    with pytest.raises(ConfigError, match=r"dpo\.log_entropy: False then, True now"):
        require_same(before, now, Path("x"))


def test_another_model_of_a_hub_is_known_by_its_commit(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"model": "m", "data.train": "t", "reference.model": "some/name"}
    run = from_mapping(METHODS["dpo"], keys)
    config = SimpleNamespace(_commit_hash="0af1")
    monkeypatch.setattr(module, "load_config_of", lambda *_: config)
    found = module._others(run, built.inputs, built.trainer.ranks)
    assert found == {"reference": {"commit": "0af1"}}


def judged(built: Built, judge: Path, **options: Any) -> dict[str, Any]:
    """The identity of a run of GRPO whose answers a reward model in this process judges."""
    rewards = [{"name": "reward_model", "options": {"model": str(judge), **options}}]
    keys = {"model": built.run.model, "data.train": "d.jsonl", "method": "grpo", "rewards": rewards}
    run = from_mapping(METHODS["grpo"], keys)
    return module._others(run, built.inputs, built.trainer.ranks)


def test_a_reward_model_in_this_process_is_part_of_the_run(built: Built, tmp_path: Path) -> None:
    """Its weights, its tokenizer's files and the template in place of its own; and no new run overwrites them."""
    judge, template = tmp_path / "judge", tmp_path / "own.jinja"
    shutil.copytree(built.run.model, judge)
    template.write_text("{{ messages }}")
    before = judged(built, judge, template=str(template))
    for path in (judge / "model.safetensors", judge / "tokenizer.json", template):
        was = path.read_bytes()
        path.write_bytes(was + b" ")
        name = "template" if path == template else path.name
        (told,) = differences(before, judged(built, judge, template=str(template))).refused
        assert told.startswith(f"reward model reward_model.{name}: other content, ")
        path.write_bytes(was)
    assert differences(before, judged(built, judge, template=str(template))) == ([], [], [])


def test_what_is_read_of_a_reward_model_is_not_overwritten() -> None:
    judge = [{"name": "reward_model", "options": {"model": "judge", "template": "own.jinja"}}]
    keys = {"model": "m", "data.train": "d.jsonl", "method": "grpo"}
    for given in ({"rewards": judge}, {"rewards": "math", "eval.answers.rewards": judge}):
        run = from_mapping(METHODS["grpo"], {**keys, **given, "data.eval": "e.jsonl"})
        assert {"judge", "own.jinja"} <= set(run.input_files())


def test_how_many_tokens_an_engine_decodes_at_once_is_rounding() -> None:
    keys = {"model": "m", "data.train": "d.jsonl", "method": "grpo", "rewards": "math"}
    now = keys | {"rollout.local.sequences": 1, "rollout.urls": None}
    old, new = ({"config": module._settings(from_mapping(METHODS["grpo"], k))} for k in (keys, now))
    assert differences(old, new) == ([], ["rollout.local.sequences: 64 then, 1 now"], [])


JUDGE = {"url": "http://127.0.0.1:8000/v1", "model": "large", "api_key_env": "OLD_KEY"}


def asking(name: str, **options: Any) -> dict[str, Any]:
    rewards = ["stop", {"name": name, "label": "quality", "options": options}]
    return settings("grpo", rewards=rewards)


@pytest.mark.parametrize(
    ("name", "options"), [("judge", JUDGE), ("reward_server", {"url": JUDGE["url"]})]
)
def test_a_server_of_a_reward_may_move_and_both_addresses_are_told(
    name: str, options: dict[str, Any]
) -> None:
    began = json.loads(json.dumps(asking(name, **options)))
    moved = asking(name, **{**options, "url": "http://other:5000", "api_key_env": "NEW_KEY"})
    assert require_same(began, moved, Path("x")) == ([], [], [])
    says = "reward quality: http://127.0.0.1:8000/v1 then, http://other:5000 now"
    assert moved_servers(began, moved) == [says]
    assert moved_servers(began, asking(name, **options)) == []


def test_what_else_a_reward_asks_of_its_server_may_not_change() -> None:
    with pytest.raises(ConfigError, match=r"belongs to another run: rewards: .*'large'.*'small'"):
        require_same(
            asking("judge", **JUDGE), asking("judge", **{**JUDGE, "model": "small"}), Path("x")
        )


def test_an_option_named_url_of_another_reward_may_not_change() -> None:
    began = asking("own.py:score", url="http://one")
    with pytest.raises(ConfigError, match="belongs to another run: rewards"):
        require_same(began, asking("own.py:score", url="http://two"), Path("x"))
