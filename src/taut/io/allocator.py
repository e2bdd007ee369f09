"""Memory of the C library that the process keeps while it trains on a CPU.

glibc returns large blocks to the system as soon as they are freed. A training step frees and allocates gigabytes of
activations, and every page that comes back is cleared by the kernel at its first use: 7 to 9% of a step on two cores.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""
_WITHIN = {_TRIM_THRESHOLD: -1, _MMAP_THRESHOLD: 2**31 - 1}
"""No trimming, and blocks of up to 2 GiB from the heap."""
_AFTERWARDS = {_TRIM_THRESHOLD: 2**26, _MMAP_THRESHOLD: 2**25}
"""Where glibc's own adjustment of the two ends in a process that has freed large blocks."""
USER_SETTINGS = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "LD_PRELOAD",
)
"""Environment variables with which users choose for themselves; they are left alone."""


@contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Within the block, memory that is freed stays with the process for its next allocation; what is free before the
    block and after it goes back to the system. Nothing happens where the C library is not glibc, or its settings are
    the user's; an older glibc maps blocks of more than 32 MiB all the same.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    has_glibc = library is not None and hasattr(library, "gnu_get_libc_version")
    if library is None or not has_glibc or any(os.environ.get(name) for name in USER_SETTINGS):
        yield
        return
    library.malloc_trim(ctypes.c_size_t(0))
    for parameter, threshold in _WITHIN.items():
        library.mallopt(parameter, threshold)
    try:
        yield
    finally:
        for parameter, threshold in _AFTERWARDS.items():
            library.mallopt(parameter, threshold)
        library.malloc_trim(ctypes.c_size_t(0))
