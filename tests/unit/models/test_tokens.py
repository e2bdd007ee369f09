"""Added tokens: ids, rows and ties."""

from __future__ import annotations

import pytest
import torch
from tests.models import parameters_of, tiny_model
from tests.tokenizers import tiny_tokenizer

from taut.models import architecture, heads
from taut.models.tokens import TokensConfig, add_tokens, add_tokens_to_tokenizer

ADD = TokensConfig(add=["<|think|>", "<|im_end|>", "<|done|>"])


def test_only_missing_tokens_are_added_and_each_is_one_id() -> None:
    tokenizer = tiny_tokenizer()
    before = len(tokenizer)
    ids = add_tokens_to_tokenizer(tokenizer, ADD)
    assert ids == [before, before + 1]
    assert tokenizer.encode("a<|think|>b<|done|>", add_special_tokens=False)[1] == ids[0]
    assert add_tokens_to_tokenizer(tokenizer, ADD) == []


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_rows_are_added_as_the_mean_and_ties_stay(name: str) -> None:
    model = tiny_model(name)
    before = parameters_of(model)
    assert add_tokens(model, [97, 99]) == 3
    head, table = architecture.head(model).weight, architecture.embedding(model).weight
    assert table.shape == head.shape == (100, 32)
    assert (head is table) == (name == "qwen2")
    assert model.config.vocab_size == 100
    old = before["model.embed_tokens.weight"]
    assert torch.equal(table[:97], old)
    for row in (97, 99):
        assert torch.allclose(table[row], old.mean(0), atol=1e-15)
    if name == "llama":
        assert torch.allclose(head[97], before["lm_head.weight"].mean(0), atol=1e-15)
    assert heads.check_head(model) < 1e-12


def test_spare_rows_are_used_before_any_is_added() -> None:
    """90 tokens in a model of 97 rows: the new one takes a spare row, which starts as the mean of
    the 90.
    """
    model = tiny_model("llama")
    table = architecture.embedding(model).weight
    mean, others = table[:90].mean(0), torch.cat([table[:90], table[91:]])
    assert add_tokens(model, [90]) == 0
    assert architecture.embedding(model).weight is table
    assert torch.allclose(table[90], mean, atol=1e-15)
    assert torch.equal(torch.cat([table[:90], table[91:]]), others)
    assert add_tokens(model, []) == 0
