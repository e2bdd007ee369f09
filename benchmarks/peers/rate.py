"""How fast this machine is now: ``python rate.py JOB.json``, half a second of float32 products of one shape.

Writes GFLOP/s of PyTorch's own library and of oneDNN (null where the build has none); they take turns, and the median
counts.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROWS, INPUTS, OUTPUTS = 2048, 256, 1024
SECONDS = 0.5


def main() -> None:
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    x, weight = torch.ones(ROWS, INPUTS), torch.ones(OUTPUTS, INPUTS)
    calls = {"torch": lambda: x @ weight.T}
    if torch._C._has_mkldnn:
        calls["onednn"] = lambda: torch.ops.mkldnn._linear_pointwise(
            x, weight, None, "none", [], ""
        )
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    flops = 2 * ROWS * INPUTS * OUTPUTS
    rates = {name: flops / 1e9 / median(some) for name, some in times.items()}
    result = {"torch": rates["torch"], "onednn": rates.get("onednn")}
    Path(job["result"]).write_text(json.dumps(result))


main()
