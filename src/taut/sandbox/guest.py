"""Inside the jail: run one program against its tests, each in a process of its own under limits.

``run`` is called by a process that never executes what the model wrote: it forks a child for each test, feeds its
standard input, collects what it prints, watches the clock, and afterwards kills whatever the child left behind. In a
pid namespace this process is number 1, so ``kill(-1)`` reaches everything, whatever sessions it fled to; without one
the child cannot fork.

A test is {"stdin", "call", "arguments", "check"}:

    stdin               the program runs as ``__main__`` and reads this
    call, arguments     the program is imported, ``call(*arguments)`` is called (of ``Solution()`` where that has it),
                        and its value goes out as JSON: what is right is compared outside, where the program cannot look
    check               the program is imported, then this code is run in its names: asserts

A call or a check counts as done only if its end was reached: ``sys.exit(0)`` in the program does not pass. A check
lives in the program's own process, so a program made to cheat (an object equal to everything, a report of its own that
the end was reached) can; a stdin or a call test has nothing there to cheat.

Runs under ``python -s -S -P``, alone of our package: imports its neighbours and the standard library only.
``jail`` imports it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import linecache
import os
import resource
import select
import signal
import site
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

NAME = "program.py"
_CHUNK = 65536
_OUTPUTS = 16
"""All tests of a program together may print so many times what one may."""
_SHOWN = 30
"""Frames of a traceback, the innermost."""
_MEMORY = b"memory"
_DONE = b"done "


def run(request: Mapping[str, Any], confine: Callable[[], None], is_first: bool) -> list[Any]:
    """What became of each test: [outcome, stdout, stderr, seconds, value]. ``is_first``: we are process 1."""
    end = time.monotonic() + request["limits"]["total_seconds"]
    results: list[Any] = []
    for test in request["tests"]:
        left = end - time.monotonic()
        printed = sum(len(stdout) + len(stderr) for _, stdout, stderr, *_ in results)
        is_too_much = printed > _OUTPUTS * 1024 * request["limits"]["output_kb"]
        stopped = (
            left <= 0
            or is_too_much
            or (request["stop_early"] and results and results[-1][0] != "ok")
        )
        if stopped:
            results.append(["not_run", "", "", 0.0, None])
        else:
            results.append(_Run(request, test, left).result(confine, is_first))
    return results


class _Run:
    """One test."""

    def __init__(self, request: Mapping[str, Any], test: Mapping[str, Any], left: float) -> None:
        self.request = request
        self.test = test
        self.limits = request["limits"]
        self.seconds = min(self.limits["wall_seconds"], left)
        self.printed = {name: bytearray() for name in ("stdout", "stderr", "report")}
        self.reason = ""

    def result(self, confine: Callable[[], None], is_first: bool) -> list[Any]:
        """Fork, watch, kill, and say what happened."""
        pipes = {name: os.pipe() for name in ("stdin", *self.printed)}
        start = time.monotonic()
        child = os.fork()
        if child == 0:
            _child(self.request, self.test, pipes, confine)
        os.close(pipes["stdin"][0])
        for name in self.printed:
            os.close(pipes[name][1])
        self._watch(child, pipes, start + self.seconds)
        os.kill(child, signal.SIGKILL)  # not yet waited for: the number is still its own
        _, status, used = os.wait4(child, 0)
        if is_first:
            _kill_everything()
        self._drain(pipes)
        seconds = time.monotonic() - start
        outcome = self.reason or self._outcome(status, used.ru_utime + used.ru_stime)
        texts = [bytes(self.printed[name]).decode(errors="replace") for name in self.printed]
        value = texts[2][len(_DONE) :] if outcome == "ok" and self.test["call"] else None
        return [outcome, *texts[:2], seconds, value]

    def _watch(self, child: int, pipes: dict[str, tuple[int, int]], end: float) -> None:
        """Until the child ends, prints too much or is out of time."""
        ended = os.pidfd_open(child)
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        names = {pipes[name][0]: name for name in self.printed}
        for reader in names:
            os.set_blocking(reader, False)
            poll.register(reader, select.POLLIN)
        feed, unfed = pipes["stdin"][1], memoryview(self.test["stdin"].encode())
        os.set_blocking(feed, False)
        poll.register(feed, select.POLLOUT)
        while not self.reason:
            left = end - time.monotonic()
            ready = [descriptor for descriptor, _ in poll.poll(max(left, 0) * 1000)]
            if not ready and left <= 0:
                self.reason = "time"
            if feed in ready:
                unfed = _fed(feed, unfed)
                if not unfed:
                    poll.unregister(feed)
                    os.close(feed)
                    feed = -1
            for reader in set(ready) & names.keys():
                if not self._read(reader, names[reader]):
                    poll.unregister(reader)
            if ended in ready:
                break
        os.close(ended)
        if feed >= 0:
            os.close(feed)

    def _read(self, reader: int, name: str) -> bool:
        """Take what is there; False at its end."""
        try:
            chunk = os.read(reader, _CHUNK)
        except BlockingIOError:
            return True
        room = self.limits["output_kb"] * 1024 - sum(map(len, self.printed.values()))
        self.printed[name] += chunk[:room]
        if len(chunk) > room:
            self.reason = self.reason or "output"
        return bool(chunk)

    def _drain(self, pipes: dict[str, tuple[int, int]]) -> None:
        """What was printed last: nobody is left to write."""
        for name in self.printed:
            reader = pipes[name][0]
            while select.select([reader], [], [], 0)[0] and self._read(reader, name):
                if self.reason == "output":
                    break
            os.close(reader)

    def _outcome(self, status: int, cpu_seconds: float) -> str:
        report = bytes(self.printed["report"])
        if os.WIFSIGNALED(status):
            is_cpu = (
                os.WTERMSIG(status) == signal.SIGXCPU or cpu_seconds >= self.limits["cpu_seconds"]
            )
            return "cpu" if is_cpu else "crash"
        if report == _MEMORY:
            return "memory"
        is_done = report.startswith(_DONE) or not (self.test["call"] or self.test["check"])
        return "ok" if os.WEXITSTATUS(status) == 0 and is_done else "error"


def _fed(feed: int, unfed: memoryview) -> memoryview:
    """What is left to write; nothing where nobody reads."""
    try:
        return unfed[os.write(feed, unfed[:_CHUNK]) :]
    except BrokenPipeError:
        return unfed[:0]


def _kill_everything() -> None:
    """As process 1: kill all others of the namespace, and wait until there are none."""
    while True:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _child(
    request: Mapping[str, Any],
    test: Mapping[str, Any],
    pipes: dict[str, tuple[int, int]],
    confine: Callable[[], None],
) -> NoReturn:
    """The process that executes the program; it never returns."""
    code = 70
    try:
        os.setsid()  # 0 as the target of a signal is the program's own group, not the server's
        report = pipes["report"][1]
        for target, (name, end) in enumerate((("stdin", 0), ("stdout", 1), ("stderr", 1))):
            os.dup2(pipes[name][end], target)
        os.dup2(report, 3)
        os.closerange(4, 65536)
        _limit(request["limits"])
        confine()
        code = _execute(request["program"], test)
    finally:
        os._exit(code)


def _limit(limits: Mapping[str, Any]) -> None:
    cpu, mega = limits["cpu_seconds"], 2**20
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_AS, limits["memory_mb"] * mega, limits["memory_mb"] * mega),
        (resource.RLIMIT_FSIZE, limits["scratch_mb"] * mega, limits["scratch_mb"] * mega),
        (resource.RLIMIT_NPROC, limits["processes"], limits["processes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"], limits["open_files"]),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
    ):
        resource.setrlimit(kind, (soft, hard))


def _execute(program: str, test: Mapping[str, Any]) -> int:
    """Run the program and its test here, then what is due at an interpreter's end; the exit code."""
    is_main = not (test["call"] or test["check"])
    module = types.ModuleType("__main__" if is_main else "program")
    module.__file__ = NAME
    sys.modules[module.__name__] = module
    sys.argv = [NAME]
    linecache.cache[NAME] = (len(program), None, program.splitlines(keepends=True), NAME)
    site.setquit()  # exit() and quit(), which -S leaves out
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
        _write_all(3, _DONE + reports[0].encode())
    return code


def _end() -> None:
    """As an interpreter's, however the program ended: wait for its threads, call what it left for then, flush."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()


def _called(module: types.ModuleType, test: Mapping[str, Any]) -> str:
    """The value of the function, as JSON."""
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
        os.write(3, _MEMORY)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace, limit=-_SHOWN)
