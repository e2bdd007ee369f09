"""The stream that never raises, and numbers with what they count."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.style import Style
from rich.table import Table
from rich.text import Text

from taut.data.dataset import DataReport
from taut.io.console import Printer, counted, guarded, one_line, warn_if_slow
from taut.io.terminal import Terminal


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
    with warn_if_slow("measuring", after=0.0):
        time.sleep(0.2)
    with warn_if_slow("reading", after=60.0):
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


HOSTILE = {
    "a title": ("\x1b]0;owned\x07", r"\x1b]0;owned\x07"),
    "the clipboard": ("\x1b]52;c;aGk=\x1b\\", r"\x1b]52;c;aGk=\x1b" + "\\"),
    "a link": ("\x1b]8;;http://x\x1b\\y", r"\x1b]8;;http://x\x1b" + "\\y"),
    "a cursor": ("\x1b[1A\x1b[2K\rdone", r"\x1b[1A\x1b[2K\x0ddone"),
    "a color": ("\x1b[8mx", r"\x1b[8mx"),
    "C1": ("\x9b2J\x9d", r"\u009b2J\u009d"),
    "DEL and backspace": ("a\x7f\x08", r"a\x7f\x08".replace(r"\x7f", r"\u007f")),
    "direction": ("\u202egnp.exe\u2066", r"\u202egnp.exe\u2066"),
    "a line separator": ("a\u2028b", r"a\u2028b"),
    "half a pair": ("\ud83d", r"\ud83d"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_text_does_not_control_the_terminal(name: str) -> None:
    text, shown = HOSTILE[name]
    for is_terminal in (False, True):
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, encoding="utf-8")
        printer = Printer(stream)
        printer.write(f"{text}\n")
        console = Terminal(file=printer, force_terminal=is_terminal, soft_wrap=True)
        console.print(Text(text, "bold"))
        console.print(text, markup=False)
        table = Table.grid()
        table.add_row(text, Text(text))
        console.print(table)
        printer.flush()
        written = raw.getvalue().decode()
        assert written.startswith(f"{shown}\n")
        assert text not in written
        own = ["\x1b[1m", "\x1b[0m"] if is_terminal else []
        assert set(re.findall(r"\x1b\[[\d;]*m", written)) == set(own)
        assert re.sub(r"\x1b\[[\d;]*m|\n", "", written).isprintable()


def test_a_library_that_prints_beside_a_progress_bar_writes_no_link() -> None:
    stream = io.StringIO()
    console = Terminal(file=Printer(stream), force_terminal=True)
    console.print(Text("x", Style(link="http://evil")))
    assert "evil" not in stream.getvalue()


def test_bars_of_libraries_are_drawn_over_themselves_and_over_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """tqdm, of downloads, begins each state of its bar with a carriage return, and wipes the last one away."""
    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    bar = "\r 50%|#  |", "\r100%|###|", "\r          \r"
    with guarded():
        for text in (*bar, "\rname\x1b[2K", "\n", "reason: ", "\rfine", "\n", "a\nb", "\rfine\n"):
            sys.stderr.write(text)
    drawn = "".join(bar) + "\rname\\x1b[2K\n"
    assert err.getvalue() == drawn + "reason: \\x0dfine\na\nb\\x0dfine\n"


def test_a_secret_that_a_column_would_break_in_two_is_hidden() -> None:
    stream = io.StringIO()
    table = Table.grid()
    for _ in range(2):
        table.add_column(width=12, overflow="fold")
    url = "https://somebody:correcthorsebattery@host/path"
    table.add_row(url, Text(url, "bold"))
    Terminal(file=Printer(stream)).print(table)
    written = "".join(stream.getvalue().split())
    assert "***@" in written
    assert not any(part in written for part in ("somebody", "correct", "horse", "battery"))


def test_tabs_and_the_ends_of_lines_are_kept_except_where_one_line_is_meant() -> None:
    stream = io.StringIO()
    Printer(stream).write("a\tb\nλ 日本 😀 e\u0301\n")
    assert stream.getvalue() == "a\tb\nλ 日本 😀 e\u0301\n"
    assert one_line("a\n\x1b[2Jb") == r"a\n\x1b[2Jb"


def test_escapes_keep_json_the_same() -> None:
    """``taut runs --json`` writes what no terminal obeys, and programs read the names as they are."""
    stream = io.StringIO()
    name = "a\x1b\x7f\x9b\u202e\n\r"
    Printer(stream).write(json.dumps(name, ensure_ascii=False))
    assert stream.getvalue().isprintable()
    assert json.loads(stream.getvalue()) == name


def test_a_slow_reader_of_a_stream_that_does_not_block_loses_nothing() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    text = "".join(
        f"line {number}\n" for number in range(30_000)
    )  # several times what a pipe holds
    read: list[bytes] = []

    def read_slowly() -> None:
        while part := os.read(reader, 50_000):
            read.append(part)
            time.sleep(0.01)

    thread = threading.Thread(target=read_slowly)
    thread.start()
    with os.fdopen(writer, "w") as stream:
        printer = Printer(stream)
        for line in text.splitlines(keepends=True):
            printer.write(line)
        printer.flush()
    thread.join()
    os.close(reader)
    assert printer.failure is None
    assert b"".join(read).decode() == text


def test_a_stream_that_does_not_block_and_is_never_read_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("taut.io.console.PATIENCE", 0.1)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with os.fdopen(writer, "w") as stream:
        printer = Printer(stream)
        started = time.monotonic()
        for _ in range(2000):
            printer.write("x" * 10_000)
        assert time.monotonic() - started < 60, "it is waited for once"
        assert printer.failure is not None
        assert "nothing was read for 0.1 s" in str(printer.failure)
    os.close(reader)
