"""Errors that a test expects: by their code, which wording leaves as it is, or by a pattern of their message."""

from __future__ import annotations

from typing import Any

import pytest

from taut.errors import ConfigError, TautError


class ErrorCode(str):
    """The code of an error, in a list where other errors are told by a part of their message."""


def refused(told: str, kind: type[TautError] = ConfigError) -> Any:
    """``pytest.raises`` for an error with this code or, of a text that is no ``ErrorCode``, this pattern."""
    if isinstance(told, ErrorCode):
        return pytest.raises(kind, check=lambda error: error.code == told)
    return pytest.raises(kind, match=told)


def says(error: BaseException, told: str) -> bool:
    """Whether an error has this code or, of a text that is no ``ErrorCode``, this part of a message."""
    return (
        getattr(error, "code", None) == told if isinstance(told, ErrorCode) else told in str(error)
    )
