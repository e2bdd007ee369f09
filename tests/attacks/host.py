"""What the host plants for attacks to find, change or kill, and whether anything of it has changed.

Programs are looked for by the name of their processes: each gives itself ``mark`` as its name, and its children inherit
it (a program that it starts by exec carries it in the command line).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from tests.attacks import programs

SECRET = "a-secret-of-the-host"


class Planted:
    """Files, servers and a process of the host's, all open to every process that no wall holds.

    Attacks are told of a module of Python's own library as well; without a wall it is a copy, since what an attack does
    to the real one is a change that every other runner of this machine reports.
    """

    def __init__(self, *, has_wall: bool = True) -> None:
        self._stack = contextlib.ExitStack()
        root = self._stack.enter_context(
            tempfile.TemporaryDirectory(prefix="taut-", dir="/var/tmp")
        )
        self.folder = Path(root)
        self.folder.chmod(0o755)
        self.library = Path(sysconfig.get_path("stdlib", vars={"base": sys.base_prefix}), "this.py")
        if not has_wall:
            self.library = Path(shutil.copy(self.library, self.folder))
        self.mark = "taut" + uuid.uuid4().hex[:8]
        self.key = int(uuid.uuid4().hex[:7], 16)
        self.package = self.folder / "package"
        for folder, mode in ((self.package, 0o755), (self.folder / "open", 0o777)):
            folder.mkdir()
            folder.chmod(mode)
        for path, mode in (
            (self.folder / "secret", 0o644),
            (self.folder / "shared", 0o666),
            (self.package / "gift.py", 0o644),
        ):
            path.write_text(SECRET)
            path.chmod(mode)
            with contextlib.suppress(OSError):  # a file system without attributes
                os.setxattr(path, "user.taut", b"planted")
        (self.folder / "link").symlink_to(self.folder / "secret")
        (self.folder / "folder_link").symlink_to(self.folder / "open")
        os.mkfifo(self.folder / "fifo")
        self._listeners = [
            self._listener(socket.AF_INET, ("127.0.0.1", 0)),
            self._listener(socket.AF_UNIX, str(self.folder / "socket")),
            self._listener(socket.AF_UNIX, f"\0{self.mark}-server"),
        ]
        self._datagrams = self._stack.enter_context(
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        )
        self._datagrams.bind(("127.0.0.1", 0))
        self._datagrams.setblocking(False)
        os.dup2(os.open(self.folder / "secret", os.O_RDONLY), 77, inheritable=True)
        os.dup2(os.open("/", os.O_RDONLY), 78, inheritable=True)
        os.environ["TAUT_PLANTED_TOKEN"] = SECRET
        self.victim = subprocess.Popen(
            ["sleep", "3600"], stdin=subprocess.DEVNULL, start_new_session=True
        )
        self._signals: list[int] = []
        for number in (signal.SIGIO, signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda caught, _: self._signals.append(caught))
        self._before = self._state()

    def given(self) -> dict[str, Any]:
        """What programs are told: where to look."""
        return {
            "mark": self.mark,
            "key": self.key,
            "folder": str(self.folder),
            "open": str(self.folder / "open"),
            "secret": str(self.folder / "secret"),
            "shared": str(self.folder / "shared"),
            "link": str(self.folder / "link"),
            "folder_link": str(self.folder / "folder_link"),
            "fifo": str(self.folder / "fifo"),
            "package": str(self.package),
            "gift": str(self.package / "gift.py"),
            "library": str(self.library),
            "table": str(Path(programs.__file__).resolve()),
            "visible": [str(self.package), sys.base_prefix, "/etc/ld.so.cache"],
            "home": str(Path.home()),
            "victim": self.victim.pid,
            "runner": os.getpid(),
            "tcp": self._listeners[0].getsockname()[1],
            "udp": self._datagrams.getsockname()[1],
            "unix": str(self.folder / "socket"),
            "abstract": f"{self.mark}-server",
            "python": str(
                Path(
                    sys.base_prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}"
                ).resolve()
            ),
        }

    def changes(self) -> list[str]:
        """What is no longer as it was planted, and what is there that carries the mark."""
        before, self._before = self._before, self._state()
        found = [
            f"{name} was {before.get(name)}, is {self._before.get(name)}"
            for name in sorted({*before, *self._before})
            if before.get(name) != self._before.get(name)
        ]
        for listener in self._listeners:
            with contextlib.suppress(BlockingIOError):
                listener.accept()
                found.append(f"a connection to {listener.getsockname()!r}")
        with contextlib.suppress(BlockingIOError):
            self._datagrams.recv(99)
            found.append("a datagram")
        found += [f"the runner was sent signal {number}" for number in self._signals]
        self._signals.clear()
        found += [f"process {pid} is left" for pid in marked(self.mark)]
        return found + self._shared()

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        self._stack.close()

    def _listener(self, family: int, address: Any) -> socket.socket:
        made = self._stack.enter_context(socket.socket(family))
        made.bind(address)
        made.listen()
        made.setblocking(False)
        return made

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for path in [self.folder, *sorted(self.folder.rglob("*")), self.library]:
            status = path.lstat()
            state[str(path)] = (*status[:7], status.st_mtime_ns, status.st_ctime_ns)
            if stat.S_ISREG(status.st_mode):
                state[f"the content of {path}"] = hash(path.read_bytes())
                state[f"the attributes of {path}"] = tuple(os.listxattr(path))
        for name in ("null", "zero", "full", "random", "urandom"):
            status = Path("/dev", name).stat()
            state[f"/dev/{name}"] = (*status[:6], status.st_mtime_ns, status.st_ctime_ns)
        for name, pid in (("the victim", self.victim.pid), ("the runner", os.getpid())):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            state[f"the state of {name}"] = "gone" if fields[0] in "TtZX" else "alive"
            state[f"group, session, priority of {name}"] = (fields[2], fields[3], fields[16])
            state[f"the processors of {name}"] = sorted(os.sched_getaffinity(pid))
            state[f"the scheduler of {name}"] = os.sched_getscheduler(pid)
            state[f"the limits of {name}"] = [resource.prlimit(pid, kind) for kind in range(16)]
        state["the host's name"] = os.uname().nodename
        state["the mounts"] = Path("/proc/self/mounts").read_text()
        state["the clock"] = round((time.time() - time.monotonic()) / 100)
        return state

    def _shared(self) -> list[str]:
        """Shared memory, queues, semaphores and keys that a program left."""
        found = []
        for name in ("shm", "sem", "msg"):
            for line in Path("/proc/sysvipc", name).read_text().splitlines()[1:]:
                if line.split()[0] == str(self.key):
                    found.append(f"System V {name}: {line}")
        for folder in ("/dev/shm", "/dev/mqueue", "/tmp", "/var/tmp", "/run", "/"):
            if Path(folder, self.mark).exists():
                found.append(f"{folder}/{self.mark}")
        library = ctypes.CDLL(None, use_errno=True)
        if library.mq_open(f"/{self.mark}".encode(), os.O_RDONLY) != -1:
            found.append("a POSIX queue")
        with contextlib.suppress(OSError):  # a kernel without keys
            found += [
                line for line in Path("/proc/keys").read_text().splitlines() if self.mark in line
            ]
        return found


def marked(mark: str) -> list[int]:
    """The processes of this machine that carry the mark, and have not ended."""
    found = []
    for entry in os.listdir("/proc"):  # noqa: PTH208 (a thousand times: names are enough)
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            names = (
                Path(f"/proc/{entry}/comm").read_bytes()
                + Path(f"/proc/{entry}/cmdline").read_bytes()
            )
            if mark.encode() in names and _is_alive(int(entry)):
                found.append(int(entry))
    return found


def descendants(pid: int) -> list[int]:
    """All processes below this one that have not ended."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208
        if entry.isdigit():
            with contextlib.suppress(OSError):
                parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry))
    found, queue = [], [pid]
    while queue:
        below = children.get(queue.pop(), [])
        queue += below
        found += [it for it in below if _is_alive(it)]
    return found


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def memory(mark: str) -> dict[str, int]:
    """MB by who holds them: the kernel (what is neither free nor a cache nor mapped by a process: its own objects, and
    pages that only a pipe or a socket holds), files of tmpfs and shared memory, and the processes with the mark.

    What other processes of the machine allocate for themselves meanwhile is in none of the three, nor are the free
    pages that each processor keeps at hand, a gigabyte at most, which the kernel does not count as free.
    """
    lines = Path("/proc/meminfo").read_text().splitlines()
    values = {line.split(":")[0]: int(line.split()[1]) // 1024 for line in lines}
    others = ("MemFree", "Buffers", "Cached", "SwapCached", "AnonPages", "SReclaimable")
    processes = 0
    for pid in marked(mark):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text().splitlines()
            processes += (
                sum(int(line.split()[1]) for line in status if line.startswith("RssAnon")) // 1024
            )
    at_hand = re.findall(r"^ +count: +(\d+)$", Path("/proc/zoneinfo").read_text(), re.MULTILINE)
    kernel = values["MemTotal"] - sum(values[kind] for kind in others)
    kernel -= sum(map(int, at_hand)) * resource.getpagesize() // 2**20
    return {"kernel": kernel, "files": values["Shmem"], "processes": processes}
