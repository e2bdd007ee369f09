"""The hub that cannot be reached, or lacks what is asked for: one line of ours, at once."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import datasets
import pytest
import torch
from huggingface_hub import constants
from tests.helpers.chat_runs import chats, column, decisions, save_model, sft, write_rows
from tests.helpers.tiny_models import save_tiny
from tests.helpers.tiny_tokenizers import tiny_tokenizer

from taut.data.read.sources import open_source
from taut.data.settings import Source
from taut.errors import ConfigError, DataError, ModelError
from taut.io import http, hub
from taut.models.load import load_config, load_model, load_tokenizer
from taut_tools.export.card import base_of_run

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 988097824\n"
)


def at(endpoint: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the process had begun with HF_ENDPOINT and without HF_HUB_OFFLINE."""
    monkeypatch.setattr(hub, "_asked", None)
    monkeypatch.setattr(hub, "_commits", {})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", endpoint)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        endpoint + "/{repo_id}/resolve/{revision}/{filename}",
    )
    for name in ("HF_HUB_OFFLINE", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An address at which nothing listens."""
    endpoint = "http://127.0.0.1:9"
    at(endpoint, tmp_path / "hub", monkeypatch)
    return endpoint


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A hub that has no repository."""

    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200 if self.path == "/" else 404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        at(endpoint, tmp_path / "hub", monkeypatch)
        yield endpoint
        server.shutdown()
        thread.join()


def test_a_hub_that_cannot_be_reached_is_told_at_once(
    nowhere: str, caplog: pytest.LogCaptureFixture
) -> None:
    began = time.monotonic()
    with caplog.at_level(logging.WARNING), pytest.raises(ModelError) as model:
        load_config("nobody/none")
    with pytest.raises(DataError) as data:
        open_source(Source(path="nobody/none"))
    assert time.monotonic() - began < 10
    assert "Retrying" not in caplog.text
    why = f"not in the hub's cache, and {nowhere} cannot be reached (Connection refused)"
    assert f"model=nobody/none: nobody/none is no directory here and {why}" in str(model.value)
    assert f"data: nobody/none: nobody/none is no directory here and {why}" in str(data.value)
    assert hub.offline_reason() == "Connection refused"


def test_a_hub_that_is_back_is_used_again(nowhere: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.settle() == "Connection refused"
    assert constants.HF_HUB_OFFLINE
    monkeypatch.setattr(hub, "_failure", lambda _: None)
    assert hub.settle() == "Connection refused"  # asked a moment ago
    monkeypatch.setattr(hub, "STANDS", 0.0)
    assert hub.settle() is None
    assert not constants.HF_HUB_OFFLINE


def test_a_name_that_is_looked_up_for_ever_is_not_waited_for(
    nowhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    monkeypatch.setattr(hub, "PATIENCE", 0.5)
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: never.wait(60) and [])
    http.trusted()
    began = time.monotonic()
    assert hub.settle() == "no answer within 0.5 s"
    assert time.monotonic() - began < 20
    never.set()


def test_a_proxy_is_left_to_the_library(nowhere: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    assert hub.settle() is None
    assert not constants.HF_HUB_OFFLINE


def test_a_name_that_the_hub_does_not_have(empty: str) -> None:
    with pytest.raises(ModelError) as raised:
        load_config("nobody/none")
    expected = f"model=nobody/none: there is no nobody/none at {empty}, or it is private; expected"
    assert str(raised.value).startswith(expected)
    assert hub.offline_reason() is None


def test_that_cached_files_were_used_is_a_decision_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_asked", (time.monotonic(), "Connection refused"))
    train = write_rows(tmp_path / "train.jsonl", chats(6))
    result = sft(save_model(tmp_path / "m"), train, tmp_path / "out", steps=1, check="off")
    assert decisions(result.out)["hub"] == ("cached files only", "Connection refused")


def test_a_pointer_in_the_place_of_a_file_is_told(tmp_path: Path) -> None:
    path = save_tiny("llama", tmp_path / "m", tiny_tokenizer())
    (path / "model.safetensors").write_text(POINTER)
    with pytest.raises(ModelError, match=r"model\.safetensors is a git-lfs pointer of 1\d\d bytes"):
        load_config(str(path))
    assert load_config(str(path), needs_weights=False).model_type == "llama"
    (path / "tokenizer.json").write_text(POINTER)
    with pytest.raises(ModelError, match=r"tokenizer\.json is a git-lfs pointer"):
        load_tokenizer(str(path))
    (tmp_path / "a.jsonl").write_text(POINTER)
    with pytest.raises(DataError, match=r"a\.jsonl is a git-lfs pointer"):
        open_source(Source(path=str(tmp_path / "a.jsonl")))


# -- revisions

OLD, NEW = "0" * 39 + "a", "0" * 39 + "b"
"""Commits."""


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache with two commits of org/tiny, of which main is the older and v2 the newer. Nothing is asked."""
    cache = tmp_path / "hub"
    at("http://127.0.0.1:9", cache, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = cache / "models--org--tiny"
    for seed, commit in enumerate((OLD, NEW)):
        save_model(repository / "snapshots" / commit, seed=seed)
    settings = repository / "snapshots" / NEW / "config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "rope_theta": 12345.0}))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(OLD)
    (repository / "refs" / "v2").write_text(NEW)
    return repository


def weights_of(name: str) -> torch.Tensor:
    model = load_model(
        name, dtype=torch.float32, device=torch.device("cpu"), attention="eager", is_narrow=True
    )
    return next(model.parameters()).detach()


@pytest.mark.parametrize(
    ("name", "commit"),
    [("org/tiny", OLD), ("org/tiny@main", OLD), ("org/tiny@v2", NEW), (f"org/tiny@{NEW}", NEW)],
)
def test_a_revision_names_a_commit_of_all_files(name: str, commit: str, cached: Path) -> None:
    assert load_config(name)._commit_hash == commit
    assert torch.equal(weights_of(name), weights_of(str(cached / "snapshots" / commit)))
    assert load_tokenizer(name).get_vocab() == tiny_tokenizer().get_vocab()
    assert not torch.equal(weights_of("org/tiny"), weights_of("org/tiny@v2"))


def test_a_revision_that_is_not_there(cached: Path) -> None:
    with pytest.raises(
        ModelError, match=r"model=org/tiny@v3: .*hf download --revision v3 org/tiny"
    ):
        load_config("org/tiny@v3")


def test_a_resume_does_not_go_on_with_newer_weights(cached: Path, tmp_path: Path) -> None:
    train, out = write_rows(tmp_path / "train.jsonl", chats(6)), tmp_path / "out"
    options = {"check": "off", "checkpoint__every": 1}
    sft(Path("org/tiny"), train, out, steps=1, **options)
    assert decisions(out)["model.commit"][0] == OLD
    (cached / "refs" / "main").write_text(NEW)
    hub._commits.clear()  # as a new process
    with pytest.raises(ConfigError, match=rf"model commit: .*NAME@{OLD} names that commit"):
        sft(Path("org/tiny"), train, out, steps=2, resume=True, **options)
    sft(Path(f"org/tiny@{OLD}"), train, out, steps=2, resume=True, **options)
    assert column(out, "step") == [1, 2]


def test_an_adapter_names_the_commit_of_its_base(cached: Path, tmp_path: Path) -> None:
    train, out = write_rows(tmp_path / "train.jsonl", chats(6)), tmp_path / "out"
    sft(Path("org/tiny@v2"), train, out, steps=1, check="off", lora__rank=2)
    settings = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("org/tiny", NEW)
    assert base_of_run(out, None) == "org/tiny"
