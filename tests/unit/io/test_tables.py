"""Tables that grow: what was appended is there after a kill, once, and in order."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from taut.errors import DataError, OutputError
from taut.io import tables
from taut.io.tables import TableWriter, drop_from, read_tables

SCHEMA = pa.schema({"step": pa.int32(), "text": pa.string(), "logp_N": pa.list_(pa.float32())})


def rows(step: int) -> list[dict[str, Any]]:
    return [
        {"step": step, "text": f"é {step}", "logp_N": [0.5] * (step % 7)},
        {"step": step, "text": None, "logp_N": None},
    ]


def written(directory: Path, steps: range, seal_bytes: int = 4_000) -> TableWriter:
    writer = TableWriter(directory, SCHEMA, seal_bytes)
    for step in steps:
        writer.append(rows(step))
    return writer


def killed(place: Path, steps: range) -> Path:
    """The only part of a table, a stream, whose writer was killed."""
    writer = written(place / "live", steps, seal_bytes=10**6)
    shutil.copytree(place / "live", place / "table")
    writer.close()
    (stream,) = (place / "table").iterdir()
    return stream


def steps_of(directory: Path) -> list[int]:
    return [
        step for batch in read_tables(directory, ["step"]) for step in batch["step"].to_pylist()
    ]


def expected(steps: range) -> list[int]:
    return [step for step in steps for _ in range(2)]


def test_rows_come_back_as_they_were_while_the_table_is_written_and_after(tmp_path: Path) -> None:
    writer = written(tmp_path, range(1, 40))
    names = sorted(path.suffix for path in tmp_path.iterdir())
    assert names.count(".arrows") == 1 and names.count(".parquet") > 2
    whole = [row for batch in read_tables(tmp_path) for row in batch.to_pylist()]
    assert whole == [row for step in range(1, 40) for row in rows(step)]
    writer.close()
    assert [row for batch in read_tables(tmp_path) for row in batch.to_pylist()] == whole
    assert {path.suffix for path in tmp_path.iterdir()} == {".parquet"}
    assert writer.num_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_parts_of_a_table_may_lack_columns_that_later_ones_have(tmp_path: Path) -> None:
    written(tmp_path, range(1, 3)).close()
    later = TableWriter(tmp_path, SCHEMA.append(pa.field("reply", pa.string())))
    later.append([row | {"reply": "good"} for row in rows(3)])
    found = [row for batch in read_tables(tmp_path, ["step", "reply"]) for row in batch.to_pylist()]
    assert [row["reply"] for row in found] == [None] * 4 + ["good"] * 2
    assert [row["step"] for row in found] == expected(range(1, 4))
    later.close()
    drop_from(tmp_path, 2)
    assert steps_of(tmp_path) == expected(range(1, 2))


def test_a_stream_that_ends_anywhere_has_its_whole_batches(tmp_path: Path) -> None:
    stream = killed(tmp_path, range(1, 5))
    content, found = stream.read_bytes(), []
    for size in range(len(content) + 1):
        stream.write_bytes(content[:size])
        found.append(len(steps_of(stream.parent)))
    assert found == sorted(found) and found[0] == 0
    assert set(found) == {0, 2, 4, 6, 8}, "a batch is there whole or not at all"
    stream.write_bytes(content[:-3])
    written(stream.parent, range(4, 7)).close()
    assert steps_of(stream.parent) == expected(range(1, 7))


def test_a_stream_that_is_damaged_within_is_refused(tmp_path: Path) -> None:
    stream = killed(tmp_path, range(1, 9))
    content = bytearray(stream.read_bytes())
    message = content.index(b"\xff\xff\xff\xff", 4) + 8  # of the first batch
    content[message : message + 16] = b"\xff" * 16
    stream.write_bytes(content)
    with pytest.raises(DataError, match=r"cannot read .*000001\.arrows: .*remove the file"):
        steps_of(stream.parent)


def test_a_part_that_was_sealed_before_its_stream_was_removed_is_there_once(tmp_path: Path) -> None:
    stream = killed(tmp_path, range(1, 5))
    content = stream.read_bytes()
    TableWriter(stream.parent, SCHEMA)
    stream.write_bytes(content)
    assert steps_of(stream.parent) == expected(range(1, 5))
    TableWriter(stream.parent, SCHEMA)
    assert not stream.exists() and steps_of(stream.parent) == expected(range(1, 5))


@pytest.mark.parametrize("step", [1, 7, 20, 21])
def test_what_is_dropped_is_gone_and_may_be_written_again(step: int, tmp_path: Path) -> None:
    written(tmp_path, range(1, 21), seal_bytes=2_500).close()
    drop_from(tmp_path, step)
    assert steps_of(tmp_path) == expected(range(1, step))
    written(tmp_path, range(step, 25)).close()
    assert steps_of(tmp_path) == expected(range(1, 25))


def test_a_table_of_another_version_is_refused(tmp_path: Path) -> None:
    schema = SCHEMA.with_metadata({"taut_table": "7"})
    pq.write_table(pa.Table.from_pylist(rows(1), schema), tmp_path / "000001.parquet")
    with pytest.raises(DataError, match="a table of version 7; expected version 1"):
        steps_of(tmp_path)


def test_a_disk_that_is_full_leaves_whole_batches_and_may_have_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    writer = written(tmp_path, range(1, 4), seal_bytes=10**6)

    def half(file: int, content: bytes, at: int) -> int:
        if len(content) < 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, content[: len(content) // 2], at)

    monkeypatch.setattr(os, "pwrite", half)
    for _ in range(2):
        with pytest.raises(OutputError, match="No space left on device"):
            writer.append(rows(4))
        assert steps_of(tmp_path) == expected(range(1, 4))
    monkeypatch.setattr(os, "pwrite", real)
    writer.append(rows(5))
    assert steps_of(tmp_path) == [1, 1, 2, 2, 3, 3, 5, 5]
    writer.close()
    assert steps_of(tmp_path) == [1, 1, 2, 2, 3, 3, 5, 5]


def test_a_full_disk_before_the_first_batch_leaves_a_table_without_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    writer = TableWriter(tmp_path, SCHEMA)
    with pytest.raises(OutputError):
        writer.append(rows(1))
    monkeypatch.undo()
    assert steps_of(tmp_path) == []
    writer.append(rows(2))
    writer.close()
    assert steps_of(tmp_path) == [2, 2]


def test_half_a_surrogate_pair_is_written_as_a_question_mark(tmp_path: Path) -> None:
    schema = SCHEMA.append(pa.field("said", pa.list_(pa.struct({"a": pa.string()}))))
    writer = TableWriter(tmp_path, schema)
    writer.append([{"step": 1, "text": "a\ud800b", "logp_N": [1.5], "said": [{"a": "\udfff"}]}])
    writer.close()
    (row,) = [row for batch in read_tables(tmp_path) for row in batch.to_pylist()]
    assert row == {"step": 1, "text": "a?b", "logp_N": [1.5], "said": [{"a": "?"}]}


def test_a_resume_with_a_damaged_stream_is_refused_in_a_line(tmp_path: Path) -> None:
    stream = killed(tmp_path, range(1, 9))
    content = bytearray(stream.read_bytes())
    message = content.index(b"\xff\xff\xff\xff", 4) + 8
    content[message : message + 16] = b"\xff" * 16
    stream.write_bytes(content)
    with pytest.raises(DataError, match=r"cannot read .*000001\.arrows: .*remove the file"):
        drop_from(stream.parent, 5)
    assert [path.name for path in stream.parent.iterdir()] == [stream.name]


def test_a_stream_that_is_sealed_while_it_is_looked_for_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = written(tmp_path, range(1, 4), seal_bytes=10**6)
    listed = tables._parts(tmp_path)
    writer.close()
    monkeypatch.setattr(tables, "_parts", lambda _: listed)
    assert steps_of(tmp_path) == expected(range(1, 4))


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"cannot write .*file/table"):
        TableWriter(tmp_path / "file" / "table", SCHEMA)


def test_the_rows_of_one_step(tmp_path: Path) -> None:
    writer = written(tmp_path, range(1, 40))
    for step in (1, 17, 39):
        found = [row for b in read_tables(tmp_path, step=step) for row in b.to_pylist()]
        assert found == rows(step)
        texts = [row for b in read_tables(tmp_path, ["text"], step) for row in b.to_pylist()]
        assert texts == [{"text": row["text"]} for row in rows(step)]
    assert not list(read_tables(tmp_path, step=99))
    writer.close()
