"""What grows with shards and with ranks, before and after: ``python benchmarks/scale_data.py [--quick]``.

    shards      a source of many small shards, read in random order under a low limit of open files (``--limit``)
                before: every opened shard stays open. after: those used last, in at most 64 files
    rollouts    a rollout of ``--mib`` MiB, as pickled, from the first rank to all, by gloo on this machine
                before: ``all_gather_object`` of it and of nothings. after: ``Ranks.from_writer``

Of rollouts: the bytes that collectives give to a rank, its additional memory at the peak, and seconds until all have
it. Bytes are exact; seconds are those of a machine whose cores all ranks share. What arrives is compared with what was
sent.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEY, SAMPLES = "0" * 64, 64
"""Name of the source; samples of a shard."""
ARRAYS = ("ids_T", "sampled_at_N", "logp_N", "version_N")
"""Of a trajectory."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--shards", type=int)
    parser.add_argument("--limit", type=int, default=1024)
    parser.add_argument("--mib", type=int)
    parser.add_argument("--ranks", type=int, nargs="+")
    parser.add_argument("--files", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.part == "shards":
        print(read_shards(Path.cwd(), asked.files, asked.limit))
    elif asked.part == "rollouts":
        send_rollouts(asked.mib)
    else:
        num_shards, mib = (
            asked.shards or (200 if asked.quick else 500),
            asked.mib or (4 if asked.quick else 32),
        )
        compare_shards(num_shards, asked.limit)
        compare_rollouts(mib, asked.ranks or ([2, 4] if asked.quick else [2, 4, 8, 16]))


# -- shards


def compare_shards(num_shards: int, limit: int) -> None:
    from taut.data.store import cache

    os.fsync = lambda _: None  # type: ignore[assignment]  # what is written is removed again
    with tempfile.TemporaryDirectory() as folder:
        cache.save(Path(folder), KEY, lambda _: map(shard, range(num_shards)))
        print(
            f"{num_shards} shards, ulimit -n {limit}; open files, ms of processor time a sample, in random order"
        )
        for name, files in (("before", 10**9), ("after", cache.MOST_OPEN_FILES)):
            words = ["--part", "shards", "--files", str(files), "--limit", str(limit)]
            print(f"    {name:7}", started(words, {}, folder).communicate()[0].strip(), flush=True)


def shard(number: int) -> Any:
    """The shard of this number: samples of 100 tokens, the last of which is the target."""
    from taut.data.store.shards import Shard

    first = number * SAMPLES
    arrays: dict[str, NDArray[Any]] = {
        "ids": np.repeat(np.arange(first, first + SAMPLES, dtype=np.int32), 100),
        "offsets": np.arange(SAMPLES + 1) * 100,
        "target_at": np.full(SAMPLES, 99, np.int32),
        "target_offsets": np.arange(SAMPLES + 1),
        "line": np.arange(first, first + SAMPLES),
        "part": np.zeros(SAMPLES, np.int32),
    }
    return Shard(arrays, SAMPLES, ())


def read_shards(folder: Path, files: int, limit: int) -> str:
    """Open every shard, then read samples in random order."""
    from taut.data.store import cache

    cache.MOST_OPEN_FILES = files
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    shards, reason = cache.load(folder, KEY)
    assert shards is not None, reason
    try:
        for number in range(len(shards)):  # each is verified
            shards[number]
    except ValueError as error:
        return f"shard {number}: {error}"
    order = np.random.default_rng(0).integers(0, shards.num_samples, 10 * len(shards)).tolist()
    began = time.process_time()
    for index in order:
        found, inside = shards.locate(index)
        assert found.sample(inside, "").ids_T[0] == index
    seconds = (time.process_time() - began) / len(order)
    return f"{len(list(Path('/proc/self/fd').iterdir()))}, {1e3 * seconds:.3f}"


# -- rollouts


def compare_rollouts(mib: int, counts: list[int]) -> None:
    print(f"a rollout of {mib} MiB; ranks; MiB received, MiB of memory, seconds: before, after")
    for count in counts:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        world = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        words = ["--part", "rollouts", "--mib", str(mib)]
        ranks = [
            started(words, {**world, "RANK": rank, "LOCAL_RANK": rank}, ".")
            for rank in range(count)
        ]
        told = [rank.communicate()[0] for rank in ranks]
        assert not any(rank.returncode for rank in ranks), "a rank has failed"
        print(f"    {count:3}  {told[0].strip()}", flush=True)


def send_rollouts(mib: int) -> None:
    """One rank: the same rollout in both ways. The first rank prints."""
    import torch
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode

    from taut.train import distributed

    class Received(TorchDispatchMode):  # type: ignore[no-untyped-call]
        num_bytes = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            for given in args[0] if func.name().startswith("c10d::") else ():
                tensors = given if isinstance(given, list) else [given]
                self.num_bytes += sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
            return func(*args, **(kwargs or {}))

    ranks, made = distributed.start("cpu"), rollout(mib)
    value = made if ranks.is_writer else None

    def before() -> Any:
        values: list[Any] = [None] * ranks.size
        dist.all_gather_object(values, value)
        return values[0]

    ways: Mapping[str, Callable[[], Any]] = {
        "before": before,
        "after": lambda: ranks.from_writer(value),
    }
    told = []
    for way in ways.values():
        ranks.gather(None)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        held, began = memory("VmRSS"), time.perf_counter()
        with Received() as received:  # type: ignore[no-untyped-call]
            found = way()
        seconds = ranks.max([time.perf_counter() - began])[0]
        peak = ranks.max([memory("VmHWM") - held])[0]
        for one, other in zip(found, made, strict=True):
            assert one.text == other.text
            for name in ARRAYS:
                got, sent = getattr(one, name), getattr(other, name)
                assert got.dtype == sent.dtype and got.tobytes() == sent.tobytes(), name
        num_bytes = ranks.max([received.num_bytes])[0]
        told.append(f"{num_bytes / 2**20:8.1f} {peak:8.0f} {seconds:7.2f}")
        del found
    if ranks.is_writer:
        print(" | ".join(told))
    distributed.stop(ranks)


def rollout(mib: int) -> list[Any]:
    """Trajectories of 2,000 sampled tokens, with arrays as an engine's client makes them and text."""
    from taut.data.rows.prompts import PromptRow
    from taut.rl.sampler import Trajectory

    random, found = np.random.default_rng(0), list[Any]()
    prompt_T, size = random.integers(0, 150_000, 200), 2000
    row = PromptRow("a:1", "1", prompt_T, "?", (), None, {})
    for index in range(mib * 2**20 // (size * 36)):
        found.append(
            Trajectory(
                row=row,
                index=index,
                ids_T=np.concatenate([prompt_T, random.integers(0, 150_000, size)]),
                sampled_at_N=np.arange(200, 200 + size),
                logp_N=-random.random(size).astype(np.float32).astype(np.float64),
                version_N=np.full(size, index % 2),
                finish_reason="stop",
                text=bytes(random.integers(97, 123, 4 * size, np.uint8)).decode(),
            )
        )
    return found


def memory(name: str) -> float:
    """A line of /proc/self/status, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def started(words: list[str], environment: Mapping[str, Any], folder: str) -> subprocess.Popen[str]:
    """This program, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), *words],
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
    )


if __name__ == "__main__":
    main()
