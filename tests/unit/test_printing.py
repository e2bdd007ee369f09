"""The stream that never raises, and numbers with what they count."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import pytest

from taut.data.report import DataReport
from taut.printing import Printer, counted, guarded, told_when_slow


@pytest.mark.parametrize(
    ("encoding", "written"),
    [
        ("ascii", rb"\u03bb \xe9 \udc80"),
        ("latin-1", b"\\u03bb \xe9 \\udc80"),
        ("utf-8", "λ é \\udc80".encode()),
    ],
)
def test_what_the_encoding_lacks_is_escaped(encoding: str, written: bytes) -> None:
    raw = io.BytesIO()
    printer = Printer(io.TextIOWrapper(raw, encoding=encoding))
    assert printer.write("λ é \udc80") == 5
    printer.flush()
    assert raw.getvalue() == written
    assert printer.failure is None


def test_what_a_full_device_did_not_take_is_not_tried_again() -> None:
    with Path("/dev/full").open("w") as full:
        printer = Printer(full)
        printer.write("lost")
        assert printer.failure is None  # it is in the buffer
        printer.flush()
        assert isinstance(printer.failure, OSError)
        printer.writelines(["also", "lost"])
        full.flush()  # nothing is left in the buffer
        assert Path(f"/proc/self/fd/{full.fileno()}").readlink() == Path("/dev/full")


def test_a_stream_of_a_users_own_may_have_write_and_flush_only() -> None:
    class Tee:
        def __init__(self) -> None:
            self.texts: list[str] = []

        def write(self, text: str) -> None:
            self.texts.append(text)

        def flush(self) -> None:
            self.texts.append("flushed")

    tee = Tee()
    printer = Printer(tee)  # type: ignore[arg-type]
    printer.write("a")
    printer.flush()
    assert tee.texts == ["a", "flushed"]


def test_a_printer_is_not_wrapped_again() -> None:
    printer = Printer(None)
    assert Printer.on(printer) is printer  # type: ignore[arg-type]
    assert printer.failure is not None


def test_what_takes_long_is_told_and_what_does_not_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with told_when_slow("measuring", after=0.0):
        time.sleep(0.2)
    with told_when_slow("reading", after=60.0):
        pass
    assert capsys.readouterr().err == "taut: measuring\n"


def test_the_streams_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    before = sys.stdout, sys.stderr
    with guarded():
        assert isinstance(sys.stdout, Printer)
        sys.stdout.write("to nowhere")
    assert (sys.stdout, sys.stderr) == before


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (1204, "1,204 rows")]
)
def test_one_has_no_s(number: int, said: str) -> None:
    assert counted(number, "rows") == said


def test_the_sizes_of_a_data_set_of_one_row() -> None:
    report = DataReport(1, 1, 12, 1, (), (), is_cached=False, decisions=(), num_pictures=1)
    assert report.sizes == "1 row, 1 sample, 12 tokens, 1 target, 1 picture"
