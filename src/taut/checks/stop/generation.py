"""The generation_config that will be saved: that it can be, and that nothing in it keeps an answer from ending."""

from __future__ import annotations

import copy
from typing import Any

from transformers import GenerationConfig

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.session import Session
from taut.checks.stop.served import served
from taut.data.stop_tokens import described
from taut.io.temporary import TemporaryFolder
from taut.models.load import quiet_library
from taut.models.save import generation_to_save

FILE = "the model's generation_config.json"


def ask(session: Session) -> Finding:
    """Will the saved generation_config let a server stop?"""
    if session.is_scalar:
        return skipped("a reward model generates nothing")
    stops, before = session.stops, session.model.generation_config
    generation = generation_to_save(copy.deepcopy(before), served(session), stops.ids)
    trouble = _refused(generation)
    if trouble:
        return failed(
            "the library refuses to save generation_config, so no model could be written at the end",
            evidence=[trouble],
            remedy=f"take these settings out of {FILE}",
        )
    names = described(stops, session.renderer.template)[0]
    hindrance = _hindrance(generation, stops.ids)
    if hindrance:
        return failed(
            f"{hindrance[0]} in generation_config keeps answers from ending",
            evidence=[
                f"{hindrance[0]} = {hindrance[1]}; an answer ends at {names} {list(stops.ids)}"
            ],
            remedy=f"take {hindrance[0]} out of {FILE}",
        )
    written = _as_list(before.eos_token_id if before is not None else None)
    missing = [index for index in stops.turn_ends if index not in written]
    notes = []
    if missing:
        notes.append(f"it names {written or 'no end'} now; {list(stops.ids)} is written")
    notes.extend(_shown_as_text(session))
    return passed(f"it will name {names}", len(stops.ids), "ends", notes)


def _refused(generation: GenerationConfig) -> str:
    """Why the library does not save it; empty: it does."""
    with TemporaryFolder("check") as place, quiet_library():
        try:
            generation.save_pretrained(place)
        except ValueError as error:
            lines = [line.strip("- ") for line in str(error).splitlines()]
            return next((line for line in lines[1:] if line), lines[0])[:200]
    return ""


def _hindrance(generation: GenerationConfig, ends: tuple[int, ...]) -> tuple[str, Any] | None:
    """A setting that forbids every end, and its value."""
    for name in ("suppress_tokens", "begin_suppress_tokens"):
        found = getattr(generation, name, None) or []
        if name == "suppress_tokens" and set(ends) <= set(found):
            return name, found
    words = getattr(generation, "bad_words_ids", None) or []
    if {(index,) for index in ends} <= {tuple(word) for word in words}:
        return "bad_words_ids", words
    for name in ("min_new_tokens", "min_length"):
        value, most = getattr(generation, name, None) or 0, generation.max_new_tokens or 0
        if value and (value >= most > 0 or value >= LONG):
            return name, value
    return None


LONG = 256
"""Tokens that no answer needs to have at least."""


def _shown_as_text(session: Session) -> list[str]:
    """Ends that servers do not take out of the text they send."""
    added = session.tokenizer.added_tokens_decoder
    special = set(session.tokenizer.all_special_ids)
    plain = [
        index
        for index in session.stops.turn_ends
        if index not in special and not (index in added and added[index].special)
    ]
    tokens = session.tokenizer.convert_ids_to_tokens(plain)
    return [f"{token} is not marked special: servers may show it as text" for token in tokens]


def _as_list(ids: int | list[int] | None) -> list[int]:
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else list(ids)
