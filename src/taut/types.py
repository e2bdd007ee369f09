"""The nouns every part of taut speaks: samples, trees of samples, packed micro-batches, scores, sums.

Shape legend, the only one in the package. A suffix names the axes of an array or tensor:

    T  tokens of a micro-batch, laid out flat (no pad token exists anywhere)
    N  targets: token ids to be predicted, listed, never masked
    R  reads: tokens at which a scalar head is read
    S  samples (leaves)          P  pairs              G  group size
    V  vocabulary                D  hidden             H  heads           K  head dim

Visibility is one integer per token: token k is visible to token q iff ``k <= q < reach[k]``. Everything else
(depth, segments, cu_seqlens, masks) is derived from it in ``taut.attention.layout``.

Imports nothing of ours. Anyone may import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False, slots=True)
class Sample:
    """One path from the first token to a leaf: what a row of data becomes. Lives on the CPU as numpy arrays."""

    id: str
    """Where it came from, for people: ``train.jsonl:17``, or ``train.jsonl:17#2`` for the second sample of a row."""
    ids_T: IntArray
    """The token ids."""
    target_at_N: IntArray
    """Ascending positions p >= 1 into ``ids_T``: token ``ids_T[p]`` is to be predicted, by the token at p - 1."""
    weight_N: FloatArray
    """The weight of each target in the loss, never 0: what is not learned is absent."""
    positions: IntArray | None = None
    """Position ids the model wants where they are not the depth (M-RoPE: [3, T]); None: the depth."""
    streams: Mapping[str, FloatArray] = field(default_factory=dict)
    """Named per-target values, each of shape [N]: old_logp_N, advantage_N, ..."""

    def __post_init__(self) -> None:
        assert self.ids_T.ndim == 1 and self.ids_T.size > 0, (
            f"{self.id}: a sample has at least one token"
        )
        assert self.target_at_N.shape == self.weight_N.shape, f"{self.id}: one weight per target"
        if self.target_at_N.size:
            assert self.target_at_N[0] >= 1, f"{self.id}: the first token has no predictor"
            assert self.target_at_N[-1] < self.ids_T.size, f"{self.id}: target beyond the sample"
            assert (np.diff(self.target_at_N) > 0).all(), f"{self.id}: targets ascend"

    @property
    def num_tokens(self) -> int:
        return int(self.ids_T.size)

    @property
    def num_targets(self) -> int:
        return int(self.target_at_N.size)


@dataclass(frozen=True, eq=False, slots=True)
class Tree:
    """Samples that belong together: alone, a document with its questions, a pair, a group of completions.

    A method's ``prepare`` returns trees. Common prefixes inside one are computed once; a tree that is not an
    atom may be cut between samples to fit a token budget.
    """

    samples: tuple[Sample, ...]
    is_atom: bool = False
    """True where the loss couples the samples (a pair, a list): never split."""


@dataclass(frozen=True, eq=False)
class Packed:
    """A micro-batch: T tokens laid out depth first, and the N targets listed."""

    ids_T: Tensor
    """int64 [T]"""
    reach_T: Tensor
    """int64 [T]: token k is visible to q iff k <= q < reach[k]. Laminar."""
    position_ids: Tensor
    """int64 [T] or [3, T]: the depth, unless the samples brought their own."""
    predictor_N: Tensor
    """int64 [N] index into T: the token whose hidden state predicts the target."""
    target_N: Tensor
    """int64 [N]: the token id to be predicted."""
    weight_N: Tensor
    """float64 [N]: weight in the loss, never 0."""
    row_N: Tensor
    """int64 [N]: the sample (index into ``sample_ids``) the target belongs to."""
    read_R: Tensor
    """int64 [R] index into T where scalar heads are read: each sample's last token."""
    row_R: Tensor
    """int64 [R]: the sample each read belongs to."""
    sample_ids: tuple[str, ...]
    num_tokens_unshared: int
    """Tokens the same samples have when no prefix is shared."""
    streams: Mapping[str, Tensor] = field(default_factory=dict)
    """Named per-target tensors [N]."""
    last_T: Tensor | None = None
    """int64 [T]: for blocks that see themselves both ways, the index of the block's last token (else q itself)."""
    spans: tuple[tuple[int, int], ...] = ()
    """Where sample s lies if no prefix is shared: [start, stop) in T. Empty when prefixes are shared."""

    @property
    def num_tokens(self) -> int:
        return int(self.ids_T.numel())

    @property
    def num_targets(self) -> int:
        return int(self.target_N.numel())

    @property
    def num_samples(self) -> int:
        return len(self.sample_ids)

    def to(self, device: torch.device | str) -> Packed:
        """The same micro-batch on ``device``."""
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        streams = {name: value.to(device) for name, value in self.streams.items()}
        return replace(self, **moved, streams=streams)


class Scores(NamedTuple):
    """What a model says of a micro-batch's targets, in float32 (float64 stays float64)."""

    logp_N: Tensor
    """log-probability of each target."""
    entropy_N: Tensor | None = None
    """Entropy of the distribution that predicts each target, where asked for."""
    linear_sum: Tensor | None = None
    """sum of ``linear_N * logp_N`` for the coefficients the scorer was given: then the way to the gradient."""


@dataclass(frozen=True, eq=False, slots=True)
class LossSum:
    """What a loss returns: sums, never means. The loop owns the denominators."""

    terms: Mapping[str, Tensor]
    """name -> scalar sum over the micro-batch, one for each entry of the loss's ``units``."""
    metrics: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """name -> (sum, count), detached."""


FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, eq=False, slots=True)
class Prompt:
    """What an engine continues: token ids, never text."""

    id: str
    """Unique in a call; with the seed and the sample's index it chooses the random stream."""
    ids_T: IntArray
    max_new_tokens: int | None = None
    """Fewer than the sampling allows, for this prompt."""

    def __post_init__(self) -> None:
        assert self.ids_T.ndim == 1, f"{self.id}: a prompt is a flat run of ids"


@dataclass(frozen=True, eq=False, slots=True)
class Completion:
    """One continuation of a prompt, as it was sampled. N counts its own tokens."""

    prompt_id: str
    index: int
    """Which of the prompt's samples, from 0."""
    ids_N: IntArray
    """The ids as sampled, the one that ended it included; the training side never tokenises text again."""
    logp_N: FloatArray | None
    """log-probability of each id under the policy it was drawn from: temperature, penalties and truncation included (so
    0 for greedy). None where an engine cannot say."""
    logp_one_N: FloatArray | None
    """The same under the model itself: temperature 1, nothing left out. None where an engine cannot say."""
    finish_reason: FinishReason
    """stop: a token of the stop set or a stop string; length: cut; error: see ``error``."""
    text: str = ""
    """For people and verifiers: without the token or the string that ended it."""
    error: str | None = None
