"""The small real model, for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from taut.data.cache import default_directory
from taut.demo import fetch


@pytest.fixture(scope="session")
def real_model() -> Path:
    """Its directory; the test is skipped where make demo has not put it in the cache."""
    wheel = default_directory() / "wheels" / fetch.MODEL_WHEEL.file
    if not wheel.exists():
        pytest.skip("the model is not in the cache; run make demo once")
    return fetch.get_model(default_directory())
