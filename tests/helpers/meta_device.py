"""The meta device in a GPU's place: what a CUDA device would have to hand back to the host, or to wait for, is found
without one.

A tensor on the meta device has a shape and no numbers. Inside ``watched`` each operation that needs the numbers on the
host (item, bool, tolist, cpu, nonzero, a mask as an index) is a read-back: it is counted with its place in the source
and gets zeros. On a GPU each of them waits until all work that was queued is done. A copy to the device that waits
(``to`` without ``non_blocking``, ``torch.tensor(..., device=...)``) is counted too. An operation on tensors of both
devices raises, as on a GPU.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import taut

META = torch.device("meta")
_SOURCE = str(Path(taut.__file__).parent)
_SKIPPED = (str(Path(torch.__file__).parent), __file__, "<")
_HELPERS = {"to_host", "to_device", "_read", "totals", "<listcomp>", "<dictcomp>", "<genexpr>"}
"""What only carries out what its caller asks."""
_aten = torch.ops.aten
_COPIES = {_aten._to_copy.default, _aten.copy_.default}
_INDEXED = {_aten.index.Tensor, _aten.index_put_.default}


class Watch(TorchDispatchMode):
    """Counts read-backs and waiting copies by place: the function, and the line's text."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()
        self.uploads: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_on_meta = [tensor.device.type == "meta" for tensor in tensors]
        if func in _COPIES:
            return self._copy(func, args, kwargs)
        if func is _aten._local_scalar_dense.default and is_on_meta[0]:
            self.reads[_place()] += 1
            return torch.zeros((), dtype=args[0].dtype).item()
        if func is _aten.equal.default and any(is_on_meta):
            self.reads[_place()] += 1
            return True
        if func is _aten.nonzero.default and is_on_meta[0]:
            self.reads[_place()] += 1
            return args[0].new_zeros((args[0].numel(), args[0].ndim), dtype=torch.int64)
        if func in _INDEXED and is_on_meta[0]:
            masks = [i for i in args[1] if i is not None and i.dtype == torch.bool]
            if masks:
                self.reads[_place()] += 1
                if func is _aten.index_put_.default:
                    return args[0]
                rows = [
                    i if i is None else i.new_zeros(i.shape[0], dtype=torch.int64) for i in args[1]
                ]
                return func(args[0], rows)
        if any(is_on_meta) and not all(is_on_meta):
            others = [t for t, is_meta in zip(tensors, is_on_meta, strict=True) if not is_meta]
            # A number on the host is an argument of the kernel.
            assert all(other.ndim == 0 for other in others), (
                f"{func} mixes devices at {_place()}: {[(t.shape, t.device.type) for t in tensors]}"
            )
        return func(*args, **kwargs)

    def _copy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _aten._to_copy.default:
            source, target = args[0], kwargs.get("device") or args[0].device
            is_waiting = not kwargs.get("non_blocking")
        else:
            source, target = args[1], args[0].device
            is_waiting = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        kinds = source.device.type, torch.device(target).type
        if kinds == ("meta", "cpu"):
            self.reads[_place()] += 1
            if func is _aten._to_copy.default:
                return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)
            return args[0].zero_()
        if kinds == ("cpu", "meta") and is_waiting and source.ndim:
            self.uploads[_place()] += 1
        return func(*args, **kwargs)


class _Constructed(TorchFunctionMode):
    """Counts tensors made of numbers on the host, which no operation shows."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        is_away = func is torch.tensor and kwargs.get("device") is not None
        if is_away and torch.device(kwargs["device"]).type == "meta":
            self.watch.uploads[_place()] += 1
        return func(*args, **kwargs)


def _place() -> str:
    """The function of taut that asked, and the library's between it and torch if there is one."""
    frame = sys._getframe(1)
    inner = ours = None
    while frame is not None and ours is None:
        code = frame.f_code
        if not code.co_filename.startswith(_SKIPPED) and code.co_name not in _HELPERS:
            inner = inner or frame
            ours = frame if code.co_filename.startswith(_SOURCE) else None
        frame = frame.f_back  # type: ignore[assignment]
    assert inner is not None
    found = [
        f"{Path(f.f_code.co_filename).stem}.{f.f_code.co_name}:{f.f_lineno}"
        for f in (ours, inner)
        if f
    ]
    return " > ".join(dict.fromkeys(found))


@contextmanager
def watched() -> Iterator[Watch]:
    """Count inside the block. Autocast, which knows no meta device, is off for it."""
    is_on, make = torch.is_autocast_enabled, torch.autocast
    watch = Watch()

    def is_autocast_enabled(device: str | None = None) -> bool:
        if device == "meta":
            return False
        return is_on() if device is None else is_on(device)

    def autocast(device: str, *args: Any, **keywords: Any) -> Any:
        return nullcontext() if device == "meta" else make(device, *args, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "is_autocast_enabled", is_autocast_enabled)
        patch.setattr(torch, "autocast", autocast)
        with watch, _Constructed(watch):
            yield watch
