"""Without a network what is in a cache loads at once, and what is not is refused with a line within a second.

Twice: with HF_HUB_OFFLINE=1, and with sockets that connect to nothing but the loopback. Imports are not counted.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from huggingface_hub import constants
from tests.helpers.chat_runs import save_model

from taut.data.read.sources import open_source
from taut.data.settings import Source
from taut.errors import DataError, ModelError, TautError
from taut.io import http, hub, remote
from taut.models.load import load_config, load_model, load_tokenizer

URL = "https://example.org/a.jsonl"
SOON = 6.0
"""The library waits 7 s between its first four attempts."""
CONNECT, LOOK_UP = socket.socket.connect, socket.getaddrinfo


def connect(self: socket.socket, address: Any) -> None:
    if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1"):
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))
    CONNECT(self, address)


def look_up(host: Any, *more: Any, **options: Any) -> Any:
    if host not in ("127.0.0.1", "::1", "localhost", None):
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    return LOOK_UP(host, *more, **options)


@pytest.fixture(params=["HF_HUB_OFFLINE", "no network"])
def caches(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The caches of a model, a data set and a file, and no way to more. Returns why."""
    is_set = request.param == "HF_HUB_OFFLINE"
    for settings in (constants, datasets.config):
        monkeypatch.setattr(settings, "HF_HUB_OFFLINE", is_set)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(hub, "_asked", None)
    monkeypatch.setattr(hub, "_commits", {})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setenv("TAUT_CACHE", str(tmp_path / "cache"))
    if not is_set:
        monkeypatch.setattr(socket.socket, "connect", connect)
        monkeypatch.setattr(socket, "getaddrinfo", look_up)
    repository = tmp_path / "hub" / "models--org--tiny"
    save_model(repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(50)))
    datasets.load_dataset("json", data_files=str(rows))
    (made,) = (tmp_path / "datasets" / "json").iterdir()
    kept = tmp_path / "datasets" / "owner___rows" / "default"
    shutil.copytree(made, kept)
    for path in kept.rglob("json-train.arrow"):
        path.rename(path.with_name("rows-train.arrow"))
    folder = tmp_path / "cache" / "files" / remote._hash(URL)
    folder.mkdir(parents=True)
    shutil.copyfile(rows, folder / "version.jsonl")
    (folder / remote.LISTING).write_text(json.dumps([URL]))
    http.trusted()
    load(str(repository / "snapshots" / ("a" * 40)))  # what is imported late
    return str(request.param)


def load(name: str) -> torch.nn.Module:
    return load_model(
        name, dtype=torch.float32, device=torch.device("cpu"), attention="eager", is_narrow=True
    )


def num_rows(path: str) -> int:
    return len(list(open_source(Source(path=path)).read_records()))


LOADED: dict[str, Callable[[], Any]] = {
    "qwen2": lambda: load_config("org/tiny").model_type,
    "Qwen2ForCausalLM": lambda: type(load("org/tiny")).__name__,
    "498": lambda: len(load_tokenizer("org/tiny")),
    "50": lambda: num_rows("owner/rows"),
    " 50": lambda: num_rows("hf://owner/rows"),
    "50 ": lambda: num_rows(URL),
}


def test_what_is_cached_loads_at_once(caches: str) -> None:
    for expected, call in LOADED.items():
        began = time.monotonic()
        assert str(call()) == expected.strip()
        assert time.monotonic() - began < SOON, expected
    note = "" if caches == "HF_HUB_OFFLINE" else remote.OLD
    assert open_source(Source(path=URL)).taken == note


REFUSED: dict[str, tuple[type[TautError], Callable[[], Any]]] = {
    "model=nobody/none: nobody/none is no directory here and not in the hub's cache": (
        ModelError,
        lambda: load_config("nobody/none"),
    ),
    "model=nobody/other: nobody/other is no directory here and not in the hub's": (
        ModelError,
        lambda: load_tokenizer("nobody/other"),
    ),
    "data: nobody/none: nobody/none is no directory here and not in the hub's": (
        DataError,
        lambda: num_rows("nobody/none"),
    ),
    "data: hf://datasets/nobody/none/a.jsonl": (
        DataError,
        lambda: num_rows("hf://datasets/nobody/none/a.jsonl"),
    ),
    "data: https://example.org/b.jsonl": (
        DataError,
        lambda: num_rows("https://example.org/b.jsonl"),
    ),
    "data: http://192.0.2.1/b.jsonl": (DataError, lambda: num_rows("http://192.0.2.1/b.jsonl")),
    "data: https://example.org/shards": (
        DataError,
        lambda: num_rows("https://example.org/shards"),
    ),
}


def test_what_is_not_cached_is_a_line_at_once(caches: str) -> None:
    for words, (kind, call) in REFUSED.items():
        began = time.monotonic()
        with pytest.raises(kind) as caught:
            call()
        seconds = time.monotonic() - began
        message = str(caught.value)
        assert seconds < SOON, message
        assert message.startswith(words) and "\n" not in message
        is_told = "HF_HUB_OFFLINE is set" in message or "not fetched before" in message
        assert is_told == (caches == "HF_HUB_OFFLINE"), message
