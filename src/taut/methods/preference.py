"""The common part of the methods on preferences, which compare answers to one prompt.

``PairMethod`` is the base of DPO, ORPO, SimPO and CPO. Their sections are in losses/settings.py, the formulas and their
papers in losses/preference.py. Whether a reference is needed follows from the loss: ``"ref_logp_N" in loss.needs``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from taut.config import configclass
from taut.data.settings import Kind
from taut.methods.method import RunConfig


@configclass
class PairMethod(RunConfig):
    """A method whose rows are a prompt with better and worse answers."""

    row_kinds: ClassVar[Mapping[Kind, str]] = {"preference": ""}

    @property
    def allows_noise(self) -> bool:
        return False
