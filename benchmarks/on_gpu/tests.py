"""tests/gpu in a process: ``python -m on_gpu.tests LOG MARKS [WORD ...]``.

The list of tests, each beginning and each result go to LOG; what LOG says was begun is left out. Tests that compile a
kernel each come last: those in float32, for which attention is flex, and those of flex itself. Warnings are no failures
here: other versions have others.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from on_gpu import log, measure

FOLDER = str(Path(__file__).parents[2] / "tests" / "gpu")


class Recorder:
    """Writes down what pytest knows."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self.note, self.device = partial(log.note, path), device
        self.begun = {entry.get("begun") for entry in log.read(path)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=compiles)
        items[:] = [item for item in items if short(item.nodeid) not in self.begun]
        self.note(planned=[short(item.nodeid) for item in items])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.note(begun=short(nodeid))

    def pytest_runtest_logfinish(self) -> None:
        if measure.is_broken(self.device):
            measure.leave()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed or report.skipped:
            self.note(test=short(report.nodeid), outcome=report.outcome, why=reason(report))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.note(
                test=short(report.nodeid),
                outcome=report.outcome,
                seconds=report.duration,
                why=reason(report),
            )


def compiles(item: pytest.Item) -> int:
    """0: nothing; 1: in float32, perhaps; 2: flex attention."""
    return 2 if "flex" in item.nodeid else int("float32" in item.nodeid)


def short(nodeid: str) -> str:
    return nodeid.rpartition("tests/gpu/")[2]


def reason(report: Any) -> str:
    """The end of what went wrong, or why a test was skipped."""
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    lines = [line[2:] for line in str(report.longrepr).splitlines() if line.startswith("E ")]
    return " ".join(" ".join(lines or [str(report.longrepr)[-400:]]).split())[:600]


def main() -> int:
    path, marks, *words = sys.argv[1:]
    device = torch.device("cuda", 0) if marks == "gpu" else torch.device("cpu")
    log.note(Path(path), machine=measure.describe(device))
    options = ["-q", "-m", marks, "-W", "default", "-p", "no:cacheprovider", FOLDER]
    options += ["--continue-on-collection-errors"]
    if words:
        options += ["-k", " or ".join(words)]
    status = pytest.main(options, plugins=[Recorder(Path(path), device)])
    is_complete = status in (
        pytest.ExitCode.OK,
        pytest.ExitCode.TESTS_FAILED,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    )
    return 0 if is_complete else int(status)


if __name__ == "__main__":
    sys.exit(main())
