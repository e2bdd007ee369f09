"""Gymnasium's environments (arXiv:2407.17032) in text: ``rollout.environment.name="gym:ENV_ID"``.

    observation   Text: as it is. Discrete: the number. Box, MultiDiscrete, MultiBinary, and Tuple and Dict of all of
                  these, up to ``MOST_NUMBERS`` numbers: as JSON
    action        Text: the turn, without white space around it. Discrete: the last whole number in the turn

Other spaces are refused before the run begins. A turn without an action that the space contains takes no step: the
policy is told what it may answer. A step's reward is the environment's; a trajectory that ends, or that a limit of
Gymnasium's truncates, is done.

The first observation comes after the row's prompt, whose last message it joins. ``seed`` is the row's column of that
name, or else a number made of the row, so that all samples of a row begin in the same state. ``options`` are the
keywords of ``gymnasium.make``. Gymnasium is imported here only.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from taut.data.rows.tool_calls import ToolCall
from taut.errors import ConfigError
from taut.rl.environment import Step

MOST_NUMBERS = 256
"""Numbers of an observation that are written as text."""
_WHOLE = re.compile(r"-?\d+")


class GymnasiumEnvironment:
    """One episode."""

    follows_prompt: ClassVar[bool] = True

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._environment = gymnasium.make(name, **options)
        self._actions = self._environment.action_space

    def reset(self, row: dict[str, Any]) -> list[dict[str, str]]:
        seed = row.get("seed")
        if not isinstance(seed, int):
            text = json.dumps(row, sort_keys=True, default=str)
            seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])
        observation, _ = self._environment.reset(seed=seed)
        return [self._say(observation)]

    def step(self, text: str, calls: list[ToolCall]) -> Step:
        action = self._action(text)
        if action is None:
            return Step([{"role": "user", "content": f"Answer with {_expected(self._actions)}."}])
        observation, reward, is_terminated, is_truncated, _ = self._environment.step(action)
        is_done = is_terminated or is_truncated
        if is_done:
            self._environment.close()
        return Step([self._say(observation)], is_done, float(reward))

    def cut(self) -> float:
        """Nothing more than the steps gave."""
        self._environment.close()
        return 0.0

    def _action(self, text: str) -> Any:
        """The action that a turn says; None: it says none that can be taken."""
        if isinstance(self._actions, spaces.Text):
            return text.strip() if self._actions.contains(text.strip()) else None
        numbers = _WHOLE.findall(text)
        action = int(numbers[-1]) if numbers and len(numbers[-1]) < 19 else None
        return action if action is not None and self._actions.contains(action) else None

    def _say(self, observation: Any) -> dict[str, str]:
        value = _plain(observation)
        return {
            "role": "user",
            "content": value if isinstance(value, str) else json.dumps(value, ensure_ascii=False),
        }


def load_gymnasium(name: str, options: Mapping[str, Any]) -> Callable[[], GymnasiumEnvironment]:
    """Return the maker of an episode's environment. Raises ConfigError for one that is unknown or not in text."""
    place = f"rollout.environment.name is gym:{name}"
    try:
        environment = gymnasium.make(name, **options)
    except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{place}, which cannot be made: {' '.join(str(error).split())[:300]}; expected an environment of "
            "Gymnasium, and its keywords in rollout.environment.options; correct them"
        ) from None
    acts, sees = environment.action_space, environment.observation_space
    environment.close()
    problem = ""
    if not isinstance(acts, (spaces.Text, spaces.Discrete)):
        problem = (
            f"actions are {acts}: a turn of words is no such action; expected Text or Discrete; wrap it in an "
            "environment that takes one of them"
        )
    elif (reason := _unwritable(sees)) is not None:
        problem = (
            f"observations are {reason}; expected Text, Discrete, or up to {MOST_NUMBERS} numbers; wrap it in an "
            "environment that describes what it shows"
        )
    if problem:
        raise ConfigError(f"{place}, whose {problem}")
    return partial(GymnasiumEnvironment, name, options)


def _expected(actions: spaces.Space[Any]) -> str:
    if isinstance(actions, spaces.Discrete):
        first = int(actions.start)
        return f"a whole number from {first} to {first + int(actions.n) - 1}"
    assert isinstance(actions, spaces.Text)
    letters = "".join(sorted(actions.character_set))
    return f"{actions.min_length} to {actions.max_length} characters of {letters}"


def _unwritable(space: spaces.Space[Any]) -> str | None:
    """Why observations of this space are not written as text; None: they are."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        return next((reason for part in parts if (reason := _unwritable(part))), None)
    if isinstance(space, (spaces.Text, spaces.Discrete)):
        return None
    if isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
        size = int(np.prod(space.shape))
        return None if size <= MOST_NUMBERS else f"{size:,} numbers ({space!r:.80})"
    return repr(space)[:120]


def _plain(value: Any) -> Any:
    """An observation as text, numbers, lists and objects."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
