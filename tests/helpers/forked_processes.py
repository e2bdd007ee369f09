"""Processes that are forked from one that has only imported (multiprocessing's fork server): seconds sooner than an
interpreter that imports for itself, and as clean, for no kernel ran in it and it has one thread.

``run`` is ``python WORDS``, alone or by several ranks, each with what torchrun would tell it. Torchrun itself starts
the runs of tests/invariants/test_ranks.py and tests/e2e/test_resume_command.py.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing import Pipe, forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from taut.io import limited_call

IMPORTED = (
    "taut.commands.train",
    "torch",
    "transformers",
    "peft",
    "transformers.utils.chat_template_utils",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2.tokenization_qwen2",
    "pandas",
    "taut.io.tables",
    "taut.methods.sft",
    "taut.methods.dpo",
    "taut.methods.grpo",
    "taut.methods.kto",
)
LIMIT = 600.0
"""Seconds that processes may take, unless a test says otherwise."""
PATIENCE = 20.0
"""Seconds that ranks are given to end by themselves."""


def run(
    *words: str | Path, num_ranks: int = 1, seconds: float = LIMIT, **environment: str
) -> CompletedProcess[str]:
    """``python WORDS``, where the first is a file or -m; what the ranks print one after another, and the first code
    that is not 0. ``seconds``: that they may take.
    """
    with TemporaryDirectory() as folder:
        given = [
            ([str(word) for word in words], {**os.environ, **environment, **world}, folder)
            for world in worlds(num_ranks)
        ]
        codes = fork(_program, given, seconds)
        out, err = (
            "".join(
                path.read_text(
                    "utf-8", errors="backslashreplace"
                )  # a stdout may have another encoding
                for path in sorted(Path(folder).glob(f"*.{name}"))
            )
            for name in ("out", "err")
        )
    assert codes is not None, f"no end in {seconds:.0f} s: {err[-3000:]}"
    return CompletedProcess(words, next(filter(None, codes), 0), out, err)


def start(folder: Path, *words: str | Path) -> ForkServerProcess:
    """``python WORDS``, left to run; what it prints goes to files in ``folder``."""
    given = [str(word) for word in words], dict(os.environ), str(folder)
    process = _server().Process(target=_program, args=given)
    process.start()
    return process


def _program(words: list[str], environment: Mapping[str, str], folder: str) -> None:
    """The body of a process."""
    os.environ.clear()
    os.environ.update(environment)
    rank = os.environ.get("RANK", "0")
    for number, name in ((1, "out"), (2, "err")):
        with Path(folder, f"{rank}.{name}").open("ab") as written:
            os.dup2(written.fileno(), number)
    require_clean()
    fork_bounded_process()
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def fork(
    target: Callable[..., None], given: Sequence[tuple[Any, ...]], seconds: float = LIMIT
) -> list[int] | None:
    """How each process ends: 0, 1 for an error, -9 for one that was killed. When one has failed the others are asked to
    end (SIGTERM), as torchrun does, and later made to. None: they did not end in ``seconds``.
    """
    started = [_server().Process(target=target, args=some) for some in given]
    for process in started:
        process.start()
    has_ended = _wait(started, seconds)
    _end(started)
    return [int(process.exitcode or 0) for process in started] if has_ended else None


def require_clean() -> None:
    """In a forked process: what the fork server imported is there, and it had one thread."""
    for name in set(IMPORTED) - set(sys.modules):
        importlib.import_module(name)  # says what the fork server kept to itself
        raise AssertionError(f"the fork server has not imported {name}")
    assert len(os.listdir("/proc/self/task")) == 1, "the fork server had threads"  # noqa: PTH208


class ForkedProcess:
    """What ``taut.io.worker_process`` asks of a subprocess.Popen, for a forked process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def fork_bounded_process() -> None:
    """In a forked process: fork the process of ``taut.io.limited_call`` now. It would start at the first call and then
    have to import transformers.
    """
    pipe, theirs = Pipe()
    held, leash = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.environ.clear()
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(0, 1)
        os.dup2(theirs.fileno(), 100)
        os.dup2(held, 101)
        os.closerange(3, 100)  # all others are the parent's
        os.closerange(102, os.sysconf("SC_OPEN_MAX"))
        limited_call.serve(100, 101)
        os._exit(0)
    theirs.close()
    os.close(held)
    helper = limited_call._helper
    helper.process = ForkedProcess(pid)  # type: ignore[assignment]
    helper._pipe, helper._leash = pipe, leash


def worlds(num_ranks: int) -> list[dict[str, str]]:
    """What torchrun tells each rank; nothing to one that is alone."""
    if num_ranks == 1:
        return [{}]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        {key: str(value) for key, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
        for rank in range(num_ranks)
    ]


@cache
def _server() -> ForkServerContext:
    """The fork server. Its processes have its environment, in which there is no rank, whichever test needs it first."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name in worlds(2)[0] or name.startswith("TORCHELASTIC_"):
                patch.delenv(name)
        forkserver.ensure_running()
    return context


def _wait(started: Sequence[ForkServerProcess], seconds: float) -> bool:
    """Until one has failed or all have ended. False: neither came about."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        alive = [process.sentinel for process in started if process.is_alive()]
        if not alive or any(process.exitcode for process in started):
            return True
        wait(alive, timeout=1.0)
    return False


def _end(started: Sequence[ForkServerProcess]) -> None:
    """End those that still run, gently first."""
    for process in started:
        if process.is_alive():
            process.terminate()
    for process in started:
        process.join(PATIENCE)
        if process.is_alive():
            process.kill()
            process.join()
