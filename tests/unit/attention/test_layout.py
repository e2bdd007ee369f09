"""Everything derived from reach, against the definition."""

from __future__ import annotations

import numpy as np
import pytest

from taut.attention.layout import Layout
from taut.types import depth_of

# A tree written out: a prompt of 3 [0, 3) with the branches [3, 5) and [5, 9), the latter with [7, 8) and [8, 9) below
# its first two tokens; then a sample of 2.
REACH = np.array([9, 9, 9, 5, 5, 9, 9, 8, 9, 11, 11])


def test_depth_counts_visible_earlier_tokens() -> None:
    assert depth_of(REACH).tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 5, 0, 1]


def test_segments_and_paths() -> None:
    layout = Layout(REACH)
    bounds = [(s.start, s.stop, s.reach, s.depth, s.parent) for s in layout.segments]
    assert bounds == [
        (0, 3, 9, 0, -1),
        (3, 5, 5, 3, 0),
        (5, 7, 9, 3, 0),
        (7, 8, 8, 5, 2),
        (8, 9, 9, 5, 2),
        (9, 11, 11, 0, -1),
    ]
    assert layout.paths[4].tolist() == [0, 1, 2, 5, 6, 8]
    assert not layout.is_flat
    assert layout.num_pairs() == int((layout.depth_T + 1).sum())


def test_dense_mask_is_the_definition() -> None:
    mask = Layout(REACH).dense_mask()
    for q in range(REACH.size):
        for k in range(REACH.size):
            assert bool(mask[q, k]) == (k <= q < REACH[k])


def test_window_counts_depth_not_the_flat_index() -> None:
    mask = Layout(REACH).dense_mask(window=2)
    assert mask[5].nonzero().flatten().tolist() == [
        2,
        5,
    ]  # flat neighbors 3 and 4 are on another branch


def test_a_block_sees_itself_both_ways() -> None:
    last = np.array([0, 2, 2, 3])
    mask = Layout(np.array([4, 4, 4, 4]), last).dense_mask(window=1)
    assert mask.tolist() == [
        [True, False, False, False],
        [False, True, True, False],
        [False, False, True, False],  # the window is for what lies before
        [False, False, False, True],
    ]


@pytest.mark.parametrize(
    "reach",
    [[1, 1], [3, 2], [2, 3, 3], [4, 3, 4, 4]],
    ids=["behind", "beyond", "crossing", "inner"],
)
def test_what_is_not_laminar_is_refused(reach: list[int]) -> None:
    with pytest.raises(AssertionError):
        Layout(np.array(reach))


def test_a_tree_may_not_cut_a_block() -> None:
    with pytest.raises(AssertionError, match="cuts a block"):
        Layout(np.array([3, 2, 3]), np.array([0, 2, 2]))
