"""Inside the wall: a process that runs the trials of one program, each in a child of its own, and nothing else.

It is started ahead, used for one program and thrown away. It handles descriptors and numbers only: the pipes of a trial
come from the host, and what goes through them, the program, its test and its output, passes this process by. So the
child that executes a program is a copy of a process that has seen no program, no test and no answer before.

The host (``jail.py``) sends messages on standard input, a socket that keeps their bounds:

    begin    what there is to set up, and with it a pidfd of the host. Answer: "ready", or "error" and why
    run      with it the child's standard streams and two for its reports. Answer, when nothing that the child
             started is left: its wait status and its seconds of processor time, as text; or "error" and why
    kill     end the trial now

The end of the messages, or of the host, ends this process and everything behind the wall.

Where the wall is gVisor's, ``once`` is all of it: one trial, no messages.

The child reads a frame from its standard input, eight bytes of length and then a mapping of program, limits, call,
arguments and check; what follows it is the program's to read.

    no call or check    the program runs as ``__main__``
    call, arguments     the program is imported, ``call(*arguments)`` is called (of ``Solution()`` where that has it),
                        and its value goes out as JSON: what is right is compared outside, where the program cannot look
    check               the program is imported, then this code is run in its names: asserts

A call or a check counts as done only if its end was reached: ``sys.exit(0)`` in the program does not pass. A check
lives in the program's own process, so a program made to cheat (an object equal to everything, a report of its own that
the end was reached) can; a stdin or a call test has nothing there to cheat.

Runs under ``python -s -S -P`` without the rest of taut: imports ``kernel`` and the standard library only, and of that
as little as it can, for a process is started for each program: what comes from the host is marshalled, not JSON.
``walls`` has the command line that starts it.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # without enum
import _sitebuiltins
import _socket
import builtins
import marshal
import os
import resource
import select
import sys

from taut.sandbox import kernel

TYPE_CHECKING = False  # what ``typing`` has under this name, without importing it
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType
    from typing import Any, NoReturn

NAME = "program.py"
SCRATCH = "/tmp"
"""The program's own folder; the host's is not in there."""
STREAMS = ("stdin", "stdout", "stderr", "report", "begun")
"""The child's descriptors 0 to 4; the last is closed before the program begins."""
_REPORT, _BEGUN = 3, 4
READY = b"ready"
MEMORY = b"memory"
DONE = b"done "
"""What a child reports: that the program is about to begin (``begun``); that memory ran out, or that the end was
reached, and the value."""
_SHOWN = 30
"""Frames of a traceback, the innermost."""


def serve() -> None:
    """Hold one program until the host lets go of it."""
    _reset_signals()
    os.umask(0o022)
    control = _socket.socket(fileno=os.dup(0))
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    message, received = _receive(control)
    if not message:
        return
    host, begin = received[0], marshal.loads(message)
    try:
        _set_up(begin)
    except OSError as error:
        control.send(f"error {error}".encode())
        return
    control.send(READY)
    while True:
        ready = _poll(control.fileno(), host)
        if host in ready:
            return
        message, streams = _receive(control)
        if not message:
            return
        if message == b"run":
            _run(control, host, begin, streams)


def _reset_signals() -> None:
    """Programs have the same whatever the process that started taut ignored or blocked.

    Process 1 ignores what has its default, whatever a program sends it.
    """
    # Python itself ignores SIGPIPE and SIGXFSZ, so that writes raise.
    kept = {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}
    for number in signal.valid_signals() - kept:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def once() -> None:
    """Run one trial in this process, behind a wall that ends with it: its streams are here already."""
    os.write(_BEGUN, READY)
    request = _request()
    kernel.never_gain()
    kernel.allow_only(bytes.fromhex(request["calls"]))
    _begin()
    os._exit(_execute(request["program"], request))


def _begin() -> None:
    """Report that the limits apply, where the program cannot say it, or take it back."""
    os.write(_BEGUN, READY)
    os.close(_BEGUN)


def _set_up(begin: Mapping[str, Any]) -> None:
    """Bound the scratch folder, become a user ID that no account has, give up every capability."""
    if begin["has_namespaces"]:
        kernel.limit_scratch(SCRATCH, begin["scratch_mb"], begin["scratch_files"])
        for device in kernel.DEVICES:
            kernel.keep_attributes(device)
    for name in begin["modules"]:
        __import__(name)
    user = begin["user"]
    if user:
        os.setgroups([])
        try:
            os.setresgid(user, user, user)
        except OSError:  # a container that has 65,536 users
            user = 20000 + user % 40000
            os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    kernel.drop_capabilities()
    kernel.never_gain()
    os.chdir(SCRATCH if begin["has_namespaces"] else "/")


def _run(
    control: _socket.socket, host: int, begin: Mapping[str, Any], streams: tuple[int, ...]
) -> None:
    """One trial: answers when the child and all that it started are dead."""
    parent = os.getpid()
    try:
        child = os.fork()
    except OSError as error:  # the machine has no more processes: not the program's fault
        control.send(f"error {error}".encode())
        return
    if child == 0:
        control.detach()
        _child(begin, streams, parent)
    for stream in streams:
        os.close(stream)
    ended = os.pidfd_open(child)
    ready = _poll(ended, control.fileno(), host)
    is_wanted = ended in ready or (host not in ready and _receive(control)[0] != b"")
    os.close(ended)
    os.kill(child, signal.SIGKILL)  # not yet waited for: the number is still its own
    _, status, used = os.wait4(child, 0)
    if begin["has_namespaces"]:
        _kill_everything()
    if not is_wanted:
        os._exit(0)
    try:  # noqa: SIM105 (contextlib is not imported for this)
        control.send(f"{status} {used.ru_utime + used.ru_stime}".encode())
    except BrokenPipeError:
        pass  # the host has just gone: the next message is the end


def _kill_everything() -> None:
    """As process 1: kill all others of the namespace, and wait until there are none."""
    while True:
        try:  # noqa: SIM105
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _poll(*descriptors: int) -> list[int]:
    """Those that can be read, when one can."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll()]


def _receive(control: _socket.socket) -> tuple[bytes, tuple[int, ...]]:
    """A message and the descriptors that come with it; no bytes at the end of the messages."""
    try:
        message, others, *_ = control.recvmsg(1 << 16, _socket.CMSG_SPACE(4 * len(STREAMS)))
    except ConnectionResetError:
        return b"", ()
    received = b"".join(data for *_, data in others)
    return message, tuple(memoryview(received).cast("i"))


def _child(begin: Mapping[str, Any], streams: tuple[int, ...], parent: int) -> NoReturn:
    """The process that executes the program; it never returns."""
    code = 70
    try:
        os.setsid()  # 0 as the target of a signal is the program's own group
        for target, stream in enumerate(streams):
            os.dup2(stream, target)
        os.closerange(len(STREAMS), 65536)
        code = _confined_and_executed(begin, parent)
    except Exception as error:  # noqa: BLE001 (before the program: the host raises it)
        os.write(2, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(code)


def _confined_and_executed(begin: Mapping[str, Any], parent: int) -> int:
    if not begin["has_namespaces"]:
        kernel.die_with_parent()
        if os.getppid() != parent:
            os._exit(70)
        kernel.landlock(begin["readable"], kernel.DEVICES)  # opens files: before their limit
    request = _request()
    kernel.allow_only(bytes.fromhex(begin["calls"]))
    _begin()
    return _execute(request["program"], request)


def _request() -> dict[str, Any]:
    """What to execute, with its limits applied."""
    request: dict[str, Any] = marshal.loads(_read(int.from_bytes(_read(8), "big")))
    _limit(request["limits"])
    return request


def _read(size: int) -> bytes:
    """Exactly so many bytes of standard input, past Python's buffer."""
    chunks = []
    while size:
        chunk = os.read(0, min(size, 1 << 20))
        if not chunk:
            os._exit(70)
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def _limit(limits: Mapping[str, Any]) -> None:
    cpu, mega = limits["cpu_seconds"], 2**20
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_AS, limits["memory_mb"] * mega, limits["memory_mb"] * mega),
        (resource.RLIMIT_FSIZE, limits["scratch_mb"] * mega, limits["scratch_mb"] * mega),
        (resource.RLIMIT_NPROC, limits["processes"], limits["processes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"], limits["open_files"]),
        (resource.RLIMIT_SIGPENDING, limits["open_files"], limits["open_files"]),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
    ):
        most = resource.getrlimit(kind)[1]  # of the user who started taut
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(kind, (soft, hard))


class _Source:
    """A loader, of which tracebacks and ``inspect`` ask the program's text."""

    def __init__(self, program: str) -> None:
        self._program = program

    def get_source(self, name: str) -> str:
        return self._program


def _execute(program: str, test: Mapping[str, Any]) -> int:
    """Run the program and its test here, then what is due at an interpreter's end; the exit code."""
    is_main = not (test["call"] or test["check"])
    module = type(sys)("__main__" if is_main else "program")
    module.__file__ = NAME
    module.__loader__ = _Source(program)  # type: ignore[assignment]
    sys.modules[module.__name__] = module
    sys.argv = [NAME]
    for name in ("exit", "quit"):  # which -S leaves out
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    code, reports = 0, []

    def main() -> None:
        exec(compile(program, NAME, "exec"), module.__dict__)
        if test["check"]:
            exec(compile(test["check"], "test.py", "exec"), module.__dict__)
        reports.append(_called(module, test) if test["call"] else "")

    for part in (main, _end):
        try:
            part()
        except SystemExit as exit_:
            code = code or _exit_code(exit_.code)
        except BaseException as error:  # noqa: BLE001 (the model's code may raise anything: it is told)
            code = 1
            _tell(error)
    if reports and not (is_main or code):
        _write_all(_REPORT, DONE + reports[0].encode())
    return code


def _end() -> None:
    """As an interpreter's, however the program ended: wait for its threads, call what it left for then, flush."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    if "atexit" in sys.modules:
        sys.modules["atexit"]._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()


def _called(module: ModuleType, test: Mapping[str, Any]) -> str:
    """The value of the function, as JSON."""
    import json

    owner = vars(module)
    if test["call"] not in owner and "Solution" in owner:
        function = getattr(owner["Solution"](), test["call"])
    else:
        function = owner[test["call"]]
    return json.dumps(function(*json.loads(test["arguments"])))


def _write_all(descriptor: int, text: bytes) -> None:
    while text:
        text = text[os.write(descriptor, text) :]


def _exit_code(code: object) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def _tell(error: BaseException) -> None:
    """The traceback without our own frames; a lack of memory is reported apart."""
    if isinstance(error, MemoryError):
        os.write(_REPORT, MEMORY)
    import traceback

    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace, limit=-_SHOWN)
