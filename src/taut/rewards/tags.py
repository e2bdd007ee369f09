"""1 where an answer is nothing but the given tags, once each and in order: ``<think>...</think><answer>...</answer>``.

White space may stand between them. With ``partial`` an answer that is not whole gets the share of its marks that stand
once and in order (each tag has two), at most half of 1, so that a model finds the form step by step.

May import config, errors and the verifiers' base.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from taut.config import configclass
from taut.errors import ConfigError
from taut.rewards.answered import Answered
from taut.rewards.verifier import Judged, Verifier


@configclass
class Tags(Verifier):
    """The form of tags."""

    judges: ClassVar[Judged] = "form"

    tags: Annotated[tuple[str, ...], Field(min_length=1)] = ("think", "answer")
    """Their names, in order."""
    is_opened: bool = False
    """The prompt ends with the first tag's opening mark, as some templates have it."""
    partial: bool = False
    """Give something for a part of the form."""

    def __post_init__(self) -> None:
        if len(set(self.tags)) < len(self.tags) or not all(self.tags):
            raise ConfigError(
                f"found tags={list(self.tags)}; expected names, each once; correct them"
            )

    def __call__(self, answered: Answered) -> float:
        text = f"<{self.tags[0]}>{answered.text}" if self.is_opened else answered.text
        marks = [mark for tag in self.tags for mark in (f"<{tag}>", f"</{tag}>")]
        num_right, at, outside = 0, 0, []
        for number, mark in enumerate(marks):
            found = text.find(mark, at)
            if found < 0 or text.count(mark) > 1:
                continue
            if number % 2 == 0:
                outside.append(text[at:found])
            num_right, at = num_right + 1, found + len(mark)
        outside.append(text[at:])
        if num_right == len(marks) and not any(part.strip() for part in outside):
            return 1.0
        return 0.5 * num_right / len(marks) if self.partial else 0.0
