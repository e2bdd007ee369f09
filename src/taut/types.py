"""The types that all parts of taut share: samples, trees of samples, packed micro-batches, scores, sums.

Shape legend, the only one in the package. A suffix names the axes of an array or tensor:

    T  tokens of a micro-batch, laid out flat (no pad token exists anywhere)
    N  targets: token ids to be predicted, listed, never masked
    R  reads: tokens at which a scalar head is read
    S  samples (leaves)          P  pairs              G  group size      U  turns
    V  vocabulary                D  hidden             H  heads           K  head dim

Visibility is one integer per token: token k is visible to token q iff ``k <= q < reach[k]``. Everything else is
derived from it: depth by ``depth_of``; segments and paths in ``taut.attention.layout``.

Imports nothing else of taut, and torch only where tensors are made: a process that tokenizes makes none, and torch
would be most of its start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


def depth_of(reach_T: IntArray) -> IntArray:
    """Depth of each token, int64 [T]: the number of earlier tokens it can see, its position in its own sample."""
    ended_T = np.cumsum(np.bincount(reach_T, minlength=reach_T.size + 1))[: reach_T.size]
    return np.arange(reach_T.size) - ended_T


class Picture(Protocol):
    """A picture for a vision tower, read when it is needed."""

    @property
    def digest(self) -> str:
        """Hash of everything but the weights that its features depend on: equal digests are equal prefixes."""

    @property
    def source(self) -> str:
        """The file that holds it."""

    @property
    def content(self) -> str:
        """SHA-256 of that file."""

    @property
    def num_pictures(self) -> int:
        """Number of pictures in its row."""

    def expect(self) -> None:
        """Start to read the picture in the background, because its tensors will be needed."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Inputs of the vision tower. Raises DataError, which names a sample, if the picture cannot be read or has
        changed.
        """


@dataclass(frozen=True, slots=True)
class Media:
    """A picture and the place of its placeholders in a sample, a prompt or a micro-batch."""

    picture: Picture
    start: int
    """Index of its first placeholder."""
    stop: int
    """Index after its last; other tokens between them (rows of tiles) belong to the picture too."""
    grid: tuple[int, int, int] | None = None
    """(time, height, width) of the placeholders if the model numbers them in three dimensions (M-RoPE); None if it
    numbers them as text."""
    is_two_way: bool = False
    """Whether the picture's tokens see each other in both directions."""


@dataclass(frozen=True, eq=False, slots=True)
class Sample:
    """One path from the first token to a leaf, made from a row of data. Numpy arrays on the CPU."""

    id: str
    """Origin, for people: ``train.jsonl:17``, or ``train.jsonl:17#2`` for the second sample of a row."""
    ids_T: IntArray
    """The token ids."""
    target_at_N: IntArray
    """Ascending positions p >= 1 into ``ids_T``: token ``ids_T[p]`` is to be predicted, by the token at p - 1."""
    weight_N: FloatArray
    """Weight of each target in the loss, never 0: tokens that are not learned are absent."""
    media: tuple[Media, ...] = ()
    """The pictures, ascending; position ids depend on them (vision/placeholders.py)."""
    streams: Mapping[str, FloatArray] = field(default_factory=dict)
    """Named per-target values, each of shape [N] or [N, k]: ref_logp_N, advantage_N, ..."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Named values of the whole sample: preference, margin, score, label, ..."""
    read_at_R: IntArray | None = None
    """Ascending positions into ``ids_T`` at which a scalar head is read; None means the last token."""
    read_values: Mapping[str, FloatArray] = field(default_factory=dict)
    """Named values of each read, each of shape [R]: step labels, returns, ..."""
    group: int = -1
    """Group of samples that are compared with each other: of two, the one with the larger value ``preference`` is
    better. Unique in a step and set by the method; -1 means not compared."""

    def __post_init__(self) -> None:
        assert self.ids_T.ndim == 1 and self.ids_T.size > 0, (
            f"{self.id}: a sample has at least one token"
        )
        assert self.target_at_N.shape == self.weight_N.shape, f"{self.id}: one weight per target"
        if self.target_at_N.size:
            assert self.target_at_N[0] >= 1, f"{self.id}: the first token has no predictor"
            assert self.target_at_N[-1] < self.ids_T.size, f"{self.id}: target beyond the sample"
            assert (np.diff(self.target_at_N) > 0).all(), f"{self.id}: targets ascend"
        if self.media:
            assert self.media[-1].stop <= self.ids_T.size, f"{self.id}: a picture is cut"

    @property
    def num_tokens(self) -> int:
        return int(self.ids_T.size)

    @property
    def num_targets(self) -> int:
        return int(self.target_at_N.size)

    def without_targets(self) -> Sample:
        """Copy of the sample without targets, for a scalar head."""
        nothing_N = np.empty(0, dtype=np.int64)
        return replace(self, target_at_N=nothing_N, weight_N=np.empty(0), streams={})


@dataclass(frozen=True, eq=False, slots=True)
class Tree:
    """Samples that belong together: alone, a document with its questions, a pair, a group of completions.

    A method's ``prepare`` returns trees. Common prefixes inside one are computed once; a tree that is not an
    atom may be cut between samples to fit a token budget.
    """

    samples: tuple[Sample, ...]
    is_atom: bool = False
    """True where the loss couples the samples (a pair, a list): never split."""


def _no_pairs() -> Tensor:
    import torch

    return torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class Packed:
    """A micro-batch: T tokens laid out depth first, and the N targets listed."""

    ids_T: Tensor
    """int64 [T]"""
    reach_T: Tensor
    """int64 [T]: token k is visible to q iff k <= q < reach[k]. Laminar."""
    position_ids: Tensor
    """int64 [T] or [3, T]: the depth, or M-RoPE's numbering with pictures."""
    predictor_N: Tensor
    """int64 [N] index into T: the token whose hidden state predicts the target."""
    target_N: Tensor
    """int64 [N]: the token id to be predicted."""
    weight_N: Tensor
    """float64 [N]: weight in the loss, never 0."""
    row_N: Tensor
    """int64 [N]: the sample (index into ``sample_ids``) the target belongs to."""
    read_R: Tensor
    """int64 [R] index into T where scalar heads are read: each sample's ``read_at_R``, or its last token."""
    row_R: Tensor
    """int64 [R]: the sample each read belongs to."""
    end_S: Tensor
    """int64 [S] index into T: each sample's last token."""
    sample_ids: tuple[str, ...]
    num_tokens_unshared: int
    """Tokens of the same samples without shared prefixes."""
    streams: Mapping[str, Tensor] = field(default_factory=dict)
    """Named per-target tensors, float64 [N] or [N, k]."""
    values: Mapping[str, Tensor] = field(default_factory=dict)
    """Named values of the samples, float64 [S]."""
    read_values: Mapping[str, Tensor] = field(default_factory=dict)
    """Named values of the reads, float64 [R]."""
    better_P: Tensor = field(default_factory=_no_pairs)
    """int64 [P]: the preferred sample of each pair. A pair is any two samples of a group with different
    ``preference``."""
    worse_P: Tensor = field(default_factory=_no_pairs)
    """int64 [P]: the other sample of each pair."""
    stats: Mapping[str, Tensor] = field(default_factory=dict)
    """Statistics of the whole step, constants of the loss (``Loss.statistics``)."""
    last_T: Tensor | None = None
    """int64 [T]: in blocks whose tokens see each other both ways, the index of the block's last token; elsewhere q
    itself."""
    media: tuple[Media, ...] = ()
    """The pictures with their places in T, ascending; a picture in a shared prefix is there once."""
    spans: tuple[tuple[int, int], ...] = ()
    """The place [start, stop) of each sample in T. Empty where prefixes are shared."""
    host: Packed | None = None
    """Copy in host memory of a micro-batch on an accelerator. Decisions about the layout read this copy, so that
    nothing is read back from the device."""

    layout: object | None = None
    """Visibility structure of a micro-batch that is ready for a forward (taut/attention/layout.py)."""

    @property
    def on_host(self) -> Packed:
        """The micro-batch in host memory. Streams that a model computed stay on the model's device."""
        return self if self.host is None else self.host

    @property
    def num_tokens(self) -> int:
        return int(self.ids_T.numel())

    @property
    def num_targets(self) -> int:
        return int(self.target_N.numel())

    @property
    def num_samples(self) -> int:
        return len(self.sample_ids)

    @property
    def num_pairs(self) -> int:
        return int(self.better_P.numel())

    @property
    def num_reads(self) -> int:
        return int(self.read_R.numel())

    @property
    def num_samples_T(self) -> Tensor:
        """int64 [T], in host memory: number of samples each token belongs to, which end at it or below it."""
        import torch

        reach_T, end_S = self.on_host.reach_T.numpy(), self.on_host.end_S.numpy()
        ends_T = np.bincount(end_S, minlength=self.num_tokens)
        ended = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(ends_T)])
        return torch.from_numpy(ended[reach_T] - ended[:-1])

    @property
    def best_S(self) -> Tensor:
        """bool [S]: samples that are preferred to another and to which no sample is preferred. A supervised term trains
        on them.
        """
        import torch

        best_S = torch.zeros(self.num_samples, dtype=torch.bool, device=self.better_P.device)
        best_S[self.better_P] = True
        best_S[self.worse_P] = False
        return best_S

    def by_sample(self, value_N: Tensor) -> Tensor:
        """Sum a value of the targets over each sample, [S]."""
        zero_S = value_N.new_zeros(self.num_samples)
        return zero_S.index_add(0, self.row_N, value_N)

    def to(self, device: torch.device | str) -> Packed:
        """Copy the micro-batch to ``device`` as one block of memory, pinned for a GPU, without making the host wait.
        ``reach_T`` and ``last_T`` stay in host memory, where layouts are derived from them.
        """
        import torch

        device = torch.device(device)
        if self.ids_T.device.type == device.type:
            return self
        groups = ("streams", "values", "read_values", "stats")
        parts = {
            (name, ""): value
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor) and name not in ("reach_T", "last_T")
        }
        parts |= {(g, name): value for g in groups for name, value in getattr(self, g).items()}
        there = to_device(list(parts.values()), device)
        moved: dict[str, Any] = {group: {} for group in groups}
        for (name, entry), value in zip(parts, there, strict=True):
            if entry:
                moved[name][entry] = value
            else:
                moved[name] = value
        return replace(self, **moved, host=self)


WORD = 16
"""Bytes to which a tensor is aligned in a copied block. torch's compiler reads an aligned tensor in place and copies
any other at each call."""


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the tensors on ``device``. Host tensors are copied as one block, pinned for a GPU, without making the host
    wait.
    """
    import torch

    is_here = [value.device.type == "cpu" != device.type for value in tensors]
    if not any(is_here):
        return list(tensors)
    pairs = list(zip(tensors, is_here, strict=True))
    sizes = [-(-value.nbytes // WORD) * WORD if here else 0 for value, here in pairs]
    block = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")

    def parts(memory: Tensor) -> list[Tensor]:
        """Part of a block that belongs to each copied tensor."""
        return [
            part[: value.nbytes].view(value.dtype).view(value.shape) if here else value
            for (value, here), part in zip(pairs, torch.split(memory, sizes), strict=True)
        ]

    for (value, here), part in zip(pairs, parts(block), strict=True):
        if here:
            part.copy_(value)
    return parts(block.to(device, non_blocking=True))


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors in host memory. Device tensors are read together, in float64, because each read waits for all
    work of the device.
    """
    import torch

    away = [value for value in tensors if value.device.type != "cpu"]
    if not away:
        return list(tensors)
    joined = torch.cat([value.detach().reshape(-1).double() for value in away]).cpu()
    read = iter(torch.split(joined, [value.numel() for value in away]))
    return [
        value if value.device.type == "cpu" else next(read).to(value.dtype).view(value.shape)
        for value in tensors
    ]


TOP_IDS, TOP_LOGP = "top_ids", "top_logp"
"""Streams [N, k]: a teacher's likeliest tokens at each target, and their log-probabilities."""
TEACHER_LOGP = "teacher_logp_N"
"""Stream [N]: a teacher's log-probability of each target."""


class Divergence(NamedTuple):
    """The divergence of a student from its teacher, at each target (models/teacher.py has the equations)."""

    kind: Literal["forward", "reverse", "js"] = "forward"
    """KL(teacher || student), KL(student || teacher), or the generalized Jensen-Shannon divergence."""
    beta: float = 0.5
    """The teacher's weight in js's mixture."""
    temperature: float = 1.0
    """Divisor of both models' logits."""
    tail: Literal["bucket", "renormalize"] = "bucket"
    """Treatment of the probability mass outside a list of the teacher's likeliest tokens."""


class Wants(NamedTuple):
    """Scores of a micro-batch that a loss needs."""

    logp: bool = True
    """The log-probability of each target."""
    entropy: bool = False
    """The entropy of the distribution that predicts each target."""
    scalar: bool = False
    """The scalar head's value at each read."""
    divergence: Divergence | None = None
    """The divergence from the scorer's teacher at each target; ``linear_N`` is then [2, N] or [1, N]."""
    temperature: float = 1.0
    """Divisor of the logits: tokens sampled at a temperature are scored at it."""
    routers: bool = False
    """The experts that the routers of a mixture of experts choose."""
    predicted: bool = False
    """The likeliest token in the place of each target; no score has a gradient then."""


class Scores(NamedTuple):
    """A model's output for a micro-batch, in float32 (float64 stays float64)."""

    logp_N: Tensor
    """Log-probability of each target; empty where not wanted."""
    entropy_N: Tensor | None = None
    """Entropy of the distribution that predicts each target, where wanted."""
    linear_sum: Tensor | None = None
    """Sum of ``linear_N * logp_N`` if the scorer was given these coefficients; this sum then carries the gradient."""
    scalar_R: Tensor | None = None
    """The scalar head's value at each read, where wanted."""
    divergence_N: Tensor | None = None
    """Divergence from the teacher at each target, where wanted; it and ``logp_N`` then have no gradient."""
    router_prob_LE: Tensor | None = None
    """For L routers and E experts, where wanted: router probabilities summed over tokens. A token in a shared prefix
    counts once for each sample."""
    router_count_LE: Tensor | None = None
    """Number of tokens sent to each expert, counted in the same way."""
    predicted_N: Tensor | None = None
    """int64 [N]: the likeliest token in the place of each target, where wanted."""

    def detach(self) -> Scores:
        """Copy of the scores without gradients."""
        return Scores(*(None if value is None else value.detach() for value in self))  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False, slots=True)
class LossSum:
    """The result of a loss: sums, never means. The loop owns the denominators."""

    terms: Mapping[str, Tensor]
    """name -> scalar sum over the micro-batch, one for each entry of the loss's ``units``."""
    metrics: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """name -> (sum, count), detached."""
    largest: Mapping[str, Tensor] = field(default_factory=dict)
    """name -> number, detached; the step's metric is the largest over all micro-batches."""

    def detach(self) -> LossSum:
        """Copy of the sums without gradients."""
        return replace(self, terms={name: term.detach() for name, term in self.terms.items()})


FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, eq=False, slots=True)
class Prompt:
    """Input of an engine: token ids, never text."""

    id: str
    """Unique in a call; with the seed and the sample's index it selects the random stream."""
    ids_T: IntArray
    max_new_tokens: int | None = None
    """Limit for this prompt, below the limit of the sampling."""
    media: tuple[Media, ...] = ()
    """The pictures among the ids, ascending."""

    def __post_init__(self) -> None:
        assert self.ids_T.ndim == 1, f"{self.id}: a prompt is a flat run of ids"


@dataclass(frozen=True, eq=False, slots=True)
class Completion:
    """One sampled continuation of a prompt. N counts its own tokens."""

    prompt_id: str
    index: int
    """Number of the sample among the prompt's, from 0."""
    ids_N: IntArray
    """Sampled ids, with the one that ended the completion; training never tokenizes the text again."""
    logp_N: FloatArray | None
    """Log-probability of each id under the distribution it was drawn from: after temperature, penalties and truncation
    (so 0 for greedy). None if the engine does not report it."""
    logp_one_N: FloatArray | None
    """Log-probability of each id at temperature 1, without penalties or truncation. None if the engine does not report
    it."""
    finish_reason: FinishReason
    """stop: a token of the stop set or a stop string; length: cut; error: see ``error``."""
    text: str = ""
    """The text without the token or the string that ended it, for people and verifiers."""
    error: str | None = None
    version: int = 0
    """Version of the weights that sampled it: the step after which they were pushed; 0 for the initial weights."""
