"""Files and data sets read into numbered records."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from taut.data.read.sources import changes, folder_of, open_source
from taut.data.settings import Source
from taut.errors import DataError, TautError

ROWS = [{"text": "a"}, {"text": 'b "quoted", with\na new line'}, {"text": "ä"}]


def records(path: Path, **options: Any) -> list[tuple[int, Any]]:
    return list(open_source(Source(path=str(path), **options)).read_records())


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_jsonl_counts_physical_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n  \r\n{"text": "b"}')
    assert records(path) == [(1, {"text": "a"}), (4, {"text": "b"})]


def test_ndjson_is_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "a.ndjson"
    path.write_text('{"text": "a"}\n')
    assert records(path) == [(1, {"text": "a"})]


@pytest.mark.parametrize("suffix", ["json", "csv", "tsv", "parquet"])
def test_other_files_count_records(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    if suffix == "json":
        path.write_text(json.dumps(ROWS))
    elif suffix == "parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), path)
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["text"], delimiter="," if suffix == "csv" else "\t")
            writer.writeheader()
            writer.writerows(ROWS)
    assert records(path) == list(enumerate(ROWS, start=1))


def test_parquet_nulls_inside_objects_are_absent(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "a"}]},
        {"messages": [{"role": "assistant", "content": "b", "train": False}]},
    ]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [record for _, record in records(tmp_path / "a.parquet")] == rows


def test_hugging_face_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": saved, "test": saved.select([0])}).save_to_disk(tmp_path / "two")
    (tmp_path / "three").mkdir()
    write_jsonl(tmp_path / "three" / "train.jsonl", ROWS)
    expected = list(enumerate(ROWS, start=1))
    assert records(tmp_path / "one") == expected
    assert records(tmp_path / "two", split="train") == expected
    assert records(tmp_path / "two", split="test") == expected[:1]
    assert records(tmp_path / "three") == expected
    with pytest.raises(DataError, match="no split is named; expected one of train, test"):
        records(tmp_path / "two")
    with pytest.raises(
        DataError, match=r'set it, as in data.train=\[\{ path = ".*two", split = "train" \}\]'
    ):
        records(tmp_path / "two")
    with pytest.raises(DataError, match="there is no split 'dev'"):
        records(tmp_path / "two", split="dev")


def test_values_of_type_json_are_read_at_any_depth(tmp_path: Path) -> None:
    import datasets
    from datasets import Features, Json, List, Value

    rows = [
        {"tools": [{"a": 1}], "text": "[1]", "meta": {"n": {"z": None}}, "label": 1},
        {"tools": [{"a": {"b": "x"}}, {"a": []}], "text": "b", "meta": {"n": [2]}, "label": 0},
    ]
    features = Features(
        {
            "tools": List({"a": Json()}),
            "text": Value("string"),
            "meta": {"n": Json()},
            "label": datasets.ClassLabel(names=["no", "yes"]),
        }
    )
    saved = datasets.Dataset.from_list(rows, features=features)
    saved.save_to_disk(tmp_path / "saved")
    saved.to_parquet(tmp_path / "a.parquet")
    table = saved.data.table
    with (
        pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table)
    plain = [  # as a library writes it that does not know Arrow's type, but keeps the metadata
        pa.field("tools", pa.list_(pa.struct([("a", pa.string())]))),
        pa.field("text", pa.string()),
        pa.field("meta", pa.struct([("n", pa.string())])),
        pa.field("label", pa.int64()),
    ]
    plain_table = table.cast(pa.schema(plain, metadata=table.schema.metadata))
    pyarrow.parquet.write_table(plain_table, tmp_path / "b.parquet")
    for name in ("saved", "a.parquet", "a.arrow", "b.parquet"):
        assert [record for _, record in records(tmp_path / name)] == rows, name


def test_json_that_is_none_is_named_by_its_row(tmp_path: Path) -> None:
    table = pa.table({"a": pa.array(["1", "{"]).cast(pa.json_())})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet:2: a value of type Json is not JSON"):
        records(tmp_path / "a.parquet")


BROKEN: list[tuple[str, bytes, str]] = [
    ("a.jsonl", b'{"text": "a"}\n{"text": \n', r":2: broken JSON at column \d+"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', ":2: byte 11 is not UTF-8"),
    ("a.jsonl", b'\n{"text": "a", "t\\u0065xt": "b"}', ":2: JSON that .*'text' is there twice"),
    ("a.jsonl", b'{"text": NaN}', ":1: JSON that .*NaN is no JSON"),
    ("a.jsonl", b'{"text": -1e999}', ":1: JSON that .*-1e999 is too large"),
    ("a.json", b'[{"text": "a"}, {"text": 1, "text": 2}]', ":2: JSON that .*'text' is there twice"),
    ("a.json", b'[{"text": "a"}, \n]', ":2: broken JSON at line 2, column 1"),
    ("a.json", b'[{"text": "a"}\n {}]', ":2: broken JSON at line 2, column 2: Expecting ','"),
    ("a.json", b'[{"text": "a"}', ":2: broken JSON at column 15"),
    ("a.json", b'[{"text": "a"}] x', "Extra data"),
    ("a.json", b"[" * 100_000, ":1: JSON that cannot be read"),
    ("a.jsonl", b"[" * 100_000, ":1: JSON that cannot be read"),
    ("a.jsonl", b'{"n": ' + b"9" * 10_000 + b"}", ":1: JSON that cannot be read"),
    ("a.json", b'{"text": "a"}\n{"text": "b"}', "Extra data.*name it .jsonl"),
    ("a.json", b'{"text": "a"}', "expected a list of objects"),
    ("a.csv", b'text,b\n"x', ":1: broken CSV"),
    ("a.csv", b"text,b\n1,2\n1,2,3\n", ":2: 3 cells; expected 2"),
    ("a.csv", b"text,text\n1,2\n", "named twice"),
    ("a.csv", b"text\n\xff\n", "not UTF-8"),
    ("a.csv", b"text\n\xff\n", "iconv -f CP1252 -t UTF-8"),
    ("a.csv", "text\na\n".encode("utf-16"), "iconv -f UTF-16 -t UTF-8"),
    ("a.csv", b"question;answer\na;b\n", "one column, 'question;answer', with ';' in it"),
    ("a.jsonl", b'[{"text": "a"},\n{"text": "b"}]\n', ":1: broken JSON .*one list, name it .json"),
    ("a.xlsx", b"PK", "save it as CSV or parquet"),
    ("a.parquet", b"PAR1 not really", "not a parquet file"),
    ("a.txt", b"text", "ends in '.txt'; expected one of .jsonl"),
]


@pytest.mark.parametrize(("name", "content", "message"), BROKEN, ids=[b[2][:24] for b in BROKEN])
def test_broken_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        records(tmp_path / name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file or directory .*none.jsonl"):
        records(tmp_path / "none.jsonl")


def test_a_slip_in_a_path_is_no_data_set_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    with pytest.raises(DataError, match="no file or directory data/trian"):
        open_source(Source(path="data/trian"))


def test_a_directory_that_is_no_data_set(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be loaded as a Hugging Face data set"):
        records(tmp_path)


def test_a_directory_of_files_that_do_not_go_together_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "a"\n')
    with pytest.raises(DataError, match="cannot be loaded") as caught:
        records(folder)
    assert "An error occurred while generating" not in str(caught.value)
    assert "JSON" in str(caught.value)


def test_the_digest_follows_the_content(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    first = open_source(Source(path=str(path))).digest
    again = open_source(Source(path=str(write_jsonl(tmp_path / "b.jsonl", ROWS)))).digest
    changed = open_source(Source(path=str(write_jsonl(path, ROWS[:2])))).digest
    assert first == again != changed


def overwrite(path: Path) -> None:
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(0, 0))


CHANGES: dict[str, Callable[[Path], object]] = {
    "longer": lambda path: path.write_bytes(path.read_bytes() + b'{"text": "c"}\n'),
    "shorter": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "written again": overwrite,
    "another file": lambda path: Path(shutil.copy2(path, path.with_suffix(".new"))).replace(path),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_that_changes_before_it_is_read_is_refused(tmp_path: Path, name: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    opened = open_source(Source(path=str(path)))
    CHANGES[name](path)
    with pytest.raises(DataError, match=r"a\.jsonl: the data changed while they were read: .*;"):
        list(opened.read_records())


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    if suffix == "csv":
        path.write_text("text\na\nb\n")
    else:
        pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), path)
    opened = open_source(Source(path=str(path)))
    records = opened.read_records()
    assert next(records)[0] == 1
    os.utime(path, ns=(0, 0))
    with pytest.raises(DataError, match=r"changed while they were read: .* was written again"):
        list(records)
    again = open_source(Source(path=str(path)))
    assert changes(again.stamps) == []
    assert next(again.read_records())[0] == 1


def test_text_in_arrow_that_is_not_utf8_is_named_by_its_row(tmp_path: Path) -> None:
    bad = pa.array([b"good", b"\xff"], pa.binary()).view(pa.string())
    pyarrow.parquet.write_table(pa.Table.from_arrays([bad], names=["text"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet:2: the row cannot be read \(.*UTF8"):
        records(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("x" * 5000, r"data=.x*\.\.\. cannot be looked up: File name too long;"),
        ("~no-such-user/a.jsonl", "found no file or directory ~no-such-user"),
        ("~root/a.jsonl", "found no file or directory ~root"),
        ("a\0b.jsonl", "found no file or directory"),
    ],
)
def test_what_cannot_be_a_path_is_refused(path: str, message: str) -> None:
    with pytest.raises(TautError, match=message):
        open_source(Source(path=path))


def test_pictures_begin_beside_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "saved").mkdir()
    key = "data.images.folder"
    assert folder_of(Source(path="~/data/rows.jsonl"), None, key) == str(tmp_path / "data")
    assert folder_of(Source(path="saved"), None, key) == str(tmp_path / "saved")
    assert folder_of(Source(path="rows.jsonl"), "~/pictures", key) == str(tmp_path / "pictures")


def test_texts_are_replaced_in_the_values_of_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    row = {"NAME": 1, "messages": [{"role": "user", "content": "I am NAME of NAME"}]}
    path.write_text(f"{json.dumps(row)}\n")
    source = Source(path=str(path), replace={"NAME": 'Ro"bin'})
    content = {"NAME": 1, "messages": [{"role": "user", "content": 'I am Ro"bin of Ro"bin'}]}
    assert list(open_source(source).read_records()) == [(1, content)]
    assert [json.loads(line) for _, line in open_source(source).read_records(as_lines=True)] == [
        content
    ]
    assert open_source(source).digest != open_source(Source(path=str(path))).digest
    with pytest.raises(ValueError, match='the text to be replaced is ""'):
        Source(path=str(path), replace={"": "x"})


def test_texts_are_put_before_and_after_those_of_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"query": "Who?", "response": "I am NAME."}, {"query": ["Who?"], "response": "NAME"}]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    put: dict[str, Any] = {"prepend": {"response": "So: NAME, "}, "append": {"query": " Say it."}}
    opened = open_source(Source(path=str(path), replace={"NAME": "Robin"}, **put))
    first, second = (record for _, record in opened.read_records(strict=False))
    assert first == {"query": "Who? Say it.", "response": "So: NAME, I am Robin."}
    assert isinstance(second, DataError)
    assert str(second) == f"{path}:2: " + (
        "append names the column query, and it is ['Who?']; expected a text; correct the append of it"
    )
    both = Source(path=str(path), limit=1, prepend={"query": "("}, append={"query": ")"})
    assert next(open_source(both).read_records())[1]["query"] == "(Who?)"
    digests = {open_source(Source(path=str(path), **{key: put[key]})).digest for key in put}
    assert len({*digests, opened.digest, open_source(Source(path=str(path))).digest}) == 4


@pytest.mark.parametrize(
    ("name", "limit", "share", "num_lines"),
    [
        ("a.jsonl", None, None, 5),
        ("a.jsonl", 3, None, 3),
        ("a.jsonl", None, [0, 0.5], None),
        ("a.csv", None, None, None),
    ],
)
def test_lines_are_counted_where_each_is_a_row(
    name: str, limit: int | None, share: list[float] | None, num_lines: int | None, tmp_path: Path
) -> None:
    (tmp_path / name).write_text("text\n" + '{"text": "a"}\n' * 4)
    opened = open_source(Source(path=str(tmp_path / name), limit=limit, share=share))
    assert opened.num_lines == num_lines
    (tmp_path / name).unlink()
    assert opened.num_lines is None
