"""How many of a model's programs a second the sandbox runs: ``python benchmarks/sandbox.py``.

    unheld        ``python -I -S program.py`` in a subprocess, without any wall: what a fresh process costs by itself
    bubblewrap    taut's sandbox, where it holds on this machine
    landlock      the same
    before ...    the sandbox of another checkout of taut, with ``--before FOLDER``: its mechanisms that hold here

Every way runs the same programs, which read two numbers and print their sum, with one test or ten, from one thread or
from two. The ways take turns, round after round; beside each round stands the machine's matmul rate, for these machines
have two speeds. Reported: programs/s, medians of rounds, and their ratio to ``unheld`` in the same round.

Every result is compared with what the program must print. Exit status 1 if one differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
PROGRAM = "a, b = map(int, input().split())\nprint(a + b)\n"
CASES = {"1 test": (1, 1), "10 tests": (10, 1), "1 test, 2 threads": (1, 2)}
"""Tests of a program; threads."""

UNHELD = """
import subprocess, sys, tempfile, time, json
from concurrent.futures import ThreadPoolExecutor
num_tests, num_threads, num_programs = map(int, sys.argv[1:])
with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
    file.write({program!r})
    file.flush()
    def judge(number):
        line = [sys.executable, "-I", "-S", file.name]
        said = [
            subprocess.run(line, input=f"{{number}} {{it}}", capture_output=True, text=True).stdout
            for it in range(num_tests)
        ]
        return said == [f"{{number + it}}\\n" for it in range(num_tests)]
    judge(0)
    start = time.perf_counter()
    with ThreadPoolExecutor(num_threads) as threads:
        right = list(threads.map(judge, range(num_programs)))
    print(json.dumps([time.perf_counter() - start, all(right)]))
"""
HELD = """
import json, sys, time
from concurrent.futures import ThreadPoolExecutor
from taut.errors import SandboxError
try:
    from taut.sandbox import Sandbox, Trial, choose  # where it was before it became a tool
except ImportError:
    from taut_tools.sandbox.box import Sandbox
    from taut_tools.sandbox.limits import Trial
    from taut_tools.sandbox.probe import choose
num_tests, num_threads, num_programs = map(int, sys.argv[2:])
try:
    box = Sandbox(choose(sys.argv[1]))
except SandboxError as error:
    print(json.dumps(str(error)))
    sys.exit()
def judge(number):
    trials = [Trial(stdin=f"{{number}} {{it}}") for it in range(num_tests)]
    said = [ran.stdout for ran in box.run({program!r}, trials)]
    return said == [f"{{number + it}}\\n" for it in range(num_tests)]
judge(0)
start = time.perf_counter()
with ThreadPoolExecutor(num_threads) as threads:
    right = list(threads.map(judge, range(num_programs)))
print(json.dumps([time.perf_counter() - start, all(right)]))
box.close()
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--before", type=Path, help="another checkout of taut")
    parser.add_argument("--programs", type=int, default=100, help="a round and way")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    arguments = parser.parse_args()
    ways = {"unheld": ([sys.executable, "-c", UNHELD.format(program=PROGRAM)], ROOT)}
    held = [sys.executable, "-c", HELD.format(program=PROGRAM)]
    for name in ("gvisor", "bubblewrap", "landlock"):
        ways[name] = ([*held, name], ROOT)
    if arguments.before:
        for name in ("bubblewrap", "namespaces", "landlock"):
            ways[f"before: {name}"] = ([*held, name], arguments.before)
    results: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    wrong = False
    for _ in range(arguments.rounds):
        print(f"matmul {_matmul_gflops():.0f} GFLOP/s", flush=True)
        for case, (num_tests, num_threads) in CASES.items():
            for way, (line, checkout) in list(ways.items()):
                numbers = map(str, (num_tests, num_threads, arguments.programs))
                found = _run([*line, *numbers], checkout)
                if isinstance(found, str):
                    print(f"{way}: {found}")
                    del ways[way]
                    continue
                seconds, is_right = found
                wrong |= not is_right
                results[case][way].append(arguments.programs / seconds)
    _print(results)
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1))
    return int(wrong)


def _run(line: list[str], checkout: Path) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve() / "src")}
    done = subprocess.run(
        line, env=environment, capture_output=True, text=True, cwd="/", check=True
    )
    return json.loads(done.stdout)


def _print(results: dict[str, dict[str, list[float]]]) -> None:
    for case, ways in results.items():
        print(f"\n{case:26} programs/s   of unheld")
        for way, rates in ways.items():
            ratio = median(rate / base for rate, base in zip(rates, ways["unheld"], strict=True))
            print(f"  {way:24} {median(rates):10.1f} {ratio:11.2f}")


def _matmul_gflops() -> float:
    """Of float32 on this machine, now."""
    size = 1024
    left, right = torch.rand(size, size), torch.rand(size, size)
    left @ right
    start = time.perf_counter()
    for _ in range(8):
        left @ right
    return float(8 * 2 * size**3 / (time.perf_counter() - start) / 1e9)


if __name__ == "__main__":
    sys.exit(main())
