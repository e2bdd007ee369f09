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


STEPS = """
import random, sys
import torch
from torch import nn
from taut.io import allocator

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(128, 384), nn.Linear(128, 128)
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x):
        q, k, v = self.qkv(x).view(1, -1, 3, 4, 32).transpose(1, 3).unbind(2)
        read = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(read.transpose(1, 2).reshape(1, -1, 128))
        return x + self.down(nn.functional.silu(self.up(x)))

torch.set_num_threads(1)
model = nn.Sequential(*[Block() for _ in range(6)], nn.Linear(128, 1000))
optimizer, draw, levels = torch.optim.AdamW(model.parameters()), random.Random(0), []
with allocator.keep_freed_memory():
    for step in range(int(sys.argv[1])):
        levels.append(allocator.resident_bytes() / 1e6)
        if sys.argv[2] == "True":
            allocator.give_back_surplus()
        for _ in range(2):
            model(torch.randn(1, draw.randint(50, 400), 128)).logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
print(*levels)
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


SURPLUS = """
from taut.io import allocator

number = int("1")
with allocator.keep_freed_memory():
    b"x" * (2**28 + number)  # before the first step
    levels = []
    for size in (2**26, 2**26, 2**28, 2**26, 2**26):
        allocator.give_back_surplus()
        levels.append(allocator.resident_bytes() >> 20)
        b"x" * (size + number)
allocator.give_back_surplus()
print(*levels)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it is glibc that is asked")
def test_free_pages_go_back_between_steps_where_there_is_a_surplus() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SURPLUS], capture_output=True, text=True, check=True
    )
    start, first, kept, given_back, again = (int(word) for word in done.stdout.split())
    assert start < first - 50, "what is free before the first step is none of its needs"
    assert abs(kept - first) < 8, "no surplus: it stays for the next step"
    assert given_back < first - 50
    assert abs(again - first) < 8


@pytest.mark.skipif(sys.platform != "linux", reason="it is glibc that is asked")
@pytest.mark.slow
def test_what_is_held_stays_level_over_steps_of_other_lengths() -> None:
    """What a process holds at the beginning of a step, over 200 steps of a small model."""
    command = [sys.executable, "-c", STEPS, "200", "True"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    levels = [float(word) for word in done.stdout.split()]
    settled = sorted(levels[10:])
    assert settled[-1] < 1.2 * settled[0]
    first, last = (sum(levels[at : at + 20]) / 20 for at in (10, 180))
    assert abs(last - first) < 0.1 * first
