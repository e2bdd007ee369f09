"""What the checks of pictures share: why there is nothing to ask, and pictures that stand for others.

A stand-in has the size of the picture it takes the place of, and noise in place of its colours; the same wherever and
whenever. Samples are the session's pair: two with pictures, where so many have some.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from taut.checks.finding import Finding, skipped
from taut.checks.samples import num_tokens, whole
from taut.checks.session import PROBE_TOKENS, Session
from taut.types import Picture, Sample

SAMPLES = 4
TOKENS = 768
"""Of all samples with pictures of different sizes, but for the first."""


def obstacle(session: Session) -> Finding | None:
    """Why nothing is asked; None: something is."""
    if session.inputs.renderer.album is None:
        return skipped("the model takes no pictures")
    return None if session.pictured else skipped("no row has a picture")


def several(session: Session) -> list[Sample]:
    """Samples with pictures of different sizes, the smallest first."""
    chosen: list[Sample] = []
    sizes: set[tuple[int, Any]] = set()
    for index in session.pictured:
        sample = whole(session.train[index], PROBE_TOKENS)
        own = {(one.stop - one.start, one.grid) for one in sample.media}
        if own <= sizes:
            continue
        if chosen and (len(chosen) == SAMPLES or num_tokens([*chosen, sample]) > TOKENS):
            break
        sizes |= own
        chosen.append(sample)
    return chosen


@dataclass(frozen=True)
class StandIn:
    """A picture of noise."""

    original: Picture

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"noise for {self.original.digest}".encode()).hexdigest()

    @property
    def source(self) -> str:
        return f"noise for {self.original.source}"

    @property
    def content(self) -> str:
        return self.digest

    @property
    def num_pictures(self) -> int:
        return self.original.num_pictures

    def expect(self) -> None:
        self.original.expect()

    def tensors(self) -> Mapping[str, Tensor]:
        tensors = self.original.tensors().items()
        return {name: _noise(it) if it.is_floating_point() else it for name, it in tensors}


def _noise(like: Tensor) -> Tensor:
    """Waves along every axis, which is more than a colour that all of it has."""
    size = math.prod(like.shape)
    return (0.7 * torch.arange(size, dtype=torch.float64)).sin().reshape(like.shape).to(like)


def with_others(sample: Sample) -> Sample:
    """The same with stand-ins for all its pictures."""
    media = tuple(replace(one, picture=StandIn(one.picture)) for one in sample.media)
    return replace(sample, id=f"{sample.id} with other pictures", media=media)


class Swapped(NamedTuple):
    """What the model says of a sample and of the one it is packed with, before and after its pictures are others."""

    sample: Sample
    beside: Sample | None
    """None: the model packs nothing."""
    own: tuple[Tensor, Tensor]
    """After its first picture."""
    others: tuple[Tensor, Tensor]
    whole: Tensor
    """All of the sample with other pictures."""


def swapped(session: Session) -> list[Swapped]:
    """Each of the pair that has pictures. Two forwards at most, beside those that all checks share."""
    found = []
    for sample, beside in (session.pair, session.pair[::-1]):
        if not sample.media:
            continue
        other, is_packed = with_others(sample), session.loaded.one_sample is None
        layout = [{sample.id: other}.get(one.id, one) for one in session.pair]
        after = session.numbers(layout if is_packed else [other])
        before = session.packed if is_packed else session.alone
        seen = sample.target_at_N >= sample.media[0].stop
        own = before[sample.id][seen], after[other.id][seen]
        nothing = before[sample.id][:0]
        others = (before[beside.id], after[beside.id]) if is_packed else (nothing, nothing)
        company = beside if is_packed else None
        found.append(Swapped(sample, company, own, others, after[other.id]))
    return found
