"""Position ids of samples with pictures as they are laid out, packed and with a prefix shared, against each alone: as
the library numbers it where the model numbers pictures in three dimensions (``get_rope_index``), else by depth.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from taut.checks.differ import changed
from taut.checks.finding import Finding, failed, passed
from taut.checks.session import Session
from taut.checks.vision.shown import obstacle, several
from taut.data.packing import ALONE, PackPolicy, pack
from taut.models import architecture
from taut.types import Packed, Sample
from taut.vision import tower


def ask(session: Session) -> Finding:
    """Are tokens and pictures numbered in a pack as the library numbers them alone?"""
    why_not = obstacle(session)
    if why_not is not None:
        return why_not
    first, *others = session.once(several)
    again = changed(session, first, [first.num_tokens - 1], f"{first.id} with another end")
    samples = {one.id: one for one in (first, *others, again, session.pair[1])}
    numbered = {name: _alone(session, one) for name, one in samples.items()}
    number = 0
    for how, policy in {"packed": ALONE, "with a prefix shared": PackPolicy(True, 1)}.items():
        packed = pack(list(samples.values()), policy)
        for row, name in enumerate(packed.sample_ids):
            found, theirs = _laid_out(packed, row), numbered[name]
            expected = theirs[:, : found.shape[1]].expand(found.shape)
            number += found.shape[1]
            if not torch.equal(found, expected):
                return _failed(session, how, samples[name], found, expected)
    what = "in three dimensions" if _numbers(session) else "by depth"
    return passed(f"{what}, as alone", number, "tokens")


def _laid_out(packed: Packed, row: int) -> Tensor:
    """The position ids of a sample in a micro-batch, [1, T] or [3, T], up to where it is last read."""
    read = packed.read_R[packed.row_R == row][-1]
    path = (packed.reach_T[: read + 1] > read).nonzero()[:, 0]
    return packed.position_ids.reshape(-1, packed.num_tokens)[:, path]


def _numbers(session: Session) -> Any:
    """The library's own numbering; None: the model numbers by depth."""
    return getattr(architecture.decoder(session.model), "get_rope_index", None)


def _alone(session: Session, sample: Sample) -> Tensor:
    """As the library numbers a sample, [1, T] or [3, T]."""
    numbers = _numbers(session)
    if numbers is None or not sample.media:
        return torch.from_numpy(np.arange(sample.num_tokens))[None]
    ids_T = torch.from_numpy(sample.ids_T)
    given = tower.library_arguments(architecture.decoder(session.model), sample.media, ids_T)
    plain = {name: it.cpu() for name, it in given.items() if not it.is_floating_point()}
    found: Tensor = numbers(input_ids=ids_T[None], **plain)[0][:, 0]
    return found


def _failed(session: Session, how: str, sample: Sample, found: Tensor, expected: Tensor) -> Finding:
    differs = (found != expected).any(0)
    at = int(differs.int().argmax())
    token = session.inputs.token(int(sample.ids_T[at]))
    return failed(
        f"{how}, {int(differs.sum())} of {differs.numel()} tokens of {sample.id} have other positions",
        number=int(differs.sum()),
        unit=f"of {differs.numel()} tokens",
        evidence=[
            f"token {at}, {token!r}: {found[:, at].tolist()}, by the library {expected[:, at].tolist()}"
        ],
        remedy="the model would see pictures elsewhere than it was taught to; train with the version of transformers "
        "that taut names, and please report this",
    )
