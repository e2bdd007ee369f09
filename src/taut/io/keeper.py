"""The parent of a program that the user names (an agent, an MCP server, a worker with rewards): it ends all that the
program started, whatever session it is in, when the program has ended or taut has.

    command = kept(["python", "agent.py"], leash)       what to start in place of the program
    tree(pid)                                           a process and all that descends from it
    end_tree(pid)                                       end them

A keeper is a Python of its own that runs this file. It adopts what the program's processes leave behind
(PR_SET_CHILD_SUBREAPER), so all of it descends from the keeper. It waits for the end of the program, or for that of its
leash: a pipe whose other end only taut holds, which the kernel closes even where taut is killed. Then it kills what is
left, and ends as the program did.

``is_apart``: the program sees no processes in /proc but those that it starts, and signals no others (Landlock, from
Linux 6.12, and a /proc in its own mounts; only for root, who gives up no rights for it and can undo it). Elsewhere a
program can kill its keeper, and what it started in a session of its own then outlives it. Without /proc (macOS) only
the program's own session is ended.

Imports the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Sequence

CANNOT_START = 127
"""Exit code where the program cannot be started, as a shell has it."""
PATIENCE = 5.0
"""Seconds in which processes that were killed have ended."""
HAS_PROC = sys.platform == "linux"
_SUBREAPER, _DUMPABLE, _PDEATHSIG = 36, 4, 1
_NEWNS, _PRIVATE, _PLAIN = 0x20000, 0x4000 | 0x40000, 2 | 4 | 8
_CREATE_RULESET, _RESTRICT_SELF, _SIGNALS = 444, 446, 2


def kept(
    command: Sequence[str],
    leash: int,
    *,
    grace: float = 0.0,
    longest: int = 0,
    is_apart: bool = False,
) -> list[str]:
    """The command line of a keeper of ``command``, to be started in a session of its own.

    ``leash``: a descriptor that it inherits. ``grace``: seconds that the program has to end by itself once the leash
    is closed. ``longest``: bytes of the longest line of its output, which the keeper then passes on; a program with a
    longer one is ended.
    """
    settings = leash, grace, longest, int(is_apart)
    return [sys.executable, "-I", "-S", __file__, *map(str, settings), *command]


def tree(root: int) -> list[int]:
    """``root`` and all processes that descend from it; ``root`` alone where the system has no /proc."""
    children: dict[int, list[int]] = {}
    names = os.listdir("/proc") if HAS_PROC else []  # noqa: PTH208 (a Path of each is slow)
    for name in filter(str.isdecimal, names):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
            state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state != b"Z":
                children.setdefault(int(parent), []).append(int(name))
    found = [root]
    for process in found:
        found += children.get(process, ())
    return found


def end_tree(root: int) -> None:
    """Kill what descends from a process, and then the process itself."""
    end = time.monotonic() + PATIENCE
    while (below := tree(root)[1:]) and time.monotonic() < end:
        _kill(below)
        time.sleep(0.002)
    _kill([root])


def _kill(processes: Sequence[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)


def main(leash: int, grace: float, longest: int, is_apart: int, *command: str) -> None:
    """Keep ``command``; see ``kept``."""
    # be the parent of all that the program leaves behind
    libc = ctypes.CDLL(None, use_errno=True)
    if HAS_PROC:
        libc.prctl(_DUMPABLE, 0, 0, 0, 0)  # its environment and descriptors are the program's
        libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    wake, awake = os.pipe()
    os.set_blocking(awake, False)
    signal.set_wakeup_fd(awake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # start the program
    output, childs_output = os.pipe() if longest else (-1, 1)
    program = os.fork()
    if program == 0:
        _become(libc, command, childs_output, is_apart=bool(is_apart))
    # wait for its end, that of taut, or a line that is too long
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    poll.register(leash, 0)  # its end is told in any case
    if longest:
        poll.register(output, select.POLLIN)
    for number in map(int, os.listdir("/dev/fd")):  # noqa: PTH208
        if number > 2 and number not in (leash, wake, awake, output):  # the program's
            with contextlib.suppress(OSError):
                os.close(number)
    status, in_line, end = None, 0, math.inf
    while status is None and time.monotonic() < end and in_line <= longest:
        for descriptor, _ in poll.poll(None if end == math.inf else 1000 * grace):
            if descriptor == output:
                in_line = _pass_on(output, in_line)
            elif descriptor == wake:
                os.read(wake, 4096)
            else:
                end = time.monotonic() + grace
            if descriptor == leash or in_line < 0:
                poll.unregister(descriptor)
                in_line = max(in_line, 0)
        status = _reap(program)
    # end what is left of it
    if in_line > longest:
        os.write(2, f"\nit was ended: a line of its output has over {longest:,} bytes\n".encode())
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        _kill(tree(os.getpid())[1:] if HAS_PROC else [-program])
        try:
            status = _reap(program) if status is None else status
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        time.sleep(0.001)
    # pass on the rest of the output, and end as the program did
    while longest and 0 <= in_line <= longest and select.select([output], [], [], 0)[0]:
        in_line = _pass_on(output, in_line)
    status = status or 0
    if os.WIFSIGNALED(status):
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def _reap(program: int) -> int | None:
    """Wait for what has ended; how the program ended, if it did."""
    with contextlib.suppress(ChildProcessError):
        while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
            if reaped[0] == program:
                return reaped[1]
    return None


def _pass_on(output: int, in_line: int) -> int:
    """Pass on what a program printed; how much of its line that is not ended; -1 at the end of the output."""
    chunk = os.read(output, 65536)
    in_line = len(chunk) - chunk.rfind(b"\n") - 1 if b"\n" in chunk else in_line + len(chunk)
    is_over = not chunk
    try:
        while chunk:
            chunk = chunk[os.write(1, chunk) :]
    except BrokenPipeError:  # nobody reads it
        return -1
    return -1 if is_over else in_line


def _become(libc: ctypes.CDLL, command: Sequence[str], output: int, *, is_apart: bool) -> None:
    """Become the program, in the child process."""

    def require(result: int, what: str) -> None:
        if result:
            raise OSError(ctypes.get_errno(), f"{what} ({os.strerror(ctypes.get_errno())})")

    # a session, an output and signals of its own
    os.setsid()
    os.dup2(output, 1)
    for caught in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(caught, signal.SIG_DFL)
    try:
        if is_apart:
            require(libc.unshare(_NEWNS), "no mounts of its own")
            private = ctypes.c_ulong(_PRIVATE)
            require(libc.mount(None, b"/", None, private, None), "mounts are shared")
            plain, hidden = ctypes.c_ulong(_PLAIN), b"hidepid=4"
            require(libc.mount(b"proc", b"/proc", b"proc", plain, hidden), "no /proc of its own")
            # signals reach nothing outside of it
            rules = libc.syscall(_CREATE_RULESET, struct.pack("=QQQ", 0, 0, _SIGNALS), 24, 0)
            require(
                min(rules, 0) or libc.syscall(_RESTRICT_SELF, rules, 0), "no Landlock of signals"
            )
        os.execvp(command[0], [*command])
    except OSError as error:
        os.write(2, f"{command[0]} cannot be started: {error.strerror}\n".encode())
    os._exit(CANNOT_START)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
