"""Prompts that stand for a rollout: what checks look at before anything is generated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers.online_runs import keys_of, make, save_models

from taut.rl.online import Online, dry_run
from taut.train.trainer import add_gradients
from taut.types import Sample


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("grpo", {"grpo__kl_coef": 0.1, "grpo__kl_in": "reward", "rollout__epochs": 2}),
        ("ppo", {"critic__kind": "shared"}),
        ("online_dpo", {}),
        ("best_of_n", {}),
        ("gkd", {}),
    ],
)
def test_every_method_can_learn_from_it(
    method: str, given: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    """The engine's logprobs are the trainer's own."""
    made, _ = make(keys_of(method, model, tmp_path, **given))
    online = made.trainer.source
    assert isinstance(online, Online)
    samples: list[Sample] = list(made.inputs.train[:2])
    trees = dry_run(online, made.trainer, samples)
    assert len(trees) == 2
    for tree, prompt in zip(trees, samples, strict=True):
        assert len(tree.samples) == (1 if method == "best_of_n" else 2)
        first = tree.samples[0]
        half = (prompt.num_tokens + 1) // 2
        np.testing.assert_array_equal(first.ids_T, prompt.ids_T)
        assert first.target_at_N.tolist() == list(range(half, prompt.num_tokens))
    report = add_gradients(made.trainer, trees, 1)
    assert np.isfinite(report.loss) and any(p.grad is not None for p in made.trainer.trained)
    if "engine/difference" in report.metrics:
        assert report.metrics["engine/difference"] < 1e-12
