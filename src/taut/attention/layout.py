"""The visibility structure of a micro-batch, derived from ``reach``, and the options of one layer's attention call.

    token k is visible to token q   iff   k <= q < reach[k]

From that one integer per token: depth (how many earlier tokens a token can see), segments (maximal runs with one
reach and consecutive depth), a segment's path (its ancestors' tokens, then its own), the calls of each backend and a
dense mask. A sliding window W (which counts the token itself) adds ``depth[q] - depth[k] < W``: depth, never the flat
index. A block that sees itself both ways is given by ``last``: a token also sees later tokens with the same ``last``,
and of the earlier ones those in the window, as in Gemma 3.

``Call`` holds the options of one attention layer, read from the keywords that the library passes to an attention
function. A keyword that changes the maths is in ``Call``; one that is known to change nothing is in ``HARMLESS``; any
other is refused, never dropped. Attention dropout is refused: noise would depend on the layout.

Attention functions read a ``Layout``, and the last layer, which leaves out tokens that nobody reads
(models/cpu/faster_layers.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from taut.errors import AttentionError
from taut.types import IntArray, depth_of, to_device


@dataclass(frozen=True, slots=True)
class Segment:
    """A maximal run of tokens [start, stop) with one reach: no branch inside, none ends inside."""

    start: int
    stop: int
    reach: int
    """End of the subtree below the segment: [stop, reach) are its descendants."""
    depth: int
    """Depth of the first token."""
    parent: int
    """Index of the segment this one branches from; -1 for a root."""


@dataclass(frozen=True, eq=False)
class Layout:
    """The visibility structure of one micro-batch. ``reach_T`` and ``last_T`` are int64 [T] on the CPU."""

    reach_T: IntArray
    last_T: IntArray | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rows_read: IntArray | None = None
    """int64, ascending: the tokens whose last hidden states are read; None: all."""
    is_last: bool = False
    """Whether it is the last layer's: a backend may leave out its queries that are not in ``rows_read``."""
    cache: dict[Any, Any] = field(default_factory=dict)
    """Values that a backend derives once per micro-batch and reads in every layer (block masks, index tensors)."""
    kept: dict[nn.Module, tuple[Tensor, Tensor]] | None = None
    """Receives each attention layer's keys and values [1, Hkv, T, K], for an engine; None: not kept."""

    def __post_init__(self) -> None:
        num_tokens = self.reach_T.size
        assert (self.reach_T > np.arange(num_tokens)).all(), "a token sees itself: reach[k] > k"
        assert (self.reach_T <= num_tokens).all(), "reach ends inside the micro-batch"
        assert self.segments is not None  # computes them, which asserts that reach is laminar
        if self.last_T is not None:
            same_reach = self.reach_T[self.last_T] == self.reach_T
            assert same_reach.all(), "no tree cuts a block that sees itself both ways"

    @property
    def num_tokens(self) -> int:
        return int(self.reach_T.size)

    @cached_property
    def row_index(self) -> Tensor | None:
        """``rows_read`` on the device."""
        rows = self.rows_read
        return None if rows is None else to_device([torch.from_numpy(rows)], self.device)[0]

    @cached_property
    def of_last_layer(self) -> Layout:
        return replace(self, is_last=True)

    @cached_property
    def depth_T(self) -> IntArray:
        return depth_of(self.reach_T)

    @cached_property
    def max_depth(self) -> int:
        return int(self.depth_T.max())

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The segments in flat order. Asserts laminarity: k < k' < reach[k] implies reach[k'] <= reach[k]."""
        # a segment begins where reach changes
        starts = np.flatnonzero(np.diff(self.reach_T, prepend=-1))
        stops = np.append(starts[1:], self.reach_T.size)
        segments: list[Segment] = []
        open_segments: list[int] = []
        for index, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
            # close the segments whose subtree ends before this one
            while open_segments and segments[open_segments[-1]].reach <= start:
                open_segments.pop()
            # the innermost open segment is the parent, and this one ends inside it
            reach = int(self.reach_T[start])
            parent = open_segments[-1] if open_segments else -1
            above = segments[parent].reach if open_segments else self.reach_T.size
            assert stop <= reach <= above, f"reach is not laminar at token {start}"
            segments.append(Segment(start, stop, reach, int(self.depth_T[start]), parent))
            open_segments.append(index)
        return tuple(segments)

    @cached_property
    def is_flat(self) -> bool:
        """No prefix is shared: every segment is a whole sample."""
        return all(
            segment.parent < 0 and segment.reach == segment.stop for segment in self.segments
        )

    @cached_property
    def paths(self) -> tuple[IntArray, ...]:
        """For each segment the flat indices of its ancestors' tokens, then its own: entry j has depth j."""
        paths: list[IntArray] = []
        for segment in self.segments:
            positions = np.arange(segment.start, segment.stop)
            above = paths[segment.parent] if segment.parent >= 0 else positions[:0]
            paths.append(np.concatenate([above, positions]))
        return tuple(paths)

    def num_pairs(self, window: int | None = None) -> int:
        """How many (query, key) pairs are visible: the attention work of one layer. Ignores ``last``."""
        visible_T = self.depth_T + 1
        return int(np.minimum(visible_T, window).sum() if window else visible_T.sum())

    def visible(self, query: IntArray, key: IntArray, window: int | None = None) -> Tensor:
        """bool [len(query), len(key)]: which keys (flat indices) each query (flat indices) sees."""
        # a token sees itself and the earlier tokens in whose subtree it lies
        causal = (key[None, :] <= query[:, None]) & (query[:, None] < self.reach_T[key][None, :])
        # in a block that sees itself both ways, also the later ones of the block
        if self.last_T is not None:
            causal |= self.last_T[query][:, None] == self.last_T[key][None, :]
        # of these the ones in the window, by depth
        if window:
            causal &= self.depth_T[query][:, None] - self.depth_T[key][None, :] < window
        return torch.from_numpy(causal)

    def dense_mask(self, window: int | None = None) -> Tensor:
        """bool [T, T]: the whole visibility matrix, for tests and tiny inputs."""
        everything = np.arange(self.reach_T.size)
        return self.visible(everything, everything, window)


# -- one layer's call ------------------------------------------------------------------------------

HARMLESS = frozenset(
    {
        "position_ids",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "is_causal",
        "logits_to_keep",
        "num_items_in_batch",
        "position_embeddings",
    }
)
"""Keywords of the library's calls that do not change what attention computes here."""


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """One layer's attention: scores are ``softcap(scale * q k^T)`` over the visible keys, plus a sink per head."""

    scale: float
    window: int | None = None
    """Sliding window W: a token sees itself and the W - 1 before it."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """[H]: a score per head that takes part in the softmax and attends to no token."""


def read_call(module: nn.Module, head_dim: int, keywords: Mapping[str, Any]) -> Call:
    """The ``Call`` of a layer. Raises AttentionError for an unknown keyword."""
    options = {name: value for name, value in keywords.items() if value is not None}
    where = f"attention layer {getattr(module, 'layer_idx', '?')} ({type(module).__name__})"
    if options.pop("dropout", 0.0):
        raise AttentionError(
            f"{where} asks for attention dropout; taut has none, since noise inside attention depends on "
            "how samples are packed; set attention_dropout to 0 in the model's config.json"
        )
    if not options.get("is_causal", getattr(module, "is_causal", True)):
        raise AttentionError(f"{where} is not causal; taut trains causal language models")
    scale = options.pop("scaling", None)
    window, softcap, sinks = (
        options.pop(name, None) for name in ("sliding_window", "softcap", "s_aux")
    )
    # a keyword that is neither read above nor known to change nothing is refused, never dropped
    unknown = sorted(set(options) - HARMLESS)
    if unknown:
        raise AttentionError(
            f"{where} passes the keyword(s) {', '.join(unknown)}, which taut does not know; "
            "it could change what attention computes, so it is not ignored"
        )
    return Call(head_dim**-0.5 if scale is None else float(scale), window, softcap, sinks)
