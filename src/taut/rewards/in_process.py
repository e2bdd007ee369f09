"""Reward models that judge in this process: which there are, what they read, and where they cannot judge."""

from __future__ import annotations

from collections.abc import Sequence

from taut.errors import ConfigError
from taut.rewards.judge import RewardModel
from taut.rewards.registry import RewardSpec, listed, verifier_of


def models_of(rewards: str | Sequence[str | RewardSpec]) -> dict[str, RewardModel]:
    """The reward models in this process among them, by label."""
    models = {}
    for spec in listed(rewards):
        verifier = verifier_of(spec.name, spec.options) if spec.name == "reward_model" else None
        if isinstance(verifier, RewardModel):
            models[spec.label or spec.name] = verifier
    return models


def files_read(rewards: str | Sequence[str | RewardSpec]) -> list[str]:
    """Model directories and templates that they are read from."""
    models = models_of(rewards).values()
    return [path for model in models for path in (model.model, model.template) if path]


def require_judgeable(
    rewards: str | Sequence[str | RewardSpec], num_ranks: int, *, ahead: bool = False
) -> None:
    """Raise ConfigError, on every rank alike, for a model that would judge in this process where it cannot."""
    for label in models_of(rewards):
        if num_ranks > 1:
            raise ConfigError(
                f"found the reward {label}, a model in this process, and {num_ranks} ranks, which would wait while one "
                "of them judges; expected it at a server; use `taut serve-reward` and the reward reward_server"
            )
        if ahead:
            raise ConfigError(
                f"rollout.asynchronous=true and the reward {label}, a model in this process: it would judge while "
                "another model trains here; expected it at a server; use `taut serve-reward` and the reward "
                "reward_server"
            )
