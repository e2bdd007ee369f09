"""Rows that arrive: which files are taken and when, and what a position needs to go on."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterator
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.helpers.chat_runs import write_rows

from taut.data.read.sources import fraction_of
from taut.data.read.stream_reader import START, FolderRows, IterableRows, Position, StreamReader
from taut.data.settings import Source
from taut.errors import DataError, UserCodeError

LONG_AGO = time.time() - 100


def rows(*names: str) -> list[dict[str, Any]]:
    return [{"text": name} for name in names]


def follow(folder: Path, position: Position = START, **options: Any) -> FolderRows:
    return FolderRows(Source(path=str(folder), **options), 0.0, position)


def there(arrivals: Iterator[Any]) -> list[str]:
    """The rows that are there now."""
    return [row.record["text"] for row in takewhile(lambda row: row is not None, arrivals)]


def test_files_are_taken_by_name_when_they_are_complete(tmp_path: Path) -> None:
    write_rows(tmp_path / "b.jsonl", rows("b1", "b2"))
    (tmp_path / "day").mkdir()
    write_rows(tmp_path / "day" / "a.jsonl", rows("d1"))
    for name in ("c.jsonl.tmp", ".c.jsonl", "_c.jsonl", "notes.txt"):
        write_rows(tmp_path / name, rows("no"))
    arrivals = iter(follow(tmp_path))
    assert there(arrivals) == ["b1", "b2", "d1"]
    write_rows(tmp_path / "e.jsonl", rows("e1"))
    assert there(arrivals) == ["e1"]
    (tmp_path / "_SUCCESS").touch()
    assert list(arrivals) == []


def test_a_file_that_changed_a_moment_ago_keeps_those_after_it_waiting(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", rows("a"))
    write_rows(tmp_path / "b.jsonl", rows("b"))
    arrivals = iter(FolderRows(Source(path=str(tmp_path)), 0.5))
    assert there(arrivals) == []
    time.sleep(0.6)
    (tmp_path / "b.jsonl").touch()
    assert there(arrivals) == ["a"]
    assert there(arrivals) == []
    time.sleep(0.6)
    assert there(arrivals) == ["b"]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "json", "parquet", "csv"])
def test_formats(suffix: str, tmp_path: Path) -> None:
    for name in "ab":
        path, table = tmp_path / f"{name}.{suffix}", rows(f"{name}1", f"{name}2")
        lines = "".join(json.dumps(row) + "\n" for row in table)
        if suffix == "parquet":
            pq.write_table(pa.Table.from_pylist(table), path)
        elif suffix == "jsonl.gz":
            path.write_bytes(gzip.compress(lines.encode()))
        elif suffix == "csv":
            path.write_text(f"text\n{name}1\n{name}2\n")
        else:
            path.write_text(json.dumps(table) if suffix == "json" else lines)
    assert there(iter(follow(tmp_path))) == ["a1", "a2", "b1", "b2"]


def test_empty_files_and_rows_outside_the_share_are_passed_over(tmp_path: Path) -> None:
    names = [f"r{number}" for number in range(40)]
    write_rows(tmp_path / "a.jsonl", rows(*names[:20]))
    (tmp_path / "b.jsonl").touch()
    write_rows(tmp_path / "c.jsonl", rows(*names[20:]))
    inside = [name for name in names if fraction_of({"text": name}) < 0.5]
    assert 0 < len(inside) < 40
    assert there(iter(follow(tmp_path, share=[0, 0.5]))) == inside


@pytest.mark.parametrize("num_read", range(1, 6))
def test_a_position_goes_on_with_the_next_row(num_read: int, tmp_path: Path) -> None:
    """Also where what was read is gone: of files that were read to their end nothing more is asked."""
    write_rows(tmp_path / "a.jsonl", rows("1", "2"))
    write_rows(tmp_path / "b.jsonl", rows("3", "4", "5"))
    first = follow(tmp_path)
    list(islice(first, num_read))
    if num_read >= 2:
        (tmp_path / "a.jsonl").unlink()
    position, taken = first.position, json.loads(json.dumps(first.seen))
    taken["stamps"] = {name: tuple(stamp) for name, stamp in taken["stamps"].items()}
    left = FolderRows(Source(path=str(tmp_path)), 0.0, position, taken)
    assert there(iter(left)) == ["1", "2", "3", "4", "5"][num_read:]


def test_a_file_that_was_read_in_part_has_to_begin_with_the_same_rows(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", rows("1", "2", "3"))
    first = follow(tmp_path)
    list(islice(first, 2))
    write_rows(path, rows("1", "2", "new"))
    assert there(iter(follow(tmp_path, first.position))) == ["new"]
    write_rows(path, rows("1", "other", "3"))
    with pytest.raises(DataError, match=r"a\.jsonl: its first 2 rows are not those that were read"):
        there(iter(follow(tmp_path, first.position)))
    path.unlink()
    with pytest.raises(DataError, match=r"a\.jsonl is gone, and 2 of its rows were read"):
        there(iter(follow(tmp_path, first.position)))


def test_files_that_come_late_or_are_written_again_are_refused(tmp_path: Path) -> None:
    arrivals = follow(tmp_path)
    write_rows(tmp_path / "b.jsonl", rows("b"))
    waiting = iter(arrivals)
    assert there(waiting) == ["b"]
    late = write_rows(tmp_path / "a.jsonl", rows("a"))
    with pytest.raises(DataError, match=r"a\.jsonl came after .*b\.jsonl had been taken"):
        there(waiting)
    late.unlink()
    write_rows(tmp_path / "b.jsonl", rows("b", "c"))
    with pytest.raises(DataError, match=r"b\.jsonl was written again after it had been taken"):
        there(iter(FolderRows(arrivals.source, 0.0, arrivals.position, arrivals.seen)))
    (tmp_path / "b.jsonl").unlink()
    write_rows(tmp_path / "c.jsonl", rows("c"))
    left = FolderRows(arrivals.source, 0.0, arrivals.position, arrivals.seen)
    assert there(iter(left)) == ["c"]
    assert list(left.seen["stamps"]) == ["c.jsonl"], "files that are gone are forgotten"


def test_another_format_and_other_columns_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["b"], "more": [1]}), tmp_path / "b.parquet")
    with pytest.raises(
        DataError, match=r"b\.parquet has the columns more, text; expected the columns text"
    ):
        there(iter(follow(tmp_path)))
    (tmp_path / "b.parquet").unlink()
    write_rows(tmp_path / "b.jsonl", rows("b"))
    with pytest.raises(
        DataError, match=r"b\.jsonl has the format \.jsonl; expected the format \.parquet"
    ):
        there(iter(follow(tmp_path)))


def test_a_broken_row_comes_after_those_before_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "1"}\n{"text": "2"}\n{"text": \n')
    arrivals = iter(follow(tmp_path))
    assert [next(arrivals).record["text"] for _ in range(2)] == ["1", "2"]  # type: ignore[union-attr]
    with pytest.raises(DataError, match=r"a\.jsonl:3: "):
        next(arrivals)


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="found no directory"):
        next(iter(follow(tmp_path / "nowhere")))


def test_a_link_to_nothing_is_not_there_yet(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "gone")
    assert there(iter(follow(tmp_path))) == []


# -- iterables


def test_the_digest_of_an_iterable_is_that_of_its_rows() -> None:
    first, other = IterableRows(rows("1", "2")), IterableRows(iter(rows("1", "2")))
    for arrivals in (first, other):
        assert there(iter(arrivals)) == ["1", "2"]
    assert first.position == other.position
    assert first.position["rows"] == 2
    assert first.position["digest"] != START["digest"]


def test_what_an_iterable_gives_has_to_be_json() -> None:
    with pytest.raises(DataError, match=r"rows:2 of data\.train: text is a value of type object"):
        there(iter(IterableRows([{"text": "1"}, {"text": object()}])))


def test_a_state_that_json_does_not_have() -> None:
    class Stateful(list[Any]):
        def state_dict(self) -> Any:
            return {"bytes": b"1"}

        def load_state_dict(self, state: Any) -> None: ...

    arrivals: StreamReader = IterableRows(Stateful(rows("1")))
    list(arrivals)
    with pytest.raises(DataError, match=r"state_dict\(\) of the iterable holds what JSON does not"):
        _ = arrivals.position


def test_an_iterable_that_cannot_begin() -> None:
    class Broken:
        def __iter__(self) -> Iterator[Any]:
            raise RuntimeError("no connection")

    with pytest.raises(UserCodeError, match="the iterable raised RuntimeError: no connection"):
        list(IterableRows(Broken()))
