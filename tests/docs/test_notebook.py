"""The example notebook runs as it is, in an empty folder, and shows what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

PATH = Path(__file__).parents[2] / "examples" / "notebook" / "first_run.ipynb"


def test_it_is_kept_without_outputs() -> None:
    cells = json.loads(PATH.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 6
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_it_runs_and_its_progress_is_one_line(tmp_path: Path) -> None:
    notebook: Any = nbformat.read(PATH, as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, kernel_name="python3", timeout=300, resources=place).execute()
    shown: dict[str, list[dict[str, Any]]] = {}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            shown[cell.source.strip().splitlines()[-1]] = [
                output.get("data", {"text": output.get("text")}) for output in cell.outputs
            ]
    (check,) = shown["taut.check(**keys)"]
    assert re.search("checks: 0 failed, .* passed", check["text/html"])
    trained = shown["result"]
    (line,) = [data["text/html"] for data in trained if "progress" in data.get("text/html", "")]
    assert 'value="120" max="120"' in line and "step 120/120  loss " in line
    text = "".join(data.get("text") or "" for data in trained)
    assert "step 120/120" not in text and "\x1b" not in text
    assert text.count("\n") < 40
    assert "held-out loss" in trained[-1]["text/html"]
    tables = [
        data["text/html"]
        for outputs in shown.values()
        for data in outputs[-1:]
        if "text/html" in data
    ]
    assert "finish_reason" in tables[-2] and "eval.jsonl:1" in tables[-2]
    assert "exact_match" in tables[-1] and "95% interval" in tables[-1]
