"""Rewards: what a completion is worth. One verifier per file; a new one is a line in ``REWARDS``.

    reward(text, references, row) -> a number, or None: it does not apply

What a reward raises is an error with its reason. Errors are counted and shown; they never become 0, and neither does
what does not apply.

May import types, errors and config. Evals, methods and commands import it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from taut.errors import ConfigError
from taut.rewards.contains import contains
from taut.rewards.exact_match import exact_match
from taut.rewards.numeric import numeric
from taut.rewards.user import load_function

Verifier: TypeAlias = Callable[[str, Sequence[str], Mapping[str, Any]], float | None]

REWARDS: dict[str, Verifier] = {
    "exact_match": exact_match,
    "contains": contains,
    "numeric": numeric,
}
"""name -> verifier. Every entry is held to the properties in tests/unit/rewards."""


class Score(NamedTuple):
    """What a reward said of one completion: a value, an error, or neither: it does not apply."""

    value: float | None = None
    error: str | None = None


class Reward(NamedTuple):
    """A verifier under the name of its metric."""

    name: str
    verifier: Verifier

    def score(self, text: str, references: Sequence[str], row: Mapping[str, Any]) -> Score:
        """The verifier's word on one completion; what it raises is kept as the error it is."""
        try:
            value = self.verifier(text, list(references), row)
        except Exception as error:  # noqa: BLE001 (a user's function may raise anything; it is counted and shown)
            return Score(error=" ".join(f"{type(error).__name__}: {error}".split()))
        if value is None:
            return Score()
        if not isinstance(value, Real) or not math.isfinite(value):
            return Score(
                error=f"{self.name} returned {value!r:.60}; expected a finite number or None"
            )
        return Score(value=float(value))


def listed(names: str | Sequence[str]) -> list[str]:
    """One name or several, as a configuration has them."""
    return [names] if isinstance(names, str) else list(names)


def files_of(names: str | Sequence[str]) -> list[Path]:
    """The files of the user's among them."""
    return [Path(name.rpartition(":")[0]).expanduser() for name in listed(names) if ":" in name]


def load_rewards(names: str | Sequence[str], reserved: Sequence[str] = ()) -> list[Reward]:
    """The rewards that a configuration names: ``exact_match``, or ``FILE.py:function``.

    ``reserved``: names of other metrics, which no function may bear.
    """
    names = listed(names)
    rewards = [_load(name) for name in names]
    for position, reward in enumerate(rewards):
        if reward.name in reserved or reward.name in [r.name for r in rewards[:position]]:
            raise ConfigError(
                f"found the reward {names[position]!r}, and there is another metric {reward.name!r}; "
                "expected each name once; leave it out or rename the function"
            )
    return rewards


def _load(name: str) -> Reward:
    if name in REWARDS:
        return Reward(name, REWARDS[name])
    if ":" not in name:
        raise ConfigError(
            f"found the reward {name!r}; expected one of {', '.join(REWARDS)}, or FILE.py:function"
        )
    return Reward(name.rpartition(":")[2], load_function(name))
