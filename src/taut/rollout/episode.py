"""What a roll-out is: one path from a prompt to its end, token for token as it was sampled.

    prompt ids | completion | what the environment said | completion | ...

Only sampled tokens are targets; what an environment said is context. Nothing is tokenised again and nothing rewritten.

May import data, types and rewards. Whoever rolls out makes them; methods and rewards read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from taut.data.formats import Message
from taut.data.prompts import PromptRow
from taut.types import FinishReason, FloatArray, IntArray, Media


@dataclass(frozen=True, eq=False, slots=True)
class Episode:
    """One path. N counts its sampled tokens, in the order of the path."""

    row: PromptRow
    """What was asked, with its references."""
    index: int
    """Which of the prompt's samples, from 0."""
    ids_T: IntArray
    """Prompt, completions, and what the environment put between them."""
    sampled_at_N: IntArray
    """Ascending positions into ``ids_T``: what the policy chose."""
    logp_N: FloatArray
    """log-probability of each under the policy it was drawn from, as the engine says; NaN where it cannot."""
    version_N: IntArray
    """The step whose update the weights had that each was drawn from."""
    finish_reason: FinishReason
    """Of the last completion; length also where an environment's limit of turns or tokens cut the path."""
    text: str
    """Of the last completion, without what ended it: what verifiers read."""
    messages: tuple[Message, ...] = ()
    """The conversation after the prompt: the policy's turns and what the environment said, with tool calls."""
    num_turns: int = 1
    error: str | None = None
    """Why there is no completion to learn from, where finish_reason is error: the engine's or environment's words."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """What the environment itself said the path is worth, by name; empty: rewards judge it."""
    turn_rewards: tuple[tuple[int, float], ...] = ()
    """The part of ``rewards`` that steps gave: (n, sum of the step's rewards), where sampled token n is the last of the
    turn that the step answered. What ``cut`` gave belongs to the whole path and is left out."""
    num_calls: int = 0
    """Calls of tools that the policy made."""
    num_malformed_calls: int = 0
    """Those of them that could not be read; the environment was told."""
    asked: tuple[Message, ...] | None = None
    """The messages that an environment's path began with; None: the row's prompt."""
    media: tuple[Media, ...] = ()
    """The pictures among the ids, ascending."""
