"""A part's log: a line of JSON for each thing that is known, so that whatever ends a process leaves what it knew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def note(path: Path, **entry: Any) -> None:
    """Add an entry."""
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """The entries so far; a line that was cut is no entry."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]
