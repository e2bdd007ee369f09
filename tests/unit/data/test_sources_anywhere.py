"""Sources of many files, compressed files, Arrow files; parts of a source; ModelScope."""

from __future__ import annotations

import gzip
import json
import sys
import types
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from tests.helpers.tiny_tokenizers import tiny_tokenizer

from taut.config import from_mapping
from taut.data.dataset import build_renderer, load_dataset
from taut.data.read.sources import fraction_of, number_of, open_source
from taut.data.settings import DataConfig, Source
from taut.errors import ConfigError, DataError, TautError
from taut.methods import METHODS

ROWS = [{"text": f"row {number}"} for number in range(5)]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def texts(source: Source) -> list[str]:
    return [record["text"] for _, record in open_source(source).read_records()]


def places(source: Source) -> list[str]:
    opened = open_source(source)
    return [opened.place(number) for number, _ in opened.read_records()]


def fault(path: Path | str, **options: Any) -> str:
    with pytest.raises(TautError) as raised:
        list(open_source(Source(path=str(path), **options)).read_records())
    message = str(raised.value)
    assert "\n" not in message
    return message


def write_zst(path: Path, content: bytes) -> None:
    with pa.output_stream(str(path), compression="zstd") as file:
        file.write(content)


def write_arrow(path: Path, *, is_stream: bool, rows: list[dict[str, Any]] = ROWS) -> None:
    table = pa.Table.from_pylist(rows)
    make = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as file, make(file, table.schema) as writer:
        writer.write_table(table)


def test_a_pattern_is_one_source_whose_ids_name_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d" / "deep").mkdir(parents=True)
    (tmp_path / "d" / "b.jsonl").write_bytes(lines(ROWS[2:4]))
    (tmp_path / "d" / "a.jsonl").write_bytes(b"\n" + lines(ROWS[:2]))
    (tmp_path / "d" / "deep" / "c.jsonl.gz").write_bytes(gzip.compress(lines(ROWS[4:])))
    assert places(Source(path="d/*.jsonl")) == [
        "d/a.jsonl:2",
        "d/a.jsonl:3",
        "d/b.jsonl:1",
        "d/b.jsonl:2",
    ]
    every = ["row 0", "row 1", "row 2", "row 3", "row 4"]
    assert texts(Source(path="d/**/*.jsonl*")) == every
    assert places(Source(path="d"))[-1] == "d/deep/c.jsonl.gz:1"
    opened = open_source(Source(path="d"))
    for number, _ in opened.read_records():
        assert number_of(opened.names, opened.place(number)) == number
    config = DataConfig(train=[Source(path="d"), Source(path="d/a.jsonl")])
    data = load_dataset(
        config, "train", build_renderer(config, tiny_tokenizer()), 64, tmp_path / "c"
    )
    again = ["d/a.jsonl(2):2", "d/a.jsonl(2):3"]
    assert [sample.id for sample in data] == [*places(Source(path="d")), *again]
    assert data.row_place(6) == "d/a.jsonl:3"
    before = open_source(Source(path="d")).digest
    (tmp_path / "d" / "b.jsonl").write_bytes(lines(ROWS[3:4]))
    assert open_source(Source(path="d")).digest != before


def test_a_row_that_two_sources_name_has_two_ids(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS))
    whole, part = f"{tmp_path}/*.jsonl", f"{tmp_path}/a.jsonl"
    config = DataConfig(train=[whole, part])
    data = load_dataset(
        config, "train", build_renderer(config, tiny_tokenizer()), 64, tmp_path / "c"
    )
    assert len({data.sample_id(index) for index in range(len(data))}) == len(data) == 10


@pytest.mark.parametrize(
    "name", ["a.jsonl.gz", "a.json.gz", "a.csv.gz", "a.tsv.zst", "a.jsonl.zst"]
)
def test_compressed_files(tmp_path: Path, name: str) -> None:
    content = {
        "jsonl": lines(ROWS),
        "json": json.dumps(ROWS).encode(),
        "csv": b"text\n" + b"".join(f"row {n}\n".encode() for n in range(5)),
        "tsv": b"text\n" + b"".join(f"row {n}\n".encode() for n in range(5)),
    }[name.split(".")[1]]
    path = tmp_path / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(content))
    else:
        write_zst(path, content)
    assert texts(Source(path=str(path))) == [row["text"] for row in ROWS]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_compressed_file_that_is_cut_off_is_told(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl.{suffix}"
    content = lines([{"text": f"{number**7}"} for number in range(5000)])
    if suffix == "gz":
        path.write_bytes(gzip.compress(content))
    else:
        write_zst(path, content)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert "the compressed file breaks off or is damaged after row" in fault(path)


@pytest.mark.parametrize("is_stream", [True, False])
def test_arrow_files(tmp_path: Path, is_stream: bool) -> None:
    path = tmp_path / "a.arrow"
    write_arrow(path, is_stream=is_stream, rows=ROWS * 200)
    assert len(texts(Source(path=str(path)))) == 1000
    for size in (0, path.stat().st_size // 2):
        path.write_bytes(path.read_bytes()[:size] if size else b"")
        assert f"{path}: not a complete Arrow file that can be read after row 0" in fault(path)
        write_arrow(path, is_stream=is_stream, rows=ROWS * 200)


def test_a_pattern_without_files_is_told(tmp_path: Path) -> None:
    assert f"no file matches {tmp_path}/*.jsonl; expected at least one" in fault(
        f"{tmp_path}/*.jsonl"
    )


def test_files_of_different_formats_or_columns_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\nx\n")
    (tmp_path / "b.csv").write_text("txt\ny\n")
    (tmp_path / "c.jsonl").write_bytes(lines(ROWS))
    message = fault(tmp_path)
    assert f"{tmp_path}/a.csv and {tmp_path}/c.jsonl; expected files of one format" in message
    message = fault(f"{tmp_path}/*.csv")
    assert f"{tmp_path}/a.csv and {tmp_path}/b.csv differ in the column 'text'" in message


def test_files_whose_names_are_splits_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(lines(ROWS))
    (tmp_path / "test.jsonl").write_bytes(lines(ROWS[:2]))
    assert "no split is named; expected one of" in fault(tmp_path)
    assert len(texts(Source(path=str(tmp_path), split="train[:40%]"))) == 2


def test_an_unknown_scheme_is_told() -> None:
    assert "has the scheme ftp; expected one of http, https, s3" in fault("ftp://host/a.jsonl")


def test_shares_part_a_source_and_equal_rows_stay_together(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"text": f"row {number}", "n": number} for number in range(300)]
    path.write_bytes(lines(rows) + b"".join(lines([dict(reversed(row.items()))]) for row in rows))
    train = texts(Source(path=str(path), share=[0, 0.9]))
    held_out = texts(Source(path=str(path), share=[0.9, 1]))
    assert len(train) + len(held_out) == 600
    assert not set(train) & set(held_out)
    assert 30 < len(held_out) < 100
    assert texts(Source(path=str(path), share=[0.9, 1], limit=7)) == held_out[:7]
    assert texts(Source(path=str(path), limit=3)) == ["row 0", "row 1", "row 2"]
    assert fraction_of({"a": 1, "b": [2]}) == fraction_of({"b": [2], "a": 1})


def test_share_and_limit_are_part_of_the_cache_key_and_of_the_report(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS))
    path = str(tmp_path / "a.jsonl")
    sizes, decisions = [], []
    for source in (
        Source(path=path),
        Source(path=path, limit=2),
        Source(path=path, share=[0, 0.5]),
    ):
        config = DataConfig(train=[source])
        renderer = build_renderer(config, tiny_tokenizer())
        data = load_dataset(config, "train", renderer, 64, tmp_path / "c")
        sizes.append(len(data))
        decisions.append(data.report.decisions[0])
    assert sizes[:2] == [5, 2]
    assert sizes[2] == sum(fraction_of(row) < 0.5 for row in ROWS)
    assert "at most 2 rows" in decisions[1]
    assert f"share 0 to 0.5 (it left out {5 - sizes[2]} rows)" in decisions[2]


@pytest.mark.parametrize(
    ("train", "held_out", "message"),
    [
        (
            [0, 0.95],
            [0.9, 1],
            r"share 0 to 0.95 of a, and data.eval 0.9 to 1; expected no common rows",
        ),
        ([0, 0.95], None, r"share 0 to 0.95 of a, and data.eval 0 to 1; expected no common rows"),
        ([0.5, 0.2], [0.6, 1], "0 <= first < second <= 1"),
    ],
)
def test_shares_that_overlap_are_refused(train: Any, held_out: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_mapping(
            DataConfig,
            {"train": [{"path": "a", "share": train}], "eval": [{"path": "a", "share": held_out}]},
        )
    DataConfig(train=[Source(path="a", share=[0, 0.95])], eval=[Source(path="a", share=[0.95, 1])])


def test_a_share_without_rows_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS[:1]))
    low = fraction_of(ROWS[0])
    share = [0, low / 2] if low > 0.5 else [(1 + low) / 2, 1]
    assert "none of its 1 rows lies in share=" in fault(tmp_path / "a.jsonl", share=share)


def test_modelscope_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "needs modelscope, not installed here" in fault("ms://owner/name")
    saved = tmp_path / "saved"
    datasets.Dataset.from_list(ROWS).save_to_disk(str(saved))
    asked: list[Any] = []

    class MsDataset:
        @staticmethod
        def load(name: str, **options: Any) -> Any:
            asked.append((name, options))
            return datasets.load_from_disk(str(saved))

    package, module = types.ModuleType("modelscope"), types.ModuleType("modelscope.msdatasets")
    package.__spec__ = types.SimpleNamespace(name="modelscope")  # type: ignore[assignment]
    module.MsDataset = MsDataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "modelscope", package)
    monkeypatch.setitem(sys.modules, "modelscope.msdatasets", module)
    assert texts(Source(path="ms://owner/name", name="small")) == [row["text"] for row in ROWS]
    options = {"subset_name": "small", "version": "master", "split": None}
    assert asked == [("owner/name", options)]


def test_a_missing_extra_of_a_store_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from taut.io import hub, remote

    monkeypatch.setattr(hub, "is_offline", lambda: False)
    monkeypatch.setattr(remote.extras, "find_spec", lambda name: None)
    assert "needs gcsfs, not installed here; expected the extra gs" in fault("gs://b/a.jsonl")


def test_a_repeat_of_a_source_is_called_weight() -> None:
    sft = METHODS["sft"]
    with pytest.raises(ConfigError, match=r"'data.train\[0\].repeat' .*; a source's weight says"):
        from_mapping(sft, {"model": "m", "data": {"train": [{"path": "a.jsonl", "repeat": 2}]}})


def test_an_error_in_a_later_file_names_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS))
    (tmp_path / "b.jsonl").write_bytes(lines(ROWS[:1]) + b"{\n")
    with pytest.raises(DataError, match=r"b\.jsonl:2: broken JSON"):
        texts(Source(path=str(tmp_path)))
