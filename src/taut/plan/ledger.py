"""A ledger of every storage that torch allocates and frees: the live bytes by part, over time.

    with Ledger({"weights": parameters}, vocabulary) as ledger:
        scores = scorer(packed, ...)
        ledger.end_forward()
        scores.linear_sum.backward()
    ledger.history().peak()      bytes at the peak, by part

It counts real and fake tensors the same way, so that prediction and measurement are comparable. It counts tensors only:
neither an allocator's fragments nor the buffers of a running kernel.

Parts: ``weights``, ``reference``, ``optimizer``, ``gradients``, ``casts`` (weights in autocast's dtype),
``activations`` (alive at the end of the forward), ``logits`` (the head's rows over the vocabulary), ``temporary``
(everything else). The part of a storage may be known only later, so parts are assigned when the history is made.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from taut.types import IntArray

PARTS = (
    "weights",
    "reference",
    "gradients",
    "optimizer",
    "casts",
    "activations",
    "logits",
    "temporary",
)
"""In the order of the output."""

Parts = dict[str, int]
"""part -> bytes."""
Shares = Mapping[str, float]
"""part -> the fraction of it on one rank, if not 1: 1 / N for parts sharded over N ranks."""


@dataclass(frozen=True)
class History:
    """The live bytes after each allocation and free."""

    bytes_MP: IntArray
    """[moves, parts]: bytes of each part after each move."""
    backward: int
    """The first move of the backward."""
    operators: int
    """Number of operators that made or changed a tensor, without views."""

    def peak(self, shares: Shares = MappingProxyType({})) -> Parts:
        """The parts at the peak."""
        return fullest(self.peaks(shares), shares)

    def peaks(self, shares: Shares = MappingProxyType({})) -> list[Parts]:
        """The parts at the peaks of the forward (with the head's gradient), of the first half of the backward and of
        its second half. Bytes are full sizes; ``shares`` only decide which moment is the peak.
        """
        middle = (self.backward + len(self.bytes_MP)) // 2
        bounds = (0, self.backward, middle, len(self.bytes_MP))
        weight_P = np.array([shares.get(part, 1.0) for part in PARTS])
        peaks = []
        for start, stop in pairwise(bounds):
            rows = self.bytes_MP[start:stop]
            if len(rows):
                row = rows[int((rows @ weight_P).argmax())]
                peaks.append(dict(zip(PARTS, row.tolist(), strict=True)))
        return peaks


def fullest(moments: Iterable[Parts], shares: Shares) -> Parts:
    """The moment with the most bytes, by ``shares``."""
    return max(moments, key=lambda parts: sum(parts[p] * shares.get(p, 1.0) for p in PARTS))


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch: no types
    """Records which part of the model or step allocates and frees how many bytes, inside ``with``."""

    def __init__(
        self, known: Mapping[str, Iterable[Tensor]], vocabulary: int | None = None
    ) -> None:
        """``known``: part -> existing tensors. ``vocabulary``: V, which identifies logits."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.vocabulary = vocabulary
        self._sizes: list[int] = []
        self._parts: list[str] = []
        self._moves: list[int] = []
        """n: storage n - 1 was made; -n: it was freed."""
        self._backward = 0
        self._operators = 0
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        for part, tensors in known.items():
            for tensor in tensors:
                self._note(tensor, part)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = self.call(func, args, kwargs or {})
        part, num_before = None, len(self._sizes)
        for tensor in _tensors(result):
            part = part or self._part_of(func, args, tensor)
            self._note(tensor, part)
        self._operators += len(self._sizes) > num_before or func._schema.is_mutable
        return result

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator."""
        return func(*args, **kwargs)

    def watch_gradients(self, parameters: Iterable[nn.Parameter]) -> list[RemovableHandle]:
        """Record gradients as such when they are accumulated, until the handles are removed."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        hook: Any = nn.Parameter.register_post_accumulate_grad_hook  # has no types
        return [hook(parameter, self._take_gradient) for parameter in trained]

    def end_forward(self) -> None:
        """Mark the live temporary tensors as activations, kept for the backward."""
        self._backward = len(self._moves)
        for _, number in self._alive.values():
            if self._parts[number] == "temporary":
                self._parts[number] = "activations"

    def history(self) -> History:
        """The history so far."""
        moves = np.array(self._moves)
        number_M = np.abs(moves) - 1
        sizes, parts = np.array(self._sizes), np.array([PARTS.index(p) for p in self._parts])
        change_MP = np.zeros((moves.size, len(PARTS)), dtype=np.int64)
        change_MP[np.arange(moves.size), parts[number_M]] = sizes[number_M] * np.sign(moves)
        return History(change_MP.cumsum(0), self._backward or moves.size, self._operators)

    def _take_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._note(parameter.grad, "gradients", is_final=True)

    def _note(self, tensor: Tensor, part: str, *, is_final: bool = False) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        entry = self._alive.get(key)
        if entry is not None:
            if is_final:
                self._parts[entry[1]] = part
            return
        number = len(self._sizes)
        self._sizes.append(storage.nbytes())
        self._parts.append(part)
        self._moves.append(number + 1)
        alive, moves = self._alive, self._moves

        def freed(_: Any) -> None:
            del alive[key]
            moves.append(-number - 1)

        self._alive[key] = (weakref.ref(storage, freed), number)

    def _part_of(self, func: Any, args: tuple[Any, ...], made: Tensor) -> str:
        if func is torch.ops.aten._to_copy.default:
            entry = self._alive.get(args[0].untyped_storage()._cdata)
            if entry is not None and self._parts[entry[1]] == "weights":
                return "casts"
        is_logits = made.ndim == 2 and made.shape[1] == self.vocabulary
        return "logits" if is_logits else "temporary"


def _tensors(result: Any) -> Iterable[Tensor]:
    if isinstance(result, Tensor):
        return (result,)
    if isinstance(result, tuple | list):
        return [item for item in result if isinstance(item, Tensor)]
    return ()
