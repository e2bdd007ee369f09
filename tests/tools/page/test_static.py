"""The page's own files: no way in for markup, nothing from elsewhere, uPlot as it was published."""

from __future__ import annotations

import hashlib
import re
from importlib.resources import files

import pytest

STATIC = files("taut_tools.page") / "static"
OURS = sorted(
    path.name
    for path in STATIC.iterdir()
    if path.name.endswith((".js", ".css", ".html")) and not path.name.startswith("uPlot")
)
UPLOT = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""SHA-256 of the files of uplot 1.6.32 from npm."""
WAYS_IN = (
    r"innerHTML|outerHTML|insertAdjacentHTML|createContextualFragment|DOMParser|setHTML|srcdoc",
    r"document\s*\.\s*write|\beval\b|\bFunction\s*\(|\bimport\s*\(|new\s+Worker",
    r"set(Timeout|Interval)\(\s*[\"'`]",
    r"\son\w+\s*=\s*[\"']|\sstyle\s*=\s*[\"']|javascript:",
    r"setAttribute\(\s*[\"'](on|style|src)",
)
"""How text could become markup, a script or a style."""


def text_of(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("pattern", WAYS_IN)
def test_no_way_in_for_markup(name: str, pattern: str) -> None:
    assert re.findall(pattern, text_of(name)) == []


@pytest.mark.parametrize("name", OURS)
def test_nothing_comes_from_elsewhere(name: str) -> None:
    """The one address is the name of a namespace."""
    addresses = re.findall(r"[\w+.-]+://[^\s\"'`)]*|@import|url\(", text_of(name))
    assert set(addresses) <= {"http://www.w3.org/2000/svg"}


def test_what_is_seen_of_text_holds_no_character_that_is_not() -> None:
    """A direction mark in our files would hide what they do."""
    for name in OURS:
        unseen = [letter for letter in text_of(name) if letter != "\n" and not letter.isprintable()]
        assert unseen == [], name


def test_the_page_names_each_of_its_files_once() -> None:
    named = re.findall(r'(?:href|<script src)="([\w.]+\.(?:js|css))"', text_of("page.html"))
    there = [path.name for path in STATIC.iterdir() if path.name.endswith((".js", ".css"))]
    assert sorted(named) == sorted(there)


@pytest.mark.parametrize(("name", "digest"), UPLOT.items())
def test_uplot_is_the_published_one(name: str, digest: str) -> None:
    assert hashlib.sha256((STATIC / name).read_bytes()).hexdigest() == digest


def test_uplot_has_its_license_beside_it() -> None:
    license = text_of("LICENSE.uplot")
    assert "The MIT License" in license and "Leon Sorokin" in license
