"""The table of attacks: programs that try to get through the sandbox's wall, and what must happen to each.

A row is an ``Attack``: its name, what it attacks, the program, its limits, what must happen, and for which mechanisms
another result is right and why. ``test_programs`` runs every row for every mechanism and user of the machine.

A program reports each attempt by name, so that one program can make many: ``attempt(name, action)`` prints "refused"
where the action raises OSError, else "through". ``door(name, ...)`` makes a system call and takes only the answers of a
filter, EPERM and ENOSYS, as a refusal: with any other error the call has reached the kernel. A program that ends before
it prints "end" has not made all its attempts, and its row fails.

``GIVEN`` holds what the host planted (``host.Planted``); system calls are called by name with the numbers of x86-64.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from textwrap import dedent
from typing import Any

from taut_tools.sandbox.limits import Limits, Trial

BUBBLEWRAP, LANDLOCK = "bubblewrap", "landlock"


class Must(Enum):
    """What must happen to a program. In every row the host is unchanged afterwards and the next program is served."""

    BE_REFUSED = "every attempt is refused"
    SEE_NOTHING = "it finds nothing that is not its own"
    DIE = "it ends at its limit, or by its own fault"
    LEAVE_NOTHING = "none of its processes is alive when the run returns"
    STAY_SMALL = (
        "the host holds no more memory for it than its processes and its scratch folder may have"
    )
    BE_WRONG = "it counts as wrong"
    END_WELL = "it ends in order, for what it does is allowed"


ANY = frozenset({"ok", "error", "time", "cpu", "memory", "output", "crash"})


@dataclass(frozen=True)
class But:
    """Where another result is right for a mechanism."""

    why: str
    through: frozenset[str] = frozenset()
    """Attempts that may get through."""
    outcomes: frozenset[str] = frozenset()
    """Outcomes that are right as well."""


@dataclass(frozen=True)
class Attack:
    """One row of the table."""

    name: str
    target: str
    """What is attacked."""
    must: Must
    program: str
    limits: Limits = Limits(memory_mb=512, processes=8, scratch_mb=4, wall_seconds=20.0)  # noqa: RUF009 (frozen)
    outcomes: frozenset[str] = frozenset({"ok"})
    """The outcomes that are right."""
    trials: tuple[Trial, ...] = (Trial(),)
    is_bare: bool = False
    """Without the helpers ``attempt``, ``door`` and ``call`` before it."""
    within: float = 20.0
    """Seconds a trial may take."""
    before: tuple[str, tuple[Trial, ...]] = ("", ())
    """A program, and its trials, that ran before in the same sandbox."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The row of a data set by which the ``code`` reward judges the program."""
    cheats_checks: str = ""
    """Why this program may pass a check, which is code in the program's own process."""
    but: Mapping[str, But] = field(default_factory=dict)
    """By mechanism."""

    def text(self, given: Mapping[str, Any]) -> str:
        """The whole program. ``given``: what the host planted."""
        if self.is_bare:
            return self.program
        return PRELUDE.format(given=json.dumps(given), numbers=json.dumps(NUMBERS)) + self.program


NUMBERS = {
    "mmap": 9, "mprotect": 10, "rt_sigprocmask": 14, "ioctl": 16, "access": 21, "shmget": 29, "shmat": 30, "shmctl": 31,
    "getpid": 39, "socket": 41, "connect": 42, "accept": 43, "sendto": 44, "sendmsg": 46, "bind": 49, "listen": 50,
    "clone": 56, "fork": 57, "vfork": 58, "semget": 64, "semop": 65, "semctl": 66, "msgget": 68, "msgsnd": 69,
    "msgctl": 71, "fcntl": 72, "flock": 73, "link": 86, "readlink": 89, "chmod": 90, "fchmod": 91, "chown": 92,
    "ptrace": 101, "syslog": 103, "setuid": 105, "setgid": 106, "setpgid": 109, "setreuid": 113, "setgroups": 116,
    "setresuid": 117, "setresgid": 119, "getpgid": 121, "setfsuid": 122, "getsid": 124, "capset": 126,
    "rt_sigqueueinfo": 129, "mknod": 133, "uselib": 134, "personality": 135, "ustat": 136, "sysfs": 139,
    "getpriority": 140, "setpriority": 141, "sched_setparam": 142, "sched_getparam": 143, "sched_setscheduler": 144,
    "sched_getscheduler": 145, "sched_rr_get_interval": 148, "mlock": 149, "mlockall": 151, "vhangup": 153,
    "modify_ldt": 154, "pivot_root": 155, "prctl": 157, "arch_prctl": 158, "adjtimex": 159, "chroot": 161, "acct": 163,
    "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169, "sethostname": 170,
    "setdomainname": 171, "iopl": 172, "ioperm": 173, "init_module": 175, "delete_module": 176, "quotactl": 179,
    "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "getxattr": 191, "lgetxattr": 192, "fgetxattr": 193,
    "listxattr": 194, "llistxattr": 195, "flistxattr": 196, "removexattr": 197, "tkill": 200, "sched_setaffinity": 203,
    "sched_getaffinity": 204, "io_setup": 206, "lookup_dcookie": 212, "remap_file_pages": 216, "semtimedop": 220,
    "timer_create": 222, "clock_settime": 227, "tgkill": 234, "mbind": 237, "set_mempolicy": 238, "mq_open": 240,
    "mq_unlink": 241, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "ioprio_set": 251,
    "ioprio_get": 252, "inotify_init": 253, "inotify_add_watch": 254, "migrate_pages": 256, "fchownat": 260,
    "fchmodat": 268, "unshare": 272, "get_robust_list": 274, "splice": 275, "tee": 276, "vmsplice": 278,
    "move_pages": 279, "utimensat": 280, "signalfd": 282, "timerfd_create": 283, "fallocate": 285, "signalfd4": 289,
    "eventfd2": 290, "inotify_init1": 294, "rt_tgsigqueueinfo": 297, "perf_event_open": 298, "fanotify_init": 300,
    "prlimit64": 302, "name_to_handle_at": 303, "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308,
    "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "sched_setattr": 314,
    "sched_getattr": 315, "seccomp": 317, "memfd_create": 319, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
    "mlock2": 325, "pkey_alloc": 330, "statx": 332, "io_pgetevents": 333, "pidfd_send_signal": 424, "io_uring_setup": 425,
    "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431,
    "fsmount": 432, "fspick": 433, "pidfd_open": 434, "clone3": 435, "openat2": 437, "pidfd_getfd": 438,
    "faccessat2": 439, "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443, "landlock_create_ruleset": 444,
    "landlock_add_rule": 445, "landlock_restrict_self": 446, "memfd_secret": 447, "process_mrelease": 448,
    "set_mempolicy_home_node": 450, "cachestat": 451, "fchmodat2": 452, "map_shadow_stack": 453, "statmount": 457,
    "listmount": 458, "lsm_get_self_attr": 459, "lsm_set_self_attr": 460, "lsm_list_modules": 461, "mseal": 462,
    "setxattrat": 463, "getxattrat": 464, "listxattrat": 465, "removexattrat": 466, "open_tree_attr": 467,
    "file_getattr": 468, "file_setattr": 469,
}  # fmt: skip

PRELUDE = '''
import ctypes, errno, fcntl, json, os, signal, stat, struct, sys, time
GIVEN = json.loads({given!r})
NUMBERS = json.loads({numbers!r})
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
libc.prctl(15, GIVEN["mark"].encode(), 0, 0, 0)  # its processes and threads carry the name by which the host finds them


def call(name, *arguments):
    """A system call; OSError where the kernel, or a filter, says no."""
    number = name if isinstance(name, int) else NUMBERS[name]
    plain = [ctypes.c_long(it) if isinstance(it, int) else it for it in arguments]
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *plain)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def attempt(name, action):
    try:
        got = action()
    except (OSError, MemoryError) as error:
        print("refused", name, getattr(error, "errno", None), sep="\\t", flush=True)
    else:
        print("through", name, repr(got)[:80], sep="\\t", flush=True)


def door(name, *arguments, label=None):
    """A system call that a filter refuses, whatever its arguments."""
    try:
        got = call(name, *arguments)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOSYS):
            print("refused", label or name, error.errno, sep="\\t", flush=True)
            return
        got = error
    print("through", label or name, repr(got)[:80], sep="\\t", flush=True)


def forked(action):
    """Do it in a child, where there can be one; else here."""
    if os.fork() == 0:
        action()
        os._exit(0)


def end():
    print("end", flush=True)


'''
"""Before every program that is not bare."""

ATTACKS: list[Attack] = []


def add(name: str, target: str, must: Must, program: str, **more: Any) -> None:
    ATTACKS.append(Attack(name, target, must, dedent(program).lstrip("\n"), **more))


def refused(name: str, target: str, program: str, **more: Any) -> None:
    """A row whose attempts must all be refused."""
    add(name, target, Must.BE_REFUSED, dedent(program) + "\nend()\n", **more)


def dies(name: str, target: str, outcomes: str, program: str, **more: Any) -> None:
    """A row whose program must end with one of the outcomes."""
    add(name, target, Must.DIE, program, outcomes=frozenset(outcomes.split()), **more)


def leaves_nothing(name: str, program: str, **more: Any) -> None:
    """A row whose program tries to outlive its run, and the one that runs it."""
    given = {"limits": BRIEF, "outcomes": ANY, **more}
    add(name, "staying alive", Must.LEAVE_NOTHING, program, **given)


def stays_small(name: str, program: str, **more: Any) -> None:
    """A row whose program tries to take memory of the host that no limit counts, and holds it for a moment."""
    held = dedent(program).lstrip("\n") + "\ntime.sleep(0.25)\n"
    given = {"limits": HELD, "outcomes": ANY, **more}
    add(name, "memory that no limit counts", Must.STAY_SMALL, held, **given)


BRIEF = Limits(memory_mb=512, processes=8, scratch_mb=4, wall_seconds=0.3)
HELD = Limits(
    memory_mb=128, processes=3, scratch_mb=16, scratch_files=500, cpu_seconds=3, wall_seconds=1.2
)
DURING_MB, AFTER_MB = 500, 64
"""What the host may hold for a program under ``HELD`` while it runs (three processes of 128 MB, 16 MB of files, and a
quarter more) and when it has ended."""

# -- files -------------------------------------------------------------------------------------------------------------

_NAMES_ONLY = (
    "Landlock does not hold the lookup of a name: existence, size and times are seen, never content"
)

refused(
    "secrets by their path",
    "files",
    """
    pids = ("self", "thread-self", 1, GIVEN["runner"], GIVEN["victim"], os.getppid())
    paths = [GIVEN["secret"], GIVEN["secret"].replace("/", "//"), "/proc/self/root" + GIVEN["secret"]]
    paths += ["/tmp/../../../.." + GIVEN["secret"], "/proc/self/cwd/../.." + GIVEN["secret"], GIVEN["link"]]
    paths += ["/etc/passwd", "/etc/shadow", "/etc/hostname", "/etc/machine-id", GIVEN["table"]]
    paths += [GIVEN["home"] + name for name in ("/.bashrc", "/.netrc", "/.ssh/id_rsa", "/.cache/huggingface/token")]
    paths += [f"/proc/{pid}/{name}" for pid in pids for name in ("environ", "cmdline", "maps", "mem", "status", "comm")]
    paths += ["/proc/kcore", "/proc/kallsyms", "/proc/keys", "/proc/meminfo", "/proc/mounts", "/proc/net/tcp"]
    paths += ["/proc/sysrq-trigger", "/sys/kernel/mm/transparent_hugepage/enabled", "/sys/fs/cgroup/cgroup.procs"]
    for path in paths:
        attempt(path, lambda: open(path, "rb").read(1))
    """,
)
refused(
    "what folders hold",
    "files",
    """
    for path in ("/etc", "/home", "/root", "/proc", "/proc/self/fd", "/sys", "/var", "/var/tmp", "/run", "/mnt", "/opt",
                 "/dev/shm", "/usr/bin", GIVEN["home"], GIVEN["folder"], os.path.dirname(GIVEN["table"])):
        def others():
            inside = [os.path.join(path, name) + "/" for name in os.listdir(path)]
            inside = [it for it in inside if not any((way + "/").startswith(it) for way in GIVEN["visible"])]
            if not inside:
                raise OSError(0, "only the way to what it may read")
            return inside
        attempt(path, others)
    """,
)
refused(
    "a secret by openat2, O_PATH and folders above",
    "files",
    """
    how = lambda flags, resolve: struct.pack("=QQQ", flags, 0, resolve)
    for resolve in (0, 1, 2, 4, 8, 16, 32):
        attempt(f"openat2 {resolve}", lambda: call("openat2", -100, GIVEN["secret"].encode(), how(0, resolve), 24))
    def by_path():
        return os.open(GIVEN["secret"], os.O_PATH)
    attempt("O_PATH, then read", lambda: os.read(by_path(), 1))
    attempt("O_PATH, then open again", lambda: os.open("", os.O_RDONLY, dir_fd=by_path()))
    attempt("O_PATH, then open by /dev/fd", lambda: open(f"/dev/fd/{by_path()}").read())
    attempt("O_PATH, then link", lambda: os.link(f"/proc/self/fd/{by_path()}", "linked"))
    attempt("O_PATH, then chmod", lambda: call("fchmodat2", by_path(), b"", 0o666, 0x1000))
    attempt("O_PATH, then chown", lambda: call("fchownat", by_path(), b"", os.getuid(), -1, 0x1000))
    attempt("O_PATH, then xattr", lambda: call("fgetxattr", by_path(), b"user.taut", ctypes.create_string_buffer(99), 99))
    def from_above():
        for _ in range(30):
            os.chdir("..")
        return open(GIVEN["secret"].lstrip("/")).read()
    attempt("cd .., then open", from_above)
    """,
)
refused(
    "device nodes of the host",
    "files",
    """
    for name in ("mem", "kmem", "port", "kmsg", "kvm", "fuse", "vda", "vda1", "sda", "nvme0n1", "dm-0", "loop0", "ram0",
                 "loop-control", "mapper/control", "tty", "tty0", "ttyS0", "console", "ptmx", "pts/0", "net/tun", "hwrng",
                 "rtc0", "watchdog", "uinput", "snapshot", "userfaultfd", "vsock", "vhost-vsock", "nvidia0", "nvidiactl",
                 "dri/card0", "snd/timer", "input/event0", "shm", "mqueue", "log", "autofs", "btrfs-control", "cpu/0/msr"):
        for flags in (os.O_RDONLY, os.O_RDWR):
            attempt(f"{name} {flags}", lambda: os.open("/dev/" + name, flags | os.O_NONBLOCK))
    """,
)
refused(
    "device nodes of its own",
    "files",
    """
    for kind, name in ((stat.S_IFCHR, "character"), (stat.S_IFBLK, "block")):
        for major, minor in ((1, 1), (1, 2), (5, 1), (8, 0), (254, 0), (7, 0), (10, 200), (10, 232)):
            at = f"{name}-{major}-{minor}"
            attempt("mknod " + at, lambda: os.mknod(at, kind | 0o666, os.makedev(major, minor)))
    """,
)
refused(
    "links to files outside",
    "files",
    """
    for path in (GIVEN["secret"], GIVEN["gift"], GIVEN["library"], "/dev/null", "/etc/passwd"):
        attempt("link " + path, lambda: os.link(path, "hard"))
    def through_link(target):
        os.symlink(target, "soft")
        try:
            return open("soft").read(1)
        finally:
            os.unlink("soft")
    attempt("symlink", lambda: through_link(GIVEN["secret"]))
    attempt("symlink above", lambda: through_link("../../.." + GIVEN["secret"]))
    attempt("symlink to proc", lambda: through_link("/proc/self/root" + GIVEN["secret"]))
    """,
)
refused(
    "where links lead",
    "files",
    """
    for path in (GIVEN["link"], "/proc/self/exe", "/proc/self/cwd", "/proc/self/root", "/proc/self/fd/0", "/proc/self",
                 "/proc/1/exe", f"/proc/{GIVEN['runner']}/cwd", "/etc/localtime", "/bin", "/sbin", "/proc/self/ns/net"):
        attempt(path, lambda: os.readlink(path))
        attempt("from / " + path, lambda: os.readlink(path.lstrip("/"), dir_fd=os.open("/", os.O_PATH)))
    attempt("by chdir and getcwd", lambda: (os.chdir(GIVEN["folder_link"]), os.getcwd()))
    attempt("by fchdir and getcwd", lambda: (os.fchdir(os.open(GIVEN["folder_link"], os.O_PATH)), os.getcwd()))
    """,
)
refused(
    "extended attributes",
    "files",
    """
    room = ctypes.create_string_buffer(256)
    args = ctypes.create_string_buffer(struct.pack("=QII", ctypes.addressof(room), 256, 0))
    for path in (GIVEN["secret"], GIVEN["gift"], GIVEN["library"], "/", "."):
        at = path.encode()
        door("getxattr", at, b"user.taut", room, 256, label="get " + path)
        door("lgetxattr", at, b"security.capability", room, 256, label="lget " + path)
        door("listxattr", at, room, 256, label="list " + path)
        door("llistxattr", at, room, 256, label="llist " + path)
        door("setxattr", at, b"user.taut", b"x", 1, 0, label="set " + path)
        door("lsetxattr", at, b"user.taut", b"x", 1, 0, label="lset " + path)
        door("removexattr", at, b"user.taut", label="remove " + path)
        door("getxattrat", -100, at, 0, b"user.taut", args, 16, label="getat " + path)
        door("listxattrat", -100, at, 0, room, 256, label="listat " + path)
        door("setxattrat", -100, at, 0, b"user.taut", args, 16, label="setat " + path)
        door("removexattrat", -100, at, 0, b"user.taut", label="removeat " + path)
    file = os.open(GIVEN["gift"], os.O_RDONLY)
    door("fgetxattr", file, b"user.taut", room, 256)
    door("flistxattr", file, room, 256)
    door("fsetxattr", file, b"user.taut", b"x", 1, 0)
    """,
)
refused(
    "attributes of files (file_getattr, file_setattr, ioctl)",
    "files",
    """
    given, flags = ctypes.create_string_buffer(24), ctypes.create_string_buffer(28)
    for path in (GIVEN["secret"], GIVEN["gift"], GIVEN["folder"], "/", "."):
        at = path.encode()
        door("file_getattr", -100, at, given, 24, 0, label="get " + path)
        door("file_setattr", -100, at, struct.pack("=QIIII", 0x80, 0, 0, 0, 0), 24, 0, label="set " + path)
    for path in (GIVEN["gift"], GIVEN["package"], "/dev/null"):
        file = os.open(path, os.O_RDONLY)
        for name, number in (("GETFLAGS", 0x80086601), ("GETVERSION", 0x80087601), ("FSGETXATTR", 0x801C581F),
                             ("FIEMAP", 0xC020660B), ("FIBMAP", 1), ("FIFREEZE", 0xC0045877), ("FITRIM", 0xC0185879)):
            attempt(f"{name} {path}", lambda: fcntl.ioctl(file, number, flags, True))
        attempt(f"SETFLAGS {path}", lambda: fcntl.ioctl(file, 0x40086602, struct.pack("=Q", 0x40)))
    """,
)
refused(
    "whether a file is there",
    "files",
    """
    room = ctypes.create_string_buffer(256)
    path = GIVEN["secret"]
    attempt("stat", lambda: os.stat(path))
    attempt("statx", lambda: call("statx", -100, path.encode(), 0, 0x7ff, room))
    attempt("access", lambda: call("access", path.encode(), 0))
    attempt("faccessat2", lambda: call("faccessat2", -100, path.encode(), 0, 0))
    attempt("statfs", lambda: os.statvfs(path))
    attempt("stat of a process", lambda: os.stat(f"/proc/{GIVEN['victim']}"))
    """,
    but={
        LANDLOCK: But(
            _NAMES_ONLY,
            frozenset({"stat", "statx", "access", "faccessat2", "statfs", "stat of a process"}),
        )
    },
)
refused(
    "files by handle, and watches",
    "files",
    """
    handle, mount = ctypes.create_string_buffer(struct.pack("=Ii", 128, 0), 136), ctypes.create_string_buffer(4)
    for path in (GIVEN["secret"], GIVEN["gift"], "/", "."):
        door("name_to_handle_at", -100, path.encode(), handle, mount, 0, label="handle of " + path)
    door("open_by_handle_at", os.open(GIVEN["gift"], os.O_RDONLY), handle, 0)
    door("inotify_init")
    door("inotify_init1", 0)
    door("inotify_add_watch", 3, GIVEN["gift"].encode(), 0xFFF)
    for flags in (0, 0x200, 0x400, 0xE00):
        door("fanotify_init", flags, 0, label=f"fanotify_init {flags}")
    attempt("F_NOTIFY", lambda: fcntl.fcntl(os.open(GIVEN["package"], os.O_RDONLY), 1026, 0x3F))
    """,
)
refused(
    "changes to files that it may read",
    "files",
    """
    for path in (GIVEN["gift"], GIVEN["library"], GIVEN["package"], "/dev/null", "/dev/urandom"):
        attempt("chmod " + path, lambda: os.chmod(path, stat.S_IMODE(os.stat(path).st_mode)))
        attempt("fchmod " + path, lambda: os.fchmod(os.open(path, os.O_RDONLY), stat.S_IMODE(os.stat(path).st_mode)))
        attempt("fchmodat2 " + path, lambda: call("fchmodat2", -100, path.encode(), stat.S_IMODE(os.stat(path).st_mode), 0))
        attempt("chown " + path, lambda: os.chown(path, os.getuid(), -1))
        attempt("fchown " + path, lambda: os.fchown(os.open(path, os.O_RDONLY), -1, os.getgid()))
        attempt("times now " + path, lambda: os.utime(path))
        attempt("times " + path, lambda: os.utime(path, (1, 1)))
        attempt("futimens " + path, lambda: os.utime(os.open(path, os.O_RDONLY)))
    for path in (GIVEN["gift"], GIVEN["library"]):
        for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC, os.O_WRONLY | os.O_APPEND):
            attempt(f"open {flags} {path}", lambda: os.open(path, flags))
        attempt("truncate " + path, lambda: os.truncate(path, os.stat(path).st_size))
        attempt("ftruncate " + path, lambda: os.ftruncate(os.open(path, os.O_RDONLY), 0))
        attempt("rename " + path, lambda: os.rename(path, path + "2"))
        attempt("rename here " + path, lambda: os.rename(path, "here"))
        attempt("unlink " + path, lambda: os.unlink(path))
        attempt("fallocate " + path, lambda: call("fallocate", os.open(path, os.O_RDONLY), 0, 0, 1))
    """,
)
refused(
    "locks and leases on files of the host",
    "files",
    """
    for path in (GIVEN["gift"], GIVEN["library"], GIVEN["package"], "/dev/null"):
        file = os.open(path, os.O_RDONLY)
        attempt("flock shared " + path, lambda: fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB))
        attempt("flock alone " + path, lambda: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB))
        attempt("record " + path, lambda: fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB))
        lock = struct.pack("=hhxxxxqqixxxx", fcntl.F_RDLCK, 0, 0, 0, 0)
        attempt("open file description " + path, lambda: fcntl.fcntl(file, 37, lock))
        attempt("lease " + path, lambda: fcntl.fcntl(file, 1024, fcntl.F_RDLCK))
    """,
)
refused(
    "files written outside the scratch folder",
    "files",
    """
    name = GIVEN["mark"]
    folders = ["/", "/dev", "/dev/shm", "/etc", "/var/tmp", "/run", "/usr/lib", "/lib", "/root", "/proc", "/proc/self",
               "/sys", "/tmp/..", GIVEN["folder"], GIVEN["open"], GIVEN["package"], GIVEN["home"],
               os.path.dirname(GIVEN["table"]), os.path.dirname(GIVEN["library"])]
    for folder in folders:
        at = folder + "/" + name
        attempt("create " + folder, lambda: open(at, "w").write("x"))
        attempt("mkdir " + folder, lambda: os.mkdir(at))
        attempt("symlink " + folder, lambda: os.symlink("x", at))
        attempt("fifo " + folder, lambda: os.mkfifo(at))
        attempt("O_TMPFILE " + folder, lambda: os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600))
    attempt("open the pipe", lambda: os.open(GIVEN["fifo"], os.O_RDWR | os.O_NONBLOCK))
    attempt("append to a file", lambda: open(GIVEN["shared"], "a").write("x"))
    """,
)
refused(
    "the root folder put elsewhere",
    "files",
    """
    for old, new in (("/tmp", "/other"), ("/", "/tmp" "/x"), ("/dev", "/tmp" "/dev"), ("/tmp", "/"), ("/usr", "/tmp" "/usr")):
        attempt(f"rename {old} {new}", lambda: os.rename(old, new))
    for path in ("/tmp", "/dev", "/", "/usr"):
        attempt("rmdir " + path, lambda: os.rmdir(path))
        attempt("chmod " + path, lambda: os.chmod(path, stat.S_IMODE(os.stat(path).st_mode)))
    attempt("unlink /dev/null", lambda: os.unlink("/dev/null"))
    """,
    but={
        BUBBLEWRAP: But(
            "the scratch folder is the program's own mount, and so are its mode and times",
            frozenset({"chmod /tmp"}),
        )
    },
)
refused(
    "mounts",
    "files",
    """
    attributes = struct.pack("=QQQQ", 0, 1, 0, 0)
    door("mount", b"tmpfs", b"/tmp", b"tmpfs", 0, None, label="tmpfs")
    door("mount", b"/", b"/tmp", None, 0x1000, None, label="bind")
    door("mount", None, b"/", None, 0x20 | 0x1000, None, label="remount for writing")
    door("mount", None, b"/", None, 0x4000 | 0x80000, None, label="slave")
    door("mount", b"proc", b"/tmp", b"proc", 0, None, label="proc")
    for path in ("/", "/tmp", "/usr/lib", "/dev/null", GIVEN["package"]):
        door("umount2", path.encode(), 2, label="umount " + path)
        door("mount_setattr", -100, path.encode(), 0, attributes, 32, label="mount_setattr " + path)
        door("open_tree", -100, path.encode(), 1, label="open_tree " + path)
        door("open_tree_attr", -100, path.encode(), 1, attributes, 32, label="open_tree_attr " + path)
        door("fspick", -100, path.encode(), 0, label="fspick " + path)
    door("move_mount", 0, b"", -100, b"/tmp", 4)
    door("fsopen", b"tmpfs", 0)
    door("fsconfig", 0, 6, None, None, 0)
    door("fsmount", 0, 0, 0)
    door("pivot_root", b".", b".")
    door("chroot", b"/tmp")
    request = ctypes.create_string_buffer(struct.pack("=IIQQ", 24, 0, 1, 0xFF))
    door("statmount", request, ctypes.create_string_buffer(4096), 4096, 0)
    door("listmount", request, ctypes.create_string_buffer(4096), 64, 0)
    """,
)
refused(
    "namespaces of its own",
    "files",
    """
    kinds = {"time": 0x80, "mount": 0x20000, "cgroup": 0x2000000, "uts": 0x4000000, "ipc": 0x8000000, "user": 0x10000000,
             "pid": 0x20000000, "net": 0x40000000, "user and mount": 0x10020000}
    def cloned(name, flags):
        if call(name, flags | signal.SIGCHLD, 0, 0, 0, 0) == 0:
            os._exit(0)
        return "a child"
    def cloned3(flags):
        given = struct.pack("=11Q", flags, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, 0)
        if call("clone3", given, 88) == 0:
            os._exit(0)
        return "a child"
    for name, flags in kinds.items():
        door("unshare", flags, label="unshare " + name)
        attempt("clone3 " + name, lambda: cloned3(flags))
        if name != "time":  # a low byte is clone's signal
            attempt("clone " + name, lambda: cloned("clone", flags))
    door("setns", 0, 0)
    door("setns", 0, 0x10000000, label="setns user")
    """,
)
add(
    "descriptors that the host has open",
    "files",
    Must.SEE_NOTHING,
    """
    for number in range(4, 70000):
        try:
            found = os.fstat(number)
        except OSError:
            continue
        print("saw", number, found, sep="\\t")
    for number in range(4):
        try:
            kind = stat.S_IFMT(os.fstat(number).st_mode)
        except OSError:
            continue
        if kind not in (stat.S_IFIFO, stat.S_IFSOCK) and os.fstat(number).st_rdev != os.stat("/dev/null").st_rdev:
            print("saw", number, oct(kind), sep="\\t")
        for name in ("", ".", "..", GIVEN["secret"].lstrip("/")):
            try:
                print("saw", number, os.open(name, os.O_RDONLY, dir_fd=number), sep="\\t")
            except OSError:
                pass
    end()
    """,
)
add(
    "the environment, the arguments and the user",
    "files",
    Must.SEE_NOTHING,
    """
    environ = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
    texts, place = list(map(str, os.environ.items())) + sys.argv + sys.orig_argv, 0
    while environ[place]:
        texts.append(environ[place].decode(errors="replace"))
        place += 1
    for text in texts:
        for word in ("TAUT_PLANTED", "PATH=", "HF_TOKEN", "SSH_", "VIRTUAL_ENV", "USER=", "LOGNAME"):
            if word in text:
                print("saw", word, text[:50].replace("\\n", " "), sep="\\t")
    header, sets = struct.pack("=Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
    try:
        call(125, header, sets)  # capget
        if any(sets.raw):
            print("saw", "capabilities", sets.raw.hex(), sep="\\t")
    except OSError:
        pass
    end()
    """,
)

# -- network -----------------------------------------------------------------------------------------------------------

refused(
    "sockets of every family and kind",
    "network",
    """
    kinds = {"stream": 1, "datagram": 2, "raw": 3, "rdm": 4, "seqpacket": 5, "dccp": 6, "packet": 10}
    for family in range(50):
        for name, kind in kinds.items():
            for protocol in (0, 1, 6, 17, 132, 255, 262):
                try:
                    made = call("socket", family, kind, protocol)
                except OSError as error:
                    if error.errno in (1, 38):
                        continue
                    made = error
                print("through", f"family {family} {name} {protocol}", made, sep="\\t")
    print("refused", "all others", sep="\\t")
    """,
)
refused(
    "connections to servers of the host",
    "network",
    """
    import socket, urllib.request
    def reach(family, kind, address, protocol=0):
        with socket.socket(family, kind, protocol) as made:
            made.settimeout(1)
            made.connect(address)
            made.send(b"x")
    for host in ("127.0.0.1", "0.0.0.0", "10.0.2.2", "169.254.169.254"):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            attempt(f"{host} {kind}", lambda: reach(socket.AF_INET, kind, (host, GIVEN["tcp"])))
    attempt("MPTCP", lambda: reach(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", GIVEN["tcp"]), 262))
    attempt("UDP", lambda: reach(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", GIVEN["udp"])))
    attempt("IPv6", lambda: reach(socket.AF_INET6, socket.SOCK_STREAM, ("::1", GIVEN["tcp"])))
    attempt("mapped", lambda: reach(socket.AF_INET6, socket.SOCK_STREAM, ("::ffff:127.0.0.1", GIVEN["tcp"])))
    for path in (GIVEN["unix"], "\\0" + GIVEN["abstract"], "/dev/log", "/run/systemd/notify", "/run/dbus/system_bus_socket",
                 "/var/run/docker.sock", "/run/containerd/containerd.sock"):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
            attempt(f"{path!r} {kind}", lambda: reach(socket.AF_UNIX, kind, path))
    attempt("http", lambda: urllib.request.urlopen(f"http://127.0.0.1:{GIVEN['tcp']}/", timeout=1))
    attempt("DNS", lambda: socket.getaddrinfo("example.com", 80))
    attempt("/dev/tcp", lambda: open(f"/dev/tcp/127.0.0.1/{GIVEN['tcp']}"))
    """,
)
refused(
    "servers of its own",
    "network",
    """
    import socket
    def served(family, address):
        with socket.socket(family) as made:
            made.bind(address)
            made.listen()
    attempt("TCP", lambda: served(socket.AF_INET, ("127.0.0.1", 0)))
    attempt("IPv6", lambda: served(socket.AF_INET6, ("::1", 0)))
    attempt("unix", lambda: served(socket.AF_UNIX, "/tmp" "/socket"))
    attempt("abstract", lambda: served(socket.AF_UNIX, "\\0" + GIVEN["mark"]))
    """,
)
refused(
    "vsock, netlink, packets, kernel crypto",
    "network",
    """
    import socket
    for cid in (0, 1, 2, 3, 0xFFFFFFFF):
        attempt(f"vsock {cid}", lambda: socket.socket(40, socket.SOCK_STREAM).connect((cid, 22)))
    for protocol in range(23):
        attempt(f"netlink {protocol}", lambda: socket.socket(16, socket.SOCK_RAW, protocol).bind((0, 0)))
    attempt("crypto", lambda: socket.socket(38, socket.SOCK_SEQPACKET, 0).bind(("hash", "sha256")))
    attempt("packets", lambda: socket.socket(17, socket.SOCK_RAW, 3))
    attempt("ping", lambda: socket.socket(2, socket.SOCK_DGRAM, 1))
    attempt("raw", lambda: socket.socket(2, socket.SOCK_RAW, 255))
    attempt("express data path", lambda: socket.socket(44, socket.SOCK_RAW))
    """,
)
refused(
    "what a pair of sockets can be made into",
    "network",
    """
    import array, socket
    for kind, name in ((socket.SOCK_DGRAM, "datagram"), (socket.SOCK_SEQPACKET, "seqpacket"), (socket.SOCK_RAW, "raw")):
        attempt("a pair of " + name, lambda: socket.socketpair(socket.AF_UNIX, kind))
    for family in (2, 10, 30, 40):
        attempt(f"a pair of family {family}", lambda: socket.socketpair(family, socket.SOCK_STREAM))
    def pair():
        return socket.socketpair()
    try:
        kept = left, right = pair()
    except OSError:
        print("refused", "pairs", sep="\\t")
    else:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))]
        attempt("descriptors in a message", lambda: left.sendmsg([b"x"], rights))
        attempt("a message to an address", lambda: left.sendto(b"x", "\\0" + GIVEN["abstract"]))
        attempt("connect", lambda: left.connect("\\0" + GIVEN["abstract"]))
        attempt("bind", lambda: left.bind("\\0" + GIVEN["mark"]))
        attempt("listen", lambda: left.listen())
        attempt("a large buffer", lambda: left.setsockopt(socket.SOL_SOCKET, 32, 2**27))
    """,
)

# -- other processes ---------------------------------------------------------------------------------------------------

refused(
    "signals to processes of the host",
    "other processes",
    """
    information = ctypes.create_string_buffer(struct.pack("=iii", 0, 0, -1), 128)
    for name in ("victim", "runner"):
        pid = GIVEN[name]
        for number in (0, signal.SIGTERM, signal.SIGSTOP, signal.SIGIO, signal.SIGUSR1, signal.SIGKILL):
            if name == "runner" and number in (signal.SIGKILL, signal.SIGSTOP):
                continue  # the runner could not tell
            attempt(f"kill {name} {number}", lambda: os.kill(pid, number))
            attempt(f"kill the group of {name} {number}", lambda: os.kill(-pid, number))
            attempt(f"tkill {name} {number}", lambda: call("tkill", pid, number))
            attempt(f"tgkill {name} {number}", lambda: call("tgkill", pid, pid, number))
            attempt(f"rt_sigqueueinfo {name} {number}", lambda: call("rt_sigqueueinfo", pid, number, information))
            attempt(f"rt_tgsigqueueinfo {name} {number}", lambda: call("rt_tgsigqueueinfo", pid, pid, number, information))
            attempt(f"pidfd {name} {number}", lambda: call("pidfd_send_signal", os.pidfd_open(pid), number, None, 0))
        attempt("setpgid into the group of " + name, lambda: os.setpgid(0, pid))
        attempt("setpgid of " + name, lambda: os.setpgid(pid, pid))
    """,
)
add(
    "signals to everybody",
    "other processes",
    Must.LEAVE_NOTHING,
    """
    for target in (GIVEN["victim"], -GIVEN["victim"], os.getppid(), 1, -1, 0):
        for number in [0, *range(1, 65)]:
            if number in (signal.SIGKILL, signal.SIGSTOP):
                continue
            signal.signal(number, signal.SIG_IGN) if 0 < number < 32 else None
            try:
                os.kill(target, number)
            except OSError:
                pass
    for target in (GIVEN["victim"], os.getppid(), 1, -1):
        for number in (signal.SIGSTOP, signal.SIGKILL):
            try:
                os.kill(target, number)
            except OSError:
                pass
    os.kill(0, signal.SIGKILL)
    """,
    outcomes=ANY,
    limits=BRIEF,
)
refused(
    "memory and files of other processes",
    "other processes",
    """
    room = ctypes.create_string_buffer(64)
    mine = struct.pack("=QQ", ctypes.addressof(room), 8)
    for name, pid in (("victim", GIVEN["victim"]), ("runner", GIVEN["runner"]), ("parent", os.getppid()), ("itself", os.getpid())):
        door("ptrace", 16, pid, 0, 0, label="ptrace attach " + name)
        door("ptrace", 0x4206, pid, 0, 0, label="ptrace seize " + name)
        door("process_vm_readv", pid, mine, 1, mine, 1, 0, label="process_vm_readv " + name)
        door("process_vm_writev", pid, mine, 1, mine, 1, 0, label="process_vm_writev " + name)
        door("kcmp", pid, os.getpid(), 0, 0, 0, label="kcmp " + name)
        door("move_pages", pid, 0, None, None, None, 0, label="move_pages " + name)
        door("migrate_pages", pid, 0, None, None, label="migrate_pages " + name)
        for path in ("mem", "fd/1", "maps", "root/etc/passwd", "environ", "stack", "cwd", "ns/user"):
            if pid == os.getpid() and path == "fd/1":
                continue  # its own pipe
            attempt(f"/proc {name} {path}", lambda: open(f"/proc/{pid}/{path}", "rb").read(1))
    door("ptrace", 0, 0, 0, 0, label="ptrace traceme")
    door("process_madvise", 0, mine, 1, 20, 0)
    door("process_mrelease", 0, 0)
    door("pidfd_getfd", 0, 0, 0)
    attempt("pidfd of the victim", lambda: os.pidfd_open(GIVEN["victim"]))
    attempt("pidfd of the runner", lambda: os.pidfd_open(GIVEN["runner"]))
    """,
)
refused(
    "priorities, processors and limits of other processes",
    "other processes",
    """
    import resource
    room = ctypes.create_string_buffer(128)
    for name in ("victim", "runner"):
        pid = GIVEN[name]
        attempt("setpriority " + name, lambda: os.setpriority(os.PRIO_PROCESS, pid, 19))
        attempt("getpriority " + name, lambda: os.getpriority(os.PRIO_PROCESS, pid))
        attempt("sched_setaffinity " + name, lambda: os.sched_setaffinity(pid, {0}))
        attempt("sched_getaffinity " + name, lambda: os.sched_getaffinity(pid))
        attempt("sched_setscheduler " + name, lambda: os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0)))
        attempt("sched_getscheduler " + name, lambda: os.sched_getscheduler(pid))
        attempt("sched_getparam " + name, lambda: os.sched_getparam(pid))
        attempt("sched_rr_get_interval " + name, lambda: os.sched_rr_get_interval(pid))
        attempt("sched_getattr " + name, lambda: call("sched_getattr", pid, room, 56, 0))
        attempt("sched_setattr " + name, lambda: call("sched_setattr", pid, struct.pack("=IIQiIQQQ", 48, 3, 0, 9, 0, 0, 0, 0), 0))
        attempt("ioprio_set " + name, lambda: call("ioprio_set", 1, pid, 3 << 13))
        attempt("ioprio_get " + name, lambda: call("ioprio_get", 1, pid))
        attempt("prlimit set " + name, lambda: resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0)))
        attempt("prlimit get " + name, lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE))
        attempt("getpgid " + name, lambda: os.getpgid(pid))
        attempt("getsid " + name, lambda: os.getsid(pid))
        attempt("get_robust_list " + name, lambda: call("get_robust_list", pid, room, ctypes.byref(ctypes.c_long())))
        attempt("clock of " + name, lambda: time.clock_gettime(((~pid) << 3) | 2))
    attempt("setpriority of the user", lambda: os.setpriority(os.PRIO_USER, os.getuid(), 19))
    attempt("setpriority of the group", lambda: os.setpriority(os.PRIO_PGRP, GIVEN["victim"], 19))
    attempt("real time", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
    attempt("a share of a core", lambda: call("prctl", 62, 1, GIVEN["victim"], 0, 0))
    """,
    but={
        LANDLOCK: But(
            "the processor time of a process is read with the call that reads the time; it shows no more than that number",
            frozenset({"clock of victim", "clock of runner"}),
        )
    },
)
refused(
    "signals by way of files and terminals",
    "other processes",
    """
    reader, writer = os.pipe()
    for name in ("victim", "runner"):
        attempt("F_SETOWN " + name, lambda: fcntl.fcntl(reader, fcntl.F_SETOWN, GIVEN[name]))
        attempt("F_SETOWN_EX " + name, lambda: fcntl.fcntl(reader, 15, struct.pack("=ii", 1, GIVEN[name])))
        attempt("FIOSETOWN " + name, lambda: fcntl.ioctl(reader, 0x8901, struct.pack("=i", GIVEN[name])))
    attempt("F_SETSIG", lambda: fcntl.fcntl(reader, 10, signal.SIGKILL))
    for number, name in ((0x5412, "TIOCSTI"), (0x540E, "TIOCSCTTY"), (0x541C, "TIOCLINUX"), (0x5410, "TIOCSPGRP")):
        for descriptor in range(3):
            attempt(f"{name} {descriptor}", lambda: fcntl.ioctl(descriptor, number, b"x" * 8))
    """,
)

# -- staying alive -----------------------------------------------------------------------------------------------------

leaves_nothing(
    "a child of a child in a session of its own",
    """
    def away():
        os.setsid()
        forked(lambda: (os.closerange(0, 64), time.sleep(1000)))
    for _ in range(3):
        forked(away)
    time.sleep(0.1)
    """,
)
leaves_nothing(
    "another Python by exec",
    """
    def run():
        os.closerange(0, 64)
        os.execv(GIVEN["python"], [GIVEN["python"], "-S", "-c", "import time; time.sleep(1000)  # " + GIVEN["mark"]])
    forked(run)
    run()
    """,
)
leaves_nothing(
    "a signal at the parent's death that is cleared",
    """
    for option in (1, 36):  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER
        libc.prctl(option, 0, 0, 0, 0)
    time.sleep(1000)
    """,
)
leaves_nothing(
    "every signal ignored and blocked",
    """
    for number in set(range(1, 65)) - {signal.SIGKILL, signal.SIGSTOP, 32, 33}:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    libc.prctl(1, 0, 0, 0, 0)
    while True:
        time.sleep(1000)
    """,
)
leaves_nothing("a program that stops itself", "os.kill(os.getpid(), signal.SIGSTOP)")
leaves_nothing(
    "a program that stops its parent and process 1",
    """
    for target in (os.getppid(), 1, 0):
        for number in (signal.SIGSTOP, signal.SIGTSTP):
            try:
                os.kill(target, number)
            except OSError:
                pass
    time.sleep(1000)
    """,
)
leaves_nothing(
    "children that are stopped",
    """
    for _ in range(3):
        forked(lambda: (os.setsid(), os.kill(os.getpid(), signal.SIGSTOP), time.sleep(1000)))
    time.sleep(0.1)
    """,
)
leaves_nothing(
    "children by vfork, clone and clone3",
    """
    def cloned(flags):
        try:
            if call("clone", flags, 0, 0, 0, 0) == 0:
                time.sleep(1000)
        except OSError:
            pass
    cloned(signal.SIGCHLD)
    cloned(0)  # without a signal at its end
    cloned(0x8000 | signal.SIGCHLD)  # CLONE_PARENT: a sibling
    cloned(0x8000)
    cloned(0x800000 | signal.SIGCHLD)  # CLONE_UNTRACED
    try:
        if call("clone3", struct.pack("=8Q", 0, 0, 0, 0, signal.SIGCHLD, 0, 0, 0), 64) == 0:
            time.sleep(1000)
    except OSError:
        pass
    """,
)
leaves_nothing(
    "threads that do not end",
    """
    import threading
    for _ in range(3):
        try:
            threading.Thread(target=time.sleep, args=(1000,)).start()
        except RuntimeError:
            time.sleep(1000)
    """,
)
leaves_nothing(
    "a fork bomb",
    """
    while True:
        try:
            os.fork()
        except OSError:
            pass
    """,
)
leaves_nothing(
    "a bomb of sessions and programs",
    """
    code = "import os\\nwhile True:\\n  try:\\n    os.fork() or os.setsid()\\n  except OSError: pass"
    for _ in range(3):
        forked(lambda: os.execv(GIVEN["python"], [GIVEN["python"], "-S", "-c", f"{code} # {GIVEN['mark']}"]))
    time.sleep(1000)
    """,
)
leaves_nothing(
    "a process that execs itself for ever",
    """
    code = "import os, sys; os.execv(sys.executable, sys.orig_argv)"
    os.execv(GIVEN["python"], [GIVEN["python"], "-S", "-c", f"{code}  # {GIVEN['mark']}"])
    """,
)
leaves_nothing(
    "a process that hops: the child goes on, the parent ends",
    """
    end_of_hops = time.monotonic() + 30
    while time.monotonic() < end_of_hops:
        if os.fork():
            os._exit(0)
        os.setsid()
    """,
)
leaves_nothing(
    "a child that holds standard output open",
    """
    print("begun", flush=True)
    forked(lambda: time.sleep(1000))
    os._exit(0)
    """,
    limits=Limits(memory_mb=512, processes=8, wall_seconds=10.0),
    outcomes=frozenset({"ok", "error"}),
    within=3.0,
)
leaves_nothing(
    "children that go on printing after the end",
    """
    def chatter():
        os.setsid()
        while True:
            os.write(1, b"late " * 100)
    for _ in range(3):
        forked(chatter)
    os._exit(0)
    """,
    within=3.0,
)
leaves_nothing(
    "memory of the dead: children that wait on each other",
    """
    reader, writer = os.pipe()
    for _ in range(5):
        forked(lambda: (os.setsid(), signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)), os.read(reader, 1)))
    os.read(reader, 1)
    """,
)

# -- memory that no limit counts ---------------------------------------------------------------------------------------

refused(
    "memory that is no process's",
    "memory that no limit counts",
    """
    key = GIVEN["key"]
    name = ("/" + GIVEN["mark"]).encode()
    for flags in (0, 1, 2, 4, 8, 0x10):
        door("memfd_create", name[1:], flags, label=f"memfd_create {flags}")
    door("memfd_secret", 0)
    for number in (0, key):
        door("shmget", number, 2**20, 0o1666, label=f"shmget {number}")
        door("semget", number, 9, 0o1666, label=f"semget {number}")
        door("msgget", number, 0o1666, label=f"msgget {number}")
    door("shmat", 0, None, 0)
    for what in ("shmctl", "msgctl"):
        door(what, 0, 13, ctypes.create_string_buffer(512))
    door("semctl", 0, 0, 19, ctypes.create_string_buffer(512))
    door("mq_open", name[1:], 0o102, 0o666, None)
    door("mq_unlink", name[1:])
    for ring in (-1, -2, -3, -4, -5):
        door("add_key", b"user", name[1:], b"x" * 9, 9, ring, label=f"add_key {ring}")
        door("keyctl", 0, ring, 1, label=f"keyctl {ring}")
    door("request_key", b"user", name[1:], None, -3)
    door("keyctl", 1, name[1:], label="keyctl join")
    """,
)
refused(
    "pages in pipes, rings and counters that the machine shares",
    "memory that no limit counts",
    """
    reader, writer = os.pipe()
    other = os.pipe()
    page = ctypes.create_string_buffer(4096)
    vector = struct.pack("=QQ", ctypes.addressof(page), 4096)
    room = ctypes.create_string_buffer(256)
    for flags in (0, 1, 2, 8, 15):
        door("vmsplice", writer, vector, 1, flags, label=f"vmsplice {flags}")
    os.write(writer, b"x")
    door("tee", reader, other[1], 1, 2)
    door("splice", reader, None, other[1], None, 1, 2)
    for size in (2**16, 2**20, 2**26):
        attempt(f"F_SETPIPE_SZ {size}", lambda: fcntl.fcntl(writer, 1031, size))
    door("io_setup", 128, ctypes.byref(ctypes.c_long()))
    for flags in (0, 2, 0x400, 0x4000):
        setup = ctypes.create_string_buffer(struct.pack("=III", 0, 0, flags), 120)
        door("io_uring_setup", 64, setup, label=f"io_uring_setup {flags}")
    door("io_uring_enter", 0, 0, 0, 0, None, 0)
    door("io_uring_register", 0, 0, None, 0)
    for flags in (0, 1):
        door("userfaultfd", flags, label=f"userfaultfd {flags}")
    door("perf_event_open", ctypes.create_string_buffer(struct.pack("=II", 1, 112), 112), 0, -1, -1, 0)
    door("bpf", 0, ctypes.create_string_buffer(struct.pack("=IIII", 1, 4, 4, 1), 120), 120)
    """,
)
refused(
    "pages that are locked, huge or bound to a place",
    "memory that no limit counts",
    """
    import mmap
    page = ctypes.create_string_buffer(8192)
    door("mlock", ctypes.addressof(page), 4096)
    door("mlock2", ctypes.addressof(page), 4096, 1)
    door("mlockall", 3)
    attempt("MAP_LOCKED", lambda: mmap.mmap(-1, 2**20, flags=0x22 | 0x2000))
    for size in (0, 21, 30):
        attempt(f"MAP_HUGETLB {size}", lambda: mmap.mmap(-1, 2**30 if size == 30 else 2**21, flags=0x22 | 0x40000 | size << 26))
    door("mbind", ctypes.addressof(page) & ~4095, 4096, 2, ctypes.byref(ctypes.c_ulong(1)), 64, 0)
    door("set_mempolicy", 2, ctypes.byref(ctypes.c_ulong(1)), 64)
    door("remap_file_pages", ctypes.addressof(page) & ~4095, 4096, 0, 0, 0)
    """,
)
stays_small(
    "huge pages spliced into pipes",
    """
    import mmap
    for _ in range(32):
        try:
            reader, writer = os.pipe()
        except OSError:
            break
        for _ in range(16):
            area = mmap.mmap(-1, 4 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            start = (ctypes.addressof(ctypes.c_char.from_buffer(area)) + 2**21 - 1) & ~(2**21 - 1)
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(2**21), 14)
            ctypes.memset(start, 1, 1)
            try:
                call("vmsplice", writer, struct.pack("=QQ", start, 1), 1, 2)
            except OSError:
                break
    """,
)
stays_small(
    "pipes full to the brim",
    """
    def fill():
        while True:
            try:
                reader, writer = os.pipe()
            except OSError:
                return
            try:
                fcntl.fcntl(writer, 1031, 2**20)
            except OSError:
                pass
            os.set_blocking(writer, False)
            try:
                while True:
                    os.write(writer, bytes(65536))
            except OSError:
                pass
    for _ in range(2):
        try:
            forked(lambda: (fill(), time.sleep(1)))
        except OSError:
            pass
    fill()
    """,
)
stays_small(
    "sockets full to the brim",
    """
    import socket
    kept = []
    try:
        while True:
            left, right = socket.socketpair()
            kept += [left, right]
            for end_ in (left, right):
                try:
                    end_.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**28)
                except OSError:
                    pass
                end_.setblocking(False)
                try:
                    while True:
                        end_.send(bytes(2**16))
                except OSError:
                    pass
    except OSError:
        pass
    """,
)
stays_small(
    "everything that every process may have",
    """
    def take():
        kept = []
        try:
            while True:
                kept.append(bytearray(b"x") * 2**22)
        except MemoryError:
            time.sleep(0.4)
    for _ in range(5):
        try:
            forked(take)
        except OSError:
            break
    take()
    """,
)
stays_small(
    "the scratch folder full of bytes, in one file and in many",
    """
    for name in map(str, range(400)):
        try:
            with open(name, "wb", buffering=0) as file:
                while file.write(bytes(2**20)):
                    pass
        except OSError:
            continue
    """,
)
stays_small(
    "empty files with long names",
    """
    try:
        for number in range(10**6):
            os.close(os.open(f"{number:0240}", os.O_CREAT | os.O_WRONLY))
    except OSError:
        pass
    """,
)
add(
    "more files than the scratch folder may hold",
    "memory that no limit counts",
    Must.BE_REFUSED,
    """
    def many(make):
        for number in range(600):
            make(str(number) + make.__name__)
    def file(name): os.close(os.open(name, os.O_CREAT))
    def folder(name): os.mkdir(name)
    def symbolic(name): os.symlink("x" * 1000, name)
    def hard(name): os.link("first", name)
    def fifo(name): os.mkfifo(name)
    for make in (file, folder, symbolic, hard, fifo):
        try:
            file("first")
        except OSError:
            pass
        attempt("600 of " + make.__name__, lambda: many(make))
        try:
            for name in os.listdir("."):
                os.rmdir(name) if os.path.isdir(name) and not os.path.islink(name) else os.unlink(name)
        except OSError:
            pass
    end()
    """,
    limits=HELD,
)
stays_small(
    "links, folders in folders and attributes",
    """
    def until_refused(action):
        try:
            while True:
                action()
        except OSError:
            pass
    count = iter(range(10**9))
    until_refused(lambda: os.symlink("x" * 4000, f"s{next(count)}"))
    until_refused(lambda: os.setxattr(".", f"user.{next(count)}", b"x" * 60000))
    until_refused(lambda: (os.mkdir("d"), os.chdir("d")))
    """,
)
stays_small(
    "counters, timers, watches and queued signals",
    """
    def until_refused(action, most):
        try:
            for _ in range(most):
                action()
        except OSError:
            pass
    signal.pthread_sigmask(signal.SIG_BLOCK, {40})
    value = ctypes.c_long()
    until_refused(lambda: call("timer_create", 1, None, ctypes.byref(value)), 300000)
    information = ctypes.create_string_buffer(struct.pack("=iii", 40, 0, -1), 128)
    until_refused(lambda: call("rt_sigqueueinfo", os.getpid(), 40, information), 300000)
    until_refused(lambda: call("tkill", os.getpid(), 40), 300000)
    until_refused(lambda: call("eventfd2", 0, 0), 1000)
    until_refused(lambda: call("timerfd_create", 1, 0), 1000)
    """,
)
stays_small(
    "locks on single bytes of files",
    """
    import fcntl
    try:
        for name in range(50):
            file = open(f"l{name}", "w")
            for place in range(0, 20000, 2):
                fcntl.lockf(file, fcntl.LOCK_EX, 1, place)
    except OSError:
        pass
    """,
)
stays_small(
    "page tables of sparse mappings",
    """
    import mmap
    kept = []
    try:
        for _ in range(400):
            kept.append(mmap.mmap(-1, 2**21, prot=mmap.PROT_READ))
            kept[-1][0]
    except (OSError, MemoryError):
        pass
    try:
        shared = mmap.mmap(-1, 2**25)
        for place in range(0, 2**25, 4096):
            shared[place] = 1
        while True:
            forked(lambda: time.sleep(1))
    except (OSError, MemoryError):
        pass
    """,
)
stays_small(
    "epoll watches on each other's descriptors",
    """
    import select
    kept = [os.pipe() for _ in range(10)]
    try:
        while True:
            watch = select.epoll()
            kept.append(watch)
            for pair in kept[:10]:
                for number in pair:
                    watch.register(number, select.EPOLLET)
    except OSError:
        pass
    """,
)
stays_small(
    "names that are not there",
    """
    end_of_it = time.monotonic() + 0.5
    folder = os.path.dirname(GIVEN["library"])
    for number in range(10**7):
        try:
            os.stat(f"{folder}/{number:0240}")
        except OSError:
            pass
        if not number % 1000 and time.monotonic() > end_of_it:
            break
    """,
)
stays_small(
    "threads and their stacks",
    """
    import threading
    threading.stack_size(2**25)
    try:
        for _ in range(1000):
            threading.Thread(target=time.sleep, args=(0.5,), daemon=True).start()
    except (RuntimeError, MemoryError):
        pass
    """,
)

# -- limits ------------------------------------------------------------------------------------------------------------

_QUICK = Limits(memory_mb=256, processes=8, wall_seconds=0.3, output_kb=64)
_SLOW = Limits(memory_mb=256, processes=8, wall_seconds=20.0, output_kb=64)
"""Where time is not what must run out."""

dies(
    "a sleep",
    "limits",
    "time",
    "import time; time.sleep(1000)",
    limits=_QUICK,
    is_bare=True,
    within=3.0,
)
dies(
    "processor time, whose signal is ignored and whose limit is raised",
    "limits",
    "cpu crash",
    """
    import resource, signal
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    for limits in ((3600, 3600), (resource.RLIM_INFINITY,) * 2, resource.getrlimit(resource.RLIMIT_CPU)[1:] * 2):
        try:
            resource.setrlimit(resource.RLIMIT_CPU, limits)
        except (OSError, ValueError):
            pass
    while True: pass
    """,
    limits=Limits(memory_mb=256, cpu_seconds=1, wall_seconds=25.0),
    is_bare=True,
)
dies(
    "limits that the program raises",
    "limits",
    "memory",
    """
    import resource
    for name in ("RLIMIT_AS", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_MEMLOCK", "RLIMIT_CORE"):
        for limits in ((2**40, 2**40), (resource.RLIM_INFINITY,) * 2):
            try:
                resource.setrlimit(getattr(resource, name), limits)
                print("raised", name)
            except (OSError, ValueError):
                pass
    kept = bytearray(2**31)
    """,
    limits=_SLOW,
    is_bare=True,
)
dies(
    "memory in one piece",
    "limits",
    "memory",
    "x = bytearray(50 * 2**30)",
    limits=_SLOW,
    is_bare=True,
)
dies(
    "memory in many pieces",
    "limits",
    "memory time crash",
    """
    x = []
    while True: x.append(bytearray(2**20))
    """,
    limits=Limits(memory_mb=128, wall_seconds=3.0),
    is_bare=True,
)
dies(
    "standard output",
    "limits",
    "output",
    "while True: print('x' * 1000)",
    limits=_SLOW,
    is_bare=True,
)
dies(
    "standard error",
    "limits",
    "output",
    """
    import sys
    while True: print('x' * 1000, file=sys.stderr)
    """,
    limits=_SLOW,
    is_bare=True,
)
dies(
    "output in thousands of single bytes",
    "limits",
    "output time",
    """
    import os
    while True: os.write(1, b'x')
    """,
    limits=_QUICK,
    is_bare=True,
)
dies(
    "output into every descriptor there is",
    "limits",
    "output",
    """
    import os
    while True:
        for number in range(64):
            try:
                os.write(number, b"x" * 4096)
            except OSError:
                pass
    """,
    limits=_SLOW,
    is_bare=True,
)
dies(
    "the value of a call without end",
    "limits",
    "output memory error",
    "def solve(): return 'x' * 40_000_000",
    limits=_SLOW,
    trials=(Trial(call="solve"),),
    is_bare=True,
)
dies(
    "a traceback without end",
    "limits",
    "error output",
    """
    class E(Exception):
        def __str__(self): return 'x' * 50_000_000
    raise E
    """,
    limits=_SLOW,
    is_bare=True,
)
add(
    "standard output closed, unblocked, and given to a child",
    "limits",
    Must.LEAVE_NOTHING,
    """
    import fcntl, os
    for number in range(4):
        fcntl.fcntl(number, fcntl.F_SETFL, os.O_NONBLOCK)
    for _ in range(9):
        try:
            os.write(1, bytes(2**20))
        except OSError:
            pass
    for number in range(4):
        os.close(number)
    os._exit(0)
    """,
    outcomes=ANY,
    limits=_QUICK,
    is_bare=True,
)
dies(
    "standard input that nobody reads",
    "limits",
    "ok",
    "pass",
    trials=(Trial(stdin="x" * 5_000_000),),
    is_bare=True,
)
dies(
    "all tests together",
    "limits",
    "time not_run",
    "import time; time.sleep(1000)",
    limits=Limits(memory_mb=256, wall_seconds=0.3, total_seconds=0.5),
    trials=(Trial(),) * 30,
    is_bare=True,
)
dies(
    "recursion without end",
    "limits",
    "error",
    """
    def f(): f()
    f()
    """,
    limits=_SLOW,
    is_bare=True,
)
dies(
    "recursion without a limit",
    "limits",
    "crash error memory time",
    """
    import sys
    sys.setrecursionlimit(10**9)
    class A:
        def __getattr__(self, name): return getattr(self, name)
    A().x
    """,
    limits=_QUICK,
    is_bare=True,
)
dies(
    "a number of too many digits", "limits", "error", "print(10**10000)", limits=_SLOW, is_bare=True
)
dies("a power of powers", "limits", "time memory cpu", "x = 9**9**9", limits=_QUICK, is_bare=True)
dies(
    "a regular expression that backtracks",
    "limits",
    "time",
    "import re; re.match('(a*)*b', 'a' * 40)",
    limits=_QUICK,
    is_bare=True,
)
dies(
    "a bomb of compressed bytes",
    "limits",
    "memory",
    """
    import zlib
    inner = zlib.compressobj(1)
    small = b"".join([inner.compress(bytes(2**24)) for _ in range(10)]) + inner.flush()
    zlib.decompress(small)
    """,
    limits=Limits(memory_mb=128, wall_seconds=20.0),
    is_bare=True,
)
dies(
    "brackets too deep for the parser",
    "limits",
    "error crash memory output",
    "(" * 100_000 + ")" * 100_000,
    limits=_SLOW,
    is_bare=True,
)
dies(
    "operators too deep for the compiler",
    "limits",
    "error crash memory output",
    "x = " + "-" * 100_000 + "1",
    limits=_SLOW,
    is_bare=True,
)
dies(
    "a list too deep for JSON",
    "limits",
    "error crash",
    """
    def solve():
        x = []
        for _ in range(100_000): x = [x]
        return x
    """,
    trials=(Trial(call="solve"),),
    limits=_SLOW,
    is_bare=True,
)
dies(
    "a null pointer",
    "limits",
    "crash",
    "import ctypes; ctypes.string_at(0)",
    limits=_SLOW,
    is_bare=True,
)
dies("an abort", "limits", "crash", "import os; os.abort()", limits=_SLOW, is_bare=True)
dies(
    "an exit in the middle of a write",
    "limits",
    "error",
    """
    import os
    print('x' * 9)
    os._exit(3)
    """,
    limits=_SLOW,
    is_bare=True,
)
dies(
    "an end that does not end",
    "limits",
    "time",
    """
    import atexit
    @atexit.register
    def last():
        while True: pass
    """,
    limits=_QUICK,
    is_bare=True,
)
dies(
    "finalizers that make new objects for ever",
    "limits",
    "time ok",
    """
    class A:
        def __del__(self): A()
    A()
    import gc
    gc.collect()
    """,
    limits=_QUICK,
    is_bare=True,
)
dies(
    "a program that is no text",
    "limits",
    "error",
    "\ud800\x00\x01\udfff",
    limits=_SLOW,
    is_bare=True,
)
dies(
    "exceptions that raise when they are shown",
    "limits",
    "error",
    """
    class E(BaseException):
        def __str__(self): raise self
        __repr__ = __str__
        __class__ = property(__str__)
    raise E
    """,
    limits=_SLOW,
    is_bare=True,
)

# -- what was there before ---------------------------------------------------------------------------------------------

TOKENS = {
    name: f"MARK-{number:016x}"
    for number, name in enumerate(
        (
            "program",
            "stdin",
            "printed",
            "arguments",
            "value",
            "check",
            "scratch",
            "second",
            "third",
            "fourth",
        ),
        0xFACE0FF0,
    )
}
"""What must not be found by another program or in another test."""

_SEEN = (
    f"# {TOKENS['program']}\nimport os, sys\nprint('{TOKENS['printed']}', file=sys.stderr)\nprint('{TOKENS['printed']}')\n"
    f"try: open('left', 'w').write('{TOKENS['scratch']}')\nexcept OSError: pass\n"
    f"os.umask(0o777); os.environ['LEFT'] = '{TOKENS['scratch']}'\nfirst = sys.stdin.read()\n"
    f"def solve(x): return '{TOKENS['value']}'",
    (
        Trial(stdin=TOKENS["stdin"] * 500),
        Trial(call="solve", arguments=json.dumps([TOKENS["arguments"]])),
        Trial(check=f"assert '{TOKENS['check']}'"),
    ),
)
_PATTERN = """
import ctypes, gc, os, re, sys
pattern = re.compile(bytes(reversed(b"-KRAM")) + b"[0-9a-f]{16}")
seen = set()
def look(text):
    if isinstance(text, str):
        text = text.encode(errors="replace")
    seen.update(pattern.findall(text))
"""
"""The pattern is put together as the program runs, so that the program does not find itself."""
_SHOW = """
for token in sorted(seen):
    print("saw", token.decode(), sep="\\t")
print("end")
def solve(*arguments): return 1
"""
_FRAMES = """
frame = sys._getframe()
visited = set()
queue = []
while frame is not None:
    queue += [frame.f_locals, frame.f_globals, frame.f_code]
    frame = frame.f_back
queue += [sys.modules, gc.get_objects(), sys.argv, sys.orig_argv, os.environ._data, sys.stdin, sys.stdout]
import linecache
queue.append(linecache.cache)
while queue:
    found = queue.pop()
    if id(found) in visited or found is seen or found is queue or found is visited:
        continue
    visited.add(id(found))
    if isinstance(found, (str, bytes, bytearray)):
        look(found)
    elif isinstance(found, memoryview):
        look(bytes(found))
    else:
        queue += gc.get_referents(found)
"""
_MEMORY = """
reader, writer = os.pipe()
libc = ctypes.CDLL(None)
libc.sbrk.restype = ctypes.c_void_p
page, gap = 4096, 16 * 2**20
written = 0
pages = set()
def is_there(address):
    global written
    if libc.write(writer, ctypes.c_void_p(address), 1) != 1:
        return False
    written += 1
    if written == 60000:
        os.read(reader, written)
        written = 0
    return True
environ = ctypes.POINTER(ctypes.c_void_p).in_dll(libc, "environ")
anchors = [id(object()), id(sys), id(bytes(10**6)), ctypes.addressof(ctypes.c_long.in_dll(libc, "environ")),
           ctypes.cast(libc.write, ctypes.c_void_p).value, libc.sbrk(0) - 1, id(int), ctypes.cast(environ, ctypes.c_void_p).value]
for anchor in anchors:
    for step in (page, -page):
        address, missing = anchor & -page, 0
        while missing < gap and address > 0 and address not in pages:
            if is_there(address):
                pages.add(address)
                missing = 0
            else:
                missing += page
            address += step
runs, start = [], None
for address in sorted(pages):
    if start is None or address != last + page:
        if start is not None:
            runs.append((start, last + page))
        start = address
    last = address
runs.append((start, last + page))
size = 2**20
for start, stop in runs:
    for address in range(start, stop, size):
        room = min(size + 64, stop - address)
        look(ctypes.string_at(address, room))
print("pages", len(pages))
try:
    with open("/proc/self/mem", "rb") as memory:
        print("saw\\t/proc/self/mem")
except OSError:
    pass
"""
_PLACES = """
for folder, names, files in os.walk("/tmp"):
    for name in files:
        look(name)
        look(open(os.path.join(folder, name), "rb").read())
    if files or names:
        print("saw", "a file", files, names, sep="\\t")
if os.umask(0o022) == 0o777:
    print("saw\\tthe umask")
if "LEFT" in os.environ:
    print("saw\\tthe environment")
for number in range(4, 200):
    try:
        look(os.read(number, 1 << 20))
    except OSError:
        continue
for number in (0, 1, 2, 3):
    try:
        os.set_blocking(number, False)
        look(os.read(number, 1 << 20) or b"")
    except OSError:
        continue
    finally:
        os.set_blocking(number, True)
"""
_OTHERS = (
    Trial(stdin="go"),
    Trial(stdin=TOKENS["second"] * 50),
    Trial(call="solve", arguments=json.dumps([TOKENS["third"]])),
    Trial(check=f"assert solve('{TOKENS['fourth']}')"),
    Trial(stdin="go"),
)
for name, search in {"frames, objects and modules": _FRAMES, "its own memory": _MEMORY}.items():
    add(
        f"the program before, in {name}",
        "what was there before",
        Must.SEE_NOTHING,
        _PATTERN + search + _SHOW,
        before=_SEEN,
        is_bare=True,
    )
    add(
        f"its own other tests, in {name}",
        "what was there before",
        Must.SEE_NOTHING,
        _PATTERN + search + _SHOW,
        trials=_OTHERS,
        is_bare=True,
    )
add(
    "the program before, in files, descriptors, umask and environment",
    "what was there before",
    Must.SEE_NOTHING,
    _PATTERN + _PLACES + _SHOW,
    before=_SEEN,
    is_bare=True,
)
add(
    "its own pipes read back",
    "verdicts",
    Must.END_WELL,
    """
    def opened(number):
        try:
            return os.open(f"/proc/self/fd/{number}", os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return number
    back = [opened(number) for number in (3, 2, 1)]
    end_of_it = time.monotonic() + 0.2
    while time.monotonic() < end_of_it:
        for number in (1, 2):
            os.write(number, b"x")
        for number in back:
            try:
                os.read(number, 1 << 20)
            except OSError:
                pass
    """,
    outcomes=frozenset({"ok", "output"}),
    trials=(Trial(), Trial(), Trial()),
    but={
        LANDLOCK: But(
            "its pipes can be opened by /proc/self/fd, and what it takes out again was its own",
            outcomes=frozenset({"error"}),
        )
    },
)
add(
    "the report taken back before it is read",
    "verdicts",
    Must.END_WELL,
    """
    import os
    try:
        os.read(os.open("/proc/self/fd/3", os.O_RDONLY | os.O_NONBLOCK), 99)
    except OSError:
        pass
    """,
    trials=(Trial(),) * 20,
    is_bare=True,
)
add(
    "what the program before did to modules",
    "what was there before",
    Must.SEE_NOTHING,
    """
    import builtins, json, os, sys, signal
    if hasattr(builtins, "left") or json.dumps(1) != "1" or hasattr(sys, "left"):
        print("saw\\ta module that was changed")
    if signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL or signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        print("saw\\ta signal's handler")
    print("end")
    """,
    before=(
        "import builtins, json, sys, signal\nbuiltins.left = sys.left = 1\njson.dumps = lambda x: '2'\n"
        "signal.signal(signal.SIGUSR1, signal.SIG_IGN)\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))",
        (Trial(), Trial(check="pass")),
    ),
    is_bare=True,
)

# -- verdicts ----------------------------------------------------------------------------------------------------------

RIGHT = "a-value-that-no-program-has-been-told"
VERDICT = (
    Trial(stdin="2\n"),
    Trial(call="solve", arguments="[2]"),
    Trial(check=f"assert solve(2) == {RIGHT!r}"),
)
"""What is right is outside the program's process; only of a check it stands inside."""
_INSIDE = "a check is code in the program's own process, and docs/environments.md says that such a program can pass it"


def faked(name: str, program: str, cheats_checks: str = "") -> None:
    """A row whose program solves nothing and wants to pass."""
    add(
        f"a verdict by {name}",
        "verdicts",
        Must.BE_WRONG,
        "def solve(x): return 5\n" + dedent(program),
        outcomes=ANY,
        trials=VERDICT,
        cheats_checks=cheats_checks,
        limits=BRIEF,
        is_bare=True,
    )


faked(
    "an early sys.exit(0)",
    """
    import sys
    sys.exit(0)
    """,
)
faked(
    "os._exit(0)",
    """
    import os
    os._exit(0)
    """,
)
faked(
    "an exit at its end",
    """
    import atexit, os
    atexit.register(os._exit, 0)
    """,
)
faked(
    "an exit where it is called",
    """
    import os
    def solve(x): os._exit(0)
    """,
)
faked("SystemExit where it is called", "def solve(x): raise SystemExit(0)")
faked(
    "a report of its own",
    """
    import os
    os.write(3, b'done ')
    os._exit(0)
    """,
    _INSIDE,
)
faked(
    "reports of its own before the true one",
    """
    import os
    os.write(3, b'done 5' * 3)
    """,
    _INSIDE,
)
faked(
    "frames in every descriptor",
    """
    import json, os
    body = json.dumps({"results": [["ok", "", "", 0.0, "5"]] * 3}).encode()
    for number in range(64):
        for text in (len(body).to_bytes(8, "big") + body, body, b"done " + body, b"ready", b'{"status": 0, "cpu_seconds": 0}'):
            try: os.write(number, text)
            except OSError: pass
    """,
    _INSIDE,
)
faked(
    "a closed report",
    """
    import os
    os.close(3)
    """,
)
faked(
    "a report that is another file",
    """
    import os
    os.dup2(1, 3)
    os.dup2(3, 1)
    """,
)
faked(
    "an object equal to everything",
    """
    class A:
        def __eq__(self, o): return True
    def solve(x): return A()
    """,
    _INSIDE,
)
faked(
    "a string equal to everything",
    """
    class A(str):
        def __eq__(self, o): return True
        __hash__ = str.__hash__
    def solve(x): return A('5')
    """,
    _INSIDE,
)
faked(
    "json replaced",
    """
    import json
    json.dumps = lambda x: '[]'
    json.loads = lambda x: [2]
    """,
)
faked(
    "modules replaced",
    """
    import sys
    for name in ('json', 'os', 'traceback', 'threading'): sys.modules[name] = None
    """,
)
faked(
    "builtins replaced",
    """
    import builtins
    builtins.compile = builtins.exec = lambda *a, **k: None
    builtins.AssertionError = ValueError
    """,
    _INSIDE,
)
faked(
    "functions of the guest replaced",
    """
    import sys
    f = sys._getframe()
    while f:
        for n in list(f.f_globals):
            if callable(f.f_globals[n]) and 'tell' in n: f.f_globals[n] = lambda *a: None
        f = f.f_back
    """,
    _INSIDE,
)
faked(
    "locals of the guest changed",
    """
    import sys, ctypes
    f = sys._getframe()
    while f:
        f.f_locals.update(code=0, reports=['5'])
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(f), ctypes.c_int(0))
        f = f.f_back
    """,
    _INSIDE,
)
faked(
    "a trace function",
    """
    import sys
    def trace(frame, event, arg):
        if event == 'exception': frame.f_locals.clear()
        return trace
    sys.settrace(trace)
    """,
)
faked(
    "a trace that jumps over the assert",
    """
    import sys
    def trace(f, e, a):
        if f.f_code.co_filename == 'test.py': sys.exit(0)
        return trace
    sys.settrace(trace)
    """,
)
faked(
    "a hook for exceptions",
    """
    import sys
    sys.excepthook = lambda *a: sys.exit(0)
    sys.unraisablehook = sys.excepthook
    """,
)
faked(
    "a child that goes on",
    """
    import os
    try:
        if os.fork(): os._exit(0)
    except OSError: pass
    """,
)
faked(
    "a parent that goes on",
    """
    import os
    try:
        if not os.fork(): os._exit(0)
        os.wait()
    except OSError: pass
    """,
)
faked(
    "a thread after the end",
    """
    import threading, os, time
    def late():
        time.sleep(0.05); os._exit(0)
    try: threading.Thread(target=late).start()
    except RuntimeError: pass
    """,
)
faked(
    "signals to who watches",
    """
    import os, signal
    for pid in (os.getppid(), 1):
        for n in (1, 2, 10, 12, 15, 17):
            try: os.kill(pid, n)
            except OSError: pass
    """,
)
faked(
    "an exception that is no error",
    """
    class E(BaseException):
        __class__ = SystemExit
        code = 0
        def __str__(self): return ''
    def solve(x): raise E
    """,
)
faked(
    "an exception that compares as SystemExit",
    """
    class M(type):
        def __instancecheck__(c, o): return True
        def __subclasscheck__(c, o): return True
    class E(Exception, metaclass=M): pass
    def solve(x): raise E
    """,
)
faked(
    "a generator",
    """
    def solve(x):
        try: yield 5
        finally: raise SystemExit(0)
    """,
)
faked(
    "an integer that shows itself as another",
    """
    class A(int):
        def __repr__(self): return '"a"'
        __str__ = __repr__
    def solve(x): return A(5)
    """,
)
faked(
    "a module json in the folder",
    """
    try: open('json.py', 'w').write('def dumps(x): return 0')
    except OSError: pass
    import sys
    sys.path.insert(0, '')
    sys.modules.pop('json', None)
    """,
)
faked(
    "files that Python runs at its start",
    """
    import os
    for name in ("sitecustomize.py", "usercustomize.py", "x.pth", "json.py", "program.py", "__main__.py", "taut.py",
                 ".local/lib/python3.11/site-packages/usercustomize.py", "pyvenv.cfg"):
        try:
            os.makedirs(os.path.dirname("/tmp/" + name), exist_ok=True)
            open("/tmp/" + name, "w").write("import os; os.write(1, b'taken'); os._exit(0)")
        except OSError: pass
    for name in ("PYTHONPATH", "PYTHONSTARTUP", "PYTHONHOME", "LD_PRELOAD", "PYTHONINSPECT"): os.environ[name] = "/tmp"
    """,
)


def judged(name: str, program: str, expected: Any) -> None:
    """A row whose program gives the ``code`` reward something that it cannot compare."""
    row = {"tests": {"fn_name": "solve", "inputs": [[2]], "outputs": [expected]}}
    if isinstance(expected, str):
        row = {"tests": {"inputs": ["2"], "outputs": [expected]}}
    add(
        name,
        "the reward",
        Must.BE_WRONG,
        program,
        row=row,
        outcomes=ANY,
        limits=BRIEF,
        is_bare=True,
    )


judged("a printed number that is too large", "print('9' * 5000)", "1.5")
judged(
    "printed numbers that are none",
    "print('nan inf -inf 1e999999 0x1p9 1_0 ١')",
    "1.5 1.5 1.5 1.5 1.5 1.5 1.5",
)
judged("a returned number that is too large", "def solve(x): return 10**400", 1.5)
judged(
    "a returned number of too many digits",
    """
    import sys
    sys.set_int_max_str_digits(0)
    def solve(x): return 10**5000
    """,
    1.5,
)
judged(
    "returned numbers that are none", "def solve(x): return [float('nan'), float('inf')]", [1.5, 2]
)
judged(
    "a list as deep as JSON goes",
    """
    def solve(x):
        y = []
        for _ in range(900): y = [y]
        return y
    """,
    [[1]],
)
judged("half a character", "def solve(x): return '\\ud800\\x00'", [["x"]])
judged("bytes that are no text", "import os; os.write(1, bytes(range(256)) * 9)", "1.5")
judged(
    "a name twice",
    """
    import os
    def solve(x):
        os.write(3, b'done {"a": 1, "a": 2}'); os._exit(0)
    """,
    {"a": 1},
)
judged(
    "text that is no JSON",
    """
    import os
    def solve(x):
        os.write(3, b'done }{' + bytes(range(256))); os._exit(0)
    """,
    5,
)

# -- doors into the kernel ---------------------------------------------------------------------------------------------

refused(
    "calls that change the machine",
    "the kernel",
    """
    room = ctypes.create_string_buffer(256)
    path = GIVEN["secret"].encode()
    for name, arguments in {
        "init_module": (room, 0, b""), "finit_module": (0, b"", 0), "delete_module": (b"taut_none", 0x800),
        "kexec_load": (0, 0, None, 0), "kexec_file_load": (0, 0, 0, b"", 0), "reboot": (0, 0, 0, None),
        "swapon": (path, 0), "swapoff": (path,), "acct": (path,), "quotactl": (0x80000100, b"/dev/none", 0, room),
        "quotactl_fd": (0, 0, 0, room), "syslog": (3, room, 256), "vhangup": (), "sethostname": (b"taut", 4),
        "setdomainname": (b"taut", 4), "iopl": (3,), "ioperm": (0x80, 1, 1), "uselib": (path,), "sysfs": (3,),
        "settimeofday": (None, None), "clock_settime": (0, None), "adjtimex": (None,), "clock_adjtime": (0, None),
        "lookup_dcookie": (0, room, 256), "ustat": (0, room),
    }.items():
        door(name, *arguments)
    """,
)
refused(
    "calls that open the kernel wide",
    "the kernel",
    """
    room = ctypes.create_string_buffer(256)
    for name, arguments in {
        "seccomp": (1, 8, room), "landlock_create_ruleset": (None, 0, 1), "landlock_add_rule": (0, 1, room, 0),
        "landlock_restrict_self": (0, 0), "personality": (0x0440000,), "modify_ldt": (1, room, 16),
        "lsm_get_self_attr": (100, room, room, 0), "lsm_set_self_attr": (100, room, 16, 0),
        "lsm_list_modules": (room, room, 0), "cachestat": (0, room, room, 0), "map_shadow_stack": (0, 4096, 0),
        "set_mempolicy_home_node": (0, 0, 0, 0), "pkey_alloc": (0, 0), "mseal": (0, 0, 0), "process_mrelease": (0, 0),
        "signalfd4": (-1, room, 8, 0), "io_pgetevents": (0, 0, 0, None, None, None),
    }.items():
        door(name, *arguments)
    """,
)
refused(
    "other users and capabilities",
    "the kernel",
    """
    header = struct.pack("=Ii", 0x20080522, 0)
    full = b"\\xff" * 24
    me = os.getuid()
    other = 0 if me else 12345
    for name, arguments in {"setuid": (other,), "setgid": (other,), "setreuid": (other, other), "setresuid": (other,) * 3,
                            "setresgid": (other,) * 3, "setgroups": (1, struct.pack("=I", 0)), "capset": (header, full)}.items():
        attempt(name, lambda: call(name, *arguments))
    names = {"ambient": (47, 2, 21), "keep capabilities": (8, 1), "secure bits": (28, 0x2F), "set seccomp": (22, 1),
             "seccomp filter": (22, 2, 0), "any tracer": (0x59616D61, -1), "memory map": (35, 1, 0), "subreaper": (36, 1),
             "signal at the parent's death": (1, 0), "scheduling core": (62, 1, 0), "dumpable": (4, 1), "endian": (20, 0)}
    for name, arguments in names.items():
        door("prctl", *(arguments + (0, 0, 0, 0))[:5], label=name)
    for path in ("/bin/su", "/usr/bin/sudo", "/bin/mount", "/usr/bin/passwd", "/bin/ping", "/usr/bin/newgrp", "/bin/sh"):
        attempt("exec " + path, lambda: os.execv(path, [path, "--version"]))
    """,
)
refused(
    "numbers of calls that no kernel has yet",
    "the kernel",
    """
    for number in [*range(337, 424), *range(470, 700), 1000, 2**20, 2**29]:
        try:
            got = call(number, 0, 0, 0, 0, 0, 0)
        except OSError as error:
            if error.errno in (1, 38):
                continue
            got = error
        print("through", number, got, sep="\\t")
    print("refused", "all others", sep="\\t")
    """,
)
_KILLED = dict.fromkeys(
    (BUBBLEWRAP, LANDLOCK),
    But(
        "the filter kills who calls in another mode of the processor", outcomes=frozenset({"crash"})
    ),
)
for number in (41, 512, 520):
    add(
        f"the name of call {number} in another mode of the processor (x32)",
        "the kernel",
        Must.BE_REFUSED,
        f"door(0x40000000 | {number}, 2, 1, 0)\nend()\n",
        but=_KILLED,
    )
for number, name in ((20, "getpid"), (5, "open"), (102, "socketcall")):
    add(
        f"{name} by the gate of 32-bit programs (int 0x80)",
        "the kernel",
        Must.BE_REFUSED,
        f"""
        import mmap
        code = bytes.fromhex("53 b8 {number:02x} 00 00 00 31 db 31 c9 31 d2 cd 80 5b c3")
        area = mmap.mmap(-1, 4096, prot=7)
        area.write(code)
        address = ctypes.addressof(ctypes.c_char.from_buffer(area))
        got = ctypes.CFUNCTYPE(ctypes.c_int)(address)()
        print("refused" if got in (-1, -38) else "through", "{name}", got, sep="\\t")
        end()
        """,
        but=_KILLED,
    )
add(
    "a call by machine code that passes the C library by",
    "the kernel",
    Must.BE_REFUSED,
    """
    import mmap
    for name, number in (("socket", 41), ("memfd_create", 319), ("ptrace", 101), ("unshare", 272)):
        code = b"\\xb8" + struct.pack("=I", number) + bytes.fromhex("31 ff 31 f6 31 d2 4d 31 d2 0f 05 c3")
        area = mmap.mmap(-1, 4096, prot=7)
        area.write(code)
        address = ctypes.addressof(ctypes.c_char.from_buffer(area))
        got = ctypes.CFUNCTYPE(ctypes.c_long)(address)()
        print("refused" if got in (-1, -38) else "through", name, got, sep="\\t")
    end()
    """,
)
add(
    "what another program may that is started by exec",
    "the kernel",
    Must.BE_REFUSED,
    """
    actions = ["socket.socket()", "open(SECRET)", "os.memfd_create('x')", "os.kill(VICTIM, 15)", "os.setuid(not os.getuid())",
               "os.mkfifo('/x')", "os.check(libc.unshare(0x10000000))", "os.check(libc.ptrace(0, 0, 0, 0))"]
    code = "import ctypes, os, resource, socket, sys"
    code += "\\nSECRET, VICTIM, libc = " + repr(GIVEN["secret"]) + ", " + str(GIVEN["victim"]) + ", ctypes.CDLL(None)"
    code += "\\ndef check(result):\\n  if result < 0: raise OSError\\nos.check = check"
    for action in actions:
        code += f"\\ntry: got = {action}\\nexcept OSError as error: print('refused', {action!r}, sep='\\\\t')"
        code += f"\\nelse: print('through', {action!r}, sep='\\\\t')"
    code += "\\nif resource.getrlimit(resource.RLIMIT_AS)[0] > 2**30: print('through', 'memory', sep='\\\\t')"
    code += "\\nprint('end')"
    try:
        os.execv(GIVEN["python"], [GIVEN["python"], "-I", "-S", "-c", code])
    except OSError as error:
        print("refused", "exec", error.errno, sep="\\t")
        end()
    """,
)
