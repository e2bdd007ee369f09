"""Forks: at the end of a stated turn a path goes on as several, which share all before it. Trees of turns, as in
Tree-GRPO (arXiv 2509.21240) and, for segments of an answer, TreeRL (arXiv 2506.11902).

    rollout.fork = { turns = [1], n = 2 }, rollout.n = 4

    prompt --- turn 1 --+-- turn 2 ...    leaf 0        rewards, say, 1
                        +-- turn 2 ...    leaf 1                      0
           --- turn 1 --+-- turn 2 ...    leaf 2                      0
                        +-- turn 2 ...    leaf 3                      0

``rollout.n`` counts leaves. A path stands for the ``leaves`` that it may still become: n^k before k forks. One that
ends before a fork is all of them: its trajectory is repeated, so that every node's value is the mean over equally many
leaves, and an early end has the weight of the paths that went on beside it. Each leaf is an exact sample of the policy,
but leaves that begin alike are not independent of each other; ``losses.advantages.tree`` compares them segment by
segment. By hand, of the rewards above less their mean 1/4 and divided by their deviation 1/2: the first turns have the
values 1/2 and -1/2, so advantages of 1/2 and -1/2; the second turns 3/2 - 1/2 = 1, -1, 0 and 0. Were turn 1 of leaves
0 and 1 the end of the path, with reward 1, its advantage would be that of the leaves 1, 1, 0, 0.

A path that forks keeps its index and environment; each of the others has the next index whose leaves are free, which
keys its random streams, and an environment in the same state: a deep copy, or a new one in which the turns are
replayed. The state is the environment's own: what it shares with others (files, servers, the module ``random``) is not
copied.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field

from taut.config import changed, configclass
from taut.data.json_io import shown
from taut.errors import ConfigError, UserCodeError


@configclass
class ForkConfig:
    """Paths that go on as several at the end of stated turns."""

    turns: list[Annotated[int, Field(ge=1)]] = field(default_factory=list)
    """Turns, from 1, at whose end a path goes on as n paths, after the environment has answered. Requires
    rollout.environment and grpo.advantage=tree. Empty: no path forks."""
    n: Annotated[int, Field(ge=2)] = 2
    """Paths that a path goes on as. rollout.n counts those at the end: it is a multiple of n to the number of turns."""
    state: Literal["copy", "replay"] = "copy"
    """How each of them gets an environment in the same state. copy: copy.deepcopy of the path's environment; replay: a
    new one, which is reset with the row and answers the same turns again, and has to answer the same."""

    def __post_init__(self) -> None:
        if self.turns != sorted(set(self.turns)):
            raise ConfigError(
                f"rollout.fork.turns={self.turns}; expected each turn once, in their order; set "
                f"rollout.fork.turns={sorted(set(self.turns))}"
            )
        for key in changed(self, ("n", "state")):
            if not self.turns:
                raise ConfigError(
                    f"rollout.fork.{key}={getattr(self, key)} and rollout.fork.turns is not set: nothing reads it; "
                    f"expected turns; set rollout.fork.turns=[1], or take {key} out"
                )

    @property
    def is_on(self) -> bool:
        return bool(self.turns)

    @property
    def leaves(self) -> int:
        """Paths that one path has become after the last fork."""
        return int(self.n ** len(self.turns))


NO_FORKS = ForkConfig()


def copied(environment: Any) -> Any:
    """A deep copy of an environment. Raises UserCodeError where there can be none."""
    try:
        return copy.deepcopy(environment)
    except Exception as error:  # noqa: BLE001 (a user's code may raise anything; it is shown)
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserCodeError(
            f"rollout.fork: the environment {type(environment).__name__} cannot be copied ({reason}); expected "
            "copy.deepcopy of it to work; give it a method __deepcopy__, or set rollout.fork.state=replay"
        ) from None


def replayed(
    answers: Sequence[Callable[[Any], Any]], heard: Sequence[Any], environment: Any
) -> Any:
    """The environment, which is new, after it has given all ``answers`` again. ``heard``: what those were. Raises
    UserCodeError where one differs.
    """
    for number, (answer, before) in enumerate(zip(answers, heard, strict=True)):
        again = answer(environment)
        if again != before:
            what = f"its answer to turn {number}" if number else "its reset"
            raise UserCodeError(
                f"rollout.fork.state=replay: the environment {type(environment).__name__} does not repeat itself: "
                f"{what} was {shown(before)} and is {shown(again)}; expected the same to the same row and turns; seed "
                "it by the row, or set rollout.fork.state=copy"
            )
    return environment
