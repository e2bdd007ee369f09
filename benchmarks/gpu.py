"""taut on a machine with a CUDA device, in one command: ``make gpu``, or ``python benchmarks/gpu.py [PART ...]``.

    tests     tests/gpu: every backend, loss, method and engine on the device against the CPU
    bench     training, generation and checkpoints, beside the plain transformers loop and TRL
    report    report.json and report.md of what the two have left in the output directory
    docs      puts report.md into docs/benchmarks.md, between its markers

Without words: tests, bench and report. It needs Python 3.11 and a torch with CUDA; no network, no virtual environment,
no installed taut: it is run from the source tree. What other packages are there decides what runs; the rest is reported
with its reason. Tests and bench have nine minutes together (``--seconds``), half each where both run: what a part has
measured by then is kept, and what it has not reached is listed; the report is written after each. A test or a case that
takes its process down, breaks the device for it or stands still for ``LONGEST`` seconds costs itself alone: the next
process goes on behind it.

``--device cpu --tiny`` runs the same program on a CPU with models of two layers, in seconds: its self-test.
Exit status 1 if a test failed, a case did or a part could not begin, 2 if there is no such device.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = ("tests", "bench", "report", "docs")
SECONDS = 540
GRACE = 20
"""Seconds that a process has to write down what it has, before it is killed."""
LONGEST = 240.0
"""Seconds that a test or a case may take: a kernel that never ends must not cost the others their time."""
OVER = "the part's time was over"
ENDED = "its process ended with status {}"
LEAVES_OUT = {
    "numpy": "everything but the device's own rates",
    "transformers": "training, generation and checkpoints; without it only attention is measured and tested",
    "pydantic": "all of taut but its attention; the plain transformers loop is measured",
    "httpx2": "all of taut but its attention; the plain transformers loop is measured",
    "tenacity": "all of taut but its attention; the plain transformers loop is measured",
    "anyio": "all of taut but its attention; the plain transformers loop is measured",
    "safetensors": "all of taut but its attention",
    "PIL": "all of taut but its attention; the plain transformers loop is measured",
    "tokenizers": "training, generation and checkpoints",
    "peft": "LoRA, and the tests of whole runs",
    "cachetools": "checkpoints, the tests of whole runs, and the stated peak of the device",
    "cloudpickle": "the tests of whole runs",
    "rich": "the tests of whole runs",
    "pytest": "the tests",
    "trl": "the comparison with TRL",
    "datasets": "the comparison with TRL, and the tests of whole runs",
    "jinja2": "all of taut but its attention; the plain transformers loop is measured",
    "pyarrow": "the tests of whole runs",
    "starlette": "the tests of whole runs",
    "uvicorn": "the tests of whole runs",
    "flash_attn": "the plain loop with flash attention",
}
"""Package -> what its absence leaves out."""


def missing_packages() -> dict[str, str]:
    """Those that are not there, and what that leaves out."""
    return {
        name: without
        for name, without in LEAVES_OUT.items()
        if importlib.util.find_spec(name) is None
    }


def run(command: Sequence[str], log: Path, deadline: float) -> str | None:
    """Run a process until the deadline, or until it has added nothing to the log for ``LONGEST`` seconds; None, or why
    it did not end well.
    """
    paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), str(ROOT)]
    given = os.environ.get("PYTHONPATH")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*paths, *([given] if given else [])]),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL
    )
    size, since = -1, time.monotonic()
    while (now := time.monotonic()) < min(deadline, since + LONGEST):
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(0.2)
            return None if status == 0 else ENDED.format(status)
        if log.stat().st_size != size:
            size, since = log.stat().st_size, now
    process.terminate()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return OVER if now >= deadline else f"it did not end within {LONGEST:.0f} s"


def run_all(command: Sequence[str], log: Path, key: str, seconds: float) -> None:
    """Run a part in processes, each of which leaves out what the ones before it have begun. ``key``: of the entries
    that are results.
    """
    from on_gpu.log import note, read

    deadline = time.monotonic() + seconds - GRACE
    num_begun = 0
    while time.monotonic() < deadline:
        why = run(command, log, deadline)
        if why is None:
            return
        entries = read(log)
        ended = {entry[key] for entry in entries if key in entry}
        begun = [entry["begun"] for entry in entries if "begun" in entry]
        cut = [name for name in begun if name not in ended]
        if why == OVER:
            note(log, why=", in ".join([why, *cut]))
            return
        for name in cut:
            note(log, **{key: name}, outcome="failed", failed=why, why=why)
        if len(begun) == num_begun:  # it does not even begin
            note(log, failed=why)
            return
        num_begun = len(begun)


def tests(arguments: argparse.Namespace) -> None:
    """Run tests/gpu; each result is written down as it is known."""
    from on_gpu.log import note

    log = arguments.out / "tests.jsonl"
    log.unlink(missing_ok=True)
    note(log, missing=missing_packages())
    if importlib.util.find_spec("pytest") is None:
        note(log, why="needs pytest, which is not installed")
        return
    chosen = "gpu" if arguments.device == "cuda" else "not gpu and not slow"
    command = ["-m", "on_gpu.tests", str(log), chosen, *arguments.tests]
    run_all(command, log, "test", arguments.seconds)


def bench(arguments: argparse.Namespace) -> None:
    """Run the cases; each is written down when it begins and when it ends."""
    from on_gpu.bench import cases
    from on_gpu.log import note

    log = arguments.out / "bench.jsonl"
    log.unlink(missing_ok=True)
    names = [
        case.name
        for case in cases(is_tiny=arguments.tiny)
        if not arguments.cases or any(word in case.name for word in arguments.cases)
    ]
    note(log, missing=missing_packages(), planned=names)
    flags = ["--device", arguments.device, *(["--tiny"] if arguments.tiny else [])]
    command = ["-m", "on_gpu.bench", str(log), *flags, "--cases", *names]
    run_all(command, log, "case", arguments.seconds)


def has_device(device: str) -> bool:
    """Whether there is one; asked without taking any of its memory."""
    import torch

    return device == "cpu" or torch.cuda.device_count() > 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models of two layers, one timed step")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="of tests and bench together"
    )
    parser.add_argument(
        "--tests", nargs="*", default=[], help="words: tests whose name has one of them"
    )
    parser.add_argument(
        "--cases", nargs="*", default=[], help="words: cases of bench whose name has one of them"
    )
    parser.add_argument("--out", type=Path, default=Path(".cache/gpu"))
    parser.add_argument(
        "--page", type=Path, default=ROOT / "docs" / "benchmarks.md", help="of docs"
    )
    arguments = parser.parse_args()
    unknown = [part for part in arguments.parts if part not in PARTS]
    if unknown:
        parser.error(f"found {unknown[0]}; expected one of {', '.join(PARTS)}")
    arguments.parts = arguments.parts or list(PARTS[:3])
    arguments.out = arguments.out.absolute()
    return arguments


def main() -> int:
    arguments = parse_arguments()
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]
    if importlib.util.find_spec("torch") is None:
        print(f"found no torch in {sys.executable}; expected 2.11 or newer; set PYTHON=...")
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    does_run = {"tests", "bench"} & set(arguments.parts)
    if does_run and not has_device(arguments.device):
        print("found no CUDA device; expected one; --device cpu --tiny runs the self-test")
        return 2
    if does_run:
        for name, without in missing_packages().items():
            print(f"{name} is not installed; left out: {without}")
    asked = {"tests", "bench"} & set(arguments.parts)
    arguments.seconds /= len(asked) or 1
    for name in asked:  # of an earlier call
        (arguments.out / f"{name}.jsonl").unlink(missing_ok=True)
    from on_gpu import report

    status = 0
    for name, part in (("tests", tests), ("bench", bench)):
        if name in arguments.parts:
            part(arguments)
            if "report" in arguments.parts:  # what follows may be cut short
                status = report.write(arguments.out)
    if "report" in arguments.parts and not does_run:
        status = report.write(arguments.out)
    if "docs" in arguments.parts:
        report.put_into(arguments.page, arguments.out)
    return status


if __name__ == "__main__":
    sys.exit(main())
