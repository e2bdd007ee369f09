"""A data set with pictures: from the cache as it was, wherever it lies, and without rows whose pictures are bad."""

from __future__ import annotations

import os
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.helpers.chat_runs import write_rows
from tests.helpers.counted_pictures import picture, renderer

from taut.config import from_mapping
from taut.data.dataset import Dataset, load_dataset
from taut.data.render import images
from taut.data.render.render import Renderer
from taut.data.settings import DataConfig
from taut.data.store.shards import media_arrays
from taut.errors import DataError, PictureError
from taut.types import Sample


def rows(*names: str | None) -> list[dict[str, Any]]:
    """A question about each picture, by its file beside the data; None: about nothing."""
    made = []
    for name in names:
        asked: list[dict[str, str]] = [{"type": "text", "text": "cat"}]
        if name is not None:
            asked.insert(0, {"type": "image", "image": name})
        answer = {"role": "assistant", "content": "dog"}
        made.append({"messages": [{"role": "user", "content": asked}, answer]})
    return made


def load(directory: Path, bad: str = "error", **keys: Any) -> Dataset:
    data = {"train": str(directory / "rows.jsonl"), "images": {"bad": bad}, **keys}
    config = from_mapping(DataConfig, data)
    using = renderer(directory, bad=bad)
    return load_dataset(config, "train", using, 100, cache_dir=directory.parent / "cache")


def written(directory: Path, *names: str | None) -> Path:
    directory.mkdir()
    write_rows(directory / "rows.jsonl", rows(*names))
    return directory


def test_pictures_come_back_from_the_cache(tmp_path: Path) -> None:
    place = written(tmp_path / "a", "one.png", None, "two.png", "one.png")
    picture(place, "one", 4, 6)
    picture(place, "two", 6, 2)
    fresh, again = load(place), load(place)
    assert (fresh.report.is_cached, again.report.is_cached) == (False, True)
    assert fresh.report.num_pictures == again.report.num_pictures == 2
    for before, after in zip(fresh, again, strict=True):
        for name in fields(Sample):
            np.testing.assert_equal(getattr(after, name.name), getattr(before, name.name))
    one, text, two, other = again
    assert [len(sample.media) for sample in again] == [1, 0, 1, 1]
    assert one.media == other.media
    assert one.media[0].grid == (1, 3, 2)
    assert two.media[0].picture.source == str(place / "two.png")
    assert text.media == ()


def test_one_place_is_not_another(tmp_path: Path) -> None:
    """The same rows beside other pictures are other data; beside the same ones they are the same, elsewhere."""
    place = written(tmp_path / "a", "one.png")
    picture(place, "one")
    shutil.copytree(place, tmp_path / "moved")
    shutil.copytree(place, tmp_path / "other")
    picture(tmp_path / "other", "one", color=9)
    found = {name: load(tmp_path / name) for name in ("a", "moved", "other")}
    (own,), (moved,), (other,) = found.values()
    assert own.media[0].picture.digest == moved.media[0].picture.digest
    assert own.media[0].picture.digest != other.media[0].picture.digest
    digests = [data.parts[0].shards.digest for data in found.values()]
    assert digests[0] == digests[1] != digests[2]
    assert moved.media[0].picture.source == str(tmp_path / "moved" / "one.png")


def test_a_picture_here_is_not_one_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not beside the data is looked for in the working directory."""
    place = written(tmp_path / "a", "one.png")
    found = []
    for name, color in (("here", 1), ("elsewhere", 9), ("again", 1)):
        (tmp_path / name).mkdir()
        picture(tmp_path / name, "one", color=color)
        monkeypatch.chdir(tmp_path / name)
        found.append(load(place))
    sources = [data[0].media[0].picture.source for data in found]
    assert sources == [str(tmp_path / name / "one.png") for name in ("here", "elsewhere", "again")]
    assert found[0].fingerprint == found[2].fingerprint != found[1].fingerprint


def test_rows_with_bad_pictures_are_left_out_until_they_are_good(tmp_path: Path) -> None:
    place = written(tmp_path / "a", "one.png", "gone.png", "torn.png", None)
    picture(place, "one")
    (place / "torn.png").write_bytes((place / "one.png").read_bytes()[:40])
    with pytest.raises(PictureError, match=r"rows\.jsonl:2: .*gone\.png.*data\.images\.bad=drop"):
        load(place)
    few = load(place, "drop")
    assert [sample.id.rpartition(":")[2] for sample in few] == ["1", "4"]
    told = [(it.place.rpartition(":")[2], it.reason) for it in few.report.dropped]
    assert [line for line, _ in told] == ["2", "3"]
    assert "gone.png" in told[0][1] and "torn.png" in told[1][1]
    assert "rows.jsonl" not in told[0][1]
    assert load(place, "drop").parts[0].identity == few.parts[0].identity
    picture(place, "gone")
    more = load(place, "drop")
    assert [sample.id.rpartition(":")[2] for sample in more] == ["1", "2", "4"]
    assert more.parts[0].identity != few.parts[0].identity


def test_nothing_left_names_the_pictures(tmp_path: Path) -> None:
    place = written(tmp_path / "a", "gone.png")
    with pytest.raises(DataError, match=r"none of its 1 row .*gone\.png.*data\.images\.folder"):
        load(place, "drop")


def test_without_pictures_there_are_no_arrays() -> None:
    assert media_arrays([(), ()]) == {}


def test_a_picture_that_changed_is_read_anew(tmp_path: Path) -> None:
    """Not one that was only touched: it is looked at again and is the same."""
    place = written(tmp_path / "a", "one.png", None)
    path = Path(picture(place, "one")["image"].value)
    before = load(place)
    os.utime(path, ns=(0, 1))
    touched = load(place)
    assert not touched.report.is_cached
    assert touched.parts[0].identity == before.parts[0].identity
    picture(place, "one", 6, 6)
    assert "one.png has changed" in load(place).report.decisions[0]
    changed = load(place)
    assert changed[0].media[0].grid == (1, 3, 3)
    assert changed.fingerprint != before.fingerprint
    path.unlink()
    with pytest.raises(PictureError, match=r"rows\.jsonl:1: .*there is no file"):
        load(place)


def animated(path: Path, *greys: int) -> None:
    frames = [Image.new("RGB", (4, 4), (grey,) * 3) for grey in greys]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=500)


def test_a_video_that_changed_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its frames lie in the cache, where nothing changes. They are large: rows are not kept until there are many."""
    place = written(tmp_path / "a", None)
    film = {"type": "video", "video": "film.gif"}
    asked = [{"role": "user", "content": [film]}, {"role": "assistant", "content": "dog"}]
    write_rows(place / "rows.jsonl", [{"messages": asked}, *rows(None), {"messages": asked}])
    monkeypatch.setattr(images, "BATCH_BYTES", 1)
    sizes = []
    look = Renderer.look

    def counted(self: Renderer, seen: Any) -> None:
        some = list(seen)
        sizes.append(len(some))
        look(self, some)

    monkeypatch.setattr(Renderer, "look", counted)
    animated(place / "film.gif", 10, 20)
    before = load(place)
    assert sizes == [1, 2] and [len(one.media) for one in before] == [2, 0, 2]
    assert load(place).report.is_cached
    animated(place / "film.gif", 30, 40)
    after = load(place)
    assert "film.gif has changed" in after.report.decisions[0]
    assert before[0].media[0].picture.digest != after[0].media[0].picture.digest
    assert before.parts[0].shards.digest != after.parts[0].shards.digest
