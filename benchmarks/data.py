"""The benchmark's rows and models, generated from fixed seeds: nothing is downloaded.

A row is ``<bos> prompt <sep> completion <eos>`` over a vocabulary in which every word is one token,
so that every framework sees the same ids whichever way it tokenizes; the targets are the completion
and ``<eos>``. Word ids are drawn with Zipf-like frequencies; what they say does not matter, the
models are random.

Imported by the benchmarks that train.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIALS = ("<pad>", "<bos>", "<eos>", "<sep>", "<unk>")
PAD, BOS, EOS, SEP, UNK = range(len(SPECIALS))
LONGEST = 2048
TEMPLATE = (
    "{{ '<bos>' }}{% for message in messages %}{% if message.role == 'user' %}"
    "{{ ' ' + message.content + ' <sep>' }}{% else %}{{ ' ' + message.content + ' <eos>' }}"
    "{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Row:
    """Token ids, and how many of them are prompt (``<bos>`` and ``<sep>`` included)."""

    ids: tuple[int, ...]
    num_prompt: int

    @property
    def num_targets(self) -> int:
        return len(self.ids) - self.num_prompt


@dataclass(frozen=True)
class Model:
    """A random model of the Llama architecture, with heads of 64."""

    name: str
    num_layers: int
    hidden: int
    vocab: int
    has_tied_embeddings: bool
    max_length: int = 2 * LONGEST

    @property
    def num_kv_heads(self) -> int:
        return max(2, self.hidden // 256)

    def layer_products(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of the matrix products of one layer, for one token."""
        kv, inner = self.num_kv_heads * 64, 4 * self.hidden
        attention = [(self.hidden, self.hidden)] * 2 + [(self.hidden, kv)] * 2
        return attention + [(self.hidden, inner)] * 2 + [(inner, self.hidden)]


SMALL = Model("small", num_layers=4, hidden=256, vocab=8192, has_tied_embeddings=False)
LONG = Model("long", 4, 256, 8192, has_tied_embeddings=False, max_length=2**15)
WIDE = Model("1024", num_layers=4, hidden=1024, vocab=8192, has_tied_embeddings=False)
LARGE = Model("large-vocab", num_layers=8, hidden=512, vocab=151_936, has_tied_embeddings=True)


def make_row(prompt: Sequence[int], completion: Sequence[int]) -> Row:
    return Row((BOS, *prompt, SEP, *completion, EOS), len(prompt) + 2)


def draw_words(rng: np.random.Generator, vocab: int, count: int) -> list[int]:
    num_words = vocab - len(SPECIALS)
    ranks = np.exp(rng.random(count) * np.log(num_words)).astype(np.int64)
    last = num_words - 1 - len(REPLIES)  # the tokenizer has replies for the words after it
    return [len(SPECIALS) + int(rank) for rank in np.minimum(ranks, last)]


def chat_rows(num_rows: int, vocab: int) -> list[Row]:
    """Log-normal lengths, median 150, the longest row 2,048; every other row is a long prompt with
    a short answer.

    Lengths are the quantiles of the distribution rather than draws from it, so a small set has the
    same skew as a large one; their order is shuffled.
    """
    rng = np.random.default_rng(20)
    quantiles = (np.arange(num_rows) + 0.5) / num_rows
    normal = np.array([NormalDist().inv_cdf(q) for q in quantiles])
    lengths = np.clip(150 * np.exp(1.1 * normal), 16, LONGEST).astype(int)
    lengths[-1] = LONGEST
    rows = []
    for place, index in enumerate(rng.permutation(num_rows)):
        words = draw_words(rng, vocab, int(lengths[index]) - 3)
        share = rng.uniform(0.85, 0.95) if place % 2 else rng.uniform(0.2, 0.5)
        num_prompt = max(1, min(len(words) - 2, int(share * len(words))))
        rows.append(make_row(words[:num_prompt], words[num_prompt:]))
    return rows


def even_rows(num_rows: int, length: int, vocab: int) -> list[Row]:
    """Rows of one length, so that nobody pads; a quarter of each is prompt."""
    rng = np.random.default_rng(23)
    words = [draw_words(rng, vocab, length - 3) for _ in range(num_rows)]
    return [make_row(some[: length // 4], some[length // 4 :]) for some in words]


def long_rows(num_rows: int, vocab: int) -> list[Row]:
    """Rows of 8,192 tokens, the last one of 32,768; a tenth of each is prompt."""
    rng = np.random.default_rng(22)
    lengths = [2**13] * (num_rows - 1) + [2**15]
    words = [draw_words(rng, vocab, length - 3) for length in lengths]
    return [make_row(some[: len(some) // 10], some[len(some) // 10 :]) for some in words]


def reading_rows(num_documents: int, vocab: int) -> list[Row]:
    """Documents of about 700 tokens with eight questions each; a document's rows are neighbors."""
    rng = np.random.default_rng(21)
    rows = []
    for _ in range(num_documents):
        document = draw_words(rng, vocab, int(rng.integers(690, 711)))
        for _ in range(8):
            question = draw_words(rng, vocab, int(rng.integers(10, 19)))
            answer = draw_words(rng, vocab, int(rng.integers(3, 9)))
            rows.append(make_row(document + question, answer))
    return rows


def write_rows(rows: Sequence[Row], folder: Path) -> None:
    """``rows.jsonl`` for those that take ids, ``messages.jsonl`` for those that tokenize."""
    folder.mkdir(parents=True, exist_ok=True)
    with (
        (folder / "rows.jsonl").open("w") as ids_file,
        (folder / "messages.jsonl").open("w") as messages_file,
    ):
        for row in rows:
            ids_file.write(json.dumps({"ids": row.ids, "num_prompt": row.num_prompt}) + "\n")
            prompt = " ".join(map(word, row.ids[1 : row.num_prompt - 1]))
            completion = " ".join(map(word, row.ids[row.num_prompt : -1]))
            messages = [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": completion},
            ]
            messages_file.write(json.dumps({"messages": messages}) + "\n")


REPLIES = ("Replied0.",)
"""Words that taut puts in the place of an environment's messages when it asks whether a template writes them."""


def word(token_id: int) -> str:
    return f"w{token_id}"


def write_model(model: Model, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """The random model with its word-level tokenizer and template, as a Hugging Face directory."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=model.vocab,
        hidden_size=model.hidden,
        intermediate_size=4 * model.hidden,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.hidden // 64,
        num_key_value_heads=model.num_kv_heads,
        max_position_embeddings=model.max_length,
        tie_word_embeddings=model.has_tied_embeddings,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    write_tokenizer(folder, model.vocab)


def write_tokenizer(
    folder: Path, num_words: int, more: Sequence[str] = (), template: str = TEMPLATE
) -> None:
    """Words up to an id of ``num_words``, and after them ``more`` specials."""
    ids = {name: index for index, name in enumerate(SPECIALS)}
    ids |= {word(index): index for index in range(len(SPECIALS), num_words)}
    ids |= {reply: ids.pop(word(num_words - 1 - place)) for place, reply in enumerate(REPLIES)}
    ids |= {name: num_words + index for index, name in enumerate(more)}
    backend = Tokenizer(WordLevel(ids, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=["<sep>", *more],
        chat_template=template,
    )
    tokenizer.save_pretrained(folder)
