"""What policy and critic say of a rollout, before it is trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.online_runs import keys_of, make, save_models
from tests.unit.rl.test_advantages import trajectory
from transformers import AutoModelForCausalLM

from taut.rl.rollout import POLICY, VALUE, sample_of, score_trees
from taut.run.setup import Built
from taut.types import FinishReason, Tree, Wants


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    save_models(place)
    return place


def built(place: Path, method: str, **keys: Any) -> Built:
    return make(keys_of(method, place / "policy", place / "data", **keys))[0]


def test_where_a_critic_is_read() -> None:
    """Before each choice; after the last one where the path was cut and its value is asked for."""
    ends: tuple[FinishReason, ...] = ("stop", "length")
    whole, cut = (sample_of(trajectory("a", 0, 2, f), has_reads=True) for f in ends)
    for sample in (whole, cut):
        assert sample.read_at_R is not None and sample.read_at_R.tolist() == [2, 3]
    for finish, reads in zip(ends, ([2, 3], [2, 3, 4]), strict=True):
        made = sample_of(trajectory("a", 0, 2, finish), has_reads=True, has_bootstrap=True)
        assert made.read_at_R is not None and made.read_at_R.tolist() == reads
    assert sample_of(trajectory("a", 0, 2)).read_at_R is None
    assert whole.target_at_N.tolist() == [3, 4] and whole.weight_N.tolist() == [1.0, 1.0]


def test_log_probs_are_at_the_temperature_of_the_roll_out_and_values_at_each_read(
    place: Path,
) -> None:
    trainer = built(place, "ppo", critic__kind="shared", critic__head="normal").trainer
    samples = [
        sample_of(trajectory("a", i, i + 2, finish), has_reads=True, has_bootstrap=True)
        for i, finish in enumerate(("stop", "length", "stop"))
    ]
    trees, asked = [Tree(tuple(samples))], Wants(scalar=True, temperature=0.5)
    trainer.scorer.train()
    found = score_trees(trainer, trees, asked, (), 1)
    assert trainer.scorer.training and all(p.grad is None for p in trainer.trained)
    model = AutoModelForCausalLM.from_pretrained(place / "policy", dtype=torch.float64)
    for sample in samples:
        ids_T = torch.from_numpy(sample.ids_T)
        with torch.no_grad():
            logp = (model(ids_T[None], use_cache=False).logits[0] / 0.5).log_softmax(-1)
        at = torch.from_numpy(sample.target_at_N)
        wanted = logp[at - 1, ids_T[at]].numpy()
        np.testing.assert_allclose(
            found[sample.id][POLICY], wanted, rtol=1e-6
        )  # the library's norms are float32
        assert sample.read_at_R is not None
        assert found[sample.id][VALUE].size == sample.read_at_R.size
    first, second = (found[sample.id][VALUE] for sample in samples[:2])
    assert first[0] == pytest.approx(second[0], abs=1e-12)  # the same state


def test_nothing_is_computed_where_nothing_is_asked(place: Path) -> None:
    trainer = built(place, "grpo").trainer
    trees = [Tree((sample_of(trajectory("a", 0, 2)),))]
    trainer.scorer.register_forward_pre_hook(lambda *_: pytest.fail("a forward"))
    nothing = Wants(logp=False)
    assert score_trees(trainer, trees, nothing, (), 1) == {"a#0 of rollout 1": {}}


def test_a_forward_alone_says_nothing_of_what_fits_a_step(place: Path) -> None:
    trainer = built(place, "grpo").trainer
    trees = [Tree((sample_of(trajectory("a", 0, 2)),))]
    found = score_trees(trainer, trees, Wants(), (), 1)
    assert found["a#0 of rollout 1"][POLICY].size == 2 and trainer.fit.largest == 0
