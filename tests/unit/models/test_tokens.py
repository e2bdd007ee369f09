"""Added tokens (ids, rows, ties), and rows that were never trained: detected, and trained or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.helpers.tiny_models import parameters_of, tiny_model
from tests.helpers.tiny_tokenizers import tiny_tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from taut.errors import ModelError
from taut.models import architecture, heads
from taut.models.load import freeze
from taut.models.lora.adapters import apply_lora, choose_rows
from taut.models.settings import LoraConfig, TokensConfig
from taut.models.tokens import (
    add_tokens,
    add_tokens_to_tokenizer,
    require_trained,
    untrained_rows,
)

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


END = 40


def lived_in(name: str) -> PreTrainedModel:
    """A model whose rows have left their initial norm, as in a trained one."""
    model = tiny_model(name, vocab_size=400)
    with torch.no_grad():
        for table in {architecture.head(model).weight, architecture.embedding(model).weight}:
            table.mul_(torch.linspace(2, 4, 400, dtype=table.dtype)[:, None])
    return model


def zero(table: Tensor) -> None:
    table[END] *= 1e-4


def twin(table: Tensor) -> None:
    table[END] = table[77] * 1.001


def mean(table: Tensor) -> None:
    table[END] = table.mean(0) + 1e-4


def initial(table: Tensor) -> None:
    table[END] = 0.2 * torch.randn(table.shape[1], generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", ["qwen2", "llama"])
@pytest.mark.parametrize(
    ("plant", "sign"),
    [
        (zero, "of the median row's"),
        (twin, "from that of id 77"),
        (mean, "from the mean row"),
        (initial, "is an initial draw's, as of"),
    ],
)
def test_each_sign_of_an_untrained_row_is_seen(
    name: str, plant: Callable[[Tensor], None], sign: str
) -> None:
    model = lived_in(name)
    tokens = {END: "<|im_end|>", 12: "a", 399: "b"}
    assert untrained_rows(model, tokens) == {}
    with torch.no_grad():
        plant(architecture.head(model).weight)
    found = untrained_rows(model, tokens)
    assert list(found) == [END]
    assert found[END].startswith("<|im_end|>: never trained, in the ")
    assert sign in found[END]


def test_in_a_model_at_its_random_draw_nothing_is_called_untrained() -> None:
    model = tiny_model("llama", vocab_size=400)
    assert untrained_rows(model, {index: str(index) for index in range(0, 400, 40)}) == {}


def test_frozen_rows_are_refused_with_the_remedy() -> None:
    for name, remedy in (
        ("llama", r"lora.modules_to_save=\['model.embed_tokens', 'lm_head'\]"),
        ("qwen2", r"lora.modules_to_save=\['model.embed_tokens'\]"),
    ):
        model = tiny_model(name)
        add_tokens(model, [97])
        with pytest.raises(ModelError, match=remedy):
            require_trained(apply_lora(model, LoraConfig(rank=2)), {97: "<|new|>: added"})
    model = tiny_model("qwen2")
    freeze(model, ["*embed_tokens*"])
    with pytest.raises(
        ModelError, match=r"<\|end\|>: .* frozen in the embedding and the head.*out"
    ):
        require_trained(model, {7: "<|end|>: never trained"})


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_each_remedy_works(name: str) -> None:
    needed = {97: "<|new|>: added"}
    require_trained(tiny_model(name), needed)
    names = architecture.table_names(tiny_model(name))
    whole = LoraConfig(rank=2, modules_to_save=names)
    assert choose_rows(tiny_model(name), whole, needed, ()) == {}
    require_trained(apply_lora(tiny_model(name), whole), needed)
    by_rows = LoraConfig(rank=2)
    model = tiny_model(name)
    rows = choose_rows(model, by_rows, needed, (5,))
    assert rows == {table: [97] for table in names}
    add_tokens(model, [97])
    require_trained(apply_lora(model, by_rows, rows=rows), needed)


def test_which_rows_train_is_chosen_by_the_key() -> None:
    model = tiny_model("llama")
    both = ["model.embed_tokens", "lm_head"]
    always, never = (LoraConfig(rank=2, train_token_rows=way) for way in ("always", "never"))
    assert choose_rows(model, LoraConfig(rank=2), {}, (5,)) == {}
    assert choose_rows(model, always, {9: ""}, (5,)) == {table: [5, 9] for table in both}
    assert choose_rows(model, never, {9: ""}, (5,)) == {}
    half = LoraConfig(rank=2, modules_to_save=["embed_tokens"])
    assert choose_rows(model, half, {9: ""}, ()) == {"lm_head": [9]}


def test_rows_of_a_head_with_a_bias_are_refused() -> None:
    model = tiny_model("llama")
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(97, dtype=torch.float64))
    with pytest.raises(ModelError, match="a head with a bias"):
        choose_rows(model, LoraConfig(rank=2), {9: ""}, ())


def test_a_part_that_is_frozen_is_named() -> None:
    model = tiny_model("llama")
    adapted = apply_lora(model, LoraConfig(rank=2), rows={"lm_head": [9]})
    with pytest.raises(ModelError, match="its row is frozen in the embedding, so"):
        require_trained(adapted, {9: "x: never trained"})
