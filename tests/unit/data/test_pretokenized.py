"""Data that were tokenized ahead: a run on them is the run on their rows, here and from a store on the loopback."""

from __future__ import annotations

import errno
import hashlib
import re
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from tests.helpers.chat_runs import (
    PLAIN,
    QUIET,
    chats,
    column,
    events,
    save_model,
    sft,
    weights,
    words_of,
    write_rows,
)
from tests.helpers.forked_processes import run

from taut.commands.tokenize import main
from taut.config import from_mapping
from taut.data import tokenize
from taut.data.dataset import Dataset
from taut.data.render import images
from taut.data.settings import Split
from taut.data.store import cache, remote_shards
from taut.data.store import shards as shards_module
from taut.errors import DataError, OutputError, TautError
from taut.io import files, hub, remote
from taut.methods.sft import Sft
from taut.run.inputs import load_language, load_stops

STEPS = 12


def set_small_sizes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shards_module, "SHARD_BYTES", 2500)
    patch.setattr(images, "BATCH_ROWS", 5)
    patch.setattr(tokenize, "BATCH_ROWS", 5)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_small_sizes(monkeypatch)
    monkeypatch.setattr(remote, "PAUSE", 0.01)
    monkeypatch.setattr(hub, "_asked", None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("TAUT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "a.jsonl", chats(60))


def make(model: Path, train: Path | str, out: Path) -> Path:
    main(None, [f"model={model}", f"data.train={train}", "data.max_length=200", f"out={out}"])
    return out


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        set_small_sizes(patch)
        patch.setenv("TAUT_CACHE", str(place / "cache"))
        rows = write_rows(place / "a.jsonl", chats(60))
        return make(save_model(place / "model"), rows, place / "shards")


@pytest.fixture
def shards(made: Path, tmp_path: Path) -> Path:
    """The shards of such rows, tokenized for such a model, as a copy of the test's own."""
    return shutil.copytree(made, tmp_path / "shards")


def load(model: Path, train: Any, split: Split = "train", **keys: Any) -> Dataset:
    mapping = {"model": str(model), "data.train": train, "data.max_length": 200, **keys}
    config = from_mapping(Sft, mapping)
    language = load_language(config)
    renderer = language.renderer.stopping_at(load_stops(config, language).ids)
    return config.load_data(split, renderer, language)


def fault(model: Path, train: Any, split: Split = "train", **keys: Any) -> str:
    with pytest.raises(TautError) as caught:
        list(load(model, train, split, **keys))
    assert "\n" not in str(caught.value)
    return str(caught.value)


class Store(ThreadingHTTPServer):
    """Serves the files of a folder, slowly if asked to, and says what was asked of it."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        self.folder, self.pause, self.breaks = folder, 0.0, 0
        self.asked: list[str] = []
        self.sent = 0
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/data"

    @property
    def shards_asked(self) -> set[str]:
        return {path.split("/")[-2] for path in self.asked if path.endswith("/ids.npy")}


class Handler(BaseHTTPRequestHandler):
    server: Store

    def do_GET(self) -> None:
        path = self.server.folder / self.path.removeprefix("/data/")
        if not path.is_file():
            self.send_error(404)
            return
        content, status, start = path.read_bytes(), 200, 0
        size = len(content)
        if match := re.match(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start, status = int(match[1]), 206
        self.send_response(status)
        self.send_header("ETag", hashlib.md5(content).hexdigest())
        self.send_header("Content-Length", str(size - start))
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        self.end_headers()
        self.server.asked.append(self.path)
        body = content[start:]
        if self.server.breaks and path.suffix == ".npy":
            self.server.breaks -= 1
            body = body[: len(body) // 2]
        time.sleep(self.server.pause if path.suffix == ".npy" else 0)
        with suppress(OSError):
            self.wfile.write(body)
            self.server.sent += len(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def store(shards: Path) -> Iterator[Store]:
    with Store(shards) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


# -- here


def test_a_run_on_shards_is_the_run_on_their_rows(model: Path, rows: Path, tmp_path: Path) -> None:
    shards = make(model, rows, tmp_path / "shards")
    sft(model, rows, tmp_path / "rows", steps=STEPS, **PLAIN)
    sft(model, shards, tmp_path / "ahead", steps=STEPS, **PLAIN)
    assert column(tmp_path / "rows", "loss") == column(tmp_path / "ahead", "loss")
    assert column(tmp_path / "rows", "sample_ids") == column(tmp_path / "ahead", "sample_ids")
    of_rows, of_shards = (weights(tmp_path / name / "model") for name in ("rows", "ahead"))
    assert all((of_rows[name] == of_shards[name]).all() for name in of_rows)


def test_a_copy_needs_neither_rows_nor_cache(model: Path, rows: Path, tmp_path: Path) -> None:
    shards = make(model, rows, tmp_path / "shards")
    expected = load(model, str(rows))
    whole = [(sample.id, sample.ids_T.tolist()) for sample in expected]
    shards.rename(tmp_path / "elsewhere")
    rows.unlink()
    shutil.rmtree(tmp_path / "cache")
    data = load(model, str(tmp_path / "elsewhere"))
    assert [(sample.id, sample.ids_T.tolist()) for sample in data] == whole
    assert data.num_ended == expected.num_ended == 60
    assert len(data.parts[0].shards) > 4
    assert data.report.decisions[0].startswith(f"{rows}: tokenized ahead, in {tmp_path}/elsewhere")


def test_a_mixture_and_held_out_rows(model: Path, rows: Path, tmp_path: Path) -> None:
    other = write_rows(tmp_path / "b.jsonl", [{"body": "the cat ran"}, {"body": "a dog saw"}] * 5)
    held = write_rows(tmp_path / "c.jsonl", chats(7, seed=3))
    mixture = [str(rows), {"path": str(other), "weight": 0.5, "columns": {"text": "body"}}]
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        f'model = "{model}"\nout = "{tmp_path}/run"\n[data]\nmax_length = 200\neval = "{held}"\n'
        f'train = ["{rows}", {{path = "{other}", weight = 0.5, columns = {{text = "body"}}}}]\n'
    )
    main(run_file, [f"out={tmp_path / 'both'}"])
    assert not (tmp_path / "run").exists()
    there = str(tmp_path / "both")
    splits: list[Split] = ["train", "eval"]
    for split in splits:
        expected = load(model, mixture, split, **{"data.eval": str(held)})
        data = load(model, there, split, **{"data.eval": there})
        assert [part.weight for part in data.parts] == [part.weight for part in expected.parts]
        assert [s.id for s in data] == [s.id for s in expected]
        assert [s.ids_T.tolist() for s in data] == [s.ids_T.tolist() for s in expected]
        assert data.fingerprint == expected.fingerprint


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"data.max_length": 100}, "was tokenized with data.max_length 200, and this run has 100"),
        ({"data.targets": "last"}, "with data.targets assistant, and this run has last"),
        ({"data.system": "Be brief."}, "data.system None, and this run has Be brief."),
        ({"data.template": "T"}, "with chat template"),
        ({"tokens.add": ["<x>"]}, "with tokenizer"),
    ],
)
def test_a_run_with_other_settings_is_refused(
    model: Path, shards: Path, tmp_path: Path, keys: dict[str, Any], words: str
) -> None:
    if "data.template" in keys:
        file = tmp_path / "template.jinja"
        file.write_text(
            "{% for m in messages %}<|im_start|>{{ m.role }}\n\n{{ m.content }}<|im_end|>\n{% endfor %}"
        )
        keys = {"data.template": str(file)}
    assert words in fault(model, str(shards), **keys)


def test_a_source_takes_a_weight_only(model: Path, shards: Path) -> None:
    assert load(model, [{"path": str(shards), "weight": 2}]).parts[0].weight == 2
    assert "limit is set for" in fault(model, [{"path": str(shards), "limit": 3}])
    there = {"data.eval": str(shards)}
    assert "was tokenized without data.eval" in fault(model, str(shards), "eval", **there)


def test_a_directory_is_made_once(model: Path, rows: Path, shards: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="was tokenized before"):
        make(model, rows, shards)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    with pytest.raises(OutputError, match=r"has mine\.txt; expected a new directory"):
        make(model, rows, tmp_path / "full")
    with pytest.raises(DataError, match="was tokenized before; expected rows"):
        make(model, shards, tmp_path / "again")


def test_a_shard_that_changed_is_told(model: Path, shards: Path) -> None:
    path = next(shards.glob("*/00002/ids.npy"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    assert "ids.npy is not as it was written" in fault(model, str(shards))
    path.write_bytes(content[:-4])
    assert "ids.npy has" in fault(model, str(shards))
    path.unlink()
    assert "No such file" in fault(model, str(shards))
    (shards / "taut-shards.json").write_text("{")
    assert "taut-shards.json cannot be read" in fault(model, str(shards))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"ids": ', '"../../ids": '),
        ('"name": "', '"name": "../'),
        ('"key": "', '"key": "../'),
        ('"settings": {', '"settings": [], "old": {'),
        ('"format": 1,', '"format": 2,'),
    ],
)
def test_a_table_of_contents_that_is_not_ours_is_refused(
    model: Path, shards: Path, store: Store, tmp_path: Path, old: str, new: str
) -> None:
    path = shards / "taut-shards.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    for train in (str(shards), store.url):
        assert "taut-shards.json " in fault(model, train)
    assert not list(tmp_path.glob("cache/shards")) and not store.shards_asked


# -- at an address


def test_a_run_from_a_store_is_the_local_run(
    model: Path, shards: Path, store: Store, tmp_path: Path
) -> None:
    sft(model, shards, tmp_path / "here", steps=STEPS, **PLAIN)
    store.pause = 0.01
    sft(model, store.url, tmp_path / "there", steps=STEPS, **PLAIN)
    assert column(tmp_path / "here", "loss") == column(tmp_path / "there", "loss")
    here, there = (weights(tmp_path / name / "model") for name in ("here", "there"))
    assert all((here[name] == there[name]).all() for name in here)


def test_only_what_steps_read_is_fetched(model: Path, store: Store, tmp_path: Path) -> None:
    data = load(model, store.url)
    num_shards = len(data.parts[0].shards)
    assert not store.shards_asked and num_shards > 4
    assert data.num_ended == 60 and data.first_id_over(10**6) is None and data.lengths.longest > 5
    data[0]
    assert store.shards_asked == {"00000"}
    (fetched,) = data.fetchers
    assert (fetched.num_fetched, fetched.num_bytes) == (
        1,
        sum(data.parts[0].remote.shards[0].sizes.values()),
    )  # type: ignore[union-attr]
    data[1], data[0]
    assert len([path for path in store.asked if path.endswith("00000/ids.npy")]) == 1


def test_what_steps_will_read_is_fetched_ahead(model: Path, store: Store) -> None:
    data = load(model, store.url)
    last = len(data) - 1
    data.expect([[0], [last]], rows=False)
    wait_until(lambda: len(store.shards_asked) == 2)
    (fetched,) = data.fetchers
    wait_until(lambda: fetched.num_fetched == 2)
    waited = fetched.waited
    data[last]
    assert fetched.waited == waited


def test_a_closed_shard_that_another_process_removed_is_fetched_again(
    model: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "MOST_OPEN_FILES", 1)
    data = load(model, store.url)
    (fetcher,), last = data.fetchers, len(data) - 1
    before = data[0].ids_T.tolist()
    (folder,) = (path for path in fetcher.folder.iterdir() if path.is_dir())
    data[last], data[0], data[last]  # each closes the other
    assert fetcher.num_fetched == 2
    shutil.rmtree(folder)
    assert data[0].ids_T.tolist() == before
    assert fetcher.num_fetched == 3
    # where it is closed and cannot be opened, it stays where it is
    data[last]
    with monkeypatch.context() as patch:
        patch.setattr(files, "open_regular", no_room)
        with pytest.raises(TautError, match="the data are sound"):
            data[0]
    assert data[0].ids_T.tolist() == before and fetcher.num_fetched == 3


def no_room(path: Path) -> None:
    raise OSError(errno.EMFILE, "Too many open files", str(path))


def wait_until(is_so: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < 60
        time.sleep(0.01)


def test_what_is_needed_last_goes_first(model: Path, store: Store, tmp_path: Path) -> None:
    """Room for two shards; the steps read shards 0, 1, 2, 0, 1, 2. For 2 goes 1, since 0 is used
    sooner; for the second 1 goes 0, which is not used again. So four are fetched.
    """
    everything = load(model, store.url).parts[0].remote
    assert everything is not None
    sizes = [shard.num_bytes for shard in everything.shards]
    room = remote_shards.ShardFetcher(tmp_path / "room", sum(sorted(sizes)[-2:]))
    names = {shard.name: number for number, shard in enumerate(everything.shards)}
    there = []
    steps = [0, 1, 2, 0, 1, 2]
    for at, number in enumerate(steps):
        room._upcoming = tuple(everything.shards[number] for number in dict.fromkeys(steps[at:]))
        room.open(everything.shards[number])
        kept = [path for path in (tmp_path / "room").iterdir() if path.is_dir()]
        there.append(sorted(names[path.name] for path in kept))
    assert there == [[0], [0, 1], [0, 2], [0, 2], [1, 2], [1, 2]]
    assert room.num_fetched == 4
    assert sum(f.stat().st_size for f in (tmp_path / "room").rglob("*.npy")) <= room.limit  # type: ignore[operator]


def test_a_run_with_little_room_is_the_local_run(
    model: Path, shards: Path, store: Store, tmp_path: Path
) -> None:
    largest = max(
        sum(f.stat().st_size for f in folder.glob("*.npy")) for folder in shards.glob("*/0*")
    )
    keys = {"steps": STEPS, "batch__shuffle": False, **PLAIN}
    sft(model, shards, tmp_path / "here", **keys)
    sft(model, store.url, tmp_path / "there", data__fetched_gb=2 * largest / 1e9, **keys)
    assert column(tmp_path / "here", "loss") == column(tmp_path / "there", "loss")
    folders = [path for path in (tmp_path / "cache" / "shards").iterdir() if path.is_dir()]
    assert len(folders) <= 2 < len(store.shards_asked)
    (said,) = load(model, store.url, **{"data.fetched_gb": 2 * largest / 1e9}).report.decisions
    assert said.endswith("GB are kept") and f"in {store.url}" in said
    message = fault(model, store.url, **{"data.fetched_gb": largest / 2e9})
    assert "the largest shard has" in message and "raise it" in message


def test_a_transfer_that_breaks_goes_on(model: Path, shards: Path, store: Store) -> None:
    store.breaks = 3
    data, expected = load(model, store.url), load(model, str(shards))
    assert data[0].ids_T.tolist() == expected[0].ids_T.tolist()
    assert store.breaks == 0
    store.breaks = 10**6
    with pytest.raises(DataError, match=r"broke off at byte .*; run again") as caught:
        data[len(data) - 1]
    assert "\n" not in str(caught.value)
    store.breaks = 0
    assert data[len(data) - 1].ids_T.tolist() == expected[len(data) - 1].ids_T.tolist()


def test_a_shard_that_is_another_is_not_believed(model: Path, shards: Path, store: Store) -> None:
    data = load(model, store.url)
    path = next(shards.glob("*/00000/ids.npy"))
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match=r"is not the shard that was written .*ids\.npy"):
        data[0]
    assert not list(shards.parent.glob("cache/shards/*/ids.npy"))
    path.write_bytes(content)
    data[0]


def test_a_kept_shard_that_the_disk_changed_is_fetched_again(
    model: Path, shards: Path, store: Store, tmp_path: Path
) -> None:
    first = load(model, store.url)[0].ids_T.tolist()
    (path,) = tmp_path.glob("cache/shards/*/ids.npy")
    path.write_bytes(path.read_bytes()[:-4] + b"xxxx")
    remote_shards.shard_fetcher.cache_clear()
    assert load(model, store.url)[0].ids_T.tolist() == first


def test_a_full_disk_is_one_line(model: Path, store: Store, tmp_path: Path) -> None:
    data, limits = load(model, store.url), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    try:
        with pytest.raises(
            OutputError, match="cannot be written there: File too large; expected a"
        ):
            data[0]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.glob("cache/shards/*/ids.npy"))
    data[0]


def test_offline_what_was_fetched_is_used(
    model: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(model, store.url)[0].ids_T.tolist()
    num_asked = len(store.asked)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    remote_shards.shard_fetcher.cache_clear()
    data = load(model, store.url)
    assert data[0].ids_T.tolist() == first
    with pytest.raises(DataError, match="was not fetched before, and HF_HUB_OFFLINE is set"):
        data[len(data) - 1]
    assert len(store.asked) == num_asked


ONLINE = """
import sys
from huggingface_hub import constants
from taut import cli
constants.HF_HUB_OFFLINE = False
sys.exit(cli.main(sys.argv[1:]))
"""
KILLED = """
import os, signal
from taut.io import remote
copy, number = remote.copy, [0]
def killed(url, place, size):
    number[0] += 1
    if number[0] == 16:
        place.with_name(".half.partial").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    copy(url, place, size)
remote.copy = killed
"""


def test_two_ranks_fetch_each_shard_once_and_are_one(
    model: Path, store: Store, tmp_path: Path
) -> None:
    keys = {**QUIET, "model": model, "data.train": store.url, "steps": 4, "check": "off"}
    keys["contract.prompts"] = 0
    program = tmp_path / "program.py"
    program.write_text(ONLINE)
    for name, num_ranks in (("one", 1), ("two", 2)):
        store.asked.clear()
        words = words_of({**keys, "out": tmp_path / name})
        cache = str(tmp_path / f"cache-{name}")
        done = run(program, "sft", *words, num_ranks=num_ranks, TAUT_CACHE=cache)
        assert done.returncode == 0, done.stderr
        arrays = [path for path in store.asked if path.endswith(".npy")]
        assert len(arrays) == len(set(arrays)) > 4
        (end,) = events(tmp_path / name, "end")
        if num_ranks == 1:
            assert end["fetched"][0]["shards"] == len(store.shards_asked)
            assert end["fetched"][0]["bytes"] == sum(
                (store.folder / path.removeprefix("/data/")).stat().st_size for path in arrays
            )
    one, two = (column(tmp_path / name, "loss") for name in ("one", "two"))
    assert one == pytest.approx(two, rel=1e-12)


def test_a_run_that_was_killed_while_it_fetched_goes_on(
    model: Path, shards: Path, store: Store, tmp_path: Path
) -> None:
    folders = shards.glob("*/0*")
    largest = max(sum(f.stat().st_size for f in folder.glob("*.npy")) for folder in folders)
    (tmp_path / "killed.py").write_text(KILLED + ONLINE)
    (tmp_path / "program.py").write_text(ONLINE)
    keys = {**QUIET, "model": model, "steps": 9, "check": "off", "contract.prompts": 0}
    keys |= {"batch.shuffle": False, "checkpoint.every": 1, "data.fetched_gb": 2 * largest / 1e9}
    here = words_of({**keys, "data.train": shards, "out": tmp_path / "here"})
    there = words_of({**keys, "data.train": store.url, "out": tmp_path / "there"})
    assert run(tmp_path / "killed.py", "sft", *there).returncode == -signal.SIGKILL
    assert list(tmp_path.glob("cache/shards/*.partial/.half.partial"))
    for words in (here, [*there, "resume=true"]):
        done = run(tmp_path / "program.py", "sft", *words)
        assert done.returncode == 0, done.stderr
    assert 1 <= len(column(tmp_path / "there", "loss")) == 9
    assert column(tmp_path / "here", "loss") == column(tmp_path / "there", "loss")
    one, other = (weights(tmp_path / name / "model") for name in ("here", "there"))
    assert all((one[name] == other[name]).all() for name in one)
    assert not list(tmp_path.glob("cache/shards/*.partial"))
