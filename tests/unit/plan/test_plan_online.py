"""What runs that generate are predicted: their training, with completions as long as they may be."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.chat_runs import QUIET, save_model, write_rows
from tests.helpers.online_runs import questions
from tests.tools.score.test_score import save_reward

from taut.config import from_mapping
from taut.inference.reward_model import open_judge
from taut.inference.settings import JudgeUse
from taut.methods import METHODS
from taut.methods.inputs import Inputs
from taut.methods.method import RunConfig
from taut.models.precision import DTYPES
from taut.models.settings import NewHead
from taut.plan.memory import held_tensors, needs, peak_bytes, predict_steps
from taut.plan.models import FUSED, Kernels
from taut.plan.rollouts import rollout_of, scoring_of, seconds_of
from taut.plan.workload import workload
from taut.run.inputs import load_inputs
from taut.run.setup import build
from taut.train import distributed
from taut.train.trainer import run_steps
from taut.types import Wants

NAMES = ("policy", "beside")
CACHE = "rollout.local.prefix_cache_gib"
VARIED = "def varied(text: str) -> float:\n    return len(set(text)) / 50 + len(text) / 999\n"
RANKS = distributed.start("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def opened(model: Path, place: Path, method: str, **keys: Any) -> tuple[RunConfig, Inputs]:
    fixed = {
        "model": str(model),
        "data.train": str(write_rows(place / "prompts.jsonl", questions(8))),
        "data.max_length": 256,
        "method": method,
        "rewards": "exact_match",
        "steps": 3,
        "batch.samples_per_step": 2,
        "rollout.n": 4,
        "rollout.max_new_tokens": 32,
    }
    run = from_mapping(METHODS[method], {**QUIET, **fixed, **keys})
    return run, load_inputs(run, RANKS)


def test_each_prompt_has_its_completions_and_each_completion_all_its_tokens(
    model: Path, tmp_path: Path
) -> None:
    run, inputs = opened(model, tmp_path, "grpo", **{"rollout.minibatches": 2})
    work = workload(run, inputs, 1)
    assert [len(tree.samples) for tree in work.supply.trees] == [4] * 6
    for tree in work.supply.trees:
        assert [sample.num_targets for sample in tree.samples] == [32] * 4
        begins = {sample.ids_T[: int(sample.target_at_N[0])].tobytes() for sample in tree.samples}
        assert len(begins) == 1
        assert all(sample.streams["advantage_N"].any() for sample in tree.samples)
    assert work.first.num_targets == 2 * 4 * 32  # the prompts are there once
    assert work.first.num_tokens < 2 * 4 * 32 + 2 * 25
    found = predict_steps(run, inputs.config, Kernels(DTYPES["float64"], "sdpa"), work)
    assert found.peak > found.traced.policy.weights.all


@pytest.mark.parametrize("keys", [{}, {"lora.rank": 2}], ids=str)
def test_generating_takes_keys_and_values(
    keys: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    """Two prompts of four completions of 32 tokens each; two numbers for each head of keys, layer and token."""
    run, inputs = opened(model, tmp_path, "grpo", **{"dtype": "bfloat16", **keys})
    work, kernels = workload(run, inputs, 1), Kernels(DTYPES["bfloat16"], FUSED)
    found = rollout_of(run, inputs.config, kernels, work.supply, 1)
    assert found is not None
    config = inputs.config.get_text_config()
    size = config.hidden_size // config.num_attention_heads
    assert found.kept == 2 * 2 * config.num_key_value_heads * size * config.num_hidden_layers
    assert (found.completions, found.at_a_time, found.prompts, found.new_tokens) == (8, 8, 2, 32)
    needed = needs(run, inputs.config, kernels, work)
    assert needed.generating > needed.ending + found.kept * 8 * 32
    traced = predict_steps(run, inputs.config, kernels, work).traced
    slow, fast = (seconds_of(name, traced, found, 1) for name in ("L4", "H100"))
    assert slow >= fast >= 32 * 2 * traced.policy.num_parameters / 3350e9
    many = seconds_of("H100", traced, found._replace(completions=80), 1)
    assert many > 9 * fast
    assert seconds_of("H100", traced, found._replace(updates=4), 1) == pytest.approx(fast / 4)


WORLD = "class World:\n    def step(self, text, calls):\n        raise NotImplementedError\n"


def test_paths_that_fork_take_less_time_and_turns_keep_keys_and_values(
    model: Path, tmp_path: Path
) -> None:
    """By hand: of 4 completions that fork at the end of turn 1 of 2 there are 2 in turn 1. Two prompts of four
    completions of 32 tokens are 8 (32 + 1/4 of the prompt) distinct tokens.
    """
    (tmp_path / "world.py").write_text(WORLD)
    own = {"name": f"{tmp_path / 'world.py'}:World", "max_turns": 2, "max_tokens": 32}
    keys: dict[str, Any] = {"dtype": "bfloat16", "rewards": [], "rollout.environment": own}
    fork = {"rollout.fork.turns": [1], "grpo.advantage": "tree"}
    found = {}
    for name, more in (("plain", {}), ("forked", fork), ("small", {CACHE: 1e-6})):
        run, inputs = opened(model, tmp_path, "grpo", **keys, **more)
        work, kernels = workload(run, inputs, 1), Kernels(DTYPES["bfloat16"], FUSED)
        rollout = rollout_of(run, inputs.config, kernels, work.supply, 1)
        assert rollout is not None
        found[name] = rollout
    assert found["plain"].paths == (1, 1)
    assert found["forked"].paths == (0.5, 1)
    traced = predict_steps(run, inputs.config, kernels, work).traced
    plain, forked = (
        seconds_of("H100", traced, found[name]._replace(completions=10**6), 1)
        for name in ("plain", "forked")
    )
    assert forked == pytest.approx(0.75 * plain, rel=0.05)
    whole, small = found["plain"], found["small"]
    tokens = 8 * (32 + whole.prompt_tokens // 4)
    assert small.cache == int(1e-6 * 2**30) < whole.kept * tokens
    assert whole.bytes - small.bytes == 2 * (whole.kept * tokens - small.cache)
    halved = rollout_of(run, inputs.config, kernels, work.supply, 2)
    assert halved is not None
    assert (halved.completions, halved.prompts) == (4, 1)


def test_a_server_generates_elsewhere(model: Path, tmp_path: Path) -> None:
    keys = {"rollout.engine": "server", "rollout.urls": "http://127.0.0.1:1/v1"}
    run, inputs = opened(model, tmp_path, "grpo", **keys)
    work = workload(run, inputs, 1)
    assert rollout_of(run, inputs.config, Kernels(DTYPES["float32"], FUSED), work.supply, 1) is None


def test_the_context_cuts_what_is_assumed(model: Path, tmp_path: Path) -> None:
    run, inputs = opened(model, tmp_path, "grpo", **{"rollout.max_new_tokens": 1000})
    work = workload(run, inputs, 1)
    samples = [sample for tree in work.supply.trees for sample in tree.samples]
    assert {sample.num_tokens for sample in samples} == {256}


@pytest.mark.parametrize(("method", "number"), [("online_dpo", 2), ("best_of_n", 1)])
def test_what_is_learned_of_a_group_is_what_is_planned(
    method: str, number: int, model: Path, tmp_path: Path
) -> None:
    run, inputs = opened(model, tmp_path, method)
    trees = workload(run, inputs, 1).supply.trees
    assert {len(tree.samples) for tree in trees} == {number}


def test_what_is_replayed_is_planned(model: Path, tmp_path: Path) -> None:
    run, inputs = opened(model, tmp_path, "grpo", **{"rollout.replay_groups": 7})
    work = workload(run, inputs, 1)
    assert len(work.supply.trees) == 3 * (2 + 7)
    young = {"rollout.replay_groups": 7, "rollout.max_staleness": 2, "steps": 1}
    run, inputs = opened(model, tmp_path, "grpo", **young)
    assert len(workload(run, inputs, 1).supply.trees) == 2 + 2 * 2


def test_answers_that_are_good_enough_are_planned(model: Path, tmp_path: Path) -> None:
    keys = {"best_of_n.keep": 3, "best_of_n.min_reward": 2.0}
    run, inputs = opened(model, tmp_path, "best_of_n", **keys)
    assert {len(tree.samples) for tree in workload(run, inputs, 1).supply.trees} == {3}


def test_the_lists_of_a_teacher_behind_a_server_are_laid_out(model: Path, tmp_path: Path) -> None:
    keys = {"rewards": [], "distill.url": "http://127.0.0.1:1/v1", "distill.top": 7}
    run, inputs = opened(model, tmp_path, "gkd", **keys)
    for tree in workload(run, inputs, 1).supply.trees:
        for sample in tree.samples:
            assert sample.streams["top_ids"].shape == sample.streams["top_logp"].shape == (32, 7)


def test_scoring_takes_what_a_forward_of_a_reward_model_takes(tmp_path: Path) -> None:
    """Measured on as many tokens as it is given at a time: a half of the rollout's."""
    path = save_reward(tmp_path, NewHead(seed=3))
    options = {"model": str(path), "dtype": "float64", "tokens_per_batch": 200}
    rewards = [{"name": "reward_model", "options": options}]
    run, inputs = opened(tmp_path / "base", tmp_path, "grpo", rewards=rewards)
    work = workload(run, inputs, 1)
    dtype = DTYPES["float64"]
    judge = open_judge(from_mapping(JudgeUse, options))
    attention = judge.scorer.model.config._attn_implementation
    predicted = scoring_of(run, Kernels(dtype, attention), work.supply, 1)
    packed = work.supply.filled(200)

    def act() -> None:
        with torch.no_grad(), judge.compute():
            judge.scorer(packed, wants=Wants(logp=False, scalar=True))

    act()
    measured = peak_bytes(act, [], RANKS.device)
    assert 0.95 * measured <= predicted <= 1.2 * measured
    needed = needs(run, inputs.config, Kernels(dtype, attention), work)
    assert needed.scoring == needed.ending - needed.saving + predicted


WHOLE: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {"grpo.kl_coef": 0.1}),
    ("grpo", {"distill.teacher": "beside"}),
    ("grpo", {"distill.privileged": "answer", "lora.rank": 4}),
    ("ppo", {"critic.kind": "own", "rollout.minibatches": 2}),
    ("online_dpo", {}),
    ("best_of_n", {}),
    ("gkd", {"distill.teacher": "beside"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "keys"), WHOLE)
def test_a_whole_run_takes_what_is_predicted(
    method: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    """Two rollouts with their generation, scoring and training; completions may end early. In a process of its own:
    what other tests have left in this one is none of the run's.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        predicted, measured = process.submit(
            _predicted_and_measured, method, keys, tmp_path
        ).result()
    assert 0.97 * measured <= predicted <= 1.2 * measured


def _predicted_and_measured(method: str, keys: dict[str, Any], tmp_path: Path) -> tuple[int, int]:
    """The bytes of a whole run."""
    shape = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
    paths = {n: save_model(tmp_path / n, "llama", seed=n == "beside", **shape) for n in NAMES}
    named = {
        key: str(paths["beside"]) if value == "beside" else value for key, value in keys.items()
    }
    (tmp_path / "reward.py").write_text(VARIED)
    fixed = {"rewards": [] if method == "gkd" else [f"{tmp_path / 'reward.py'}:varied"], "steps": 2}
    more = {"dtype": "float32", "check": "off", "rollout.max_new_tokens": 64, **fixed, **named}
    run, inputs = opened(paths["policy"], tmp_path, method, **more)
    work = workload(run, inputs, 1)
    built = build(run, inputs, run.plan(inputs.train), RANKS, lambda kind, **fields: None)
    loaded, trainer = built.models.loaded, built.trainer
    kernels = Kernels(loaded.dtype.dtype, loaded.attention.implementation)
    needed = needs(run, inputs.config, kernels, work)
    trainer.source.open()
    measured = peak_bytes(lambda: run_steps(trainer), held_tensors(built), RANKS.device)
    trainer.source.close()
    return max(needed.step, needed.generating, needed.scoring), measured
