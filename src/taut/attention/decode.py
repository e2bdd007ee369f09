"""Attention while completions grow: one new token of each against the keys and values kept so far.

The completions of one prompt are a ``Group``; they started together and have one length. A group sees a path of
``Stretch``es (prompt tokens, computed and stored once, shared by every group below them in the prompts' tree) and then
its own tokens. What is attended in one call is stored as one tensor:

    Stack   stretches of similar lengths, at one place of their paths
    Own     the tokens of groups that started at one time; where a single completion has a prompt's last stretch, that
            stretch too, so that there is one rectangle and not two

Both are aligned at their ends: a shorter member has empty places in front, at most a tenth of the whole, and a mask
hides them. So one step is a few rectangles (queries, keys) as in attention/reference.py, merged by their log-sum-exp. A
sink is one more part, without tokens. Places of what has ended are freed together, once they are a quarter of an
``Own`` or half of a ``Stack``.

Shapes of a layer: q [1, H, B, K], k and v [1, Hkv, B, K] of the B new tokens -> out [1, H, B, K]; kept keys and
values [members, Hkv, length, K].
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from taut.attention.layout import Call
from taut.attention.reference import merge

KeysValues = tuple[Tensor, Tensor]
MIN_FILLED = 0.9
"""The share of a tensor's places that prompts of different lengths must fill, to be attended in one call."""
MAX_QUERIES = 1.5
"""Queries of one call, over those that are wanted: it takes as many for each stretch as for the one with most."""


@dataclass(eq=False, slots=True)
class Stretch:
    """A run of prompt tokens."""

    depth: int
    """Depth of its first token."""
    length: int
    stack: Stack
    place: int
    """Where its keys and values are in the stack."""

    def keys_values(self, layer: nn.Module) -> KeysValues:
        """[Hkv, length, K]"""
        key, value = self.stack.kept[layer]
        return key[self.place, :, -self.length :], value[self.place, :, -self.length :]


@dataclass(eq=False, slots=True)
class Stack:
    """Keys and values of stretches of similar lengths."""

    length: int
    """Of the longest."""
    num_places: int
    kept: dict[nn.Module, KeysValues]
    """Keys and values [places, Hkv, length, K] of every attention layer; zeros before the shorter ones."""

    def keep(self, live: Collection[Stretch]) -> None:
        """Free the places of the other stretches, once these are half or fewer of all."""
        if 2 * len(live) > self.num_places:
            return
        ordered = sorted(live, key=lambda stretch: stretch.place)
        places = [stretch.place for stretch in ordered]
        for layer, (key, value) in self.kept.items():
            self.kept[layer] = key[places], value[places]
        self.num_places = len(ordered)
        for place, stretch in enumerate(ordered):
            stretch.place = place


def is_similar(lengths: Sequence[int]) -> bool:
    """Whether stretches of these lengths may be stored as one tensor."""
    return sum(lengths) >= MIN_FILLED * len(lengths) * max(lengths)


def stack(
    kept: Mapping[nn.Module, KeysValues], spans: Sequence[tuple[int, int]], depths: Sequence[int]
) -> list[Stretch]:
    """The stretches of flat tokens [start, stop) of similar lengths; ``kept``: [1, Hkv, T, K] of every layer."""
    length = max(stop - start for start, stop in spans)
    copies: dict[nn.Module, KeysValues] = {}
    for layer, (key, value) in kept.items():
        copies[layer] = _aligned(key, spans, length), _aligned(value, spans, length)
    together = Stack(length, len(spans), copies)
    return [
        Stretch(depth, stop - start, together, place)
        for place, ((start, stop), depth) in enumerate(zip(spans, depths, strict=True))
    ]


def _aligned(flat: Tensor, spans: Sequence[tuple[int, int]], length: int) -> Tensor:
    """[spans, Hkv, length, K] with the spans at the end."""
    copy = flat.new_empty((len(spans), flat.shape[1], length, flat.shape[-1]))
    for place, (start, stop) in enumerate(spans):
        first = length - (stop - start)
        copy[place, :, :first] = 0
        copy[place, :, first:] = flat[0, :, start:stop]
    return copy


@dataclass(eq=False, slots=True)
class Own:
    """Keys and values of completions that started together and grow in lockstep, with a place for each."""

    capacity: int
    """New tokens that a place has room for."""
    places: list[int] = field(default_factory=list)
    """Places of the running completions, ascending."""
    num_places: int = 0
    steps: int = 0
    """New tokens so far."""
    prompts: list[Stretch] = field(default_factory=list)
    """The prompts' last stretches, one for each place, where single completions have them."""
    lead: int = 0
    """Tokens of the longest of these."""
    kept: dict[nn.Module, KeysValues] = field(default_factory=dict)
    """Keys and values [places, Hkv, lead + capacity, K] of every attention layer."""
    _starts: list[int] = field(default_factory=list)
    """The first token of each place, where it has a prompt's stretch."""
    _hidden: Tensor | None = None
    """``_starts`` as a mask; None until it is read, or where all are 0."""
    _spread: tuple[Tensor, Tensor] | None = None
    """The row at each place (any row where the completion has ended), and the places of the rows; where they differ."""

    @property
    def length(self) -> int:
        """Tokens of the longest place."""
        return self.lead + self.steps

    def takes(self, capacity: int, prompt: Stretch | None = None) -> bool:
        """Whether completions of this capacity can still join, or a single one that brings a prompt's stretch."""
        if self.steps or self.kept:
            return False
        if prompt is None or not self.prompts:
            return prompt is None and not self.prompts and self.capacity == capacity
        return is_similar([*(some.length for some in self.prompts), prompt.length])

    def join(self, num_rows: int) -> None:
        """Add places for more completions."""
        self.places += range(self.num_places, self.num_places + num_rows)
        self.num_places += num_rows

    def join_alone(self, prompt: Stretch, capacity: int) -> None:
        """Add a place for a completion with a stretch that no other group sees."""
        self.join(1)
        self.capacity = max(self.capacity, capacity)
        self.prompts.append(prompt)
        self.lead = max(self.lead, prompt.length)
        self._starts = [self.lead - some.length for some in self.prompts]

    def attend(
        self, layer: nn.Module, rows: Tensor, key: Tensor, value: Tensor, call: Call
    ) -> KeysValues:
        """Store the new tokens' keys and values [rows, Hkv, K], and attend with ``rows`` [rows, Hkv, H/Hkv, K]."""
        if self._spread is not None:
            rows, key, value = (x.index_select(0, self._spread[0]) for x in (rows, key, value))
        at = self.length
        keys, values = (kept[: self.num_places] for kept in self._room(layer, key, value))
        keys[:, :, at], values[:, :, at] = key, value
        first = max(_first_visible(at, call.window), min(self._starts, default=0))
        seen = slice(first, at + 1)
        hidden = self._mask(rows)
        if hidden is not None:
            hidden = hidden[..., seen]
        out, lse = _part(rows, keys[:, :, seen], values[:, :, seen], call, hidden)
        if self._spread is None:
            return out, lse
        return out.index_select(0, self._spread[1]), lse.index_select(0, self._spread[1])

    def keys_values(self, layer: nn.Module, row: int) -> KeysValues:
        """[Hkv, tokens, K] of a running completion, after ``attend`` and before its token is counted; with the prompt's
        last stretch where that is here.
        """
        place = self.places[row]
        seen = slice(self._starts[place] if self._starts else 0, self.length + 1)
        key, value = self.kept[layer]
        return key[place, :, seen], value[place, :, seen]

    def keep(self, is_live: Sequence[bool]) -> None:
        """Drop completions that have ended. Their places are freed together, once they are a quarter."""
        live = [place for place, stays in zip(self.places, is_live, strict=True) if stays]
        if 0 < len(live) <= 0.75 * self.num_places:
            for buffers in self.kept.values():
                for kept in buffers:
                    kept[: len(live), :, : self.length] = kept[live, :, : self.length]
            if self._starts:
                self._starts, self._hidden = [self._starts[place] for place in live], None
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
        """The buffers of a layer, made at its first call with the prompts' stretches; key and value [*, Hkv, K]."""
        if layer not in self.kept:
            shape = (self.num_places, key.shape[1], self.lead + self.capacity)
            buffers = tuple(x.new_empty((*shape, x.shape[-1])) for x in (key, value))
            for place, prompt in enumerate(self.prompts):
                start = self._starts[place]
                for buffer, stretch in zip(buffers, prompt.keys_values(layer), strict=True):
                    buffer[place, :, :start] = 0
                    buffer[place, :, start : self.lead] = stretch
                del prompt.stack.kept[layer]  # no other group sees it
            self.kept[layer] = buffers[0], buffers[1]
        return self.kept[layer]

    def _mask(self, like: Tensor) -> Tensor | None:
        if self._hidden is None and any(self._starts):
            self._hidden = _hidden(self._starts, self.lead + self.capacity, like)
        return self._hidden


@dataclass(eq=False, slots=True)
class Group:
    """Completions of one prompt, in lockstep."""

    path: tuple[Stretch, ...]
    """Without the last stretch where ``own`` has it."""
    size: int
    """Tokens of the prompt: the depth of the first new token."""
    own: Own
    num_rows: int
    offset: int = 0
    """Position of a new token less its depth: pictures before it are numbered in three dimensions."""

    @property
    def depth(self) -> int:
        """Depth of the next token."""
        return self.size + self.own.steps

    @property
    def position(self) -> int:
        """Position id of the next token, on every axis."""
        return self.depth + self.offset


class Rectangle:
    """Queries of consecutive rows against consecutive places of a stack; an equal number for each place."""

    def __init__(self, start: int, stop: int, stretch: Stretch, first: int) -> None:
        self.start, self.stop, self.stack = start, stop, stretch.stack
        self.sizes = {stretch.place: stop - start}
        """Rows at each place, ascending."""
        self.firsts = {stretch.place: stretch.stack.length - stretch.length + first}
        """The first visible key of each place."""
        self._indices: tuple[Tensor, Tensor] | None = None
        self._hidden: Tensor | None = None
        self._is_ready = False

    def takes(self, start: int, stop: int, stretch: Stretch) -> bool:
        """Whether these rows can be added, with few queries that nobody wants."""
        first, last = next(iter(self.sizes)), next(reversed(self.sizes))
        if start != self.stop or stretch.stack is not self.stack or stretch.place <= last:
            return False
        most = max(*self.sizes.values(), stop - start)
        return (stretch.place + 1 - first) * most <= MAX_QUERIES * (stop - self.start)

    def add(self, start: int, stop: int, stretch: Stretch, first: int) -> None:
        self.stop = stop
        self.sizes[stretch.place] = stop - start
        self.firsts[stretch.place] = self.stack.length - stretch.length + first

    def attend(self, layer: nn.Module, rows: Tensor, call: Call) -> KeysValues:
        """Attend with the rows from ``start`` to ``stop`` among ``rows`` [B, Hkv, H/Hkv, K]."""
        if not self._is_ready:
            self._prepare(rows)
        first_place, last_place = next(iter(self.sizes)), next(reversed(self.sizes))
        num_places = last_place + 1 - first_place
        seen = slice(min(self.firsts.values()), None)
        key, value = (x[first_place : last_place + 1, :, seen] for x in self.stack.kept[layer])
        rows = rows[self.start : self.stop]
        if self._indices is not None:
            rows = rows.index_select(0, self._indices[0])
        num_rows, kv_heads, groups, _ = rows.shape
        query = rows.view(num_places, -1, kv_heads, groups, rows.shape[-1]).transpose(1, 2)
        out, lse = _part(query.flatten(2, 3), key, value, call, self._hidden)
        out = out.transpose(1, 2).reshape(num_rows, groups, kv_heads, -1).transpose(1, 2)
        lse = lse.transpose(1, 2).reshape(num_rows, groups, kv_heads).transpose(1, 2)
        if self._indices is None:
            return out, lse
        return out.index_select(0, self._indices[1]), lse.index_select(0, self._indices[1])

    def _prepare(self, like: Tensor) -> None:
        """Prepare the values that all layers read: the mask, and which rows are at which place."""
        self._is_ready = True
        places = range(next(iter(self.sizes)), next(reversed(self.sizes)) + 1)
        least = min(self.firsts.values())
        starts = [self.firsts.get(place, least) - least for place in places]
        if any(starts):
            self._hidden = _hidden(starts, self.stack.length - least, like)
        sizes = torch.tensor([self.sizes.get(place, 0) for place in places])
        most = int(sizes.max())
        if bool((sizes != most).any()):
            is_wanted = torch.arange(most) < sizes[:, None]
            taken = (is_wanted.flatten().cumsum(0) - 1).clamp_(min=0)
            given = is_wanted.flatten().nonzero().squeeze(1)
            self._indices = taken.to(like.device), given.to(like.device)


class Decoding:
    """One step of every group: the model's forward takes it in place of a layout."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self.num_tokens = sum(group.num_rows for group in groups)
        self.owns: list[tuple[Own, int, int]] = []
        """Each with its first row and end row."""
        for group, (start, stop) in self._rows():
            if self.owns and self.owns[-1][0] is group.own:
                start = self.owns.pop()[1]
            self.owns.append((group.own, start, stop))
        self._rectangles: dict[int | None, list[Rectangle]] = {}
        """The rectangles over stretches, by window."""

    def advance(self, is_live: Sequence[bool]) -> None:
        """Count the tokens that the step has added, and drop the completions that it has ended."""
        for part, start, stop in self.owns:
            part.steps += 1
            if not all(is_live[start:stop]):
                part.keep(is_live[start:stop])
        for group, (start, stop) in self._rows():
            group.num_rows = sum(is_live[start:stop])

    def place_of(self, row: int) -> tuple[Own, int]:
        """The ``Own`` that has the tokens of a completion, and its row there."""
        own, start = next((own, start) for own, start, stop in self.owns if start <= row < stop)
        return own, row - start

    def attend(
        self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, call: Call
    ) -> Tensor:
        """One layer's attention; stores the new tokens' keys and values."""
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
        rectangles = self._over_stretches(call.window)
        if rectangles or call.sinks is not None:
            out = out.to(torch.promote_types(query.dtype, torch.float32))
            lse = lse.to(out.dtype)
        for some in rectangles:
            span = slice(some.start, some.stop)
            merge(out[span], lse[span], *some.attend(layer, rows, call))
        if call.sinks is not None:
            share = torch.sigmoid(lse - call.sinks.view(shape[1:3]).to(lse.dtype))
            out *= share.unsqueeze(-1)
        return out.to(query.dtype).reshape(1, num_rows, heads, -1).transpose(1, 2)

    def _rows(self) -> Iterator[tuple[Group, tuple[int, int]]]:
        """Each group with its first row and end row."""
        bounds = accumulate((group.num_rows for group in self.groups), initial=0)
        return zip(self.groups, list(pairwise(bounds)), strict=True)

    def _over_stretches(self, window: int | None) -> list[Rectangle]:
        """The rectangles over stretches; neighbors that see the same keys count as one."""
        if window in self._rectangles:
            return self._rectangles[window]
        found: list[Rectangle] = []
        for level in range(max(len(group.path) for group in self.groups)):
            parts: list[tuple[int, int, Stretch, int]] = []
            for group, (start, stop) in self._rows():
                if level >= len(group.path):
                    continue
                stretch = group.path[level]
                first = _first_visible(group.depth - stretch.depth, window)
                if first >= stretch.length:
                    continue
                if parts and parts[-1][1:] == (start, stretch, first):
                    start = parts.pop()[0]
                parts.append((start, stop, stretch, first))
            for number, (start, stop, stretch, first) in enumerate(parts):
                if number and found[-1].takes(start, stop, stretch):
                    found[-1].add(start, stop, stretch, first)
                else:
                    found.append(Rectangle(start, stop, stretch, first))
        self._rectangles[window] = found
        return found


def _first_visible(distance: int, window: int | None) -> int:
    """Index of the first visible key, for keys that start ``distance`` before the token."""
    return 0 if window is None else max(0, distance - window + 1)


def _hidden(starts: Sequence[int], length: int, like: Tensor) -> Tensor:
    """Mask to add to the scores [members, heads, queries, length]: -inf before each member's start, else 0."""
    at = torch.arange(length, device=like.device)
    is_before = at < torch.tensor(starts, device=like.device)[:, None]
    mask = torch.zeros(is_before.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(is_before, -torch.inf)[:, None, None]


def _part(
    query: Tensor, key: Tensor, value: Tensor, call: Call, hidden: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention over some of the keys, and its log-sum-exp: every query sees every key that is not ``hidden``."""
    is_flash = call.softcap is None and query.shape[-1] == value.shape[-1]
    if is_flash and hidden is None and has_flash(query):
        # FlashAttention reads keys and values once and where they are; it has the tokens before the heads
        heads = (x.transpose(1, 2) for x in (query, key, value))
        sizes = query.shape[2], key.shape[2]
        flash = torch.ops.aten._flash_attention_forward
        out, lse, *_ = flash(*heads, None, None, *sizes, 0.0, False, False, scale=call.scale)
        return out.transpose(1, 2), lse  # log-sum-exp in float32
    if is_flash and query.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = kernel(query, key, value, 0.0, False, attn_mask=hidden, scale=call.scale)
        return out, lse
    return _explicit(query, key, value, call, hidden)


def has_flash(query: Tensor) -> bool:
    """Whether FlashAttention takes these queries."""
    size, device = query.shape[-1], query.device
    is_narrow = query.dtype in (torch.bfloat16, torch.float16)
    if device.type != "cuda" or not is_narrow or size > 256 or size % 8:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _explicit(
    query: Tensor, key: Tensor, value: Tensor, call: Call, hidden: Tensor | None
) -> tuple[Tensor, Tensor]:
    """By scores written out in at least float32, outside autocast; a GPU makes them so from 16 bit, and the keys are
    not widened.
    """
    device, wide = query.device.type, torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(device, enabled=False) if device != "meta" else nullcontext():
        if device == "cpu" or query.dtype == wide:
            scores = query.to(wide) @ key.to(wide).mT
        else:
            flat = torch.bmm(query.flatten(0, 1), key.flatten(0, 1).mT, out_dtype=wide)
            scores = flat.view(*query.shape[:2], *flat.shape[1:])
        scores = scores * call.scale
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        if hidden is not None:
            scores = scores + hidden
        return torch.softmax(scores, -1).to(value.dtype) @ value, torch.logsumexp(scores, -1)
