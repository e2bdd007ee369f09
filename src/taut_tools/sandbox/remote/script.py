"""Run one trial of a program on the machine of a service, in a process of its own under limits.

This file's text is sent with each trial. ``BOOTSTRAP`` is the program that the service starts; it reads the job as JSON
from standard input and calls ``drive``. ``drive`` starts a second Python, which calls ``execute``, and that runs the
program and its trial. Standard output of the first Python has two lines of ours, each after the job's random ``nonce``,
which the program does not know:

    nonce started
    nonce [outcome, stdout, stderr, seconds, value]      texts in base64; as ``limits.Ran`` has them

Trials are as in ``runner.py``: a script reads standard input; a call's value is printed as JSON and compared by the
caller; a check is code that runs in the program's namespace.

Standard library only, Python 3.9 or later; imports nothing of ours.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import json
import linecache
import os
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types

NAME = "program.py"
OURS = "trial-script"
"""Name under which this text is compiled, so that tracebacks can leave its frames out."""
CHUNK = 65536
SHOWN = 30
"""Maximum frames of a traceback, the innermost."""
MEMORY = b"memory"
DONE = b"done "
BOOTSTRAP = f"""
import json, sys
job = json.loads(sys.stdin.read())
names = {{"__name__": "trial"}}
exec(compile(job["source"], {OURS!r}, "exec"), names)
names["drive"](job)
"""
INNER = f"""
import json, os, sys
sys.path[:] = filter(None, sys.path)
with open(int(sys.argv[1]), "rb") as file:
    job = json.load(file)
names = {{"__name__": "trial"}}
exec(compile(job.pop("source"), {OURS!r}, "exec"), names)
os._exit(names["execute"](job, int(sys.argv[2])))
"""


def drive(job: dict) -> None:  # type: ignore[type-arg]
    """Run the trial in another process and print its result."""
    nonce = job.pop("nonce")
    _say(f"{nonce} started")
    folder = tempfile.mkdtemp(prefix="program-")
    try:
        outcome, texts, seconds, value = _watched(job, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    coded = [base64.b64encode(text).decode() for text in texts]
    last = None if value is None else base64.b64encode(value).decode()
    _say(f"{nonce} {json.dumps([outcome, *coded, seconds, last])}")


def _say(line: str) -> None:
    sys.stdout.write(f"\n{line}\n")
    sys.stdout.flush()


def _watched(job: dict, folder: str):  # type: ignore[no-untyped-def,type-arg]
    """Run the trial in another process, under limits; (outcome, (stdout, stderr), seconds, value)."""
    # Start it, with pipes for the job and for its report.
    limits, seconds, text = job["limits"], job["seconds"], job.pop("stdin").encode()
    job_reader, job_writer = os.pipe()
    report_reader, report_writer = os.pipe()
    environment = {
        "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
        "LC_ALL": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "HOME": folder,
        "TMPDIR": folder,
    }
    start = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-s", "-c", INNER, str(job_reader), str(report_writer)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[job_reader, report_writer],
        start_new_session=True,
        env=environment,
        cwd=folder,
        bufsize=0,
    )
    assert child.stdin and child.stdout and child.stderr, "they are pipes"
    os.close(job_reader)
    os.close(report_writer)
    printed = {"stdout": bytearray(), "stderr": bytearray(), "report": bytearray()}
    feeds = {
        job_writer: memoryview(json.dumps(job).encode()),
        os.dup(child.stdin.fileno()): memoryview(text),
    }
    child.stdin.close()
    readers = {
        child.stdout.fileno(): "stdout",
        child.stderr.fileno(): "stderr",
        report_reader: "report",
    }
    selector = selectors.DefaultSelector()
    for descriptor in feeds:
        os.set_blocking(descriptor, False)
        selector.register(descriptor, selectors.EVENT_WRITE)
    for descriptor in readers:
        os.set_blocking(descriptor, False)
        selector.register(descriptor, selectors.EVENT_READ)
    # Feed and read until it has ended, or time or output run out.
    room, reason, has_ended = limits["output_kb"] * 1024, "", False
    while not reason:
        has_ended = child.poll() is not None
        left = start + seconds - time.monotonic()
        if left <= 0 and not has_ended:
            reason = "time"
            break
        moved = 0
        for key, _ in selector.select(0 if has_ended else min(max(left, 0), 0.02)):
            descriptor = key.fd
            if descriptor in feeds:
                try:
                    size = os.write(descriptor, feeds[descriptor][:CHUNK])
                    feeds[descriptor] = feeds[descriptor][size:]
                except BlockingIOError:
                    continue
                except BrokenPipeError:
                    feeds[descriptor] = feeds[descriptor][:0]
                if not feeds[descriptor]:
                    selector.unregister(descriptor)
                    os.close(descriptor)
                    del feeds[descriptor]
                continue
            try:
                chunk = os.read(descriptor, CHUNK)
            except BlockingIOError:
                continue
            moved += len(chunk)
            if not chunk:
                selector.unregister(descriptor)
            printed[readers[descriptor]] += chunk[:room]
            if len(chunk) > room:
                reason = "output"
            room -= min(len(chunk), room)
        if has_ended and not moved:
            break
    # End all of its processes, and read the outcome from exit code and report.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    if child.poll() is None:
        child.kill()
    code = child.wait()
    took = time.monotonic() - start
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = bytes(printed["report"])
    outcome = reason
    if not outcome and code < 0:
        is_cpu = code == -signal.SIGXCPU or used.ru_utime + used.ru_stime >= limits["cpu_seconds"]
        outcome = "cpu" if is_cpu else "crash"
    elif not outcome and report == MEMORY:
        outcome = "memory"
    elif not outcome:
        is_done = report.startswith(DONE) or not (job["call"] or job["check"])
        outcome = "ok" if code == 0 and is_done else "error"
    value = report[len(DONE) :] if outcome == "ok" and job["call"] else None
    return outcome, (bytes(printed["stdout"]), bytes(printed["stderr"])), took, value


def execute(job: dict, report: int) -> int:  # type: ignore[type-arg]
    """Run the program and its trial here, then do what an interpreter does at its end; the exit code."""
    os.set_inheritable(report, False)
    _limit(job["limits"])
    program = job["program"]
    is_main = not (job["call"] or job["check"])
    module = types.ModuleType("__main__" if is_main else "program")
    module.__file__ = NAME
    sys.modules[module.__name__] = module
    sys.argv = [NAME]
    linecache.cache[NAME] = (len(program), None, program.splitlines(keepends=True), NAME)
    code, values = 0, []
    run, build = exec, compile  # a program may replace them

    def main() -> None:
        run(build(program, NAME, "exec"), module.__dict__)
        if job["check"]:
            run(build(job["check"], "test.py", "exec"), module.__dict__)
        values.append(_called(module, job) if job["call"] else "")

    for part in (main, _end):
        try:
            part()
        except SystemExit as exit_:
            code = code or _exit_code(exit_.code)
        except BaseException as error:  # noqa: BLE001 (the program may raise anything; it is printed)
            code = 1
            if isinstance(error, MemoryError):
                os.write(report, MEMORY)
            trace = error.__traceback__
            while trace is not None and trace.tb_frame.f_code.co_filename == OURS:
                trace = trace.tb_next
            traceback.print_exception(type(error), error, trace, limit=-SHOWN)
    if values and not (is_main or code):
        text = DONE + values[0].encode()
        while text:
            text = text[os.write(report, text) :]
    return code


def _limit(limits: dict) -> None:  # type: ignore[type-arg]
    """Set the limits that a process can set for itself, within those of the machine."""
    cpu, mega = limits["cpu_seconds"], 2**20
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_AS, limits["memory_mb"] * mega, limits["memory_mb"] * mega),
        (resource.RLIMIT_FSIZE, limits["scratch_mb"] * mega, limits["scratch_mb"] * mega),
        (resource.RLIMIT_NOFILE, limits["open_files"], limits["open_files"]),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        allowed = resource.getrlimit(kind)[1]
        if allowed != resource.RLIM_INFINITY:
            soft, hard = min(soft, allowed), min(hard, allowed)
        resource.setrlimit(kind, (soft, hard))


def _end() -> None:
    """End as an interpreter does, however the program ended: wait for threads, call exit functions, flush."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()


def _called(module: types.ModuleType, job: dict) -> str:  # type: ignore[type-arg]
    """Call the function of the trial; its value as JSON."""
    owner = vars(module)
    if job["call"] not in owner and "Solution" in owner:
        function = getattr(owner["Solution"](), job["call"])
    else:
        function = owner[job["call"]]
    return json.dumps(function(*json.loads(job["arguments"])))


def _exit_code(code: object) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1
