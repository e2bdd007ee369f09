"""Generators go on where they stood."""

from __future__ import annotations

import json
import random

import numpy as np
import torch

from taut.train import random_state

CPU = torch.device("cpu")


def draw() -> list[float]:
    legacy = [float(np.random.rand()), float(np.random.randn())]
    return [random.random(), random.gauss(0, 1), *legacy, *torch.randn(3).tolist()]


def test_what_was_captured_is_drawn_again() -> None:
    with torch.random.fork_rng(devices=[]):
        draw()
        state = json.loads(json.dumps(random_state.capture(CPU)))
        first = draw()
        assert draw() != first
        random_state.restore(state, CPU)
        assert draw() == first
