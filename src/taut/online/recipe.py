"""What a run that generates is made of, beside what every run has: named by training.py, built by build.py.

May import online and what it may.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from taut.methods.critic import CriticConfig
from taut.online.credit import Credit
from taut.online.guard import GuardConfig
from taut.online.rollouts import RolloutConfig
from taut.rewards.panel import PanelConfig
from taut.rewards.registry import RewardSpec, files_of


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
    is_coupled: bool = False
    """Whether the answers of a group are compared inside the loss, as pairs are."""

    @property
    def files(self) -> list[Path]:
        """The user's own code: rewards, an environment, its tools."""
        environment = self.rollout.environment
        named = [environment.name or "", *environment.tools]
        own = [Path(name.rpartition(":")[0]).expanduser() for name in named if ":" in name]
        return [*files_of(self.rewards), *own]

    is_reference_asked_first: bool = False
    """Whether the reference's word is part of the reward, or used by more than one step: then it is taken with the
    roll-out, not with each step."""
