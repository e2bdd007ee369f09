"""What the workers of ``benchmarks/generate.py`` have in common: the job, the order of runs, the result.

A worker warms up on a few tokens, does the timed run, notes its memory, and then (where the job asks) continues some
prompts greedily, to be checked. Imports nothing of taut.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

Job = dict[str, Any]
WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Work:
    """What a contender is given."""

    prompts: Sequence[Sequence[int]]
    new_tokens: Sequence[int]
    """Of each prompt's completions."""
    num_samples: int
    is_greedy: bool = False


@dataclass
class Made:
    """What it gives back."""

    completions: list[list[list[int]]]
    """Ids of each sample of each prompt."""
    prefill_seconds: float | None = None
    """As far as the prompts have a time of their own."""
    logp: list[list[list[float]]] = field(default_factory=list)
    """Log-probabilities of the ids, where the contender says."""
    cpu_matmul: str | None = None
    """The library of float32 products; None: torch's default."""


class Contender(Protocol):
    def __call__(self, work: Work) -> Made: ...


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(load: Callable[[Job], Contender]) -> None:
    """The worker's program: JOB.json is its argument."""
    job: Job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    torch.manual_seed(job["seed"])
    import_mb = peak_mb()
    contender = load(job)
    prompts, new_tokens = job["prompts"], job["new_tokens"]
    contender(Work(prompts[:2], [WARM_UP_TOKENS] * 2, job["num_samples"]))
    start, start_cpu = time.perf_counter(), time.process_time()
    made = contender(Work(prompts, new_tokens, job["num_samples"]))
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    result = {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "prefill_seconds": made.prefill_seconds,
        "completions": made.completions,
        "logp": made.logp,
        "peak_mb": peak_mb(),
        "import_mb": import_mb,
        **({} if made.cpu_matmul is None else {"cpu_matmul": made.cpu_matmul}),
    }
    if job["greedy"]:
        some = prompts[: job["greedy"]["prompts"]]
        lengths = [job["greedy"]["tokens"]] * len(some)
        result["greedy"] = contender(Work(some, lengths, 1, is_greedy=True)).completions
    Path(job["result"]).write_text(json.dumps(result))
