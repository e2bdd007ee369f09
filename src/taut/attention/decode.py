"""Attention while completions grow: one new token of each against the keys and values kept so far.

The completions of one prompt are a ``Group``; they were begun together and have one length. What a group sees is a path
of ``Stretch``es (prompt tokens, computed once and kept once, shared by every group below them in the prompts' tree) and
then its own tokens. Groups stand in the order of the tree, so the queries below a stretch are contiguous: one step is
a list of rectangles (queries, keys) as in attention/reference.py, merged by their log-sum-exp. A sink is one more
part, with nothing to attend to. Nothing is padded or masked: a rectangle has the rows and keys it has.

Shapes of a layer: q [1, H, B, K], k and v [1, Hkv, B, K] of the B new tokens -> out [1, H, B, K]; kept keys and
values [rows, Hkv, length, K]. Only attention/select.py and rollout/local.py import this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from taut.attention.call import Call
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
class Group:
    """Completions of one prompt, in lockstep."""

    path: tuple[Stretch, ...]
    own_depth: int
    """Depth of the first token of ``own``."""
    capacity: int
    """Tokens ``own`` has room for."""
    num_rows: int
    length: int = 0
    """Tokens in ``own``: of the prompt, where this group alone has them, and of the completions."""
    own: dict[nn.Module, KeysValues] = field(default_factory=dict)
    """Keys and values [rows, Hkv, capacity, K] of every attention layer; rows from num_rows on are free."""

    @property
    def depth(self) -> int:
        """Depth of the next token."""
        return self.own_depth + self.length

    def take_over(self, stretch: Stretch) -> None:
        """Begin ``own`` with a stretch that no other group sees, so that there is one rectangle and not two."""
        assert self.num_rows == 1 and self.length == 0
        self.length = stretch.length
        for layer, (key, value) in stretch.kept.items():
            for mine, theirs in zip(self.room(layer, key, value), (key, value), strict=True):
                mine[:, :, : self.length] = theirs

    def room(self, layer: nn.Module, key: Tensor, value: Tensor) -> KeysValues:
        """The buffers of a layer, made when it is first met; key and value [*, Hkv, *, K] or [*, Hkv, K]."""
        if layer not in self.own:
            shape = (self.num_rows, key.shape[1], self.capacity)
            self.own[layer] = (
                key.new_empty((*shape, key.shape[-1])),
                value.new_empty((*shape, value.shape[-1])),
            )
        return self.own[layer]

    def drop(self, row: int) -> None:
        """Forget a completion that has ended; the last one takes its place."""
        self.num_rows -= 1
        if row < self.num_rows:
            for buffers in self.own.values():
                for kept in buffers:
                    kept[row, :, : self.length] = kept[self.num_rows, :, : self.length]


Part = tuple[int, int, Stretch, int]
"""(first row, last, stretch, first key): a rectangle that several groups may share."""


@dataclass(frozen=True, eq=False, slots=True)
class Decoding:
    """One step of every group: what the model's forward is given in place of a layout."""

    groups: Sequence[Group]
    parts: dict[int | None, list[Part]] = field(default_factory=dict)
    """By window: the rectangles over stretches."""

    @property
    def num_tokens(self) -> int:
        return sum(group.num_rows for group in self.groups)

    def advance(self) -> None:
        """Count the tokens that the step has added."""
        for group in self.groups:
            group.length += 1

    def attend(
        self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, call: Call
    ) -> Tensor:
        """One layer's attention; keeps the new tokens' keys and values."""
        num_rows, heads, groups_of_heads = query.shape[2], query.shape[1], key.shape[1]
        shape = (num_rows, groups_of_heads, heads // groups_of_heads, query.shape[3])
        rows = query[0].transpose(0, 1).reshape(shape)
        key, value = key[0].transpose(0, 1), value[0].transpose(0, 1)
        parts = self._parts(call.window)
        is_merged = bool(parts) or call.sinks is not None
        wide = torch.promote_types(query.dtype, torch.float32) if is_merged else query.dtype
        out = query.new_empty((*shape[:3], value.shape[-1]), dtype=wide)
        lse = query.new_empty(shape[:3], dtype=torch.promote_types(wide, torch.float32))
        start = 0
        for group in self.groups:
            stop = start + group.num_rows
            kept = group.room(layer, key, value)
            for buffer, new in zip(kept, (key, value), strict=True):
                buffer[: group.num_rows, :, group.length] = new[start:stop]
            first = _first_visible(group, group.own_depth, call.window)
            seen = [buffer[: group.num_rows, :, first : group.length + 1] for buffer in kept]
            out[start:stop], lse[start:stop] = _part(rows[start:stop], seen[0], seen[1], call)
            start = stop
        for start, stop, stretch, first in parts:
            keys, values = (kept[:, :, first:] for kept in stretch.kept[layer])
            some = _shared_part(rows[start:stop], keys, values, call)
            merge(out[start:stop], lse[start:stop], *some)
        if call.sinks is not None:
            out *= torch.sigmoid(lse - call.sinks.view(shape[1:3]).to(lse.dtype)).unsqueeze(-1)
        return out.to(query.dtype).view(1, num_rows, heads, -1).transpose(1, 2)

    def _parts(self, window: int | None) -> list[Part]:
        """The rectangles over stretches: neighbours that see the same keys are one."""
        if window not in self.parts:
            found: list[Part] = []
            last: dict[Stretch, int] = {}
            start = 0
            for group in self.groups:
                stop = start + group.num_rows
                for stretch in group.path:
                    first = _first_visible(group, stretch.depth, window)
                    if first >= stretch.length:
                        continue
                    at = last.get(stretch)
                    if at is not None and found[at][1] == start and found[at][3] == first:
                        found[at] = (found[at][0], stop, stretch, first)
                    else:
                        last[stretch] = len(found)
                        found.append((start, stop, stretch, first))
                start = stop
            self.parts[window] = found
        return self.parts[window]


def _first_visible(group: Group, depth: int, window: int | None) -> int:
    """The first of the keys that begin at ``depth`` which the group's next token sees."""
    return 0 if window is None else max(0, group.depth - window + 1 - depth)


def _shared_part(rows: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Many rows against the same keys. rows [B, Hkv, H/Hkv, K], key [1, Hkv, L, K]."""
    num_rows, heads, group, _ = rows.shape
    out, lse = _part(rows.transpose(0, 1).reshape(1, heads, num_rows * group, -1), key, value, call)
    back = (heads, num_rows, group)
    return out[0].reshape(*back, -1).transpose(0, 1), lse[0].reshape(back).transpose(0, 1)


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
