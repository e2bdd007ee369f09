"""The state of the global random generators of a process, as JSON: Python's, numpy's, torch's on CPU and GPU.

Data order, adapters, noise and sampling have generators of their own, keyed by the seed (data/order.py,
models/noise.py, inference/engine.py). The global ones matter to code of a model or of a user's reward.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor

State = dict[str, Any]
CUDA_BYTES = 16
"""Seed and offset."""
Word = Annotated[int, Field(ge=0, lt=2**32)]


class Saved(BaseModel):
    """A ``State`` as a checkpoint stores it."""

    model_config = ConfigDict(strict=True)

    python: tuple[
        Literal[3], Annotated[list[Word], Field(min_length=625, max_length=625)], float | None
    ]
    numpy: tuple[Literal["MT19937"], str, Annotated[int, Field(ge=0, le=624)], Literal[0, 1], float]
    torch: str
    cuda: str | None = None

    @field_validator("python")
    @classmethod
    def _is_python_state(cls, value: tuple[int, list[int], float | None]) -> Any:
        if value[1][-1] > 624:
            raise ValueError("the position in Python's generator is above 624")
        return value

    @field_validator("numpy")
    @classmethod
    def _is_numpy_state(cls, value: tuple[str, str, int, int, float]) -> Any:
        if len(_bytes(value[1])) != 4 * 624:
            raise ValueError("numpy's generator does not have 624 words")
        return value

    @field_validator("torch")
    @classmethod
    def _is_torch_state(cls, value: str) -> str:
        try:
            torch.Generator().set_state(_tensor(value))
        except RuntimeError as error:
            raise ValueError(f"torch's generator: {error}") from error
        return value

    @field_validator("cuda")
    @classmethod
    def _is_cuda_state(cls, value: str | None) -> str | None:
        if value is not None and len(_bytes(value)) != CUDA_BYTES:
            raise ValueError(f"the GPU's generator does not have {CUDA_BYTES} bytes")
        return value


def capture(device: torch.device) -> State:
    """The generators' state as JSON-able values."""
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
    """Set the generators to a captured state."""
    version, numbers, following = state["python"]
    random.setstate((version, tuple(numbers), following))
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, np.frombuffer(_bytes(keys), np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(_tensor(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_tensor(state["cuda"]), device)


@contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """Set the generators back at the end of the block, which runs code of the user."""
    state = capture(device)
    try:
        yield
    finally:
        restore(state, device)


def _text(array: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(_bytes(text)), dtype=torch.uint8)
