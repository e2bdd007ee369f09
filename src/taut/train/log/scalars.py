"""Which numbers of an event are curves, and what they are called."""

from __future__ import annotations

from taut.train.log.events import Event

PREFIXES = {"step": "train", "rollout": "rollout", "eval": "eval"}
NOT_CURVES = ("step", "time")
NOT_MEASURED = ("loss", "grad_norm")
"""What a skipped step has no value of; its event holds 0."""


def scalars(event: Event) -> dict[str, float]:
    """``train/loss`` and its like; empty for events that are no measurement."""
    prefix = PREFIXES.get(event["kind"])
    if prefix is None:
        return {}
    left_out = NOT_CURVES + (NOT_MEASURED if event.get("skipped") else ())
    return {
        f"{prefix}/{name}": float(value)
        for name, value in event.items()
        if name not in left_out and isinstance(value, int | float) and not isinstance(value, bool)
    }
