"""Forks: at the end of certain turns a path continues as several, which share all tokens before. Trees of turns, as in
Tree-GRPO (arXiv 2509.21240) and, for segments of an answer, TreeRL (arXiv 2506.11902).

    rollout.fork = { turns = [1], n = 2 }, rollout.n = 4

    prompt --- turn 1 --+-- turn 2 ...    leaf 0        rewards, say, 1
                        +-- turn 2 ...    leaf 1                      0
           --- turn 1 --+-- turn 2 ...    leaf 2                      0
                        +-- turn 2 ...    leaf 3                      0

``rollout.n`` counts leaves. Before its k forks a path has n^k ``leaves``, which it may still become. If it ends before
a fork, its trajectory is repeated for each of them: so the value of every node is a mean over equally many leaves, and
an early end weighs as much as the paths that continued beside it. Each leaf is an exact sample of the policy, but
leaves that begin alike are not independent of each other; ``losses.advantages.tree`` compares them segment by segment.
By hand, of the rewards above less their mean 1/4 and divided by their deviation 1/2: the first turns have the values
1/2 and -1/2, so advantages of 1/2 and -1/2; the second turns 3/2 - 1/2 = 1, -1, 0 and 0. If leaves 0 and 1 had ended
with turn 1 and the reward 1, its advantage would be that of the leaves 1, 1, 0, 0.

A path that forks keeps its index and environment. Each other path gets the next index whose leaves are free, which keys
its random streams, and an environment in the same state: a deep copy, or a new one in which the turns are replayed. The
state is the environment's own; what it shares with others (files, servers, the module ``random``) is not copied.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from taut.data.read.json_io import shown
from taut.errors import UserCodeError
from taut.rl.settings import ForkConfig

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
                f"{what} was {shown(before)} and is {shown(again)}; seed it by the row, or set rollout.fork.state=copy"
            )
    return environment
