"""TOML and dotted overrides -> a frozen tree of dataclasses. Knows no component.

Imports nothing of ours but errors. Anyone may import it.
"""

from __future__ import annotations

from typing import TypeVar, dataclass_transform

import pydantic
from pydantic.dataclasses import dataclass as pydantic_dataclass

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def configclass(cls: type[T]) -> type[T]:
    """A frozen, keyword-only dataclass whose values are validated and whose unknown keys are refused.

    The string under a field is its documentation (``taut show`` prints it).
    """
    settings = pydantic.ConfigDict(extra="forbid", use_attribute_docstrings=True)
    return pydantic_dataclass(frozen=True, kw_only=True, config=settings)(cls)
