"""A prompt's ids are cut from those of its row where that is sure, and are then those of the prompt alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from taut.data.render.chat_template import Template, Text

TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '\\n' + m.content + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)
WORDS = [
    "Hello",
    " world",
    "\n",
    "  ",
    "a",
    "user",
    "<|start|>",
    "<|sta",
    "|>",
    "é",
    "😀",
    "\u0301",
    "_",
    "\t",
    "<|end|>",
]


def bpe_bytes() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [*WORDS, "Hello world user assistant system"] * 3,
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False),
    )
    return made


def metaspace(scheme: Any) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        trainer = trainers.BpeTrainer(special_tokens=["<unk>"], vocab_size=200, show_progress=False)
        made.train_from_iterator(["Hello world user assistant system a b"] * 3, trainer)
        return made

    return make


def prepended() -> Tokenizer:
    """As Llama's: no pre-tokenizer, a normalizer that prepends to each piece."""
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(special_tokens=["<unk>"], vocab_size=200, show_progress=False)
    made.train_from_iterator(["Hello world user assistant system a b"] * 3, trainer)
    return made


def wordpiece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        special_tokens=["<unk>"], vocab_size=200, show_progress=False
    )
    made.train_from_iterator(["Hello world user assistant system a b"] * 3, trainer)
    return made


def template_of(make: Callable[[], Tokenizer], added: list[AddedToken]) -> Template:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make(), chat_template=TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": added})  # type: ignore[dict-item]
    return Template(tokenizer, None)


def mark(text: str, **options: Any) -> AddedToken:
    return AddedToken(text, special=True, normalized=False, **options)


def texts(seed: int) -> tuple[str, str]:
    """A row and a prompt with which it begins."""
    draw = random.Random(seed)
    first, second, answer = ("".join(draw.choices(WORDS, k=draw.randint(1, 9))) for _ in range(3))
    prompt = (
        f"<|start|>system\n{first}<|end|>\n<|start|>user\n{second}<|end|>\n<|start|>assistant\n"
    )
    return f"{prompt}{answer}<|end|>\n", prompt


@pytest.mark.parametrize(
    "make",
    [bpe_bytes, metaspace("always"), metaspace("first"), metaspace("never"), prepended, wordpiece],
)
def test_a_prompt_cut_from_its_row_is_the_prompt_alone(make: Callable[[], Tokenizer]) -> None:
    template = template_of(make, [mark("<|start|>"), mark("<|end|>")])
    assert set(template._marks) == {"<|start|>", "<|end|>"}
    for seed in range(60):
        row, prompt = (Text(text, True) for text in texts(seed))
        assert template._cut(prompt.text) is not None
        ids_of = template.encode([row, prompt])
        for text in (row, prompt):
            alone = template.tokenizer(text.text, add_special_tokens=False)["input_ids"]
            assert ids_of[text] == alone, text


@pytest.mark.parametrize(
    ("added", "marks"),
    [
        ([mark("<|start|>", rstrip=True), mark("<|end|>", lstrip=True)], set()),
        ([mark("<|start|>"), mark("<|start|>assistant"), mark("<|end|>")], {"<|end|>"}),
        ([mark("<|start|>"), mark("<|end|>"), mark("n<|st")], {"<|end|>"}),
        ([mark("<|start|>"), mark("<|end|>"), mark(">\n<")], set()),
        ([AddedToken("<|start|>", special=True, normalized=True), mark("<|end|>")], {"<|end|>"}),
    ],
)
def test_a_token_that_does_not_part_the_text_for_sure_is_no_mark(
    added: list[AddedToken], marks: set[str]
) -> None:
    template = template_of(bpe_bytes, added)
    assert set(template._marks) == marks
    for seed in range(20):
        row, prompt = (Text(text, True) for text in texts(seed))
        ids_of = template.encode([row, prompt])
        alone = template.tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
        assert ids_of[prompt] == alone


def test_special_tokens_that_are_split_are_no_marks() -> None:
    template = template_of(bpe_bytes, [mark("<|start|>"), mark("<|end|>")])
    template.tokenizer.split_special_tokens = True
    row, prompt = (Text(text, True) for text in texts(0))
    assert template._cut(prompt.text) is None
    ids_of = template.encode([row, prompt])
    alone = template.tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
    assert ids_of[prompt] == alone and len(alone) > 20
