"""A source of several shards: the samples of one, whoever tokenized it and however often that was interrupted."""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers.chat_runs import PLAIN, chats, column, save_model, sft, write_rows
from tests.helpers.forked_processes import run
from tests.helpers.tiny_tokenizers import CHATML, tiny_tokenizer

from taut.data import tokenize
from taut.data.dataset import Dataset, load_dataset
from taut.data.read.sources import fraction_of
from taut.data.render import images
from taut.data.render.render import Renderer
from taut.data.settings import DataConfig, Source
from taut.data.store import cache, shards
from taut.data.store.shards import Shard
from taut.errors import DataError, ModelError, OutputError, TautError
from taut.io import limited_call, temporary
from taut.types import Sample
from taut_tools.curate.filter import filter_rows
from taut_tools.curate.settings import Filter

ROWS = 60


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch.setattr)


def small(change: Callable[[object, str, object], object]) -> None:
    change(shards, "SHARD_BYTES", 2500)
    change(images, "BATCH_ROWS", 5)
    change(tokenize, "BATCH_ROWS", 5)


@pytest.fixture
def source(tmp_path: Path) -> str:
    return str(write_rows(tmp_path / "a.jsonl", chats(ROWS)))


def load(
    path: str | list[Source],
    place: Path,
    limit: int = 512,
    template: str | None = None,
    **options: Any,
) -> Dataset:
    config, renderer = DataConfig(train=path, **options), Renderer(tiny_tokenizer(), template)
    renderer = renderer.stopping_at(renderer.template.stop_ids)
    return load_dataset(config, "train", renderer, limit, place)


def told(sample: Sample) -> tuple[Any, ...]:
    return sample.id, sample.ids_T.tolist(), sample.target_at_N.tolist()


def content(place: Path) -> dict[str, bytes]:
    """The files below ``place``."""
    return {
        str(path.relative_to(place)): path.read_bytes()
        for path in sorted(place.rglob("*"))
        if path.is_file()
    }


def shard_names(place: Path) -> list[str]:
    return sorted(path.name for path in place.glob("*/0*"))


# -- many shards are one


def test_many_shards_have_the_samples_of_one(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = load(source, tmp_path / "many")
    monkeypatch.setattr(shards, "SHARD_BYTES", 2**28)
    one = load(source, tmp_path / "one")
    ((part_many,), (part_one,)) = many.parts, one.parts
    assert len(part_one.shards) == 1 and len(part_many.shards) > 4
    assert [told(sample) for sample in many] == [told(sample) for sample in one]
    assert many.fingerprint == one.fingerprint
    assert str(many.report) == str(one.report)
    assert many.lengths == one.lengths
    for of in ("tokens", "targets"):
        assert np.array_equal(np.concatenate([*many.sizes(of)]), np.concatenate([*one.sizes(of)]))
    every = range(len(one))
    assert [*map(many.length, every)] == [*map(one.length, every)]
    assert [*map(many.row, every)] == [*map(one.row, every)] == [range(i, i + 1) for i in every]
    assert many.num_ended == one.num_ended == len(one)
    largest = int(max(sample.ids_T.max() for sample in one))
    assert many.first_id_over(largest) == one.first_id_over(largest) is not None
    assert many.first_id_over(largest + 1) is None
    assert many.row_place(ROWS - 1) == one.row_place(ROWS - 1)
    assert many.forms == one.forms


def test_rows_that_are_compared_stay_together(tmp_path: Path) -> None:
    rows = [
        {"prompt": "the cat", "answers": [" ran", " saw", " is"], "scores": [1, 2, place]}
        for place in range(4, 24)
    ]
    config = DataConfig(train=str(write_rows(tmp_path / "a.jsonl", rows)))
    renderer = Renderer(tiny_tokenizer())
    data = load_dataset(config, "train", renderer, 512, tmp_path / "c", kind="preference")
    (part,) = data.parts
    assert [data.row(index) for index in range(20)] == [range(i, i + 3) for i in range(0, 60, 3)]
    assert [data.row_of(index) for index in range(60)] == [index // 3 for index in range(60)]
    assert len(data) == part.shards.num_samples == 3 * part.shards.num_groups == 60


def test_rows_that_are_left_out_count_wherever_they_are(tmp_path: Path) -> None:
    long, short = {"text": "the " * 40}, {"text": "the cat ran"}
    rows = [*[long] * 12, *[short] * 30, *[long] * 33]
    path = str(write_rows(tmp_path / "a.jsonl", rows))
    data = load(path, tmp_path / "c", limit=20, too_long="drop")
    again = load(path, tmp_path / "c", limit=20, too_long="drop")
    assert data.report.num_rows == again.report.num_rows == len(rows)
    assert [incident.place for incident in again.report.dropped] == [
        f"{path}:{line}" for line in [*range(1, 13), *range(43, 76)]
    ]


# -- interrupted


def interrupted_after(
    number: int, source: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Load, with Ctrl-C after some shards."""

    def in_shards(made: Any, ends: Any) -> Iterator[Shard]:
        for index, shard in enumerate(shards.in_shards(made, ends)):
            if index == number:
                raise KeyboardInterrupt
            yield shard

    with monkeypatch.context() as patch:
        patch.setattr(tokenize, "in_shards", in_shards)
        with pytest.raises(KeyboardInterrupt):
            load(source, place)


def rows_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The places of rows that are read from now on."""
    seen: list[str] = []
    real = tokenize.read_any

    def read(record: Any, place: str, *given: Any) -> Any:
        seen.append(place)
        return real(record, place, *given)

    monkeypatch.setattr(tokenize, "read_any", read)
    return seen


def test_a_source_goes_on_from_its_finished_shards(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, place = tmp_path / "whole", tmp_path / "c"
    load(source, whole)
    interrupted_after(3, source, place, monkeypatch)
    assert shard_names(place) == ["00000", "00001", "00002"]
    finished = sum(json.loads(path.read_text())["num_rows"] for path in place.glob("*/*/meta.json"))
    seen = rows_read(monkeypatch)
    data = load(source, place)
    assert seen == [f"{source}:{number}" for number in range(finished + 1, ROWS + 1)]
    assert data.report.decisions == (
        f"{source}: tokenized (not in the cache; the first {finished} rows by a run that was interrupted)",
    )
    assert content(place) == content(whole)


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from tests.unit.data.test_shards import images, load, shard_names, small, tokenize

small(setattr)
real = np.save

def save(*given):
    if len(shard_names(Path(sys.argv[2]))) >= 2:
        os.kill(os.getpid(), signal.SIGKILL)
    real(*given)

np.save = save
load(sys.argv[1], Path(sys.argv[2]))
"""


@pytest.mark.slow
def test_a_killed_process_leaves_shards_that_the_next_one_takes(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, place = tmp_path / "whole", tmp_path / "c"
    load(source, whole)
    (tmp_path / "program.py").write_text(KILLED)
    assert run(tmp_path / "program.py", source, str(place)).returncode == -signal.SIGKILL
    assert shard_names(place)[:2] == ["00000", "00001"]
    assert list(place.glob("taut-cache-*"))  # the third, half-written
    monkeypatch.setattr(temporary, "_cleared", set())  # as in a new process
    load(source, place)
    assert content(place) == content(whole)


@pytest.mark.parametrize("name", ["ids.npy", "meta.json"])
def test_a_damaged_finished_shard_is_made_again(
    name: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, place = tmp_path / "whole", tmp_path / "c"
    load(source, whole)
    interrupted_after(4, source, place, monkeypatch)
    (damaged,) = place.glob(f"*/00001/{name}")
    raw = bytearray(damaged.read_bytes())
    raw[-3] ^= 1
    damaged.write_bytes(raw)
    load(source, place)
    assert content(place) == content(whole)


def test_a_source_that_is_one_shard_now_takes_nothing_of_a_damaged_start(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, place = tmp_path / "whole", tmp_path / "c"
    interrupted_after(3, source, place, monkeypatch)
    (damaged,) = place.glob("*/00000/ids.npy")
    damaged.unlink()
    monkeypatch.setattr(shards, "SHARD_BYTES", 2**28)
    load(source, whole)
    load(source, place)
    assert content(place) == content(whole)


def test_a_link_in_place_of_finished_shards_is_neither_emptied_nor_written_to(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, place, mine = tmp_path / "whole", tmp_path / "c", tmp_path / "mine"
    load(source, whole)
    interrupted_after(3, source, place, monkeypatch)
    (partial,) = place.iterdir()
    partial.rename(mine)
    before = content(mine)
    partial.symlink_to(mine)
    load(source, place)
    assert content(mine) == before
    (made,) = (path for path in place.iterdir() if path != partial)
    assert content(made) == content(whole / made.name)


def test_two_processes_do_not_write_the_same_shards(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, place = tmp_path / "whole", tmp_path / "c"
    load(source, whole)
    interrupted_after(3, source, place, monkeypatch)
    (partial,) = place.iterdir()
    before = content(partial)
    with (partial / "lock").open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        load(source, place)
        assert content(partial) == before
    (made,) = (path for path in place.iterdir() if path != partial)
    assert content(made) == content(whole / made.name)


def test_an_error_of_the_data_leaves_no_shards(tmp_path: Path) -> None:
    path = str(write_rows(tmp_path / "a.jsonl", [*chats(ROWS), {"messages": []}]))
    with pytest.raises(DataError, match=rf"a\.jsonl:{ROWS + 1}: messages is empty"):
        load(path, tmp_path / "c")
    assert not content(tmp_path / "c")


def test_a_full_disk_keeps_what_is_finished(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, place = tmp_path / "whole", tmp_path / "c"
    load(source, whole)
    real = np.save

    def save(file: Any, array: Any) -> None:
        if len(shard_names(place)) >= 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file, array)

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", save)
        with pytest.raises(OutputError, match=r"No space left on device.*set data\.cache"):
            load(source, place)
    assert not list(place.glob("taut-*"))
    load(source, place)
    assert content(place) == content(whole)


def test_shards_that_nobody_goes_on_from_are_removed(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "c"
    interrupted_after(3, source, place, monkeypatch)
    (old,) = place.iterdir()
    other = str(write_rows(tmp_path / "b.jsonl", chats(ROWS, seed=1)))
    load(other, place)
    assert old.is_dir()
    long_ago = time.time() - cache.KEPT_SECONDS - 60
    os.utime(old, (long_ago, long_ago))
    load(str(write_rows(tmp_path / "d.jsonl", chats(ROWS, seed=2))), place)
    assert not old.exists()


# -- damaged


def test_a_shard_that_is_damaged_is_an_error_when_it_is_opened(source: str, tmp_path: Path) -> None:
    (part,) = load(source, tmp_path / "c").parts
    (damaged,) = (tmp_path / "c").glob("*/00002/ids.npy")
    raw = bytearray(damaged.read_bytes())
    raw[-1] ^= 1
    damaged.write_bytes(raw)
    found, _ = cache.load(tmp_path / "c", part.key)
    assert found is not None and found.num_samples == ROWS
    assert found[1].num_rows
    with pytest.raises(DataError) as raised:
        found.locate(ROWS - 1), found[2]
    message = str(raised.value)
    assert "00002/ids.npy is not as it was written" in message and "\n" not in message
    assert f"remove {damaged.parent.parent} and run again" in message


@pytest.mark.parametrize("how", ["shorter", "gone", "shard gone"])
def test_files_that_are_not_there_are_seen_at_once(how: str, source: str, tmp_path: Path) -> None:
    before = load(source, tmp_path / "c")
    (file,) = (tmp_path / "c").glob("*/00002/ids.npy")
    if how == "shorter":
        os.truncate(file, file.stat().st_size - 1)
    elif how == "gone":
        file.unlink()
    else:
        file.parent.rename(tmp_path / "elsewhere")
    again = load(source, tmp_path / "c")
    assert "tokenized (the cached entry is damaged (" in again.report.decisions[0]
    assert [told(sample) for sample in again] == [told(sample) for sample in before]


# -- processes


def test_processes_write_the_same_bytes_and_raise_the_same_error(
    source: str, tmp_path: Path
) -> None:
    alone = load(source, tmp_path / "alone", workers=1)
    several = load(source, tmp_path / "several", workers=2)
    assert content(tmp_path / "several") == content(tmp_path / "alone")
    assert alone.report.decisions == (f"{source}: tokenized (not in the cache)",)
    assert several.report.decisions == (f"{source}: tokenized (not in the cache; by 2 processes)",)


def test_a_part_of_many_compressed_files_is_the_same_by_processes_and_in_a_filtered_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows, lines, where = chats(ROWS), {}, {}
    for first, name in enumerate(("d/a.jsonl.gz", "d/b.jsonl.gz", "d/c.jsonl.gz")):
        texts = [json.dumps(row, separators=(",", ": ")) for row in rows[first::3]]
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(gzip.compress("\n\n".join(texts).encode()))
        for index, (row, text) in enumerate(zip(rows[first::3], texts, strict=True)):
            lines[f"{name}:{1 + 2 * index}"] = text
            where[f"{name}:{1 + 2 * index}"] = fraction_of(row)
    expected = [place for place, fraction in where.items() if fraction < 0.7][:30]
    assert len(expected) == 30 and expected[-1].startswith("d/c")
    part = Source(path="d/*.jsonl.gz", share=[0, 0.7], limit=30)
    alone, several = (
        load([part], tmp_path / name, workers=workers) for name, workers in (("1", 1), ("2", 2))
    )
    assert content(tmp_path / "2") == content(tmp_path / "1")
    assert len(alone.parts[0].shards) > 2
    assert [told(sample) for sample in several] == [told(sample) for sample in alone]
    assert [sample.id for sample in alone] == expected
    assert [alone.row_place(index) for index in range(30)] == expected
    assert "by 2 processes); share 0 to 0.7 (it left out " in several.report.decisions[0]
    filter_rows(Filter(data=[part], out="out.jsonl", reject="no such text"))
    assert Path("out.jsonl").read_text().splitlines() == [lines[place] for place in expected]


BAD: dict[str, dict[int, str]] = {
    "rows of two blocks": {48: '{"messages": []}', 52: '{"messages": 1}'},
    "rows of one block": {51: '{"messages": 1}', 53: '{"messages": []}'},
    "broken JSON after a bad row": {51: '{"messages": 1}', 53: "{"},
    "broken JSON alone": {53: "{"},
    "broken JSON in a later block": {31: '{"messages": 1}', 53: "{"},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BAD)
def test_the_first_bad_row_is_the_one_that_is_named(kind: str, tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in chats(ROWS)]
    for number, line in BAD[kind].items():
        lines[number - 1] = line
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    messages = []
    for workers in (1, 4):
        with pytest.raises(DataError) as raised:
            load(str(path), tmp_path / "c", workers=workers)
        messages.append((type(raised.value), str(raised.value)))
    assert messages[0] == messages[1]
    assert f"a.jsonl:{min(BAD[kind])}: " in messages[0][1]


def test_a_template_that_takes_all_memory_in_a_worker_is_the_error_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker renders by itself, and the limit ends it; the row is found all the same."""
    rows = chats(ROWS)
    rows[7]["messages"][0]["content"] = "sesame"
    path, lost = write_rows(tmp_path / "a.jsonl", rows), list[int | None]()
    hostile = (
        "{% if messages[0].content == 'sesame' %}{{ messages[0].content * 10**10 }}{% endif %}"
    )

    class Noted(tokenize.Helper):
        def reap(self) -> int | None:
            lost.append(super().reap())
            return lost[-1]

    messages = []
    monkeypatch.setattr(tokenize, "Helper", Noted)
    for workers in (1, 2):
        with pytest.raises(ModelError) as raised:
            load(str(path), tmp_path / "c", template=CHATML + hostile, workers=workers)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
    assert "a.jsonl:8: " in messages[0] and "1,024 MB of memory" in messages[0]
    assert lost == [limited_call.OUT_OF_MEMORY]
    assert not shard_names(tmp_path / "c")


@pytest.mark.slow
def test_a_process_that_is_killed_is_an_error_and_what_is_finished_is_kept(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, place = tmp_path / "whole", tmp_path / "c"
    load(source, whole)
    started: list[Any] = []

    class Noted(tokenize.Helper):
        def start(self, *given: Any, **named: Any) -> None:
            super().start(*given, **named)
            started.append(self)

    def in_shards(made: Any, ends: Any) -> Iterator[Shard]:
        for index, shard in enumerate(shards.in_shards(made, ends)):
            if index == 1:
                for helper in started:
                    helper.kill()
            yield shard

    with monkeypatch.context() as patch:
        patch.setattr(tokenize, "Helper", Noted)
        patch.setattr(tokenize, "DEPTH", 1)
        patch.setattr(tokenize, "in_shards", in_shards)
        with pytest.raises(TautError, match=r"was ended by SIGKILL.*set data\.workers=1"):
            load(source, place, workers=2)
    assert not any(helper.is_alive for helper in started)
    assert shard_names(place)
    load(source, place, workers=2)
    assert content(place) == content(whole)


def test_a_run_on_shards_has_the_losses_of_a_run_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_model(tmp_path / "model")
    train = write_rows(tmp_path / "a.jsonl", chats(24))
    losses = {}
    for size in (2500, 2**28):
        monkeypatch.setattr(shards, "SHARD_BYTES", size)
        place = tmp_path / f"cache-{size}"
        done = sft(model, train, tmp_path / f"out-{size}", steps=2, data__cache=str(place), **PLAIN)
        losses[size] = column(done.out, "loss")
    assert len(shard_names(tmp_path / "cache-2500")) > 1
    assert losses[2500] == losses[2**28]


def test_an_entry_of_an_older_version_is_made_again(source: str, tmp_path: Path) -> None:
    load(source, tmp_path / "c")
    (path,) = (tmp_path / "c").glob("*/manifest.json")
    path.write_text(json.dumps({"shards": json.loads(path.read_text())["shards"]}))
    data = load(source, tmp_path / "c")
    assert "tokenized (the cached entry is of another version)" in data.report.decisions[0]
    assert load(source, tmp_path / "c").report.is_cached


def test_a_limit_in_the_middle_of_an_array_is_one_line(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 2**28)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, limits[1]))
    try:
        with pytest.raises(OutputError, match=r"the disk takes no more .*; set data\.cache"):
            load(source, tmp_path / "c")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "c").glob("*/ids.npy"))
    assert len(load(source, tmp_path / "c")) == ROWS
