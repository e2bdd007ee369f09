"""The stop set: every token that ends an answer, derived once from template, tokenizer and generation_config.

Shown to the user, trained as targets, used by every engine, written on save. May import errors, ``template.py`` and
``render.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from taut.data.render import Renderer


@dataclass(frozen=True)
class StopSet:
    """Which tokens end an answer, and why each is one of them."""

    reasons: Mapping[int, str]
    """id -> why; what ends a plain assistant turn first: the token saved as eos."""

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(self.reasons)


def derive_stop_set(renderer: Renderer, inherited: Sequence[int] = ()) -> StopSet:
    """The stop set of a model: its template's turn end, its tokenizer's eos, and ``inherited``, what its
    generation_config names."""
    reasons = dict.fromkeys(renderer.stop_ids, "ends an assistant turn")
    eos = renderer.tokenizer.eos_token_id
    if eos is not None:
        reasons.setdefault(int(eos), "the tokenizer's end of text")
    for index in inherited:
        reasons.setdefault(int(index), "generation_config's eos_token_id")
    return StopSet(reasons)
