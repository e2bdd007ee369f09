"""Attention while completions grow: one new token of each against the keys and values kept so far.

The completions of one prompt are a ``Group``; they started together and have one length. A group sees a path of
``Stretch``es (prompt tokens, computed and stored once, shared by every group below them in the prompts' tree) and then
its own tokens. Groups that started at one time store these in one ``Own``, and attend to them in one call. Groups are
in the order of the tree, so the queries below a stretch are contiguous: one step is a list of rectangles (queries,
keys) as in attention/reference.py, merged by their log-sum-exp. A sink is one more part, without tokens. Nothing is
padded or masked, except that an ``Own`` may hold completions that have ended, a quarter of its places at most.

Shapes of a layer: q [1, H, B, K], k and v [1, Hkv, B, K] of the B new tokens -> out [1, H, B, K]; kept keys and
values [rows, Hkv, length, K].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from taut.attention.layout import Call
from taut.attention.reference import merge

KeysValues = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False, slots=True)
class Stretch:
    """A run of prompt tokens: keys and values [1, Hkv, length, K] of every attention layer."""

    depth: int
    """Depth of its first token."""
    length: int
    kept: Mapping[nn.Module, KeysValues]


@dataclass(eq=False, slots=True)
class Own:
    """Keys and values of completions that started together and grow in lockstep, with a place for each."""

    capacity: int
    """Tokens that a place has room for."""
    places: list[int] = field(default_factory=list)
    """Places of the running completions, ascending."""
    num_places: int = 0
    length: int = 0
    """Tokens so far: of the completions, and of the prompt where a single completion has it."""
    kept: dict[nn.Module, KeysValues] = field(default_factory=dict)
    """Keys and values [places, Hkv, capacity, K] of every attention layer."""
    _spread: tuple[Tensor, Tensor] | None = None
    """The row at each place (any row where the completion has ended), and the places of the rows; where they differ."""

    def takes(self, capacity: int) -> bool:
        """Whether completions of this capacity can still join."""
        return self.length == 0 and not self.kept and self.capacity == capacity

    def join(self, num_rows: int) -> None:
        """Add places for more completions."""
        self.places += range(self.num_places, self.num_places + num_rows)
        self.num_places += num_rows

    def take_over(self, stretch: Stretch) -> None:
        """Start with a stretch that no other group sees, so that there is one rectangle and not two."""
        assert self.num_places == 1 and self.length == 0
        self.length = stretch.length
        for layer, (key, value) in stretch.kept.items():
            for buffer, prompt in zip(self._room(layer, key, value), (key, value), strict=True):
                buffer[:, :, : self.length] = prompt

    def attend(
        self, layer: nn.Module, rows: Tensor, key: Tensor, value: Tensor, call: Call
    ) -> KeysValues:
        """Store the new tokens' keys and values [rows, Hkv, K], and attend with ``rows`` [rows, Hkv, H/Hkv, K]."""
        if self._spread is not None:
            rows, key, value = (x.index_select(0, self._spread[0]) for x in (rows, key, value))
        keys, values = (kept[: self.num_places] for kept in self._room(layer, key, value))
        keys[:, :, self.length], values[:, :, self.length] = key, value
        first = _first_visible(self.length, call.window)
        seen = slice(first, self.length + 1)
        out, lse = _part(rows, keys[:, :, seen], values[:, :, seen], call)
        if self._spread is None:
            return out, lse
        return out.index_select(0, self._spread[1]), lse.index_select(0, self._spread[1])

    def keep(self, is_live: Sequence[bool]) -> None:
        """Drop completions that have ended. Their places are freed together, once they are a quarter."""
        live = [place for place, stays in zip(self.places, is_live, strict=True) if stays]
        if 0 < len(live) <= 0.75 * self.num_places:
            for buffers in self.kept.values():
                for kept in buffers:
                    kept[: len(live), :, : self.length] = kept[live, :, : self.length]
            self.num_places, live = len(live), list(range(len(live)))
        self.places = live
        self._spread = None
        if 0 < len(live) < self.num_places:
            device = next(iter(self.kept.values()))[0].device
            places = torch.tensor(live, device=device)
            rows = torch.zeros(self.num_places, dtype=torch.long, device=device)
            rows[places] = torch.arange(len(live), device=device)
            self._spread = rows, places

    def _room(self, layer: nn.Module, key: Tensor, value: Tensor) -> KeysValues:
        """The buffers of a layer, allocated at its first call; key and value [*, Hkv, *, K] or [*, Hkv, K]."""
        if layer not in self.kept:
            shape = (self.num_places, key.shape[1], self.capacity)
            self.kept[layer] = (
                key.new_empty((*shape, key.shape[-1])),
                value.new_empty((*shape, value.shape[-1])),
            )
        return self.kept[layer]


@dataclass(eq=False, slots=True)
class Group:
    """Completions of one prompt, in lockstep."""

    path: tuple[Stretch, ...]
    own_depth: int
    """Depth of the first token of ``own``."""
    own: Own
    num_rows: int
    offset: int = 0
    """Position of a new token less its depth: pictures before it are numbered in three dimensions."""

    @property
    def depth(self) -> int:
        """Depth of the next token."""
        return self.own_depth + self.own.length

    @property
    def position(self) -> int:
        """Position id of the next token, on every axis."""
        return self.depth + self.offset


Part = tuple[int, int, Stretch, int]
"""(first row, end row, stretch, first key): a rectangle that several groups may share."""


class Decoding:
    """One step of every group: the model's forward takes it in place of a layout."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self.owns: list[tuple[Own, int, int]] = []
        """Each with its first row and end row."""
        for group, (start, stop) in self._rows():
            if self.owns and self.owns[-1][0] is group.own:
                start = self.owns.pop()[1]
            self.owns.append((group.own, start, stop))
        self._levels: dict[int | None, list[list[Part]]] = {}
        """The rectangles over stretches by window; those of one list have different rows."""

    @property
    def num_tokens(self) -> int:
        return sum(group.num_rows for group in self.groups)

    def advance(self, is_live: Sequence[bool]) -> None:
        """Count the tokens that the step has added, and drop the completions that it has ended."""
        for part, start, stop in self.owns:
            part.length += 1
            if not all(is_live[start:stop]):
                part.keep(is_live[start:stop])
        for group, (start, stop) in self._rows():
            group.num_rows = sum(is_live[start:stop])

    def attend(
        self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, call: Call
    ) -> Tensor:
        """One layer's attention; stores the new tokens' keys and values."""
        with torch._C.DisableTorchFunction():  # modes have no effect here, and cost time per call
            _, heads, num_rows, _ = query.shape
            shape = (num_rows, key.shape[1], heads // key.shape[1], -1)
            rows = query[0].transpose(0, 1).reshape(shape)
            key, value = key[0].transpose(0, 1), value[0].transpose(0, 1)
            own_parts = [
                part.attend(layer, rows[start:stop], key[start:stop], value[start:stop], call)
                for part, start, stop in self.owns
            ]
            if len(own_parts) == 1:
                out, lse = own_parts[0]
            else:
                out, lse = (torch.cat(x) for x in zip(*own_parts, strict=True))
            levels = self._stretches(call.window)
            if levels or call.sinks is not None:
                out = out.to(torch.promote_types(query.dtype, torch.float32))
                lse = lse.to(out.dtype)
            queries = rows.transpose(0, 1).contiguous() if levels else rows
            for parts in levels:
                _merge_level(out, lse, layer, queries, parts, call)
            if call.sinks is not None:
                share = torch.sigmoid(lse - call.sinks.view(shape[1:3]).to(lse.dtype))
                out *= share.unsqueeze(-1)
            return out.to(query.dtype).reshape(1, num_rows, heads, -1).transpose(1, 2)

    def _rows(self) -> Iterator[tuple[Group, tuple[int, int]]]:
        """Each group with its first row and end row."""
        bounds = accumulate((group.num_rows for group in self.groups), initial=0)
        return zip(self.groups, list(pairwise(bounds)), strict=True)

    def _stretches(self, window: int | None) -> list[list[Part]]:
        """The rectangles over stretches, by their place on a path; neighbours that see the same keys are merged."""
        if window not in self._levels:
            levels: list[list[Part]] = [[] for _ in range(max(len(g.path) for g in self.groups))]
            for group, (start, stop) in self._rows():
                for parts, stretch in zip(levels, group.path, strict=False):
                    first = _first_visible(group.depth - stretch.depth, window)
                    if first >= stretch.length:
                        continue
                    if parts and parts[-1][1:] == (start, stretch, first):
                        parts[-1] = (parts[-1][0], stop, stretch, first)
                    else:
                        parts.append((start, stop, stretch, first))
            self._levels[window] = [parts for parts in levels if parts]
        return self._levels[window]


def _first_visible(distance: int, window: int | None) -> int:
    """Index of the first visible key, for keys that start ``distance`` before the token."""
    return 0 if window is None else max(0, distance - window + 1)


def _merge_level(
    out: Tensor, lse: Tensor, layer: nn.Module, queries: Tensor, parts: Sequence[Part], call: Call
) -> None:
    """Add parts over different rows to ``out`` and ``lse``, at once where there is no gap between them.

    ``queries``: [Hkv, B, H/Hkv, K].
    """
    spans: list[tuple[int, int]] = []
    outputs: list[KeysValues] = []
    for start, stop, stretch, first in parts:
        key, value = (kept[:, :, first:] for kept in stretch.kept[layer])
        rows = queries[:, start:stop]
        some_out, some_lse = _part(rows.flatten(1, 2).unsqueeze(0), key, value, call)
        shape = rows.shape[:3]
        spans.append((start, stop))
        outputs.append((some_out[0].reshape(*shape, -1), some_lse[0].reshape(shape)))
    if len(parts) > 1 and all(left[1] == right[0] for left, right in pairwise(spans)):
        joined_out, joined_lse = (torch.cat(x, dim=1) for x in zip(*outputs, strict=True))
        spans, outputs = [(spans[0][0], spans[-1][1])], [(joined_out, joined_lse)]
    for (start, stop), (some_out, some_lse) in zip(spans, outputs, strict=True):
        merge(out[start:stop], lse[start:stop], some_out.transpose(0, 1), some_lse.transpose(0, 1))


def _part(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Attention over some of the keys, and its log-sum-exp: every query sees every key."""
    is_flash = call.softcap is None and query.shape[-1] == value.shape[-1]
    if is_flash and query.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = kernel(query, key, value, 0.0, False, scale=call.scale)
        return out, lse
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).transpose(-1, -2) * call.scale
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    return torch.softmax(scores, -1).to(value.dtype) @ value, torch.logsumexp(scores, -1)
