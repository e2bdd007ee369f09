"""What the runs of the methods refuse, beside what their own sections do."""

from __future__ import annotations

import fnmatch
import re
from typing import Any

import pytest
from tests.helpers.refusals import ErrorCode, refused

import taut
from taut.config import describe, foreign_keys, from_mapping
from taut.errors import ConfigError
from taut.methods import METHODS, command_of, commands_for
from taut.methods.method import RunConfig

PLAIN = {"model": "m", "data.train": "t.jsonl"}


@pytest.mark.parametrize(
    ("method", "keys", "message"),
    [
        ("dpo", {"lora.rank": 2, "lora.dropout": 0.1}, ErrorCode("lora.dropout/method")),
        ("reward", {"noise.neftune_alpha": 5.0}, ErrorCode("noise.neftune_alpha/method")),
        ("dpo", {"method": "sft"}, ErrorCode("method")),
        (
            "dpo",
            {"dpo.reference_free": True, "reference.file": "f"},
            ErrorCode("reference/dpo.reference_free"),
        ),
        ("kto", {"batch.samples_per_step": 1}, ErrorCode("batch.samples_per_step/kto.loss")),
        (
            "kto",
            {"batch.samples_per_step": 1, "kto.loss": "bco"},
            ErrorCode("batch.samples_per_step/kto.loss"),
        ),
        ("kto", {"reference.file": "f"}, ErrorCode("reference.file/kto.loss")),
    ],
)
def test_refused(method: Any, keys: dict[str, Any], message: str) -> None:
    with refused(message):
        from_mapping(METHODS[method], {"method": method, **PLAIN, **keys})


@pytest.mark.parametrize(
    ("kind", "commands"),
    [
        ("sft", "taut sft, taut distill"),
        (
            "preference",
            "taut reward with reward.loss=bradley_terry, taut dpo, taut orpo, taut simpo, taut cpo",
        ),
        ("unpaired", "taut kto"),
        ("scored", "taut reward with reward.loss=regression"),
        ("stepwise", "taut reward with reward.loss=process"),
        ("prompt", "taut grpo, taut ppo, taut online-dpo, taut best-of-n, taut gkd"),
    ],
)
def test_commands_for_a_kind_of_rows(kind: str, commands: str) -> None:
    assert commands_for(kind) == commands


RATES = {
    "sft": (2e-5, 2e-4),
    "reward": (1e-5, 1e-4),
    "dpo": (1e-6, 1e-5),
    "kto": (1e-6, 1e-5),
    "orpo": (5e-6, 5e-5),
    "simpo": (1e-6, 1e-5),
    "cpo": (1e-6, 1e-5),
    "distill": (2e-5, 2e-4),
    "grpo": (1e-6, 1e-5),
    "ppo": (1e-6, 1e-5),
    "online_dpo": (5e-7, 5e-6),
    "best_of_n": (2e-5, 2e-4),
    "gkd": (1e-5, 1e-4),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_learning_rate_that_is_not_set_is_that_of_the_method(method: Any) -> None:
    needed: dict[str, Any] = {"method": method, **PLAIN}
    if method in ("distill", "gkd"):
        needed["distill.teacher"] = "t"
    elif method in ("grpo", "ppo", "online_dpo", "best_of_n"):
        needed["rewards"] = "exact_match"

    def made(**keys: Any) -> RunConfig:
        dotted = {key.replace("__", "."): value for key, value in keys.items()}
        return from_mapping(METHODS[method], {**needed, **dotted})

    full, lora = RATES[method]
    for keys, rate, what in (
        ({}, full, "where all weights train"),
        ({"lora__rank": 4}, lora, "where adapters train"),
        ({"lora__adapter": "a"}, lora, "where adapters train"),
    ):
        run = made(**keys)
        assert run.optim.learning_rate is None, "the configuration is as it was written"
        assert run.resolved_optim.learning_rate == rate
        decision = run.decisions[0]
        assert (decision.name, float(decision.value)) == ("optim.learning_rate", rate)
        assert f"the default of {command_of(method)} {what} (" in decision.reason
    for keys in ({}, {"lora__rank": 4}):
        run = made(optim__learning_rate=0.5, **keys)
        assert run.resolved_optim.learning_rate == 0.5
        assert not run.decisions


def test_a_critic_has_a_default_of_its_own() -> None:
    given = {"method": "ppo", "rewards": "exact_match", **PLAIN}
    for keys, rate in (({}, 1e-5), ({"critic.lora_rank": 4}, 1e-4)):
        _, decision = from_mapping(METHODS["ppo"], {**given, **keys}).decisions
        assert (decision.name, float(decision.value)) == ("critic.learning_rate", rate)
    for key in ("optim.learning_rate", "critic.learning_rate"):
        names = [it.name for it in from_mapping(METHODS["ppo"], {**given, key: 0.1}).decisions]
        assert names == ["optim.learning_rate"] * (key != "optim.learning_rate")


def test_without_a_reference_point_one_sample_is_a_step() -> None:
    keys = {"method": "kto", "kto.loss": "apo_zero", "batch.samples_per_step": 1}
    assert not from_mapping(METHODS["kto"], PLAIN | keys).loss().mismatched


@pytest.mark.parametrize(("called", "given"), [("sft", "dpo"), ("dpo", "sft"), ("orpo", "simpo")])
def test_a_run_is_trained_by_its_own_method_only(called: str, given: Any) -> None:
    run = from_mapping(METHODS[given], {"method": given, **PLAIN})
    with pytest.raises(ConfigError, match=rf"^found a run of taut {given} given to taut\.{called}"):
        getattr(taut, called)(run)


@pytest.mark.parametrize(
    ("method", "key", "hint"),
    [
        ("dpo", "loss_type", "did you mean 'dpo.loss'?"),
        ("dpo", "dpo.rpo_alpha", "did you mean 'dpo.sft_weight'?"),
        ("dpo", "ref_model", "did you mean 'reference.model'?"),
        ("dpo", "per_device_train_batch_size", "did you mean 'batch.samples_per_step'?"),
        ("dpo", "beta", "did you mean 'dpo.beta'?"),
        ("grpo", "beta", "did you mean 'grpo.kl_coef'?"),
        ("ppo", "beta", "did you mean 'ppo.kl_coef'?"),
        ("sft", "lr", "did you mean 'optim.learning_rate'?"),
        ("sft", "optim.lr", "did you mean 'optim.learning_rate'?"),
        ("ppo", "learning_rate", "did you mean 'optim.learning_rate'?"),
        ("ppo", "critic.lr", "did you mean 'critic.learning_rate'?"),
        ("ppo", "lora_rank", "did you mean 'lora.rank'?"),
        ("grpo", "num_generations", "did you mean 'rollout.n'?"),
        ("grpo", "epsilon", "did you mean 'grpo.clip_low' or 'grpo.clip_high'?"),
        ("sft", "num_generations", "other commands have 'rollout.n' for it, this one does not"),
        ("sft", "dataset", "did you mean 'data.train'?"),
        ("sft", "packing", "batches are always packed"),
        ("sft", "load_in_4bit", "quantize=nf4 or int8 quantizes the base under adapters"),
        ("sft", "ds.load_in_4bit", "quantize=nf4 or int8 quantizes the base under adapters"),
        ("sft", "deepspeed", "start the command with torchrun"),
        ("grpo", "top_p", "rollouts are drawn from the whole distribution"),
        ("sft", "push_to_hub", "taut push RUN OWNER/NAME uploads a finished run"),
        ("sft", "early_stopping_patience", "did you mean 'eval.stop_after'?"),
        ("sft", "compute_metrics", "did you mean 'eval.metrics'?"),
        ("sft", "callbacks", "did you mean 'hooks'?"),
        ("sft", "evals_per_epoch", "did you mean 'eval.every'?"),
        ("sft", "saves_per_epoch", "did you mean 'checkpoint.every'?"),
    ],
)
def test_a_name_of_another_framework_leads_to_what_there_is_here(
    method: Any, key: str, hint: str
) -> None:
    with pytest.raises(
        ConfigError, match=re.escape(f"unknown key '{key}' in the arguments; {hint}")
    ):
        from_mapping(METHODS[method], {"method": method, **PLAIN, key: 1})


@pytest.mark.parametrize(
    ("key", "value", "ours"),
    [
        ("optim.name", "paged_adamw_8bit", "optim.state=int8"),
        ("optim.name", "adamw_torch", "optim.name=adamw"),
        ("optim.schedule", "constant_with_warmup", "optim.schedule=constant"),
        ("quantize", True, "quantize=nf4"),
        ("eval.every", "epoch", "eval.every=1epoch"),
        ("checkpoint.every", "epoch", "checkpoint.every=1epoch"),
        ("quantize", "8bit", "quantize=int8"),
    ],
)
def test_a_value_of_another_framework_leads_to_the_setting_here(
    key: str, value: Any, ours: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"did you mean {ours}?")):
        from_mapping(METHODS["sft"], {**PLAIN, key: value})
    keys = {**PLAIN, "data.eval": "b.jsonl", "lora.rank": 4, **dict([ours.split("=")])}
    assert from_mapping(METHODS["sft"], keys)


def test_every_key_that_a_name_from_elsewhere_leads_to_exists() -> None:
    keys = {row.key for cls in METHODS.values() for row in describe(cls)}
    elsewhere, instead = foreign_keys()
    for pattern in {pattern for patterns in elsewhere.values() for pattern in patterns}:
        assert fnmatch.filter(keys, pattern), pattern
    assert keys.isdisjoint([*elsewhere, *instead])
    assert not elsewhere.keys() & instead.keys()
    for sentence in instead.values():
        named = set(re.findall(r"[a-z_]+(?:\.[a-z_0-9]+)+", sentence)) - {"torch.compile"}
        tables = {key.rpartition(".")[0] for key in keys}
        assert named <= keys | tables, sentence
