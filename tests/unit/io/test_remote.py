"""Files at addresses: fetched once, whole or not at all; servers on the loopback."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from taut.data.read.sources import open_source
from taut.data.settings import Source
from taut.errors import DataError, ModelError
from taut.io import hub, remote
from taut.models.load import load_config

CONTENT = b"".join(json.dumps({"text": f"row {n}"}).encode() + b"\n" for n in range(2000))


class Server(ThreadingHTTPServer):
    """Serves ``files`` by path. Breaks off after ``breaks`` bytes of each answer, as long as ``num_breaks`` lasts."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.breaks, self.num_breaks = 0, 0
        self.has_ranges = True
        self.status = 200
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.0"

    def do_GET(self, *, is_head: bool = False) -> None:
        server, path = self.server, self.path.partition("?")[0]
        server.asked.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
        if "list-type=2" in self.path:
            self.reply(200, self.listing(), {"Content-Type": "application/xml"}, is_head)
            return
        content = server.files.get(path)
        if server.status != 200 or content is None:
            self.reply(server.status if server.status != 200 else 404, b"", {}, is_head)
            return
        headers = {"ETag": f'"{hashlib.md5(content).hexdigest()}"'}
        headers["Last-Modified"] = "Mon, 23 Nov 2026 10:00:00 GMT"
        start, status = 0, 200
        match = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match and server.has_ranges:
            start, end = int(match[1]), int(match[2] or len(content) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            content, status = content[start : end + 1], 206
        self.reply(status, content, headers, is_head)

    def do_HEAD(self) -> None:
        self.do_GET(is_head=True)

    def reply(self, status: int, body: bytes, headers: dict[str, str], is_head: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if is_head:
            return
        if status < 300 and self.server.breaks and self.server.num_breaks:
            self.server.num_breaks -= 1
            body = body[: self.server.breaks]
        with suppress(OSError):
            self.wfile.write(body)

    def listing(self) -> bytes:
        keys = [path.split("/", 2)[2] for path in sorted(self.server.files)]
        entries = "".join(
            f"<Contents><Key>{key}</Key><LastModified>2026-11-23T10:00:00.000Z</LastModified>"
            f"<ETag>&quot;{len(key)}&quot;</ETag><Size>{len(CONTENT)}</Size>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
            for key in keys
        )
        return (
            '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>bucket</Name><KeyCount>{len(keys)}</KeyCount><IsTruncated>false</IsTruncated>{entries}"
            "</ListBucketResult>"
        ).encode()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(hub, "_asked", None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(remote, "PAUSE", 0.01)
    monkeypatch.setenv("TAUT_CACHE", str(tmp_path / "cache"))
    for name in (
        "http_proxy",
        "https_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "all_proxy",
        "ALL_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        running.files["/d/a.jsonl"] = CONTENT
        yield running
        running.shutdown()
        thread.join()


def kept(tmp_path: Path) -> list[Path]:
    """The files that fetching left."""
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def num_rows(url: str) -> int:
    return len(list(open_source(Source(path=url)).read_records()))


def fault(url: str) -> str:
    with pytest.raises(DataError) as raised:
        num_rows(url)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_file_is_fetched_once_and_again_when_it_changes(server: Server) -> None:
    url = f"{server.url}/d/a.jsonl"
    opened = open_source(Source(path=url))
    number, record = next(iter(opened.read_records()))
    assert (opened.place(number), record) == (f"{url}:1", {"text": "row 0"})
    num_asked = len(server.asked)
    assert open_source(Source(path=url)).digest == opened.digest
    assert len(server.asked) == num_asked + 1
    server.files["/d/a.jsonl"] = CONTENT[:15]
    assert open_source(Source(path=url)).digest != opened.digest


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_transfer_that_breaks_off_is_resumed(server: Server, has_ranges: bool) -> None:
    server.breaks, server.num_breaks, server.has_ranges = 9000, 2, has_ranges
    server.num_breaks += 1  # of the look at the file
    assert num_rows(f"{server.url}/d/a.jsonl") == 2000
    resumed = [line for line in server.asked if "bytes=" in line]
    assert len(resumed) == 2


def test_a_transfer_that_never_ends_leaves_nothing(server: Server, tmp_path: Path) -> None:
    server.breaks, server.num_breaks, server.has_ranges = 9000, 10**6, False
    message = fault(f"{server.url}/d/a.jsonl")
    assert f"data: {server.url}/d/a.jsonl broke off at byte 9,000 (" in message
    assert "nothing of it was kept" in message
    assert kept(tmp_path) == []


def test_what_is_not_there_and_what_may_not_be_read(server: Server) -> None:
    assert "/d/b.jsonl is not there" in fault(f"{server.url}/d/b.jsonl")
    server.status = 403
    message = fault(f"{server.url}/d/a.jsonl?token=secret")
    assert "may not be read (Refused: HTTP 403)" in message
    assert "secret" not in message


def test_offline_nothing_is_asked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{server.url}/d/a.jsonl"
    assert num_rows(url) == 2000
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    server.asked.clear()
    assert num_rows(url) == 2000
    assert f"{server.url}/d/b.jsonl was not fetched before" in fault(f"{server.url}/d/b.jsonl")
    assert server.asked == []


def test_offline_nothing_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setenv("TAUT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "_asked", None)
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://192.0.2.1:9")  # no route leads to it
    load = {
        "nobody/none": DataError,
        "https://example.org/a.jsonl": DataError,
        "hf://datasets/nobody/none/a.jsonl": DataError,
    }
    for path, kind in load.items():
        began = time.monotonic()
        with pytest.raises(kind, match="HF_HUB_OFFLINE is set"):
            open_source(Source(path=path))
        assert time.monotonic() - began < 5
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        load_config("nobody/none")


@pytest.fixture
def bucket(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    if find_spec("s3fs") is None:
        pytest.skip("s3fs is not installed")
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    server.files = {"/bucket/d/a.jsonl": CONTENT, "/bucket/d/b.jsonl": CONTENT}
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    return server


def test_a_bucket(bucket: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    assert num_rows("s3://bucket/d/a.jsonl") == 2000
    opened = open_source(Source(path="s3://bucket/d/*.jsonl"))
    assert opened.names == ("s3://bucket/d/a.jsonl", "s3://bucket/d/b.jsonl")
    assert len(list(opened.read_records())) == 4000
    assert "no file matches s3://bucket/d/c*.jsonl; expected at least" in fault(
        "s3://bucket/d/c*.jsonl"
    )


def test_one_file_of_a_bucket(bucket: Server, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    assert remote.find("s3://bucket/d/none.json", tmp_path / "files") is None
    found = remote.find("s3://bucket/d/a.jsonl", tmp_path / "files")
    assert found is not None and found.files[0][1].read_bytes() == CONTENT and not found.note
    monkeypatch.setattr(remote, "BLOCK", 1000)
    remote.copy("s3://bucket/d/b.jsonl", tmp_path / "b", len(CONTENT))
    assert (tmp_path / "b").read_bytes() == CONTENT
    with pytest.raises(DataError, match=r"s3://bucket/d/b\.jsonl broke off at byte"):
        remote.copy("s3://bucket/d/b.jsonl", tmp_path / "c", len(CONTENT) + 1)
    assert not (tmp_path / "c").exists()


def test_a_bucket_without_credentials(bucket: Server) -> None:
    message = fault("s3://bucket/d/a.jsonl")
    assert "may not be read (" in message
    assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in message


def test_a_file_of_a_hub_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class System:
        def isfile(self, url: str) -> bool:
            return url.endswith(".jsonl")

        def info(self, url: str) -> dict[str, Any]:
            return {"size": len(CONTENT), "blob_id": "1"}

        def cat_file(self, url: str, start: int, end: int) -> bytes:
            return CONTENT[start:end]

    import fsspec

    monkeypatch.setenv("TAUT_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "is_offline", lambda: False)
    monkeypatch.setattr(hub, "settle", lambda: None)
    monkeypatch.setattr(remote, "BLOCK", 1000)
    monkeypatch.setattr(fsspec, "filesystem", lambda scheme: System())
    assert num_rows("hf://datasets/owner/name/a.jsonl") == 2000
