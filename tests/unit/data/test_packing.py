"""Packing held to a brute-force trie, and to what each sample can see."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.tiny_samples import nested_family, sample

from taut.attention.layout import Layout
from taut.data.packing import (
    ALONE,
    PackPolicy,
    branching,
    num_distinct_tokens,
    pack,
    prefix_order,
)
from taut.types import Packed, Sample

SHARE_ALL = PackPolicy(True, 1)

paths = st.lists(st.integers(0, 2), min_size=1, max_size=14)
families = st.lists(paths, min_size=1, max_size=9)


def family(rows: Sequence[list[int]]) -> list[Sample]:
    """Every token but the first is a target."""
    return [sample(f"s{index}", row, 1, seed=index) for index, row in enumerate(rows)]


def trie_tokens(rows: list[list[int]], min_saved: int, above: int = 0) -> int:
    """Tokens of the tree below ``above`` shared tokens, by the rule, on lists."""
    if len(rows) == 1:
        return len(rows[0]) - above
    common = above
    while all(len(row) > common for row in rows) and len({row[common] for row in rows}) == 1:
        common += 1
    kept = common if (len(rows) - 1) * (common - above) >= min_saved else above
    children: dict[int, list[list[int]]] = defaultdict(list)
    total = kept - above
    for row in rows:
        if len(row) == common:
            total += common - kept
        else:
            children[row[common]].append(row)
    return total + sum(trie_tokens(child, min_saved, kept) for child in children.values())


def seen_by(packed: Packed, token: int) -> list[int]:
    """The ids a token sees, itself included, in order."""
    k = torch.arange(token + 1)
    return packed.ids_T[k[packed.reach_T[: token + 1] > token]].tolist()


def require_faithful(packed: Packed, samples: Sequence[Sample]) -> None:
    """Every sample's last token and every predictor see exactly the sample's own ids; no target is lost."""
    Layout(packed.reach_T.numpy())  # asserts that reach is laminar
    by_id = {s.id: s for s in samples}
    assert sorted(packed.sample_ids) == sorted(by_id)
    assert packed.num_targets == sum(s.num_targets for s in samples)
    for row, read in zip(packed.row_R.tolist(), packed.read_R.tolist(), strict=True):
        assert seen_by(packed, read) == by_id[packed.sample_ids[row]].ids_T.tolist()
    for row, sample_id in enumerate(packed.sample_ids):
        own, is_row = by_id[sample_id], packed.row_N == row
        assert packed.target_N[is_row].tolist() == own.ids_T[own.target_at_N].tolist()
        assert packed.weight_N[is_row].tolist() == own.weight_N.tolist()
        for at, predictor in zip(own.target_at_N, packed.predictor_N[is_row].tolist(), strict=True):
            assert seen_by(packed, predictor) == own.ids_T[:at].tolist()


@settings(max_examples=150, deadline=None)
@given(families, st.integers(1, 20))
def test_trees_equal_a_brute_force_trie(rows: list[list[int]], min_saved: int) -> None:
    samples, policy = family(rows), PackPolicy(True, min_saved)
    packed = pack(samples, policy)
    require_faithful(packed, samples)
    assert packed.num_tokens == trie_tokens(rows, min_saved)
    assert num_distinct_tokens(samples, policy) == packed.num_tokens
    assert packed.num_tokens_unshared == sum(map(len, rows))
    assert packed.position_ids.tolist() == Layout(packed.reach_T.numpy()).depth_T.tolist()


@settings(max_examples=50, deadline=None)
@given(families, st.randoms(use_true_random=False))
def test_order_of_samples_does_not_change_the_tree(rows: list[list[int]], random: object) -> None:
    samples = family(rows)
    shuffled = samples[:]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = pack(samples, SHARE_ALL), pack(shuffled, SHARE_ALL)
    require_faithful(other, samples)
    assert one.ids_T.tolist() == other.ids_T.tolist()
    assert one.reach_T.tolist() == other.reach_T.tolist()


@settings(max_examples=50, deadline=None)
@given(families)
def test_alone_lays_each_sample_out_by_itself(rows: list[list[int]]) -> None:
    samples = family(rows)
    packed = pack(samples, ALONE)
    require_faithful(packed, samples)
    assert packed.num_tokens == packed.num_tokens_unshared
    assert packed.sample_ids == tuple(s.id for s in samples)
    for (start, stop), own in zip(packed.spans, samples, strict=True):
        assert packed.ids_T[start:stop].tolist() == own.ids_T.tolist()
        assert packed.reach_T[start:stop].tolist() == [stop] * own.num_tokens


@pytest.mark.parametrize(
    ("min_saved", "num_tokens"),
    [
        (1, 10 + 2 + 3 * 4),  # prompt, the longer prefix of two of them, three answers
        (2, 10 + 2 + 3 * 4),
        (3, 10 + 4 + 6 + 6),  # the inner branching saves 2: not enough
        (20, 10 + 4 + 6 + 6),  # the prompt saves 20: just enough
        (21, 14 + 16 + 16),
    ],
)
def test_a_prefix_is_merged_where_it_saves_enough(min_saved: int, num_tokens: int) -> None:
    prompt = list(range(10))
    samples = [
        sample("a", [*prompt, 20, 21, 22, 23]),
        sample("b", [*prompt, 30, 31, 40, 41, 42, 43]),
        sample("c", [*prompt, 30, 31, 50, 51, 52, 53]),
    ]
    packed = pack(samples, PackPolicy(True, min_saved))
    assert packed.num_tokens == num_tokens
    assert bool(packed.spans) == (num_tokens == packed.num_tokens_unshared)
    require_faithful(packed, samples)


def test_saving_is_counted_over_all_samples_of_a_branching() -> None:
    """Nine samples that share 2 tokens save 16: worth it; two of them would save 2."""
    samples = [sample(str(i), [1, 2, 10 + i]) for i in range(9)]
    assert pack(samples, PackPolicy(True, 16)).num_tokens == 2 + 9
    assert pack(samples[:2], PackPolicy(True, 16)).num_tokens == 6


def test_duplicates_and_a_sample_that_is_a_prefix() -> None:
    samples = [sample("x", [1, 2, 3, 4]), sample("y", [1, 2, 3, 4]), sample("inner", [1, 2])]
    packed = pack(samples, SHARE_ALL)
    assert packed.ids_T.tolist() == [1, 2, 3, 4]
    assert packed.reach_T.tolist() == [4, 4, 4, 4]
    assert dict(zip(packed.sample_ids, packed.read_R.tolist(), strict=True)) == {
        "x": 3,
        "y": 3,
        "inner": 1,
    }
    require_faithful(packed, samples)


def test_targets_inside_a_shared_prefix_are_listed_once_per_row() -> None:
    samples = [sample("a", [1, 2, 3, 4], 1, seed=1), sample("b", [1, 2, 3, 5], 2, seed=2)]
    packed = pack(samples, SHARE_ALL)
    assert packed.ids_T.tolist() == [1, 2, 3, 4, 5]
    assert list(
        zip(
            packed.predictor_N.tolist(),
            packed.target_N.tolist(),
            packed.row_N.tolist(),
            strict=True,
        )
    ) == [
        (0, 2, 0),
        (1, 3, 0),
        (2, 4, 0),
        (1, 3, 1),
        (2, 5, 1),
    ]
    assert packed.weight_N.tolist() == [w for s in samples for w in s.weight_N]
    require_faithful(pack(nested_family(97), SHARE_ALL), nested_family(97))


def test_streams_follow_their_targets() -> None:
    samples = [
        Sample(s.id, s.ids_T, s.target_at_N, s.weight_N, streams={"old_logp_N": s.weight_N * 2})
        for s in nested_family(97)
    ]
    packed = pack(samples, SHARE_ALL)
    torch.testing.assert_close(packed.streams["old_logp_N"], packed.weight_N * 2, rtol=0, atol=0)


def test_token_ids_beyond_16_bit_sort_as_numbers() -> None:
    samples = [sample("big", [70_000, 1]), sample("small", [255, 1]), sample("middle", [256, 1])]
    assert [samples[index].id for index in prefix_order(samples)] == ["small", "middle", "big"]


@given(st.lists(st.integers(0, 20), max_size=14), st.integers(0, 16))
def test_a_branching_point_is_kept_where_it_saves_enough(common: list[int], min_saved: int) -> None:
    """By definition: of a run, its shortest common prefix, then the runs between where that is."""
    kept = [0] * (len(common) + 1)
    runs = [(0, len(kept), 0)]
    while runs:
        start, stop, above = runs.pop()
        if stop - start < 2:
            continue
        inner = range(start + 1, stop)
        shortest = min(common[i - 1] for i in inner)
        if (stop - start - 1) * (shortest - above) >= min_saved:
            above = shortest
        cuts = [i for i in inner if common[i - 1] == shortest]
        for i in cuts:
            kept[i] = above
        runs += [(left, right, above) for left, right in pairwise([start, *cuts, stop])]
    assert branching([0, *common], min_saved) == kept
