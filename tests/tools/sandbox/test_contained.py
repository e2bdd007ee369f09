"""What programs try, each contained by each mechanism there is on this machine; after it the sandbox goes on."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import taut
import taut_tools
from taut.errors import SandboxError
from taut_tools.sandbox.box import Sandbox
from taut_tools.sandbox.limits import Limits, Ran, Trial
from taut_tools.sandbox.probe import choose

LIMITS = Limits(memory_mb=512, processes=8, scratch_mb=4)
SHORT = Limits(wall_seconds=0.5, memory_mb=512, processes=8)


@pytest.fixture(scope="module", params=["bubblewrap", "landlock"])
def box(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    try:
        sandbox = Sandbox(choose(request.param))
    except SandboxError:
        pytest.skip(f"{request.param} is not to be had here")
    yield sandbox
    sandbox.close()


def tried(box: Sandbox, program: str, limits: Limits = LIMITS) -> Ran:
    """What became of a program, with the proof that the sandbox serves the next."""
    (ran,) = box.run(program, [Trial()], limits)
    (after,) = box.run("print(6 * 7)", [Trial()], limits)
    assert (after.outcome, after.stdout) == ("ok", "42\n")
    return ran


def is_alone(box: Sandbox) -> bool:
    """The mechanism has neither children nor a scratch folder."""
    return box.mechanism.name == "landlock"


def alive_with(marker: str) -> list[str]:
    """The processes of this machine that carry the marker in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if marker.encode() in line and int(entry.name) != os.getpid():
                found.append(entry.name)
    return found


def done(box: Sandbox, *actions: str) -> list[str]:
    """Those of the actions that the system let a program do."""
    program = f"""
for action in {actions!r}:
    try:
        exec(action)
    except OSError:
        continue
    print(action)
print("end")
"""
    ran = tried(box, program)
    assert ran.outcome == "ok", ran
    *lines, end = ran.stdout.splitlines()
    assert end == "end"
    return lines


def test_a_fork_bomb_is_bounded_and_dies(box: Sandbox) -> None:
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert tried(box, bomb, SHORT).outcome == "time"


def test_memory_is_bounded(box: Sandbox) -> None:
    assert tried(box, "x = bytearray(50 * 2**30)").outcome == "memory"
    assert tried(box, "x = []\nwhile True: x.append(bytearray(2**20))").outcome == "memory"


def test_no_socket_reaches_anything(box: Sandbox) -> None:
    name = uuid.uuid4().hex
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        unix.bind(f"\0{name}")
        unix.listen()
        at = ("127.0.0.1", tcp.getsockname()[1])
        through = done(
            box,
            f"import socket; socket.create_connection({at}, 1)",
            f"import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', {at})",
            "import socket; socket.socket(socket.AF_INET6)",
            "import socket; socket.socket(socket.AF_UNIX).connect('/dev/log')",
            f"import socket; socket.socket(socket.AF_UNIX).connect('\\0{name}')",
            "import socket; socket.socketpair(type=socket.SOCK_DGRAM)",
            "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        )
    assert through == []


def test_a_pair_of_sockets_is_left_to_asyncio(box: Sandbox) -> None:
    ran = tried(box, "import asyncio\nasync def f(): return 5\nprint(asyncio.run(f()))")
    assert (ran.outcome, ran.stdout) == ("ok", "5\n"), ran.stderr


def test_nothing_is_written_outside(box: Sandbox, tmp_path: Path) -> None:
    name = f"taut-{uuid.uuid4().hex}"
    home, here, lib = Path.home(), Path(__file__).parent, Path(sys.base_prefix, "lib")
    tmp_path.chmod(0o777)
    folders = (home, here, tmp_path, lib, Path("/"), Path("/dev"), Path("/etc"), Path("/tmp"))
    paths = [str(folder / name) for folder in folders]
    written = done(box, *[f"open({path!r}, 'w').write('x')" for path in paths])
    assert written == ([] if is_alone(box) else [f"open({paths[-1]!r}, 'w').write('x')"])
    assert [path for path in paths if Path(path).exists()] == []


def test_secrets_are_not_read(box: Sandbox) -> None:
    planted = Path.home() / f".taut-test-{uuid.uuid4().hex}"
    planted.write_text("secret")
    planted.chmod(0o644)
    environs = [f"/proc/{pid}/environ" for pid in (os.getpid(), os.getppid(), "self", 1)]
    files = [str(planted), __file__, "/etc/passwd", *environs]
    try:
        read = done(
            box, *[f"open({path!r}).read()" for path in files], "import os; os.listdir('/proc')"
        )
    finally:
        planted.unlink()
    assert read == []


def test_where_we_are_installed_is_not_shown(box: Sandbox) -> None:
    """Under a temporary folder these would stand in the program's own, which is empty but for what it writes."""
    ours = [Path(it.__file__).parent for it in (taut, taut_tools)] + [Path(__file__).parent]
    if sys.prefix != sys.base_prefix:
        ours += [Path(sys.prefix), *Path(sys.prefix, "lib").iterdir()]
    assert done(box, *[f"import os; os.listdir({str(path)!r})" for path in ours]) == []


def test_the_environment_holds_nothing_of_ours(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAUT_PLANTED_TOKEN", "secret")
    ran = tried(box, "import os; print(sorted(os.environ), 'secret' in str(os.environ))")
    assert "TAUT_PLANTED_TOKEN" not in ran.stdout
    assert ran.stdout.endswith("False\n")


def test_an_endless_print_is_cut(box: Sandbox) -> None:
    ran = tried(box, "while True: print('x' * 1000)", Limits(output_kb=64))
    assert ran.outcome == "output"
    assert len(ran.stdout) <= 64 * 1024
    both = tried(box, "import sys\nwhile True: print('x' * 99, file=sys.stderr)")
    assert both.outcome == "output"


def test_endless_loops_and_sleeps_end(box: Sandbox) -> None:
    loop = """
import signal
for number in set(range(1, 32)) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
while True: pass
"""
    assert tried(box, loop, SHORT).outcome == "time"
    ran = tried(box, "print('begun', flush=True)\nimport time; time.sleep(1000)", SHORT)
    assert (ran.outcome, ran.stdout) == ("time", "begun\n")


LEFT = """
import os, sys, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for fd in range(4): os.close(fd)
            os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(1000) # {marker}"])
        os._exit(0)
time.sleep(0.2)
print("left")
"""


def test_children_left_behind_are_dead_when_it_returns(box: Sandbox) -> None:
    marker = uuid.uuid4().hex
    ran = tried(box, LEFT.format(marker=marker))
    assert alive_with(marker) == []
    assert ran.outcome == ("error" if is_alone(box) else "ok")
    assert ran.seconds < LIMITS.wall_seconds


def test_the_disk_is_not_filled(box: Sandbox) -> None:
    one = "with open('big', 'wb') as f:\n    while True: f.write(bytes(2**20))"
    ran = tried(box, one)
    assert ran.outcome == "error"
    assert "OSError" in ran.stderr or "PermissionError" in ran.stderr
    several = "for i in range(9):\n    open(str(i), 'wb').write(bytes(2**20))"
    assert tried(box, several).outcome == "error"


def test_the_number_of_files_is_bounded(box: Sandbox) -> None:
    made = "made = 0\nwhile True:\n    open(str(made), 'w').close()\n    made += 1\n    print(made)"
    ran = tried(box, made, Limits(scratch_files=50))
    assert ran.outcome == "error"
    assert len(ran.stdout.split()) == (0 if is_alone(box) else 50)
    many = tried(box, "import os\nheld = [os.dup(0) for _ in range(100)]")
    assert many.outcome == "error"


KILLS = """
import os, signal
for target in (os.getppid(), {pid}, 1, -1, 0):
    for number in (9, 15, 19):
        try: os.kill(target, number)
        except OSError: pass
print("there")
"""


def test_nobody_else_is_signaled(box: Sandbox) -> None:
    victim = subprocess.Popen(["sleep", "100"])
    try:
        ran = tried(box, KILLS.format(pid=victim.pid))
        assert victim.poll() is None
        assert ran.outcome in ("ok", "crash"), ran
        owner = f"import fcntl, os; fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, {victim.pid})"
        assert done(box, owner) == []
    finally:
        victim.kill()
        victim.wait()


def test_wide_doors_are_shut(box: Sandbox) -> None:
    """ptrace, process_vm_readv, unshare, mount, io_uring_setup, memfd_create, shmget, perf_event_open, chroot;
    shmctl, semctl, semop, semtimedop, msgsnd, msgrcv, msgctl, mq_unlink, vmsplice, io_setup, inotify_init."""
    if os.uname().machine != "x86_64":
        pytest.skip("numbers of another processor")
    numbers = (
        101,
        310,
        272,
        165,
        425,
        319,
        29,
        298,
        161,
        31,
        66,
        65,
        220,
        69,
        70,
        71,
        241,
        278,
        206,
        253,
    )
    code = (
        "import ctypes; l = ctypes.CDLL(None, use_errno=True)\n"
        f"for n in {numbers}: print(l.syscall(n, 0, 0, 0), ctypes.get_errno())"
    )
    assert tried(box, code).stdout == "-1 1\n" * len(numbers)


def test_calls_that_no_kernel_has_yet_are_missing(box: Sandbox) -> None:
    """An allow-list: what a later kernel adds is refused before anybody knows its name."""
    code = (
        "import ctypes; l = ctypes.CDLL(None, use_errno=True)\n"
        "print({(l.syscall(n, 0, 0, 0), ctypes.get_errno()) for n in range(470, 1200)})"
    )
    assert tried(box, code).stdout == "{(-1, 38)}\n"


SEARCH = """
import ctypes, gc, os, re, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.sbrk.restype = ctypes.c_void_p
planted = re.compile(b"planted" + b"-[0-9a-f]{32}")
def holds(value):
    return planted.search(repr(value).encode()) is not None
found, frame = [], sys._getframe()
while frame is not None:
    found += [("frame", name) for name, value in frame.f_locals.items() if holds(value)]
    frame = frame.f_back
found += [("object", type(it)) for it in gc.get_objects() if isinstance(it, (str, bytes, list, dict)) and holds(it)]
reader, writer = os.pipe()
places = {id(sys), id([]), id(object()), id(b"x" * 999), id("x" * 99999), libc.sbrk(0)}
places.add(ctypes.c_void_p.in_dll(libc, "environ").value)
seen = set()
for page in {page for place in places for page in range((place >> 12) - 4096, (place >> 12) + 4096)}:
    if libc.write(writer, ctypes.c_void_p(page << 12), 4096) == 4096:  # EFAULT where nothing is mapped
        seen.add(page)
        if planted.search(os.read(reader, 4096)):
            found.append(("memory", page))
print(found, len(seen) > 500)
"""


def test_a_program_finds_nothing_of_the_program_before_it(box: Sandbox) -> None:
    """In no frame, object or page: its process never held a request, a test or an answer but its own."""
    marker = f"planted-{uuid.uuid4().hex}"
    limits = Limits(memory_mb=512, total_seconds=60.0, wall_seconds=30.0)
    for _ in range(3):
        box.run(f"print('{marker}', input())", [Trial(stdin=marker), Trial(stdin=marker)])
    trials = [Trial(stdin=marker), Trial(call="f", arguments=f'["{marker}"]'), Trial()]
    held, called, ran = box.run(f"kept = input\n{SEARCH}", trials, limits)
    assert (ran.outcome, ran.stdout) == ("ok", "[] True\n"), ran
    assert "object" in called.stdout  # its own arguments: the search finds what is there
    assert held.stdout == "[] True\n"  # its own input, not yet read


def test_files_shared_with_the_machine_are_read_and_no_more(box: Sandbox) -> None:
    if not is_alone(box):
        pytest.skip("elsewhere they are the jail's own mounts")
    at = "import fcntl, os; file = open(os.__file__)"
    get_flags = f"{at}; fcntl.ioctl(file, 0x80086601, bytes(8))"
    locks = (f"{at}; fcntl.flock(file, fcntl.LOCK_SH)", f"{at}; fcntl.lockf(file, fcntl.LOCK_SH)")
    assert done(box, get_flags, *locks) == []
    usual = "import os; os.set_blocking(1, True); os.set_inheritable(1, True); os.dup(1)"
    assert done(box, usual) == [usual]


def test_the_scratch_folder_is_the_program_s_to_break(box: Sandbox) -> None:
    secret = Path.home() / ".taut-nothing"
    link = f"import os; os.symlink({str(secret)!r}, 'link'); open('link', 'w').write('x')"
    gone = ("import os; os.rmdir('/tmp')", "import os; os.rename('/tmp', '/other')")
    assert done(box, *gone, link) == []
    assert not secret.exists()
    ran = tried(box, "import os; open('kept', 'w').close(); print(os.listdir('.'))")
    again = tried(box, "import os; print(os.listdir('/tmp'))")
    assert ran.outcome == again.outcome
    assert again.stdout == ("" if is_alone(box) else "[]\n")


def test_threads_are_bounded(box: Sandbox) -> None:
    code = (
        "import threading, time\nthreading.stack_size(32768)\nfor n in range(5000):\n"
        "    try: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
        "    except RuntimeError: break\nprint(n)"
    )
    ran = tried(box, code)
    assert ran.outcome == "ok", ran
    assert int(ran.stdout) < LIMITS.processes


def test_a_program_that_reads_its_own_pipes_back_hurts_itself_only(box: Sandbox) -> None:
    """Landlock lets it open them by /proc/self/fd: what it takes from there is missing, and is no error of ours."""
    code = """
import os
for number in (1, 2, 3):
    try:
        file = os.open(f"/proc/self/fd/{number}", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        continue
    for _ in range(200):
        os.write(number, b"x" * 100)
        try:
            os.read(file, 60)
        except OSError:
            pass
"""
    for ran in box.run(code, [Trial(), Trial(call="f"), Trial(check="assert True")], LIMITS):
        assert ran.outcome in ("ok", "error"), ran


def test_the_attributes_of_devices_stay(box: Sandbox) -> None:
    """They are the machine's own, and of root's mode: anybody may open them for writing."""
    before = Path("/dev/null").stat()
    touch = "import os; os.utime('/dev/null', (1, 1))"
    touch_now = "import os; os.utime('/dev/null')"
    write = "open('/dev/null', 'w').write('x')"
    assert done(box, touch, touch_now, "import os; os.chmod('/dev/null', 0o600)", write) == [write]
    after = Path("/dev/null").stat()
    assert (after.st_mode, after.st_uid, after.st_atime) == (
        before.st_mode,
        before.st_uid,
        before.st_atime,
    )


def test_limits_beyond_our_own_are_our_own(box: Sandbox) -> None:
    code = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[1])"
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert tried(box, code, Limits(open_files=most + 1)).stdout == f"{most}\n"


def test_randomness_is_to_be_had(box: Sandbox) -> None:
    code = "import random, secrets; print(len(open('/dev/urandom', 'rb').read(9)), len(secrets.token_bytes(5)))"
    assert tried(box, code).stdout == "9 5\n"


HOST = """
import sys, threading
from taut_tools.sandbox.box import Mechanism, Sandbox
from taut_tools.sandbox.limits import Limits, Trial
print("ready", flush=True)
Sandbox(Mechanism({name!r}, "")).run({program!r}, [Trial()], Limits(wall_seconds=100.0, total_seconds=100.0))
"""
STAYS = (
    "import time; time.sleep(1000)",
    "import ctypes, signal, time\nctypes.CDLL(None).prctl(1, 0)\nfor n in range(1, 32):\n"
    "    if n not in (9, 19): signal.signal(n, signal.SIG_IGN)\ntime.sleep(1000)",
    "import os, time\ntry: os.fork()\nexcept OSError: pass\ntime.sleep(1000)",
)


@pytest.mark.parametrize("program", STAYS)
def test_it_dies_with_us(box: Sandbox, program: str) -> None:
    """Whatever it does about the signal at its parent's death."""
    host = subprocess.Popen(
        [sys.executable, "-c", HOST.format(name=box.mechanism.name, program=program)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert host.stdout is not None
    with host.stdout:
        assert host.stdout.readline() == "ready\n"
    before = _descendants(host.pid, at_least=2 if is_alone(box) else 3)
    time.sleep(0.3)
    host.kill()
    host.wait()
    assert len(before) >= 2
    end = time.monotonic() + 20
    while any(map(_is_there, before)) and time.monotonic() < end:
        time.sleep(0.02)
    assert [pid for pid in before if _is_there(pid)] == []


def test_a_fork_of_ours_does_not_keep_it_alive(box: Sandbox) -> None:
    """It has a copy of the socket by which the jail hears of our end."""
    code = f"""
import os, threading, time
from taut_tools.sandbox.box import Mechanism, Sandbox
from taut_tools.sandbox.limits import Limits, Trial
box = Sandbox(Mechanism({box.mechanism.name!r}, ""))
held = lambda: box.run("import time; time.sleep(1000)", [Trial()], Limits(wall_seconds=100.0, total_seconds=100.0))
threading.Thread(target=held, daemon=True).start()
time.sleep(1)
if os.fork() == 0:
    time.sleep(20)
    os._exit(0)
print("ready", flush=True)
time.sleep(100)
"""
    host = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    with host.stdout:
        assert host.stdout.readline() == "ready\n"
    before = _descendants(host.pid, at_least=3)
    assert len(before) >= 3
    (fork,) = (pid for pid in before if "time.sleep(20)" in _command(pid))
    host.kill()
    host.wait()
    others = [pid for pid in before if pid != fork]
    end = time.monotonic() + 10
    while any(map(_is_there, others)) and time.monotonic() < end:
        time.sleep(0.02)
    assert _is_there(fork)
    os.kill(fork, 9)
    assert [pid for pid in others if _is_there(pid)] == []


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def _is_there(pid: int) -> bool:
    """And has not ended: what nobody waits for stays as a name."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _descendants(pid: int, at_least: int) -> list[int]:
    """All there are of a process, when there are so many."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        found, queue = [], [pid]
        while queue:
            first, children = queue.pop(0), []
            with contextlib.suppress(OSError):  # it has just ended
                for thread in Path(f"/proc/{first}/task").iterdir():
                    children += (thread / "children").read_text().split()
            queue += map(int, children)
            found += map(int, children)
        if len(found) >= at_least:
            return found
        time.sleep(0.02)
    return found
