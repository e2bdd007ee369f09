"""Small runs that learn from what they generate: a tiny model that ends an answer where it comes upon a letter, and
rewards that need no other process. ``keys_of`` names a run, ``train`` trains it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tests.helpers.chat_runs import QUIET, save_model, write_rows

import taut
from taut.config import from_mapping
from taut.methods import METHODS
from taut.run.inputs import load_inputs
from taut.run.setup import Built, build
from taut.train import distributed

LENGTH = {"name": "length_target", "options": {"target": 5}}
METHODS_KEYS: dict[str, dict[str, Any]] = {
    "grpo": {"rollout.n": 4},
    "ppo": {"rollout.minibatches": 2, "rollout.n": 2},
    "online_dpo": {"rollout.n": 3},
    "best_of_n": {"rollout.n": 3, "best_of_n.keep": 1},
    "gkd": {"rollout.n": 2},
}
"""name -> what makes it small."""
TWICE = """
from taut.rl.environment import Step

class Twice:
    def step(self, text, calls):
        self.said = getattr(self, "said", 0) + 1
        if self.said == 2:
            return Step(done=True, reward={"short": -len(text) / 10, "there": 1})
        return Step(messages=[{"role": "user", "content": "And then?"}])
"""
"""A file with an environment that hears two answers."""


OWN_CODE = """
from dataclasses import dataclass
from taut.losses.loss import Loss
from taut.types import LossSum, Wants

def centered(outcomes):
    mean_S = [outcomes.reward_S[outcomes.group_S == group].mean() for group in outcomes.group_S]
    return [(r - m).expand(n) for r, m, n in zip(outcomes.reward_S, mean_S, outcomes.length_S)]

def plain(outcomes):
    return outcomes.reward_S

@dataclass(frozen=True)
class Own(Loss):
    units = {"policy": "token"}
    needs = ("advantage_N",)
    is_cost = False
    temperature: float = 1.0

    @property
    def wants(self):
        return Wants(temperature=self.temperature)

    def __call__(self, scores, packed):
        cost_N = -packed.weight_N * packed.streams["advantage_N"] * scores.logp_N
        return LossSum({"policy": cost_N.sum()})

class Cold(Own):
    wants = Wants()
"""
"""A file with an advantage and losses of one's own: of GRPO's mean and REINFORCE."""


def save_models(place: Path) -> Path:
    """The model that learns, in float64, with another beside it (a teacher, a critic): the path of the first."""
    save_model(place / "beside", dtype=torch.float64, seed=1)
    return save_model(place / "policy", dtype=torch.float64)


def questions(num_rows: int) -> list[dict[str, Any]]:
    """Sums with their answers; lengths differ. Their names are theirs, so that draws do not depend on a path."""
    return [
        {
            "id": f"q{i}",
            "messages": [{"role": "user", "content": f"What is {i} and {10 ** (i % 3)}?"}],
            "answer": str(i + 10 ** (i % 3)),
        }
        for i in range(num_rows)
    ]


def keys_of(method: str, model: Path, place: Path, **keys: Any) -> dict[str, Any]:
    """Keys of a quiet run in float64 with four prompts a step; ``__`` stands for a dot, None takes a key out."""
    place.mkdir(exist_ok=True)
    fixed = {
        **QUIET,
        "method": method,
        "model": str(model),
        "data.train": str(write_rows(place / "prompts.jsonl", questions(13))),
        "data.max_length": None,
        "out": str(place / method),
        "check": "off",
        "steps": 3,
        "batch.samples_per_step": 4,
        "contract.prompts": 0,
        "rollout.max_new_tokens": 8,
        "rollout.stop": ["e", "a"],
    }
    named = {"distill.teacher": str(model.with_name("beside"))} if method == "gkd" else {}
    if method != "gkd":
        named["rewards"] = [LENGTH]
    dotted = {key.replace("__", "."): value for key, value in keys.items()}
    given = {**fixed, **METHODS_KEYS[method], **named, **dotted}
    return {key: value for key, value in given.items() if value is not None}


def train(keys: Mapping[str, Any]) -> taut.Result:
    """A run of the method that the keys name."""
    result: taut.Result = getattr(taut, keys["method"])(**keys)
    return result


def make(keys: Mapping[str, Any]) -> tuple[Built, list[dict[str, Any]]]:
    """The same run, built and not begun, and the events its trainer will emit."""
    run = from_mapping(METHODS[keys["method"]], keys)
    ranks = distributed.start("cpu")
    inputs = load_inputs(run, ranks)
    told: list[dict[str, Any]] = []

    def emit(kind: str, **fields: Any) -> None:
        told.append({"kind": kind, **fields})

    return build(run, inputs, run.plan(inputs.train), ranks, emit), told
