"""``stand_in``: the server of tests in this folder; skipped with the reason where there can be none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from tests.cuda_stand_in import stub
from tests.cuda_stand_in.processes import Server


@pytest.fixture(scope="session")
def stand_in() -> Iterator[Server]:
    """Runs functions on a CUDA device that does not exist."""
    if (why := stub.why_not()) is not None:
        pytest.skip(why)
    stub.library()
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="session")
def stand_in_with_triton() -> Iterator[Server]:
    """The same where torch finds triton."""
    if (why := stub.why_not() or stub.why_no_triton()) is not None:
        pytest.skip(why)
    stub.library()
    server = Server(has_triton=True)
    yield server
    server.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line what was skipped here, and why."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ")
        for report in reports
        if "cuda_stand_in" in report.nodeid and isinstance(report.longrepr, tuple)
    )
    if reasons:
        said = "; ".join(f"{count} for: {why}" for why, count in reasons.items())
        terminalreporter.write_line(f"CUDA stand-in: {reasons.total()} skipped: {said}")
