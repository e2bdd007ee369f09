"""Attributes of a library that have other values inside a block. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of a module or class inside the block; afterwards it has its own again."""
    before = {name: vars(owner)[name] for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
