"""What a verifier is shown: one answer, with all that is known of it.

A file of its own without imports of ours, so that worker processes load nothing else with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taut.types import FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """A completion, or the last one of a conversation, and the row it answers."""

    text: str
    """Without what ended it."""
    references: tuple[str, ...] = ()
    """The row's right answers, any of them; empty where it has none."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The row as it stands in the data."""
    num_tokens: int | None = None
    """Of all that the policy wrote, what ended it included; None: the answer was not sampled."""
    finish_reason: FinishReason = "stop"
    prompt: tuple[Mapping[str, Any], ...] | str = ()
    """What was asked: messages, or a text; where an environment began with messages of its own, those."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The conversation after the prompt, up to the policy's last turn: its turns and what an environment said between
    them. Empty: ``text`` is all."""


FIELDS = ("text", "references", "row", "num_tokens", "finish_reason", "prompt", "messages")
"""By these names a function of the user's may ask for them."""
