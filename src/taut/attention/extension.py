"""Attention of a prompt's new tokens, where keys and values of its first tokens are kept from an earlier call.

The layout is that of the whole prompts; the model's forward takes an ``Extension`` of it in place of the layout, and
computes the new tokens only. In every layer their keys and values join the kept ones in the layout's order, and the
backend leaves out the queries of the others, as in a last layer of which few rows are read. What windows, sinks or
blocks that see themselves both ways make of it is the backend's, so every model that has a layout has an extension.

Shapes of a layer: q [1, H, R, K], k and v [1, Hkv, R, K] of the R new tokens -> out [1, H, R, K]; kept keys and values
[Hkv, tokens, K].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from taut.attention.decode import KeysValues
from taut.attention.layout import Call, Layout
from taut.types import IntArray, to_device

Attend = Callable[[Tensor, Tensor, Tensor, Layout, Call], Tensor]


@dataclass(eq=False, slots=True)
class Extension:
    """A layout whose new tokens are computed, and the others' keys and values are kept."""

    layout: Layout
    """Of all tokens, with room for their keys and values; ``rows_read`` are the new ones."""
    kept: Sequence[Mapping[nn.Module, KeysValues]]
    """Keys and values by layer."""
    order_T: Tensor
    """int64: index of each token's keys and values in the concatenation of all kept ones and the new ones."""
    _rows: Tensor = field(init=False)

    def __post_init__(self) -> None:
        assert self.layout.row_index is not None and self.layout.kept is not None
        self._rows = self.layout.row_index

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are computed."""
        return self._rows.numel()

    def attend(
        self,
        layer: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        call: Call,
        backend: Attend,
    ) -> Tensor:
        """One layer's attention; stores the keys and values of all tokens in the layout."""
        assert self.layout.kept is not None
        kept = [some[layer] for some in self.kept]
        keys, values = (
            torch.cat([*(pair[n] for pair in kept), new[0]], 1)
            .index_select(1, self.order_T)
            .unsqueeze(0)
            for n, new in enumerate((key, value))
        )
        self.layout.kept[layer] = keys, values
        queries = query.new_zeros((*query.shape[:2], self.layout.num_tokens, query.shape[-1]))
        queries[:, :, self._rows] = query
        return backend(queries, keys, values, self.layout, call)[:, :, self._rows]


def extend(
    layout: Layout,
    found: Sequence[tuple[IntArray, Mapping[nn.Module, KeysValues], int]],
    read_R: Tensor,
) -> Extension:
    """The extension of a layout. ``found``: tokens (flat indices), the keys and values that begin with theirs, and of
    how many tokens these are; of a token that is found more than once all are the same. ``read_R``: those that are
    computed although they are found.
    """
    order_T = torch.full((layout.num_tokens,), -1)
    sources: dict[int, tuple[int, Mapping[nn.Module, KeysValues]]] = {}
    num_kept = 0
    for tokens, kept, size in found:
        if id(kept) not in sources:
            sources[id(kept)] = num_kept, kept
            num_kept += size
        order_T[tokens] = sources[id(kept)][0] + torch.arange(tokens.size)
    order_T[read_R] = -1
    is_new = order_T < 0
    order_T[is_new] = num_kept + torch.arange(int(is_new.sum()))
    whole = replace(layout, rows_read=is_new.nonzero().squeeze(1).numpy(), is_last=True, kept={})
    (order_T,) = to_device([order_T], layout.device)
    return Extension(whole, [kept for _, kept in sources.values()], order_T)
