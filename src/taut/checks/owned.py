"""Parts of a session that cannot be made, and the checks whose question that is. The session and checks import it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from taut.errors import TautError

T = TypeVar("T")


class Unavailable(Exception):
    """A part of the session that cannot be made."""

    def __init__(self, part: str, owner: str, error: TautError) -> None:
        super().__init__(str(error))
        self.part, self.owner, self.error = part, owner, error


def owned_by(owner: str) -> Callable[[Callable[[Any], T]], Callable[[Any], T]]:
    """Marks a part: an error while it is made is the failure of the check ``owner``."""

    def mark(make: Callable[[Any], T]) -> Callable[[Any], T]:
        @wraps(make)
        def made(session: Any) -> T:
            part = make.__name__
            if part in session.broken:
                raise session.broken[part]
            try:
                return make(session)
            except TautError as error:
                session.broken[part] = Unavailable(part, owner, error)
                raise session.broken[part] from error

        return made

    return mark
