"""Weights to another process by CUDA IPC, on one GPU. NCCL takes no GPU twice: it needs a machine with two."""

from __future__ import annotations

import base64
import multiprocessing
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.gpu.needs import MODELS, needs

needs(*MODELS)

# ruff: noqa: E402  # what the packages are needed for

from tests.helpers.fake_vllm import CONFIG, Body
from tests.helpers.fake_weight_sync import change, tiny
from tests.helpers.fake_weight_transfer import TransferServer
from tests.helpers.tiny_tokenizers import tiny_tokenizer
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from taut.config import replace
from taut.inference import weight_transfer
from taut.inference.vllm import ServerEngine
from taut.inference.weight_sync import TrainingModel
from taut.inference.weight_transfer import Gpu
from taut.models.attention_backends import PREFIX
from taut.models.scorer import Scorer
from taut.train.distributed import Ranks

PATIENCE = 60.0
DEVICE = 0


def unpack(pipe: Any) -> None:
    """What vLLM's worker does with each request, in a process of its own. It keeps one mapping of a buffer."""
    mapped: dict[str, torch.Tensor] = {}
    while (info := pipe.recv()) is not None:
        handle = info["ipc_handles_pickled"]
        if handle not in mapped:
            mapped.clear()
            (arguments,) = pickle.loads(base64.b64decode(handle)).values()
            places = [*arguments]
            places[6] = DEVICE
            mapped[handle] = rebuild_cuda_tensor(*places)
        parts = mapped[handle][: sum(info["tensor_sizes"])].split(info["tensor_sizes"])
        shaped = zip(info["names"], info["dtype_names"], info["shapes"], parts, strict=True)
        pipe.send(
            {
                name: part.view(getattr(torch, dtype)).view(shape).cpu().numpy()
                for name, dtype, shape, part in shaped
            }
        )


@contextmanager
def unpacking() -> Iterator[Any]:
    """The pipe of a process that unpacks."""
    spawning = multiprocessing.get_context("spawn")
    own, theirs = spawning.Pipe()
    process = spawning.Process(target=unpack, args=(theirs,))
    process.start()
    try:
        yield own
    finally:
        own.send(None)
        process.join(PATIENCE)
        process.kill()


@dataclass
class Elsewhere(TransferServer):
    """Its weights pass through the process at ``pipe``."""

    pipe: Any = None

    def update_weights(self, body: Body) -> None:
        self.pipe.send(body["update_info"])
        assert self.pipe.poll(PATIENCE), "the process that unpacks does not answer"
        arrived = {name: torch.from_numpy(value) for name, value in self.pipe.recv().items()}
        self.num_chunks += 1
        self.worker.model.load_state_dict(arrived, strict=False)


@pytest.mark.gpu
def test_weights_arrive_in_another_process_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_transfer, "CHUNK_BYTES", 2**14)
    device = torch.device("cuda", DEVICE)
    model: Any = tiny().to(device)
    model.set_attn_implementation(PREFIX + "reference")
    asked = TrainingModel(Scorer(model), Ranks(0, 1, device), torch.float32)
    with unpacking() as pipe, Elsewhere(gpu=Gpu(device).uuid, pipe=pipe) as server:
        config = replace(CONFIG, {"sync.transport": "ipc", "timeout": PATIENCE})
        engine = ServerEngine.open(server.url, config, tiny_tokenizer(), [7], 64)
        try:
            engine = engine.follow(asked)
            assert engine.sync is not None
            for version in (0, 1, 2):
                engine.update(version)
                (proof,) = engine.sync.proofs
                assert server.num_chunks > 2
                assert (proof.version, proof.unread) == (version, ())
                assert proof.num_equal == len(list(model.parameters()))
                change(model.cpu(), seed=version)
                model.to(device)
        finally:
            engine.close()
