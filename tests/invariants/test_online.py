"""What is trained on is what was sampled, its gradient is the policy gradient's, and the layout changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.chat_runs import column, events, largest_difference, weights
from tests.helpers.online_runs import LENGTH, keys_of, make, save_models, train
from tests.helpers.slow_cases import slow_except
from torch import Tensor
from transformers import AutoModelForCausalLM

from taut.data.batching import samples_of
from taut.errors import CheckFailed
from taut.inference.local import LocalEngine
from taut.inference.settings import Sampling
from taut.losses.policy import PolicyGradient
from taut.rl.online import Online
from taut.train.trainer import StepReport, add_gradients
from taut.types import Completion, Prompt, Sample, Tree

LIMIT = 1e-9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))


def first_step(keys: dict[str, Any]) -> tuple[list[Sample], dict[str, Tensor], dict[str, float]]:
    """The samples of the first step, its gradient, and what it says."""
    built, _ = make(keys)
    source = built.trainer.source
    assert isinstance(source, Online)
    try:
        trees = source.prepare(1)
        report = add_gradients(built.trainer, trees, 1)
    finally:
        source.close()
    named = built.scorer.model.named_parameters()
    return samples_of(trees), {n: p.grad for n, p in named if p.grad is not None}, report.metrics


def test_one_update_a_roll_out_is_reinforce_on_what_was_sampled(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each completion's tokens, its reward less the mean of its group, and plain autograd through the library."""
    drawn: list[tuple[Prompt, Completion]] = []
    generate = LocalEngine.generate

    def recorded(self: Any, prompts: Any, sampling: Sampling, on_done: Any = None) -> Any:
        found = generate(self, prompts, sampling, on_done)
        asked = {prompt.id: prompt for prompt in prompts}
        drawn.extend((asked[one.prompt_id], one) for one in found)
        return found

    monkeypatch.setattr(LocalEngine, "generate", recorded)
    samples, found, _ = first_step(keys_of("grpo", model, tmp_path, grpo__advantage="mean"))
    assert len(drawn) == len(samples) == 16
    for sample, (prompt, one) in zip(samples, drawn, strict=True):
        np.testing.assert_array_equal(sample.ids_T, np.concatenate([prompt.ids_T, one.ids_N]))
        np.testing.assert_array_equal(sample.ids_T[sample.target_at_N], one.ids_N)
        np.testing.assert_array_equal(sample.streams["engine_logp_N"], one.logp_N)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    target, width = LENGTH["options"]["target"], LENGTH["options"]["target"]
    reward = np.array([max(0.0, 1 - abs(one.ids_N.size - target) / width) for _, one in drawn])
    advantage = reward - np.repeat(reward.reshape(4, 4).mean(1), 4)
    total = sum(one.ids_N.size for _, one in drawn)
    for (prompt, one), worth in zip(drawn, advantage, strict=True):
        ids_T = torch.from_numpy(np.concatenate([prompt.ids_T, one.ids_N]))
        logp = plain(input_ids=ids_T[None], use_cache=False).logits[0].log_softmax(-1)
        at = torch.arange(prompt.ids_T.size, ids_T.numel())
        (-worth / total * logp[at - 1, ids_T[at]].sum()).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    steepest = max(float(gradient.abs().max()) for gradient in wanted.values())
    assert largest_difference(found, wanted) < 1e-5 * steepest  # the library's norms are float32


@pytest.mark.parametrize("loss", ["clip", "gspo", "cispo", "sapo", "gmpo"])
def test_the_first_of_several_updates_has_ratio_one_and_the_same_gradient(
    loss: str, model: Path, tmp_path: Path
) -> None:
    """Whether old logprobs are the policy's own, or were taken beforehand."""
    given = {"grpo__loss": loss, "grpo__loss_aggregation": "token", "rollout__n": 2}
    same, fresh, _ = first_step(keys_of("grpo", model, tmp_path, **given))
    twice, stale, told = first_step(keys_of("grpo", model, tmp_path, rollout__epochs=2, **given))
    assert [sample.ids_T.tolist() for sample in twice] == [s.ids_T.tolist() for s in same]
    assert all("old_logp_N" in s.streams for s in twice)
    assert told["ratio"] == pytest.approx(1.0, abs=1e-12)
    assert largest_difference(stale, fresh) < 1e-12


BYPASS = {
    "grpo__old_logprobs": "engine",
    "rollout_monitor__max_logprob_difference": 0.1,
    "rollout__n": 2,
}


def test_with_the_engines_logprobs_as_the_old_ones_nothing_is_scored_and_the_update_is_the_same(
    model: Path, tmp_path: Path
) -> None:
    """In float64, where the two agree."""
    _, fresh, _ = first_step(keys_of("grpo", model, tmp_path, rollout__n=2))
    for epochs in (1, 2):
        keys = keys_of("grpo", model, tmp_path, rollout__epochs=epochs, **BYPASS)
        samples, found, told = first_step(keys)
        assert all("old_logp_N" not in sample.streams for sample in samples)
        assert told["ratio"] == pytest.approx(1.0, abs=1e-9)
        assert largest_difference(found, fresh) < 1e-9
        assert told["engine/difference"] < 1e-12


def test_an_engine_that_is_off_is_not_taken_for_the_old_policy(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By 0.2 nats a token: the run stops before the first update."""
    generate = LocalEngine.generate

    def off(self: LocalEngine, *given: Any) -> list[Completion]:
        made = generate(self, *given)
        return [replace(c, logp_N=None if c.logp_N is None else c.logp_N - 0.2) for c in made]

    monkeypatch.setattr(LocalEngine, "generate", off)
    with pytest.raises(CheckFailed, match=r"step 1: .* differ .* 0\.2 .*nothing was updated"):
        train(keys_of("grpo", model, tmp_path, rollout__epochs=2, **BYPASS))


def silenced(trees: list[Tree], numbers: set[int]) -> list[Tree]:
    """The trees, some of them without an advantage."""

    def without(sample: Sample) -> Sample:
        zeros = np.zeros_like(sample.streams["advantage_N"])
        return replace(sample, streams={**sample.streams, "advantage_N": zeros})

    return [
        replace(tree, samples=tuple(map(without, tree.samples))) if number in numbers else tree
        for number, tree in enumerate(trees)
    ]


@pytest.mark.parametrize("average", ["token", "sequence", "constant"])
@pytest.mark.parametrize(
    "given",
    [
        {"grpo__loss": "clip", "rollout__epochs": 2},
        {"grpo__loss": "gspo", "rollout__epochs": 2},
        {"grpo__loss": "gmpo", "rollout__epochs": 2},
        {"grpo__loss": "reinforce"},
    ],
    ids=lambda given: given["grpo__loss"],
)
def test_groups_without_a_signal_are_counted_and_not_computed(
    given: dict[str, Any],
    average: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gradient is that of a step in which all is computed; where no group has a signal it is 0."""
    built, _ = make(keys_of("grpo", model, tmp_path, **given, grpo__loss_aggregation=average))
    source, trainer = built.trainer.source, built.trainer
    assert isinstance(source, Online)
    try:
        trees = source.prepare(1)
    finally:
        source.close()

    def gradient(numbers: set[int]) -> tuple[dict[str, Tensor], StepReport]:
        trainer.optimizer.zero_grad()
        report = add_gradients(trainer, silenced(trees, numbers), 1)
        named = built.scorer.model.named_parameters()
        return {n: p.grad.clone() for n, p in named if p.grad is not None}, report

    for numbers in ({1, 2}, set(range(len(trees)))):
        few, told = gradient(numbers)
        with monkeypatch.context() as patch:
            patch.setattr(PolicyGradient, "is_silent", lambda *_: False)
            all_of_them, wanted = gradient(numbers)
        assert few.keys() == all_of_them.keys()
        assert largest_difference(few, all_of_them) < LIMIT
        assert told.loss == pytest.approx(wanted.loss, abs=LIMIT)
        assert told.num_tokens < wanted.num_tokens
        assert told.sample_ids == wanted.sample_ids
        assert told.metrics["silent"] == min(len(numbers), len(trees) - 1) / len(trees)
        assert "silent" not in wanted.metrics
    assert not any(value.any() for value in few.values())


@pytest.mark.parametrize(
    ("given", "is_left_out"),
    [
        ({}, True),
        ({"grpo__kl_coef": 0.1}, False),
        ({"grpo__entropy_coef": 0.01}, False),
        ({"grpo__log_entropy": True}, False),
    ],
    ids=str,
)
def test_a_group_is_left_out_only_where_no_other_term_or_metric_needs_it(
    given: dict[str, Any], *, is_left_out: bool, model: Path, tmp_path: Path
) -> None:
    built, _ = make(keys_of("grpo", model, tmp_path, **given))
    source = built.trainer.source
    assert isinstance(source, Online)
    try:
        (first, *_) = silenced(source.prepare(1), {0})
    finally:
        source.close()
    assert all(source.loss.is_silent(sample) is is_left_out for sample in first.samples)


def test_float32_engine_and_trainer_agree_to_rounding(model: Path, tmp_path: Path) -> None:
    _, _, told = first_step(keys_of("grpo", model, tmp_path, dtype="float32"))
    assert 1e-8 < told["engine/difference"] < 1e-5
    assert told["engine/effective"] == pytest.approx(1.0, abs=1e-6)


LAYOUTS: dict[str, dict[str, Any]] = {
    "repeated prefixes": {"batch__share_prefixes": False},
    "many micro-batches": {"batch__tokens_per_microbatch": 60, "activation_checkpointing": True},
}
RUNS: dict[str, dict[str, Any]] = {
    "grpo": {
        "rollout__minibatches": 2,
        "grpo__kl_coef": 0.1,
        "grpo__loss": "gspo",
        "shaping__missing_eos_penalty": 0.5,
        "rollout__temperature": 0.7,
    },
    "ppo": {
        "ppo__kl_coef": 0.05,
        "ppo__kl_in": "reward",
        "ppo__bootstrap_truncated": True,
        "critic__kind": "shared",
    },
    "online_dpo": {},
    "gkd": {},
}


@pytest.mark.parametrize("method", slow_except(["grpo", "ppo"], RUNS))
def test_no_layout_changes_a_run(method: str, model: Path, tmp_path: Path) -> None:
    def run(name: str, **given: Any) -> Path:
        out = str(tmp_path / name)
        train(keys_of(method, model, tmp_path, out=out, steps=2, **RUNS[method], **given))
        return tmp_path / name

    one = run("one")
    for name, given in LAYOUTS.items():
        other = run(name, **given)
        for field in ("loss", "grad_norm", "sample_ids", "num_targets"):
            exact = field in ("sample_ids", "num_targets")
            wanted: Any = column(one, field)
            assert column(other, field) == (wanted if exact else pytest.approx(wanted, rel=LIMIT))
        ids = [[s["ids"] for s in e["samples"]] for e in events(one, "rollout")]
        assert [[s["ids"] for s in e["samples"]] for e in events(other, "rollout")] == ids
        assert largest_difference(weights(other / "model"), weights(one / "model")) < LIMIT
