"""What the jail asks of the Linux kernel that Python's ``os`` does not offer: namespaces, mounts, seccomp, Landlock.

Each function is one system call through ctypes, or a short fixed sequence, and raises OSError where the kernel says
no. It knows x86-64 and arm64.

Runs under ``python -s -S -P``, alone of our package: imports its neighbours and the standard library only.
``jail`` and ``guest`` import it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterable, Sequence

_LIBC = ctypes.CDLL(None, use_errno=True)
_IS_ARM = platform.machine() in ("aarch64", "arm64")
IS_KNOWN = platform.machine() in ("x86_64", "aarch64", "arm64")
"""Whether the numbers of this processor's system calls are known here."""

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/urandom", "/dev/random")
"""All that programs have."""

NEW_USER = 0x10000000
NEW_OTHERS = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWPID, NEWNET."""

_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_RDONLY, _NOSUID, _NODEV = 1, 2, 4


def _call(what: str, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """The system call ``what``; OSError names it."""
    number = _NUMBERS[what][_IS_ARM]
    plain = [ctypes.c_long(it) if isinstance(it, int) else it for it in arguments]
    result: int = _LIBC.syscall(ctypes.c_long(number), *plain)
    if result == -1:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result


def _prctl(what: str, option: int, *arguments: int) -> None:
    plain = [ctypes.c_ulong(it) for it in (*arguments, 0, 0, 0, 0)[:4]]
    if _LIBC.prctl(option, *plain) == -1:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def die_with_parent() -> None:
    """SIGKILL when the thread that forked us ends. A change of user clears it: ask again after one."""
    _prctl("PR_SET_PDEATHSIG", 1, 9)


def adopt_orphans() -> None:
    """Descendants whose parent ends become our children, to be waited for."""
    _prctl("PR_SET_CHILD_SUBREAPER", 36, 1)


def never_gain() -> None:
    """No execve gives privileges from here on."""
    _prctl("PR_SET_NO_NEW_PRIVS", 38, 1)


def drop_capabilities() -> None:
    """Give every capability up: effective, permitted, inheritable, ambient and what a later execve may give."""
    _prctl("PR_CAP_AMBIENT_CLEAR_ALL", 47, 4)
    header = struct.pack("=Ii", 0x20080522, 0)
    _call("capset", header, bytes(24))


# -- mounts ------------------------------------------------------------------------------------------------------------


def unshare(flags: int) -> None:
    _call("unshare", flags)


def mount(kind: str, target: str, flags: int, options: str) -> None:
    _call("mount", kind.encode(), target.encode(), kind.encode(), flags, options.encode())


def make_private() -> None:
    """No mount made here is seen elsewhere, and none made elsewhere is seen here."""
    _call("mount", None, b"/", None, 0x4000 | 0x40000, None)


def cloned(source: str, is_device: bool) -> int:
    """A file descriptor of a read-only copy of the mounts at ``source``; a device stays one."""
    tree = _call("open_tree", _AT_FDCWD, source.encode(), 1 | _AT_RECURSIVE | os.O_CLOEXEC)
    attributes = _NOSUID if is_device else _RDONLY | _NOSUID | _NODEV
    _set_attributes(tree, b"", attributes, _AT_EMPTY_PATH | _AT_RECURSIVE)
    return tree


def attach(tree: int, target: str) -> None:
    """Mount what ``cloned`` gave."""
    _call("move_mount", tree, b"", _AT_FDCWD, target.encode(), 4)


def enter(root: str) -> None:
    """Make ``root`` the root directory, let the old one go, and let nothing be written in the new one itself."""
    os.chdir(root)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", 2)
    os.chdir("/")
    _set_attributes(_AT_FDCWD, b"/", _RDONLY | _NOSUID | _NODEV, 0)


def _set_attributes(folder: int, path: bytes, attributes: int, flags: int) -> None:
    wanted = struct.pack("=QQQQ", attributes, 0, 0, 0)
    _call("mount_setattr", folder, path, flags, wanted, len(wanted))


# -- Landlock ----------------------------------------------------------------------------------------------------------

LANDLOCK_OLDEST = 3
"""The first version that holds truncation."""


def landlock_version() -> int:
    """0 where there is no Landlock."""
    try:
        return _call("landlock_create_ruleset", None, 0, 1)
    except OSError:
        return 0


def landlock(readable: Iterable[str], writable: Iterable[str]) -> None:
    """From here on files are read only below ``readable``, and of ``writable`` (devices) also written; no TCP."""
    version = landlock_version()
    files = 0x7FFF if version < 5 else 0xFFFF
    rules = struct.pack("=QQQ", files, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    rules = rules[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = _call("landlock_create_ruleset", rules, len(rules), 0)
    for paths, is_written in ((readable, False), (writable, True)):
        for path in paths:
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rights = 0b110 if is_written else 0b1100 if os.path.isdir(path) else 0b100  # noqa: PTH112
            _call("landlock_add_rule", ruleset, 1, struct.pack("=Qi", rights, folder), 0)
            os.close(folder)
    _call("landlock_restrict_self", ruleset, 0)
    os.close(ruleset)


# -- seccomp -----------------------------------------------------------------------------------------------------------

_NUMBERS: dict[str, tuple[int, int]] = {
    # Sockets. A pair of streams is allowed (asyncio has one): connected as it is made, it reaches nothing else.
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    # Other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # Memory that no limit counts.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # Namespaces, mounts, handles.
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "quotactl": (179, 60),
    # Wide doors into the kernel.
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "fanotify_init": (300, 262),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "personality": (135, 92),
    "acct": (163, 89),
    "syslog": (103, 116),
    # Used here, or ruled below.
    "capset": (126, 91),
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
    "clone": (56, 220),
    "clone3": (435, 435),
    "prlimit64": (302, 261),
    "socketpair": (53, 199),
    "sendto": (44, 206),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "kill": (62, 129),
    "tgkill": (234, 131),
}
"""name -> number on x86-64 and on arm64."""

_ABSENT = -1
_ALONE: dict[str, tuple[int, int]] = {
    "clone": (56, 220),
    "fork": (57, _ABSENT),
    "vfork": (58, _ABSENT),
    "execve": (59, 221),
    "execveat": (322, 281),
    "setpgid": (109, 154),
    "setsid": (112, 157),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "chmod": (90, _ABSENT),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, _ABSENT),
    "lchown": (94, _ABSENT),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utime": (132, _ABSENT),
    "utimes": (235, _ABSENT),
    "futimesat": (261, _ABSENT),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "flock": (73, 32),
    "inotify_add_watch": (254, 27),
}
"""What a program that has no namespace of its own may not do either: have children or threads, signal others, change
what Landlock leaves open of a file, lock it, watch what others do."""
_ALONE_ONLY = (
    ("fcntl", (0, 1, 2, 3, 4, 1030, 1031, 1032)),
    ("ioctl", (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),
)
"""What of these is left to it, and not to let the kernel signal somebody else, to lock a file or set its flags:
F_DUPFD, GETFD, SETFD, GETFL, SETFL, DUPFD_CLOEXEC, SETPIPE_SZ, GETPIPE_SZ; TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO,
FIONCLEX, FIOCLEX."""

_ALLOW, _REFUSE, _MISSING, _KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_Op = tuple[int, int, int, int]


def forbid(is_alone: bool) -> None:
    """Install the filter for this process and what it forks: refused calls fail with EPERM.

    ``is_alone``: the program has no namespace of its own, so it may not have children or threads, signal others or
    change a file's owner, mode, times or attributes.
    """
    program = _RULES + _encoded([*(_rules_alone() if is_alone else []), (_RETURN, 0, 0, _ALLOW)])
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("=HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    pointer = ctypes.create_string_buffer(header, len(header))
    _prctl("PR_SET_SECCOMP", 22, 2, ctypes.addressof(pointer))


def _rules() -> list[_Op]:
    """A classic BPF program on struct seccomp_data: nr at 0, arch at 4, arguments from 16. It falls through its end."""
    ops: list[_Op] = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, 0xC00000B7 if _IS_ARM else 0xC000003E)]
    ops += [(_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    if not _IS_ARM:  # the x32 names of the same calls
        ops += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _REFUSE)]
    names = list(_NUMBERS)
    for name in names[: names.index("capset")]:
        ops += _refuse(_NUMBERS[name][_IS_ARM])
    ops += _refuse(_NUMBERS["clone3"][_IS_ARM], _MISSING)  # the C library then calls clone
    ops += _unless("clone", 0, NEW_USER | NEW_OTHERS, 0)
    ops += _unless("prlimit64", 0, 0xFFFFFFFF, 0)
    ops += _unless("socketpair", 1, 0xF, 1)
    return (
        ops + _unless("sendto", 4, 0xFFFFFFFF, 0) + _unless("sendto", 4, 0xFFFFFFFF, 0, high=True)
    )


def _rules_alone() -> list[_Op]:
    """More of them, for this process."""
    ops: list[_Op] = []
    for numbers in _ALONE.values():
        if numbers[_IS_ARM] != _ABSENT:
            ops += _refuse(numbers[_IS_ARM])
    for name, commands in _ALONE_ONLY:
        ops += _only(name, 1, commands)
    ops += _unless("kill", 0, 0xFFFFFFFF, os.getpid())
    return ops + _unless("tgkill", 0, 0xFFFFFFFF, os.getpid())


def _encoded(ops: Iterable[_Op]) -> bytes:
    return b"".join(struct.pack("=HBBI", *op) for op in ops)


def _refuse(number: int, answer: int = _REFUSE) -> list[_Op]:
    return [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, answer)]


def _unless(name: str, argument: int, mask: int, value: int, high: bool = False) -> list[_Op]:
    """Refuse the call unless a half of its argument, masked, has the value; then the number is loaded again."""
    return [
        (_EQUAL, 0, 5, _NUMBERS[name][_IS_ARM]),
        (_LOAD, 0, 0, 16 + 8 * argument + 4 * high),
        (_AND, 0, 0, mask),
        (_EQUAL, 1, 0, value),
        (_RETURN, 0, 0, _REFUSE),
        (_LOAD, 0, 0, 0),
    ]


def _only(name: str, argument: int, values: Sequence[int]) -> list[_Op]:
    """Refuse the call unless its argument, 32 bits wide, is one of the values."""
    count = len(values)
    return [
        (_EQUAL, 0, count + 3, _NUMBERS[name][_IS_ARM]),
        (_LOAD, 0, 0, 16 + 8 * argument),
        *((_EQUAL, count - index, 0, value) for index, value in enumerate(values)),
        (_RETURN, 0, 0, _REFUSE),
        (_LOAD, 0, 0, 0),
    ]


_RULES = _encoded(_rules()) if IS_KNOWN else b""
