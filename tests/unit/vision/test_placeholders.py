"""Positions of samples with pictures, held to the number that follows."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.picture_names import illustrated

from taut.vision.placeholders import next_position, positions_of

grids = st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(1, 4))
pieces = st.lists(st.one_of(st.integers(0, 2), st.tuples(st.just("a"), grids)), min_size=1)


@given(pieces)
@settings(max_examples=50, deadline=None)
def test_the_next_token_has_the_next_number(
    row: list[int | tuple[str, tuple[int, int, int]]],
) -> None:
    sample = illustrated("one", [*row, 1])
    found = positions_of(sample.num_tokens, sample.media)
    last = sample.num_tokens - 1 if found is None else int(found[0, -1])
    assert next_position(sample.num_tokens - 1, sample.media) == last
    assert found is None or found[:, :-1].max(initial=-1) == last - 1


def test_without_grids_positions_are_the_depth() -> None:
    assert positions_of(7, illustrated("one", [("a", (1, 2, 3)), 1], flat=True).media) is None
    assert next_position(7, ()) == 7
