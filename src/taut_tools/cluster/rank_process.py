"""A rank as a process of its own: ``taut METHOD ... resume=true`` as torchrun would start it.

    process = RankProcess(words, environment, directory, say)      OSError: the system starts none
    process.signal(signal.SIGTERM)
    process.wait()                                                 the exit code, negative for a signal

Its lines are handed on as they come. A rank ends with the process that started it, however that ends: the kernel then
closes its leash (taut/io/worker_process.py). A rank has a session of its own, so that a Ctrl-C in a terminal reaches
the launcher alone, which decides who else gets it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from signal import SIGKILL
from threading import Thread
from typing import IO, Literal

Stream = Literal["stdout", "stderr"]
Say = Callable[[Stream, str], None]
UNBLOCKED = "import signal; signal.pthread_sigmask(signal.SIG_SETMASK, []); "
"""A child inherits the signals that a thread of its parent has blocked, and Ray's workers block SIGINT."""
PROGRAM = (
    "from taut.io.worker_process import end_with_parent; end_with_parent({}); import taut.__main__"
)


class RankProcess:
    """One rank, from its start."""

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        directory: str,
        say: Say,
        program: str | None = None,
    ) -> None:
        """Start the rank. ``program`` is Python source, by default taut's, with ``{}`` for the descriptor of its
        leash.
        """
        held, self._leash = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", UNBLOCKED + (program or PROGRAM).format(held), *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env={**os.environ, **environment, "PYTHONUNBUFFERED": "1"},
                cwd=directory,
                pass_fds=[held],
                start_new_session=True,
            )
        except OSError:
            os.close(self._leash)
            raise
        finally:
            os.close(held)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        streams: list[tuple[Stream, IO[str]]] = [
            ("stdout", self._process.stdout),
            ("stderr", self._process.stderr),
        ]
        self._readers = [Thread(target=_hand_on, args=(*of, say), daemon=True) for of in streams]
        for reader in self._readers:
            reader.start()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal to the rank alone, which ends its own children."""
        self._process.send_signal(number)

    def wait(self) -> int:
        """Wait until the rank has ended and all its lines are handed on; its exit code."""
        code = self._process.wait()
        with suppress(ProcessLookupError):  # children that it left
            os.killpg(self._process.pid, SIGKILL)
        for reader in self._readers:
            reader.join()
        os.close(self._leash)
        return code


def _hand_on(name: Stream, stream: IO[str], say: Say) -> None:
    with stream:
        for line in stream:
            say(name, line)
