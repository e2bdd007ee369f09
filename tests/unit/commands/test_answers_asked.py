"""How held-out answers are asked of a run that generates: as in training, where its configuration says nothing else."""

from __future__ import annotations

from typing import Any

from taut.commands.train import _answers, _told_of_environment
from taut.config import from_mapping
from taut.run.training import GrpoRun


def run_of(**keys: Any) -> GrpoRun:
    fixed = {"model": "m", "data.train": "t", "data.eval": "e", "out": "o", "rewards": "math"}
    how = {"rollout.max_new_tokens": 99, "rollout.stop": ["\n\n"], "rollout.reference": "right"}
    return from_mapping(
        GrpoRun, {**fixed, **how, **{k.replace("__", "."): v for k, v in keys.items()}}
    )


def test_as_in_training_where_nothing_is_said() -> None:
    found = _answers(run_of())
    assert (found.rewards, found.reference) == ("math", "right")
    assert (found.sampling.max_new_tokens, found.sampling.stop) == (99, ["\n\n"])
    assert found.sampling.temperature == 0
    assert _answers(run_of(data__eval=[])).rewards == []


def test_what_is_said_is_kept() -> None:
    said = {"eval__answers__sampling__max_new_tokens": 7, "eval__answers__sampling__stop": ["x"]}
    found = _answers(run_of(**said)).sampling
    assert (found.max_new_tokens, found.stop) == (7, ["x"])
    asked = _answers(run_of(eval__answers__rewards="numeric"))
    assert (asked.rewards, asked.sampling.max_new_tokens) == ("numeric", 256)


def test_without_their_environment_answers_are_asked_where_that_is_said_only() -> None:
    world = {"rollout__environment__name": "tools", "rollout__environment__tools": ["calculator"]}
    silent, said = run_of(**world), run_of(**world, eval__answers__rewards="numeric")
    assert (_answers(silent).rewards, _answers(said).rewards) == ([], "numeric")
    told = [decision for run in (silent, said, run_of()) for decision in _told_of_environment(run)]
    assert [decision.value for decision in told] == ["not asked", "asked"]
