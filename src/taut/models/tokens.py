"""Added tokens, and rows of the embedding and the head that were never trained.

Adding: a tokenizer's length and a model's number of rows differ in practice, so rows are added only for ids that have
none, and never removed. The row of every new token, added or one of the model's spare rows, starts as the mean of the
existing tokens' rows (and its head bias as their mean bias). Tied parameters stay tied. ``lora.choose_rows`` makes
these rows train.

Never trained: a base model's vocabulary often holds tokens its training never used, a chat template's end of turn among
them. Full training learns the row; under adapters or freezing the row stays as it is, the model cannot tell this token
from other unused ones, and its answers never end. A row counts as never trained where it shows one of four signs, in
the embedding or in the head:

    zero       its norm is below 0.01 of the median row's (weight decay, or zero initialization)
    twin       another row is closer than 0.05 of the median norm: tokens that never occur get the same updates and
               decay to the same vector
    mean       it is closer than that to the mean row: how added tokens are initialized
    initial    its norm is within three standard deviations of a random draw's, sigma * sqrt(D), and that holds for
               fewer than 1% of the rows

Seen in SmolLM2-135M-Instruct (49,152 rows, tied): the eleven unused markers lie at 0.000 of the median norm from
each other, the tuned end of turn (once one of them) at 0.145, no word of 400 closer than 0.37 to any other; of 503
words examined none was called untrained.

Limits: a single unused row in a model so young that its rows still are random draws is not seen (initial needs most
rows to have left), nor a row that was trained a little and badly. A row copied from another on purpose is taken for
untrained; it is then trained, which does no harm.

All of this runs before weights are sharded, and adding before adapters are applied.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.errors import ModelError
from taut.models import architecture
from taut.models.load import load_tokenizer
from taut.models.settings import TokensConfig

ZERO = 0.01
NEAR = 0.05
MOST_INITIAL = 0.01


def add_tokens_to_tokenizer(tokenizer: PreTrainedTokenizerBase, config: TokensConfig) -> list[int]:
    """Add the tokens that the vocabulary lacks; returns their ids."""
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


def require_same_tokenizer(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    key: str,
    trust_remote_code: bool,
    *,
    may_lack: Collection[int] = (),
    may_have_more: bool = True,
) -> dict[str, int]:
    """The vocabulary of the model at ``path``. Raises ModelError where an id stands for another token there than here.

    ``may_lack``: ids of tokens that it need not have. ``may_have_more``: whether it may have tokens that are unknown
    here.
    """
    try:
        theirs: dict[str, int] = load_tokenizer(path, trust_remote_code).get_vocab()
    except ModelError as error:
        raise ModelError(f"{key}: {error}") from error
    ours = tokenizer.get_vocab()
    compared = ours if may_have_more else {**theirs, **ours}
    for token in sorted(compared, key=compared.__getitem__):
        index, other = ours.get(token), theirs.get(token)
        if index != other and not (other is None and index in may_lack):
            raise ModelError(
                f"{key}={path}: its tokenizer has {other} for {token!r} and that of the trained model has {index}; "
                "expected the same tokenizer; name a model of the same family"
            )
    return theirs


@torch.no_grad()
def add_tokens(model: nn.Module, new_ids: list[int]) -> int:
    """Give every id of ``new_ids`` a row that starts as the mean of the tokens' before it; returns the number of rows
    added.
    """
    if not new_ids:
        return 0
    inner = architecture.unwrap(model)
    table = architecture.stored_table(architecture.embedding(inner))
    assert table is not None, "an embedding has a weight"
    num_before = table.shape[0]
    num_added = max(0, max(new_ids) + 1 - num_before)
    if num_added:
        inner.resize_token_embeddings(num_before + num_added, mean_resizing=False)
    num_known = min(num_before, min(new_ids))
    tables = list(_tables(inner).values())
    head = architecture.head(inner) if architecture.has_head(inner) else None
    if head is not None and head.bias is not None:
        tables.append(head.bias)
    for table in tables:
        table[torch.tensor(new_ids, device=table.device)] = table[:num_known].mean(0)
    return num_added


@torch.no_grad()
def untrained_rows(model: nn.Module, tokens: Mapping[int, str]) -> dict[int, str]:
    """id -> the evidence, for those of ``tokens`` (id -> how it is written) whose row was never trained."""
    sigma = float(getattr(architecture.text_config(model), "initializer_range", None) or 0.0)
    evidence: dict[int, str] = {}
    for name, stored in _tables(model).items():
        table = stored.to(torch.promote_types(stored.dtype, torch.float32))
        norms = torch.linalg.vector_norm(table, dim=1)
        median, mean = float(norms.median()), table.mean(0)
        is_drawn = (norms - sigma * table.shape[1] ** 0.5).abs() < 3 * sigma / 2**0.5
        share = float(is_drawn.double().mean())
        for index, token in tokens.items():
            row, norm = table[index], float(norms[index])
            squares = norms.square() - 2 * (table @ row)
            squares[index] = torch.inf
            nearest = int(squares.argmin())
            from_nearest, from_mean = (float((r - row).norm()) for r in (table[nearest], mean))
            if norm < ZERO * median:
                sign = f"its norm is {norm / median:.2g} of the median row's"
            elif from_nearest < NEAR * median:
                sign = (
                    f"it is {from_nearest / median:.3f} of a row's norm from that of id {nearest}"
                )
            elif from_mean < NEAR * median:
                sign = f"it is {from_mean / median:.3f} of a row's norm from the mean row"
            elif bool(is_drawn[index]) and share < MOST_INITIAL:
                sign = f"its norm {norm:.3g} is an initial draw's, as of {share:.2%} of the rows"
            else:
                continue
            evidence.setdefault(index, f"{token}: never trained, in the {name} {sign}")
    return evidence


def require_trained(model: nn.Module, needed: Mapping[int, str]) -> None:
    """Raise ModelError where one of these rows (id -> why it has to train) is frozen."""
    trained = {id(p) for p in model.parameters() if p.requires_grad}

    def is_trained(module: nn.Module, index: int) -> bool:
        rows = architecture.trained_rows(module)
        if rows is not None and index in rows.index_R.tolist():
            return rows.weight_RD.requires_grad
        return id(architecture.stored_table(module)) in trained

    for index, why in needed.items():
        frozen = [
            name
            for name, module in architecture.tables(model).items()
            if not is_trained(module, index)
        ]
        if frozen:
            names = architecture.table_names(model)
            remedy = f"take {' and '.join(names)} out of freeze"
            if hasattr(model, "peft_config"):
                remedy = (
                    f"set lora.train_token_rows=auto or lora.modules_to_save={names} and do not freeze them; with "
                    "lora.adapter, merge it into its model first and train from that"
                )
            raise ModelError(
                f"{why}; its row is frozen in the {' and the '.join(frozen)}, so the model could not learn it; "
                f"{remedy}"
            )


def _tables(model: nn.Module) -> dict[str, Tensor]:
    """The tables of embedding and head; one where they are tied."""
    modules = architecture.tables(model)
    if architecture.is_tied(model):
        del modules["head"]
    tables = {name: architecture.stored_table(module) for name, module in modules.items()}
    return {name: table for name, table in tables.items() if table is not None}
