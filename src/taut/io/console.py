"""Output of commands. Printing never ends a command: characters that the encoding lacks are escaped, and a stream
that fails is written to no more. Text from data cannot control the terminal: control characters are shown as escapes
(``\\x1b``), and secrets in URLs as ``***``. ``terminal.py`` does the same for what rich prints.

    with guarded():                     sys.stdout and sys.stderr of a command, whichever code prints to them
    Printer.on(sys.stdout)              one stream, for the reports of a run that is started from Python
    with warn_if_slow("reading"):       a line on stderr, if it takes long
    print_line(line)                    the line that ends a command, which torchrun quotes too
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
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, Self, TextIO, cast

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

    lock: ClassVar[threading.RLock] = threading.RLock()
    """Held while something is written: the line of progress (progress.py) is drawn by a thread."""
    before_write: ClassVar[Callable[[], None]] = staticmethod(lambda: None)
    """Wipes that line."""
    is_line_open: ClassVar[bool] = False
    """Whether the last text has not ended its line: a bar, a prompt."""

    def __init__(self, stream: TextIO | None, *, has_bars: bool = False) -> None:
        """``stream``: None, as Python has it, where the process began without one. ``has_bars``: libraries draw
        progress bars there, and a carriage return of one is written as it is.
        """
        self._stream = io.StringIO() if stream is None else stream
        self.failure = OSError(errno.EBADF, "it is closed") if stream is None else None
        """Error after which nothing is written; None while all is written."""
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
        """The stream for a writer that escapes texts itself, and writes escape sequences of its own."""
        return _EscapedAlready(self)

    def _put(self, text: str) -> None:
        with Printer.lock:
            Printer.before_write()
            self.put_raw(text)
            if text:
                Printer.is_line_open = not text.endswith(("\n", "\r"))

    def put_raw(self, text: str) -> None:
        """Write a text as it is."""
        if not self._can_write():
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        written = text.encode(encoding, "backslashreplace")
        try:
            descriptor = self._stream.fileno()
            is_blocking = os.get_blocking(descriptor)
        except (OSError, ValueError, AttributeError):  # no file, or closed
            descriptor, is_blocking = -1, True
        try:
            if is_blocking:
                self._stream.write(written.decode(encoding))
                return
            # Python would drop what is left over: wait for a reader that takes something now and then
            rest = memoryview(written)
            while rest:
                if not select.select([], [descriptor], [], PATIENCE)[1]:
                    raise BlockingIOError(errno.EAGAIN, f"nothing was read for {PATIENCE:g} s")
                with suppress(BlockingIOError):  # less room than select promises
                    rest = rest[os.write(descriptor, rest) :]
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
        """Write no more, and empty the buffer: the interpreter would write it as it ends, and exit with code 120."""
        self.failure = error
        with suppress(OSError):  # no file: then nothing is written at the end
            descriptor = self._stream.fileno()
            kept = os.dup(descriptor)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            try:
                self._stream.flush()
            finally:
                os.dup2(kept, descriptor)
                os.close(kept)
                os.close(null)


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


def warn_if_slow(what: str, after: float = SLOW) -> AbstractContextManager[None]:
    """Report on stderr what the command is doing, if the block takes longer than ``after`` seconds."""
    return call_if_slow(after, lambda: sys.stderr.write(f"taut: {what}\n"))


@contextmanager
def call_if_slow(after: float, act: Callable[[], object]) -> Iterator[None]:
    """Call ``act`` in a thread if the block takes longer than ``after`` seconds."""
    timer = threading.Timer(after, act)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def print_line(line: str) -> None:
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
    # torchrun's folder of the attempt, which all ranks of the host have: the first file wins
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
    """Escape control characters and the ends of lines."""
    return escaped(text).replace("\n", "\\n")


def counted(number: int, nouns: str) -> str:
    """``counted(1, "rows")`` is ``1 row``. ``nouns`` is a plural that ends in s."""
    return f"{number:,} {nouns.removesuffix('s') if number == 1 else nouns}"
