"""Rows that are given as Python objects: kept in a file, which the configuration names."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from tests.helpers.chat_runs import chats, save_model

import taut
from taut.config import from_mapping, to_dict
from taut.data.read.in_memory import as_paths, given_iterable
from taut.data.read.sources import open_source
from taut.data.settings import DataConfig, Source
from taut.errors import ConfigError, DataError
from taut.methods.method import RunConfig

ROWS = [{"text": "one"}, {"text": "two"}]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TAUT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def config_of(rows: Any) -> DataConfig:
    return from_mapping(DataConfig, as_paths(DataConfig, {"train": rows}))


def read(path: Any) -> list[tuple[str, Any]]:
    opened = open_source(Source(path=path))
    return [(opened.place(number), record) for number, record in opened.read_records()]


@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        datasets.Dataset.from_list([{"text": "two"}, {"text": "one"}]).select([1, 0]),
        pd.DataFrame(ROWS),
        pa.Table.from_pylist(ROWS),
        tuple(ROWS),
        pd.Series(ROWS),
        pd.Series(["one", "two"]),
        pd.Series(["one", "two"], name="text"),
        pd.DataFrame(ROWS)["text"],
        np.array(ROWS),
        np.array(["one", "two"]),
        np.array([("one",), ("two",)], dtype=[("text", "U3")]),
        datasets.Dataset.from_list(ROWS)["text"],
    ],
    ids=[
        *(
            "list",
            "dataset",
            "pandas",
            "arrow",
            "tuple",
            "series of dicts",
            "series",
            "named series",
        ),
        *("column", "array of dicts", "array", "structured array", "column of a dataset"),
    ],
)
def test_rows_are_read_as_they_were_given(rows: Any, cache: Path) -> None:
    config = config_of(rows)
    assert read(config.train) == [("rows:1", ROWS[0]), ("rows:2", ROWS[1])]
    json.dumps(to_dict(config))
    assert config_of(rows) == config
    assert len(list((cache / "rows").iterdir())) == 1


def test_a_series_is_the_column_of_its_name() -> None:
    config = config_of(pd.Series(["a"], name="prompt"))
    assert read(config.train) == [("rows:1", {"prompt": "a"})]


def test_numbers_of_numpy_are_numbers() -> None:
    config = config_of(
        [{"label": np.int64(1), "weights": np.array([0.5, 1.0]), "a": [np.float32(2)]}]
    )
    assert read(config.train) == [("rows:1", {"label": 1, "weights": [0.5, 1.0], "a": [2.0]})]


def test_the_type_json_of_a_data_set_is_kept() -> None:
    rows = [{"a": [{"b": 1}, {"c": [None]}]}, {"a": []}]
    features = datasets.Features({"a": datasets.List(datasets.Json())})
    config = config_of(datasets.Dataset.from_list(rows, features=features))
    assert [record for _, record in read(config.train)] == rows


def test_rows_in_a_mixture_and_dotted_keys() -> None:
    mixture = [{"path": ROWS, "weight": 2}, "a.jsonl"]
    first, second = as_paths(DataConfig, {"train": mixture})["train"]
    assert first["weight"] == 2
    assert second == "a.jsonl"
    assert first["path"] == as_paths(taut.Run, {"data.train": ROWS})["data.train"]
    assert as_paths(taut.Run, {"data": {"eval": ROWS}})["data"]["eval"] == first["path"]
    untouched = {"model": "m", "tokens": {"add": ["a"]}, "data": {"columns": {"text": "body"}}}
    assert as_paths(taut.Run, untouched) == untouched


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"text": "a"}, {"n": Decimal(1)}],
            "rows:2 of train: n is a value of type Decimal; expected",
        ),
        ([{"a": [{"b": float("nan")}]}], r"rows:1 of train: a\[0\].b is nan; expected"),
        ([{"a": {1: "b"}}], "rows:1 of train: a has the key 1, of type int; expected text"),
        (datasets.DatasetDict(), "found a DatasetDict for train"),
        (pa.table({"text": pa.array([], pa.string())}), "the table of train has no rows"),
        (pd.DataFrame({"a": [1, "b"]}), "the DataFrame of train cannot be written"),
        (np.zeros((2, 3)), "found an array of 2 dimensions for train; expected rows"),
        (np.array(5), "found an array of 0 dimensions for train; expected rows"),
        ([{"n": np.float32("nan")}], "rows:1 of train: n is nan; expected"),
    ],
)
def test_rows_that_cannot_be_kept(rows: Any, message: str, cache: Path) -> None:
    with pytest.raises(DataError, match=message) as raised:
        config_of(rows)
    assert "\n" not in str(raised.value)
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_an_iterable_is_a_stream_of_training_rows_alone() -> None:
    rows = (row for row in ROWS)
    assert as_paths(RunConfig, {"data": {"train": rows}}) == {"data": {"train": "iterable:"}}
    assert given_iterable() is rows
    with pytest.raises(
        DataError, match=r"found an iterable for data\.eval; expected rows that can be read again"
    ):
        as_paths(RunConfig, {"data": {"eval": rows}})


def test_other_objects_are_refused() -> None:
    with pytest.raises(ConfigError, match="found a value of type object"):
        config_of(object())


def test_rows_that_are_gone_are_told() -> None:
    with pytest.raises(
        DataError, match=r"the rows of rows:abc.jsonl are not in .*; expected the file"
    ):
        read("rows:abc.jsonl")


def test_columns_without_a_meaning_are_told_by_row() -> None:
    config = config_of(datasets.Dataset.from_list([{"color": "red"}]))
    from taut.data.dataset import read_rows

    with pytest.raises(DataError, match=r"^rows:1: "):
        list(read_rows(config, "train"))


def test_a_run_on_given_rows_is_resumed(tmp_path: Path) -> None:
    keys = {"batch.samples_per_step": 6, "check": "off", "stop_check.required": False}
    model = str(save_model(tmp_path / "m"))
    out = str(tmp_path / "out")
    taut.sft(model=model, data={"train": chats(6)}, out=out, steps=1, **keys)
    assert taut.resume(out, steps=2).steps == 2
