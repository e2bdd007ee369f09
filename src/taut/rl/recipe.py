"""What a run that generates is made of, beside what every run has: named by training.py, built by build.py.

May import online and what it may.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from taut.config import home_path
from taut.errors import ConfigError
from taut.rewards.judge import RewardModel
from taut.rewards.panel import PanelConfig
from taut.rewards.registry import RewardSpec, files_of, listed, verifier_of
from taut.rl.advantages import Credit
from taut.rl.critic import CriticConfig
from taut.rl.monitors import GuardConfig
from taut.rl.rollout import RolloutConfig


def models_of(rewards: str | Sequence[str | RewardSpec]) -> dict[str, RewardModel]:
    """The reward models in this process among them, by label."""
    found = {}
    for spec in listed(rewards):
        verifier = verifier_of(spec.name, spec.options) if spec.name == "reward_model" else None
        if isinstance(verifier, RewardModel):
            found[spec.label or spec.name] = verifier
    return found


def judging(rewards: str | Sequence[str | RewardSpec]) -> list[str]:
    """What they are read from."""
    return [path for it in models_of(rewards).values() for path in (it.model, it.template) if path]


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
                f"rollout.ahead=true and the reward {label}, a model in this process: it would judge while another "
                "model trains here; expected it at a server; use `taut serve-reward` and the reward reward_server"
            )


class Recipe(NamedTuple):
    """How a run generates, judges and learns from it."""

    make_credit: Callable[[], Credit]
    """Makes what judged paths become: it has a state."""
    rollout: RolloutConfig
    rewards: str | list[str | RewardSpec]
    panel: PanelConfig
    guard: GuardConfig
    critic: CriticConfig | None = None
    is_judged: bool = True
    """Whether rewards are what is learned from."""
    ends_remedy: str = "lower optim.learning_rate"
    """What to do where the policy ends fewer of its answers, in keys that the method has."""
    is_coupled: bool = False
    """Whether the answers of a group are compared inside the loss, as pairs are."""
    decisions: Sequence[tuple[str, str, str]] = ()
    """(key, value, reason) of what was chosen for the user about the loss."""

    @property
    def files(self) -> list[Path]:
        """The user's own code: rewards, an environment, its tools."""
        environment = self.rollout.environment
        named = [environment.name or "", *environment.tools]
        own = [home_path(name.rpartition(":")[0]) for name in named if ":" in name]
        return [*files_of(self.rewards), *own]

    is_reference_asked_first: bool = False
    """Whether the reference's word is part of the reward, or used by more than one step: then it is taken with the
    roll-out, not with each step."""
