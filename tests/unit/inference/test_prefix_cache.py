"""What is kept of earlier turns: found, shared, split, and dropped."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from taut.inference.prefix_cache import Kept, PrefixCache

LAYER = nn.Identity()
PER_TOKEN = 2 * 8


def kept(key: list[int]) -> tuple[np.ndarray, int, object]:
    """Keys that are the tokens themselves, one head of one float64."""
    key_T = np.array(key)

    def copy(first: int) -> Kept:
        tokens = torch.tensor(key[first:], dtype=torch.float64).view(1, -1, 1)
        return {LAYER: (tokens, -tokens)}

    return key_T, PER_TOKEN, copy


def found(cache: PrefixCache, key: list[int]) -> list[int]:
    """The tokens whose keys and values are found."""
    runs = cache.find(np.array(key))
    tokens = torch.cat([run.kept[LAYER][0][0, :size, 0] for run, size in runs] or [torch.empty(0)])
    return [int(token) for token in tokens]


def filled(capacity: int, *keys: list[int]) -> PrefixCache:
    """Each key is added in a round of its own."""
    cache = PrefixCache(capacity * PER_TOKEN)
    for key in keys:
        cache.round += 1
        cache.add(*kept(key))
    return cache


def test_the_longest_beginning_is_found() -> None:
    cache = filled(99, [1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 4, 6, 7], [8])
    assert found(cache, [1, 2, 3, 4, 6, 9]) == [1, 2, 3, 4, 6]
    assert found(cache, [1, 2, 5, 4]) == [1, 2, 5]
    assert found(cache, [1, 3]) == [1]
    assert found(cache, [8]) == [8]
    assert found(cache, [9]) == []
    assert cache.num_bytes == 8 * PER_TOKEN  # each distinct token once


def test_what_was_read_longest_ago_is_dropped_first_and_ends_before_beginnings() -> None:
    cache = filled(6, [1, 2, 3, 4], [1, 2, 5])  # five tokens
    cache.round += 1
    found(cache, [1, 2, 3, 4])
    cache.round += 1
    cache.add(*kept([7, 8]))
    assert found(cache, [1, 2, 5]) == [1, 2]
    assert found(cache, [7, 8]) == [7, 8]
    cache.round += 1
    cache.add(*kept([9, 9]))
    assert (found(cache, [1, 2, 3, 4]), found(cache, [7, 8])) == ([1, 2], [7, 8])
    assert cache.num_bytes == 6 * PER_TOKEN


def test_what_the_round_reads_is_not_dropped_and_the_bound_holds() -> None:
    cache = filled(4, [1, 2, 3])
    cache.round += 1
    found(cache, [1, 2, 3])
    cache.add(*kept([7, 8]))
    cache.add(*kept([1, 2, 3, 4]))
    assert found(cache, [7, 8]) == []
    assert found(cache, [1, 2, 3, 4]) == [1, 2, 3, 4]
    cache.round += 1
    cache.add(*kept([5] * 5))  # more than there is room for at all: nothing is dropped for it
    assert found(cache, [1, 2, 3, 4]) == [1, 2, 3, 4]
