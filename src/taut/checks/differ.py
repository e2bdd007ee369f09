"""How far two measurements are apart, and samples that differ from real ones in some words. Checks import it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from taut.checks.samples import text_at
from taut.checks.session import Session
from taut.train.monitors import STEADY_TARGETS
from taut.types import Sample


def changed(session: Session, sample: Sample, at: Iterable[int], name: str | None = None) -> Sample:
    """A sample with other tokens of the same text's vocabulary at some places: no special token, which a template may
    mean. What stands for pictures stays.
    """
    other = session.pair[1]
    special = set(session.tokenizer.all_special_ids)
    said = dict.fromkeys(other.ids_T[text_at(other)].tolist())
    words = [index for index in said if index not in special] or list(said)
    ids_T, is_text_T = sample.ids_T.copy(), text_at(sample)
    for number, place in enumerate(at):
        if is_text_T[place]:
            choices = [i for i in words if i != ids_T[place]] or [int(ids_T[place]) ^ 1]
            ids_T[place] = choices[number % len(choices)]
    return replace(sample, id=sample.id if name is None else name, ids_T=ids_T)


def first_word(sample: Sample, start: int) -> int:
    """The first place from ``start`` on that is no part of a picture; else the last such place of all."""
    places = np.flatnonzero(text_at(sample))
    after = places[places >= start]
    return int(after[0] if after.size else places[-1])


def gap(left: Tensor, right: Tensor) -> float:
    """The largest difference; infinite where one is not a number."""
    if not left.numel():
        return 0.0
    return float((left - right).abs().nan_to_num(nan=torch.inf).max())


def drift(left: Tensor, right: Tensor) -> float:
    """The mean difference, as the alarm of the first step takes it: rounding hardly moves it where tokens are many, and
    single log-probs differ by a quarter of a nat in bfloat16.
    """
    if not left.numel():
        return 0.0
    mean = (left - right).abs().double().mean().nan_to_num(nan=torch.inf)
    return float(mean) * math.sqrt(min(1.0, left.numel() / STEADY_TARGETS))
