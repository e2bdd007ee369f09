"""A teacher's file is the data set's own, line by line, or refused at the first that is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers.chat_runs import chats, write_rows
from tests.helpers.tiny_tokenizers import CHATML, tiny_tokenizer

from taut.data.dataset import Dataset, load_dataset
from taut.data.packing import pack
from taut.data.render.render import Renderer
from taut.data.settings import DataConfig
from taut.data.store.top_logprobs import Top, WithTeacher, line_of, read_top_logprobs
from taut.errors import DataError
from taut.types import TOP_IDS, TOP_LOGP

ROWS, K = 300, 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    place = tmp_path_factory.mktemp("data")
    path = write_rows(place / "train.jsonl", chats(5))
    renderer = Renderer(tiny_tokenizer(), CHATML)
    return load_dataset(DataConfig(train=str(path)), "train", renderer, 500, place / "cache")


def tops(data: Dataset) -> list[Top]:
    draw = np.random.default_rng(0)
    found = []
    for sample in data:
        ids = np.stack([draw.permutation(ROWS)[:K] for _ in range(sample.num_targets)])
        found.append(Top(ids, np.log(draw.dirichlet(np.ones(K + 1), len(ids))[:, :K])))
    return found


def write(path: Path, data: Dataset) -> Path:
    path.write_text("".join(line_of(*it) for it in zip(data, tops(data), strict=True)))
    return path


def test_what_is_written_is_what_the_samples_have(data: Dataset, tmp_path: Path) -> None:
    said = read_top_logprobs(write(tmp_path / "top.jsonl", data), data, ROWS)
    taught = WithTeacher(data, said)
    assert (said.num, len(taught)) == (K, len(data))
    assert [*map(list, taught.sizes("tokens"))] == [*map(list, data.sizes("tokens"))]
    for plain, sample, top in zip(data, taught[:], tops(data), strict=True):
        assert sample.ids_T.tolist() == plain.ids_T.tolist()
        assert sample.streams[TOP_IDS].tolist() == top.ids_Nk.tolist()
        np.testing.assert_allclose(sample.streams[TOP_LOGP], top.logp_Nk, rtol=1e-6, atol=1e-6)
    packed = pack(taught[-2:])
    assert packed.streams[TOP_IDS].shape == (packed.num_targets, K)


def changed(place: str, act: Callable[[dict[str, Any]], object]) -> Any:
    return pytest.param(act, place, id=place)


def set_to(key: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda row: row.__setitem__(key, value)


@pytest.mark.parametrize(
    ("act", "says"),
    [
        changed("ids is not", lambda row: row["ids"].pop()),
        changed("ids[3] is", lambda row: row["ids"].__setitem__(3, 299)),
        changed("targets[0] is", lambda row: row["targets"].__setitem__(0, 1)),
        changed("top_ids is not", lambda row: row["top_ids"].pop()),
        changed("top_ids is not", lambda row: row["top_ids"][0].pop()),
        changed("whole numbers", lambda row: row["top_ids"][0].__setitem__(0, 1.5)),
        changed("the model has 300 rows", lambda row: row["top_ids"][0].__setitem__(0, 300)),
        changed("top_ids has -1", lambda row: row["top_ids"][0].__setitem__(0, -1)),
        changed("twice", lambda row: row["top_ids"][0].__setitem__(0, row["top_ids"][0][1])),
        changed("sum to", lambda row: row["top_logprobs"][0].__setitem__(0, 0.5)),
        changed("top_logprobs is not", set_to("top_logprobs", "none")),
        changed("expected ids, targets", lambda row: row.pop("targets")),
        changed("expected ids, targets", set_to("model", "x")),
    ],
)
def test_a_line_that_is_not_the_samples_is_named(
    act: Callable[[dict[str, Any]], object], says: str, data: Dataset, tmp_path: Path
) -> None:
    path = write(tmp_path / "top.jsonl", data)
    lines = path.read_text().splitlines()
    row = json.loads(lines[2])
    act(row)
    path.write_text("\n".join([*lines[:2], json.dumps(row), *lines[3:]]) + "\n")
    with pytest.raises(DataError) as caught:
        read_top_logprobs(path, data, ROWS)
    assert f"{path}:3" in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text[: text.index("\n", 9) + 1], "has fewer lines"),
        (lambda text: text + text, "has more lines"),
        (lambda text: text.replace("[", "NaN", 1), "is no JSON"),
        (lambda text: text.replace("]]", ",7]]", 1), "top_ids is not"),
    ],
)
def test_a_file_of_another_data_set_is_refused(
    change: Callable[[str], str], says: str, data: Dataset, tmp_path: Path
) -> None:
    path = write(tmp_path / "top.jsonl", data)
    path.write_text(change(path.read_text()))
    with pytest.raises(DataError, match=says):
        read_top_logprobs(path, data, ROWS)


def test_a_file_that_is_not_there(data: Dataset, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_top_logprobs(tmp_path / "none.jsonl", data, ROWS)


def test_lists_of_another_length_are_refused(data: Dataset, tmp_path: Path) -> None:
    path = write(tmp_path / "top.jsonl", data)
    lines = path.read_text().splitlines()
    row = json.loads(lines[1])
    row["top_ids"] = [ids[:2] for ids in row["top_ids"]]
    row["top_logprobs"] = [logp[:2] for logp in row["top_logprobs"]]
    path.write_text("\n".join([lines[0], json.dumps(row), *lines[2:]]) + "\n")
    with pytest.raises(DataError, match="2: has 2 tokens a target, and line 1 has 3"):
        read_top_logprobs(path, data, ROWS)
