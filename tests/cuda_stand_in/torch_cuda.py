"""What replaces functions of torch, and of the libraries, in a process with the stand-in: ``install``, for good, before
the device is in force.

    torch.cuda          one H100 with 80 GB; memory as counted; streams and events that do nothing but count waits
    nn.Module._apply    puts a new parameter where one changes its device: it cannot change its kind of tensor in place
    torch.tensor        numbers inside lists that are tensors of the device are read one by one, and counted: C++ would
                        read past any mode; ``tolist`` reads once
    threads             have the device in force of whoever started them
    flex attention      is the reference backend: its kernel is Triton's (compiled_kernels.py compiles it); without
                        numbers, something with its shapes
    transformers        does not take a FakeTensor for tracing
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from tests.cuda_stand_in import device as devices
from tests.cuda_stand_in.device import CUDA, DEVICE, TOTAL, note
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._device import _device_constructors

PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    total_memory=TOTAL,
    major=9,
    minor=0,
    multi_processor_count=132,
    uuid="0",
    L2_cache_size=50 * 2**20,
    warp_size=32,
    shared_memory_per_block_optin=232448,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    gcnArchName="",
)


class Stream:
    """Work is done when it is asked for; to wait for it is counted."""

    device = CUDA

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        note("wait", "stream.synchronize")


class Event:
    """As a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        note("wait", "event.synchronize")

    def elapsed_time(self, other: Any) -> float:
        return 1.0


class Nothing(contextlib.nullcontext[None]):
    """``torch.cuda.device`` and ``torch.cuda.stream``: there is one of each."""

    def __init__(self, *_: Any) -> None:
        super().__init__()


def _memory(name: str) -> Callable[..., int]:
    return lambda device=None: getattr(DEVICE[-1], name) if DEVICE else 0


def _forget_peak(device: Any = None) -> None:
    if DEVICE:
        DEVICE[-1].peak = DEVICE[-1].allocated


def _random_state(device: Any = None) -> Tensor:
    return torch.zeros(16, dtype=torch.uint8)


FUNCTIONS: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_properties": lambda device=None: PROPERTIES,
    "get_device_name": lambda device=None: PROPERTIES.name,
    "is_bf16_supported": lambda including_emulation=True: True,
    "is_current_stream_capturing": lambda: False,
    "synchronize": lambda device=None: note("wait", "torch.cuda.synchronize"),
    "empty_cache": lambda: None,
    "ipc_collect": lambda: None,
    "memory_allocated": _memory("allocated"),
    "memory_reserved": _memory("peak"),
    "max_memory_allocated": _memory("peak"),
    "reset_peak_memory_stats": _forget_peak,
    "mem_get_info": lambda device=None: (TOTAL - _memory("allocated")(), TOTAL),
    "get_rng_state": _random_state,
    "get_rng_state_all": lambda: [_random_state()],
    "set_rng_state": lambda state, device=None: None,
    "set_rng_state_all": lambda states: None,
    "manual_seed": lambda seed: None,
    "manual_seed_all": lambda seed: None,
    "current_stream": lambda device=None: Stream(),
    "default_stream": lambda device=None: Stream(),
    "Stream": Stream,
    "Event": Event,
    "stream": Nothing,
    "device": Nothing,
    "utilization": lambda device=None: 50,
    "device_memory_used": lambda device=None: 1,
    "power_draw": lambda device=None: 1,
    "temperature": lambda device=None: 1,
    "_lazy_init": lambda: None,
}
"""Name in torch.cuda -> what stands there."""


def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """``nn.Module._apply``: tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in self.modules() if recurse else [self]:
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                with torch.no_grad():
                    new = fn(parameter)
                if type(new) is type(parameter) is nn.Parameter and new.device == parameter.device:
                    parameter.data = new
                    made[id(parameter)] = parameter
                elif new is parameter:
                    made[id(parameter)] = parameter
                else:
                    made[id(parameter)] = nn.Parameter(new, parameter.requires_grad)
            module._parameters[key] = made[id(parameter)]
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = fn(buffer)
    return self


_tensor = torch.tensor
_tolist = FakeTensor.tolist
_run_thread = threading.Thread.run
_start_thread = threading.Thread.start


def _tensor_of(data: Any, *args: Any, **kwargs: Any) -> Tensor:
    def read(value: Any) -> Any:
        if isinstance(value, FakeTensor):
            return value.tolist() if value.ndim else value.item()
        return [read(one) for one in value] if isinstance(value, list | tuple) else value

    return _tensor(data if isinstance(data, Tensor) else read(data), *args, **kwargs)


def _read_at_once(self: FakeTensor) -> Any:
    """``tolist``: one copy. A FakeTensor reads its numbers one by one."""
    is_there = bool(DEVICE) and DEVICE[-1].has(self)
    return self.cpu().tolist() if is_there else _tolist(self)


def _start(self: threading.Thread) -> None:
    self.stand_in = DEVICE[-1] if DEVICE else None  # type: ignore[attr-defined]
    _start_thread(self)


def _run(self: threading.Thread) -> None:
    device = getattr(self, "stand_in", None)
    with contextlib.nullcontext() if device is None else devices.active(device):
        _run_thread(self)


def install_functions() -> None:
    """Replace what is in torch.cuda."""
    for name, value in FUNCTIONS.items():
        setattr(torch.cuda, name, value)


def install(*, has_numbers: bool) -> None:
    """Replace all of it."""
    from transformers import masking_utils

    from taut.attention import flex, reference
    from taut.models import attention_backends

    install_functions()
    nn.Module._apply = _apply  # type: ignore[method-assign]
    Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]
    _device_constructors()  # remembers torch.tensor, which ``torch.device("meta")`` as a context acts on
    torch.tensor = _tensor_of
    FakeTensor.tolist = _read_at_once
    threading.Thread.start = _start  # type: ignore[method-assign]
    threading.Thread.run = _run  # type: ignore[method-assign]
    masking_utils.is_tracing = lambda tensor=None: False
    if has_numbers:
        attention_backends.BACKENDS["flex"] = reference.attend
    else:
        flex._kernel = _flex_shapes  # type: ignore[assignment]


def _flex_shapes(device_type: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Something with the shapes, devices and gradients of flex attention."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        for tensor in (*mask.blocks, mask.reach_T):
            assert tensor.device == query.device, f"{tensor.device} beside {query.device}"
        repeated = (key + value).repeat_interleave(query.shape[1] // key.shape[1], 1)
        return query + 0 * repeated, query.float().sum(-1)

    return attend
