"""System calls of the runner that Python's ``os`` does not offer: prctl, mounts, Landlock, seccomp.

Each function is one system call through ctypes, or a short fixed sequence, and raises OSError where the kernel refuses.

Runs under ``python -s -S -P`` without the rest of taut, so it imports the standard library only.
"""

from __future__ import annotations

import ctypes
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_LIBC = ctypes.CDLL(None, use_errno=True)
_IS_ARM = os.uname().machine == "aarch64"

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/urandom", "/dev/random")
"""All devices that programs have."""

LANDLOCK_OLDEST = 3
"""The first version of Landlock that restricts truncation."""


def _checked(what: str, result: int) -> int:
    if result == -1:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result


def _syscall(what: str, number: int, *arguments: int | bytes | None) -> int:
    plain = [
        ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments
    ]
    return _checked(what, _LIBC.syscall(ctypes.c_long(number), *plain))


def _prctl(what: str, option: int, *arguments: int) -> None:
    plain = [ctypes.c_ulong(argument) for argument in (*arguments, 0, 0, 0, 0)[:4]]
    _checked(what, _LIBC.prctl(option, *plain))


def die_with_parent() -> None:
    """Let this process get SIGKILL when the thread that forked it ends. A change of user clears this."""
    _prctl("PR_SET_PDEATHSIG", 1, 9)


def never_gain() -> None:
    """Forbid any gain of privileges by execve."""
    _prctl("PR_SET_NO_NEW_PRIVS", 38, 1)


def drop_capabilities() -> None:
    """Give up every capability: permitted, effective, inheritable and ambient."""
    _prctl("PR_CAP_AMBIENT_CLEAR_ALL", 47, 4)
    header = struct.pack("=Ii", 0x20080522, 0)
    _syscall("capset", 91 if _IS_ARM else 126, header, bytes(24))


_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND = 1, 2, 4, 8, 32, 4096


def limit_scratch(path: str, megabytes: int, files: int) -> None:
    """Bound the size and the number of files of the tmpfs that is mounted at ``path``."""
    # The folder itself counts as one more.
    _remount(path, _NOSUID | _NODEV, f"size={megabytes}m,nr_inodes={files + 1}")


def keep_attributes(device: str) -> None:
    """Forbid changes of a device's times, mode and owner; reading and writing stay allowed."""
    _remount(device, _BIND | _RDONLY | _NOSUID | _NOEXEC, "")


def _remount(path: str, flags: int, options: str) -> None:
    all_flags = ctypes.c_ulong(_REMOUNT | flags)
    _checked(
        f"mount {path}",
        _LIBC.mount(b"none", path.encode(), None, all_flags, options.encode()),
    )


def landlock_version() -> int:
    """The kernel's version of Landlock, or 0 without it."""
    try:
        return _syscall("landlock_create_ruleset", 444, None, 0, 1)
    except OSError:
        return 0


def landlock(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Restrict this process to files below ``readable`` and, also for writing, the devices ``writable``; forbid TCP.

    From version 6 on, signals and abstract unix sockets reach no process outside either.
    """
    version = landlock_version()
    files = 0x7FFF if version < 5 else 0xFFFF
    rules = struct.pack("=QQQ", files, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    rules = rules[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = _syscall("landlock_create_ruleset", 444, rules, len(rules), 0)
    for paths, is_written in ((readable, False), (writable, True)):
        for path in paths:
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rights = 0b110 if is_written else 0b1100 if os.path.isdir(path) else 0b100  # noqa: PTH112
            rule = struct.pack("=Qi", rights, folder)
            _syscall("landlock_add_rule", 445, ruleset, 1, rule, 0)
            os.close(folder)
    _syscall("landlock_restrict_self", 446, ruleset, 0)
    os.close(ruleset)


def allow_only(calls: bytes) -> None:
    """Install the seccomp filter ``calls`` (``seccomp_rules.py``) for this process and its children."""
    buffer = ctypes.create_string_buffer(calls, len(calls))
    header = struct.pack("=HxxxxxxQ", len(calls) // 8, ctypes.addressof(buffer))
    pointer = ctypes.create_string_buffer(header, len(header))
    _prctl("PR_SET_SECCOMP", 22, 2, ctypes.addressof(pointer))
