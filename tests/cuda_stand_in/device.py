"""The device: every operation on "cuda" comes here, and is looked at, counted, and computed on the host.

A tensor on the device is a FakeTensor: torch's own rules give its shape, dtype, strides and device, and refuse what
mixes devices. A tensor on the host is a real one. With ``has_numbers`` each storage of the device has memory on the
host too, on which each operation runs as well; what is read back is then true. Without, numbers are made up (0.5, 1,
True), and models of any size fit.

Noted, each with the lines that caused it (``Note``):

    wait      the host waits for the device: ``item``, ``tolist``, ``cpu``, ``nonzero``, a mask as an index, a copy that
              is not ``non_blocking``, or comes from memory that is not pinned
    copy      a copy between host and device that nobody waits for
    refused   with deterministic algorithms, what CUDA refuses to compute then

Counted: kernels by operation, the bytes they read and write, the bytes of live storages and their peak. Modes of torch
belong to a thread: ``active`` puts the device in force in this one, and threads that taut starts get it too.
"""

from __future__ import annotations

import linecache
import re
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tests.cuda_stand_in.cases import Mark, Note
from tests.helpers import kernel_emulation
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import taut

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
TOTAL = 80 * 10**9
"""Bytes of memory that the device says it has."""
BLOCK = 512
"""Bytes that the allocator rounds up to."""
KERNELS: Mapping[str, Callable[..., Any]] = {
    "_flash_attention_forward": kernel_emulation.forward,
    "_flash_attention_backward": kernel_emulation.backward,
}
"""Operators of CUDA alone."""
METADATA = re.compile(
    "sym_(size|stride|numel|storage_offset)|size|stride|numel|dim|storage_offset|is_(contiguous|pinned)"
)
READS = frozenset(["_local_scalar_dense", "equal", "is_nonzero"])
COUNTED = frozenset(
    ["nonzero", "masked_select", "bincount", "_unique2", "unique_consecutive", "unique_dim"]
)
"""The size of their result is a number on the device."""
INDEXED = frozenset(["index", "index_put_", "index_put", "_index_put_impl_"])
MAKERS = re.compile(
    "(empty|zeros|ones|full|rand|randn)_like|new_(empty|zeros|ones|full|empty_strided)"
)
UNCOUNTED = re.compile("_unsafe_view|(new_)?empty(_strided|_like)?")
"""No kernel runs, besides for views."""
NOT_DETERMINISTIC = re.compile(
    "cumsum_?|histc|kthvalue|put_|_ctc_loss|grid_sampler_2d_backward|upsample_(bicubic2d|linear1d)_backward"
)
"""Refused on CUDA with deterministic algorithms (torch.use_deterministic_algorithms): of floats, a cumulative sum."""
_TAUT = str(Path(taut.__file__).parent)
_LIBRARIES = ("/transformers/", "/peft/", "/torch/optim/", "/torch/nn/utils/", "/accelerate/")


class Storage(NamedTuple):
    """A live storage of the device."""

    num_bytes: int
    memory: torch.UntypedStorage | None
    """Its numbers on the host."""


class Device:
    """One device, for the life of a process."""

    def __init__(self, *, has_numbers: bool = True) -> None:
        self.has_numbers = has_numbers
        self.notes: Counter[Note] = Counter()
        self.kernels: Counter[str] = Counter()
        self.bytes_moved = 0
        self.allocated = self.peak = self.peak_since_mark = 0
        self.marks: list[Mark] = []
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._live: dict[int, Storage] = {}
        self._pinned: set[int] = set()
        self._lock = threading.RLock()

    # -- what is told

    def mark(self) -> None:
        """End a part, of a run a step: what was noted since the last mark is its own."""
        self.marks.append(
            Mark(self.notes, self.kernels, self.bytes_moved, self.peak_since_mark, self.allocated)
        )
        self.notes, self.kernels, self.bytes_moved = Counter(), Counter(), 0
        self.peak_since_mark = self.allocated

    def note(self, kind: str, what: str) -> None:
        self.notes[Note(kind, what, *_place())] += 1

    def has(self, tensor: Tensor) -> bool:
        """Whether it is a tensor of this device."""
        return isinstance(tensor, FakeTensor) and tensor.fake_mode is self.fake

    # -- an operation

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What torch's dispatcher asks for."""
        name = func._overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        if not all(map(self.has, there)):
            return func(*args, **kwargs)  # of a trace of taut's own
        here = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]
        target = None if kwargs.get("device") is None else torch.device(kwargs["device"])
        goes_there = target is not None and target.type == "cuda"
        if func.namespace == "prim" or METADATA.fullmatch(name):
            return func(*args, **kwargs)
        if not there and not goes_there:
            return self._on_host(func, args, kwargs)
        if name == "_to_copy" and here:
            return self._upload(func, args, kwargs)
        if there and target is not None and target.type == "cpu":
            if name == "_to_copy":
                return self._download(func, args, kwargs)
            if MAKERS.fullmatch(name):
                like = torch.empty_strided(args[0].shape, args[0].stride(), dtype=args[0].dtype)
                return func(like, *args[1:], **kwargs)
        if name == "copy_" and isinstance(args[0], FakeTensor) != isinstance(args[1], FakeTensor):
            return self._copy_between(args, kwargs)
        if name in READS:
            return self._read(func, name, args)
        if torch.are_deterministic_algorithms_enabled() and NOT_DETERMINISTIC.fullmatch(name):
            self._refuse(name, args, kwargs)
        if (
            MAKERS.fullmatch(name) and here
        ):  # on the device, like one on the host or without numbers
            like = torch.empty_strided(args[0].shape, args[0].stride(), dtype=args[0].dtype)
            args = (self._new(like), *args[1:])
        elif name in INDEXED:
            args = self._with_indices_there(name, args)
        elif any(tensor.ndim for tensor in here) and name != "set_":
            raise RuntimeError(_mixed(name, tensors))
        has_size_there = name in COUNTED or (name == "index" and _has_mask(args[1]))
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            has_size_there = True
        if has_size_there or (name in INDEXED and _has_mask(args[1])):
            self.note(
                "wait", f"{name}, whose size is read" if has_size_there else f"{name} by a mask"
            )
        # torch's shapes of it are those of its kernel for bfloat16 alone
        is_wide_product = name == "_grouped_mm" and args[0].dtype != torch.bfloat16
        is_shaped_by_result = has_size_there or is_wide_product
        return self._launch(func, name, args, kwargs, is_shaped_by_result=is_shaped_by_result)

    def _launch(
        self, func: Any, name: str, args: Any, kwargs: Any, *, is_shaped_by_result: bool
    ) -> Any:
        """Run an operation of the device: as shapes, and with numbers on the host too."""
        real, lowered = None, ((), {})
        if self.has_numbers:
            lowered = tree_map(self._down, (args, kwargs))
            real = self._compute(func, name, *lowered)
            if is_shaped_by_result:
                out = tree_map(lambda r: self._new(r) if isinstance(r, Tensor) else r, real)
                self._count(func, name, args, kwargs, out)
                return out
        elif is_shaped_by_result:
            return _guess_size(self.fake, name, args, kwargs)
        elif name in INDEXED and _has_mask(args[1]):
            return args[0]
        try:
            with self.fake:
                out = func(*args, **kwargs)
        except Exception as error:
            error.add_note(f"on the stand-in for CUDA, {name} at {_place()[1]}")
            raise
        for fake in tree_leaves(out):
            self._track(fake)
        if self.has_numbers:
            given = [leaf for leaf in tree_leaves(lowered) if isinstance(leaf, Tensor)]
            inputs = {tensor.untyped_storage()._cdata for tensor in given}
            for fake, found in zip(tree_leaves(out), tree_leaves(real), strict=True):
                if isinstance(fake, FakeTensor) and isinstance(found, Tensor):
                    if fake.shape != found.shape and name in BUFFERS:
                        found = torch.zeros(fake.shape, dtype=fake.dtype)
                    self._bind(fake, found, inputs, name)
        self._count(func, name, args, kwargs, out)
        return out

    def _compute(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """The operation on the host's memory, where the CPU has it."""
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if name in KERNELS:
            return KERNELS[name](*args, **kwargs)
        if name == "log_sigmoid_backward":  # the CPU's has a buffer that CUDA's leaves empty
            return args[0] * torch.sigmoid(-args[1].double()).to(args[1].dtype)
        if func._overloadname == "dtype" and name in ("bmm", "mm"):
            return getattr(torch, name)(args[0].to(args[2]), args[1].to(args[2]))
        if name == "histc" and not args[0].dtype.is_floating_point:
            return torch.histc(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
        try:
            return func(*args, **kwargs)
        except Exception as error:
            error.add_note(
                f"on the stand-in for CUDA, computing {name} on the CPU at {_place()[1]}"
            )
            raise

    # -- between host and device

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation of the host; memory that is to be pinned is remembered."""
        is_pinned = kwargs.pop("pin_memory", None)
        if func._overloadpacket.__name__ in ("_pin_memory", "pin_memory"):
            is_pinned, func, args, kwargs = True, torch.ops.aten.clone.default, args[:1], {}
        out = func(*args, **kwargs)
        if is_pinned:
            storage = out.untyped_storage()
            self._pinned.add(storage._cdata)
            weakref.finalize(storage, self._pinned.discard, storage._cdata)
        return out

    def _upload(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        source = args[0]
        self._note_upload(source, kwargs.get("non_blocking"))
        dtype = kwargs.get("dtype") or source.dtype
        real = torch.empty_strided(source.shape, source.stride(), dtype=dtype)
        return self._new(real.copy_(source) if self.has_numbers else real)

    def _download(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        is_waited_for = not kwargs.get("non_blocking")
        self.note("wait" if is_waited_for else "copy", "copy to the host")
        if not self.has_numbers:
            return _made_up(args[0].shape, kwargs.get("dtype") or args[0].dtype)
        kwargs |= {"non_blocking": False, "pin_memory": None}
        out: Tensor = func(self._down(args[0]), **kwargs)
        return out

    def _copy_between(self, args: Any, kwargs: Any) -> Tensor:
        target, source = args[:2]
        is_free = args[2] if len(args) > 2 else kwargs.get("non_blocking")
        if isinstance(target, FakeTensor):
            self._note_upload(source, is_free)
        else:
            self.note("copy" if is_free else "wait", "copy to the host")
        if self.has_numbers:
            self._down(target).copy_(self._down(source))
        elif not isinstance(target, FakeTensor):
            target.copy_(_made_up(source.shape, target.dtype).expand_as(target))
        return target  # type: ignore[no-any-return]

    def _note_upload(self, source: Tensor, is_free: Any) -> None:
        is_pinned = source.untyped_storage()._cdata in self._pinned
        what = f"copy to the device{'' if is_pinned else ' from memory that is not pinned'}"
        self.note("copy" if is_free and is_pinned else "wait", what)

    def _read(self, func: Any, name: str, args: Any) -> Any:
        self.note("wait", {"_local_scalar_dense": "item"}.get(name, name))
        if not self.has_numbers:
            return True if name != "_local_scalar_dense" else _made_up((), args[0].dtype).item()
        return func(*tree_map(self._down, args))

    def _with_indices_there(self, name: str, args: Any) -> Any:
        """Indices on the host are copied to the device first, as torch does."""
        assert isinstance(args[0], FakeTensor), _mixed(name, tree_leaves(args))
        indices = []
        for index in args[1]:
            if isinstance(index, Tensor) and not isinstance(index, FakeTensor):
                self.note("wait", f"{name} by indices on the host")
                index = self._new(index.clone())
            indices.append(index)
        return (args[0], indices, *args[2:])

    def _refuse(self, name: str, args: Any, kwargs: Any) -> None:
        if "cumsum" in name:
            dtype = kwargs.get("dtype") or args[0].dtype
            if not (dtype.is_floating_point or dtype.is_complex):
                return
        self.note("refused", name)
        raise RuntimeError(
            f"{name}_cuda_kernel does not have a deterministic implementation, but you set "
            f"'torch.use_deterministic_algorithms(True)' (at {_place()[1]})"
        )

    # -- memory

    def _track(self, tensor: Any) -> None:
        """Count a new storage until it is freed."""
        if not isinstance(tensor, FakeTensor) or tensor.device.type != "cuda":
            return
        storage = tensor.untyped_storage()
        if storage._cdata in self._live:
            return
        num_bytes = -(-storage.nbytes() // BLOCK) * BLOCK
        self._live[storage._cdata] = Storage(num_bytes, None)
        self.allocated += num_bytes
        self.peak = max(self.peak, self.allocated)
        self.peak_since_mark = max(self.peak_since_mark, self.allocated)
        weakref.finalize(storage, self._free, storage._cdata)

    def _free(self, key: int) -> None:
        self.allocated -= self._live.pop(key).num_bytes

    def _bind(self, fake: Tensor, real: Tensor, inputs: set[int], name: str) -> None:
        """The memory of ``real`` is that of ``fake``; copied where it is an input's, or lies otherwise."""
        key = fake.untyped_storage()._cdata
        if self._live[key].memory is not None:
            return
        if fake.dtype != real.dtype or fake.shape != real.shape:
            raise AssertionError(
                f"{name}: on CUDA {tuple(fake.shape)} {fake.dtype}, on the CPU {tuple(real.shape)} {real.dtype}"
            )
        size, memory = fake.untyped_storage().nbytes(), real.untyped_storage()
        lies_alike = (
            fake.stride() == real.stride() and fake.storage_offset() == real.storage_offset()
        )
        if lies_alike and memory.nbytes() >= size and memory._cdata not in inputs:
            self._live[key] = self._live[key]._replace(memory=memory)
            return
        self._live[key] = self._live[key]._replace(memory=torch.UntypedStorage(size))
        self._down(fake).copy_(real)

    def _down(self, value: Any) -> Any:
        """What stands for it on the host."""
        if isinstance(value, FakeTensor):
            memory = self._live[value.untyped_storage()._cdata].memory
            assert memory is not None, (
                f"no numbers for {tuple(value.shape)} {value.dtype} at {_place()[1]}"
            )
            out = torch.empty(0, dtype=value.dtype)
            return out.set_(memory, value.storage_offset(), value.shape, value.stride())  # type: ignore[call-overload]
        return CPU if isinstance(value, torch.device) else value

    def _new(self, real: Tensor) -> Tensor:
        """A tensor of the device that is as one on the host, whose memory it takes."""
        with self.fake:
            out = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=CUDA)
        self._track(out)
        if self.has_numbers:
            self._bind(out, real, set(), "a result")
        return out

    def _count(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        returns = func._schema.returns
        is_view = bool(returns) and all(
            r.alias_info is not None and not r.alias_info.is_write for r in returns
        )
        if is_view or UNCOUNTED.fullmatch(name):
            return
        self.kernels[name] += 1
        seen: set[tuple[int, int, int]] = set()
        for tensor in tree_leaves((args, kwargs, out)):
            if isinstance(tensor, FakeTensor):
                key = tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel()
                if key not in seen:
                    seen.add(key)
                    self.bytes_moved += tensor.numel() * tensor.element_size()


BUFFERS = frozenset(["log_sigmoid_forward", *KERNELS])
"""Their last results are buffers, whose size differs between CPU and CUDA."""


class _Mode(TorchDispatchMode):
    """Brings a thread's operations to the device."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with self.device._lock:
            return self.device.dispatch(func, args, dict(kwargs or {}))


DEVICE: list[Device] = []
"""The one in force."""


@contextmanager
def active(device: Device) -> Iterator[Device]:
    """The device is there inside the block, in this thread."""
    DEVICE.append(device)
    torch._C._set_only_lift_cpu_tensors(True)  # type: ignore[attr-defined]
    try:
        with _Mode(device):
            yield device
    finally:
        DEVICE.remove(device)


def note(kind: str, what: str) -> None:
    """Note it on the device in force, if there is one."""
    if DEVICE:
        DEVICE[-1].note(kind, what)


def _place() -> tuple[str, str]:
    """The functions of taut that are under way, the innermost first, behind that of a library where it asked. Backward
    runs in a thread of its own: where that has none of taut, those of the main thread count.
    """
    found = _frames(sys._getframe(2))
    if not any(name.startswith(_TAUT) for name, *_ in found):
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        found += [("", "backward", 0)] * bool(found) + _frames(main)
    ours = [frame for frame in found if frame[0].startswith(_TAUT)][:2]
    library = [found[0]] if found and not found[0][0].startswith(_TAUT) else []
    chosen = [*library, *ours]
    where = " < ".join(f"{_module(name)}.{function}" for name, function, _ in chosen)
    lines = " < ".join(f"{_short(name)}:{line} {function}" for name, function, line in chosen)
    text = linecache.getline(ours[0][0], ours[0][2]).strip() if ours else ""
    return where or "?", f"{lines}: {text}"


def _frames(frame: Any) -> list[tuple[str, str, int]]:
    """(file, function, line) of taut and the libraries, the innermost first."""
    found = []
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_TAUT) or any(part in name for part in _LIBRARIES):
            found.append((name, frame.f_code.co_qualname, frame.f_lineno))
        frame = frame.f_back
    return found


def _short(name: str) -> str:
    if name.startswith(_TAUT):
        return str(Path(name).relative_to(_TAUT))
    return name.partition("site-packages/")[2] or "autograd"


def _module(name: str) -> str:
    return _short(name).removesuffix(".py").replace("/", ".")


def _has_mask(indices: Any) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)


def _mixed(name: str, tensors: Any) -> str:
    found = [f"{t.device} {tuple(t.shape)}" for t in tensors if isinstance(t, Tensor)]
    return f"Expected all tensors to be on the same device, but {name} has {', '.join(found)} at {_place()[1]}"


def _made_up(shape: Any, dtype: torch.dtype) -> Tensor:
    value = True if dtype == torch.bool else 0.5 if dtype.is_floating_point else 1
    return torch.full(tuple(shape), value, dtype=dtype)


def _guess_size(fake: FakeTensorMode, name: str, args: Any, kwargs: Any) -> Any:
    """A result of half the largest size."""
    half = max(1, args[0].numel() // 2)
    with fake:
        if name == "nonzero":
            return torch.empty((half, args[0].ndim), dtype=torch.int64, device=CUDA)
        if name == "masked_select":
            return torch.empty(half, dtype=args[0].dtype, device=CUDA)
        if name == "bincount":
            return torch.empty(max(1, kwargs.get("minlength", 1)), dtype=torch.int64, device=CUDA)
        if name == "index":
            mask = next(i for i in args[1] if i is not None)
            rest = args[0].shape[mask.ndim :]
            return torch.empty((max(1, mask.numel() // 2), *rest), dtype=args[0].dtype, device=CUDA)
    raise NotImplementedError(f"{name} without numbers, at {_place()[1]}")
