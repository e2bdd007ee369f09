"""The page as it is served, in a browser, of a run that goes on."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.tools.page.browser.looking import Looking

pytestmark = pytest.mark.page
Look = Callable[..., Looking]


@contextmanager
def serving(place: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """``taut page`` of a directory: its address, and the process."""
    words = [sys.executable, "-m", "taut", "page", str(place), "port=0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found, "it printed no address"
            yield found[0], process
        finally:
            process.terminate()


def test_a_run_that_goes_on(growing: tuple[Path, list[str]], look: Look) -> None:
    place, coming = growing
    with serving(place) as (address, process):
        looking = look(address)
        tab = looking.go("#/run/sft/overview?from=1&to=4&open=train")
        tab.get_by_text("live", exact=True).wait_for()
        assert "3 of 6" in tab.inner_text(".head")
        loss = tab.locator('figure:has([title="train/loss"]) .chart-plot')
        assert "at step 3" in loss.get_attribute("aria-label")
        with (place / "sft" / "events.jsonl").open("a", encoding="utf-8") as file:
            for line in coming:
                if '"kind": "step"' in line:
                    file.write(line)
                    file.flush()
                    break
        tab.get_by_text("4 of 6").wait_for()
        tab.locator(
            'figure:has([title="train/loss"]) .chart-plot[aria-label*="at step 4"]'
        ).wait_for()
        assert tab.get_by_label("to step").input_value() == "4"
        assert "from=1" in tab.evaluate("location.hash")
        assert tab.locator("details[open] summary").first.inner_text().startswith("train")
        assert [url for url in looking.requests if not url.startswith(address)] == []
        looking.may_say = ("ERR_", "Failed to load")
        process.terminate()
        process.wait()
        tab.get_by_text("Connection lost").wait_for()
        assert "4 of 6" in tab.inner_text(".head")


def test_every_view_of_real_runs(runs: Path, look: Look) -> None:
    with serving(runs) as (address, _):
        looking = look(address)
        for run, view in [
            ("sft", "overview"),
            ("sft", "checks"),
            ("sft", "samples"),
            ("sft", "data"),
            ("sft", "model"),
            ("grpo", "overview"),
            ("grpo", "samples"),
            ("grpo", "rollouts"),
            ("grpo", "rollouts?step=2&group=1"),
            ("grpo", "rollouts?step=2&group=1&show=tokens"),
        ]:
            tab = looking.go(f"#/run/{run}/{view}")
            assert tab.query_selector_all("main .error") == [], view
            assert looking.violations() == [], view
        tab = looking.go("#/run/grpo/rollouts?step=2&group=1")
        tab.get_by_role("link", name="This prompt over steps").click()
        tab.get_by_text("A prompt over steps").wait_for()
        looking.settle()
        assert "Step 2" in tab.inner_text("main")
        looking.may_say = ("404",)
        tab = looking.go("#/run/sft/samples?step=1&id=nowhere")
        assert "nowhere" in tab.inner_text("main .error")
