"""Values that are made once and kept while there is room; the longest unused goes first.

Threads that ask for one value at a time wait for the one that makes it. What is made ahead, and was not yet asked for,
takes at most half of the room, so that it does not drive out itself. Imports nothing of ours. Imported by album.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from threading import Lock
from typing import Generic, TypeVar

V = TypeVar("V")


class Kept(Generic[V]):
    """Values by key, of at most so much weight; one that is too heavy alone is made and not kept."""

    def __init__(self, room: int, weigh: Callable[[V], int]) -> None:
        self._room, self._weigh = room, weigh
        self._lock = Lock()
        self._values: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._under_way: dict[Hashable, Future[V]] = {}
        self._ahead: dict[Hashable, int] = {}
        """The weights of values that nobody has asked for."""
        self.weight = 0
        """Of what is kept."""

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value, made now where it is not kept. What ``make`` raises reaches all who wait for it."""
        with self._lock:
            self._ahead.pop(key, None)
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
            others = self._under_way.get(key)
            mine = self._under_way.setdefault(key, Future())
        if others is None:
            return self._make(key, make, mine)
        value = others.result()
        with self._lock:
            self._ahead.pop(key, None)
        return value

    def make_ahead(self, key: Hashable, make: Callable[[], V]) -> None:
        """Make a value that will be asked for, unless it is there, or there is much already that waits to be."""
        with self._lock:
            is_there = key in self._values or key in self._under_way
            if is_there or sum(self._ahead.values()) >= self._room // 2:
                return
            mine = self._under_way[key] = Future()
        self._make(key, make, mine, is_ahead=True)

    def _make(
        self, key: Hashable, make: Callable[[], V], mine: Future[V], is_ahead: bool = False
    ) -> V:
        try:
            value = make()
        except BaseException as error:
            with self._lock:
                del self._under_way[key]
            mine.set_exception(error)
            raise
        with self._lock:
            del self._under_way[key]
            self._put(key, value, is_ahead)
        mine.set_result(value)
        return value

    def _put(self, key: Hashable, value: V, is_ahead: bool) -> None:
        weight = self._weigh(value)
        if weight > self._room:
            return
        self._values[key] = value, weight
        self.weight += weight
        if is_ahead:
            self._ahead[key] = weight
        while self.weight > self._room:
            oldest, (_, weight) = self._values.popitem(last=False)
            self.weight -= weight
            self._ahead.pop(oldest, None)
