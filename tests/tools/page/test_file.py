"""The one file: answers as data that cannot become markup, the page's own code by its hash, no more than has room."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.page_runs import (
    HOSTILE,
    rollout_row,
    rollout_writer,
    start,
    step,
    token_row,
    token_writer,
    warning,
    write_run,
)

from taut_tools.page.answers import Answers, find_runs
from taut_tools.page.file import MIB, POINTS, encoded, html, safe_json, static_files


def name(number: int) -> str:
    """The id of a sample."""
    return f"{HOSTILE[:-1]}{number}"


class Elements(HTMLParser):
    """The elements of a page in their order, with the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], str]] = [("", {}, "")]
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        tag, attrs, text = self.found[-1]
        self.found[-1] = tag, attrs, text + data

    def handle_endtag(self, tag: str) -> None:
        self.found.append(("", {}, ""))

    def of(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attrs, text) for name, attrs, text in self.found if name == tag]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs; names, texts and ids of one are hostile."""
    place = tmp_path_factory.mktemp("runs")
    events = [start(data=HOSTILE), *(step(n, sample_ids=[name(n), "b"]) for n in range(1, 30))]
    events.append(warning(7, detail=HOSTILE))
    out = write_run(place / "<b>&,a", events, method="grpo")
    writer, rollouts = token_writer(out), rollout_writer(out)
    for number in range(1, 30):
        writer.append([token_row(number, name(number))])
        texts = {"prompt_id": HOSTILE[:-1], "text": HOSTILE[:-1], "prompt": json.dumps(HOSTILE)}
        rollouts.append([rollout_row(number, 0, i, 1.0 * i, **texts) for i in (0, 1)])
    writer.close()
    rollouts.close()
    write_run(place / "b", [start(), step(1)])
    return place


@pytest.fixture(scope="module")
def page(place: Path) -> str:
    return html(Answers(find_runs([place])), 5 * MIB)


def embedded(page: str) -> dict[str, Any]:
    ((_, text),) = [
        (a, text) for a, text in Elements(page).of("script") if a.get("id") == "answers"
    ]
    found: dict[str, Any] = json.loads(text)
    return found


def test_text_of_runs_cannot_become_markup(page: str) -> None:
    tags = [tag for tag, _, _ in Elements(page).found]
    assert "img" not in tags and tags.count("script") == 1 + page.count("<script>")
    ((_, text),) = [
        (a, text) for a, text in Elements(page).of("script") if a.get("id") == "answers"
    ]
    assert not re.search("[<>&\u2028\u2029]", text)
    found = embedded(page)
    overview = found[f"run/{encoded('<b>&,a')}/overview"]
    assert overview["start"]["data"] == HOSTILE
    assert overview["alarms"][0]["detail"] == HOSTILE
    page.encode("utf-8")


def test_only_the_page_s_own_code_may_run_and_nothing_is_fetched(page: str) -> None:
    elements = Elements(page)
    (policy,) = [
        a["content"]
        for a, _ in elements.of("meta")
        if a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'" and "connect-src" not in rules
    for kind, tag in (("script-src", "script"), ("style-src", "style")):
        texts = [text for attrs, text in elements.of(tag) if attrs.get("id") != "answers"]
        digests = [base64.b64encode(hashlib.sha256(t.encode()).digest()).decode() for t in texts]
        assert texts and rules[kind].split() == [f"'sha256-{digest}'" for digest in digests]
    assert not [
        a for _, a, _ in elements.found if a.get("src") or str(a.get("href", "")).startswith("http")
    ]
    head = [tag for tag, _, _ in elements.found]
    assert head.index("meta") < head.index("style")
    assert all(attrs["rel"] == "icon" for attrs, _ in elements.of("link"))


def test_the_selection_is_what_it_says(page: str) -> None:
    found, run = embedded(page), f"run/{encoded('<b>&,a')}"
    assert {entry["name"] for entry in found["runs"]["runs"]} == {"<b>&,a", "b"}
    for topic in ("overview", "checks", "data", "model", "steps", "curves"):
        assert f"{run}/{topic}" in found and f"run/b/{topic}" in found
    assert len(found[f"{run}/curves"]["step"]) == 29
    steps = {int(key.rpartition("=")[2]) for key in found if key.startswith(f"{run}/samples")}
    assert {1, 7, 29} <= steps and len(steps) == 9  # spread over the run, and that of the alarm
    for number in steps:
        key = f"{run}/sample?step={number}&id={encoded(name(number))}"
        assert found[key]["id"] == name(number)
    assert f"{run}/group?step=29&group=0" in found
    assert len(found[f"{run}/prompt?id={encoded(HOSTILE[:-1])}"]["steps"]) == 29
    assert f"compare?runs={encoded('<b>&,a')},b" in found
    assert found["file"]["num_left"] == 0 and str(POINTS) in found["file"]["text"]


def test_what_has_no_room_is_left_out_and_counted(place: Path, page: str) -> None:
    bare = sum(map(len, static_files().values()))
    small = html(Answers(find_runs([place])), bare + 30_000)
    assert len(small.encode()) < len(page.encode())
    found = embedded(small)
    assert found["file"]["num_left"] > 0
    assert f"run/{encoded('<b>&,a')}/overview" in found and "run/b/curves" in found


def test_json_is_read_back_as_it_was() -> None:
    value = {HOSTILE: [HOSTILE, "é", 1.5, None]}
    text = safe_json(value)
    assert json.loads(text) == value
    assert text.encode("utf-8").decode("utf-8") == text and "é" in text
