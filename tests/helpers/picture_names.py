"""Pictures that are only names, and samples that have some."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from taut.types import Media, Sample

PLACEHOLDER = 9
Piece = int | tuple[str, tuple[int, int, int]]
"""A token, or a picture's name and its grid."""


@dataclass(frozen=True)
class Named:
    """A picture that nobody opens."""

    source: str
    num_pictures: int = 1

    @property
    def content(self) -> str:
        return hashlib.sha256(self.source.encode()).hexdigest()

    @property
    def digest(self) -> str:
        return self.content

    def expect(self) -> None: ...

    def tensors(self) -> Mapping[str, Tensor]:
        raise AssertionError("nobody looks at this picture")


def illustrated(
    name: str, pieces: Sequence[Piece], *, two_way: bool = False, flat: bool = False
) -> Sample:
    """Every token but the first and the placeholders is a target. ``flat``: pictures are numbered as text."""
    ids: list[int] = []
    media: list[Media] = []
    for piece in pieces:
        if isinstance(piece, int):
            ids.append(piece)
            continue
        title, grid = piece
        stop = len(ids) + int(np.prod(grid))
        media.append(Media(Named(title), len(ids), stop, None if flat else grid, two_way))
        ids += [PLACEHOLDER] * (stop - len(ids))
    at_N = np.array([i for i, token in enumerate(ids) if i and token != PLACEHOLDER], dtype=int)
    return Sample(name, np.array(ids), at_N, np.ones(at_N.size), media=tuple(media))
