"""What this machine can do: ``python matmul.py JOB.json``.

Times the three products that training needs of each (m, k, n) in the job (forward, gradient of the
input, gradient of the weight), each by the faster of PyTorch's own library and oneDNN, and one fused
AdamW step over the model's parameters. Writes seconds.
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
from torch import Tensor


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
    return sum(
        fastest(left, right)
        for left, right in ((x, w), (dy, w.T.contiguous()), (dy.T.contiguous(), x.T.contiguous()))
    )


def fastest(left: Tensor, right: Tensor) -> float:
    """Seconds of left right^T."""
    out = left.new_empty(left.shape[0], right.shape[0])
    times = [seconds(lambda: torch.mm(left, right.T, out=out))]
    if torch._C._has_mkldnn and left.dtype == torch.float32:
        linear = torch.ops.mkldnn._linear_pointwise
        times.append(seconds(lambda: linear(left, right, None, "none", [], "")))
    return min(times)


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
