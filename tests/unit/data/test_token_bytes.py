"""The bytes of every token: joined, they are what the tokenizer decodes."""

from __future__ import annotations

import pytest
from tests.helpers.tiny_tokenizers import tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from taut.data.render.tokens import token_bytes

TEXTS = [
    "the cat sat",
    "  two  spaces\tand\r\n",
    "naïve café 日本語 🙂",
    "<|im_start|>user\nhi<|im_end|>",
]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_a_byte_level_vocabulary_are_the_decoded_text(text: str) -> None:
    tokenizer = tiny_tokenizer()
    table = token_bytes(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(table[index] for index in ids).decode() == tokenizer.decode(ids) == text
    assert any(len(table[i]) == 1 for i in ids) and len(table) == len(tokenizer)


def test_pieces_with_bytes_for_what_they_lack() -> None:
    """As Llama 2's: a mark for the space before a word, and a token for each byte."""
    pieces = ["<unk>", *(f"<0x{n:02X}>" for n in range(256)), "▁the", "▁cat", "s"]
    backend = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    table = token_bytes(tokenizer)
    ids = [257, 258, 259, 1 + 0xC3, 1 + 0xA9]
    assert b"".join(table[index] for index in ids).decode() == " the catsé"
    assert tokenizer.decode(ids) == "the catsé", "which drops the first word's space"


def test_whole_words() -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "dog": 2}, "a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    assert token_bytes(PreTrainedTokenizerFast(tokenizer_object=backend)) == [b"a", b"", b"dog"]
