"""The system calls that a program may make: an allow-list, compiled by libseccomp.

All other calls are refused, also those that a later kernel adds: with EPERM if libseccomp knows the call, else with
ENOSYS, the answer of an older kernel, which the C library expects for new calls. Calls of another architecture (32-bit,
x32) kill the process.

libseccomp is Debian's libseccomp2, on which apt itself depends, through PyPI's pyseccomp: one file of ctypes with the
interface of libseccomp's own Python binding, which is not on PyPI. The host compiles the filter once; the runner
installs the compiled bytes and needs neither.
"""

from __future__ import annotations

import errno
import functools
import os
from types import ModuleType
from typing import NamedTuple

from taut.errors import SandboxError
from taut.io.extras import install_command

_FILES = """
read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek sendfile fsync fdatasync
open openat close close_range dup dup2 dup3 pipe pipe2 access faccessat faccessat2 stat lstat fstat newfstatat statx
statfs fstatfs getdents getdents64 getcwd umask ftruncate truncate fadvise64
poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2
"""
_MEMORY = "brk munmap mprotect mremap"
_PROCESS = """
exit exit_group wait4 waitid getpid getppid gettid getpgrp getuid geteuid getgid getegid getresuid getresgid getgroups
set_tid_address set_robust_list rseq arch_prctl futex membarrier getcpu sched_yield getrlimit setrlimit getrusage times
rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigsuspend sigaltstack pause restart_syscall
alarm setitimer getitimer nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time getrandom uname sysinfo
"""
_PAIRS = "recvfrom shutdown"
"""Calls for a pair of sockets, which are connected from the start and reach nothing else; asyncio has such a pair."""
_OWN_NAMESPACES = """
creat rename renameat renameat2 mkdir mkdirat rmdir unlink unlinkat link linkat symlink symlinkat readlink readlinkat
chdir fchdir chmod fchmod fchmodat fchmodat2 utime utimes futimesat utimensat
fork vfork execve execveat kill tkill tgkill setpgid getpgid setsid getsid getpriority
"""
"""Calls that are harmless only if a program can name no files and processes but its own."""

_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
_HUGE_PAGES = 0x40000
"""MAP_HUGETLB: pages of a pool that the whole machine shares."""
_ADVICE = (0, 1, 2, 3, 4, 8, 14, 15, 16, 17)
"""madvise: NORMAL, RANDOM, SEQUENTIAL, WILLNEED, DONTNEED, FREE, HUGEPAGE, NOHUGEPAGE, DONTDUMP, DODUMP."""
_FILE_COMMANDS = (0, 1, 2, 3, 4, 1030, 1032)
"""fcntl: DUPFD, GETFD, SETFD, GETFL, SETFL, DUPFD_CLOEXEC, GETPIPE_SZ. No locks: no limit counts their memory."""
_DEVICE_COMMANDS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""ioctl: TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
_NAMES = (15, 16)
"""prctl: SET_NAME, GET_NAME. Not the signal at the parent's death, which ends a program that outlives taut."""
_LAST = 1024
"""Bound on the numbers of system calls."""


class Count(NamedTuple):
    """Numbers of system calls."""

    allowed: int
    partly: int
    """Number of allowed calls that are allowed with some arguments only."""
    known: int
    """Number of calls that libseccomp knows."""


def count(has_namespaces: bool) -> Count:
    """Count system calls. Raises SandboxError where libseccomp is missing."""
    library = _library()
    known = _known(library)
    partly = [name for name in _some_arguments(library, has_namespaces) if name in known]
    wholly = [name for name in _names(has_namespaces) if name in known]
    return Count(len(wholly) + len(partly), len(partly), len(known))


@functools.cache
def compiled(has_namespaces: bool) -> bytes:
    """Compile the filter for the kernel. ``has_namespaces``: whether a program has files and processes of its own.

    Raises SandboxError where libseccomp is missing.
    """
    library = _library()
    try:
        calls = library.SyscallFilter(library.ERRNO(errno.ENOSYS))
        calls.set_attr(library.Attr.CTL_OPTIMIZE, 2)  # a search tree
        names = _names(has_namespaces)
        some = _some_arguments(library, has_namespaces)
        known = _known(library)
        for name, number in known.items():
            if name in names:
                calls.add_rule(library.ALLOW, number)
            elif name not in some and name != "clone3":  # without it the C library calls clone
                calls.add_rule(library.ERRNO(errno.EPERM), number)
        for name, variants in some.items():
            for arguments in variants if name in known else ():
                calls.add_rule(library.ALLOW, known[name], *arguments)
        with os.fdopen(os.memfd_create("calls"), "w+b") as file:
            calls.export_bpf(file)
            file.seek(0)
            return file.read()
    except (OSError, RuntimeError, ValueError) as error:
        raise SandboxError(
            f"libseccomp cannot compile the filter of system calls: {error}; expected version 2.5 or later; update it"
        ) from error


def _library() -> ModuleType:
    try:
        import pyseccomp
    except (ImportError, RuntimeError) as error:  # RuntimeError: libseccomp itself is missing
        raise SandboxError(
            f"libseccomp cannot be had: {error}; expected pyseccomp and libseccomp.so.2; "
            f"run: {install_command('rl')}, and on Debian apt install libseccomp2"
        ) from error
    library: ModuleType = pyseccomp
    return library


def _names(has_namespaces: bool) -> list[str]:
    """Calls that are allowed with any arguments."""
    names = f"{_FILES} {_MEMORY} {_PROCESS} {_PAIRS}".split()
    return names + (_OWN_NAMESPACES.split() if has_namespaces else [])


def _known(library: ModuleType) -> dict[str, int]:
    """Names and numbers of all system calls of this architecture that libseccomp knows."""
    architecture = library.Arch.NATIVE
    numbers: dict[str, int] = {}
    for number in range(_LAST):
        try:
            name = library.resolve_syscall(architecture, number)
        except ValueError:
            continue
        numbers[name.decode() if isinstance(name, bytes) else name] = number
    return numbers


def _some_arguments(
    library: ModuleType, has_namespaces: bool
) -> dict[str, list[tuple[object, ...]]]:
    """Calls that are allowed with some arguments only, each with the conditions that allow it."""

    def is_one_of(place: int, values: tuple[int, ...]) -> list[tuple[object, ...]]:
        return [(library.Arg(place, library.MASKED_EQ, 0xFFFFFFFF, value),) for value in values]

    def has_none(place: int, bits: int) -> list[tuple[object, ...]]:
        return [(library.Arg(place, library.MASKED_EQ, bits, 0),)]

    unix_stream = (
        library.Arg(0, library.MASKED_EQ, 0xFFFFFFFF, 1),
        library.Arg(1, library.MASKED_EQ, 0xF, 1),
    )
    some: dict[str, list[tuple[object, ...]]] = {
        "mmap": has_none(3, _HUGE_PAGES),
        "madvise": is_one_of(2, _ADVICE),
        "fcntl": is_one_of(1, _FILE_COMMANDS),
        "ioctl": is_one_of(1, _DEVICE_COMMANDS),
        "prctl": is_one_of(0, _NAMES),
        "prlimit64": is_one_of(0, (0,)),
        "sched_getaffinity": is_one_of(0, (0,)),
        "socketpair": [unix_stream],
        "sendto": [(library.Arg(4, library.EQ, 0),)],
    }
    if has_namespaces:
        some["clone"] = has_none(0, _NEW_NAMESPACES)
    return some
