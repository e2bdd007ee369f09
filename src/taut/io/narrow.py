"""Python objects as bytes for other processes of a run: pickled, with arrays of numbers in few bytes.

    int64       as runs (a first number, and how often each difference is repeated) where these are shorter: positions,
                versions of weights; else in the narrowest type of integers: ids
    float64     in float32, where each number is one of float32: logprobs of an engine

``unpacked(packed(value))`` equals the value to the last bit, and arrays have their own dtypes. Bytes are read from this
run's own processes only: a pickle may do anything.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
from numpy.typing import NDArray


def packed(value: Any) -> memoryview:
    """The value as bytes, which may be written to."""
    content = io.BytesIO()
    _Pickler(content, pickle.HIGHEST_PROTOCOL).dump(value)
    return content.getbuffer()


def unpacked(content: Any) -> Any:
    """The value that was packed. ``content``: bytes, or an array of them."""
    return pickle.loads(content)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not np.ndarray or value.ndim != 1 or value.size < 2:
            return NotImplemented
        if value.dtype == np.int64:
            narrow = np.result_type(*map(np.min_scalar_type, (value.min(), value.max())))
            steps = np.diff(value)
            starts = np.append(0, np.flatnonzero(np.diff(steps)) + 1)
            if 2 * starts.size * value.itemsize < value.size * narrow.itemsize:
                counts = np.diff(starts, append=steps.size)
                return _from_runs, (int(value[0]), steps[starts], counts)
            if narrow.itemsize < value.itemsize:
                return np.ndarray.astype, (value.astype(narrow), np.int64)
        elif value.dtype == np.float64:
            with np.errstate(all="ignore"):
                single = value.astype(np.float32)
                again = single.astype(np.float64)
            if np.array_equal(again.view(np.int64), value.view(np.int64)):  # a NaN, and -0.0, too
                return np.ndarray.astype, (single, np.float64)
        return NotImplemented


def _from_runs(first: int, steps: NDArray[Any], counts: NDArray[Any]) -> NDArray[Any]:
    return np.cumsum(np.append(first, np.repeat(steps, counts)))
