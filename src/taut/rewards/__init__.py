"""Rewards: what an answer is worth. One verifier per file; a new one is a line in ``REWARDS`` (``registry.py``).

A configuration names rewards, and a reward set asks all of them about each answer (``reward_set.py``). Each gives a
number, None where it does not apply, or an error with its reason. Errors are counted and shown; they never become 0.

A reward of your own imports the names below from here. They are loaded on first use: their module needs httpx, and
the keys beside it (``settings.py``) are read without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taut.rewards.verifier import Explained, RewardInput, Score, Verifier

__all__ = ["Explained", "RewardInput", "Score", "Verifier"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'taut.rewards' has no attribute {name!r}")
        from taut.rewards import verifier

        return getattr(verifier, name)
