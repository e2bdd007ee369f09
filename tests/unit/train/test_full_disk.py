"""A disk that is full, told by the system itself: what writes says so in a line, whichever library was writing."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.helpers.chat_runs import QUIET, chats, save_model, words_of, write_rows
from tests.helpers.tiny_trainers import make

from taut.commands.generate import generate
from taut.commands.settings import Generate
from taut.config import from_mapping
from taut.errors import OutputError
from taut.io import temporary
from taut.run.save import save_best
from taut.train import sharded
from taut.train.checkpoint import Checkpoints
from taut.train.distributed import Ranks
from taut.train.log import EventLog, RunLog, read_events
from taut.train.run_dir import MARK, Lock, complete
from taut.train.settings import CheckpointConfig

SAID = "File too large"
"""What the system says past a limit on the size of a file: one error of its kind that needs no disk to be filled."""


@contextmanager
def no_file_longer_than(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def refused(act: Callable[[], object], size: int) -> None:
    message = f"cannot (be written|write).*({SAID}|os error 27)"
    with pytest.raises(OutputError, match=message), no_file_longer_than(size):
        act()


@pytest.mark.parametrize("size", [10, 5_000])
def test_tensors(size: int, tmp_path: Path) -> None:
    state = {f"t{i}": torch.randn(1000) for i in range(3)}
    with pytest.raises(OSError, match=SAID), no_file_longer_than(size):
        sharded.write(state, tmp_path, Ranks(0, 1, torch.device("cpu")))


def test_a_checkpoint_and_the_next_one(tmp_path: Path) -> None:
    trainer = make(tmp_path)[0].trainer
    out = tmp_path / "out"
    out.mkdir()
    (out / MARK).write_text("{}")
    saver = Checkpoints(
        out / "checkpoints", CheckpointConfig(every=1), lambda step: True, trainer.scorer, trainer.optimizer, 9,
        trainer.ranks, trainer.emit, notes=lambda step: {},
    )  # fmt: skip
    saver.save(1, wait=True)
    refused(lambda: saver.save(2, wait=True), 1000)
    saver.save(2, wait=True)
    saver.close()
    assert len(complete(saver.folder)) == 2


def test_a_model(tmp_path: Path) -> None:
    built, _ = make(tmp_path)
    best = tmp_path / "best"
    for size in (10, 20_000):
        refused(lambda: save_best(built, best, lambda _: None), size)
        assert not list(tmp_path.glob("*best*"))
    save_best(built, best, lambda _: None)
    assert best.is_dir()


def test_events(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    def tell() -> None:
        with RunLog([EventLog(path)]) as log:
            log.emit("step", step=1, text="x" * 300)

    refused(tell, 100)
    with RunLog([EventLog(path)]) as log:
        log.emit("step", step=1)
    assert [event["step"] for event in read_events(path)] == [1]


def test_the_lock(tmp_path: Path) -> None:
    def take() -> None:
        with Lock(tmp_path / "out") as lock:
            lock.take()

    refused(take, 0)
    take()


@pytest.mark.parametrize("size", [300, 3_000])
def test_completions(size: int, tmp_path: Path) -> None:
    """What is written is kept, and the same command with resume=true finishes the rest."""
    model = save_model(tmp_path / "model")
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "the cat"} for _ in range(12)])
    keys = {"model": str(model), "prompts": str(prompts), "out": str(tmp_path / "out.jsonl")}
    config = from_mapping(Generate, {**keys, "sampling.max_new_tokens": 8, "resume": True})
    message = r"out=.* cannot be written: File too large.* resume=true finishes the rest|room and permission"
    with pytest.raises(OutputError, match=message), no_file_longer_than(size):
        generate(config)
    result = generate(config)
    assert (result.num_completions, result.errors) == (12, ())
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert len({json.loads(line)["id"] for line in lines}) == 12
    assert (result.num_kept > 0) == (size == 3_000)


def test_no_room_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
        with pytest.raises(
            OutputError, match=r"for temporary files, has 1,000 bytes free; .*TMPDIR"
        ):
            temporary.TemporaryFolder("test")
    with monkeypatch.context() as patched:
        patched.setattr("tempfile.gettempdir", lambda: Path("/nowhere/at").read_text())
        temporary.clear()
        with pytest.raises(OutputError, match="no folder for temporary files can be written"):
            temporary.TemporaryFolder("test")
    with temporary.TemporaryFolder("test") as folder:
        assert folder.parent == tmp_path


COMMANDS = """
import json, os, sys
from taut.cli import main
codes = [main(words) for words in json.loads(sys.argv[1])]
print("codes", codes)
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root, to mount")
@pytest.mark.slow
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """A tmpfs of 16 kB, in a mount namespace of its own: for completions, and as TMPDIR."""
    model = save_model(tmp_path / "model")
    rows = [{"prompt": "the cat", "answer": "dog"} for _ in range(40)]
    prompts = write_rows(tmp_path / "prompts.jsonl", rows)
    train = write_rows(tmp_path / "train.jsonl", chats(8))
    small = tmp_path / "small"
    small.mkdir()
    sampling = "sampling.max_new_tokens=16"
    check = {**QUIET, "model": str(model), "data.train": str(train), "out": str(tmp_path / "run")}
    commands = [
        ["generate", str(model), f"prompts={prompts}", f"out={small}/out.jsonl", sampling],
        ["eval", str(model), f"data={prompts}", "rewards=exact_match", sampling],
        ["check", *words_of({**check, "steps": 1})],
    ]
    shell = 'mount -t tmpfs -o size=16k none "$0" && exec "$@"'
    environment = {**os.environ, "TMPDIR": str(small)}
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", shell, small, sys.executable, "-c", COMMANDS, json.dumps(commands)],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"cannot mount here: {done.stderr.strip()[:200]}")
    assert "codes [2, 2, 1]" in done.stdout, done.stdout + done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 2, done.stderr
    assert re.search(
        r"out\.jsonl cannot be written: No space left .*\d+ completions are written", lines[0]
    )
    assert "small, for temporary files, has " in lines[1]
    said = " ".join(done.stdout.split())  # a long path makes the line wrap
    assert "for temporary files, has " in said
