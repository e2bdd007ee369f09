"""Supervised fine-tuning: cross-entropy on the targets of the data."""

from __future__ import annotations

from taut.config import configclass
from taut.methods.method import RunConfig


@configclass
class Sft(RunConfig):
    """A run of ``taut sft``. The defaults of ``RunConfig`` are those of fine-tuning: nothing is added."""
