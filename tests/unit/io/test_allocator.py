"""Memory that is freed stays with the process within the block, and goes back after it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource
from contextlib import nullcontext
from taut.io.allocator import keep_freed_memory

def resident_mb():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() >> 20

number = int("1")  # no constant that the compiler folds
before = resident_mb()
with keep_freed_memory() if {is_kept} else nullcontext():
    b"x" * (2**26 + number), b"x" * (2**26 + number)  # 64 MiB each
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        b"x" * (2**26 + number)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults, resident_mb() - before)
print(0, resident_mb() - before)
"""

INSIDE = """
import resource
from taut.io.allocator import keep_freed_memory, return_freed_memory

def resident_mb():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() >> 20

number = int("1")
before = resident_mb()
with keep_freed_memory():
    with return_freed_memory():
        blocks = [b"x" * (2**23 + number) for _ in range(20)]
        del blocks[:-1]  # the last would hold the heap open
        print(resident_mb() - before)
    b"x" * (2**26 + number)
    print(resident_mb() - before)
"""


def measured(*, is_kept: bool, **environment: str) -> tuple[int, int, int]:
    """Page faults of five allocations, and MB above the start within the block and after it."""
    program = PROGRAM.format(is_kept=is_kept)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    faults, within, _, after = (int(word) for word in done.stdout.split())
    return faults, within, after


@pytest.mark.skipif(sys.platform != "linux", reason="it is glibc that is asked")
def test_freed_memory_is_used_again_and_goes_back_at_the_end() -> None:
    faults, within, after = measured(is_kept=True)
    assert faults < 1000
    assert within >= 60
    assert after < 10
    assert measured(is_kept=False)[0] > 10_000


@pytest.mark.skipif(sys.platform != "linux", reason="it is glibc that is asked")
def test_the_users_settings_are_left_alone() -> None:
    faults, within, _ = measured(is_kept=True, MALLOC_TRIM_THRESHOLD_="131072")
    assert faults > 10_000
    assert within < 10


@pytest.mark.skipif(sys.platform != "linux", reason="it is glibc that is asked")
def test_freed_memory_is_returned_inside_and_kept_again_afterwards() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INSIDE], capture_output=True, text=True, check=True
    )
    returned, kept = (int(word) for word in done.stdout.split())
    assert returned < 20
    assert kept >= 60
