"""The table of bad files in docs/check.md: taut's side of benchmarks/bad_files.py is run, and says what it says."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.docs.pages import ROOT

from taut.cli import main

ROWS = re.findall(
    r"^\| .* \| .* \| `(\w+)\.jsonl(.*)` \|$",
    (ROOT / "docs" / "check.md").read_text(),
    re.MULTILINE,
)


@pytest.fixture(scope="module")
def bad_files() -> ModuleType:
    path = ROOT / "benchmarks" / "bad_files.py"
    spec = importlib.util.spec_from_file_location("bad_files", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # it imports its neighbors
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


@pytest.fixture(scope="module")
def folder(bad_files: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    bad_files.save_model(folder / "model")
    return folder


def test_the_table_has_the_five_files(bad_files: ModuleType) -> None:
    assert sorted(name for name, _ in ROWS) == sorted(bad_files.FILES)


@pytest.mark.parametrize(("name", "line"), ROWS, ids=[name for name, _ in ROWS])
def test_taut_refuses_the_file_as_the_table_says(
    bad_files: ModuleType,
    folder: Path,
    name: str,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = folder / f"{name}.jsonl"
    path.write_text(bad_files.FILES[name][1](), encoding="utf-8")
    monkeypatch.chdir(folder)
    assert main(bad_files.arguments(folder / "model", path)) == 2
    shown = (name + ".jsonl" + line).replace("\\|", "|").removesuffix("...")
    assert capsys.readouterr().err.startswith(f"taut: error: {shown}")
    assert not (folder / "out").exists()
