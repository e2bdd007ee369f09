"""Does inductor's code for the GPU compile? Inductor generates, Triton and ptxas compile for sm_90 (an H100), and
nothing is launched.

Needs the package triton, which a torch for CPUs comes without; ``make test-cuda`` puts it into ``stub.TRITON``, beside
the other packages, so that nothing else sees it. In a process of ``Server(has_triton=True)`` (processes.py).

What this shows: whether flex attention compiles, and what each kernel takes of shared memory. Numbers are
the CPU's, by tests/unit/attention.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tests.cuda_stand_in import torch_cuda
from tests.cuda_stand_in.cases import MOST_SHARED, Compiled
from tests.cuda_stand_in.device import CUDA
from torch._subclasses.fake_tensor import FakeTensorMode


def flex_kernels(
    dtype: str, size: int, *, window: int | None = None, softcap: float | None = None
) -> Compiled:
    """Flex attention forward and backward, with 8 heads on 2 of ``size``, over 777 tokens."""
    import numpy as np

    from taut.attention import flex
    from taut.attention.layout import Layout

    num = 777
    found = Compiled()
    with _compiling(found):
        layout = Layout(np.full(num, num), device=torch.device("cpu"))
        blocks = flex.blocks(layout, window)

        def there(x: torch.Tensor) -> torch.Tensor:
            return torch.empty(x.shape, dtype=x.dtype, device=CUDA)

        def places() -> torch.Tensor:
            return torch.empty(num, dtype=torch.int64, device=CUDA)

        with FakeTensorMode(allow_non_fake_inputs=True):
            heads = [
                torch.empty(1, h, num, size, device=CUDA, dtype=getattr(torch, dtype))
                for h in (8, 2, 2)
            ]
            query, key, value = (one.requires_grad_() for one in heads)
            mask = flex.Mask(
                places(),
                None,
                None if window is None else (places(), places()),
                flex.Blocks(*map(there, blocks)),
            )
            out, lse = flex._kernel("cuda")(query, key, value, mask, 0.3, softcap)
            (out.float().sum() + lse.sum()).backward()
    return found


def _replace_allocation() -> None:
    """Compiled code makes its tensors by Python's functions."""
    guards: Any = torch._C._dynamo.guards
    guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device=CUDA
    )
    guards._empty_strided_cpu = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype
    )
    guards._reinterpret_tensor = lambda tensor, size, stride, offset=0: tensor.as_strided(
        size, stride, offset
    )
    torch.cuda._DeviceGuard = torch_cuda.Nothing


@contextmanager
def _compiling(found: Compiled) -> Iterator[None]:
    """Inside the block inductor believes that there is a GPU; what Triton compiles is written to ``found``."""
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        os.environ |= {
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        torch_cuda.install_functions()
        for cached in vars(torch.utils._triton).values():
            if hasattr(cached, "cache_clear"):  # there was no device when they were asked
                cached.cache_clear()
        _install_driver(found)
        _quieten_inductor()
        _replace_allocation()
        torch.set_num_threads(1)
        torch.autograd.set_multithreading_enabled(False)
        yield


def _install_driver(found: Compiled) -> None:
    """Triton's driver: loads a binary by noting its shared memory, launches nothing."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Utils:
        def load_binary(
            self, name: str, kernel: bytes, shared: int, device: int
        ) -> tuple[int, ...]:
            found.shared[name] = max(shared, found.shared.get(name, 0))
            return 0, 0, 64, 0, 1024

        def get_device_properties(self, device: int) -> dict[str, int]:
            return {
                "max_shared_mem": MOST_SHARED,
                "max_num_regs": 65536,
                "multiprocessor_count": 132,
                "warpSize": 32,
                "sm_clock_rate": 1980000,
                "mem_clock_rate": 2619000,
                "mem_bus_width": 5120,
            }

    class Launcher:
        def __init__(self, source: Any, metadata: Any) -> None:
            pass

        def __call__(self, *_: Any, **__: Any) -> None:
            pass

    class Driver:
        utils = Utils()
        launcher_cls = Launcher

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def set_current_device(self, device: int) -> None:
            pass

        def get_current_stream(self, device: int = 0) -> int:
            return 0

        def get_device_capability(self, device: int = 0) -> tuple[int, int]:
            return 9, 0

        def get_active_torch_device(self) -> torch.device:
            return CUDA

        def get_device_interface(self) -> Any:
            return torch.cuda

        def is_active(self) -> bool:
            return True

        def get_benchmarker(self) -> Any:
            return lambda kernel, **_: 1.0

        def get_empty_cache_for_benchmark(self) -> None:
            return None

        def clear_cache(self, cache: Any) -> None:
            pass

        def map_python_to_cpp_type(self, kind: str) -> str:
            return "void*"

    driver.set_active(Driver())
    from torch._inductor.runtime import triton_helpers

    triton_helpers.set_driver_to_gpu = lambda: driver.set_active(Driver())

    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    def run(self: Any, *_: Any, **__: Any) -> None:
        found.launches += 1

    CachingAutotuner.run = run
    CachingAutotuner.benchmark_all_configs = lambda self, *_, **__: dict.fromkeys(
        self.launchers, 1.0
    )


def _quieten_inductor() -> None:
    """Inductor's parts that would compute on the device, or ask CUDA's C++."""
    import torch._dynamo.device_interface as interface
    import torch._inductor.config as config
    from torch._inductor.fx_passes import joint_graph, post_grad

    config.compile_threads = 1
    config.pattern_matcher = False
    config.joint_graph_constant_folding = False
    config.fx_graph_cache = False
    for name in ("use_static_triton_launcher", "use_static_cuda_launcher"):
        if hasattr(config, name):
            setattr(config, name, False)
    joint_graph.lazy_init = lambda *_, **__: None
    post_grad.lazy_init = lambda *_, **__: None
    torch.cuda._exchange_device = lambda device: 0
    torch.cuda._maybe_exchange_device = lambda device: 0
    there: dict[str, Any] = {
        **{
            name: f
            for name, f in torch_cuda.FUNCTIONS.items()
            if hasattr(interface.CudaInterface, name)
        },
        "exchange_device": lambda device: 0,
        "maybe_exchange_device": lambda device: 0,
        "current_device": lambda: 0,
        "get_raw_stream": lambda index: 0,
        "synchronize": lambda *_: None,
        "is_available": lambda: True,
        "get_compute_capability": lambda *_: 90,
    }
    for name, value in there.items():
        kept = value if isinstance(value, type) else staticmethod(value)
        setattr(interface.CudaInterface, name, kept)
    interface.CudaInterface.Worker.current_device = staticmethod(lambda: 0)
    interface.CudaInterface.Worker.get_device_properties = staticmethod(
        torch_cuda.FUNCTIONS["get_device_properties"]
    )
    if not hasattr(torch._C, "_cuda_getCurrentRawStream"):
        torch._C._cuda_getCurrentRawStream = lambda index: 0
