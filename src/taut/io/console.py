"""What commands print, and to what. Printing never ends a command: what the encoding lacks is escaped, and a stream
that fails is written to no more. Text from data cannot control the terminal: control characters are shown as escapes
(``\\x1b``), and secrets in URLs as ``***``. ``terminal.py`` does the same for what rich prints.

    with guarded():                     sys.stdout and sys.stderr of a command, whichever code prints to them
    Printer.on(sys.stdout)              one stream, for the reports of a run that is started from Python
    with told_when_slow("reading"):     a line on stderr, if it takes long
    tell(line)                          the line that ends a command, which torchrun quotes too
    is_first_on_host()                  which of several ranks prints how they end
    escaped(text), one_line(text)       control characters as escapes; in one_line also the ends of lines
    counted(1, "rows")                  1 row
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Timer
from typing import Any, Self, TextIO, cast

from taut.errors import redacted

_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
"""Control characters but tab and newline, what changes the direction of text or ends a line, half surrogate pairs."""
SLOW = 2.0
"""Seconds of silence after which a command reports what it does."""
PATIENCE = 10.0
"""Seconds to wait for the reader of a stream that is set not to block."""


class Printer:
    """A text stream whose ``write`` and ``flush`` never raise."""

    def __init__(self, stream: TextIO | None, *, has_bars: bool = False) -> None:
        """``stream``: None, as Python has it, where the process began without one. ``has_bars``: libraries draw
        progress bars there, and a carriage return of one is written as it is.
        """
        self._stream = io.StringIO() if stream is None else stream
        self.failure = OSError(errno.EBADF, "it is closed") if stream is None else None
        """Why nothing is written any longer; None: all is written."""
        self._has_bars = has_bars
        self._may_return = True
        """Whether a carriage return could overwrite nothing but a progress bar."""

    @classmethod
    def on(cls, stream: TextIO | None) -> Self:
        """The Printer that ``stream`` is already, or a new one."""
        return stream if isinstance(stream, cls) else cls(stream)

    def write(self, text: str) -> int:
        is_bar = self._has_bars and self._may_return and text.startswith("\r")
        if is_bar:
            end = "\r" if len(text) > 1 and text.endswith("\r") else ""  # a bar that is wiped away
            self._put("\r" + escaped(redacted(text[1:].removesuffix(end))) + end)
        else:
            self._put(escaped(redacted(text)))
        if text:
            self._may_return = text.endswith("\n") or (is_bar and "\n" not in text)
        return len(text)

    @property
    def escaped_already(self) -> _EscapedAlready:
        """The same stream for a writer that escapes texts itself, and writes escape sequences of its own."""
        return _EscapedAlready(self)

    def _put(self, text: str) -> None:
        if self._can_write():
            encoding = getattr(self._stream, "encoding", None) or "utf-8"
            written = text.encode(encoding, "backslashreplace")
            try:
                descriptor = _non_blocking(self._stream)
                if descriptor is None:
                    self._stream.write(written.decode(encoding))
                else:
                    _write_waiting(descriptor, written)
            except OSError as error:
                self._fail(error)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if self._can_write():
            try:
                self._stream.flush()
            except OSError as error:
                self._fail(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _can_write(self) -> bool:
        if self.failure is None and getattr(self._stream, "closed", False):
            self.failure = OSError(errno.EBADF, "it is closed")
        return self.failure is None

    def _fail(self, error: OSError) -> None:
        self.failure = error
        _drop_buffered(self._stream)


class _EscapedAlready:
    """A Printer whose ``write`` escapes nothing."""

    def __init__(self, printer: Printer) -> None:
        self._printer = printer

    def write(self, text: str) -> int:
        self._printer._put(text)
        return len(text)

    def flush(self) -> None:
        self._printer.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._printer, name)


@contextmanager
def guarded() -> Iterator[None]:
    """Put a Printer in the place of sys.stdout and sys.stderr. A stdout that lost something is reported on stderr."""
    before = sys.stdout, sys.stderr
    with ExitStack() as stack:
        # A stream that was closed when the process began is None; the next file opened would get its descriptor.
        out, err = (
            Printer(
                stream or stack.enter_context(Path(os.devnull).open("w", encoding="utf-8")),
                has_bars=has_bars,
            )
            for stream, has_bars in zip(before, (False, True), strict=True)
        )
        sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, err)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before
            out.flush()
            if out.failure is not None and out.failure.errno != errno.EPIPE:  # a reader may leave
                why = out.failure.strerror
                err.write(
                    f"taut: warning: stdout cannot be written: {why}; what came after is lost\n"
                )
            err.flush()


def told_when_slow(what: str, after: float = SLOW) -> AbstractContextManager[None]:
    """Report on stderr what the command is doing, if the block takes longer than ``after`` seconds."""
    return acted_when_slow(after, lambda: sys.stderr.write(f"taut: {what}\n"))


@contextmanager
def acted_when_slow(after: float, act: Callable[[], object]) -> Iterator[None]:
    """Call ``act`` in a thread if the block takes longer than ``after`` seconds."""
    timer = Timer(after, act)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _non_blocking(stream: TextIO) -> int | None:
    """The descriptor of a stream that does not wait where its reader is slow; Python would drop what is left over."""
    try:
        descriptor = stream.fileno()
        return None if os.get_blocking(descriptor) else descriptor
    except (OSError, ValueError, AttributeError):  # no file, or closed
        return None


def _write_waiting(descriptor: int, text: bytes) -> None:
    """Write all of it, waiting for a reader that takes something every ``PATIENCE`` seconds."""
    rest = memoryview(text)
    while rest:
        if not select.select([], [descriptor], [], PATIENCE)[1]:
            raise BlockingIOError(errno.EAGAIN, f"nothing was read for {PATIENCE:g} s")
        with suppress(BlockingIOError):  # less room than select promises
            rest = rest[os.write(descriptor, rest) :]


def _drop_buffered(stream: TextIO) -> None:
    """Empty the buffer of a stream that fails: the interpreter would write it as it ends, and exit with code 120."""
    with suppress(OSError):  # no file: then nothing is written at the end
        descriptor = stream.fileno()
        kept = os.dup(descriptor)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        try:
            stream.flush()
        finally:
            os.dup2(kept, descriptor)
            os.close(kept)
            os.close(null)


def tell(line: str) -> None:
    """Print the line that ends a command, and pass it to torchrun, which quotes it in its table."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        fields = {"message": one_line(redacted(line)), "extraInfo": {"timestamp": int(time.time())}}
        with suppress(OSError):  # the table then lacks the line
            Path(path).write_text(json.dumps({"message": fields}), encoding="utf-8")
    sys.stderr.write(f"{line}\n")


def is_first_on_host() -> bool:
    """Whether this rank is the one that reports how the command ends, as long as the ranks cannot talk to each other.

    Under torchrun the first rank of each host to ask: torchrun ends the others, rank 0 too, which may not have come to
    its own report or may have none. Without torchrun it is rank 0.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file is None:
        return os.environ.get("RANK", "0") == "0"
    attempt = Path(error_file).parent.parent  # ATTEMPT/LOCAL_RANK/error.json
    try:
        (attempt / "taut-reports").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def escaped(text: str) -> str:
    """``text`` with control characters as ``\\x1b`` or ``\\u202e``, which inside JSON is the same text."""

    def escape(match: re.Match[str]) -> str:
        code = ord(match[0])
        return f"\\x{code:02x}" if code < 0x7F else f"\\u{code:04x}"

    return _CONTROL.sub(escape, text)


def one_line(text: str) -> str:
    """The same, and the ends of lines escaped too."""
    return escaped(text).replace("\n", "\\n")


def counted(number: int, nouns: str) -> str:
    """``counted(1, "rows")`` is ``1 row``. ``nouns`` is a plural that ends in s."""
    return f"{number:,} {nouns.removesuffix('s') if number == 1 else nouns}"
