"""A critic beside a policy: where it begins, what reaches it, what is saved of it and where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.tiny_critics import (
    BOTH,
    CPU,
    KINDS,
    ONE,
    SHARE_ALL,
    VALUES,
    add_gradient,
    gradients,
    judged,
    load,
    make,
    save_models,
    setting_of,
    values_of,
)
from tests.helpers.tiny_models import parameters_of
from tests.helpers.tiny_tokenizers import tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from taut.data.packing import ALONE, pack
from taut.models.heads import OwnCritic
from taut.models.load import quiet_library
from taut.models.lora.adapters import apply_lora
from taut.models.precision import compute_context
from taut.models.reward_model import load_reward_model
from taut.models.save import saving
from taut.models.scorer import Scorer
from taut.models.settings import LoraConfig, NewHead
from taut.rl.critic import build_critic, save_critic
from taut.rl.settings import CriticConfig
from taut.train import optim, sharded
from taut.train.settings import OptimConfig

HOW: dict[str, Any] = {"stop_ids": [2], "template": None, "dtype": torch.float64}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_models(tmp_path_factory.mktemp("critic"))


@pytest.fixture(scope="module")
def reward(place: Path) -> Path:
    """A reward model, as ``taut reward`` saves one."""
    options: dict[str, Any] = {"dtype": torch.float64, "device": CPU, "attention": "taut_reference"}
    model = load_reward_model(str(place / "policy"), NewHead(seed=3), **options)
    with saving(model, tiny_tokenizer(), place / "reward", **HOW):
        pass
    return place / "reward"


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_head_begins_at_zero(kind: str, place: Path) -> None:
    state = torch.random.get_rng_state()
    scorer = make(place, {**KINDS[kind], "head": None})
    assert not values_of(scorer, judged()).any()
    assert torch.equal(torch.random.get_rng_state(), state)
    add_gradient(scorer, [pack(judged(), SHARE_ALL)])
    found = gradients(scorer)
    assert found.keys() == dict(scorer.named_parameters()).keys()
    assert any(bool(found[name].any()) for name in found if "score" in name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_critic_leaves_the_policys_log_probs_alone(kind: str, place: Path) -> None:
    with_critic, without = make(place, KINDS[kind]), Scorer(load(place / "policy"))
    packed = pack(judged(), SHARE_ALL)
    with torch.no_grad():
        scores = with_critic(packed, wants=BOTH)
        assert torch.equal(scores.logp_N, without(packed).logp_N)
        assert torch.equal(scores.scalar_R, with_critic(packed, wants=VALUES).scalar_R)
        assert with_critic(packed).scalar_R is None


def test_without_a_critic_the_models_own_head_is_read(reward: Path) -> None:
    """And an own critic made of that reward model says the same, its head kept."""
    options: dict[str, Any] = {"dtype": torch.float64, "device": CPU, "attention": "taut_reference"}
    scorer = Scorer(load_reward_model(str(reward), None, **options))
    expected = values_of(scorer, judged())
    assert expected.std() > 0.1
    critic = make(reward.parent, {"kind": "own", "model": "reward"})
    torch.testing.assert_close(values_of(critic, judged()), expected, rtol=0, atol=1e-12)
    assert not values_of(make(reward.parent, {"model": "reward", "head": "zero"}), judged()).any()


@pytest.mark.parametrize("is_detached", [False, True])
def test_a_detached_head_teaches_the_policy_nothing(is_detached: bool, place: Path) -> None:
    scorer = make(place, {**KINDS["shared"], "detach": is_detached})
    packed = pack(judged(), ALONE)
    scalar_R = scorer(packed, wants=VALUES).scalar_R
    assert scalar_R is not None
    scalar_R.square().sum().backward()
    reached = {name for name in gradients(scorer) if not name.startswith("critic.")}
    assert bool(reached) is not is_detached
    assert gradients(scorer)["critic.score.weight"].any()


def test_activations_computed_again_give_the_same_gradients(place: Path) -> None:
    found = []
    for checkpointing in (False, True):
        scorer = make(place, KINDS["own"], checkpointing=checkpointing)
        add_gradient(scorer, [pack(judged(), SHARE_ALL)])
        found.append(gradients(scorer))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_adapters_of_a_critic_train_with_its_head_and_nothing_else(place: Path) -> None:
    scorer = make(place, {**KINDS["own"], "lora_rank": 2})
    trained = {name for name, p in scorer.critic.named_parameters() if p.requires_grad}
    assert {name.split(".")[-2] for name in trained if "lora_" not in name} == {"default"}
    assert sum("score" in name for name in trained) == 1
    torch.testing.assert_close(
        values_of(scorer, judged()), values_of(make(place, KINDS["own"]), judged())
    )
    add_gradient(scorer, [pack(judged(), SHARE_ALL)])
    assert {f"critic.{name}" for name in trained} == {
        name for name in gradients(scorer) if name.startswith("critic.")
    }


def test_a_shared_head_reads_the_adapted_policy(place: Path) -> None:
    policy = apply_lora(load(place / "policy"), LoraConfig(rank=2), 0)
    critic, _ = build_critic(CriticConfig(**KINDS["shared"]), **setting_of(place, policy))
    scorer = Scorer(policy, critic=critic)
    add_gradient(scorer, [pack(judged(), SHARE_ALL)])
    found = gradients(scorer)
    assert {name.split(".")[0] for name in found} == {"model", "critic"}
    assert all("lora_" in name for name in found if name.startswith("model."))


def test_a_critic_has_rows_for_added_tokens(place: Path) -> None:
    scorer = make(place, KINDS["own"])
    num_rows = scorer.critic.model.get_input_embeddings().weight.shape[0]
    scorer = make(place, KINDS["own"], new_ids=[num_rows])
    table = scorer.critic.model.get_input_embeddings().weight
    torch.testing.assert_close(table[num_rows], table[:num_rows].mean(0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_holds_the_critic_and_its_moments(
    kind: str, place: Path, tmp_path: Path
) -> None:
    saved = []
    for _ in range(2):
        scorer = make(place, KINDS[kind])
        saved.append((scorer, optim.build_optimizer(scorer, OptimConfig(learning_rate=1e-2))))
    (scorer, optimizer), (other, fresh) = saved
    add_gradient(scorer, [pack(judged(), SHARE_ALL)])
    optimizer.step()
    sharded.write(sharded.training_state(scorer, optimizer), tmp_path, ONE)
    assert not torch.equal(values_of(other, judged()), values_of(scorer, judged()))
    state = sharded.training_state(other, fresh)
    sharded.read(state, tmp_path, ONE)
    assert any(name.startswith("optimizer.critic.") and name.endswith("exp_avg") for name in state)
    torch.testing.assert_close(state, sharded.training_state(scorer, optimizer), rtol=0, atol=0)
    assert torch.equal(values_of(other, judged()), values_of(scorer, judged()))


@pytest.mark.parametrize("kind", KINDS)
def test_the_policy_is_saved_without_its_critic(kind: str, place: Path, tmp_path: Path) -> None:
    scorer = make(place, KINDS[kind])
    with saving(scorer.model, tiny_tokenizer(), tmp_path / "model", **HOW), quiet_library():
        pass
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True, dtype=torch.float64
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys"))
    torch.testing.assert_close(parameters_of(model), parameters_of(load(place / "policy")))


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_an_own_critic_is_saved_for_the_library_and_read_back(
    lora_rank: int, place: Path, tmp_path: Path
) -> None:
    scorer = make(place, {**KINDS["own"], "lora_rank": lora_rank})
    optimizer = optim.build_optimizer(scorer, OptimConfig(learning_rate=1e-2))
    add_gradient(scorer, [pack(judged(), SHARE_ALL)])
    optimizer.step()
    said = save_critic(scorer.critic, tmp_path / "critic", tiny_tokenizer(), ONE, **HOW)
    assert said == tmp_path / "critic"
    theirs = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "critic", dtype=torch.float64, attn_implementation="eager"
    )
    sample = judged()[0]
    with torch.no_grad(), compute_context(torch.float64, CPU):
        expected = [
            theirs.double()(torch.tensor(sample.ids_T[: at + 1])[None]).logits[0, 0]
            for at in sample.read_at_R
        ]
    found = values_of(scorer, [sample])
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-6)
    again, _ = build_critic(
        CriticConfig(model=str(tmp_path / "critic")), **setting_of(place, scorer.model)
    )
    found = values_of(Scorer(scorer.model, critic=again), judged())
    torch.testing.assert_close(found, values_of(scorer, judged()), rtol=0, atol=1e-12)


def test_a_shared_critic_is_in_checkpoints_only(place: Path, tmp_path: Path) -> None:
    scorer = make(place, KINDS["shared"])
    assert save_critic(scorer.critic, tmp_path / "critic", tiny_tokenizer(), ONE, **HOW) is None
    assert not (tmp_path / "critic").exists()


def test_values_are_in_float32_under_bfloat16(place: Path) -> None:
    scorer, packed = make(place, KINDS["own"]), pack(judged(), SHARE_ALL)
    assert isinstance(scorer.critic, OwnCritic)
    exact = values_of(scorer, judged())
    scorer.float()
    with torch.no_grad(), compute_context(torch.bfloat16, CPU):
        scalar_R = scorer(packed, wants=VALUES).scalar_R
    assert scalar_R.dtype == torch.float32
    assert float(scalar_R.std()) == pytest.approx(float(exact.std()), rel=0.1)
