"""Pictures in the model: as many features as placeholders, numbered as the library numbers them, visible to their own
sample alone.

A stand-in has the size of the picture it replaces, and the same random colors every time. Samples are the session's
pair: two with pictures, if there are that many.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from taut.checks.measure import drift, gap, replace_tokens
from taut.checks.registry import Finding, check, failed, passed, skip_if, split_error
from taut.checks.session import PROBE_TOKENS, Session, beginning, num_tokens, once
from taut.data.packing import ALONE, PackPolicy, pack
from taut.errors import ModelError
from taut.models import architecture
from taut.types import Picture, Sample
from taut.vision import tower


def _require_pictures(session: Session) -> None:
    """Skip a check of pictures if there are none."""
    skip_if(session.inputs.renderer.image_store is None, "the model takes no pictures")
    skip_if(not session.with_pictures, "no row has a picture")


@once
def _samples_of_all_sizes(session: Session) -> list[Sample]:
    """Samples with pictures of different sizes, the smallest first."""
    chosen: list[Sample] = []
    sizes: set[tuple[int, Any]] = set()
    for index in session.with_pictures:
        sample = beginning(session.train[index], PROBE_TOKENS)
        new_sizes = {(media.stop - media.start, media.grid) for media in sample.media} - sizes
        if not new_sizes:
            continue
        if chosen and (len(chosen) == 4 or num_tokens([*chosen, sample]) > 768):
            break
        sizes |= new_sizes
        chosen.append(sample)
    return chosen


@check("vision.placeholders", after=["data.packing"])
def pictures_have_a_feature_for_each_placeholder(session: Session) -> Finding:
    """Does each picture have as many features as placeholders?

    The real tower is run on some of the user's own pictures, of as many sizes as there are among the first. That the
    number of placeholders follows from a picture's size was proven when the data were read. With another number the
    library stops, or shifts every picture after it.
    """
    _require_pictures(session)
    samples = _samples_of_all_sizes(session)
    for sample in samples:
        try:
            session.numbers([sample])
        except ModelError as error:
            says, remedy = split_error(error)
            return failed(
                "the vision tower gives another number of features than there are placeholders",
                evidence=[f"{sample.id}: {says}"],
                remedy=remedy,
            )
    number = sum(len(sample.media) for sample in samples)
    return passed("as many features as placeholders", number, "pictures")


@check("vision.positions", after=["vision.placeholders"])
def pictures_are_numbered_as_the_library_does(session: Session) -> Finding:
    """Are tokens and pictures numbered in a pack as the library numbers them alone?

    Packed and with a prefix shared, against each alone: by ``get_rope_index`` if the model numbers pictures in three
    dimensions, else by depth.
    """
    _require_pictures(session)
    first, *others = _samples_of_all_sizes(session)
    other_end = replace_tokens(
        session, first, [first.num_tokens - 1], f"{first.id} with another end"
    )
    samples = {sample.id: sample for sample in (first, *others, other_end, session.pair[1])}
    backbone = architecture.decoder(session.model)
    number_by_library: Any = getattr(backbone, "get_rope_index", None)
    # positions of each alone, by the library where it numbers pictures
    alone: dict[str, Tensor] = {}  # [1, T] or [3, T]
    for name, sample in samples.items():
        if number_by_library is None or not sample.media:
            alone[name] = torch.arange(sample.num_tokens)[None]
            continue
        ids_T = torch.from_numpy(sample.ids_T)
        arguments = tower.library_arguments(backbone, sample.media, ids_T).items()
        sizes = {key: value.cpu() for key, value in arguments if not value.is_floating_point()}
        alone[name] = number_by_library(input_ids=ids_T[None], **sizes)[0][:, 0]
    number = 0
    # the same in a pack
    for how, policy in {"packed": ALONE, "with a prefix shared": PackPolicy(True, 1)}.items():
        packed = pack(list(samples.values()), policy)
        for row, name in enumerate(packed.sample_ids):
            last_read = packed.read_R[packed.row_R == row][-1]
            path = (packed.reach_T[: last_read + 1] > last_read).nonzero()[:, 0]
            positions = packed.position_ids.reshape(-1, packed.num_tokens)[:, path]
            expected = alone[name][:, : positions.shape[1]].expand(positions.shape)
            number += positions.shape[1]
            is_wrong_T = (positions != expected).any(0)
            if not is_wrong_T.any():
                continue
            at, num_wrong = int(is_wrong_T.int().argmax()), int(is_wrong_T.sum())
            token = session.inputs.token(int(samples[name].ids_T[at]))
            return failed(
                f"{how}, {num_wrong} of {is_wrong_T.numel()} tokens of {name} have other positions",
                measured=(num_wrong, f"of {is_wrong_T.numel()} tokens"),
                evidence=f"token {at}, {token!r}: {positions[:, at].tolist()}, by the library "
                f"{expected[:, at].tolist()}",
                remedy="the model would see pictures elsewhere than it was taught to; train with the version of "
                "transformers that taut names, and please report this",
            )
    what = "in three dimensions" if number_by_library else "by depth"
    return passed(f"{what}, as alone", number, "tokens")


@dataclass(frozen=True)
class StandIn:
    """A picture of noise, or a blank one, in the size of another one, which it replaces in a check."""

    original: Picture
    is_blank: bool = False

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"{self.is_blank} {self.original.digest}".encode()).hexdigest()

    @property
    def source(self) -> str:
        return f"{'blank' if self.is_blank else 'noise'} for {self.original.source}"

    @property
    def content(self) -> str:
        return self.digest

    @property
    def num_pictures(self) -> int:
        return self.original.num_pictures

    def expect(self) -> None:
        self.original.expect()

    def tensors(self) -> Mapping[str, Tensor]:
        tensors = dict(self.original.tensors())
        for name, value in tensors.items():
            if value.is_floating_point():  # waves along every axis: not one color everywhere
                waves = (0.7 * torch.arange(value.numel(), dtype=torch.float64)).sin()
                tensors[name] = waves.reshape(value.shape).to(value) * (not self.is_blank)
        return tensors


def _with_stand_ins(sample: Sample) -> Sample:
    """Copy a sample with stand-ins for all its pictures."""
    media = tuple(replace(shown, picture=StandIn(shown.picture)) for shown in sample.media)
    return replace(sample, id=f"{sample.id} with other pictures", media=media)


class Swap(NamedTuple):
    """A sample, the same with other pictures, and its neighbor in the pack."""

    sample: Sample
    other: Sample
    neighbor: Sample
    before: dict[str, Tensor]
    """The numbers of the sample and, if the model packs, of its neighbor."""
    after: dict[str, Tensor]
    """Those of the other sample and the neighbor."""


@once
def _swaps(session: Session) -> list[Swap]:
    """Swap the pictures of each sample of the pair that has some. At most two forwards beyond the shared ones."""
    is_packed = session.loaded.one_sample is None
    before = session.packed if is_packed else session.alone
    swaps = []
    for sample, neighbor in (session.pair, session.pair[::-1]):
        if sample.media:
            other = _with_stand_ins(sample)
            order = [other if original.id == sample.id else original for original in session.pair]
            after = session.numbers(order if is_packed else [other])
            swaps.append(Swap(sample, other, neighbor, before, after))
    return swaps


@check("vision.swapped", after=["attention.neighbor"])
def another_picture_changes_the_answer(session: Session) -> Finding:
    """Does another picture change what the model says after it?

    Logprobs that are equal to the last bit mean that the model answers without having seen the picture. How much they
    change says nothing yet: that is what training is for.
    """
    _require_pictures(session)
    quantity = session.quantity
    moves = {}
    for sample, other, _, before, after in _swaps(session):
        is_later = sample.target_at_N >= sample.media[0].stop
        moves[sample.id] = gap(before[sample.id][is_later], after[other.id][is_later])
    blind = [name for name, moved in moves.items() if not moved > 0.0]
    if blind:
        return failed(
            f"another picture changes no {quantity.one.removeprefix('a ')} of {blind[0]}",
            measured=(0.0, quantity.unit),
            evidence=[f"{name}: noise in place of its pictures" for name in blind],
            remedy="the picture does not reach the language model (a projector of zeros, lost features); take the "
            "checkpoint that the model came with, and please report the model",
        )
    return passed(f"another picture changes {quantity.many}", min(moves.values()), quantity.unit)


@check("vision.neighbor", after=["vision.swapped"])
def a_neighbors_picture_changes_nothing(session: Session) -> Finding:
    """Does a neighbor's picture change nothing?

    Asked packed, and with prefixes shared, where two pictures of one size are two prefixes. Also: two of the user's own
    pictures that differ have different digests, which tell them apart.
    """
    _require_pictures(session)
    remedy = "pictures are mixed up between samples; set batch.share_prefixes=false, and please report the model"
    # different pictures have different digests
    first_with: dict[str, tuple[str, str]] = {}
    mistaken = []
    for index in session.with_pictures:
        sample = session.train[index]
        for picture in (media.picture for media in sample.media):
            known = first_with.setdefault(picture.digest, (picture.content, picture.source))
            if known[0] != picture.content:
                mistaken.append(f"{sample.id}: {picture.source} is taken for {known[1]}")
    if mistaken:
        return failed(
            "two different pictures are taken for one",
            measured=(mistaken, "pictures"),
            remedy=remedy,
        )
    skip_if(session.loaded.one_sample, f"nothing is packed: {session.loaded.one_sample}")
    swaps = _swaps(session)
    # a picture changes no number of its neighbor, packed or with prefixes shared
    moves: list[tuple[str, float, float]] = []  # which numbers, how far they move and may move
    for sample, _, neighbor, before, after in swaps:
        moved = gap(before[neighbor.id], after[neighbor.id])
        moves.append((f"{neighbor.id}, packed with {sample.id}", moved, session.exact))
    if session.trainer.policy.share_prefixes:
        sample, other, neighbor, _, after = swaps[0]
        with session.inference():  # once around all: autocast keeps its casts
            shared = session.numbers([sample, other, neighbor], PackPolicy(min_saved_tokens=1))
            packed = {**session.numbers(session.pair), other.id: after[other.id]}
        for name, numbers in shared.items():
            moved = drift(numbers, packed[name])
            moves.append((f"{name}, with prefixes shared", moved, session.tolerance))
    worst, quantity = 0.0, session.quantity
    for where, moved, limit in moves:
        if moved > limit:
            says = f"a neighbor's picture changes {quantity.one} by {moved:.3g} {quantity.unit}"
            return failed(says, measured=(moved, quantity.unit), evidence=[where], remedy=remedy)
        worst = max(worst, moved)
    return passed("a neighbor's picture changes nothing", worst, quantity.unit)
