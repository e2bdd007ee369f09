"""What one attention layer asks for, read from the keywords the library hands to an attention function.

A keyword that changes the maths is carried in ``Call``; a keyword known to change nothing is listed in ``HARMLESS``;
anything else is refused, never dropped. Attention dropout is refused: noise would depend on the layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from taut.errors import AttentionError

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
"""Keywords seen in the library's calls that do not change what attention computes here."""


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """One layer's attention: scores are ``softcap(scale * q k^T)`` over the visible keys, plus a sink per head."""

    scale: float
    window: int | None = None
    """Sliding window W: a token sees itself and the W - 1 before it."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """[H]: a score per head that takes part in the softmax and attends to nothing."""


def read_call(module: nn.Module, head_dim: int, keywords: Mapping[str, Any]) -> Call:
    """The ``Call`` a layer makes. Raises AttentionError for a keyword that would be dropped."""
    given = {name: value for name, value in keywords.items() if value is not None}
    where = f"attention layer {getattr(module, 'layer_idx', '?')} ({type(module).__name__})"
    if given.pop("dropout", 0.0):
        raise AttentionError(
            f"{where} asks for attention dropout; taut has none, since noise inside attention depends on "
            "how samples are packed; set attention_dropout to 0 in the model's config.json"
        )
    if not given.get("is_causal", getattr(module, "is_causal", True)):
        raise AttentionError(f"{where} is not causal; taut trains causal language models")
    scale = given.pop("scaling", None)
    window, softcap, sinks = (
        given.pop(name, None) for name in ("sliding_window", "softcap", "s_aux")
    )
    unknown = sorted(set(given) - HARMLESS)
    if unknown:
        raise AttentionError(
            f"{where} passes the keyword(s) {', '.join(unknown)}, which taut does not know; "
            "it could change what attention computes, so it is not ignored"
        )
    return Call(head_dim**-0.5 if scale is None else float(scale), window, softcap, sinks)
