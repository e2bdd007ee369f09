"""What ``taut eval`` reads back of its own completions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from taut.commands.evaluate import _read_completions
from taut.data.rows.prompts import PromptRow


def test_a_line_of_completions_ends_at_its_newline_only(tmp_path: Path) -> None:
    """Unicode has other ends of lines, which JSON leaves as they are."""
    texts = ["a\u2028b", "a\u2029b", "a\u0085b", "a\nb"]
    rows = [PromptRow(f"q:{k}", f"q:{k}", np.array([1]), "?", (), None, {}) for k in range(4)]
    lines = [
        {"id": row.id, "index": 0, "ids": [1], "finish_reason": "stop", "text": text}
        for row, text in zip(rows, texts, strict=True)
    ]
    path = tmp_path / "completions.jsonl"
    path.write_text(
        "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8"
    )
    assert [it.text for it in _read_completions(path, rows)] == texts
