"""A record of every storage that torch allocates and frees: the live bytes by part, over time.

    with Allocations({"weights": parameters}, vocabulary) as allocations:
        scores = scorer(packed, ...)
        allocations.end_forward()
        scores.linear_sum.backward()
    allocations.history().peak()      bytes at the peak, by part

A phase is a stretch of time whose fullest moment is the same one however many layers a model has, so that it can be
extrapolated: the forward, and each half of the backward. Where several models run, ``mark`` ends the phase of one.

It counts real and fake tensors the same way, so that prediction and measurement are comparable. It counts tensors only:
neither an allocator's fragments nor the buffers of a running kernel. Pinned tensors are the host's, and counted apart.

Parts: ``weights`` of the policy, ``critic``, ``teacher``, ``reference`` and ``rewards`` (models that judge),
``optimizer``, ``gradients``, ``casts`` (weights in autocast's dtype), ``activations`` (alive at the end of the
forward), ``logits`` (the head's rows over the vocabulary), ``temporary`` (everything else). The part of a storage may
be known only later, so parts are assigned when the history is made.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import PlainSerializer, PlainValidator
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from taut.types import IntArray

PARTS = (
    "weights",
    "critic",
    "teacher",
    "reference",
    "rewards",
    "gradients",
    "optimizer",
    "casts",
    "activations",
    "logits",
    "temporary",
)
"""In the order of the output."""
HOST = "host"
"""Part that is pinned in the host's memory; it is on no device, and in no peak."""

Parts = dict[str, int]
"""part -> bytes."""
Shares = Mapping[str, float]
"""part -> the fraction of it on one rank, if not 1: 1 / N for parts sharded over N ranks."""


@dataclass(frozen=True)
class History:
    """The live bytes after each allocation and free."""

    bytes_MP: Annotated[IntArray, PlainValidator(np.array), PlainSerializer(np.ndarray.tolist)]
    """[moves, parts]: bytes of each part after each move."""
    phases: tuple[int, ...]
    """The first move of each phase but the first."""
    operators: int
    """Number of operators that made or changed a tensor, without views."""
    host: int = 0
    """Most bytes at a time that were pinned in the host's memory."""

    def thinned(self) -> History:
        """The history without the moves that are no peak whatever the shares: another one of the phase has as many
        bytes of each part, or more.
        """
        kept, phases = list[IntArray](), list[int]()
        for start, stop in pairwise((0, *self.phases, len(self.bytes_MP))):
            phases.append(sum(map(len, kept)))
            rows = self.bytes_MP[start:stop] if stop > start else self.bytes_MP[start - 1 : start]
            front = np.empty(0, dtype=int)
            for at in np.argsort(-rows.sum(1), kind="stable"):
                if not (rows[front] >= rows[at]).all(1).any():
                    front = np.append(front, at)
            kept.append(rows[np.sort(front)])
        return replace(self, bytes_MP=np.concatenate(kept), phases=tuple(phases[1:]))

    def peak(self, shares: Shares = MappingProxyType({})) -> Parts:
        """The parts at the peak."""
        return fullest(self.peaks(shares), shares)

    def peaks(self, shares: Shares = MappingProxyType({})) -> list[Parts]:
        """The parts at the peak of each phase. Bytes are full sizes; ``shares`` decide which moment is the peak."""
        weight_P = np.array([shares.get(part, 1.0) for part in PARTS])
        peaks = []
        for start, stop in pairwise((0, *self.phases, len(self.bytes_MP))):
            rows = self.bytes_MP[start:stop] if stop > start else self.bytes_MP[start - 1 : start]
            row = rows[int((rows @ weight_P).argmax())]
            peaks.append(dict(zip(PARTS, row.tolist(), strict=True)))
        return peaks


def fullest(moments: Iterable[Parts], shares: Shares) -> Parts:
    """The moment with the most bytes, by ``shares``."""
    return max(moments, key=lambda parts: sum(parts[p] * shares.get(p, 1.0) for p in PARTS))


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch: no types
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
        self._marks: dict[str, int] = {}
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
        is_pinned = bool((kwargs or {}).get("pin_memory"))
        for tensor in _tensors(result):
            part = part or self._part_of(func, args, tensor, is_pinned=is_pinned)
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

    def mark(self, name: str) -> None:
        """End a phase here; the first time counts, since a forward may be run again in the backward."""
        self._marks.setdefault(name, len(self._moves))

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
        columns = (*PARTS, HOST)
        sizes, parts = np.array(self._sizes), np.array([columns.index(p) for p in self._parts])
        change_MC = np.zeros((moves.size, len(columns)), dtype=np.int64)
        change_MC[np.arange(moves.size), parts[number_M]] = sizes[number_M] * np.sign(moves)
        bytes_MC = change_MC.cumsum(0)
        host = int(bytes_MC[:, -1].max(initial=0))
        # phases end at the marks of the forward; in the backward also in the middle between two
        end = self._backward or len(self._moves)
        forward = [at for at in self._marks.values() if at < end]
        bounds = [end, *(at for at in self._marks.values() if at >= end), len(self._moves)]
        halves = [at for start, stop in pairwise(bounds) for at in (start, (start + stop) // 2)]
        return History(bytes_MC[:, :-1], (*forward, *halves), self._operators, host)

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
        # its end is noted when torch frees the storage
        alive, moves, freed = self._alive, self._moves, self.freed

        def end(_: Any) -> None:
            del alive[key]
            moves.append(-number - 1)
            freed(key)

        self._alive[key] = (weakref.ref(storage, end), number)

    def freed(self, storage: int) -> None:
        """Called when a storage was freed."""

    def _part_of(self, func: Any, args: tuple[Any, ...], made: Tensor, *, is_pinned: bool) -> str:
        if is_pinned:
            return HOST
        if func is torch.ops.aten._to_copy.default:
            entry = self._alive.get(args[0].untyped_storage()._cdata)
            if entry is not None and self._parts[entry[1]] in ("weights", "critic"):
                return "casts"
        is_logits = made.ndim == 2 and made.shape[1] == self.vocabulary
        return "logits" if is_logits else "temporary"


def _tensors(result: Any) -> Iterable[Tensor]:
    if isinstance(result, Tensor):
        return (result,)
    if isinstance(result, tuple | list):
        return [item for item in result if isinstance(item, Tensor)]
    return ()
