"""An engine of vLLM's weight transfer that works on a CPU, for ``tests/real/test_weight_transfer.py``.

    PYTHONPATH=(this folder):(taut's worker folder) vllm serve DIR --worker-extension-cls shared_memory_engine.Worker
        --weight-transfer-config '{"backend": "shared_memory"}'

It is vLLM's engine "ipc", packed, with a file in memory in the place of a CUDA handle: the same requests, unpacking and
layer by layer reload. Runs in vLLM's environment and imports nothing of taut but the extension.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from taut_worker import TautWorker, pack_again
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    tensor_sizes: list[int]
    block: str
    """The file with the packed bytes, in memory."""


class SharedMemoryEngine(IPCWeightTransferEngine):
    """Receives what vLLM's engine "ipc" would, through memory of the host."""

    update_info_cls: Any = UpdateInfo

    def receive_weights(self, update_info: Any) -> None:
        with Path(update_info.block).open("rb") as block:
            raw = bytearray(block.read(sum(update_info.tensor_sizes)))
        packed = torch.frombuffer(raw, dtype=torch.uint8)
        dtypes = [getattr(torch, name) for name in update_info.dtype_names]
        self.model.load_weights(
            unpack_tensor(
                packed, update_info.names, update_info.shapes, dtypes, update_info.tensor_sizes
            )
        )

    def finish_weight_update(self) -> None:
        """And pack a tied head again, which vLLM 0.32 forgets on a CPU: without this the checksum of its copy is
        another one, and the push is refused.
        """
        super().finish_weight_update()
        pack_again(self.model)


WeightTransferEngineFactory.register_engine("shared_memory", SharedMemoryEngine)


class Worker(TautWorker):
    """taut's extension, by which vLLM's worker imports this file."""
