"""What ``taut check`` costs on a real model: seconds of each check beyond loading, quick part and full part.

    python benchmarks/check.py [--model DIR] [--data FILE] [--json FILE]

Without arguments: SmolLM2-135M-Instruct from the cache (``make demo`` puts it there) and the demo's data. Targets on
two cores: the quick part under 10 seconds, the full part under 180. Run it on a quiet machine; the total of the quick
part is given as a ratio of one training step's time in the same run too.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from taut.checks import CHECKS
from taut.checks.examine import examine
from taut.checks.session import Session
from taut.config import from_mapping
from taut.data.store.cache import default_directory
from taut.methods.method import RunConfig
from taut.train import distributed
from taut.train.trainer import train_step
from taut_tools.demo import fetch
from taut_tools.demo.story import build_data

QUICK, FULL = 10.0, 180.0
"""Seconds that the parts may take."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", help="a model directory")
    parser.add_argument("--data", help="a JSONL file")
    parser.add_argument("--json", type=Path, help="write what was measured")
    asked = parser.parse_args()
    model = asked.model or str(fetch.get_model(default_directory()))
    keys: dict[str, Any] = {"model": model, "data.train": asked.data, "data.too_long": "truncate"}
    if asked.data is None:
        data = build_data(fetch.read_reading(default_directory()), default_directory(), None)
        keys |= {"data.train": str(data.train), "data.eval": str(data.eval)}
    session = Session(from_mapping(RunConfig, keys), distributed.start("cpu"))
    began = time.perf_counter()
    trainer = session.trainer
    loading = time.perf_counter() - began
    found = examine(session, "full")
    began = time.perf_counter()
    train_step(trainer, 1)
    step = time.perf_counter() - began
    _show(found, loading, step)
    if asked.json:
        seconds = {one.name: one.seconds for one in found.results}
        asked.json.write_text(json.dumps({"loading": loading, "step": step, "checks": seconds}))


def _show(found: Any, loading: float, step: float) -> None:
    table = Table("check", "part", "outcome", "seconds")
    for one in found.results:
        table.add_row(one.name, CHECKS[one.name].part, one.finding.outcome, f"{one.seconds:.2f}")
    console = Console(highlight=False, width=100)
    console.print(table)
    quick = sum(one.seconds for one in found.results if CHECKS[one.name].part == "quick")
    for name, seconds, limit in (("quick", quick, QUICK), ("quick and full", found.seconds, FULL)):
        verdict = "met" if seconds < limit else "MISSED"
        console.print(
            f"{name}: {seconds:.1f} s, target {limit:.0f} s: {verdict}; {seconds / step:.1f} training steps"
        )
    console.print(f"loading and tokenizing: {loading:.1f} s")


if __name__ == "__main__":
    main()
