"""Every reward of taut, by name, in the order of docs/rewards.md: those of the core and those of its tools."""

from __future__ import annotations

from taut.rewards import Verifier
from taut.rewards.registry import REWARDS
from taut_tools.reasoning_gym.reward import Gym
from taut_tools.sandbox.code import Code

ALL: dict[str, type[Verifier]] = {}
for name, verifier in REWARDS.items():
    ALL[name] = verifier
    if name == "math":
        ALL["code"] = Code
        ALL["reasoning_gym"] = Gym
