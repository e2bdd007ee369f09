"""Added tokens: into the tokenizer, and rows for them in the embedding and the head.

A tokenizer's length and a model's rows differ in practice, so rows are added only where an id has
none, and never removed. Every new token's row, added or one of the spare rows a model came with,
starts as the mean of the rows of the tokens there were (and its head bias as their mean bias).
Tied parameters stay tied. That they train is seen to by ``lora.choose_rows`` and ``untrained``.

May import errors, config and models.anatomy. Before adapters are applied and weights are sharded.
"""

from __future__ import annotations

from dataclasses import field

import torch
from torch import Tensor, nn
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.config import configclass
from taut.errors import ConfigError, ModelError
from taut.models import anatomy


@configclass
class TokensConfig:
    """Tokens the vocabulary lacks."""

    add: list[str] = field(default_factory=list)
    """Tokens to add, each one id from then on: special tokens, never split. One that exists is
    left alone.
    """

    def __post_init__(self) -> None:
        wrong = [token for token in self.add if not token or token != token.strip()]
        if wrong or len(set(self.add)) != len(self.add):
            raise ConfigError(
                f"tokens.add={self.add} has an empty, padded or repeated token; list each once, "
                "without spaces around"
            )


def add_tokens_to_tokenizer(tokenizer: PreTrainedTokenizerBase, config: TokensConfig) -> list[int]:
    """Add what the vocabulary lacks; returns the ids of the tokens that are new."""
    vocabulary = tokenizer.get_vocab()
    missing = [token for token in config.add if token not in vocabulary]
    if not missing:
        return []
    tokenizer.add_tokens(missing, special_tokens=True)
    vocabulary = tokenizer.get_vocab()
    ids = [vocabulary[token] for token in missing]
    for token, number in zip(missing, ids, strict=True):
        if tokenizer.encode(token, add_special_tokens=False) != [number]:
            raise ModelError(
                f"tokens.add: {token!r} does not become one id in this tokenizer; choose another "
                "spelling, like <|name|>"
            )
    return ids


@torch.no_grad()
def add_tokens(model: nn.Module, new_ids: list[int]) -> int:
    """Give every id of ``new_ids`` a row that starts as the mean of the tokens' before it; returns
    rows added.
    """
    if not new_ids:
        return 0
    inner = anatomy.unwrap(model)
    num_before = _rows(anatomy.embedding(inner)).shape[0]
    num_added = max(0, max(new_ids) + 1 - num_before)
    if num_added:
        inner.resize_token_embeddings(num_before + num_added, mean_resizing=False)
    num_known = min(num_before, min(new_ids))
    tables: list[Tensor] = [_rows(anatomy.embedding(inner))]
    head = anatomy.head(inner) if anatomy.has_head(inner) else None
    if head is not None and not anatomy.is_tied(inner):
        tables.append(head.weight)
    if head is not None and head.bias is not None:
        tables.append(head.bias)
    for table in tables:
        table[torch.tensor(new_ids, device=table.device)] = table[:num_known].mean(0)
    return num_added


def _rows(embedding: nn.Module) -> Tensor:
    weight = getattr(embedding, "weight", None)
    assert isinstance(weight, Tensor), "an embedding has a weight"
    return weight
