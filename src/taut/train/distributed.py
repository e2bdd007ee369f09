"""Ranks: the process group, sharding with FSDP2, and the only collectives of the package.

A single process, the default, uses no process group. Under torchrun a model's decoder layers are sharded with
``fully_shard`` before its weights are read (``layer_sharding``), and the rest at the root, the Scorer, once adapters,
added tokens and a critic are in place (``shard``). Routers, scalar heads and adapters inside the layers are small and
stay whole on every rank. Gradients are summed over ranks, by FSDP or by ``summing_gradients``: the loop divides them by
the step's one denominator, and nothing else does.

A sharded model that computes in bfloat16 does so by its weights (``precision.compute_context``), not under autocast:

    gathered            in bfloat16, each layer for as long as it runs; what passes between layers is bfloat16 too
    shards, optimizer   as they were read: float32 of what trains
    gradients           bfloat16 of a layer, widened to float32 before they are summed over ranks
    routers             in float32, on widened hidden states (``experts.widen_routers``)
    scalar heads        in float32, on widened hidden states (``heads.scalar``)
    adapters            float32 masters, cast where they are multiplied (``cpu_matmul.linear``)

Ranks watch each other (watch.py). torch.distributed is imported here, there and in sharded.py only; for the parts of
quantized weights also in models/quantized/quantized_storage.py, and for layers that ranks compute together in
models/tensor_parallel.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from taut.config import Decision, did_you_mean
from taut.errors import ConfigError, Interrupted, RankFailed, TautError
from taut.io import files, narrow, progress, threads
from taut.io.console import is_first_on_host
from taut.io.replaced import replaced
from taut.models import architecture, tensor_parallel
from taut.train.settings import ParallelConfig
from taut.train.watch import RECORDED, TIMEOUT, Watch
from taut.types import to_device

if TYPE_CHECKING:  # they take long to import
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

T = TypeVar("T")
WholeTensors: TypeAlias = Callable[[Collection[str]], Iterator[tuple[str, Tensor]]]
"""Gives tensors of a module by their names in its state dict (``whole_tensors``)."""

BROADCAST_BYTES = 2**28
"""Bytes that are broadcast at a time."""
TENSOR = "tensor"
"""The name of a mesh's axis along which ranks compute one micro-batch together."""

_watch: Watch | None = None
"""Of this process, from ``start`` to ``stop``."""


UNDIVIDED = ParallelConfig()
"""Nothing is divided but among all ranks."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's rank among all, and the collectives."""

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    """The group of the collectives; None: the default group."""
    mesh: DeviceMesh | None = None
    """Ranks over which weights are sharded; with replicas [replicas, ranks of each]. None: one rank has whole
    weights."""
    offloads: bool = False
    """Whether shards, gradients and moments are kept in the host's memory."""
    tensor_mesh: DeviceMesh | None = None
    """Ranks that compute one micro-batch together (tensor parallelism); None: each rank computes its own."""

    @property
    def num_shares(self) -> int:
        """Number of shares into which the micro-batches of a step are divided."""
        return self.size // self._num_together

    @property
    def share(self) -> int:
        """Number of this rank's share; ranks that compute together have the same one."""
        return self.rank // self._num_together

    @property
    def is_counted(self) -> bool:
        """Whether the results of this rank count; of ranks that compute together, the first one's do."""
        return self.rank % self._num_together == 0

    @property
    def _num_together(self) -> int:
        return 1 if self.tensor_mesh is None else self.tensor_mesh.size()

    @property
    def is_sharded(self) -> bool:
        """Whether the weights are sharded; with one rank only if they are offloaded."""
        return self.mesh is not None

    @property
    def weights_device(self) -> torch.device:
        """The device to which weights are read."""
        return torch.device("cpu") if self.offloads else self.device

    @property
    def is_writer(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over ranks, in float64."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def sum_of_shares(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over the shares of a step, in float64."""
        return self.sum(values if self.is_counted else [0.0] * len(values))

    def max(self, values: Sequence[float]) -> list[float]:
        """Element-wise maximum over ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Sequence[float], operation: Any) -> list[float]:
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, operation, group=self.group)
        result: list[float] = tensor.tolist()
        return result

    def sum_in_place(self, tensor: Tensor) -> None:
        """Element-wise sum over ranks of a tensor on the CPU or on the device."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)

    def gather(self, value: Any) -> list[Any]:
        """A small Python object of every rank, in rank order. Waits for all, however long one works for the others."""
        if self.size == 1:
            return [value]
        self.barrier()
        return self.gather_in_step(value)

    def gather_in_step(self, value: Any) -> list[Any]:
        """``gather`` where all ranks arrive at about the same time."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, bytes(narrow.packed(value)), group=self.group)
        return [narrow.unpacked(content) for content in values]

    def from_writer(self, value: T) -> T:
        """The writer's value, on every rank; what others give is not read. It goes to each rank once, however many
        there are (``gather`` takes the size of the largest value times their number). Waits for all, as ``gather``.
        """
        if self.size == 1:
            return value
        self.barrier()
        held = narrow.packed(value if self.is_writer else None)
        content = torch.frombuffer(held, dtype=torch.uint8)
        num_bytes = torch.tensor([content.numel()])
        dist.broadcast(num_bytes, 0, group=self.group)
        if not self.is_writer:
            content = torch.empty(int(num_bytes), dtype=torch.uint8)
        for part in torch.split(content, BROADCAST_BYTES):
            dist.broadcast(part, 0, group=self.group)
        return value if self.is_writer else narrow.unpacked(content.numpy())

    def run_everywhere(self, act: Callable[[], T], caught: type[Exception] = TautError) -> list[T]:
        """Run ``act`` on every rank and return the results of all, in rank order. Raises the error of the first rank
        that has one, on all ranks.
        """
        return self.agree(outcome_of(act, caught))

    def run_on_writer(self, act: Callable[[], T]) -> T:
        """Run ``act`` on the writer alone; returns its result, or raises its error, on all ranks."""
        outcome = self.from_writer(outcome_of(act) if self.is_writer else None)
        outcomes: list[T] = results_of([outcome] * self.size)
        return outcomes[0]

    def agree(self, outcome: Any) -> list[Any]:
        """Exchange results and errors (``outcome_of``): the results of all ranks, in rank order. Raises the error of
        the first rank that has one, on all ranks, with a note that names the rank.
        """
        return results_of(self.gather(outcome))

    def of_shares(self, values: Sequence[T]) -> Sequence[T]:
        """Reduce the values of all ranks, as ``gather`` returns them, to one for each share of a step."""
        return values[:: self._num_together]

    def barrier(self) -> None:
        """Wait for every rank, however long one has worked for the others."""
        if self.size > 1:
            assert _watch is not None, "ranks that have not met"
            _watch.meet("all" if self.group is None else self.group.group_name)

    def doing(self, what: str) -> None:
        """Note what this rank does from now on, e.g. ``taking step 3``: a terminal shows it, and the other ranks
        report it if this one dies.
        """
        progress.show(what)
        if _watch is not None:
            _watch.doing(what)

    def on_cpu(self) -> Ranks:
        """These ranks with a separate group on the CPU, for a thread beside the training thread."""
        if self.size == 1:
            return self
        group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        return replace(self, device=torch.device("cpu"), group=group)


def outcome_of(
    act: Callable[[], T], caught: type[Exception] | tuple[type[Exception], ...] = TautError
) -> T | Exception:
    """The result of ``act``, or its error."""
    try:
        return act()
    except caught as error:
        return error


def results_of(outcomes: list[Any]) -> list[Any]:
    """The outcomes of ranks if all of them are results. Raises the first error."""
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, Exception):
            if len(outcomes) > 1:
                outcome.add_note(f"the error of rank {rank}, raised on all {len(outcomes)} ranks")
            raise outcome
    return outcomes


def world_size() -> int:
    """Number of ranks under torchrun; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def start(device: str = "auto", parallel: ParallelConfig = UNDIVIDED) -> Ranks:
    """Join torchrun's process group, if there is one. ``device``: auto, cpu, cuda or cuda:N."""
    files.allow_open_files()
    size = world_size()
    require_divisors(size, parallel)
    offloads = parallel.cpu_offload
    # the device
    rank = int(os.environ.get("RANK", "0"))
    has_cuda = torch.cuda.is_available()
    problem = ""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        problem = (
            f"is not known; expected auto, cpu, cuda or cuda:N{did_you_mean('device', device)}"
        )
    elif device.startswith("cuda:") and size > 1:
        problem = f"is one device for {size} ranks; each rank takes the one of its LOCAL_RANK; set device=cuda"
    elif device.startswith("cuda") and not has_cuda:
        problem = "was asked for and no CUDA device is available; set device=cpu"
    if problem:
        raise ConfigError(f"device={device} {problem}")
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
    if offloads:
        require_offloadable(chosen)
    # the process group, and the ranks that shard weights or compute together
    if (size > 1 or offloads) and not dist.is_initialized():
        _join(rank, size, chosen)
    if size == 1 and not offloads:
        return Ranks(rank, size, chosen)
    mesh, together = _meshes(chosen, size, parallel)
    return Ranks(rank, size, chosen, mesh=mesh, offloads=offloads, tensor_mesh=together)


def require_offloadable(device: torch.device) -> None:
    """Raise ConfigError on a CPU, where offloading has no effect."""
    if device.type == "cpu":
        raise ConfigError(
            "parallel.cpu_offload=true on a CPU: weights are in the host's memory already; expected a GPU; take the "
            "key out"
        )


def _join(rank: int, size: int, device: torch.device) -> None:
    """Join the process group, and start to watch the other ranks. A single process that offloads has a group of one."""
    global _watch
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", RECORDED)
    library: Any = dist  # its stores have no types
    alone = {"store": library.HashStore(), "rank": 0, "world_size": 1} if size == 1 else {}
    if device.type == "cuda":  # what is in the host's memory goes by gloo, and waits for no device
        library.init_process_group("cpu:gloo,cuda:nccl", timeout=TIMEOUT, device_id=device, **alone)
    else:
        library.init_process_group("gloo", timeout=TIMEOUT, **alone)
    if size > 1:
        _watch = Watch(dist.distributed_c10d._get_default_store(), rank, size)


def require_divisors(num_ranks: int, parallel: ParallelConfig) -> None:
    """Raise ConfigError where the number of ranks cannot be divided as configured."""
    size = num_ranks
    for name in ("replicas", "tensor"):
        number = getattr(parallel, name)
        if size % number:
            found = "there is 1 rank" if num_ranks == 1 else f"there are {num_ranks} ranks"
            of = "" if size == num_ranks else f" in each of {num_ranks // size} replicas, {size}"
            raise ConfigError(
                f"parallel.{name}={number}, and {found}{of}; expected a divisor of the number of ranks; start a "
                f"multiple of {number} ranks with torchrun, or leave the key out"
            )
        size //= number


def _meshes(
    device: torch.device, size: int, parallel: ParallelConfig
) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The mesh over which weights are sharded, and the mesh of ranks that compute one micro-batch together: neighbors,
    which are on one node.
    """
    from torch.distributed.device_mesh import init_device_mesh

    # axes of size 1 are left out, but for that of shards
    replicas, together = parallel.replicas, parallel.tensor
    sizes = {"replicate": replicas, "shard": size // replicas // together, TENSOR: together}
    names = [name for name in sizes if name == "shard" or sizes[name] > 1]
    if names == ["shard"]:
        return init_device_mesh(device.type, (size,)), None
    mesh = init_device_mesh(
        device.type, tuple(sizes[name] for name in names), mesh_dim_names=tuple(names)
    )
    if together == 1:
        return mesh, None
    return mesh[tuple(name for name in names if name != TENSOR)], mesh[TENSOR]


def nccl_version() -> str | None:
    """Version of NCCL in PyTorch; None without NCCL."""
    library: Any = torch.cuda.nccl  # it has no types
    return ".".join(map(str, library.version())) if dist.is_nccl_available() else None


def thread_decisions(device: torch.device) -> list[Decision]:
    """On a CPU the number of threads of this process, with its reason."""
    if device.type != "cpu":
        return []
    return [Decision("threads", *threads.described(torch.get_num_threads()))]


def stop(ranks: Ranks) -> None:
    """Leave the process group, all ranks together."""
    global _watch
    if ranks.is_sharded and dist.is_initialized():
        ranks.barrier()
        if _watch is not None:
            _watch.stop()
            _watch = None
            dist.barrier()  # no process ends that another still watches
        dist.destroy_process_group()


def failure_of_others() -> RankFailed | None:
    """The failure of another rank, if any: it may have caused the signal or error that ends this one."""
    return None if _watch is None else _watch.wait_for_failure()


def explain(error: Exception) -> RankFailed | None:
    """The failure that broke a collective, if ``error`` is that of a collective; else None."""
    return None if _watch is None else _watch.explain(error)


@contextmanager
def explaining() -> Iterator[None]:
    """Replace the error of a collective that another rank broke by RankFailed."""
    try:
        yield
    except RuntimeError as error:
        failure = explain(error)
        if failure is None:
            raise
        raise failure from error


def is_first_to_fail(exit_code: int, line: str) -> bool:
    """Whether this is the first rank to fail, which prints the error for all. Before the process group exists, the
    first rank of each host does.
    """
    if _watch is None:
        return is_first_on_host()
    try:
        return _watch.report(exit_code, line)
    except dist.DistError:
        # Without torchrun the store ends with rank 0, which has printed; the launcher's signal then ends the others.
        return exit_code != Interrupted.exit_code


def layer_sharding(
    ranks: Ranks, dtype: torch.dtype
) -> Callable[[PreTrainedModel], AbstractContextManager[None]] | None:
    """A context for reading the weights of a model on the meta device: shards each of its layers first. None where
    weights are not sharded. ``dtype``: compute dtype of the run.
    """
    return partial(_sharded_layers, ranks=ranks, dtype=dtype) if ranks.is_sharded else None


def shard(root: nn.Module, ranks: Ranks, dtype: torch.dtype) -> None:
    """Shard the parameters that are in no sharded layer. The root's methods ``next_logits`` and ``inside``, if any, are
    entry points like ``forward``.
    """
    if not ranks.is_sharded:
        return
    from torch.distributed.fsdp import register_fsdp_forward_method

    for tensor in (*root.parameters(), *root.buffers()):
        if not hasattr(tensor, "full_tensor"):
            tensor.data = tensor.data.to(ranks.device)
    _shard(root, ranks, dtype, set(architecture.scalar_parameters(root)))
    for name in ("next_logits", "inside"):
        if hasattr(root, name):
            register_fsdp_forward_method(root, name)


@contextmanager
def _sharded_layers(model: PreTrainedModel, ranks: Ranks, dtype: torch.dtype) -> Iterator[None]:
    if ranks.tensor_mesh is not None:
        tensor_parallel.divide_layers(model, ranks.tensor_mesh)
    whole = set(architecture.wide_parameters(model))
    for layer in architecture.layers(model):
        _shard(layer, ranks, dtype, whole)
    if not ranks.offloads:
        yield
        return
    from torch.distributed.tensor import DTensor

    library: Any = DTensor
    before = library.from_local

    def stay(part: Tensor, *args: Any, **kwargs: Any) -> Any:
        return _with_part(before(part.to("meta"), *args, **kwargs), part)

    # it would move each part that is read to the mesh's device
    with replaced(library, from_local=staticmethod(stay)):
        yield


def _shard(module: nn.Module, ranks: Ranks, dtype: torch.dtype, whole: set[nn.Parameter]) -> None:
    """Shard a module over the ranks; gradients are summed. ``dtype``: compute dtype. ``whole``: parameters that are not
    sharded.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    policy = MixedPrecisionPolicy()
    if dtype == torch.bfloat16:  # inputs stay: coefficients of a loss are among the root's
        policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    place = OffloadPolicy()
    if ranks.offloads:
        place = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
    sharded: Any = fully_shard(
        module, mesh=ranks.mesh, mp_policy=policy, offload_policy=place, ignored_params=whole
    )
    sharded.set_force_sum_reduction_for_comms(True)
    sharded.set_gradient_divide_factor(1.0)


@contextmanager
def gathered_in(root: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """In this context forwards without gradient gather the weights in ``dtype`` instead of the compute dtype."""
    if not dist.is_initialized():
        yield
        return
    from torch.distributed.fsdp import FSDPModule

    reshard(root)
    handles = []
    for module in root.modules():
        if isinstance(module, FSDPModule):
            shards = [
                (part, name, parameter)
                for part in _with_its_group(module)
                for name, parameter in part._parameters.items()
                if hasattr(parameter, "full_tensor")
            ]
            # after FSDP's own hook, whose weights these replace until it drops them
            handles.append(module.register_forward_pre_hook(partial(_gather, shards, dtype)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        reshard(root)


def _gather(shards: Iterable[tuple[nn.Module, str, Any]], dtype: torch.dtype, *_: Any) -> None:
    for module, name, shard in shards:
        whole = _gathered(shard.detach()).to(architecture.device_of(shard))
        whole = whole.to(dtype) if whole.is_floating_point() else whole
        module._parameters[name] = nn.Parameter(whole, requires_grad=False)


def _gathered(shard: Any) -> Any:
    """The whole of a shard; with tensor parallelism this rank's part of the layer."""
    from torch.distributed.tensor import distribute_tensor

    whole = shard.full_tensor()
    if num_together(shard) == 1:
        return whole
    mesh = shard.device_mesh[TENSOR]
    return distribute_tensor(whole, mesh, [shard.placements[-1]], src_data_rank=None)


def _with_its_group(module: nn.Module) -> Iterator[nn.Module]:
    """A sharded module, and the modules in it that are gathered with it."""
    from torch.distributed.fsdp import FSDPModule

    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _with_its_group(child)


def by_placement(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group the parameters by placement, since PyTorch's functions take no mixed list."""
    lists: dict[str, list[nn.Parameter]] = {}
    for parameter in parameters:
        lists.setdefault(placement_of(parameter), []).append(parameter)
    return list(lists.values())


def placement_of(parameter: Tensor) -> str:
    """How a tensor is divided among ranks, as text; empty for one that is whole on each rank."""
    return "".join(map(str, getattr(parameter, "placements", ())))


@contextmanager
def summing_gradients(parameters: Sequence[nn.Parameter], ranks: Ranks) -> Iterator[None]:
    """Sum over ranks what the block adds to the gradients of whole parameters; FSDP sums those of sharded ones. At the
    end of the block, in one collective for each dtype. A parameter without a gradient on any rank stays without.
    """
    # set earlier gradients aside
    whole = [p for p in parameters if not hasattr(p, "full_tensor")] if ranks.size > 1 else []
    before = [parameter.grad for parameter in whole]
    for parameter in whole:
        parameter.grad = None
    yield
    # sums over these groups, one after another, are the sum over the shares of a step
    groups: list[dist.ProcessGroup | None] = [ranks.group]
    if ranks.tensor_mesh is not None:
        assert ranks.mesh is not None, "ranks that compute together have a mesh"
        groups = [ranks.mesh.get_group(axis) for axis in range(ranks.mesh.ndim)]
    # one flat tensor for each dtype, followed by the number of ranks that have a gradient of each parameter
    for dtype in sorted({parameter.dtype for parameter in whole}, key=str):
        mine = [parameter for parameter in whole if parameter.dtype == dtype]
        has_none = [parameter.grad is None for parameter in mine]
        added = [torch.zeros_like(p) if p.grad is None else p.grad for p in mine]
        is_given = torch.tensor(has_none).logical_not().to(dtype)
        flat = torch.cat([*map(torch.flatten, added), *to_device([is_given], ranks.device)])
        for group in groups:
            dist.all_reduce(flat, group=group)
        *parts, givers = torch.split(flat, [*(p.numel() for p in mine), len(mine)])
        num_givers = givers.tolist() if any(has_none) else [1] * len(mine)
        for parameter, part, number in zip(mine, parts, num_givers, strict=True):
            parameter.grad = part.view_as(parameter) if number else None
    # add the earlier gradients
    for parameter, gradient in zip(whole, before, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def first_row(parameter: Tensor) -> int:
    """Row of the whole tensor at which this rank's part begins."""
    tensor: Any = parameter
    axes = [
        axis
        for axis, placed in enumerate(getattr(tensor, "placements", ()))
        if not placed.is_replicate()
    ]
    if not axes:
        return 0
    (axis,), mesh, num_rows = axes, tensor.device_mesh, int(tensor.shape[0])
    length = -(-num_rows // int(mesh.size(axis)))
    return min(int(mesh.get_local_rank(axis)) * length, num_rows)


def num_together(parameter: Tensor) -> int:
    """Number of ranks that compute the layer of a tensor together, each with its part."""
    mesh: Any = getattr(parameter, "device_mesh", None)
    names = () if mesh is None else mesh.mesh_dim_names or ()
    return int(mesh[TENSOR].size()) if TENSOR in names else 1


def whole_of_twice_divided(parameter: Tensor) -> Tensor:
    """The whole of a tensor that ranks compute together, on every rank; any other tensor unchanged."""
    tensor: Any = parameter
    whole: Tensor = tensor.full_tensor() if num_together(parameter) > 1 else parameter
    return whole


def sharded_like(parameter: Tensor, part: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Join the ranks' parts to a tensor of this shape that is sharded like the parameter."""
    if not hasattr(parameter, "full_tensor"):
        return part
    from torch.distributed.tensor import DTensor

    sharded: Any = parameter
    strides = torch.empty(shape, device="meta").stride()
    like = DTensor.from_local(
        part.to("meta"),
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=strides,
    )
    return _with_part(like, part)


def _with_part(like: Any, part: Tensor) -> Tensor:
    """A tensor sharded like another one, whose part of this rank may be in the host's memory."""
    make: Any = type(like)
    sharded: Tensor = make(part, like._spec, requires_grad=False)
    return sharded


def whole_of(parameter: Tensor, part: Tensor) -> Tensor:
    """The whole tensor, on every rank, of parts that are divided like the parameter."""
    sharded: Any = sharded_like(parameter, part, tuple(parameter.shape))
    whole: Tensor = sharded.full_tensor() if hasattr(sharded, "full_tensor") else sharded
    return whole


def part_of(parameter: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of a whole tensor, divided like the parameter."""
    if not hasattr(parameter, "full_tensor"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = parameter
    return local(
        distribute_tensor(whole, sharded.device_mesh, sharded.placements, src_data_rank=None)
    ).to(whole.device)


@torch.no_grad()
def swap(first: Tensor, second: Tensor) -> None:
    """Swap the contents of two tensors of the same shape and sharding."""
    if not hasattr(first, "full_tensor"):
        first.data, second.data = second.data, first.data
        return
    kept = first.detach().clone()  # FSDP gathers from the storage it knows
    first.copy_(second)
    second.copy_(kept)


def reshard(root: nn.Module) -> None:
    """Free gathered weights, so that the next forward gathers the current ones."""
    if not dist.is_initialized():
        return
    from torch.distributed.fsdp import FSDPModule

    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float | None) -> Tensor:
    """Scale the gradients down to ``max_norm``, if their norm is finite. Returns the norm before, over all ranks and on
    the device.
    """
    # the norm of each group of parameters, summed over the ranks that share them
    lists = by_placement(parameters)
    norms: list[Tensor] = []
    for some in lists:
        gradients: list[Any] = [p.grad for p in some if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([local(gradient) for gradient in gradients])
        norm = norm.to(some[0].device)  # without any gradient it is on the CPU
        for axis, placement in enumerate(
            getattr(gradients[0], "placements", ()) if gradients else ()
        ):
            if not placement.is_replicate():  # torch's own way makes two collectives
                square = norm.double().square()
                dist.all_reduce(square, group=gradients[0].device_mesh.get_group(axis))
                norm = square.sqrt().to(norm.dtype)
        norms.append(norm)
    # the norm of all, and one factor for all
    whole = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(stacked(norms))
    if max_norm is not None:
        usable = whole.nan_to_num(nan=0.0, posinf=0.0)  # of which none is above max_norm
        for some in lists:
            torch.nn.utils.clip_grads_with_norm_(some, max_norm, usable)
    return whole


def stacked(norms: Sequence[Tensor]) -> Tensor:
    """Stack numbers on the device of one of them; norms of offloaded gradients are on the CPU."""
    device = next((norm.device for norm in norms if norm.device.type != "cpu"), norms[0].device)
    return torch.stack([norm.to(device) for norm in norms])


def run_with_whole_tensors(module: nn.Module, ranks: Ranks, act: Callable[[WholeTensors], T]) -> T:
    """``Ranks.run_on_writer`` of an act that reads whole tensors of a module that may be sharded."""
    outcome: Any = None
    with whole_tensors(module, ranks) as whole:
        if whole is not None:
            outcome = outcome_of(partial(act, whole))
    result: T = results_of([ranks.from_writer(outcome)] * ranks.size)[0]
    return result


@contextmanager
def whole_tensors(module: nn.Module, ranks: Ranks) -> Iterator[WholeTensors | None]:
    """Read whole tensors of a module on the writer, one after another.

    On the writer the value is a function: called with names of the state dict, as often as needed, it yields these
    tensors in the state dict's order, whole on the CPU (if nothing is sharded, on their device). The other ranks send
    their parts on entry, until the writer leaves the block; their value is None.
    """
    if ranks.size > 1 and not ranks.is_writer:
        while (wanted := ranks.gather(None)[0]) is not None:
            for _ in _sent_to_writer(module, wanted, ranks):
                pass
        yield None
        return
    asked: list[Iterator[tuple[str, Tensor]]] = []

    def ask(names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        exhaust()
        ranks.gather(set(names))
        asked.append(_sent_to_writer(module, names, ranks))
        return asked[-1]

    def exhaust() -> None:
        """Take the rest of the last call's tensors: the other ranks send all of them."""
        for _ in asked[-1] if asked else ():
            pass

    try:
        yield ask
    finally:
        exhaust()
        ranks.gather(None)


def _sent_to_writer(
    module: nn.Module, names: Collection[str], ranks: Ranks
) -> Iterator[tuple[str, Tensor]]:
    """Yields tensors of the module, each whole, on the writer; nothing on the other ranks."""
    for name, tensor in module.state_dict().items():
        if name not in names:
            continue
        if ranks.is_writer:
            yield name, _on_writer(tensor, ranks)  # and kept nowhere here
        else:
            _on_writer(tensor, ranks)


@torch.no_grad()
def _on_writer(tensor: Any, ranks: Ranks) -> Tensor:
    """A tensor, whole on the writer's CPU; the other ranks send their parts one after another, and return theirs."""
    if not hasattr(tensor, "full_tensor"):
        whole: Tensor = tensor.cpu() if ranks.is_sharded else tensor
        return whole
    # a layer that ranks compute together is gathered by all of them
    mesh = tensor.device_mesh
    if num_together(tensor) > 1:
        return whole_of_twice_divided(tensor).cpu()
    # shards go to the writer, one rank after another
    part: Tensor = tensor.to_local()
    axis = next(
        axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()
    )
    group, dim = mesh.get_group(axis), tensor.placements[axis].dim
    members = dist.get_process_group_ranks(group)
    if not ranks.is_writer:
        if 0 in members and part.numel():  # else another replica sends it
            dist.send(part.to(mesh.device_type).contiguous(), 0, group=group)
        return part
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    length = -(-tensor.shape[dim] // len(members))
    for member, place in zip(members, torch.split(whole, length, dim), strict=False):
        if member != ranks.rank and place.numel():  # the last may have none
            part = torch.empty(place.shape, dtype=place.dtype, device=mesh.device_type)
            dist.recv(part, member, group=group)
        place.copy_(part)
    return whole
