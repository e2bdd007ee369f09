"""Keys and values of what was computed before, for prompts that go on from it: the turns of a conversation.

A radix tree (as in SGLang, arXiv:2312.07104): a ``Run`` is tokens that the same conversations begin with, with their
keys and values in every layer, stored once. A prompt takes the longest path that it begins with, so conversations that
fork share what came before, and one whose history was edited takes what is before the edit.

There is a bound on the bytes. A round is one call of the engine, of all the turns that are asked for together. Runs
that no turn of the round reads are dropped first, of these the ones that were read longest ago, and ends of
conversations before their beginnings. What finds no room is not kept: what the round reads is not dropped for it, as
the next round would read that first.

Tokens that had been kept, or had found no room, and that a prompt begins with once more are counted (``num_lost``): the
same tree without keys and values says what a cache without a bound would have.

Tokens of a picture are told apart by its digest, and a run never ends inside of one: no two pictures share a part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np
from torch import nn

from taut.attention.decode import KeysValues
from taut.types import IntArray, Prompt

Kept = Mapping[nn.Module, KeysValues]
"""Keys and values [Hkv, tokens, K] of every attention layer."""
LEAST = 16
"""Fewer tokens at the beginning of a prompt are computed again."""


@dataclass(eq=False, slots=True)
class Run:
    """Tokens that the same conversations have, after those of ``parent``."""

    key_N: IntArray
    kept: Kept
    parent: Run | None
    round: int
    """When it was last read."""
    following: dict[int, Run] = field(default_factory=dict)
    """Runs that continue at its end, by their first token."""

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for pair in self.kept.values() for x in pair)


class PrefixCache:
    """Keys and values under one version of the weights."""

    def __init__(self, capacity: float) -> None:
        """``capacity``: bytes. 0 keeps and counts nothing."""
        self.capacity, self.num_bytes, self.round = capacity, 0, 0
        self.num_lost = 0
        """Tokens at the beginnings of prompts that would have been found, were there room for all."""
        self.wanted_bytes = 0
        """Bytes of all that was to be kept."""
        self._root = Run(np.empty(0, np.int64), {}, None, 0)
        self._unbounded = PrefixCache(math.inf) if 0 < capacity < math.inf else None
        """Cache without keys and values of everything that was to be kept, also where it found no room."""

    def begin_round(self, keys: Sequence[IntArray]) -> None:
        """Keep the prefixes of these prompts while they are computed, and count once the tokens of them that are
        lost.
        """
        self.round += 1
        before_T = np.empty(0, np.int64)
        for key_T in sorted(keys, key=lambda key_T: key_T.tobytes()):  # equal beginnings adjacent
            known = num_known(self.find(key_T))
            if self._unbounded is not None:
                had = num_known(self._unbounded.find(key_T))
                self.num_lost += max(0, had - max(known, num_common(before_T, key_T)))
            before_T = key_T

    def find(self, key_T: IntArray) -> list[tuple[Run, int]]:
        """The runs that the tokens begin with, and how many tokens of each. They count as read in this round."""
        found: list[tuple[Run, int]] = []
        following, at = self._root.following, 0
        while at < key_T.size and (run := following.get(int(key_T[at]))) is not None:
            size = num_common(run.key_N, key_T[at:])
            run.round = self.round
            found.append((run, size))
            at += size
            following = run.following if size == run.key_N.size else {}
        return found

    def add(self, key_T: IntArray, bytes_per_token: int, copy: Callable[[int], Kept]) -> None:
        """Keep the tokens that are not there yet, if there is room. ``copy``: their keys and values from a place on."""
        if self._unbounded is not None:
            num_new = key_T.size - num_tokens(self._unbounded.find(key_T))
            self.wanted_bytes += num_new * bytes_per_token
            self._unbounded.add(key_T, 0, lambda _: {})
        found = self.find(key_T)
        first = num_tokens(found)
        if first == key_T.size or not self._has_room((key_T.size - first) * bytes_per_token):
            return
        parent = self._root
        if found:
            parent, size = found[-1]
            if size < parent.key_N.size:
                self._split(parent, size)
        new = Run(key_T[first:], copy(first), parent, self.round)
        parent.following[int(key_T[first])] = new
        self.num_bytes += new.num_bytes

    def _has_room(self, num_bytes: int) -> bool:
        """Whether there is room, after dropping the ends of conversations that this round has not read."""
        if num_bytes > self.capacity:
            return False
        while self.num_bytes + num_bytes > self.capacity:
            ends, waiting = list[Run](), [*self._root.following.values()]
            while waiting:
                run = waiting.pop()
                waiting += run.following.values()
                if not run.following and run.round < self.round:
                    ends.append(run)
            if not ends:
                return False
            oldest = min(ends, key=lambda run: run.round)
            assert oldest.parent is not None
            del oldest.parent.following[int(oldest.key_N[0])]
            self.num_bytes -= oldest.num_bytes
        return True

    def _split(self, run: Run, size: int) -> None:
        """Make two of a run, the second of which begins after ``size`` tokens."""

        def part(span: slice) -> Kept:  # copies, so that either can be dropped
            return {
                layer: (key[:, span].clone(), value[:, span].clone())
                for layer, (key, value) in run.kept.items()
            }

        rest = Run(run.key_N[size:], part(slice(size, None)), run, run.round, run.following)
        for following in rest.following.values():
            following.parent = rest
        run.key_N, run.kept = run.key_N[:size], part(slice(size))
        run.following = {int(rest.key_N[0]): rest}


def num_tokens(found: Sequence[tuple[Run, int]]) -> int:
    """The number of tokens of runs that ``find`` returns."""
    return sum(size for _, size in found)


def num_known(found: Sequence[tuple[Run, int]]) -> int:
    """The number of tokens of found runs that are not computed again."""
    size = num_tokens(found)
    return size if size >= LEAST else 0


def num_common(one_T: IntArray, other_T: IntArray) -> int:
    """The number of tokens with which both begin."""
    size = min(one_T.size, other_T.size)
    differs = one_T[:size] != other_T[:size]
    return int(differs.argmax()) if differs.any() else size


def key_of(prompt: Prompt) -> IntArray:
    """The ids of a prompt, with a number below zero for each picture in its place."""
    key_T = prompt.ids_T.copy()
    for image in prompt.media:
        digest = f"{image.picture.digest}/{image.grid}"
        number = int.from_bytes(sha256(digest.encode()).digest()[:8]) >> 1
        key_T[image.start : image.stop] = -1 - number
    return key_T
