"""Windows of a stream: each sample at one position, recorded whole or not at all."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taut.data.read.stream_reader import START, IterableRows, Position, SeenFiles, StreamRow
from taut.data.rows.schema import Columns
from taut.data.store.shards import Shard, row_starts
from taut.data.stream import (
    FIRST,
    RECORD,
    Preview,
    Recipe,
    Recorder,
    Stream,
    Window,
    folder_of,
)
from taut.errors import OutputError, StreamError


def tokenize(records: Any, names: tuple[str, ...]) -> Shard:
    """A row ``{"text": "7 8"}`` is two samples, of the tokens 7 and 8 with a target each."""
    ids, lines, parts, rows = [], [], [], 0
    for number, record in records:
        words = record["text"].split()
        rows += bool(words)
        for part, word in enumerate(words):
            ids += [1, int(word)]
            lines.append(number)
            parts.append(part)
    size = len(lines)
    arrays: dict[str, Any] = {
        "ids": np.array(ids, np.int32),
        "offsets": np.arange(0, 2 * size + 1, 2),
        "target_at": np.ones(size, np.int32),
        "target_offsets": np.arange(size + 1),
        "line": np.array(lines),
        "part": np.array(parts, np.int32),
    }
    starts = row_starts(arrays["line"])
    if starts.size < size:
        arrays["row_offsets"] = np.append(starts, size)
    return Shard(arrays, len(records), ())


def recipe(num_rows: int, key: str = "key", unit: Any = "num_samples") -> Recipe:
    return Recipe("stream", key, num_rows, unit, Columns("auto", {}, ()), tokenize)


def rows_of(texts: list[str]) -> list[dict[str, str]]:
    return [{"text": text} for text in texts]


def preview(texts: list[str], num_rows: int, unit: Any = "num_samples") -> Stream:
    made = recipe(num_rows, unit=unit)
    return Stream(made, Preview(made, IterableRows(rows_of(texts))), 10.0, 10**6)


def ignore(seconds: float) -> None:
    """Nobody follows."""


@settings(deadline=None)
@given(
    counts=st.lists(st.integers(1, 3), min_size=1, max_size=60),
    num_rows=st.integers(1, 70),
    size=st.integers(1, 9),
    seed=st.integers(0, 2**32),
)
def test_every_sample_has_one_position(
    counts: list[int], num_rows: int, size: int, seed: int
) -> None:
    """Steps of any size, over windows of any number of rows of one to three samples each, see each sample once; and a
    window's samples before those of the next one.
    """
    texts, last = [], 1
    for count in counts:
        texts.append(" ".join(str(last + number + 1) for number in range(count)))
        last += count
    stream, total = preview(texts, num_rows), sum(counts)
    seen: list[int] = []
    for start in range(0, total, size):
        stop = min(start + size, total)
        stream.require(stop, "step", "", ignore)
        data, indices = stream.at(start, stop, seed)
        seen += [int(data[index].ids_T[1]) for index in indices]
        stream.leave(stop, stop)
    assert sorted(seen) == list(range(2, total + 2))
    ends = np.cumsum([sum(counts[at : at + num_rows]) for at in range(0, len(counts), num_rows)])
    window_S = np.searchsorted(ends, np.array(seen) - 2, side="right")
    assert (np.diff(window_S) >= 0).all()
    with pytest.raises(
        StreamError, match=f"ended after {total:,} samples?; step 9 needs 1 sample more; add"
    ):
        stream.require(total + 1, "step 9", "add", ignore)


def test_compared_rows_are_counted_and_permuted_as_rows() -> None:
    stream = preview(["2 3", "4 5", "6 7", "8 9"], 4, "num_groups")
    stream.require(4, "step", "", ignore)
    data, indices = stream.at(0, 4, 3)
    assert sorted(indices) == [0, 1, 2, 3]
    assert data.num_groups == 4


def test_without_a_shuffle_rows_stay_in_order() -> None:
    stream = preview([str(number) for number in range(2, 12)], 4)
    stream.require(10, "step", "", ignore)
    data, indices = stream.at(2, 9, None)
    assert [int(data[index].ids_T[1]) for index in indices] == [4, 5, 6, 7, 8, 9, 10]


def test_a_window_is_permuted_by_the_seed_and_its_number() -> None:
    stream = preview([str(number) for number in range(2, 66)], 32)
    stream.require(64, "step", "", ignore)
    orders = [stream.at(start, start + 32, seed)[1] for start in (0, 32) for seed in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


def test_a_row_with_a_token_that_the_model_does_not_have() -> None:
    stream = preview(["2", "3", "4", "9"], 2)
    stream.num_ids = 9
    stream.require(4, "step", "", ignore)
    stream.at(0, 2, None)
    with pytest.raises(StreamError, match="rows:4: has token 9, and the model has 9 rows"):
        stream.at(2, 4, None)


def test_the_first_rows_can_be_read_again() -> None:
    stream = preview(["2", "3"], 2)
    stream.require(1, "step", "", ignore)
    assert [row.text for row in stream.first_rows()] == ["2", "3"]  # type: ignore[union-attr]


# -- the record


class Slow:
    """Rows, after ``num_rows`` of which there is none until ``go_on``."""

    def __init__(self, texts: list[str], num_rows: int) -> None:
        self.texts, self.num_rows, self.goes_on = texts, num_rows, False
        self.position: Position = START
        self.seen: SeenFiles = {"stamps": {}, "form": None}

    def __iter__(self) -> Iterator[StreamRow | None]:
        for number, text in enumerate(self.texts, start=1):
            while number > self.num_rows and not self.goes_on:
                yield None
            self.position = {**START, "rows": number}
            yield StreamRow("rows", number, {"text": text})


TEXTS = [str(number) for number in range(2, 42)]


def record(
    tmp_path: Path, texts: list[str] = TEXTS, *, goes_on: bool = True, **keys: Any
) -> Recorder:
    made = recipe(4, **keys)
    return Recorder(
        tmp_path,
        tmp_path / "out",
        made,
        lambda position, seen: IterableRows(rows_of(texts), position),
        goes_on=goes_on,
    )


def until(recorder: Recorder, number: int) -> list[Window]:
    """The windows, once the one of this number is there."""
    deadline = time.monotonic() + 60
    while not recorder.windows or recorder.windows[-1]["number"] < number:
        assert time.monotonic() < deadline
        status = recorder.status(number - 1)
        assert status.error is None
    return recorder.windows


def test_one_window_is_read_ahead(tmp_path: Path) -> None:
    recorder = record(tmp_path)
    try:
        until(recorder, 0)
        recorder.want(5)
        until(recorder, 2)
        time.sleep(0.3)
        assert [window["number"] for window in recorder.windows] == [0, 1, 2]
    finally:
        recorder.close()


def test_windows_before_the_floor_are_removed_but_the_first(tmp_path: Path) -> None:
    recorder = record(tmp_path)
    try:
        recorder.want(17)
        until(recorder, 5)
        recorder.floor = 13
        recorder.want(40)
        until(recorder, 9)
        assert [window["number"] for window in recorder.windows] == [0, *range(3, 10)]
        folders = sorted(path.name for path in recorder.folder.iterdir() if path.is_dir())
        assert folders == [f"{number:08d}" for number in (0, *range(3, 10))]
    finally:
        recorder.close()


def test_another_process_goes_on_after_the_last_window(tmp_path: Path) -> None:
    """What it has not written whole is made again; what is recorded stays as it was."""
    first = record(tmp_path)
    first.want(5)
    windows = list(until(first, 2))
    first.close()
    shutil.copytree(first.folder / "00000002", first.folder / "00000003")
    (first.folder / ".window.partial").mkdir()
    second = record(tmp_path)
    try:
        assert second.windows[:3] == windows
        assert not (second.folder / ".window.partial").exists()
        second.want(20)
        until(second, 5)
        assert second.shard(second.windows[3]).arrays["ids"].tolist()[1::2] == [14, 15, 16, 17]
    finally:
        second.close()
    alone = record(tmp_path / "alone")
    alone.want(20)
    assert until(alone, 5) == second.windows
    alone.close()


@pytest.mark.parametrize("spoil", ["new run", "other settings", "no record", "half a record"])
def test_a_record_that_is_not_this_run_s_is_begun_again(spoil: str, tmp_path: Path) -> None:
    first = record(tmp_path)
    until(first, 0)
    first.close()
    if spoil == "no record":
        (first.folder / RECORD).unlink()
    if spoil == "half a record":
        (first.folder / RECORD).write_text((first.folder / RECORD).read_text()[:100])
    texts = [str(number) for number in range(50, 90)]
    key = "other" if spoil == "other settings" else "key"
    second = record(tmp_path, texts, goes_on=spoil != "new run", key=key)
    until(second, 0)
    assert second.shard(second.windows[0]).arrays["ids"].tolist()[1::2] == [50, 51, 52, 53]
    assert json.loads((second.folder / FIRST).read_text().splitlines()[0]) == [
        "rows",
        1,
        {"text": "50"},
    ]
    second.close()


def test_two_processes_do_not_record_one_run(tmp_path: Path) -> None:
    first = record(tmp_path)
    with pytest.raises(OutputError, match="another process records the stream"):
        record(tmp_path)
    first.close()
    record(tmp_path).close()


def test_a_damaged_window_is_named(tmp_path: Path) -> None:
    recorder = record(tmp_path)
    (window, *_) = until(recorder, 0)
    recorder.close()
    path = recorder.folder / "00000000" / "ids.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(StreamError, match="00000000: the recorded rows are damaged"):
        recorder.shard(window)


def test_how_long_no_row_came_is_told(tmp_path: Path) -> None:
    rows = Slow(TEXTS, 6)
    recorder = Recorder(
        tmp_path, tmp_path / "out", recipe(4), lambda position, seen: rows, goes_on=False
    )
    try:
        recorder.want(8)
        until(recorder, 0)
        deadline = time.monotonic() + 60
        while recorder.status(0).seconds == 0:
            assert time.monotonic() < deadline
        stream = Stream(recorder.recipe, recorder, 0.1, 100, windows=list(recorder.windows))
        with pytest.raises(
            StreamError, match=r"no new row for \d+ seconds .*; step 2 needs 4 samples more"
        ):
            stream.require(8, "step 2", "", ignore)
        rows.goes_on = True
        stream.timeout = 60
        stream.require(8, "step 2", "", ignore)
        assert stream.stop >= 8
    finally:
        recorder.close()


def test_an_error_comes_when_its_window_is_wanted(tmp_path: Path) -> None:
    recorder = record(tmp_path, [*TEXTS[:6], "x"])
    stream = Stream(recorder.recipe, recorder, 10.0, 100)
    try:
        stream.require(4, "step 1", "", ignore)
        with pytest.raises(StreamError, match="invalid literal"):
            stream.require(5, "step 2", "", ignore)
        stream.require(4, "step 1", "", ignore)
    finally:
        recorder.close()


def test_other_rows_than_a_checkpoint_s_are_refused(tmp_path: Path) -> None:
    digests = []
    for name, texts in (("a", TEXTS), ("b", TEXTS), ("c", ["99", *TEXTS[1:]])):
        recorder = record(tmp_path / name, texts)
        recorder.want(9)
        digests.append(until(recorder, 2)[2]["digest"])
        stream = Stream(recorder.recipe, recorder, 10.0, 100, expected=(2, digests[0]))
        if name == "c":
            with pytest.raises(
                StreamError, match="rows differ from those that the checkpoint was trained on"
            ):
                stream.require(12, "step 4", "", ignore)
        else:
            stream.require(12, "step 4", "", ignore)
        recorder.close()
    assert digests[0] == digests[1] != digests[2]


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "streams").write_text("a file")
    with pytest.raises(OutputError, match="the rows of a stream cannot be recorded"):
        record(tmp_path)


def test_a_record_is_one_directory_s(tmp_path: Path) -> None:
    assert folder_of(tmp_path, tmp_path / "a") != folder_of(tmp_path, tmp_path / "b")
