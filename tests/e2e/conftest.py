"""One tiny model and one set of chats for every end-to-end test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.chat_runs import chats, save_model, sft, write_rows


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 in float64, so that what is saved loses nothing."""
    return save_model(tmp_path_factory.mktemp("model") / "qwen2", dtype=torch.float64)


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """23 chats."""
    return write_rows(tmp_path_factory.mktemp("data") / "train.jsonl", chats(23))


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model trained until it ends its answers, with its contract."""
    place = tmp_path_factory.mktemp("finished")
    model = save_model(place / "qwen2")
    train = write_rows(place / "few.jsonl", chats(4, seed=5))
    keys: dict[str, Any] = {"optim__learning_rate": 1e-2, "batch__samples_per_step": 4}
    return sft(model, train, place / "out", dtype="float32", steps=40, **keys).model
