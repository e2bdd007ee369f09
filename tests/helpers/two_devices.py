"""A program: two steps with offloaded shards on a GPU that is made up, on tensors without contents. PyTorch refuses an
operator whose inputs are on two devices, so where this ends each tensor was where it has to be.

    python -m tests.helpers.two_devices DTYPE ADAPTERS CHECKPOINTING STATE

ADAPTERS: none, or lora, whose head trains too. Prints one line of JSON: the devices of what there is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from tests.helpers.tiny_models import tiny_config
from tests.helpers.tiny_samples import nested_family
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import AutoModelForCausalLM

from taut.data.packing import ALONE, pack
from taut.models import architecture
from taut.models.cpu import faster_layers
from taut.models.lora.adapters import apply_lora
from taut.models.precision import backward_context, compute_context
from taut.models.recompute import recompute_activations
from taut.models.scorer import Scorer
from taut.models.settings import LoraConfig
from taut.plan import tracing
from taut.train import distributed
from taut.train.distributed import Ranks
from taut.train.optim import build_optimizer, clip, set_learning_rate
from taut.train.settings import OptimConfig


class Nothing:
    """A stream or an event of a device on which nothing happens."""

    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> Nothing:
        return self


def make_up_a_gpu() -> torch.device:
    here = lambda *_, **__: nullcontext()  # noqa: E731
    module = SimpleNamespace(
        Stream=Nothing,
        Event=Nothing,
        device=here,
        stream=here,
        current_stream=Nothing,
        _initialized=False,
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        synchronize=Nothing,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=Nothing,
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=Nothing,
        get_amp_supported_dtype=lambda: [torch.bfloat16],
    )
    _setup_privateuseone_for_python_backend("gpu", module)
    return torch.device("gpu", 0)


def fill(model: nn.Module) -> None:
    """Give tensors of the meta device a place in the host's memory, as reading the files does."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            sharded: Any = parameter
            if hasattr(parameter, "full_tensor"):
                part = torch.empty(sharded._local_tensor.shape)
                new = distributed._with_part(parameter, part)
            else:
                new = torch.empty(parameter.shape)
            module._parameters[name] = nn.Parameter(new, parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    for layer in architecture.layers(model):
        state: Any = layer
        for group in state._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                parameter.reset_sharded_param()


def move_whole(root: nn.Module, device: torch.device) -> None:
    """What ``distributed.shard`` does by exchanging contents, which tensors without contents refuse."""
    moved: dict[int, nn.Parameter] = {}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not hasattr(parameter, "full_tensor"):
                there = nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
                module._parameters[name] = moved.setdefault(id(parameter), there)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def devices(tensors: Iterable[Tensor | None]) -> list[str]:
    return sorted({tensor.device.type for tensor in tensors if tensor is not None})


def main(dtype_name: str, adapters: str, checkpointing: str, state: Any) -> None:
    dtype, gpu = getattr(torch, dtype_name), make_up_a_gpu()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    ranks = Ranks(0, 1, gpu, mesh=init_device_mesh("gpu", (1,)), offloads=True)
    _fully_shard._move_states_to_device = lambda *_: None  # ``move_whole`` has
    config = tiny_config("llama", num_hidden_layers=3)
    build: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        base = build(config, attn_implementation=tracing.FUSED, dtype=torch.float32)
    faster_layers.install(base)
    packed = tracing.readable(pack(nested_family(90), ALONE))
    with FakeTensorMode(allow_non_fake_inputs=True):
        shard = distributed.layer_sharding(ranks, dtype)
        assert shard is not None
        with shard(base):
            pass
        fill(base)
        model: nn.Module = base
        if adapters == "lora":
            stay: Any = lambda module, *_, **__: module  # noqa: E731
            nn.Module.to = stay  # type: ignore[method-assign]  # peft moves what is there already
            lora = LoraConfig(rank=4, modules_to_save=["lm_head"])
            model = apply_lora(base, lora, 0, {})
        model.train()
        how: Any = checkpointing if checkpointing != "true" else True
        recompute_activations(model, how, is_pinned=False)
        scorer: Any = Scorer(model)
        move_whole(scorer, gpu)
        distributed.shard(scorer, ranks, dtype)
        optimizer = build_optimizer(scorer, OptimConfig(learning_rate=1e-3, state=state))
        found: dict[str, list[str]] = {}
        with tracing.Shapes({}, None, None):
            for _ in range(2):
                with compute_context(dtype, gpu, by_weights=True):
                    total = scorer(scorer.ready(packed), -packed.weight_N).linear_sum
                with backward_context(dtype):
                    total.backward()
            found["loss"] = devices([total])
            found["gradients"] = devices(p.grad for p in scorer.parameters())
            found["norm"] = devices(clip(optimizer, 1.0).values())
            set_learning_rate(optimizer, 1e-3, 1)
            optimizer.step()
            optimizer.zero_grad()
            states = optimizer.state.values()
            moments = (v for s in states for k, v in s.items() if k != "step")
            found["moments"] = devices(moments)
            wide = compute_context(torch.float32, gpu)
            with torch.no_grad(), distributed.gathered_in(scorer, torch.float32), wide:
                found["scores"] = devices([scorer(scorer.ready(packed)).logp_N])
            with distributed.whole_tensors(model, ranks) as whole:
                assert whole is not None
                found["saved"] = devices(tensor for _, tensor in whole(model.state_dict().keys()))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
