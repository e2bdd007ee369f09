"""One tiny model and one set of chats for every end-to-end test."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.chat_runs import chats, save_model, write_rows


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 in float64, so that what is saved loses nothing."""
    return save_model(tmp_path_factory.mktemp("model") / "qwen2", dtype=torch.float64)


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """23 chats."""
    return write_rows(tmp_path_factory.mktemp("data") / "train.jsonl", chats(23))
