"""Checkpoints that were damaged and sealed again, so that no digest tells: each is refused in one line that names the
file, in bounded time, and the one before can be gone on from.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.time_limits import time_limit
from tests.helpers.tiny_trainers import make
from tests.unit.train.test_checkpoint import opened
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from taut.errors import OutputError
from taut.io import files
from taut.train.checkpoint import Memory, _digest_of, find_newest
from taut.train.monitors import Divergence, Spikes, Untouched
from taut.train.run_dir import MARK
from taut.train.settings import LossMonitorConfig
from taut.train.trainer import Trainer, train_step

SECONDS = 20
DATA, INDEX, META = "__0_0.distcp", ".metadata", "meta.json"
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Path]:
    """A trainer, and an ``out`` with checkpoints of steps 2 and 4."""
    place = tmp_path_factory.mktemp("trained")
    trainer = make(place / "made")[0].trainer
    out = place / "out"
    out.mkdir()
    (out / MARK).write_text("{}")
    with opened(trainer, out, every=2) as saver:
        saver.memories = memories()
        for step in (2, 4):
            train_step(trainer, step)
            saver.save(step, wait=True)
    return trainer, out


def memories() -> dict[str, Memory]:
    return {
        "Untouched": Untouched({}, {"a"}, 1),
        "Spikes": Spikes(),
        "Divergence": Divergence(LossMonitorConfig()),
    }


def seal(checkpoint: Path, body: dict[str, Any]) -> None:
    text = json.dumps({"sha256": _digest_of(body), **body})
    (checkpoint / META).write_text(text)


def body_of(checkpoint: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((checkpoint / META).read_text())
    del body["sha256"]
    return body


def seal_again(checkpoint: Path) -> None:
    body = body_of(checkpoint)
    body["files"] = {name: files.digest(checkpoint / name) for name in body["files"]}
    seal(checkpoint, body)


def meta(**changes: Any) -> Damage:
    """Other values of ``meta.json``; of ``a__b`` those of b in a. None: the key is gone."""

    def damage(checkpoint: Path) -> None:
        body = body_of(checkpoint)
        for key, value in changes.items():
            *parents, last = key.split("__")
            holder = body
            for name in parents:
                holder = holder[name]
            if value is None:
                del holder[last]
            else:
                holder[last] = value
        seal(checkpoint, body)

    return damage


def generator(**changes: Any) -> Damage:
    def damage(checkpoint: Path) -> None:
        body = body_of(checkpoint)
        body["random"][0] |= changes
        seal(checkpoint, body)

    return damage


def text(content: str | bytes) -> Damage:
    raw = content if isinstance(content, bytes) else content.encode()
    return lambda checkpoint: (checkpoint / META).write_bytes(raw) and None


def index(change: Callable[[Metadata], object]) -> Damage:
    def damage(checkpoint: Path) -> None:
        found = pickle.loads((checkpoint / INDEX).read_bytes())
        change(found)
        (checkpoint / INDEX).write_bytes(pickle.dumps(found))
        seal_again(checkpoint)

    return damage


def index_bytes(change: Callable[[bytes], bytes]) -> Damage:
    def damage(checkpoint: Path) -> None:
        (checkpoint / INDEX).write_bytes(change((checkpoint / INDEX).read_bytes()))
        seal_again(checkpoint)

    return damage


def matrix(found: Metadata) -> Any:
    return next(stored for stored in found.state_dict_metadata.values() if len(stored.size) == 2)


def place(found: Metadata) -> Any:
    return next(iter(found.storage_data.values()))


def chunk(offsets: list[int] | None, sizes: list[int] | None) -> Damage:
    def change(found: Metadata) -> None:
        old = matrix(found).chunks[0]
        new = ChunkStorageMetadata(
            torch.Size(old.offsets if offsets is None else offsets),
            torch.Size(old.sizes if sizes is None else sizes),
        )
        matrix(found).chunks = [new]

    return index(change)


def tensor(change: Callable[[torch.Tensor], object]) -> Damage:
    """Another tensor, or other bytes, in the place of a matrix."""

    def damage(checkpoint: Path) -> None:
        found = pickle.loads((checkpoint / INDEX).read_bytes())
        name = next(n for n, one in found.state_dict_metadata.items() if len(one.size) == 2)
        where = found.storage_data[MetadataIndex(name, [0, 0])]
        data = (checkpoint / DATA).read_bytes()
        old = torch.load(io.BytesIO(data[where.offset : where.offset + where.length]))
        new = change(old)
        if not isinstance(new, bytes):
            buffer = io.BytesIO()
            torch.save(new, buffer)
            new = buffer.getvalue()
        where.offset, where.length = len(data), len(new)
        (checkpoint / DATA).write_bytes(data + new)
        (checkpoint / INDEX).write_bytes(pickle.dumps(found))
        seal_again(checkpoint)

    return damage


def cut(name: str, share: float) -> Damage:
    def damage(checkpoint: Path) -> None:
        data = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(data[: int(len(data) * share)])
        seal_again(checkpoint)

    return damage


def instead(name: str, make_other: Callable[[Path], object]) -> Damage:
    def damage(checkpoint: Path) -> None:
        (checkpoint / name).unlink()
        make_other(checkpoint / name)

    return damage


def compressed(old: torch.Tensor) -> bytes:
    """What torch.save writes, compressed: a gigabyte of zeros in a megabyte."""
    buffer, packed = io.BytesIO(), io.BytesIO()
    torch.save(old, buffer)
    source = zipfile.ZipFile(buffer)
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name in source.namelist():
            with archive.open(name, "w") as file:
                if not name.endswith("data/0"):
                    file.write(source.read(name))
                    continue
                for _ in range(64):
                    file.write(bytes(2**20))
    return packed.getvalue()


class Allocates:
    """Unpickled it takes three gigabytes; torch.load with weights_only allows it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return bytearray, (3 * 10**9,)


DAMAGES: dict[str, tuple[Damage, str]] = {
    # meta.json
    "a list": (text("[1]"), "meta.json is damaged"),
    "nested deeply": (text("[" * 100_000), "meta.json cannot be read .*nested"),
    "not UTF-8": (text(b"\xff\xfe{"), "meta.json cannot be read"),
    "a number of 6,000 digits": (text('{"step":' + "9" * 6000 + "}"), "meta.json cannot be read"),
    "a FIFO": (instead(META, os.mkfifo), "meta.json cannot be read .it is a FIFO"),
    "a device": (instead(META, lambda p: p.symlink_to("/dev/zero")), "it is a character device"),
    "no step": (meta(step=None), "step: it is missing"),
    "a step that is text": (meta(step="4"), 'step: found "4"; expected an integer'),
    "a step that is true": (meta(step=True), "step: found true; expected an integer"),
    "a step below 0": (meta(step=-4), "step: found -4"),
    "a step of another directory": (meta(step=5, cursor=[5, 5]), "meta.json is of step 5"),
    "a step of NaN": (meta(step=float("nan")), "step: found NaN"),
    "a cursor below 0": (meta(cursor=[4, -24]), r"cursor\[1\]: found -24"),
    "a cursor of text": (meta(cursor=["4", 24]), r"cursor\[0\]: found"),
    "a cursor that is a table": (meta(cursor={"a": 1}), "cursor: found"),
    "no generators": (meta(random=[]), r"random: found \[\]"),
    "a short generator": (generator(python=[3, [1, 2], None]), r"random\[0\]\.python\[1\]"),
    "a generator far along": (
        generator(python=[3, [1] * 624 + [10**6], None]),
        "the position in Python's generator",
    ),
    "a generator of no base64": (generator(torch="%%%%"), r"random\[0\]\.torch"),
    "a generator of other bytes": (generator(torch="AAAA"), r"random\[0\]\.torch"),
    "numpy far along": (
        generator(numpy=["MT19937", "AAAA" * 832, 10**9, 0, 0.0]),
        r"random\[0\]\.numpy\[2\]",
    ),
    "memories that are a list": (meta(memories=[]), "memories: found"),
    "a memory of text": (meta(memories__Spikes=["a"]), 'memories.Spikes: .*found "a"'),
    "a memory of another kind": (meta(memories__Divergence=[1]), "memories.Divergence: found"),
    "a memory with wrong fields": (
        meta(memories__Divergence={"baseline": "x", "config": 1}),
        "memories.Divergence: baseline",
    ),
    "a memory without fields": (meta(memories__Untouched={}), "memories.Untouched: steps"),
    "a loss of text": (meta(loss="x"), "loss: found"),
    "no identity": (meta(identity=None), "identity: it is missing"),
    "an identity without config": (meta(identity={}), "identity.config: it is missing"),
    "is_measured of 1": (meta(is_measured=1), "is_measured: found 1"),
    "no files": (meta(files={}), "files: found"),
    "files that are a list": (meta(files=["a"]), "files: found"),
    "a file elsewhere": (meta(files={"../latest": "0" * 64}), "names the file '../latest'"),
    # the index
    "no index": (index_bytes(lambda _: b""), "metadata is no index of tensors: it is damaged"),
    "half an index": (cut(INDEX, 0.5), "metadata is no index of tensors"),
    "another object": (index_bytes(lambda _: pickle.dumps(5)), "has a int where it should have"),
    "an index of another size": (
        index_bytes(lambda raw: raw + bytes(2**22)),
        r"\.metadata cannot be read .it has .* bytes; expected at most",
    ),
    "no tensors": (
        index(lambda found: setattr(found, "state_dict_metadata", None)),
        "tensors: found a NoneType",
    ),
    "no places": (index(lambda found: setattr(found, "storage_data", {})), "has no place"),
    "an offset of 2**62": (
        index(lambda found: setattr(place(found), "offset", 2**62)),
        "found 46116860.*; expected a count",
    ),
    "an offset beyond the file": (
        index(lambda found: setattr(place(found), "offset", 10**9)),
        r"it has .* bytes at 1,000,000,000 of __0_0\.distcp",
    ),
    "an offset below 0": (
        index(lambda found: setattr(place(found), "offset", -5)),
        "found -5; expected a count",
    ),
    "a length of text": (
        index(lambda found: setattr(place(found), "length", "x")),
        "found x; expected a count",
    ),
    "a length of 0": (index(lambda found: setattr(place(found), "length", 0)), "it is damaged"),
    "a place elsewhere": (
        index(lambda found: setattr(place(found), "relative_path", "../../../etc/passwd")),
        "names the file '../../../etc/passwd'",
    ),
    "a place that is a device": (
        index(lambda found: setattr(place(found), "relative_path", "/dev/zero")),
        "names the file '/dev/zero'",
    ),
    "a transformed place": (
        index(lambda found: setattr(place(found), "transform_descriptors", ["zstd"])),
        "transformed",
    ),
    "a shape of text": (
        index(lambda found: setattr(matrix(found), "size", "abc")),
        "has a str where it should have a Size",
    ),
    "a huge shape": (
        index(lambda found: setattr(matrix(found), "size", torch.Size([2**40, 2**40]))),
        "the chunks of .* do not make up",
    ),
    "another dtype": (
        index(lambda found: setattr(matrix(found).properties, "dtype", torch.int8)),
        r"as int8 \[.*; expected float64",
    ),
    "chunks that are missing": (
        index(lambda found: setattr(matrix(found), "chunks", [])),
        "the chunks of .* do not make up",
    ),
    "a chunk that is smaller": (chunk(None, [1, 1]), "the chunks of .* do not make up"),
    "a chunk below 0": (chunk([-1, 0], None), "found -1; expected a count"),
    "a chunk outside": (chunk([5, 0], None), "is not in"),
    # the tensors
    "half of the tensors": (cut(DATA, 0.5), r"bytes at .* of __0_0\.distcp"),
    "a tensor of another dtype": (
        tensor(lambda old: old.half()),
        "it is float16 .*; expected float64",
    ),
    "a tensor of another shape": (tensor(lambda old: old.flatten()), "it is float64 .*; expected"),
    "a dictionary": (tensor(lambda old: {"a": old}), "it is no tensor"),
    "a sparse tensor": (tensor(lambda old: old.to_sparse()), "it is no tensor"),
    "a tensor without data": (tensor(lambda old: old.to("meta")), "it is no tensor"),
    "a broken zip": (tensor(lambda old: b"PK\x03\x04" + b"x" * 500), "it is damaged"),
    "a compressed zip": (tensor(compressed), "is compressed"),
    "an object that takes memory": (tensor(lambda old: Allocates()), "it is no tensor"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_one_that_is_sealed_again_is_refused_in_one_line(
    kind: str, trained: tuple[Trainer, Path], tmp_path: Path
) -> None:
    (trainer, made), (damage, message) = trained, DAMAGES[kind]
    out = tmp_path / "out"
    shutil.copytree(made, out)
    damage(out / "checkpoints" / "step-000004")

    def go_on(*, skip_damaged: bool) -> int:
        with opened(trainer, out, every=2) as saver:
            saver.memories = memories()
            saved, _ = find_newest(saver.folder, trainer.ranks, skip_damaged=skip_damaged)
            assert saved is not None
            saver.resume(saved)
            return saved.step

    with time_limit(SECONDS):
        with pytest.raises(OutputError) as caught:
            go_on(skip_damaged=False)
        line = str(caught.value)
        assert re.search(message, line), line
        assert line.startswith("resume=true: ")
        assert str(out / "checkpoints" / "step-000004") in line
        assert re.search(r"; expected the files as they were written; (set|bring)", line)
        assert len(line.splitlines()) == 1 and len(line) < 1000
        shutil.rmtree(out / "checkpoints" / "step-000004")
        assert go_on(skip_damaged=False) == 2


def test_a_checkpoint_that_is_not_damaged_is_gone_on_from(
    trained: tuple[Trainer, Path], tmp_path: Path
) -> None:
    """Sealed again without a change: the seal of the cases above is a good one."""
    trainer, made = trained
    shutil.copytree(made, tmp_path / "out")
    seal_again(tmp_path / "out" / "checkpoints" / "step-000004")
    with opened(trainer, tmp_path / "out", every=2) as saver:
        saved, damaged = find_newest(saver.folder, trainer.ranks, skip_damaged=False)
        assert saved is not None and not damaged
        saver.resume(saved)
        assert saved.step == 4
