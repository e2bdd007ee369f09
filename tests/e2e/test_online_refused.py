"""What has no meaning for a run that generates is refused before anything is written, each with its sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.chat_runs import events, write_rows
from tests.online_runs import keys_of, make, questions, save_models, train
from tests.tiny_models import save_tiny
from tests.tiny_tokenizers import tiny_tokenizer

from taut.config import from_mapping
from taut.errors import ConfigError, DataError, ModelError, TautError
from taut.methods import METHODS

AT_SERVER = {"rollout.engine": "server", "rollout.urls": "http://127.0.0.1:1/v1"}
KEYS: list[tuple[str, dict[str, Any], str]] = [
    ("grpo", {"rewards": None}, r"rewards is not set, and taut grpo learns from"),
    ("grpo", {"eval.every": 2}, r"eval\.every=2 .* set eval\.answers\.every"),
    ("gkd", {"eval.answers.every": 2}, r"eval\.answers without eval\.answers\.rewards"),
    (
        "grpo",
        {"eval.answers.every": 2, "rollout.environment.name": "own.py:Own"},
        r"eval\.answers without eval\.answers\.rewards",
    ),
    ("grpo", {"rollout.n": 1}, r"rollout\.n=1 with grpo\.advantage=group"),
    (
        "ppo",
        {"rollout.n": 1, "rollout.dynamic_sampling_rounds": 1},
        r"rollout\.dynamic_sampling_rounds=1 with rollout\.n=1",
    ),
    ("online_dpo", {"rollout.n": 1}, r"rollout\.n"),
    ("grpo", {"rollout.temperature": 0}, r"rollout\.temperature"),
    ("grpo", {"rollout.top_p": 0.9}, r"rollout\.top_p"),
    ("grpo", {"rollout.urls": "http://127.0.0.1:1/v1"}, r"rollout\.engine=local and rollout\.urls"),
    ("grpo", {"rollout.engine": "server"}, r"rollout\.engine=server and rollout\.urls=None"),
    (
        "grpo",
        {"rollout.server.timeout": 5.0},
        r"rollout\.server is set with rollout\.engine=local",
    ),
    (
        "grpo",
        {
            "rollout.engine": "server",
            "rollout.urls": "http://127.0.0.1:1/v1",
            "rollout.local.sequences": 2,
        },
        r"rollout\.local is set with rollout\.engine=server",
    ),
    (
        "grpo",
        {
            "rollout.engine": "server",
            "rollout.urls": "http://127.0.0.1:1/v1",
            "rollout.dtype": "bfloat16",
        },
        r"rollout\.dtype=bfloat16 with rollout\.engine=server",
    ),
    (
        "online_dpo",
        {"dtype": "float32", "rollout.dtype": "bfloat16"},
        r"rollout\.dtype=bfloat16: taut online-dpo cannot correct",
    ),
    (
        "grpo",
        {"dtype": "bfloat16", "rollout.dtype": "bfloat16"},
        r"rollout\.dtype=bfloat16 with dtype=bfloat16; expected dtype=float32",
    ),
    (
        "grpo",
        {"dtype": None, "rollout.dtype": "bfloat16"},
        r"rollout\.dtype=bfloat16 with dtype=chosen by the hardware; expected dtype=float32",
    ),
    *(
        (
            method,
            {
                "dtype": "float32",
                "rollout.dtype": "bfloat16",
                f"{method}.rollout_correction": "none",
            },
            rf"rollout\.dtype=bfloat16 with {method}\.rollout_correction=none: rollouts would be",
        )
        for method in ("grpo", "ppo")
    ),
    ("gkd", {"grading.workers": 2}, r"grading is set, and taut gkd has no rewards"),
    (
        "grpo",
        {"rollout.lag": 1},
        r"rollout\.lag=1 with rollout\.engine=local",
    ),
    ("grpo", {"rollout.oversample": 2}, r"rollout\.oversample=2 with rollout\.engine=local"),
    (
        "grpo",
        {**AT_SERVER, "rollout.server.sync.sleep": True, "rollout.lag": 1},
        r"rollout\.lag=1 with rollout\.server\.sync\.sleep=true",
    ),
    (
        "grpo",
        {**AT_SERVER, "rollout.oversample": 2, "rollout.lag": 1},
        r"rollout\.oversample=2 with rollout\.lag=1",
    ),
    (
        "grpo",
        {"rollout.difficulty_filter": 0.5, "rollout.n": 1},
        r"rollout\.difficulty_filter=0\.5 with rollout\.n=1",
    ),
    (
        "gkd",
        {"rollout.difficulty_filter": 0.5},
        r"rollout\.difficulty_filter=0\.5: taut gkd has no rewards",
    ),
    (
        "grpo",
        {**AT_SERVER, "rollout.lag": 3, "rollout.minibatches": 2},
        r"rollout\.lag=3 .* 0, 2, 4, \.\.\. updates old; expected a multiple of 2; set rollout\.lag=4",
    ),
    *(
        (
            method,
            {**AT_SERVER, "rollout.lag": 2, f"{method}.rollout_correction": "none"},
            rf"rollout\.lag=2 with {method}\.rollout_correction=none",
        )
        for method in ("grpo", "ppo")
    ),
    (
        "grpo",
        {"rollout.max_staleness": 2},
        r"rollout\.max_staleness=2 without rollout\.replay_groups",
    ),
    (
        "grpo",
        {"rollout.epochs": 3, "rollout.max_staleness": 1, "rollout.replay_groups": 1},
        r"rollout\.max_staleness=1 .* its last is 2 behind",
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
        r"generated up to 2 before: its last is 3 behind",
    ),
    ("grpo", {"shaping.soft_overlong": 9}, r"shaping\.soft_overlong=9 is longer than .*, 8"),
    ("ppo", {"reference.file": "a"}, r"reference\.file=a cannot hold"),
    ("online_dpo", {"reference.file": "a"}, r"reference\.file=a cannot hold"),
    ("grpo", {"reference.model": "m"}, r"settings of reference with grpo\.kl_coef=0"),
    (
        "online_dpo",
        {"reference.model": "m", "dpo.reference_free": True},
        r"settings of reference with dpo\.reference_free=true",
    ),
    (
        "best_of_n",
        {"rollout_monitor.max_without_signal": 3},
        r"rollout_monitor\.max_without_signal=3 watches policy gradients",
    ),
    (
        "best_of_n",
        {"rollout_monitor.warn_entropy": 0.5},
        r"rollout_monitor\.warn_entropy=0\.5 watches policy",
    ),
    (
        "grpo",
        {"rollout_monitor.warn_values": 2.0},
        r"rollout_monitor\.warn_values=2 watches a critic, and taut grpo",
    ),
    (
        "online_dpo",
        {"rollout_monitor.max_logprob_difference": 0.1},
        r"rollout_monitor\.max_logprob_difference=0\.1 watches policy",
    ),
    (
        "grpo",
        {"grpo.advantage": "maxrl", "shaping.missing_eos_penalty": 0.5},
        r"maxrl divides .* shaping\.missing_eos_penalty may take that below 0",
    ),
    ("grpo", {"grpo.pass_k": 5, "grpo.advantage": "pass_at_k"}, r"grpo\.pass_k=5 and rollout\.n=4"),
    ("grpo", {"grpo.pass_k": 2}, r"found grpo\.pass_k=2, which nothing reads"),
    (
        "grpo",
        {"grpo.old_logprobs": "engine"},
        r"old_logprobs=engine takes .*max_logprob_difference=0\.5 lets them differ by more than 0\.1",
    ),
    (
        "ppo",
        {
            "ppo.old_logprobs": "engine",
            "rollout_monitor.max_logprob_difference": 0.05,
            "rollout.replay_groups": 2,
        },
        r"ppo\.old_logprobs=engine with rollout\.replay_groups=2: .* other weights",
    ),
    ("ppo", {"ppo.loss": "own.py:Own"}, r"ppo\.loss=own\.py:Own, and .* no term for the critic"),
    ("grpo", {"grpo.loss": "own.py"}, r"found grpo\.loss=.own\.py. .*'clip'.* or FILE\.py:name"),
    (
        "grpo",
        {"grpo.loss": "own.py:Own", "grpo.clip_low": 0.1},
        r"found grpo\.clip_low=0\.1, which nothing reads; expected a loss of taut's",
    ),
    (
        "grpo",
        {"grpo.advantage": "gdpo", "shaping.clip": 1.0},
        r"gdpo normalises each reward by itself, and shaping\.clip shapes their sum",
    ),
    (
        "grpo",
        {
            "grpo.advantage_level": "turn",
            "rollout.environment.name": "tools",
            "rollout.environment.tools": ["calculator"],
        },
        r"advantage_level=turn charges .*, and tools gives no rewards",
    ),
    ("grpo", {"grpo.kl_in": "reward"}, r"found grpo\.kl_in=reward, which nothing reads"),
    (
        "ppo",
        {"ppo.kl_target": 0.1, "ppo.kl_coef": 0.1},
        r"found ppo\.kl_target=0\.1, which nothing",
    ),
    ("grpo", {"grpo.dual_clip": 1.1}, r"grpo: found dual_clip=1\.1 with clip_high=0\.28"),
    ("grpo", {"grpo.loss": "reinforce", "grpo.clip_low": 0.1}, r"found grpo\.clip_low=0\.1"),
    (
        "ppo",
        {"ppo.bootstrap_truncated": True, "shaping.missing_eos_penalty": 0.5},
        r"ppo\.bootstrap_truncated=true replaces .* shaping\.missing_eos_penalty=0\.5 is meant for cut answers",
    ),
    (
        "ppo",
        {"ppo.bootstrap_truncated": True, "shaping.soft_overlong": 4},
        r"ppo\.bootstrap_truncated=true replaces .* shaping\.soft_overlong=4 is meant for cut answers",
    ),
    (
        "ppo",
        {"ppo.bootstrap_truncated": True, "rewards": ["exact_match", "stop"]},
        r"ppo\.bootstrap_truncated=true replaces .* the reward stop is meant for cut answers",
    ),
    (
        "ppo",
        {"ppo.bootstrap_truncated": True, "shaping.overlong": "drop"},
        r"ppo\.bootstrap_truncated=true with shaping\.overlong=drop, which leaves cut answers out",
    ),
    ("grpo", {"grpo.bootstrap_truncated": True}, r"bootstrap_truncated"),
    ("ppo", {"critic.model": "m", "critic.kind": "shared"}, r"critic\.model"),
    ("grpo", {"critic.kind": "own"}, r"critic"),
    ("best_of_n", {"best_of_n.keep": 4}, r"best_of_n\.keep=4 and rollout\.n=3"),
    ("gkd", {"rewards": "numeric"}, r"rewards is set, and taut gkd learns from its teacher"),
    (
        "gkd",
        {"rollout.dynamic_sampling_rounds": 1},
        r"rollout\.dynamic_sampling_rounds=1 chooses completions by their rewards",
    ),
    (
        "gkd",
        {"rollout.replay_groups": 1},
        r"rollout\.replay_groups=1 chooses completions by their rewards",
    ),
    ("gkd", {"distill.teacher": None}, r"distill\.teacher"),
    (
        "gkd",
        {"distill.teacher": None, "distill.top_logprobs": "a", "distill.divergence": "forward"},
        r"distill\.top_logprobs=a: a file knows nothing of completions",
    ),
    ("gkd", {"distill.tail": "bucket"}, r"distill\.tail=bucket has no effect without distill\.url"),
    (
        "gkd",
        {"distill.top": 5},
        r"distill\.top is set without distill\.url, teachers or privileged",
    ),
    ("gkd", {"distill.column": "a"}, r"distill\.column is set without distill\.teachers"),
    ("gkd", {"distill.weights": "now"}, r"distill\.weights is set without distill\.privileged"),
    (
        "gkd",
        {"distill.teacher": None, "distill.teachers": {"a": {}}},
        r"distill\.teachers\.a has no teacher and url",
    ),
    (
        "gkd",
        {
            "distill.teacher": None,
            "distill.privileged": "answer",
            "distill.privileged_template": "{prompt}",
        },
        r"distill\.privileged_template=.* expected a text with \{prompt\} and \{privileged\}",
    ),
    (
        "gkd",
        {
            "distill.teacher": None,
            "distill.privileged": "answer",
            "distill.weights": "now",
            "distill.update_every": 1,
        },
        r"distill\.update_every=1 with distill\.weights=now",
    ),
    (
        "gkd",
        {
            "distill.teacher": None,
            "distill.privileged": "answer",
            "rollout.environment.name": "tools",
            "rollout.environment.tools": ["python"],
        },
        r"distill\.privileged with rollout\.environment",
    ),
    ("grpo", {"distill.coef": 2.0}, r"distill\.coef=2 is set without a teacher"),
    (
        "grpo",
        {"distill.url": "http://a/v1", "rollout.temperature": 0.5},
        r"distill\.url with rollout\.temperature=0\.5: a server's logprobs",
    ),
    (
        "grpo",
        {"rewards": None, "distill.url": "http://a/v1", "rollout.replay_groups": 2},
        r"rollout\.replay_groups=2 chooses completions by their rewards",
    ),
    ("gkd", {"distill.url": "http://a/v1"}, r"distill\.teacher and distill\.url are both set"),
    (
        "gkd",
        {"distill.teacher": None, "distill.url": "http://a/v1", "distill.temperature": 2.0},
        r"distill\.temperature=2 with distill\.tail=bucket",
    ),
    ("gkd", {"distill.sft_weight": 1.0}, r"distill\.sft_weight=1 weighs the data's own answers"),
    (
        "best_of_n",
        {"rollout.dynamic_sampling_rounds": 1, "best_of_n.overlong": "keep"},
        r"rollout\.dynamic_sampling_rounds=1 .* best_of_n\.min_reward",
    ),
    (
        "grpo",
        {"grpo.rollout_correction_cap": 7.0},
        r"found grpo\.rollout_correction_cap=7, which nothing reads: with the engine in this process",
    ),
    ("online_dpo", {"lora.rank": 2, "lora.dropout": 0.1}, r"lora\.dropout=0\.1 in a run of taut"),
    ("grpo", {"rollout.environment.tools": ["calculator"]}, r"rollout\.environment\.tools"),
    ("grpo", {"rollout.environment.name": "tools"}, r"environment\.tools is empty"),
]


@pytest.mark.parametrize(("method", "given", "told"), KEYS)
def test_keys_that_contradict_each_other(
    method: str, given: dict[str, Any], told: str, tmp_path: Path
) -> None:
    keys = keys_of(method, tmp_path / "model", tmp_path) | given
    with pytest.raises(ConfigError, match=told):
        from_mapping(
            METHODS[method], {key: value for key, value in keys.items() if value is not None}
        )


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
        (None, {"eval__answers__every": 1}, "there is nothing to ask"),
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
