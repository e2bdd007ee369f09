"""Completions that end leave their neighbours as they were, and few places behind."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from taut.attention.decode import Decoding, Group, Own, Stretch, stack
from taut.attention.layout import Call

LAYER = nn.Identity()
CALL = Call(scale=0.5)
ENDS = (1, 9, 2, 9, 9, 9, 4, 9, 9, 3)
"""After which step each of ten completions ends: five of one prompt, five of another."""


def stretches(lengths: tuple[int, ...], random: torch.Generator) -> list[Stretch]:
    num_tokens = sum(lengths)
    key, value = torch.randn(2, 1, 2, num_tokens, 4, dtype=torch.float64, generator=random)
    spans = list(pairwise(accumulate(lengths, initial=0)))
    return stack({LAYER: (key, value)}, spans, [0] * len(lengths))


def decode(groups: list[Group], rows: list[int], tokens: list[Tensor]) -> list[Tensor]:
    """What attention gives each completion ([steps, heads, K]), and the groups as they are left."""
    found: list[list[Tensor]] = [[] for _ in ENDS]
    for step, token in enumerate(tokens, start=1):
        if not rows:
            break
        query, key, value = (x[:, rows].unsqueeze(0) for x in token.split([4, 2, 2]))
        decoding = Decoding([group for group in groups if group.num_rows])
        out = decoding.attend(LAYER, query, key, value, CALL)
        for at, row in enumerate(rows):
            found[row].append(out[0, :, at])
        is_live = [ENDS[row] != step for row in rows]
        decoding.advance(is_live)
        rows = [row for row, stays in zip(rows, is_live, strict=True) if stays]
    return [torch.stack(some) if some else torch.empty(0) for some in found]


def test_the_others_are_as_if_alone_and_few_places_are_kept_for_the_ended() -> None:
    random = torch.Generator().manual_seed(0)
    paths = [(stretch,) for stretch in stretches((6, 3), random)]
    tokens = [torch.randn(8, 10, 4, dtype=torch.float64, generator=random) for _ in range(9)]
    own = Own(9)
    for _ in paths:
        assert own.takes(9)
        own.join(5)
    groups = [Group(path, size, own, 5) for path, size in zip(paths, (6, 3), strict=True)]
    found = decode(groups, list(range(10)), tokens)
    assert [len(some) for some in found] == list(ENDS)
    assert (own.num_places, own.length) == (7, 9)
    assert not own.takes(9)
    for row, some in enumerate(found):
        alone = Own(9)
        alone.join(1)
        path, size = ((paths[0], 6), (paths[1], 3))[row // 5]
        expected = decode([Group(path, size, alone, 1)], [row], tokens)[row]
        torch.testing.assert_close(some, expected, rtol=1e-12, atol=1e-12)
