"""The state of every generator that draws for a process: Python's, numpy's, torch's on CPU and GPU.

Order, adapters, noise and sampling draw from generators of their own, keyed by the seed (data/plan.py, models/noise.py,
rollout/sampling.py); what is kept here is what a model's own code or a user's reward may draw from. As JSON: no pickle.

May be imported by checkpoint and what is above it.
"""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

State = dict[str, Any]


def capture(device: torch.device) -> State:
    """Where the generators stand, as JSON-able values."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, numbers, following = random.getstate()
    state = {
        "python": [version, list(numbers), following],
        "numpy": [name, _text(np.asarray(keys)), position, has_gauss, gauss],
        "torch": _text(torch.get_rng_state().numpy()),
    }
    if device.type == "cuda":
        state["cuda"] = _text(torch.cuda.get_rng_state(device).numpy())
    return state


def restore(state: State, device: torch.device) -> None:
    """Put the generators where they stood."""
    version, numbers, following = state["python"]
    random.setstate((version, tuple(numbers), following))
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, np.frombuffer(_bytes(keys), np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(_tensor(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_tensor(state["cuda"]), device)


def _text(array: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(_bytes(text)), dtype=torch.uint8)
