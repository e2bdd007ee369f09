"""The numbers behind fake tensors, where they are few and known: a vision tower lays out its work by the sizes of
pictures, and reads them back from tensors.

A fake tensor has a shape and no contents. ``FakeValues`` keeps the contents of the small ones that follow from real
tensors alone (the sizes of pictures, the ids of tokens), one real storage behind each fake one, so that views and
changes in place are followed as well. An operator of which all inputs are known runs on them too. What depends on the
pixels is not known: a mask of them is taken to hold everywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

MOST = 2**18
"""Elements of the largest tensor whose numbers are kept."""


class FakeValues:
    """The known contents of the fake tensors of a mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._real: dict[int, torch.UntypedStorage] = {}

    def forget(self, storage: int) -> None:
        """A fake storage was freed."""
        self._real.pop(storage, None)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on fake tensors, and on the numbers behind them where all are known."""
        if func in _BY_INDICES:
            args = (args[0], self._places(args[1]), *args[2:])
        inputs = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        known = all(self._of(x) is not None for x in inputs)
        if func is torch.ops.aten._local_scalar_dense.default:
            value = self._of(args[0])
            if value is not None:
                with _disable_current_modes():
                    return value.item()
            return 1.0 if args[0].is_floating_point() else 1
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if not known:
                raise
            return tree_map_only(Tensor, self._wrapped, self._run(func, args, kwargs))
        outputs = [x for x in tree_flatten(result)[0] if isinstance(x, FakeTensor)]
        if func._schema.is_mutable:
            if known:
                self._run(func, args, kwargs)
            else:  # what is written in place from unknown numbers is unknown
                for value, spec in zip(args, func._schema.arguments, strict=False):
                    is_written = spec.alias_info is not None and spec.alias_info.is_write
                    if is_written and isinstance(value, FakeTensor):
                        self.forget(_key(value))
        elif known and any(_key(x) not in self._real and x.numel() <= MOST for x in outputs):
            self._keep(outputs, self._run(func, args, kwargs))
        return result

    def _of(self, tensor: Tensor) -> Tensor | None:
        """The numbers of a tensor."""
        if not isinstance(tensor, FakeTensor):
            return tensor if tensor.numel() <= MOST else None
        storage = self._real.get(_key(tensor))
        if storage is None:
            return None
        with _disable_current_modes():
            whole = torch.empty(0, dtype=tensor.dtype).set_(storage)
            return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        real_args, real_kwargs = tree_map_only(Tensor, self._of, (args, kwargs))
        with _disable_current_modes(), torch.no_grad():
            return func(*real_args, **real_kwargs)

    def _keep(self, fakes: list[FakeTensor], result: Any) -> None:
        reals = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor)]
        for fake, real in zip(fakes, reals, strict=True):
            same = fake.stride() == real.stride() and fake.storage_offset() == real.storage_offset()
            if same and _key(fake) not in self._real:
                self._real[_key(fake)] = real.untyped_storage()

    def _wrapped(self, real: Tensor) -> Tensor:
        """A fake tensor with these numbers."""
        with _disable_current_modes():
            fake: Any = self.mode.from_tensor(real)
        if real.numel() <= MOST:
            self._real[_key(fake)] = real.untyped_storage()
        return fake  # type: ignore[no-any-return]

    def _places(self, indices: Any) -> list[Any]:
        """The indices with each mask replaced by the places where it holds; one that is not known holds everywhere."""
        found: list[Any] = []
        for index in indices:
            if index is None or index.dtype != torch.bool:
                found.append(index)
                continue
            known = self._of(index)
            with _disable_current_modes():
                mask = torch.ones(index.shape, dtype=torch.bool) if known is None else known
                found += mask.nonzero(as_tuple=True)
        return found


_BY_INDICES = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
)


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
