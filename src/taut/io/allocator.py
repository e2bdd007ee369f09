"""Memory of the C library that the process keeps.

glibc returns large blocks to the system as soon as they are freed. A training step frees and allocates gigabytes of
activations, and every page that comes back is cleared by the kernel at its first use: 7 to 9% of a step on two cores.

Kept without end, a heap grows from step to step: each has blocks of other lengths, for which the holes of the last one
do not fit. So ``give_back_surplus``, asked before each step, gives the free pages back once the process holds a tenth
more than a step needs. That takes some tenths of a second, and the next step clears its pages again; what it then holds
is what it needs. oneDNN, which computes bfloat16 products, keeps a third of a megabyte for every shape that it has met,
and torch's own cache of its kernels as much again: ``bound_kernel_cache`` says how many.

What it takes for a large block grows, to 32 MiB, as such blocks are freed. Smaller ones are cut from a heap that goes
back from its end only, and reading a model that is quantized here fills it with holes: a rank that kept 0.5 GiB of a
billion weights in int8 held 1.3.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""
_WITHIN = {_TRIM_THRESHOLD: -1, _MMAP_THRESHOLD: 2**31 - 1}
"""No trimming, and blocks of up to 2 GiB from the heap."""
_AFTERWARDS = {_TRIM_THRESHOLD: 2**26, _MMAP_THRESHOLD: 2**25}
"""Where glibc's own adjustment of the two ends in a process that has freed large blocks."""
_RETURNED = {_TRIM_THRESHOLD: 2**20, _MMAP_THRESHOLD: 2**20}
"""Blocks of a MiB or more are mapped one by one."""
_current = _AFTERWARDS
SURPLUS = 1.1
"""From this multiple of what a step needs on, free pages go back."""


class _Level:
    """Memory that the process has held at the beginnings of steps."""

    needed, num_fresh = 0.0, 0
    """Bytes that a step needs: what those have left that began without surplus, on average, and their number. The most
    of it would grow with every step that leaves more holes than others."""
    is_fresh = False
    """Whether the step that has just ended began without surplus."""


USER_SETTINGS = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "LD_PRELOAD",
)
"""Environment variables with which users choose for themselves; they are left alone."""

KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Environment variables that bound the kernels of oneDNN, and those that torch keeps of them (ideep)."""


@contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Within the block, memory that is freed stays with the process for its next allocation; what is free before the
    block and after it goes back to the system. Nothing happens where the C library is not glibc, or its settings are
    the user's; an older glibc maps blocks of more than 32 MiB all the same.
    """
    _Level.needed, _Level.num_fresh, _Level.is_fresh = 0.0, 0, False
    with _thresholds(_WITHIN):
        yield


def give_back_surplus() -> None:
    """Between two steps: give free pages back to the system where the process holds more than a step needs. Nothing
    happens outside of ``keep_freed_memory``.
    """
    held = resident_bytes()
    if held is None or _current is not _WITHIN:
        return
    if _Level.is_fresh:
        _Level.num_fresh += 1
        _Level.needed += (held - _Level.needed) / _Level.num_fresh
    _Level.is_fresh = held > SURPLUS * _Level.needed
    if _Level.is_fresh:
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def resident_bytes() -> int | None:
    """Memory that this process holds; None where there is no /proc (macOS)."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def bound_kernel_cache() -> None:
    """Let oneDNN, and what torch keeps of it, hold the kernels of the shapes of a few micro-batches (of themselves:
    1,024 each), for a torch that is not imported yet, unless the user has said how many.
    """
    for variable in KERNEL_CACHES:
        os.environ.setdefault(variable, "64")


@contextmanager
def return_freed_memory() -> Iterator[None]:
    """Within the block, memory that is freed in blocks of a MiB or more goes back to the system at once, also inside
    ``keep_freed_memory``, and the rest after it. Nothing happens in the cases named there.
    """
    with _thresholds(_RETURNED):
        yield


@contextmanager
def _thresholds(wanted: dict[int, int]) -> Iterator[None]:
    """Within the block, the settings ``wanted``; after it, those that were before."""
    global _current
    # glibc alone, unless the user has chosen
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    has_glibc = library is not None and hasattr(library, "gnu_get_libc_version")
    if library is None or not has_glibc or any(os.environ.get(name) for name in USER_SETTINGS):
        yield
        return
    before, _current = _current, wanted
    library.malloc_trim(ctypes.c_size_t(0))
    for parameter, threshold in wanted.items():
        library.mallopt(parameter, threshold)
    try:
        yield
    finally:
        _current = before
        for parameter, threshold in before.items():
            library.mallopt(parameter, threshold)
        library.malloc_trim(ctypes.c_size_t(0))
