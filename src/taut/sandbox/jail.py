"""The process that builds jails: started once without any variable of ours, it serves one request after another.

    serve("namespaces")    per request: fork, leave for new mount, process, network, IPC, host-name (and user)
                           namespaces, keep a root of read-only copies and one small tmpfs, fork process 1 there as
                           nobody, let it run the tests (``guest``); answer when all of it is dead
    serve("landlock")      per request: fork, run the tests; each test's process confines itself by Landlock and a
                           stricter filter of system calls: no children, threads or scratch folder
    once()                 one request inside the namespaces that bubblewrap made, as process 1

A request or an answer is a frame: eight bytes of length, then JSON. The end of the requests ends the server and the
jail it holds, and so does the end of the process that started it. An answer is {"results"} or {"error"}.

Runs under ``python -s -S -P``, alone of our package: imports its neighbours and the standard library only.
``workers`` starts it by name.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from taut.sandbox import guest, kernel

_SCRATCH = "/tmp"
"""The jail's own, where programs expect one; the host's is not in there."""
_GRACE = 10.0
"""Seconds a jail may take beside what its tests may."""
_USUAL = (
    "bisect collections copy dataclasses datetime decimal enum fractions functools heapq itertools math operator "
    "random re statistics string typing"
)
"""Modules that programs commonly import: here once, in every jail by fork."""


def serve(mechanism: str) -> None:
    """Answer requests until there are no more."""
    requests, answers = _own_ends()
    parent = os.getppid()
    kernel.adopt_orphans()
    for name in _USUAL.split():
        __import__(name)
    while True:
        while not select.select([requests], [], [], 1.0)[0]:
            if os.getppid() != parent:
                return
        frame = _read_frame(requests)
        if frame is None:
            return
        answer = _jailed(mechanism, json.loads(frame), requests)
        if answer is None:
            return
        _write_frame(answers, answer)


def once() -> None:
    """Answer one request here: bubblewrap made the jail, and this is its process 1."""
    requests, answers = _own_ends()
    frame = _read_frame(requests)
    if frame is not None:
        request = json.loads(frame)
        os.chdir(_SCRATCH)
        _become_nobody(request["uid"])
        kernel.die_with_parent()
        if select.select([requests], [], [], 0)[0]:
            return  # the end of it: who asked has died, and bubblewrap perhaps before we asked to die with it
        results = guest.run(request, lambda: kernel.forbid(is_alone=False), is_first=True)
        _write_frame(answers, json.dumps({"results": results}).encode())


def _own_ends() -> tuple[int, int]:
    """The two ends under numbers of their own; 0 and 1 become the null device, for the children to replace."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # ignored by a process 1, whatever a program sends it
    os.umask(0o022)
    requests, answers = os.dup(0), os.dup(1)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    return requests, answers


def _jailed(mechanism: str, request: Mapping[str, Any], requests: int) -> bytes | None:
    """The answer of a jail made for this request, when nothing of it is left; None where nobody wants it any more."""
    reader, writer = os.pipe()
    server = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _hold(mechanism, request, writer, server)
    os.close(writer)
    end = time.monotonic() + request["limits"]["total_seconds"] + _GRACE
    answer, is_wanted = _collected(reader, requests, end)
    os.close(reader)
    os.kill(child, signal.SIGKILL)
    _wait_for_all()
    if not is_wanted:
        return None
    return answer or json.dumps({"error": "the jail died, or gave no answer in time"}).encode()


def _collected(reader: int, requests: int, end: float) -> tuple[bytes, bool]:
    """What the jail wrote until its end (nothing if out of time), and whether the one who asked is still there."""
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    poll.register(requests, select.POLLIN)
    chunks: list[bytes] = []
    while True:
        ready = [descriptor for descriptor, _ in poll.poll(max(end - time.monotonic(), 0) * 1000)]
        if requests in ready:
            return b"", False
        if not ready:
            return b"", True
        chunk = os.read(reader, 1 << 20)
        if not chunk:
            return b"".join(chunks), True
        chunks.append(chunk)


def _wait_for_all() -> None:
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _hold(mechanism: str, request: Mapping[str, Any], writer: int, server: int) -> NoReturn:
    """In the forked child: build the jail, run the tests in it, write the answer, end."""
    code = 1
    try:
        kernel.die_with_parent()
        if os.getppid() == server:
            _close_all_but(writer)
            _be_killed_first()
            if mechanism == "landlock":
                _run_alone(request, writer, server)
            else:
                _run_in_namespaces(request, writer)
            code = 0
    except OSError as error:
        os.write(writer, json.dumps({"error": str(error)}).encode())
    finally:
        os._exit(code)


def _close_all_but(writer: int) -> None:
    os.closerange(3, writer)
    os.closerange(writer + 1, 65536)


def _be_killed_first() -> None:
    """By the kernel, when the machine runs out of memory."""
    with Path("/proc/self/oom_score_adj").open("w") as file:
        file.write("1000")


def _run_alone(request: Mapping[str, Any], writer: int, server: int) -> None:
    os.chdir("/")
    _become_nobody(request["uid"])
    kernel.die_with_parent()
    if os.getppid() != server:
        return
    holder = os.getpid()

    def confine() -> None:
        kernel.die_with_parent()
        if os.getppid() != holder:
            os._exit(1)
        kernel.landlock(request["readable"], kernel.DEVICES)
        kernel.forbid(is_alone=True)

    _answer(writer, guest.run(request, confine, is_first=False))


def _run_in_namespaces(request: Mapping[str, Any], writer: int) -> None:
    uid, gid = os.getuid(), os.getgid()  # asked now: in the new namespace they are nobody's
    kernel.unshare(kernel.NEW_OTHERS | (kernel.NEW_USER if uid else 0))
    if uid:
        _map_to_self(uid, gid)
    _build_root(request)
    alive, held = os.pipe()
    first = os.fork()
    if first == 0:
        _be_first(request, writer, alive, held)
    os.close(writer)
    os.waitpid(first, 0)


def _map_to_self(uid: int, gid: int) -> None:
    """In the new user namespace we are who we were."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        with Path("/proc/self", name).open("w") as file:
            file.write(text)


def _build_root(request: Mapping[str, Any]) -> None:
    """A new root: the readable paths, a few devices, the scratch folder; nothing else of the host exists."""
    kernel.make_private()
    trees = {path: kernel.cloned(path, False) for path in request["readable"]}
    trees |= {path: kernel.cloned(path, True) for path in kernel.DEVICES}
    folders = {path for path in request["readable"] if os.path.isdir(path)}  # noqa: PTH112
    root, limits = _SCRATCH, request["limits"]
    kernel.mount("tmpfs", root, 6, "size=1m,nr_inodes=1000,mode=755")
    Path(root + _SCRATCH).mkdir()
    options = f"size={limits['scratch_mb']}m,nr_inodes={limits['scratch_files']},mode=1777"
    kernel.mount("tmpfs", root + _SCRATCH, 6, options)
    for path in sorted(trees, key=len):
        at = Path(root + path)
        if path in folders:
            at.mkdir(parents=True, exist_ok=True)
        else:
            at.parent.mkdir(parents=True, exist_ok=True)
            at.touch()
        kernel.attach(trees[path], str(at))
        os.close(trees[path])
    for link, target in request["links"]:
        Path(root + link).parent.mkdir(parents=True, exist_ok=True)
        os.symlink(target, root + link)  # noqa: PTH211
    kernel.enter(root)


def _be_first(request: Mapping[str, Any], writer: int, alive: int, held: int) -> NoReturn:
    """Process 1 of the jail."""
    code = 1
    try:
        os.close(held)
        os.chdir(_SCRATCH)
        _become_nobody(request["uid"])
        kernel.die_with_parent()
        if not select.select([alive], [], [], 0)[
            0
        ]:  # else the one who holds us has died before we asked
            os.close(alive)
            results = guest.run(request, lambda: kernel.forbid(is_alone=False), is_first=True)
            _answer(writer, results)
            code = 0
    except OSError as error:
        os.write(writer, json.dumps({"error": str(error)}).encode())
    finally:
        os._exit(code)


def _become_nobody(uid: int) -> None:
    """Root becomes a user that is nobody's, so that limits count (0: it stays); then no capability is left."""
    if os.getuid() == 0 and uid != 0:
        os.setgroups([])
        try:
            os.setresgid(uid, uid, uid)
        except OSError:  # a container that has 65,536 users
            uid = 20000 + uid % 40000
            os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    kernel.drop_capabilities()
    kernel.never_gain()


def _answer(writer: int, results: list[Any]) -> None:
    text = memoryview(json.dumps({"results": results}).encode())
    while text:
        text = text[os.write(writer, text) :]


def _read_frame(reader: int) -> bytes | None:
    length = _read(reader, 8)
    return None if length is None else _read(reader, int.from_bytes(length, "big"))


def _read(reader: int, size: int) -> bytes | None:
    chunks = []
    while size:
        chunk = os.read(reader, min(size, 1 << 20))
        if not chunk:
            return None
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def _write_frame(writer: int, body: bytes) -> None:
    text = memoryview(len(body).to_bytes(8, "big") + body)
    while text:
        text = text[os.write(writer, text) :]
