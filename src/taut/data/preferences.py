"""What a row is once validated where its answers are judged: compared with each other, good or bad, scored, or
labelled step by step.

    preference   answers to one prompt, of which some are better: ``preference`` orders them, and the difference of
                 two ``margin`` says by how much
    unpaired     an answer and whether it is a good one: ``label`` 1 or 0
    scored       an answer and its ``score``
    stepwise     an answer in steps, each with a ``label`` from 0 to 1

Every answer is a row as SFT reads it. Does not know columns (``judged.py``) or ids (``answers.py``). Imported by the
rest of ``taut.data`` and by whoever asks for rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from taut.data.formats import Row

Kind: TypeAlias = Literal["sft", "preference", "unpaired", "scored", "stepwise", "prompt"]
"""What a row says of its answers; sft: nothing; prompt: the model is to answer, and a reward judges."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers to one prompt, each of which becomes a sample."""

    place: str
    answers: tuple[Row, ...]
    """Each with its whole prompt; of conversations only what answers it is learned. Documents: whole texts, whose
    common beginning is the prompt."""
    values: Mapping[str, tuple[float, ...]]
    """What is said of each: preference and margin, or label, or score."""

    @property
    def is_compared(self) -> bool:
        """Whether the answers only mean something together."""
        return "preference" in self.values


@dataclass(frozen=True, slots=True)
class Stepwise:
    """An answer whose steps are labelled."""

    place: str
    answer: Row
    """The prompt and all steps, joined: in the last message, or the completion."""
    steps: tuple[tuple[int, int], ...]
    """Where each lies in that text, without white space around it: [start, stop)."""
    labels: tuple[float, ...]


Judged: TypeAlias = Answers | Stepwise
AnyRow: TypeAlias = Row | Judged


def best_row(row: AnyRow) -> Row:
    """The best answer as a row of SFT; what is one already, as it is. Of equals the first."""
    if isinstance(row, Stepwise):
        return row.answer
    if not isinstance(row, Answers):
        return row
    judgement = next(iter(row.values.values()))
    return row.answers[judgement.index(max(judgement))]
