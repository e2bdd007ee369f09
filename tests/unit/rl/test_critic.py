"""What may be said of a critic, what is made of it and why, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.refusals import ErrorCode, refused
from tests.helpers.tiny_critics import load, save_models, setting_of
from tests.helpers.tiny_models import save_tiny

from taut.config import from_mapping
from taut.errors import ModelError
from taut.models.heads import OwnCritic, SharedCritic
from taut.rl.critic import build_critic
from taut.rl.settings import CRITIC_RATES, CriticConfig
from taut.train.settings import OptimConfig, Pace


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_models(tmp_path_factory.mktemp("critic"))


@pytest.fixture(scope="module")
def policy(place: Path) -> torch.nn.Module:
    return load(place / "policy")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"detach": True}, ErrorCode("detach/kind")),
        ({"kind": "shared", "model": "m"}, ErrorCode("model/kind")),
        ({"kind": "shared", "lora_rank": 2}, ErrorCode("lora_rank/kind")),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"head": "one"}, "head"),
    ],
)
def test_what_has_no_effect_is_refused(settings: dict[str, Any], message: str) -> None:
    with refused(message):
        from_mapping(CriticConfig, settings)


def test_its_pace_is_told_relative_to_the_others() -> None:
    rate = 1e-5
    given = OptimConfig(learning_rate=rate)
    assert CriticConfig().pace(given, rate) == Pace("critic", 1.0, 0)
    own = CriticConfig(learning_rate=2e-5, warmup_steps=7)
    assert own.pace(given, rate) == Pace("critic", 2.0, 7)


def test_its_rate_has_a_default_of_its_own_where_none_is_set() -> None:
    assert CriticConfig().rate(OptimConfig()) == CRITIC_RATES.full == 1e-5
    assert CriticConfig(lora_rank=4).rate(OptimConfig()) == CRITIC_RATES.lora == 1e-4
    assert CriticConfig().rate(OptimConfig(learning_rate=0.5)) == 0.5
    assert CriticConfig().pace(OptimConfig(), 1e-6).ratio == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("settings", "kind", "expected"),
    [
        (
            {},
            OwnCritic,
            [
                ("critic", "{place}/policy", "the policy's start"),
                ("critic.head", "zero", "a new head: V = 0 at the start"),
            ],
        ),
        (
            {"model": "{place}/critic", "head": "normal", "lora_rank": 2},
            OwnCritic,
            [
                ("critic", "{place}/critic, adapters of rank 2", "named by critic.model"),
                ("critic.head", "normal", "asked for by name"),
            ],
        ),
        (
            {"kind": "shared", "detach": True},
            SharedCritic,
            [
                (
                    "critic",
                    "a head on the policy's hidden states",
                    "critic.kind=shared, which does not train them; checkpoints have it, and it is not saved "
                    "with the model",
                ),
                ("critic.head", "zero", "a new head: V = 0 at the start"),
            ],
        ),
    ],
)
def test_what_is_chosen_is_told(
    settings: dict[str, Any], kind: type, expected: list[Any], place: Path, policy: torch.nn.Module
) -> None:
    if "model" in settings:
        settings = {**settings, "model": settings["model"].format(place=place)}
    critic, reasons = build_critic(CriticConfig(**settings), **setting_of(place, policy))
    assert type(critic) is kind
    assert reasons == [tuple(word.format(place=place) for word in reason) for reason in expected]


def test_a_critic_that_cannot_pack_is_refused_beside_a_policy_that_does(
    place: Path, policy: torch.nn.Module
) -> None:
    config = CriticConfig(
        model=str(save_tiny("phi3_longrope", place / "long", dtype=torch.float64))
    )
    with pytest.raises(
        ModelError, match=r"runs one sample at a time .longrope.* a critic that pac"
    ):
        build_critic(config, **setting_of(place, policy))
    critic, _ = build_critic(config, **setting_of(place, policy, one_sample="so does the policy"))
    assert type(critic) is OwnCritic


def test_an_architecture_without_such_a_class_is_refused(
    place: Path, policy: torch.nn.Module
) -> None:
    config = CriticConfig(model=str(save_tiny("granite", place / "granite")))
    with pytest.raises(
        ModelError, match=r"no AutoModelForSequenceClassification for granite.*=shared"
    ):
        build_critic(config, **setting_of(place, policy))


def test_a_directory_that_is_no_model_is_told_with_its_key(
    place: Path, policy: torch.nn.Module
) -> None:
    with pytest.raises(ModelError, match=r"critic.model: model=.*nowhere does not exist"):
        build_critic(CriticConfig(model=str(place / "nowhere")), **setting_of(place, policy))


def test_a_reward_model_with_two_numbers_is_refused(place: Path, policy: torch.nn.Module) -> None:
    odd = save_tiny("llama", place / "odd")
    config = json.loads((odd / "config.json").read_text())
    config |= {
        "architectures": ["LlamaForSequenceClassification"],
        "id2label": {"0": "a", "1": "b"},
    }
    (odd / "config.json").write_text(json.dumps(config))
    settings = setting_of(place, policy) | {"path": "policy"}
    with pytest.raises(ModelError, match=r"critic.model: .*2 labels"):
        build_critic(CriticConfig(model=str(odd)), **settings)
