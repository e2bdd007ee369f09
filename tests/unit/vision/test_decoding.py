"""Pictures made to take long, to take memory or to crash a decoder are errors in time, and the next one is read."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from io import BytesIO
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

import pytest
from PIL import Image

from taut.errors import DataError, PictureError
from taut.io import worker_process
from taut.vision import content as picture
from taut.vision import decoding
from taut.vision.content import decode, decoded_size, mime_type
from taut.vision.decoder import num_scans
from taut.vision.settings import ImagesConfig

IMAGES = ImagesConfig()


def encoded(kind: str, size: tuple[int, int] = (9, 9), mode: str = "L", **options: Any) -> bytes:
    held = BytesIO()
    Image.new(mode, size, 128).save(held, kind, **options)
    return held.getvalue()


@cache
def many_scans(side: int, scans: int) -> bytes:
    """A progressive JPEG whose last scan is there so many times more."""
    whole = encoded("JPEG", (side, side), progressive=True)
    return whole[:-2] + whole[whole.rindex(b"\xff\xda") : -2] * scans + whole[-2:]


def many_chunks(count: int) -> bytes:
    whole = encoded("PNG")
    chunk = struct.pack(">I4sI", 0, b"aaAa", zlib.crc32(b"aaAa"))
    return whole[:33] + chunk * count + whole[33:]


@pytest.fixture
def fresh() -> Iterator[None]:
    """No process of before, and none for those after."""
    decoding.end_all()
    yield
    decoding.end_all()


class TestScans:
    def test_they_are_counted(self) -> None:
        assert num_scans(encoded("JPEG")) == 1
        assert num_scans(encoded("JPEG", mode="RGB", progressive=True)) == 10
        assert num_scans(many_scans(9, 7)) == num_scans(many_scans(9, 0)) + 7
        assert num_scans(encoded("PNG")) == num_scans(b"") == num_scans(b"\xff\xd8") == 0

    def test_those_inside_a_segment_are_not(self) -> None:
        """As of a thumbnail."""
        whole = encoded("JPEG", comment=many_scans(9, 50))
        assert whole.count(b"\xff\xda") > 20 and num_scans(whole) == 1

    def test_too_many_are_refused_before_they_are_decoded(self) -> None:
        content = many_scans(7000, 300)
        assert len(content) < 400_000
        began = time.monotonic()
        with pytest.raises(PictureError, match=r"the picture x is a JPEG of 30\d scans; expected"):
            decode(content, "x", IMAGES)
        assert time.monotonic() - began < 20
        assert decode(many_scans(9, 50), "x", IMAGES).size == (9, 9)


def seconds_of_children() -> float:
    """CPU time of processes that have ended."""
    return sum(getrusage(RUSAGE_CHILDREN)[:2])


@pytest.mark.parametrize(
    "content",
    [lambda: many_scans(7000, 90), lambda: many_chunks(800_000)],
    ids=["scans", "chunks"],
)
def test_what_takes_long_is_given_up(content: Callable[[], bytes]) -> None:
    made = content()
    decode(encoded("PNG"), "y", IMAGES)
    began = seconds_of_children()
    found = r"the picture x takes longer than 0\.3 s to decode; .* data\.images\.limit_seconds"
    with pytest.raises(PictureError, match=found):
        decode(made, "x", ImagesConfig(limit_seconds=0.3))
    assert seconds_of_children() - began < 2
    assert decode(encoded("PNG"), "y", IMAGES).size == (9, 9)


def test_memory_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "BYTES_PER_PIXEL", 0)
    monkeypatch.setattr(picture, "MEMORY", 2**27)
    with pytest.raises(PictureError, match=r"the picture x is damaged .*(memory|128 MiB)"):
        decode(encoded("PNG", (6000, 6000)), "x", IMAGES)
    assert decode(encoded("PNG"), "y", IMAGES).size == (9, 9)


@pytest.mark.usefixtures("fresh")
def test_a_decoder_that_crashes(monkeypatch: pytest.MonkeyPatch) -> None:
    says_ready = "from multiprocessing.connection import Connection; import os, sys; "
    says_ready += "pipe = Connection({}); {}; pipe.send_bytes(b'ready'); pipe.recv_bytes(); "
    for end, how in (
        ("os.kill(os.getpid(), 11)", "was ended by SIGSEGV"),
        ("sys.exit(3)", "exited with 3"),
    ):
        monkeypatch.setattr(decoding, "COMMAND", says_ready + end)
        with pytest.raises(PictureError, match=rf"the picture x is damaged .*its decoder {how}"):
            decode(encoded("PNG"), "x", IMAGES)
    monkeypatch.undo()
    assert decode(encoded("PNG"), "x", IMAGES).size == (9, 9)


def test_a_decoder_that_the_system_kills() -> None:
    """For want of memory: no picture's fault, and no row is left out for it."""
    content = many_scans(7000, 90)

    def kill() -> None:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            for held in worker_process._live - others:
                process = held.process
                if process is not None and _seconds(process.pid) > 0.3:
                    process.send_signal(signal.SIGKILL)
                    return
            time.sleep(0.02)

    decoding.end_all()
    others = set(worker_process._live)  # such as the process of limited functions
    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(DataError, match="was killed, as when memory runs out") as error:
        decode(content, "x", IMAGES)
    thread.join()
    assert not isinstance(error.value, PictureError)
    assert decode(encoded("PNG"), "x", IMAGES).size == (9, 9)


def test_a_forked_process_has_decoders_of_its_own() -> None:
    decode(encoded("PNG"), "x", IMAGES)
    before = list(decoding._idle)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which the child has not
        child = os.fork()
    if not child:
        is_fine = not worker_process._live and decode(encoded("PNG"), "x", IMAGES).size == (9, 9)
        decoding.end_all()
        os._exit(0 if is_fine else 1)
    assert os.waitpid(child, 0)[1] == 0
    decode(encoded("PNG"), "x", IMAGES)
    assert before and decoding._idle == before


@pytest.mark.usefixtures("fresh")
def test_a_decoder_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no picture's fault, and no row is left out for it."""
    monkeypatch.setattr(decoding, "COMMAND", "raise SystemExit(3)  # {} {}")
    with pytest.raises(DataError, match="exited with 3 at its start") as error:
        decode(encoded("PNG"), "x", IMAGES)
    assert not isinstance(error.value, PictureError)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(DataError, match="no process can be started"):
        decode(encoded("PNG"), "x", IMAGES)


@pytest.mark.usefixtures("fresh")
def test_a_process_is_kept_for_the_next_picture() -> None:
    decode(encoded("PNG"), "x", IMAGES)
    (first,) = decoding._idle
    assert decoded_size(encoded("GIF", (3, 2)), "x", IMAGES) == (3, 2)
    assert decoding._idle == [first]
    assert first.process is not None
    before = first.process.pid
    first.process.kill()
    first.process.wait()
    assert decode(encoded("PNG"), "x", IMAGES).size == (9, 9)
    (after,) = decoding._idle
    assert after.process is not None and after.process.pid != before


@pytest.mark.usefixtures("fresh")
def test_threads_have_processes_of_their_own() -> None:
    found: list[tuple[int, int]] = []

    def work(number: int) -> None:
        for _ in range(5):
            found.append(decode(encoded("PNG", (number, 1)), "x", IMAGES).size)

    threads = [threading.Thread(target=work, args=(1 + number % 3,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted([(1, 1), (2, 1), (3, 1)] * 10)
    assert 1 <= len(decoding._idle) <= decoding.MAX_PROCESSES


SLOW = """
import sys
from taut.vision.content import ImagesConfig, decode
with open(sys.argv[1], "rb") as file:
    decode(file.read(), "x", ImagesConfig())
"""


def test_it_does_not_outlive_a_parent_that_is_killed(tmp_path: Path) -> None:
    """In the middle of a call into a C library."""
    (tmp_path / "slow.jpg").write_bytes(many_scans(7000, 90))
    with subprocess.Popen([sys.executable, "-c", SLOW, str(tmp_path / "slow.jpg")]) as parent:
        child, end = 0, time.monotonic() + 30
        while not child and time.monotonic() < end:
            time.sleep(0.05)
            child = next((it for it in _children(parent.pid) if _seconds(it) > 0.3), 0)
        parent.send_signal(signal.SIGKILL)
    assert child, "it decodes"
    end = time.monotonic() + 20
    while _state(child) != "Z" and time.monotonic() < end:
        time.sleep(0.01)
    assert _state(child) == "Z"


def _children(parent: int) -> list[int]:
    numbers = [int(it.name) for it in Path("/proc").iterdir() if it.name.isdecimal()]
    found = []
    for number in numbers:
        with contextlib.suppress(OSError):
            if int(_fields(number)[1]) == parent:
                found.append(number)
    return found


def _fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _state(pid: int) -> str:
    """Z: it has ended."""
    try:
        return _fields(pid)[0]
    except OSError:
        return "Z"


def _seconds(pid: int) -> float:
    """Of CPU."""
    return int(_fields(pid)[11]) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_what_a_picture_is_by_its_first_bytes(kind: str) -> None:
    content = encoded(kind)
    assert mime_type(content) == f"image/{kind.lower()}"
    assert mime_type(b"RIFF0000WAVE") is mime_type(b"%!PS") is mime_type(b"") is None
