"""What the writer has made, such as a rollout, goes to each rank once, however many ranks there are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.forked_processes import run

PROGRAM = '''
import json
import sys
from collections import Counter
from dataclasses import fields

import numpy as np
from torch.utils._python_dispatch import TorchDispatchMode

from taut.data.rows.prompts import PromptRow
from taut.errors import DataError
from taut.io import narrow
from taut.rl.rollout import Group, Rollout
from taut.rl.sampler import Trajectory
from taut.train import distributed


class Received(TorchDispatchMode):
    """Counts the bytes that collectives give to this rank."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if name == "c10d::broadcast_":
            self.found["broadcast"] += sum(tensor.nbytes for tensor in args[0])
        elif name == "c10d::allgather_":
            self.found["all_gather"] += sum(tensor.nbytes for some in args[0] for tensor in some)
        elif name.startswith("c10d::"):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def rollout():
    random, groups = np.random.default_rng(0), []
    for number in range(4):
        prompt_T = random.integers(0, 150_000, 60)
        row = PromptRow(f"{number}", f"a:{number}", prompt_T, "?", (), None, {})
        group = []
        for index in range(8):
            size = int(random.integers(1, 800))
            logp_N = -random.random(size).astype(np.float32).astype(np.float64)
            group.append(
                Trajectory(
                    row=row,
                    index=index,
                    ids_T=np.concatenate([prompt_T, random.integers(0, 150_000, size)]),
                    sampled_at_N=np.arange(60, 60 + size),
                    logp_N=logp_N if index else logp_N / 3,
                    version_N=np.repeat([4, 5], [size // 2, size - size // 2]),
                    finish_reason="stop",
                    text="",
                )
            )
        groups.append(Group(tuple(group)))
    return Rollout(groups, seconds_generating=1.5, draws=[3, 1])


def told(value):
    """All that it is made of, arrays by their bytes."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes().hex()
    if isinstance(value, list | tuple):
        return [told(one) for one in value]
    if hasattr(value, "__dataclass_fields__"):
        return [told(getattr(value, field.name)) for field in fields(value)]
    return repr(value)


def fail():
    raise DataError("no more")


ranks, expected = distributed.start("cpu"), rollout()
with Received() as received:
    found = ranks.from_writer(expected if ranks.is_writer else "not read")
same = told(found) == told(expected)
shares_rows = found.groups[0].trajectories[0].row is found.groups[0].trajectories[7].row
with Received() as before:
    ranks.gather(expected if ranks.is_writer else None)
ran = ranks.run_on_writer(lambda: ("only", ranks.rank))
try:
    ranks.run_on_writer(fail)
except DataError as error:
    notes = [str(error), *error.__notes__]
size = len(narrow.packed(expected))
mine = [same, shares_rows, received.found, before.found, ran, notes, size]
every = ranks.gather(mine)
if ranks.is_writer:
    with open(sys.argv[1], "w") as file:
        json.dump(every, file)
distributed.stop(ranks)
'''
NUM_TOKENS = 60 + 400
"""Of a trajectory, on average."""


def found_by(num_ranks: int, place: Path) -> list[list[Any]]:
    (place / "program.py").write_text(PROGRAM)
    done = run(place / "program.py", place / "found.json", num_ranks=num_ranks)
    assert done.returncode == 0, done.stderr
    found: list[list[Any]] = json.loads((place / "found.json").read_text())
    assert len(found) == num_ranks
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_each_rank_gets_it_once_and_to_the_last_bit(num_ranks: int, tmp_path: Path) -> None:
    for same, shares_rows, received, before, ran, notes, size in found_by(num_ranks, tmp_path):
        assert same and shares_rows
        assert received == {"broadcast": 8 + size}, "its size, then itself"
        assert size < 10.5 * 32 * NUM_TOKENS, "in place of 32 bytes a token"
        assert num_ranks * size < before["all_gather"] < num_ranks * (size + 100)
        assert ran == ["only", 0]
        assert notes == ["no more", f"the error of rank 0, raised on all {num_ranks} ranks"]
