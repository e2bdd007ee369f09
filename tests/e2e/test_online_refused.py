"""What has no meaning for a run that generates is refused before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.chat_runs import events, write_rows
from tests.helpers.online_runs import keys_of, make, questions, save_models, train
from tests.helpers.tiny_models import save_tiny
from tests.helpers.tiny_tokenizers import tiny_tokenizer

from taut.config import from_mapping
from taut.errors import ConfigError, DataError, ModelError, TautError
from taut.methods import METHODS

AT_SERVER = {"rollout.engine": "server", "rollout.urls": "http://127.0.0.1:1/v1"}
KEYS: list[tuple[str, dict[str, Any], str]] = [
    ("grpo", {"rewards": None}, "rewards/rollout.environment.name/rollout.replay_from"),
    ("grpo", {"eval.every": 2}, "eval.every"),
    ("gkd", {"eval.answers.every": 2}, "eval.answers.every/eval.answers.rewards/eval.metrics"),
    (
        "grpo",
        {"eval.answers.every": 2, "rollout.environment.name": "own.py:Own"},
        "eval.answers.every/eval.answers.rewards/eval.metrics",
    ),
    ("grpo", {"rollout.n": 1}, "rollout.n/grpo.advantage"),
    (
        "ppo",
        {"rollout.n": 1, "rollout.dynamic_sampling_rounds": 1},
        "rollout.dynamic_sampling_rounds/rollout.n",
    ),
    ("online_dpo", {"rollout.n": 1}, "invalid-value"),
    ("grpo", {"rollout.temperature": 0}, "invalid-value"),
    ("grpo", {"rollout.top_p": 0.9}, "unknown-key"),
    ("grpo", {"rollout.urls": "http://127.0.0.1:1/v1"}, "rollout.urls/rollout.engine"),
    ("grpo", {"rollout.engine": "server"}, "rollout.engine/rollout.urls"),
    (
        "grpo",
        {"rollout.server.timeout": 5.0},
        "rollout.server/rollout.engine",
    ),
    (
        "grpo",
        {
            "rollout.engine": "server",
            "rollout.urls": "http://127.0.0.1:1/v1",
            "rollout.local.sequences": 2,
        },
        "rollout.local/rollout.engine",
    ),
    (
        "grpo",
        {
            "rollout.engine": "server",
            "rollout.urls": "http://127.0.0.1:1/v1",
            "rollout.dtype": "bfloat16",
        },
        "rollout.dtype/rollout.engine",
    ),
    (
        "online_dpo",
        {"dtype": "float32", "rollout.dtype": "bfloat16"},
        "rollout.dtype/method",
    ),
    (
        "grpo",
        {"dtype": "bfloat16", "rollout.dtype": "bfloat16"},
        "rollout.dtype/dtype",
    ),
    (
        "grpo",
        {"dtype": None, "rollout.dtype": "bfloat16"},
        "rollout.dtype/dtype",
    ),
    *(
        (
            method,
            {
                "dtype": "float32",
                "rollout.dtype": "bfloat16",
                f"{method}.rollout_correction": "none",
            },
            f"rollout.dtype/{method}.rollout_correction",
        )
        for method in ("grpo", "ppo")
    ),
    ("gkd", {"grading.workers": 2}, "grading"),
    (
        "grpo",
        {"rollout.lag": 1},
        "rollout.lag/rollout.engine",
    ),
    ("grpo", {"rollout.oversample": 2}, "rollout.oversample/rollout.engine"),
    (
        "grpo",
        {**AT_SERVER, "rollout.server.sync.sleep": True, "rollout.lag": 1},
        "rollout.lag/rollout.server.sync.sleep",
    ),
    (
        "grpo",
        {**AT_SERVER, "rollout.oversample": 2, "rollout.lag": 1},
        "rollout.oversample/rollout.lag",
    ),
    (
        "grpo",
        {"rollout.difficulty_filter": 0.5, "rollout.n": 1},
        "rollout.difficulty_filter/rollout.n",
    ),
    (
        "gkd",
        {"rollout.difficulty_filter": 0.5},
        "rollout.difficulty_filter",
    ),
    (
        "grpo",
        {**AT_SERVER, "rollout.lag": 3, "rollout.minibatches": 2},
        "rollout.lag/rollout.minibatches/rollout.epochs",
    ),
    *(
        (
            method,
            {**AT_SERVER, "rollout.lag": 2, f"{method}.rollout_correction": "none"},
            f"rollout.lag/{method}.rollout_correction",
        )
        for method in ("grpo", "ppo")
    ),
    (
        "grpo",
        {"rollout.max_staleness": 2},
        "rollout.max_staleness/rollout.replay_groups",
    ),
    (
        "grpo",
        {"rollout.epochs": 3, "rollout.max_staleness": 1, "rollout.replay_groups": 1},
        "rollout.max_staleness/rollout.lag/rollout.minibatches/rollout.epochs",
    ),
    (
        "grpo",
        {
            **AT_SERVER,
            "rollout.lag": 2,
            "rollout.replay_groups": 1,
            "rollout.minibatches": 2,
            "rollout.max_staleness": 2,
        },
        "rollout.max_staleness/rollout.lag/rollout.minibatches/rollout.epochs",
    ),
    ("grpo", {"shaping.soft_overlong": 9}, "shaping.soft_overlong/rollout.max_new_tokens"),
    ("ppo", {"reference.file": "a"}, "reference.file"),
    ("online_dpo", {"reference.file": "a"}, "reference.file"),
    ("grpo", {"reference.model": "m"}, "reference/grpo.kl_coef/grpo.loss"),
    (
        "online_dpo",
        {"reference.model": "m", "dpo.reference_free": True},
        "reference/dpo.reference_free",
    ),
    (
        "best_of_n",
        {"rollout_monitor.max_without_signal": 3},
        "rollout_monitor.max_without_signal/method",
    ),
    (
        "best_of_n",
        {"rollout_monitor.warn_entropy": 0.5},
        "rollout_monitor.warn_entropy/method",
    ),
    (
        "grpo",
        {"rollout_monitor.warn_values": 2.0},
        "rollout_monitor.warn_values/method",
    ),
    (
        "online_dpo",
        {"rollout_monitor.max_logprob_difference": 0.1},
        "rollout_monitor.max_logprob_difference/method",
    ),
    (
        "grpo",
        {"grpo.advantage": "maxrl", "shaping.missing_eos_penalty": 0.5},
        "shaping.missing_eos_penalty/grpo.advantage",
    ),
    ("grpo", {"grpo.pass_k": 5, "grpo.advantage": "pass_at_k"}, "grpo.pass_k/rollout.n"),
    ("grpo", {"grpo.pass_k": 2}, "grpo.pass_k/grpo.advantage"),
    (
        "grpo",
        {"grpo.old_logprobs": "engine"},
        "grpo.old_logprobs/rollout_monitor.max_logprob_difference",
    ),
    (
        "ppo",
        {
            "ppo.old_logprobs": "engine",
            "rollout_monitor.max_logprob_difference": 0.05,
            "rollout.replay_groups": 2,
        },
        "ppo.old_logprobs/rollout.replay_groups",
    ),
    ("ppo", {"ppo.loss": "own.py:Own"}, "ppo.loss"),
    ("grpo", {"grpo.loss": "own.py"}, "invalid-value"),
    (
        "grpo",
        {"grpo.loss": "own.py:Own", "grpo.clip_low": 0.1},
        "grpo.clip_low/grpo.loss",
    ),
    (
        "grpo",
        {"grpo.advantage": "gdpo", "shaping.clip": 1.0},
        "shaping.clip/grpo.advantage",
    ),
    (
        "grpo",
        {
            "grpo.advantage_level": "turn",
            "rollout.environment.name": "tools",
            "rollout.environment.tools": ["calculator"],
        },
        "grpo.advantage_level/rollout.environment.name/rewards/rollout.replay_from",
    ),
    ("grpo", {"grpo.kl_in": "reward"}, "grpo.kl_in/grpo.kl_coef"),
    (
        "ppo",
        {"ppo.kl_target": 0.1, "ppo.kl_coef": 0.1},
        "ppo.kl_target/ppo.kl_in",
    ),
    ("grpo", {"grpo.dual_clip": 1.1}, "grpo.dual_clip/grpo.clip_high"),
    ("grpo", {"grpo.loss": "reinforce", "grpo.clip_low": 0.1}, "grpo.clip_low/grpo.loss"),
    (
        "ppo",
        {"ppo.bootstrap_truncated": True, "shaping.missing_eos_penalty": 0.5},
        "ppo.bootstrap_truncated/shaping.missing_eos_penalty",
    ),
    (
        "ppo",
        {"ppo.bootstrap_truncated": True, "shaping.soft_overlong": 4},
        "ppo.bootstrap_truncated/shaping.soft_overlong",
    ),
    (
        "ppo",
        {"ppo.bootstrap_truncated": True, "rewards": ["exact_match", "stop"]},
        "ppo.bootstrap_truncated/rewards",
    ),
    (
        "ppo",
        {"ppo.bootstrap_truncated": True, "shaping.overlong": "drop"},
        "ppo.bootstrap_truncated/shaping.overlong",
    ),
    ("grpo", {"grpo.bootstrap_truncated": True}, "unknown-key"),
    ("ppo", {"critic.model": "m", "critic.kind": "shared"}, "critic.model/critic.kind"),
    ("grpo", {"critic.kind": "own"}, "unknown-key"),
    ("best_of_n", {"best_of_n.keep": 4}, "best_of_n.keep/rollout.n"),
    ("gkd", {"rewards": "numeric"}, "rewards"),
    (
        "gkd",
        {"rollout.dynamic_sampling_rounds": 1},
        "rollout.dynamic_sampling_rounds",
    ),
    (
        "gkd",
        {"rollout.replay_groups": 1},
        "rollout.replay_groups",
    ),
    (
        "gkd",
        {"distill.teacher": None},
        "distill.teacher/distill.url/distill.teachers/distill.privileged",
    ),
    (
        "gkd",
        {"distill.teacher": None, "distill.top_logprobs": "a", "distill.divergence": "forward"},
        "distill.top_logprobs",
    ),
    (
        "gkd",
        {"distill.tail": "bucket"},
        "distill.tail/distill.top_logprobs",
    ),
    (
        "gkd",
        {"distill.top": 5},
        "distill.top/distill.url/distill.teachers/distill.privileged",
    ),
    (
        "gkd",
        {"distill.column": "a"},
        "distill.column/distill.teachers",
    ),
    (
        "gkd",
        {"distill.weights": "now"},
        "distill.weights/distill.privileged",
    ),
    (
        "gkd",
        {"distill.teacher": None, "distill.teachers": {"a": {}}},
        "distill.teachers.*.teacher/distill.teachers.*.url",
    ),
    (
        "gkd",
        {
            "distill.teacher": None,
            "distill.privileged": "answer",
            "distill.privileged_template": "{prompt}",
        },
        "distill.privileged_template",
    ),
    (
        "gkd",
        {
            "distill.teacher": None,
            "distill.privileged": "answer",
            "distill.weights": "now",
            "distill.update_every": 1,
        },
        "distill.update_every/distill.weights",
    ),
    (
        "gkd",
        {
            "distill.teacher": None,
            "distill.privileged": "answer",
            "rollout.environment.name": "tools",
            "rollout.environment.tools": ["python"],
        },
        "distill.privileged/rollout.environment.name",
    ),
    ("grpo", {"distill.coef": 2.0}, "distill.coef/distill.teacher"),
    (
        "grpo",
        {"distill.url": "http://a/v1", "rollout.temperature": 0.5},
        "distill.url/rollout.temperature",
    ),
    (
        "grpo",
        {"rewards": None, "distill.url": "http://a/v1", "rollout.replay_groups": 2},
        "rollout.replay_groups/rewards",
    ),
    ("gkd", {"distill.url": "http://a/v1"}, "distill.teacher/distill.url"),
    (
        "gkd",
        {"distill.teacher": None, "distill.url": "http://a/v1", "distill.temperature": 2.0},
        "distill.temperature/distill.tail",
    ),
    ("gkd", {"distill.sft_weight": 1.0}, "distill.sft_weight"),
    (
        "best_of_n",
        {"rollout.dynamic_sampling_rounds": 1, "best_of_n.overlong": "keep"},
        "rollout.dynamic_sampling_rounds/best_of_n.min_reward/best_of_n.overlong",
    ),
    (
        "grpo",
        {"grpo.rollout_correction_cap": 7.0},
        "grpo.rollout_correction_cap/grpo.rollout_correction",
    ),
    ("online_dpo", {"lora.rank": 2, "lora.dropout": 0.1}, "lora.dropout/method"),
    (
        "grpo",
        {"rollout.environment.tools": ["calculator"]},
        "rollout.environment.tools/rollout.environment.name/rollout.environment.by_row",
    ),
    (
        "grpo",
        {"rollout.environment.name": "tools"},
        "rollout.environment.name/rollout.environment.tools",
    ),
]


@pytest.mark.parametrize(("method", "given", "code"), KEYS)
def test_keys_that_contradict_each_other(
    method: str, given: dict[str, Any], code: str, tmp_path: Path
) -> None:
    keys = keys_of(method, tmp_path / "model", tmp_path) | given
    with pytest.raises(ConfigError) as refused:
        from_mapping(
            METHODS[method], {key: value for key, value in keys.items() if value is not None}
        )
    assert refused.value.code == code
    said = str(refused.value)
    named = code.split("/") if "." in code else [key.rpartition(".")[2] for key in given]
    assert any(key.replace("*", "a") in said for key in named)
    ways = ("set ", "leave ", "lower ", "raise ", "correct ", "expected ")
    assert code == "unknown-key" or any(way in said for way in ways)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))


LONG = {
    "messages": [{"role": "user", "content": "What is " + "cat " * 300}],
    "answer": "1",
    "id": "l",
}
FULL = {"prompt": "#" * 256, "answer": "1", "id": "l"}
"""Exactly as long as the model's context."""


@pytest.mark.parametrize(
    ("rows", "given", "told"),
    [
        ([LONG], {}, r"rows\.jsonl:1: the prompt has .* data\.too_long=drop"),
        ([FULL], {}, r"l: the prompt has 256 tokens and the model's context is 256"),
        (None, {"data__too_long": "truncate"}, "would cut prompts"),
        ([{"prompt": "1 and 2?"}], {"rewards": "exact_match"}, "the row has no right answer"),
        (None, {"rewards": "nothing.py:worth"}, r"nothing\.py"),
        (None, {"grpo__loss": "no.py:Own"}, r"grpo\.loss=no\.py:Own: there is no file no\.py"),
        (
            None,
            {"grpo__advantage": "no.py:f"},
            r"grpo\.advantage=no\.py:f: there is no file no\.py",
        ),
        (None, {"rewards": "exact"}, "exact_match"),
        (None, {"eval__answers__every": 1}, "is set without data to ask"),
        (None, {"rollout__reference": "solution"}, "no column 'solution'"),
        (
            None,
            {
                "rollout__engine": "server",
                "rollout__urls": "http://127.0.0.1:9/v1",
                "rollout__server__retries": 0,
            },
            "no answer",
        ),
    ],
)
def test_what_is_found_before_the_first_step(
    rows: list[dict[str, Any]] | None,
    given: dict[str, Any],
    told: str,
    model: Path,
    tmp_path: Path,
) -> None:
    keys = keys_of("grpo", model, tmp_path, **given)
    if rows is not None:
        keys["data.train"] = str(write_rows(tmp_path / "rows.jsonl", rows))
    with pytest.raises(TautError, match=told):
        train(keys)
    assert not Path(keys["out"]).exists()


def test_pairs_of_a_model_that_runs_one_sample_at_a_time(tmp_path: Path) -> None:
    stateful = save_tiny("bamba", tmp_path / "stateful", tiny_tokenizer())
    with pytest.raises(ModelError, match=r"one sample at a time.*taut online-dpo compares samples"):
        make(keys_of("online_dpo", stateful, tmp_path))


def test_rows_without_an_answer_are_told(model: Path, tmp_path: Path) -> None:
    rows = [*questions(3), {"id": "x", "messages": [{"role": "user", "content": "And?"}]}]
    keys = keys_of("grpo", model, tmp_path, rewards=["numeric", "stop"], steps=1)
    keys["data.train"] = str(write_rows(tmp_path / "rows.jsonl", rows))
    train(keys)
    (start,) = events(Path(keys["out"]), "start")
    told = next(it for it in start["decisions"] if it[0] == "numeric")
    assert told[1] == "nothing of 1 of 4 rows" and "rows.jsonl:4" in told[2]
    (rollout,) = events(Path(keys["out"]), "rollout")
    assert rollout["errors"] == 0 and 0 < rollout["reward/stop"] <= 1


def test_a_prompt_without_an_answer_where_one_is_needed_is_an_error_of_the_data(
    model: Path, tmp_path: Path
) -> None:
    keys = keys_of("grpo", model, tmp_path, rewards="numeric")
    keys["data.train"] = str(write_rows(tmp_path / "rows.jsonl", [{"prompt": "And?"}]))
    with pytest.raises(DataError, match=r"numeric holds answers to one; .* rollout\.reference"):
        train(keys)
