"""How held-out answers are asked of a run that generates: as in training, where its configuration says nothing else."""

from __future__ import annotations

from typing import Any

from taut.config import from_mapping
from taut.methods.grpo import Grpo


def run_of(**keys: Any) -> Grpo:
    fixed = {"model": "m", "data.train": "t", "data.eval": "e", "out": "o", "rewards": "math"}
    how = {"rollout.max_new_tokens": 99, "rollout.stop": ["\n\n"], "rollout.reference": "right"}
    return from_mapping(
        Grpo, {**fixed, **how, **{k.replace("__", "."): v for k, v in keys.items()}}
    )


def test_as_in_training_where_nothing_is_said() -> None:
    found = run_of().held_out_answers
    assert (found.rewards, found.reference) == ("math", "right")
    assert (found.sampling.max_new_tokens, found.sampling.stop) == (99, ["\n\n"])
    assert found.sampling.temperature == 0
    assert run_of(data__eval=[]).held_out_answers.rewards == []


def test_what_is_said_is_kept() -> None:
    said = {"eval__answers__sampling__max_new_tokens": 7, "eval__answers__sampling__stop": ["x"]}
    found = run_of(**said).held_out_answers.sampling
    assert (found.max_new_tokens, found.stop) == (7, ["x"])
    asked = run_of(eval__answers__rewards="numeric").held_out_answers
    assert (asked.rewards, asked.sampling.max_new_tokens) == ("numeric", 256)


def test_without_their_environment_answers_are_asked_where_that_is_said_only() -> None:
    world = {"rollout__environment__name": "tools", "rollout__environment__tools": ["calculator"]}
    silent, said = run_of(**world), run_of(**world, eval__answers__rewards="numeric")
    assert (silent.held_out_answers.rewards, said.held_out_answers.rewards) == ([], "numeric")
    told = [decision for run in (silent, said, run_of()) for decision in run.decisions]
    told = [decision for decision in told if decision.name == "held-out answers"]
    assert [decision.value for decision in told] == ["not asked", "asked"]
