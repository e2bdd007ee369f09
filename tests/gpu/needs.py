"""Skip a file of tests for packages that are not there: a machine with a GPU has what others put on it."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

RUNS = (
    "transformers",
    "tokenizers",
    "pydantic",
    "httpx2",
    "anyio",
    "tenacity",
    "cachetools",
    "safetensors",
    "rich",
    "PIL",
    "peft",
)
"""What whole runs import."""


def needs(*packages: str) -> None:
    """At the top of a file, before the imports that need them."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}", allow_module_level=True)
