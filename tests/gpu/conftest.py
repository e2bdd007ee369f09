"""Every test here takes a ``device`` and runs twice: on the GPU, marked gpu and skipped where there is none, and on the
CPU, so that the tests themselves cannot rot. ``make gpu`` runs the first half.
"""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device under test, with its number, as in a run."""
    return torch.device("cuda", 0) if request.param == "cuda" else torch.device("cpu")
