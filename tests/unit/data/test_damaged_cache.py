"""Cache entries that were damaged and given new digests: each is reported with its reason and made again."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.helpers.chat_runs import chats, write_rows
from tests.helpers.tiny_tokenizers import tiny_tokenizer

from taut.data.dataset import Dataset, load_dataset
from taut.data.render.render import Renderer
from taut.data.settings import DataConfig
from taut.data.store import cache
from taut.io import files

Change = Callable[[NDArray[Any]], NDArray[Any]]


def load(place: Path) -> Dataset:
    config = DataConfig(train=str(place / "a.jsonl"), cache=str(place / "cache"))
    return load_dataset(config, "train", Renderer(tiny_tokenizer()), 512)


def shard_of(place: Path) -> Path:
    (source,) = (place / "cache").iterdir()
    return source / "00000"


def seal(shard: Path) -> None:
    """Note the arrays' digests and sizes as they are now."""
    meta = json.loads((shard / "meta.json").read_text())
    meta["sha256"] = {name: files.digest(shard / f"{name}.npy") for name in meta["sha256"]}
    (shard / "meta.json").write_text(json.dumps(meta))
    list_again(shard)


def list_again(shard: Path) -> None:
    """Note the files of a shard in the manifest as they are now."""
    manifest = json.loads((shard.parent / "manifest.json").read_text())
    (listed,) = manifest["shards"]
    listed["meta"] = files.digest(shard / "meta.json")
    listed["sizes"] = {path.stem: path.stat().st_size for path in shard.glob("*.npy")}
    (shard.parent / "manifest.json").write_text(json.dumps(manifest))


def put(index: int, value: int) -> Change:
    def change(array: NDArray[Any]) -> NDArray[Any]:
        array[index] = value
        return array

    return change


ARRAYS: dict[str, tuple[str, Change, str]] = {
    "an end beyond the tokens": ("offsets", put(-1, 10**12), "offsets does not lead from 0 to"),
    "an end below 0": ("offsets", put(-1, -5), "offsets does not lead from 0 to"),
    "a beginning above 0": ("offsets", put(0, 3), "offsets does not lead from 0 to"),
    "a sample that goes back": ("offsets", put(2, 1), "offsets does not ascend"),
    "a sample far outside": ("offsets", put(2, 2**60), "offsets does not ascend"),
    "a sample without tokens": (
        "offsets",
        lambda a: a[[0, 1, 1, *range(3, len(a))]],
        "without tok",
    ),
    "fewer samples": ("offsets", lambda a: a[:-1], "offsets has 4 entries for 4 samples"),
    "no offsets": ("offsets", lambda a: a[:0], "offsets has 0 entries for 4 samples"),
    "offsets of another dtype": ("offsets", lambda a: a.astype(np.float64), "the dtype float64"),
    "offsets in two dimensions": ("offsets", lambda a: a[:, None], r"the shape \(5, 1\)"),
    "a single number": ("offsets", lambda a: a[0], r"the shape \(\)"),
    "a target in another sample": ("target_at", put(0, 400), "target_at has a position outside"),
    "a target below 0": ("target_at", put(0, -1), "target_at has a position outside"),
    "a target that is the first token": (
        "target_at",
        put(0, 0),
        "target_at has a position outside",
    ),
    "targets out of order": ("target_at", lambda a: a[::-1].copy(), "target_at has a position out"),
    "targets of another sample": ("target_offsets", put(1, 0), "target_at has a position outside"),
    "lines that are missing": ("line", lambda a: a[:-1], "part has 4 entries for 3 samples"),
    "a token below 0": ("ids", put(0, -7), "ids has a negative token id"),
    "fewer tokens": ("ids", lambda a: a[:10], "offsets does not lead from 0 to 10"),
    "structured tokens": ("ids", lambda a: np.zeros(4, dtype=[("a", "i4")]), "the dtype"),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_an_array_that_does_not_fit_is_not_used(kind: str, tmp_path: Path) -> None:
    name, change, reason = ARRAYS[kind]
    write_rows(tmp_path / "a.jsonl", chats(4))
    honest = [sample.ids_T.tolist() for sample in load(tmp_path)]
    entry = shard_of(tmp_path)
    array = np.load(entry / f"{name}.npy")
    np.save(entry / f"{name}.npy", change(array))
    seal(entry)
    again = load(tmp_path)
    (decision,) = again.report.decisions
    assert "tokenized (the cached entry is damaged (" in decision
    assert re.search(reason, decision), decision
    assert [sample.ids_T.tolist() for sample in again] == honest
    assert load(tmp_path).report.is_cached


def header(shape: str) -> bytes:
    """An .npy file of nothing but a header."""
    text = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


FILES: dict[str, Callable[[Path], object]] = {
    "nothing": lambda entry: (entry / "offsets.npy").write_bytes(b""),
    "half a header": lambda entry: (entry / "offsets.npy").write_bytes(b"\x93NUMPY\x01"),
    "a huge shape": lambda entry: (entry / "offsets.npy").write_bytes(header("(1000000000000,)")),
    "a shape beyond 64 bits": lambda entry: (entry / "offsets.npy").write_bytes(
        header(f"({2**70},)")
    ),
    "a shape below 0": lambda entry: (entry / "offsets.npy").write_bytes(header("(-4,)")),
    "a shape of text": lambda entry: (entry / "offsets.npy").write_bytes(header("('a',)")),
    "a nested shape": lambda entry: (entry / "offsets.npy").write_bytes(
        header("(" * 300 + ")" * 300)
    ),
    "objects": lambda entry: np.save(entry / "offsets.npy", np.array([{}]), allow_pickle=True),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_is_no_array_is_not_used(kind: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", chats(4))
    load(tmp_path)
    entry = shard_of(tmp_path)
    FILES[kind](entry)
    seal(entry)
    (decision,) = load(tmp_path).report.decisions
    assert "tokenized (the cached entry is damaged (" in decision


COUNTS = (
    '"num_rows": 4, "num_samples": 4, "num_groups": 4, "num_tokens": 9, "num_targets": 9, '
    '"num_pictures": 0'
)
METAS: dict[str, str] = {
    "a list": "[]",
    "nested deeply": "[" * 100_000,
    "text": "{",
    "rows of text": '{"forms": {}, "num_rows": "4"}',
    "no digests": f'{{{COUNTS}, "forms": {{}}, "incidents": [], "is_fleeting": false, "sha256": {{}}}}',
    "digests that are a list": f'{{{COUNTS}, "forms": {{}}, "incidents": [], "is_fleeting": false, "sha256": []}}',
    "another directory": f'{{{COUNTS}, "forms": {{}}, "incidents": [], "is_fleeting": false, '
    '"sha256": {"../ids": "a"}}',
    "incidents of text": f'{{{COUNTS}, "forms": {{}}, "incidents": ["a"], "is_fleeting": false, "sha256": {{}}}}',
}
"""What is in meta.json, or in manifest.json."""


@pytest.mark.parametrize("name", ["00000/meta.json", "manifest.json"])
@pytest.mark.parametrize("kind", METAS)
def test_metadata_that_is_not_ours_is_not_used(kind: str, name: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", chats(4))
    load(tmp_path)
    shard = shard_of(tmp_path)
    (shard.parent / name).write_text(METAS[kind])
    if name != "manifest.json":
        list_again(shard)
    (decision,) = load(tmp_path).report.decisions
    assert "tokenized (the cached entry is damaged (" in decision
    assert load(tmp_path).report.is_cached


def test_counts_that_are_not_those_of_the_arrays_are_not_used(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", chats(4))
    load(tmp_path)
    shard = shard_of(tmp_path)
    meta = json.loads((shard / "meta.json").read_text())
    (shard / "meta.json").write_text(json.dumps(meta | {"num_samples": 5}))
    list_again(shard)
    (decision,) = load(tmp_path).report.decisions
    assert "00000/meta.json has other counts than the arrays" in decision
    assert len(load(tmp_path)) == 4


@pytest.mark.parametrize("name", ["manifest.json", "00000/meta.json", "00000/ids.npy"])
def test_a_fifo_is_not_waited_for(name: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", chats(4))
    load(tmp_path)
    source = shard_of(tmp_path).parent
    (source / name).unlink()
    os.mkfifo(source / name)
    assert cache.load(source.parent, source.name) == (
        None,
        "the cached entry is damaged (it is a FIFO; expected a regular file)",
    )
    assert len(load(tmp_path)) == 4


def test_rows_that_begin_elsewhere(tmp_path: Path) -> None:
    rows = [{"prompt": "a b", "answers": ["x", "y", "z"], "scores": [2, 1, 0]}] * 2
    write_rows(tmp_path / "a.jsonl", rows)
    config = DataConfig(train=str(tmp_path / "a.jsonl"), cache=str(tmp_path / "cache"))

    def load() -> Dataset:
        return load_dataset(config, "train", Renderer(tiny_tokenizer()), 512, kind="preference")

    assert [load().row(index) for index in range(2)] == [range(3), range(3, 6)]
    shard = shard_of(tmp_path)
    for offsets in ([0, 2, 6], [0, 6], [0, 3, 3, 6]):
        np.save(shard / "row_offsets.npy", np.array(offsets))
        seal(shard)
        data = load()
        assert "row_offsets are not where the line changes" in data.report.decisions[0]
        assert data.row(1) == range(3, 6)
