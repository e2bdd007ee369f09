"""What a notebook shows: texts stay texts, and progress is one line."""

from __future__ import annotations

import io
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from taut.io import notebook, progress
from taut.io.notebook import CUT, ProgressLine, html_table, html_text
from taut.io.terminal import Terminal
from taut.train.log.console import ConsoleReport

HOSTILE = "<script>alert('x')</script>\x1b[31m https://u:hunter2@host \u202e"


def test_texts_are_escaped_and_bounded() -> None:
    for text in (html_text(HOSTILE), html_table(HOSTILE, [HOSTILE], [[HOSTILE]])):
        assert "<script" not in text and "\x1b" not in text and "\u202e" not in text
        assert "&lt;script&gt;" in text and "hunter2" not in text
    assert len(html_text("x" * 2 * CUT)) == CUT
    assert (html_text(None), html_text(0.123456), html_text(3)) == ("", "0.1235", "3")


@pytest.fixture
def displayed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What IPython's display is given, and how it is updated, in a notebook."""
    told: list[tuple[str, Any]] = []

    def display(shown: Any, display_id: bool) -> Any:
        told.append(("new", shown._repr_html_()))
        return SimpleNamespace(update=lambda new: told.append(("update", new._repr_html_())))

    monkeypatch.setattr(ProgressLine, "_of_process", None)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    monkeypatch.setattr(Console, "is_jupyter", True, raising=False)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    return told


def test_a_line_is_replaced_at_most_once_in_a_while(
    displayed: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notebook, "PAUSE", 3600.0)
    line = ProgressLine.of_notebook()
    assert line is not None
    line._shown_at = -7200.0
    for step in range(1, 100):
        line.show(f"step {step} {HOSTILE}", step, 99)
    line.close()
    line.close()
    assert [how for how, _ in displayed] == ["new", "update"]
    assert '<progress value="99" max="99">' in displayed[-1][1]
    assert "step 99 &lt;script" in displayed[-1][1]
    line.show("another", 1, None)
    line._draw()
    assert displayed[-1][0] == "new"


def test_a_run_in_a_notebook_prints_no_line_for_a_step(
    displayed: list[tuple[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    report = ConsoleReport()
    report({"kind": "start", "time": 0, "num_steps": 3})
    fields = {"grad_norm": 1.0, "learning_rate": 1e-4, "num_tokens": 1, "num_tokens_unshared": 1}
    for step in (1, 2, 3):
        times = {"time": step, "seconds": 0.1, "num_targets": 1}
        report({"kind": "step", "step": step, "loss": 1.0, **times, **fields})
    report({"kind": "end", "time": 4, "step": 3, "outcome": "finished"})
    report.close()
    assert "step 3/3" in displayed[-1][1]
    assert [how for how, _ in displayed].count("new") == 1
    out = capsys.readouterr().out
    assert "step 1/3" not in out and "outcome finished" in out


def test_what_is_done_before_the_first_step_is_on_the_same_line(
    displayed: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"DRAWN_EVERY": 0.01, "TOLD_AFTER": 0.0}.items():
        monkeypatch.setattr(progress, name, value)
    monkeypatch.setattr(notebook, "PAUSE", 0.0)
    monkeypatch.setenv("TAUT_PROGRESS", "")
    with progress.told():
        progress.show("reading the data (train)")
        progress.count(512, 5000, "rows")
        until = time.monotonic() + 60
        while not any("512 of 5,000 rows" in html for _, html in displayed):
            assert time.monotonic() < until
            time.sleep(0.01)
        progress.hide()
        line = ProgressLine.of_notebook()
        assert line is not None
        line.show("step 1/3", 1, 3)
    assert displayed[0][0] == "new" and "reading the data" in displayed[0][1]
    assert [how for how, _ in displayed].count("new") == 1
    assert "step 1/3" in displayed[-1][1]


def test_elsewhere_there_is_no_such_line_and_no_terminal_is_html() -> None:
    assert ProgressLine.of_notebook() is None
    assert not Terminal(file=io.StringIO()).is_jupyter


def test_a_terminal_in_a_notebook_draws_no_bars(displayed: list[tuple[str, Any]]) -> None:
    assert not Terminal(file=io.StringIO()).is_terminal
