"""Samples with pictures in a pack: two are one prefix only where the pictures are, and none is cut."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.picture_names import Piece, illustrated

from taut.attention.layout import Layout
from taut.data.batching import prefix_groups
from taut.data.packing import ALONE, PackPolicy, common_prefix, pack
from taut.types import Sample
from taut.vision.placeholders import positions_of

SHARE_ALL = PackPolicy(True, 1)
WIDE = (1, 2, 3)

pieces = st.one_of(
    st.integers(0, 2), st.sampled_from([("a", WIDE), ("b", WIDE), ("c", (1, 1, 1)), ("d", WIDE)])
)
rows = st.lists(st.lists(pieces, min_size=1, max_size=6), min_size=2, max_size=7)


def shared_pieces(left: list[Piece], right: list[Piece]) -> list[Piece]:
    found: list[Piece] = []
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        found.append(one)
    return found


def num_tokens(row: list[Piece]) -> int:
    return sum(1 if isinstance(piece, int) else int(np.prod(piece[1])) for piece in row)


@given(rows)
@settings(max_examples=80, deadline=None)
def test_a_pack_is_its_samples_whatever_they_share(family: list[list[Piece]]) -> None:
    samples = [illustrated(f"s{i}", row) for i, row in enumerate(family)]
    for left, one in zip(family, samples, strict=True):
        for right, other in zip(family, samples, strict=True):
            assert common_prefix(one, other) == num_tokens(shared_pieces(left, right))
    for policy in (ALONE, SHARE_ALL):
        packed = pack(samples, policy)
        layout = Layout(packed.reach_T.numpy())
        by_id = {sample.id: sample for sample in samples}
        seen = set()
        for row, name in enumerate(packed.sample_ids):
            sample = by_id[name]
            last = int(packed.read_R[packed.row_R == row][0])
            path = np.flatnonzero((layout.reach_T > last) & (np.arange(layout.num_tokens) <= last))
            np.testing.assert_array_equal(packed.ids_T[path], sample.ids_T)
            own = positions_of(sample.num_tokens, sample.media)
            expected = np.arange(sample.num_tokens) if own is None else own
            assert (packed.position_ids[..., path].numpy() == expected).all()
            for one in sample.media:
                found = [m for m in packed.media if m.start == path[one.start]]
                assert [m.picture.digest for m in found] == [one.picture.digest]
                assert found[0].stop - 1 == path[one.stop - 1]
                seen.add(found[0].start)
        assert sorted(seen) == [one.start for one in packed.media]


def test_equal_grids_are_no_equal_prefixes() -> None:
    one, other = (illustrated(name, [1, (name, WIDE), 2]) for name in "ab")
    assert common_prefix(one, other) == 1
    assert common_prefix(one, illustrated("c", [1, ("a", WIDE), 3])) == 7


def test_a_picture_sorts_its_samples_together() -> None:
    """A, B, A of one grid: both As must become neighbors, or they would share nothing."""
    samples = [illustrated(f"{name}{i}", [(name, WIDE), i]) for i, name in enumerate("abab")]
    assert pack(samples, SHARE_ALL).num_tokens == 2 * 6 + 4
    assert prefix_groups(samples, 6).tolist() in ([0, 1, 0, 1], [1, 0, 1, 0])


def test_a_small_picture_is_document_enough() -> None:
    rows = [[0, 1, (name, WIDE), i] for i, name in enumerate("abab")]
    groups = prefix_groups([illustrated(f"s{i}", row) for i, row in enumerate(rows)], 64)
    assert groups.tolist() in ([0, 1, 0, 1], [1, 0, 1, 0])
    text = [illustrated(f"t{i}", [0, 1, 2, 0, i]) for i in range(2)]
    assert len(set(prefix_groups(text, 64).tolist())) == 2


def test_two_way_blocks_name_their_last_token() -> None:
    samples = [
        illustrated("one", [1, ("a", WIDE), 2], two_way=True, flat=True),
        illustrated("two", [1, ("a", WIDE), 3], two_way=True, flat=True),
        illustrated("text", [4, 5]),
    ]
    packed = pack(samples, SHARE_ALL)
    assert packed.last_T is not None
    assert packed.last_T.tolist() == [0, 6, 6, 6, 6, 6, 6, 7, 8, 9, 10]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 7, 0, 1]
    assert pack([samples[2]], SHARE_ALL).last_T is None


def test_text_beside_pictures_is_numbered_alike_on_every_axis() -> None:
    text = illustrated("text", [4, 5, 6])
    packed = pack([illustrated("one", [("a", (1, 1, 2)), 2]), text], ALONE)
    assert packed.position_ids.tolist() == [
        [0, 0, 2, 0, 1, 2],
        [0, 0, 2, 0, 1, 2],
        [0, 1, 2, 0, 1, 2],
    ]


def test_a_token_after_pictures_follows_the_largest_number() -> None:
    sample: Sample = illustrated("one", [1, ("a", (1, 2, 2)), 2, ("b", (1, 1, 3)), 3])
    found = positions_of(sample.num_tokens, sample.media)
    assert found is not None
    assert found.tolist() == [
        [0, 1, 1, 1, 1, 3, 4, 4, 4, 7],
        [0, 1, 1, 2, 2, 3, 4, 4, 4, 7],
        [0, 1, 2, 1, 2, 3, 4, 5, 6, 7],
    ]
