"""Added tokens: into the tokenizer, and rows for them in the embedding and the head.

A tokenizer's length and a model's rows differ in practice, so rows are added only where an id has
none, and never removed. Every new token's row, added or one of the spare rows a model came with,
starts as the mean of the rows of the tokens there were (and its head bias as their mean bias).
Tied parameters stay tied. That they train is seen to by ``lora.choose_rows`` and ``untrained``.

May import errors, config and models.anatomy. Before adapters are applied and weights are sharded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

import torch
from torch import Tensor, nn
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.config import configclass
from taut.errors import ConfigError, ModelError
from taut.models import architecture


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
    inner = architecture.unwrap(model)
    num_before = _rows(architecture.embedding(inner)).shape[0]
    num_added = max(0, max(new_ids) + 1 - num_before)
    if num_added:
        inner.resize_token_embeddings(num_before + num_added, mean_resizing=False)
    num_known = min(num_before, min(new_ids))
    tables: list[Tensor] = [_rows(architecture.embedding(inner))]
    head = architecture.head(inner) if architecture.has_head(inner) else None
    if head is not None and not architecture.is_tied(inner):
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


# --------------------------------------------------------------------------------------------------
# Rows of the embedding and the head that were never trained, and whether they would stay so.
#
# A base model's vocabulary often holds tokens its training never used, a chat template's turn end among them. Trained
# whole, the model learns the row; under adapters or freezing the row stays as it is, the model cannot tell this token
# from other unused ones, and its answers never end.
#
# A row is taken as never trained where it shows one of four signs, in the embedding or in the head:
#
#  zero       its norm is below 0.01 of the median row's (weight decay, or zero initialisation)
#  twin       another row lies closer than 0.05 of the median norm: what is never seen gets the same updates and decays
#             to the same vector
#  mean       it lies closer than that to the mean row: how added tokens are initialised
#  initial    its norm is within three standard deviations of a random draw's, sigma * sqrt(D), and that of fewer than
#             1% of the rows is
#
# Seen in SmolLM2-135M-Instruct (49,152 rows, tied): the eleven unused markers lie at 0.000 of the median norm from
# each other, the tuned turn end (once one of them) at 0.145, no word of 400 closer than 0.37 to any other; of 503
# words looked at none was called untrained.
#
# What this cannot see: a single unused row in a model so young that its rows still are random draws (initial needs
# most rows to have left), and a row that was trained a little and badly. What it may take for untrained though it is
# not: a row copied from another on purpose; it is then trained, which does no harm.
#
# May import errors and models.anatomy. Before weights are sharded.

ZERO = 0.01
NEAR = 0.05
MOST_INITIAL = 0.01


@torch.no_grad()
def untrained_rows(model: nn.Module, tokens: Mapping[int, str]) -> dict[int, str]:
    """id -> the evidence, for those of ``tokens`` (id -> how it is written) whose row was never trained."""
    sigma = float(getattr(architecture.text_config(model), "initializer_range", None) or 0.0)
    found: dict[int, str] = {}
    for name, table in _tables(model).items():
        norms = torch.linalg.vector_norm(table, dim=1)
        for index, token in tokens.items():
            sign = _sign(table, norms, index, sigma)
            if sign is not None:
                found.setdefault(index, f"{token}: never trained, in the {name} {sign}")
    return found


def require_trained(model: nn.Module, needed: Mapping[int, str]) -> None:
    """Raise ModelError where one of these rows (id -> why it has to train) is frozen."""
    inner = architecture.unwrap(model)
    for index, why in needed.items():
        frozen = [
            name
            for name, module in _modules(inner).items()
            if not _is_trained(module, index, model)
        ]
        if frozen:
            raise ModelError(
                f"{why}; its row is frozen in the {' and the '.join(frozen)}, so the model could not learn it; "
                f"{_remedy(model)}"
            )


def _remedy(model: nn.Module) -> str:
    names = architecture.table_names(model)
    if not hasattr(model, "peft_config"):
        return f"take {' and '.join(names)} out of freeze"
    return (
        f"set lora.train_rows=auto or lora.modules_to_save={names} and do not freeze them; with lora.adapter, merge "
        "it into its model first and train from that"
    )


def _is_trained(module: nn.Module, index: int, model: nn.Module) -> bool:
    rows = architecture.trained_rows(module)
    if rows is not None and index in rows.index_R.tolist():
        return rows.weight_RD.requires_grad
    table = architecture.stored_table(module)
    return any(p is table and p.requires_grad for p in model.parameters())


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """The embedding and the head, if there is one; where they are tied too, since their rows could train apart."""
    inner = architecture.unwrap(model)
    head = inner.get_output_embeddings()  # type: ignore[no-untyped-call]
    return {"embedding": architecture.embedding(inner)} | ({} if head is None else {"head": head})


def _tables(model: nn.Module) -> dict[str, Tensor]:
    """Embedding and head; one where they are tied."""
    modules = _modules(model)
    if architecture.is_tied(model):
        del modules["head"]
    tables = {name: architecture.stored_table(module) for name, module in modules.items()}
    return {name: table for name, table in tables.items() if table is not None}


def _sign(table: Tensor, norms: Tensor, index: int, sigma: float) -> str | None:
    """What shows that a row was never trained, with its number; None: nothing does."""
    row, norm, median = table[index], float(norms[index]), float(norms.median())
    if norm < ZERO * median:
        return f"its norm is {norm / median:.2g} of the median row's"
    squares = norms.square() - 2 * (table @ row)
    squares[index] = torch.inf
    nearest = int(squares.argmin())
    away = float((table[nearest] - row).norm())
    if away < NEAR * median:
        return f"it is {away / median:.3f} of a row's norm from that of id {nearest}"
    away = float((table.mean(0) - row).norm())
    if away < NEAR * median:
        return f"it is {away / median:.3f} of a row's norm from the mean row"
    drawn = (norms - sigma * table.shape[1] ** 0.5).abs() < 3 * sigma / 2**0.5
    share = float(drawn.double().mean())
    if bool(drawn[index]) and share < MOST_INITIAL:
        return f"its norm {norm:.3g} is an initial draw's, as of {share:.2%} of the rows"
    return None
