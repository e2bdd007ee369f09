"""Keys of ``taut chat``. They import no torch, so that ``taut chat --help`` is quick."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, ClassVar

from pydantic import Field

from taut.config import configclass
from taut.inference.settings import ConversationConfig, ModelUse, Sampling
from taut.vision.settings import OF_ROWS


@configclass
class ChatSampling(Sampling):
    """Sampling of answers."""

    max_new_tokens: Annotated[int, Field(ge=1)] = 1024
    """Maximum tokens of an answer."""
    temperature: Annotated[float, Field(ge=0)] = 0.7
    """Sampling temperature. 0: greedy."""

    rules: ClassVar[str] = """
        n!=1 unread: a chat has one answer
    """


@configclass
class Chat(ModelUse):
    """A conversation in the terminal."""

    system: str | None = None
    """The system message."""
    sampling: ChatSampling = field(default_factory=ChatSampling)
    local: ConversationConfig = field(default_factory=ConversationConfig)

    rules: ClassVar[str] = f"""
        {" ".join(f"images.{name}" for name in OF_ROWS)} unread: a chat has no files of rows
    """
