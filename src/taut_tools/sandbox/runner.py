"""Run the trials of one program inside the jail, each in a child of its own. This process does nothing else.

It is started ahead, used for one program and thrown away. It handles descriptors and numbers only: the host sends the
pipes of a trial, and their content (the program, its test, its output) does not pass through this process. So the child
that executes a program is a copy of a process that has seen no program, no test and no answer before.

The host (``jail.py``) sends messages on standard input, a socket that keeps their bounds:

    begin    the settings, and a pidfd of the host. Answer: "ready", or "error" and the reason
    run      the child's standard streams and two pipes for its reports. Answer, when no process of the child is left:
             its wait status and its seconds of processor time, as text; or "error" and the reason
    kill     end the trial now

The end of the messages, or of the host, ends this process and everything in the jail.

In gVisor's jail only ``once`` is called: one trial, no messages.

The child reads a frame from its standard input: eight bytes of length, then a mapping of program, limits, call,
arguments and check. The bytes after the frame are the program's own input.

    no call or check    the program runs as ``__main__``
    call, arguments     the program is imported, ``call(*arguments)`` is called (of ``Solution()`` if that has it), and
                        its value goes out as JSON: it is compared outside, where the program cannot see the right one
    check               the program is imported, then this code with asserts runs in its namespace

A call or a check counts as done only if its end was reached: ``sys.exit(0)`` in the program does not pass. A check
lives in the program's own process, so a program that is made to cheat can: by an object equal to everything, or by its
own report that the end was reached. A stdin or a call test has nothing there to cheat.

Runs under ``python -s -S -P`` without the rest of taut, and imports ``kernel`` and the standard library only. A process
is started for each program, so it imports as little as possible: messages of the host are marshalled, not JSON.
``launch`` has the command line that starts it.
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

from taut_tools.sandbox import kernel

TYPE_CHECKING = False  # as in ``typing``, which is not imported
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType
    from typing import Any, NoReturn

NAME = "program.py"
SCRATCH = "/tmp"
"""The program's own folder, in place of the host's."""
STREAMS = ("stdin", "stdout", "stderr", "report", "begun")
"""The child's descriptors 0 to 4; the last is closed before the program begins."""
_REPORT, _BEGUN = 3, 4
READY = b"ready"
MEMORY = b"memory"
DONE = b"done "
"""Reports of a child: READY on ``begun`` before the program begins; then MEMORY if memory ran out, or DONE and the
value if the end was reached."""
_SHOWN = 30
"""Maximum frames of a traceback, the innermost."""


def serve() -> None:
    """Serve the host's messages about one program until they end."""
    # Give every signal its default, whatever the process that started taut ignored or blocked. Not those that Python
    # ignores so that writes raise. As process 1 this one ignores signals of a program that have their default.
    kept = {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}
    for number in signal.valid_signals() - kept:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # Set up, before there is a program.
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
    # Run trials.
    while True:
        ready = _poll(control.fileno(), host)
        if host in ready:
            return
        message, streams = _receive(control)
        if not message:
            return
        if message == b"run":
            _run(control, host, begin, streams)


def once() -> None:
    """Run one trial in this process, in a jail that ends with it. Its streams are open already."""
    os.write(_BEGUN, READY)
    request = _request()
    kernel.never_gain()
    kernel.allow_only(bytes.fromhex(request["calls"]))
    _begin()
    os._exit(_execute(request["program"], request))


def _begin() -> None:
    """Report that the limits apply, on a pipe that the program never has."""
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
        except OSError:  # a container with 65,536 users
            user = 20000 + user % 40000
            os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    kernel.drop_capabilities()
    kernel.never_gain()
    os.chdir(SCRATCH if begin["has_namespaces"] else "/")


def _run(
    control: _socket.socket, host: int, begin: Mapping[str, Any], streams: tuple[int, ...]
) -> None:
    """Run one trial, and answer when the child and all its processes are dead."""
    parent = os.getpid()
    try:
        child = os.fork()
    except OSError as error:  # the machine has no more processes, which is not the program's fault
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
        # As process 1, kill all others of the namespace, and wait until there are none.
        while True:
            try:  # noqa: SIM105 (contextlib is not imported for this)
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                pass
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                break
    if not is_wanted:
        os._exit(0)
    try:  # noqa: SIM105
        control.send(f"{status} {used.ru_utime + used.ru_stime}".encode())
    except BrokenPipeError:
        pass  # the host has just gone: the next message is the end


def _poll(*descriptors: int) -> list[int]:
    """Wait until a descriptor can be read; all that can."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll()]


def _receive(control: _socket.socket) -> tuple[bytes, tuple[int, ...]]:
    """Receive a message and the descriptors with it; no bytes at the end of the messages."""
    try:
        message, others, *_ = control.recvmsg(1 << 16, _socket.CMSG_SPACE(4 * len(STREAMS)))
    except ConnectionResetError:
        return b"", ()
    received = b"".join(data for *_, data in others)
    return message, tuple(memoryview(received).cast("i"))


def _child(begin: Mapping[str, Any], streams: tuple[int, ...], parent: int) -> NoReturn:
    """Execute the program in this process, and never return."""
    code = 70
    try:
        os.setsid()  # 0 as the target of a signal is the program's own group
        for target, stream in enumerate(streams):
            os.dup2(stream, target)
        os.closerange(len(STREAMS), 65536)
        # Confine this process. Landlock opens files, so it comes before their limit.
        if not begin["has_namespaces"]:
            kernel.die_with_parent()
            if os.getppid() != parent:
                os._exit(70)
            kernel.landlock(begin["readable"], kernel.DEVICES)
        request = _request()
        kernel.allow_only(bytes.fromhex(begin["calls"]))
        _begin()
        code = _execute(request["program"], request)
    except Exception as error:  # noqa: BLE001 (before the program: the host raises it)
        os.write(2, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(code)


def _request() -> dict[str, Any]:
    """Read the frame with the program and its test, and apply its limits."""
    request: dict[str, Any] = marshal.loads(_read(int.from_bytes(_read(8), "big")))
    _limit(request["limits"])
    return request


def _read(size: int) -> bytes:
    """Read exactly ``size`` bytes of standard input, past Python's buffer."""
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
        most = resource.getrlimit(kind)[1]  # the limit of the user who started taut
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(kind, (soft, hard))


class _Source:
    """A loader that gives the program's text to tracebacks and ``inspect``."""

    def __init__(self, program: str) -> None:
        self._program = program

    def get_source(self, name: str) -> str:
        return self._program


def _execute(program: str, test: Mapping[str, Any]) -> int:
    """Run the program and its test here, then do what an interpreter does at its end; the exit code."""
    is_main = not (test["call"] or test["check"])
    module = type(sys)("__main__" if is_main else "program")
    module.__file__ = NAME
    module.__loader__ = _Source(program)  # type: ignore[assignment]
    sys.modules[module.__name__] = module
    sys.argv = [NAME]
    for name in ("exit", "quit"):  # which -S leaves out
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    code, reports = 0, []
    run, build = exec, compile  # a program may replace them

    def main() -> None:
        run(build(program, NAME, "exec"), module.__dict__)
        if test["check"]:
            run(build(test["check"], "test.py", "exec"), module.__dict__)
        reports.append(_called(module, test) if test["call"] else "")

    for part in (main, _end):
        try:
            part()
        except SystemExit as exit_:
            code = code or _exit_code(exit_.code)
        except BaseException as error:  # noqa: BLE001 (the program may raise anything; it is printed)
            code = 1
            if isinstance(error, MemoryError):
                os.write(_REPORT, MEMORY)
            import traceback

            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
                trace = trace.tb_next  # without our own frames
            traceback.print_exception(type(error), error, trace, limit=-_SHOWN)
    if reports and not (is_main or code):
        text = DONE + reports[0].encode()
        while text:
            text = text[os.write(_REPORT, text) :]
    return code


def _end() -> None:
    """End as an interpreter does, however the program ended: wait for threads, call exit functions, flush."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    if "atexit" in sys.modules:
        sys.modules["atexit"]._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()


def _called(module: ModuleType, test: Mapping[str, Any]) -> str:
    """Call the function of the test; its value as JSON."""
    import json

    owner = vars(module)
    if test["call"] not in owner and "Solution" in owner:
        function = getattr(owner["Solution"](), test["call"])
    else:
        function = owner[test["call"]]
    return json.dumps(function(*json.loads(test["arguments"])))


def _exit_code(code: object) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1
