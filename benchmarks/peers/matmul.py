"""What this machine can do: ``python matmul.py JOB.json``.

Times the three products that training needs of each (m, k, n) in the job (forward, gradient of the
input, gradient of the weight), and one fused AdamW step over the model's parameters. Writes seconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from recorder import Job


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)


def time_products(m: int, k: int, n: int, dtype: torch.dtype) -> float:
    x, w, dy = (torch.randn(shape, dtype=dtype) for shape in ((m, k), (n, k), (m, n)))
    y, dx, dw = torch.empty_like(dy), torch.empty_like(x), torch.empty_like(w)

    def work() -> None:
        torch.mm(x, w.T, out=y)
        torch.mm(dy, w, out=dx)
        torch.mm(dy.T, x, out=dw)

    return seconds(work)


def time_adamw(num_parameters: int) -> float:
    parameter = torch.zeros(num_parameters, requires_grad=True)
    parameter.grad = torch.randn(num_parameters)
    return seconds(torch.optim.AdamW([parameter], fused=True).step)


def main() -> None:
    job: Job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    dtype = getattr(torch, job["dtype"])
    result = {
        "products": [time_products(*shape, dtype) for shape in job["shapes"]],
        "adamw": time_adamw(job["num_parameters"]),
    }
    Path(job["result"]).write_text(json.dumps(result))


main()
