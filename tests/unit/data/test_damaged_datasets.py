"""Data set directories that are damaged, or that point elsewhere: refused in one line, nothing fetched, no waiting."""

from __future__ import annotations

import gzip
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.time_limits import time_limit

from taut.data.read.sources import open_source
from taut.data.settings import Source
from taut.errors import DataError

ROW = '{"prompt": "the cat", "completion": "dog"}\n'
SECONDS = 30
ADDRESS = "http://127.0.0.1:PORT/a.jsonl"


@contextmanager
def server() -> Iterator[tuple[int, list[str]]]:
    """A port on loopback, and the paths that it has been asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(ROW.encode())

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        yield made.server_address[1], asked
        made.shutdown()
        thread.join()


def card(data_files: Any) -> str:
    config = json.dumps([{"config_name": "default", "data_files": data_files}])
    return f"---\nconfigs: {config}\n---\nA data set.\n"


BOMB = "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)
ELSEWHERE: dict[str, dict[str, str]] = {
    "an address": {"README.md": card(ADDRESS)},
    "addresses of a split": {"README.md": card([{"split": "train", "path": [ADDRESS]}])},
    "a table": {"README.md": card({"train": ADDRESS})},
    "an archive at an address": {"README.md": card(f"zip://a.jsonl::{ADDRESS}")},
    "another protocol": {"README.md": card("s3://bucket/a.jsonl")},
    "a data set of the hub": {"README.md": card("hf://datasets/owner/name/a.jsonl")},
    "a file as an address": {"README.md": card("file:///etc/passwd")},
    "a path from the root": {"README.md": card("/etc/passwd")},
    "a path above": {"README.md": card("data/../../other/*.jsonl")},
    "a home": {"README.md": card("~/secret.jsonl")},
    "a folder at an address": {
        "README.md": f'---\nconfigs: [{{"config_name": "a", "data_dir": "{ADDRESS}"}}]\n---\n'
    },
    "a card of its own": {".huggingface.yaml": f'configs: [{{"data_files": "{ADDRESS}"}}]\n'},
    "a card after an empty line": {"README.md": "\n" + card(ADDRESS)},
    "a card with carriage returns": {"README.md": card(ADDRESS).replace("\n", "\r\n")},
}


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_data_elsewhere_are_neither_fetched_nor_read(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(ROW)
    with server() as (port, asked):
        for name, content in ELSEWHERE[kind].items():
            (tmp_path / name).write_bytes(content.replace("PORT", str(port)).encode())
        with time_limit(SECONDS), pytest.raises(DataError) as caught:
            open_source(Source(path=str(tmp_path)))
        assert not asked
    message = str(caught.value)
    assert "names the data '" in message
    assert f"expected files in {tmp_path}; get the data first" in message
    assert len(message.splitlines()) == 1


FILES: dict[str, dict[str, bytes]] = {
    "YAML that is broken": {"README.md": b"---\nconfigs: [}\n---\n"},
    "YAML that names code": {
        "README.md": b"---\nconfigs: !!python/object/apply:os.getcwd []\n---\n"
    },
    "YAML of 9**9 parts": {"README.md": f"---\na: &a [x]\n{BOMB}configs: *j\n---\n".encode()},
    "YAML nested deeply": {"README.md": b"---\nconfigs: " + b"[" * 1_500 + b"\n---\n"},
    "a card of another encoding": {"README.md": b"---\nconfigs: \xff\n---\n"},
    "a card without end": {"README.md": b"---\n" + b"a" * 2**23},
    "a broken zip": {"a.zip": b"PK\x03\x04" + b"x" * 500},
    "half a gzip": {"a.jsonl.gz": gzip.compress(ROW.encode() * 100)[:40]},
    "a broken gzip": {"a.jsonl.gz": b"\x1f\x8b" + b"x" * 500},
    "a broken xz": {"a.jsonl.xz": b"\xfd7zXZ\x00" + b"x" * 500},
    "a broken tar": {"a.tar": b"x" * 1000},
    "a broken parquet": {"a.parquet": b"PAR1" + b"x" * 100 + b"PAR1"},
    "a broken arrow": {"a.arrow": b"ARROW1" + b"x" * 100},
    "a state of a number": {"state.json": b"5", "dataset_info.json": b"{}"},
    "a state nested deeply": {"state.json": b"[" * 100_000, "dataset_info.json": b"{}"},
}


@pytest.mark.parametrize("kind", FILES)
def test_what_is_broken_is_refused(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if FILES[kind].keys() <= {"README.md"}:
        (tmp_path / "a.jsonl").write_text(ROW)
    for name, content in FILES[kind].items():
        (tmp_path / name).write_bytes(content)
    with time_limit(SECONDS), pytest.raises(DataError) as caught:
        list(open_source(Source(path=str(tmp_path))).read_records())
    assert len(str(caught.value).splitlines()) == 1
    assert str(tmp_path) in str(caught.value)
    assert "error" not in capfd.readouterr().err.lower()


SPECIAL: dict[str, Callable[[Path], None]] = {
    "README.md": os.mkfifo,
    "b.jsonl": os.mkfifo,
    "data/c.parquet": os.mkfifo,
    "d.arrow": os.mkfifo,
    "e.jsonl": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_what_is_no_file_is_not_waited_for(name: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "a.jsonl").write_text(ROW)
    SPECIAL[name](tmp_path / name)
    message = rf"{name} cannot be read: it is a (FIFO|character device); expected a regular file"
    with time_limit(SECONDS), pytest.raises(DataError, match=message):
        open_source(Source(path=str(tmp_path)))


@pytest.mark.parametrize(
    "content",
    [card("a.jsonl"), card([{"split": "train", "path": "*.jsonl"}]), "no card", "---\n", ""],
)
def test_an_honest_card_is_followed(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(ROW)
    (tmp_path / "README.md").write_text(content)
    rows = [row for _, row in open_source(Source(path=str(tmp_path))).read_records()]
    assert rows == [json.loads(ROW)]
