"""The example of reinforcement learning: what it begins with, and that its pages say what was measured."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from taut.rewards import RewardInput
from taut.rewards.reward_set import RewardSet, open_rewards
from taut.rewards.settings import GradingConfig

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "grpo"
ONE = GradingConfig(workers=1)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def make() -> ModuleType:
    module = load(EXAMPLE / "make.py")
    module.COUNTS, module.LOOKED_AT = {"eval": 4, "warm": 4, "train": 4}, 60
    return module


@pytest.fixture(scope="module")
def learning() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return load(ROOT / "benchmarks" / "learning.py")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return json.loads((EXAMPLE / "curves.json").read_text())


@pytest.fixture(scope="module")
def open_once() -> Iterator[Callable[[str], RewardSet]]:
    """Opens a reward, which may take a second, at its first use."""
    with ExitStack() as stack:
        yield cache(lambda reward: stack.enter_context(open_rewards(reward, ONE)))


def test_rows_are_the_same_for_the_same_seed_and_no_question_comes_twice(make: ModuleType) -> None:
    for task in make.TASKS:
        rows = make.make_rows(task, seed=3)
        assert rows == make.make_rows(task, seed=3)
        questions = [row["question"] for part in rows.values() for row in part]
        assert len(set(questions)) == len(questions) == 12


def test_right_answers_get_the_full_reward(
    make: ModuleType, learning: ModuleType, open_once: Callable[[str], RewardSet]
) -> None:
    assert list(learning.TASKS) == sorted(make.TASKS, key=list(learning.TASKS).index)
    for name, task in learning.TASKS.items():
        rows = make.make_rows(name, seed=3)["train"]
        given = [
            RewardInput(text=row["answer"], references=(row["answer"],), row=make.asked(row))
            for row in rows
        ]
        for reward in {task.reward, task.measured}:
            assert [result.total for result in open_once(reward).grade(given)] == [1.0] * 4


def test_an_equal_fraction_is_right_and_another_is_not(
    open_once: Callable[[str], RewardSet],
) -> None:
    texts = (r"\boxed{\frac{50}{100}}", r"\boxed{\frac{5}{100}}")
    given = [RewardInput(text=text, references=(r"\boxed{\frac{1}{2}}",)) for text in texts]
    assert [result.total for result in open_once("math").grade(given)] == [1.0, 0.0]


def test_the_model_is_small_and_its_prompts_are_short(make: ModuleType, tmp_path: Path) -> None:
    make.make_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert 1e6 < sum(parameter.numel() for parameter in model.parameters()) < 5e6
    assert model.config.vocab_size == len(tokenizer)
    for task in make.TASKS:
        for row in make.make_rows(task, seed=3)["warm"]:
            text = tokenizer.apply_chat_template(make.answered(row)["messages"], tokenize=False)
            ids = tokenizer(text, add_special_tokens=False).input_ids
            assert tokenizer.decode(ids) == text
            assert ids[-1] == tokenizer.eos_token_id == model.config.eos_token_id
            assert len(ids) < 40


def test_a_raise_is_shown_where_it_is_large_beside_its_error(learning: ModuleType) -> None:
    def ends(*accuracies: float) -> dict[str, dict[str, float]]:
        point = {"stopped": 1.0, "samples": 1.0}
        return {str(i): {**point, "accuracy": value} for i, value in enumerate(accuracies)}

    start = {"accuracy": 0.3, "stopped": 1.0}
    clear = learning.row("a", "grpo", start, ends(0.5, 0.51, 0.52))
    assert clear["is_shown"]
    assert clear["raise"] == pytest.approx(0.21)
    assert clear["standard_error"] == pytest.approx(0.01 / 3**0.5)
    assert not learning.row("a", "grpo", start, ends(0.43, 0.44, 0.45))["is_shown"]
    assert not learning.row("a", "grpo", start, ends(0.3, 0.3, 0.9))["is_shown"]
    assert not learning.row("a", "grpo", start, ends(0.9))["is_shown"]
    assert not learning.row("a", "grpo", {**start, "accuracy": 0.05}, ends(0.5, 0.5))["is_shown"]
    assert not learning.row("decimals", "grpo", start, ends(0.5, 0.51, 0.52))["is_shown"]


def test_a_step_of_the_peer_costs_what_its_runs_took(learning: ModuleType) -> None:
    def run(**end: float) -> dict[str, Any]:
        return {"curve": [{"step": 1}, end]}

    runs = {"0": run(step=80, cpu_seconds=40.0), "1": run(step=20, cpu_seconds=60.0)}
    assert learning.pace_of(runs) == 1.0
    with pytest.raises(AssertionError, match="train trl first"):
        learning.pace_of({})


def test_what_is_expected_is_what_was_measured(recorded: dict[str, Any]) -> None:
    expected = json.loads((EXAMPLE / "expected.json").read_text())
    table = {(row["task"], row["method"]): row for row in recorded["table"]}
    for task, methods in expected["after_at_least"].items():
        for method, accuracy in methods.items():
            assert table[task, method]["least"] >= accuracy


def test_the_page_shows_the_table_as_measured(
    recorded: dict[str, Any], learning: ModuleType
) -> None:
    page = (EXAMPLE / "README.md").read_text()
    for row in recorded["table"]:
        assert row["is_shown"] or row["method"].startswith("trl")
        assert learning.line(row) in page
