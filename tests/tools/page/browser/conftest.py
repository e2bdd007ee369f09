"""A browser for the tests of the page, and runs to look at. Where there is no chromium they are skipped."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.tools.page.browser.looking import Looking

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of the browser."""
    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(CHROMIUM)} is on the path")
    if find_spec("playwright") is None or find_spec("axe_playwright_python") is None:
        pytest.skip("playwright or axe-playwright-python is not installed: make test-page does")
    return found


@pytest.fixture(scope="session")
def browser(chromium: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    is_root = os.geteuid() == 0  # whom chromium's sandbox refuses
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox"] if is_root else []
        )


@pytest.fixture
def look(browser: Any) -> Iterator[Callable[..., Looking]]:
    """Open a tab: ``look(address, width=1280, scheme="light")``. At the end nothing may have gone wrong in it."""
    opened = []

    def open_tab(address: str, width: int = 1280, scheme: str = "light") -> Looking:
        context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme, locale="en-US"
        )
        opened.append(Looking(context, address))
        return opened[-1]

    yield open_tab
    for looking in opened:
        looking.close()


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, Any]], str]:
    """Write the file of these answers: its address."""
    from taut_tools.page import file

    def write(answers: Mapping[str, Any]) -> str:
        monkeypatch.setattr(file, "selected", lambda *_: file.safe_json(answers))
        path = tmp_path / "page.html"
        path.write_text(file.html(None, 2**30), encoding="utf-8")  # type: ignore[arg-type]
        return path.as_uri()

    return write


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run of SFT, with evaluations, and one of GRPO."""
    from tests.helpers import chat_runs, online_runs

    place = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAUT_CACHE", str(place / "cache"))
        model = chat_runs.save_model(place / "model")
        rows = chat_runs.write_rows(place / "train.jsonl", chat_runs.chats(20))
        held_out = chat_runs.write_rows(place / "eval.jsonl", chat_runs.chats(4, seed=1))
        keys: dict[str, Any] = {"steps": 6, "data__eval": str(held_out), "eval__every": 3}
        chat_runs.sft(model, rows, place / "runs" / "sft", **keys, **chat_runs.PLAIN)
        policy = online_runs.save_models(place / "online")
        grpo = online_runs.keys_of("grpo", policy, place / "prompts")
        online_runs.train({**grpo, "out": str(place / "runs" / "grpo")})
    return place / "runs"


@pytest.fixture
def growing(runs: Path, tmp_path: Path) -> tuple[Path, list[str]]:
    """A directory with a copy of the SFT run as it was after its third step, and the lines that were still to come."""
    out = tmp_path / "live" / "sft"
    shutil.copytree(runs / "sft", out)
    events = out / "events.jsonl"
    lines = events.read_text(encoding="utf-8").splitlines(keepends=True)
    third = next(
        number
        for number, line in enumerate(lines)
        if (event := json.loads(line))["kind"] == "step" and event["step"] == 3
    )
    events.write_text("".join(lines[: third + 1]), encoding="utf-8")
    return out.parent, lines[third + 1 :]
