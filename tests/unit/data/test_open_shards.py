"""A source of more shards than a process may have open files; and what is said where it can open no other."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.helpers.forked_processes import run

from taut.data.batching import Rows
from taut.data.store import cache
from taut.data.store.shards import Shard, Shards
from taut.errors import DataError, TautError
from taut.io import files
from taut.types import Sample

KEY, PER_SHARD = "a" * 64, 3
FILES = 6
"""Of a shard."""
PROGRAM = """
import json, os, resource, sys
from pathlib import Path

import numpy as np

from taut.data.store import cache
from taut.io import files

place, key, limit = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
verified, digest = [], files.digest
files.digest = lambda path: verified.append(path) or digest(path)
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def num_open():
    links = [os.readlink(entry.path) if entry.is_symlink() else "" for entry in os.scandir("/proc/self/fd")]
    return sum(link.startswith(str(place)) for link in links)


shards, why = cache.load(place, key)
assert shards is not None, why
samples, most = {}, 0
for index in np.random.default_rng(0).permutation(np.tile(np.arange(shards.num_samples), 2)).tolist():
    shard, inside = shards.locate(index)
    ids = shard.sample(inside, str(index)).ids_T.tolist()
    assert samples.setdefault(index, ids) == ids
    most = max(most, num_open())
print(json.dumps([[samples[index] for index in sorted(samples)], most, len(verified)]))
"""


def made(number: int) -> Shard:
    """A shard of samples of 4 tokens, which no other has."""
    first = number * PER_SHARD
    ids = np.arange(4 * first, 4 * (first + PER_SHARD), dtype=np.int32)
    arrays: dict[str, NDArray[Any]] = {
        "ids": ids,
        "offsets": np.arange(PER_SHARD + 1) * 4,
        "target_at": np.full(PER_SHARD, 3, np.int32),
        "target_offsets": np.arange(PER_SHARD + 1),
        "line": np.arange(first, first + PER_SHARD),
        "part": np.zeros(PER_SHARD, np.int32),
    }
    return Shard(arrays, PER_SHARD, ())


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write(tmp_path / "cache", 4)
    return tmp_path / "cache"


def write(place: Path, count: int) -> None:
    assert cache.save(place, KEY, lambda _: map(made, range(count))) == 0


def opened(place: Path) -> Shards:
    found, why = cache.load(place, KEY)
    assert found is not None, why
    return found


def test_any_number_of_shards_in_64_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, limit = 100, 128
    assert count * FILES > 4 * limit
    monkeypatch.setattr(os, "fsync", lambda _: None)  # 600 files
    write(tmp_path / "cache", count)
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run(tmp_path / "program.py", tmp_path / "cache", KEY, str(limit))
    assert done.returncode == 0, done.stderr
    samples, most, num_verified = json.loads(done.stdout)
    assert samples == np.arange(4 * PER_SHARD * count).reshape(-1, 4).tolist()
    assert most == cache.MOST_OPEN_FILES // FILES * FILES
    assert num_verified == count * FILES, "each file once"


def test_a_shard_that_changed_while_it_was_closed_is_verified_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "MOST_OPEN_FILES", FILES)
    shards = opened(place)
    before, path = shards[0], place / KEY / "00000" / "ids.npy"
    assert shards[0] is before
    shards[1]
    content = path.read_bytes()
    files.write_bytes(path, content)  # the same bytes, in another file
    again = shards[0]
    assert again is not before and np.array_equal(again.arrays["ids"], before.arrays["ids"])
    shards[1]
    files.write_bytes(path, content[:-1] + b"x")
    with pytest.raises(DataError, match=r"00000/ids.npy is not as it was written.* remove "):
        shards[0]
    assert before.arrays["ids"].tolist() == [*range(4 * PER_SHARD)], "it is read as it was opened"
    path.unlink()
    with pytest.raises(DataError, match="No such file"):
        shards[0]


def test_no_room_for_another_file_is_not_damage(place: Path) -> None:
    shards = opened(place)
    with pytest.raises(TautError) as caught, full():
        shards[0]
    message = str(caught.value)
    assert "00000/ids.npy cannot be opened (Too many open files)" in message
    assert "the data are sound" in message and "ulimit -n" in message
    assert "damaged" not in message and "remove" not in message
    with pytest.raises(TautError, match="the data are sound"), full():
        cache.load(place, KEY)  # else the source would be tokenized again
    assert shards[0].num_rows == opened(place)[3].num_rows == PER_SHARD


class full:
    """Inside the block this process can open no file."""

    def __enter__(self) -> None:
        self.limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.open(os.devnull, os.O_RDONLY)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, self.limits[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, self.limits)


def test_the_soft_limit_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        files.allow_open_files()
        raised, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert raised == min(files.OPEN_FILES, hard % 2**63) > 512
        files.allow_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (raised, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_step_opens_each_shard_once(place: Path) -> None:
    asked = list[int]()

    class Data:
        def __getitem__(self, index: int) -> Sample:
            asked.append(index)
            ids_T = np.array([index, index])
            return Sample(f"{index}", ids_T, np.array([1]), np.ones(1))

    indices = [7, 2, 9, 2, 0, 8]
    trees = Rows(Data()).trees(indices)  # type: ignore[arg-type]
    assert [int(tree.samples[0].ids_T[0]) for tree in trees] == indices
    assert asked == sorted(indices)
