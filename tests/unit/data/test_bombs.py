"""Small files that expand to much, or never come to the end of a row: refused in one line, in bounded memory."""

from __future__ import annotations

import gzip
import tarfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from taut.data.read import formats
from taut.data.read.sources import open_source
from taut.data.settings import Source
from taut.errors import DataError

LIMIT = 2**16
ROW = b'{"prompt": "a", "completion": "b"}\n'
X, SPACES, LINES = b"x" * 2**14, b" " * 2**14, b"\n" * 2**14


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of files, a thousandth of what they are."""
    monkeypatch.setattr(formats, "ROW_LIMIT", LIMIT)
    monkeypatch.setattr(formats, "SMALL", 16 * LIMIT)
    monkeypatch.setattr(formats, "EXPANSION", 100)


def write(path: Path, pieces: Iterator[bytes]) -> Path:
    """The pieces in a file, compressed as its name says."""
    if path.suffix == ".zst":
        with pa.output_stream(str(path), compression="zstd") as file:
            for piece in pieces:
                file.write(piece)
        return path
    with gzip.open(path, "wb") if path.suffix == ".gz" else path.open("wb") as out:
        out.writelines(pieces)
    return path


def times(number: int, piece: bytes, first: bytes = b"") -> Iterator[bytes]:
    yield first
    for _ in range(number):
        yield piece


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize(
    ("name", "first", "piece", "reason"),
    [
        ("line.jsonl", ROW, X, r":2: more than 65,536 bytes"),
        ("spaces.jsonl", ROW, SPACES, r":2: more than 65,536 bytes"),
        ("blank.jsonl", ROW, LINES, r":\d+: more than 65,536 bytes, or 256 lines"),
        ("cell.csv", b'prompt,completion\na,b\n"', X, r":2: more than 65,536 bytes"),
        ("lines.csv", b"prompt,completion\na,b\n", LINES, r":2: more than"),
        ("cells.tsv", b"prompt\tcompletion\na\tb\n", b'"a\n"\t' * 4096, r":2: more than"),
        ("head.csv", b"", X, r":1: more than"),
    ],
)
def test_a_row_without_an_end(
    name: str, first: bytes, piece: bytes, reason: str, suffix: str, tmp_path: Path
) -> None:
    path = write(tmp_path / f"{name}{suffix}", times(60, piece, first))
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(DataError, match=reason) as caught:
        list(formats.read_records(path, path.name))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * LIMIT and time.process_time() - began < 1
    assert path.name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.json.gz", "a.json.zst"])
@pytest.mark.parametrize(("first", "piece"), [(b"[", SPACES), (b'["', X)])
def test_json_that_expands(name: str, first: bytes, piece: bytes, tmp_path: Path) -> None:
    path = write(tmp_path / name, times(80, piece, first))
    with pytest.raises(DataError, match=r"a.json...?.?: its bytes expand to more than"):
        list(formats.read_records(path, path.name))


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.jsonl.zst", "rows.csv.zst"])
def test_more_than_a_thousand_times_its_size(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = b"prompt,completion\n" if ".csv" in name else b""
    row = b"a" * 4000 + b",b\n" if ".csv" in name else ROW.replace(b"a", b"a" * 4000)
    path = write(tmp_path / name, times(60, row * (2**16 // len(row)), first))
    monkeypatch.setattr(formats, "EXPANSION", 10)
    with pytest.raises(DataError, match=r"bytes expand to more than 1,048,576; decompress"):
        list(formats.read_records(path, name))
    monkeypatch.setattr(formats, "SMALL", 2**28)
    assert sum(1 for _ in formats.read_records(path, name)) > 900  # what is allowed is read


def test_parquet_whose_columns_expand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.parquet"
    table = pa.table({"prompt": ["x" * 2**20] * 8, "completion": ["y"] * 8})
    pyarrow.parquet.write_table(table, path, compression="zstd", use_dictionary=False)
    with pytest.raises(DataError, match=r"rows.parquet: its bytes expand to more than"):
        list(formats.read_records(path, path.name))
    monkeypatch.setattr(formats, "SMALL", 2**28)
    assert len(list(formats.read_records(path, path.name))) == 8


@pytest.mark.parametrize(
    "member",
    ["a.pth", "a.npy", "a.npz", "a.ten", "a.mp", "a.cbor", "a.json", "a.cls", "a.txt.gz", "a.txt"],
)
def test_a_member_of_a_webdataset_that_cannot_be_read(
    member: str, tmp_path: Path, cache: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    with tarfile.open(folder / "0.tar", "w") as tar:
        info = tarfile.TarInfo(member)
        info.size = 9
        tar.addfile(info, BytesIO(b"\x80\xff\x00 no \xfe\n"))
    with pytest.raises(DataError, match="cannot be loaded as a Hugging Face data set") as caught:
        open_source(Source(path=str(folder)))
    assert "\n" not in str(caught.value)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.mark.parametrize(
    "address",
    ["http://[::1/a.jsonl", "https://[x]/a.jsonl", "s3://[::1/a.jsonl", "http://a]/b.jsonl"],
)
@pytest.mark.parametrize("how", [lambda a: Source(path=a), lambda a: Source(path=a, split="x")])
def test_a_malformed_address(address: str, how: Callable[[str], Source]) -> None:
    with pytest.raises(DataError, match=r"is no address \(.*\); expected one as"):
        open_source(how(address))
