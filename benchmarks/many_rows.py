"""The first step from a warm cache, by the number of rows: seconds, memory, and a step's planning.

The rows are made, not tokenized: a source's arrays are written as they are cached. Each size is measured in a process
of its own, after its files were written (the page cache is warm): to load the data; to ask of all ids what a run does
at its start; to make the order; to plan the first step, for which shards are opened and verified; then the median of
later steps. ``data_mb`` is memory that belongs to files; ``own_mb`` is the rest.

    python many_rows.py --rows 100000 1000000 3000000
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np

PER_SHARD = 250_000
SAMPLES, TOKENS, VOCAB, END = 512, 128, 8192, 2
"""Samples of a step; the mean length of a sample; the size of the vocabulary; the token that ends each sample."""
KEY = "0" * 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000, 3_000_000])
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure is not None:
        print(json.dumps(measured(asked.measure)))
        return
    print("rows, seconds: load, look, order, first step, later steps; own_mb, data_mb")
    for num_rows in asked.rows:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), num_rows)
            command = [sys.executable, __file__, "--measure", folder]
            found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        figures = (f"{name} {value:.3g}" for name, value in found.items())
        print(f"{num_rows:,}:", ", ".join(figures), flush=True)


def write(folder: Path, num_rows: int) -> None:
    """A source's shards, as the cache has them: two thirds of a row are targets."""
    from taut.data.store import cache
    from taut.data.store.shards import Shard

    def shards(_: int) -> Iterator[Shard]:
        random = np.random.default_rng(0)
        for first in range(0, num_rows, PER_SHARD):
            count = min(PER_SHARD, num_rows - first)
            length_S = random.integers(TOKENS // 2, TOKENS * 3 // 2, count)
            target_S = length_S * 2 // 3
            offsets, bounds = (np.append(0, np.cumsum(sizes)) for sizes in (length_S, target_S))
            ids = random.integers(END + 1, VOCAB, offsets[-1], dtype=np.int32)
            ids[offsets[1:] - 1] = END
            starts = np.repeat(length_S - target_S - bounds[:-1], target_S)
            arrays = {
                "ids": ids,
                "offsets": offsets,
                "target_at": (starts + np.arange(bounds[-1])).astype(np.int32),
                "target_offsets": bounds,
                "line": np.arange(first + 1, first + count + 1),
                "part": np.zeros(count, dtype=np.int32),
            }
            yield Shard(arrays, count, (), ends=(END,))

    cache.save(folder, KEY, shards)


def measured(folder: Path) -> dict[str, float]:
    from taut.data.batching import Budget, CostModel, Rows, assign
    from taut.data.dataset import Dataset, SourceShards
    from taut.data.settings import BatchConfig
    from taut.data.store import cache

    begin = time.perf_counter()
    shards, reason = cache.load(folder, KEY)
    if shards is None:
        raise SystemExit(reason)
    names = ("rows",)
    data = Dataset([SourceShards("rows", names, 1.0, KEY, shards, "rows", (), names)])
    data.described("train")
    loaded = time.perf_counter()
    data.first_id_over(VOCAB)
    assert data.num_ended == len(data)
    looked_at = time.perf_counter()
    rows = Rows(data)
    order = rows.order(BatchConfig(samples_per_step=SAMPLES), 0, SAMPLES)
    order.step(1)
    ordered = time.perf_counter()
    budget, seconds = Budget(8192, 8, CostModel(6e6, 1e4, 2e6)), []
    for step in range(1, 12):
        start = time.perf_counter()
        assign(rows.trees(order.step(step)), budget)
        seconds.append(time.perf_counter() - start)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "load": loaded - begin,
        "look": looked_at - loaded,
        "order": ordered - looked_at,
        "first": seconds[0],
        "later": median(seconds[1:]),
        "own_mb": int(status["RssAnon"].split()[0]) / 1024,
        "data_mb": int(status["RssFile"].split()[0]) / 1024,
    }


if __name__ == "__main__":
    main()
