"""Skip a file of tests for packages that are not there: a machine with a GPU has what others put on it."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from taut.io.extras import EXTRAS

MODELS = (
    "transformers",
    "tokenizers",
    "jinja2",
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
"""What the tests of models import."""


def missing(*packages: str) -> list[str]:
    return [name for name in packages if find_spec(name) is None]


def needs(*packages: str) -> None:
    """At the top of a file, before the imports that need them."""
    if lacking := missing(*packages):
        pytest.skip(f"not installed: {', '.join(lacking)}", allow_module_level=True)


LACKING = missing(*EXTRAS["train"])
whole_run = pytest.mark.skipif(bool(LACKING), reason=f"not installed: {', '.join(LACKING)}")
"""Of a test that trains as a user does, which asks for every package of the extra ``train`` first."""
