"""Samples -> one flat micro-batch, common prefixes laid out once. Never a pad token.

Samples are sorted by their ids, so equal prefixes are neighbors. The lengths of the neighbors' common prefixes
define a tree; a branching point is kept where it saves at least ``min_saved_tokens`` tokens. Laid out depth first, a
token's reach is the end of the subtree below it. Two prefixes are equal when their ids and pictures are; position ids
follow from these. An image is never cut: where two differ the prefix ends before them; a shared one is laid out once.

Every target keeps its own entry (a target inside a shared prefix is listed once per row), so sharing never changes
what is learned. All pairs of a group's samples that differ in preference are listed, the better one first. Nothing
here draws random numbers or depends on steps and ranks (``batching.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, permutations, zip_longest
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from taut.types import IntArray, Packed, Sample, depth_of
from taut.vision.placeholders import positions_of


class PackPolicy(NamedTuple):
    """How prefixes are shared."""

    share_prefixes: bool = True
    min_saved_tokens: int = 16
    """A prefix is shared where that saves at least this number of tokens."""


ALONE = PackPolicy(share_prefixes=False)
"""No shared prefixes."""
PICTURE = 1 << 31
"""More than any token id."""


def pack(samples: Sequence[Sample], policy: PackPolicy = PackPolicy()) -> Packed:  # noqa: B008 (a NamedTuple)
    """Lay samples out as one micro-batch; rows are in the order of the layout."""
    # the order of the tree, and how many leading tokens each sample has in common with the one before it
    order, shared = shared_prefixes(samples, policy)
    ordered = [samples[index] for index in order]
    num_tokens = sum(sample.num_tokens for sample in samples) - sum(shared)

    # depth first: a sample appends its own tokens; the tokens of the one before it that it does not share end here
    ids_T = np.empty(num_tokens, dtype=np.int64)
    reach_T = np.full(num_tokens, num_tokens, dtype=np.int64)
    indices: list[IntArray] = []
    """The flat index of every token of every sample."""
    path: IntArray = np.empty(0, dtype=np.int64)
    at = 0
    for sample, prefix in zip(ordered, shared, strict=True):
        new_tokens = np.arange(at, at + sample.num_tokens - prefix)
        reach_T[path[prefix:]] = at
        path = np.concatenate([path[:prefix], new_tokens])
        ids_T[path] = sample.ids_T
        indices.append(path)
        at += new_tokens.size

    # an image at its place in the layout; a shared one once
    media = tuple(
        replace(image, start=int(index_T[image.start]), stop=int(index_T[image.stop - 1]) + 1)
        for sample, index_T, prefix in zip(ordered, indices, shared, strict=True)
        for image in sample.media
        if image.start >= prefix
    )

    # tokens of an image that also see the later ones of that image
    last_T = None
    if any(image.is_two_way for image in media):
        last_T = torch.arange(num_tokens)
        for image in media:
            if image.is_two_way:
                last_T[image.start : image.stop] = image.stop - 1

    # targets, reads and values: each sample keeps its own, at the flat indices of its tokens
    better_P, worse_P = _pairs(ordered)
    return Packed(
        ids_T=torch.from_numpy(ids_T),
        reach_T=torch.from_numpy(reach_T),
        position_ids=_positions(ordered, indices, reach_T),
        predictor_N=_join(
            [index[s.target_at_N - 1] for s, index in zip(ordered, indices, strict=True)], np.int64
        ),
        target_N=_join([s.ids_T[s.target_at_N] for s in ordered], np.int64),
        weight_N=_join([s.weight_N for s in ordered], np.float64),
        row_N=_join([np.full(s.num_targets, row) for row, s in enumerate(ordered)], np.int64),
        read_R=_join(
            [index[_reads(s)] for s, index in zip(ordered, indices, strict=True)], np.int64
        ),
        row_R=_join([np.full(_reads(s).size, row) for row, s in enumerate(ordered)], np.int64),
        end_S=torch.tensor([int(index[-1]) for index in indices]),
        sample_ids=tuple(sample.id for sample in ordered),
        num_tokens_unshared=sum(sample.num_tokens for sample in ordered),
        streams={
            name: _join([sample.streams[name] for sample in ordered], np.float64)
            for name in ordered[0].streams
        },
        values={
            name: torch.tensor([sample.values[name] for sample in ordered], dtype=torch.float64)
            for name in ordered[0].values
        },
        read_values={
            name: _join([sample.read_values[name] for sample in ordered], np.float64)
            for name in ordered[0].read_values
        },
        better_P=better_P,
        worse_P=worse_P,
        last_T=last_T,
        media=media,
        spans=() if any(shared) else tuple((int(i[0]), int(i[-1]) + 1) for i in indices),
    )


def num_distinct_tokens(samples: Sequence[Sample], policy: PackPolicy) -> int:
    """Number of tokens that ``pack`` would lay out."""
    _, shared = shared_prefixes(samples, policy)
    return sum(sample.num_tokens for sample in samples) - sum(shared)


def shared_prefixes(samples: Sequence[Sample], policy: PackPolicy) -> tuple[list[int], list[int]]:
    """``(order, shared)``: the indices of the samples in the order in which they are laid out, and for each sample in
    that order the number of leading tokens that it shares with the previous one.
    """
    if not policy.share_prefixes or len(samples) == 1:
        return list(range(len(samples))), [0] * len(samples)
    # neighbors in sorted order have the longest common prefixes
    order = prefix_order(samples)
    common = [common_prefix(samples[left], samples[right]) for left, right in pairwise(order)]
    return order, branching([0, *common], policy.min_saved_tokens)


def branching(common: Sequence[int], min_saved_tokens: int) -> list[int]:
    """Each common prefix of sorted neighbors, lowered to the deepest branching point that saves enough: in a run of
    samples whose shortest common prefix is m, sharing the tokens between the branching point above and m saves
    (samples - 1) * (m - above).
    """
    # the run in which a prefix is the shortest lies between the nearest shorter prefixes on either side
    num_samples = len(common)
    depth = [-1, *common[1:], -1]
    start, stop = [0] * num_samples, [num_samples] * num_samples
    path = [0]
    for i in range(1, num_samples + 1):
        while depth[path[-1]] > depth[i]:
            stop[path.pop()] = i
        if i < num_samples:
            start[i] = start[path[-1]] if depth[path[-1]] == depth[i] else path[-1]
            path.append(i)

    # the longer of these two is the branching point above
    kept = [0] * (num_samples + 1)
    for i in sorted(range(1, num_samples), key=depth.__getitem__):
        above = kept[max(start[i], stop[i], key=depth.__getitem__)]
        saves = (stop[i] - start[i] - 1) * (depth[i] - above) >= min_saved_tokens
        kept[i] = depth[i] if saves else above
    return kept[:num_samples]


def prefix_order(samples: Sequence[Sample]) -> list[int]:
    """Indices of the samples, sorted by ids and pictures: equal prefixes become neighbors. Ties keep their order."""
    keys = [ids_with_pictures(s).astype(">u4").tobytes() for s in samples]  # bytes sort as numbers
    return sorted(range(len(samples)), key=keys.__getitem__)


def ids_with_pictures(sample: Sample) -> IntArray:
    """int64 [T]: the ids, with the first id of each image replaced by a number that identifies the image."""
    if not sample.media:
        return sample.ids_T
    ids_T = sample.ids_T.copy()
    for image in sample.media:
        ids_T[image.start] = PICTURE | int(image.picture.digest[:7], 16)
    return ids_T


def common_prefix(left: Sample, right: Sample) -> int:
    """Number of leading tokens that two samples share, images included."""
    size = min(left.num_tokens, right.num_tokens)
    for images in zip_longest(left.media, right.media) if left.media or right.media else ():
        keys = {
            image and (image.start, image.stop, image.grid, image.picture.digest)
            for image in images
        }
        if len(keys) > 1:
            size = min(size, *(image.start for image in images if image is not None))
            break
    differs = left.ids_T[:size] != right.ids_T[:size]
    return int(differs.argmax()) if differs.any() else size


def _positions(samples: list[Sample], indices: list[IntArray], reach_T: IntArray) -> Tensor:
    """The depth, or [3, T] where images are numbered in three dimensions."""
    depth_T = depth_of(reach_T)
    numbered = [positions_of(sample.num_tokens, sample.media) for sample in samples]
    if all(sample_positions is None for sample_positions in numbered):
        return torch.from_numpy(depth_T)
    positions = np.tile(depth_T, (3, 1))
    for sample_positions, index_T in zip(numbered, indices, strict=True):
        if sample_positions is not None:
            positions[:, index_T] = sample_positions
    return torch.from_numpy(positions)


def _reads(sample: Sample) -> IntArray:
    """Positions at which a scalar head is read."""
    return np.array([sample.num_tokens - 1]) if sample.read_at_R is None else sample.read_at_R


def _pairs(ordered: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Rows (better, worse) of all pairs of a group that differ in preference, in the order of groups."""
    members: dict[int, list[int]] = {}
    for row, sample in enumerate(ordered):
        if sample.group >= 0:
            members.setdefault(sample.group, []).append(row)
    pairs = [
        (better, worse)
        for _, rows in sorted(members.items())
        for better, worse in permutations(rows, 2)
        if ordered[better].values["preference"] > ordered[worse].values["preference"]
    ]
    pairs_P2 = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    return pairs_P2[:, 0], pairs_P2[:, 1]


def _join(arrays: Sequence[NDArray[np.generic]], dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(dtype))
