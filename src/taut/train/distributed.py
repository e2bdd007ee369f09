"""Ranks: the process group, sharding with FSDP2, and the only collectives of the package.

A single process, the default, uses no process group. Under torchrun a model's decoder layers are sharded with
``fully_shard`` before its weights are read (``layer_sharding``), and the rest at the root, the Scorer, once adapters,
added tokens and a critic are in place (``shard``). Adapters inside the layers are small and stay whole on every rank.
Gradients are summed over ranks, by FSDP or by ``summing_gradients``: the loop divides them by the step's one
denominator, and nothing else does.

torch.distributed is imported here and in sharded.py only.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor, nn

from taut.config import Decision, configclass
from taut.errors import ConfigError, Interrupted
from taut.io import threads
from taut.io.console import is_first_on_host

if TYPE_CHECKING:  # it takes long to import
    from torch.distributed.device_mesh import DeviceMesh

PATIENCE = timedelta(hours=12)
"""How long ranks wait for each other: one may tokenise, or write a model, for all; torch's default for GPUs is ten
minutes. A rank that fails ends the others immediately through torchrun."""
FAILED, EXIT_CODE = "taut/failed", "taut/exit_code"
"""Keys in the ranks' shared store: the number of failed ranks, and the exit code of the first one."""
LINGER = 1.0
"""Seconds that rank 0, if it holds the store itself, waits so that other failing ranks learn that they are not first.
"""


@configclass
class ParallelConfig:
    """How a model is divided among the ranks of torchrun."""

    replicas: Annotated[int, Field(ge=1)] = 1
    """Copies of the sharded weights: each is divided among ranks / replicas ranks, which exchange weights only with
    each other (hybrid sharding, HSDP): as many as nodes, where nodes are connected slowly. A divisor of the ranks."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's rank among all, and the collectives."""

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    """The group of the collectives; None: the default group."""
    mesh: DeviceMesh | None = None
    """The ranks that weights are sharded over; with replicas [replicas, ranks of each]. None: one rank."""

    @property
    def is_writer(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over ranks, in float64."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """Element-wise maximum over ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Sequence[float], operation: Any) -> list[float]:
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, operation, group=self.group)
        result: list[float] = tensor.tolist()
        return result

    def gather(self, value: Any) -> list[Any]:
        """Every rank's small Python object, in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            dist.barrier(group=self.group)

    def on_cpu(self) -> Ranks:
        """The same ranks on the CPU with a separate group: for a thread next to the training thread."""
        if self.size == 1:
            return self
        group = dist.new_group(backend="gloo", timeout=PATIENCE)
        return replace(self, device=torch.device("cpu"), group=group)


def world_size() -> int:
    """The number of ranks under torchrun; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def start(device: str = "auto", replicas: int = 1) -> Ranks:
    """Join torchrun's process group, if there is one. ``device``: auto, cpu, cuda or cuda:N; ``replicas``: of the
    weights.
    """
    size = world_size()
    require_replicas(size, replicas)
    rank = int(os.environ.get("RANK", "0"))
    has_cuda = torch.cuda.is_available()
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise ConfigError(f"device={device} is not known; expected auto, cpu, cuda or cuda:N")
    if device.startswith("cuda:") and size > 1:
        raise ConfigError(
            f"device={device} is one device and there are {size} ranks; each rank takes the one of its "
            "LOCAL_RANK; set device=cuda"
        )
    if device.startswith("cuda") and not has_cuda:
        raise ConfigError(
            f"device={device} was asked for and no CUDA device is available; set device=cpu"
        )
    if device == "cpu" or not has_cuda:
        chosen = torch.device("cpu")
    elif size > 1 or device in ("auto", "cuda"):
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    else:
        chosen = torch.device(device)
    if chosen.type == "cuda":
        count = torch.cuda.device_count()
        if chosen.index >= count:
            raise ConfigError(
                f"device {chosen} is wanted and there are {count} CUDA devices; name a smaller one, or start "
                "no more ranks on a machine than it has devices"
            )
        torch.cuda.set_device(chosen)
    if size > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", timeout=PATIENCE)
    return Ranks(rank, size, chosen, mesh=_mesh(chosen, size, replicas))


def require_replicas(num_ranks: int, replicas: int) -> None:
    """Raise ConfigError where the ranks cannot be divided into so many replicas."""
    if num_ranks % replicas:
        found = "there is 1 rank" if num_ranks == 1 else f"there are {num_ranks} ranks"
        raise ConfigError(
            f"parallel.replicas={replicas}, and {found}; expected a divisor of the number of ranks; start as many with "
            "torchrun, or leave it out"
        )


def _mesh(device: torch.device, size: int, replicas: int) -> DeviceMesh | None:
    if size == 1:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    if replicas == 1:
        return init_device_mesh(device.type, (size,))
    names = ("replicate", "shard")
    return init_device_mesh(device.type, (replicas, size // replicas), mesh_dim_names=names)


def thread_decisions(device: torch.device) -> list[Decision]:
    """The number of threads of this process and its reason, where the CPU computes."""
    if device.type != "cpu":
        return []
    return [Decision("threads", *threads.described(torch.get_num_threads()))]


def stop(ranks: Ranks) -> None:
    """Leave the process group, all ranks together."""
    if ranks.size > 1 and dist.is_initialized():
        ranks.barrier()
        dist.destroy_process_group()


def is_first_to_fail(exit_code: int) -> bool:
    """Whether this is the first rank to fail: that rank prints the error that ends all.

    Before the process group exists, the first one of each host prints it.
    """
    if not dist.is_initialized():
        return is_first_on_host()
    store = dist.distributed_c10d._get_default_store()
    try:
        is_first = int(store.add(FAILED, 1)) == 1
        if is_first:
            store.set(EXIT_CODE, str(exit_code))
        if dist.get_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            end = time.monotonic() + LINGER  # the store lives in this process
            while int(store.add(FAILED, 0)) < dist.get_world_size() and time.monotonic() < end:
                time.sleep(0.02)
    except dist.DistError:
        # Without torchrun the store ends with rank 0, which has printed; the launcher's signal then ends the others.
        return exit_code != Interrupted.exit_code
    return is_first


def exit_code_of_first_to_fail() -> int | None:
    """The exit code of the rank whose end broke this one's collectives; None where no rank has reported a failure."""
    if not dist.is_initialized():
        return None
    store = dist.distributed_c10d._get_default_store()
    try:
        return int(store.get(EXIT_CODE)) if store.check([EXIT_CODE]) else None
    except dist.DistError:  # without torchrun the store ends with its rank, without a reason
        return None


def layer_sharding(ranks: Ranks) -> Callable[[Iterable[nn.Module]], None] | None:
    """What shards each of a model's layers, which may be on the meta device still; None for one rank."""
    return None if ranks.size == 1 else partial(_shard, ranks=ranks)


def shard(root: nn.Module, ranks: Ranks) -> None:
    """Shard what no shard inside the root has. The root's methods ``next_logits`` and ``inside``, if it has them, are
    entry points like ``forward``.
    """
    if ranks.size == 1:
        return
    from torch.distributed.fsdp import register_fsdp_forward_method

    _shard([root], ranks)
    for name in ("next_logits", "inside"):
        if hasattr(root, name):
            register_fsdp_forward_method(root, name)


def _shard(modules: Iterable[nn.Module], ranks: Ranks) -> None:
    """Shard each module over the ranks; gradients are summed."""
    from torch.distributed.fsdp import fully_shard

    for module in modules:
        sharded: Any = fully_shard(module, mesh=ranks.mesh)
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(1.0)


def by_placement(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The sharded parameters and the whole ones, apart: PyTorch takes no list that mixes them. No empty list."""
    lists: dict[bool, list[nn.Parameter]] = {}
    for parameter in parameters:
        lists.setdefault(hasattr(parameter, "full_tensor"), []).append(parameter)
    return list(lists.values())


@contextmanager
def summing_gradients(parameters: Sequence[nn.Parameter], ranks: Ranks) -> Iterator[None]:
    """What the block adds to the gradients of whole parameters is summed over ranks, at the end and in one collective a
    dtype. FSDP sums the gradients of sharded ones.
    """
    whole = [p for p in parameters if not hasattr(p, "full_tensor")] if ranks.size > 1 else []
    before = [parameter.grad for parameter in whole]
    for parameter in whole:
        parameter.grad = None
    yield
    for dtype in sorted({parameter.dtype for parameter in whole}, key=str):
        mine = [parameter for parameter in whole if parameter.dtype == dtype]
        added = [torch.zeros_like(p) if p.grad is None else p.grad for p in mine]
        flat = torch.cat([gradient.flatten() for gradient in added])
        dist.all_reduce(flat, group=ranks.group)
        parts = torch.split(flat, [parameter.numel() for parameter in mine])
        for parameter, part in zip(mine, parts, strict=True):
            parameter.grad = part.view_as(parameter)
    for parameter, gradient in zip(whole, before, strict=True):
        if gradient is not None:
            assert parameter.grad is not None
            parameter.grad += gradient


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def sharded_like(parameter: Tensor, part: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tensor of this shape of which each rank has a part, divided as the parameter is."""
    if not hasattr(parameter, "full_tensor"):
        return part
    from torch.distributed.tensor import DTensor

    sharded: Any = parameter
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=strides,
    )


def whole_of(parameter: Tensor, part: Tensor) -> Tensor:
    """The whole tensor, on every rank, of which each has a part as of the parameter."""
    sharded: Any = sharded_like(parameter, part, tuple(parameter.shape))
    whole: Tensor = sharded.full_tensor() if hasattr(sharded, "full_tensor") else sharded
    return whole


def part_of(parameter: Tensor, whole: Tensor) -> Tensor:
    """This rank's part, as of the parameter, of a tensor that every rank has whole."""
    if not hasattr(parameter, "full_tensor"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = parameter
    return local(
        distribute_tensor(whole, sharded.device_mesh, sharded.placements, src_data_rank=None)
    )


@torch.no_grad()
def swap(first: Tensor, second: Tensor) -> None:
    """Swap the contents of two tensors of the same shape; of sharded ones, this rank's shards."""
    if not hasattr(first, "full_tensor"):
        first.data, second.data = second.data, first.data
        return
    kept = first.detach().clone()  # FSDP gathers from the storage it knows
    first.copy_(second)
    second.copy_(kept)


def reshard(root: nn.Module) -> None:
    """Drop gathered weights, so that the next forward gathers the current ones."""
    if not dist.is_initialized():
        return
    from torch.distributed.fsdp import FSDPModule

    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float | None) -> Tensor:
    """The gradient's total norm over all ranks, on the device. If it is finite, gradients are scaled down to
    ``max_norm``.
    """
    lists = by_placement(parameters)
    norms: list[Tensor] = []
    for some in lists:
        gradients: list[Any] = [p.grad for p in some if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([local(gradient) for gradient in gradients])
        norm = norm.to(some[0].device)  # without any gradient it is on the CPU
        for axis, placement in enumerate(
            getattr(gradients[0], "placements", ()) if gradients else ()
        ):
            if placement.is_shard():  # torch's own way makes two collectives
                square = norm.double().square()
                dist.all_reduce(square, group=gradients[0].device_mesh.get_group(axis))
                norm = square.sqrt().to(norm.dtype)
        norms.append(norm)
    whole = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if max_norm is not None:
        usable = whole.nan_to_num(nan=0.0, posinf=0.0)  # of which none is above max_norm
        for some in lists:
            torch.nn.utils.clip_grads_with_norm_(some, max_norm, usable)
    return whole


def full_state_dict(module: nn.Module, ranks: Ranks) -> dict[str, Tensor] | None:
    """The module's full tensors on the writer's CPU; None on the other ranks."""
    if ranks.size == 1:
        return dict(module.state_dict())
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(module, options=options)
    if not ranks.is_writer:
        return None
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        state[name] = state[first.setdefault(id(parameter), name)]  # tied tensors stay tied
    return state
