"""What a user says of policy optimization becomes the loss that was meant, or an error that says what to do."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args

import pytest
import torch
from tests.helpers.refusals import ErrorCode, refused

from taut.config import configclass, load
from taut.errors import ConfigError
from taut.losses.advantages import ESTIMATORS, pass_at_k
from taut.losses.policy import SURROGATES, Bounds, Correction, Critic, Kl, PolicyGradient
from taut.methods.grpo import Advantage, GrpoConfig
from taut.methods.policy import DUAL, HELD, PolicyLoss
from taut.methods.ppo import PpoConfig

LOCAL: dict[str, Any] = {"temperature": 0.8, "limit": 64, "is_fresh": True}
SERVER = {**LOCAL, "engine_differs": True}


@configclass
class Sections:
    grpo: GrpoConfig = GrpoConfig()
    ppo: PpoConfig = PpoConfig()


def sections(*overrides: str) -> Sections:
    return load(Sections, None, overrides)


def test_every_name_can_be_said() -> None:
    assert set(get_args(PolicyLoss)) == set(SURROGATES)
    assert set(HELD) == {name for name in SURROGATES if SURROGATES[name].is_held}
    assert set(DUAL) == {name for name in SURROGATES if SURROGATES[name].is_dual}
    assert set(get_args(Advantage)) == set(ESTIMATORS)


def test_defaults() -> None:
    """DAPO's loss with GRPO's advantages; PPO has a critic besides."""
    usual = PolicyGradient(
        "clip", Bounds(0.2, 0.28), "token", has_engine_logp=True, temperature=0.8
    )
    assert sections().grpo.make_loss(**LOCAL) == usual
    assert sections().grpo.estimator is ESTIMATORS["group"]
    found = sections().ppo.make_loss(**LOCAL)
    assert found.critic == Critic(0.1, 0.2)
    assert found.wants.scalar
    server = sections().grpo.make_loss(**SERVER)
    assert server.correction == Correction("truncated", "token", 2.0, 0.0)


def test_what_a_roll_out_is_reaches_the_loss() -> None:
    found = sections("grpo.loss_aggregation=constant").grpo.make_loss(
        temperature=0.5, limit=77, is_fresh=False, has_engine_logp=False
    )
    assert (found.temperature, found.constant_length) == (0.5, 77)
    assert (found.is_fresh, found.has_engine_logp) == (False, False)
    assert found.needs == ("advantage_N", "old_logp_N")


GRPO: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (("loss=gspo",), {"surrogate": "gspo", "bounds": Bounds(3e-4, 4e-4), "average": "sequence"}),
    (
        ("loss=gspo_token", "loss_aggregation=token"),
        {"surrogate": "gspo_token", "bounds": Bounds(3e-4, 4e-4)},
    ),
    (("loss=cispo",), {"surrogate": "cispo", "bounds": Bounds(1.0, 4.0)}),
    (
        ("loss=sapo", "sapo_tau_positive=2.0", "sapo_tau_negative=3.0"),
        {"surrogate": "sapo", "bounds": Bounds(0.2, 0.28, None, 2.0, 3.0), "average": "sequence"},
    ),
    (
        ("loss=gmpo",),
        {
            "surrogate": "gmpo",
            "bounds": Bounds(0.4, 0.4),
            "average": "sequence",
            "correction": Correction("truncated", "geometric", 1.1, 0.9),
        },
    ),
    (("loss=reinforce",), {"surrogate": "reinforce"}),
    (
        ("clip_low=0.1", "clip_high=0.3", "dual_clip=3.0"),
        {"bounds": Bounds(0.1, 0.3, 3.0)},
    ),
    (
        ("loss_aggregation=constant", "constant_length=9"),
        {"average": "constant", "constant_length": 9},
    ),
    (("kl_coef=0.1",), {"kl": Kl(0.1, "k2", "k3")}),
    (
        ("kl_coef=0.1", "kl_gradient=k3", "kl_estimator=k1"),
        {"kl": Kl(0.1, "k3", "k1")},
    ),
    (("kl_coef=0.1", "kl_in=reward", "kl_target=0.01"), {}),
    (("entropy_coef=0.01",), {"entropy_coef": 0.01}),
    (("entropy_target=0.2", "entropy_coef=0.01"), {"adapts_entropy": True, "entropy_coef": 0.0}),
    (("log_entropy=true",), {"entropy": True}),
    (("rollout_correction=none",), {"correction": Correction()}),
    (
        ("rollout_correction=masked", "rollout_correction_cap=5.0", "rollout_correction_floor=0.5"),
        {"correction": Correction("masked", "geometric", 5.0, 0.5)},
    ),
    (("rollout_correction=masked",), {"correction": Correction("masked", "geometric", 1.1, 0.9)}),
    (
        ("rollout_correction=masked", "rollout_correction_level=sequence"),
        {"correction": Correction("masked", "sequence", 2.0, 0.0)},
    ),
    (
        ("rollout_correction_veto=1e-4",),
        {"correction": Correction("truncated", "token", 2.0, 0.0, 1e-4)},
    ),
    (
        ("old_logprobs=engine",),
        {"is_bypassed": True, "is_fresh": False, "correction": Correction()},
    ),
    (
        ("rollout_correction=masked", "rollout_correction_level=token"),
        {"correction": Correction("masked", "token")},
    ),
]


@pytest.mark.parametrize(("overrides", "said"), GRPO)
@pytest.mark.parametrize("section", ["grpo", "ppo"])
def test_what_is_said_is_in_the_loss(
    section: str, overrides: tuple[str, ...], said: dict[str, Any]
) -> None:
    config = getattr(sections(*(f"{section}.{one}" for one in overrides)), section)
    found = config.make_loss(**SERVER)
    usual = getattr(sections(), section).make_loss(**SERVER)
    changed = {f.name for f in fields(found) if getattr(found, f.name) != getattr(usual, f.name)}
    assert {name: getattr(found, name) for name in said} == said
    assert changed <= said.keys()


def test_what_the_critic_is_told() -> None:
    config = sections("ppo.value_coef=0.5", "ppo.value_clip=none").ppo
    assert config.make_loss(**LOCAL).critic == Critic(0.5, None)


def test_a_divergence_in_the_reward_is_not_in_the_loss() -> None:
    found = sections("grpo.kl_coef=0.1", "grpo.kl_in=reward").grpo
    assert found.penalty_coef == 0.1
    assert "ref_logp_N" not in found.make_loss(**LOCAL).needs
    assert sections("grpo.kl_coef=0.1").grpo.penalty_coef == 0.0


def test_the_best_of_how_many() -> None:
    reward_S, one_S = torch.tensor([0.0, 1.0, 0.0, 1.0]).double(), torch.zeros(4).long()
    for said, k in (((), 4), (("grpo.pass_k=2",), 2)):
        estimator = sections("grpo.advantage=pass_at_k", *said).grpo.estimator
        found = estimator.compare(reward_S, one_S)
        assert found.tolist() == pass_at_k(reward_S, one_S, k=k).tolist()


REFUSED: list[tuple[tuple[str, ...], str]] = [
    (
        ("loss=sapo", "clip_low=0.1"),
        ErrorCode("grpo.clip_low/grpo.loss"),
    ),
    (("loss=reinforce", "clip_high=0.1"), ErrorCode("grpo.clip_high/grpo.loss")),
    (
        ("loss=cispo", "dual_clip=9.0"),
        ErrorCode("grpo.dual_clip/grpo.loss"),
    ),
    (
        ("dual_clip=1.1",),
        ErrorCode("grpo.dual_clip/grpo.clip_high"),
    ),
    (("dual_clip=1.28",), "clipped at 1.28 already"),
    (("clip_low=1.5",), ErrorCode("grpo.clip_low/grpo.loss")),
    (
        ("sapo_tau_negative=2.0",),
        ErrorCode("grpo.sapo_tau_negative/grpo.loss"),
    ),
    (
        ("constant_length=9",),
        ErrorCode("grpo.constant_length/grpo.loss_aggregation"),
    ),
    (("kl_gradient=k3",), ErrorCode("grpo.kl_gradient/grpo.kl_coef")),
    (("kl_coef=1.0", "kl_gradient=k1"), r"kl_gradient"),
    (
        ("kl_coef=1.0", "kl_in=reward", "kl_gradient=k2"),
        ErrorCode("grpo.kl_gradient/grpo.kl_in"),
    ),
    (
        ("kl_coef=1.0", "kl_in=reward", "kl_estimator=k2"),
        ErrorCode("grpo.kl_estimator/grpo.kl_in"),
    ),
    (("kl_in=reward",), ErrorCode("grpo.kl_in/grpo.kl_coef")),
    (
        ("kl_coef=1.0", "kl_target=1.0"),
        ErrorCode("grpo.kl_target/grpo.kl_in"),
    ),
    (
        ("rollout_correction=none", "rollout_correction_cap=3.0"),
        ErrorCode("grpo.rollout_correction_cap/grpo.rollout_correction"),
    ),
    (
        ("rollout_correction=none", "rollout_correction_veto=1e-4"),
        ErrorCode("grpo.rollout_correction_veto/grpo.rollout_correction"),
    ),
    (
        ("old_logprobs=engine", "rollout_correction=truncated"),
        ErrorCode("grpo.old_logprobs/grpo.rollout_correction"),
    ),
    (
        ("loss=gmpo", "rollout_correction_level=token"),
        ErrorCode("grpo.rollout_correction_level/grpo.loss"),
    ),
    (("pass_k=3",), ErrorCode("grpo.pass_k/grpo.advantage")),
    (("entropy_step=0.1",), ErrorCode("grpo.entropy_step/grpo.entropy_target")),
    (("turn_discount=0.5",), ErrorCode("grpo.turn_discount/grpo.advantage_level")),
    (
        ("advantage_level=turn", "advantage=tree"),
        ErrorCode("grpo.advantage_level/grpo.advantage"),
    ),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_what_nothing_reads_and_what_has_no_meaning_is_refused(
    overrides: tuple[str, ...], message: str
) -> None:
    with refused(message) as caught:
        sections(*(f"grpo.{one}" for one in overrides))
    assert "\n" not in str(caught.value)


def test_what_is_chosen_about_the_correction_is_recorded() -> None:
    def recorded(*overrides: str, engine: dict[str, Any] = SERVER) -> dict[str, str]:
        config = sections(*(f"grpo.{one}" for one in overrides)).grpo
        found = config.decisions(config.make_loss(**engine).correction)
        assert all(reason for _, _, reason in found)
        return {name: value for name, value, _ in found}

    chosen = {"grpo.rollout_correction": "truncated", "grpo.rollout_correction_level": "token"}
    assert recorded() == chosen
    assert recorded("loss=gmpo") == {**chosen, "grpo.rollout_correction_level": "geometric"}
    assert recorded("rollout_correction=masked") == {"grpo.rollout_correction_level": "geometric"}
    assert recorded("rollout_correction=masked", "rollout_correction_level=sequence") == {}
    assert recorded(engine=LOCAL) == {}


def test_a_correction_needs_the_engines_word() -> None:
    config = sections("grpo.rollout_correction=truncated").grpo
    with pytest.raises(
        ConfigError, match="rollout_correction=truncated with an engine that gives no log"
    ):
        config.make_loss(**LOCAL, has_engine_logp=False)
    unsaid = sections().grpo.make_loss(**SERVER, has_engine_logp=False)
    assert unsaid.correction.kind == "none"
