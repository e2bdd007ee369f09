"""How the weights that do not train are stored: in the checkpoint's dtype, where adapters train next to them.

    linear layers of the decoder    in the checkpoint's dtype
    experts that are one tensor     in the checkpoint's dtype
    embedding and head              in the checkpoint's dtype
    all else                        in the dtype of what trains (float32): norms, biases, routers, scalar heads, vision
                                    towers

The arithmetic is that of weights in float32, to the last bit: a product widens its weight for as long as it takes
(``cpu_matmul.linear_from_stored``; autocast would round it to the same bf16), an embedding widens the rows that it
looks up, and adapters start at the same numbers (``looking_wide``). So how weights are stored is a matter of memory and
time alone, and a run may be resumed with another choice. A sharded model that computes in bfloat16 gathers all of it in
bfloat16, however it is stored, and widens no row (train/distributed.py).

peft keeps frozen weights where the library put them, so nothing else has to know; ``models/cpu/cpu_matmul.py`` and the
head in ``models/scorer.py`` take narrow weights as they come. ``models/quantized/quantized_layers.py`` quantizes linear
layers further.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from taut.io.replaced import replaced
from taut.models import architecture
from taut.models.quantized import quantized_storage
from taut.models.settings import FrozenDtype, Quantize

NARROW = (torch.bfloat16, torch.float16)
HOST_SHARE = 0.5
"""On a CPU that computes in float32, frozen weights stay in float32 while they take at most this share of its memory:
widening them for each product costs time."""


@dataclass(frozen=True, slots=True)
class Storage:
    """The dtypes of frozen weights."""

    layers: torch.dtype
    """Of the linear layers' weights."""
    tables: torch.dtype
    """Of embedding and head."""
    quantize: Quantize | None = None
    """Quantize the linear layers' weights."""
    whole: tuple[str, ...] = ()
    """The ends of names of modules that train whole, and so are not quantized, nor narrow experts."""
    host_share: float | None = None
    """Widen everything to float32 on the CPU if that takes at most this share of its memory; None: never."""
    rounds: bool = False
    """Whether the layers' weights have fewer bits than the checkpoint's."""
    widens_experts: bool = False
    """Whether experts are in the dtype of what trains: before peft 0.21 an adapter of others would be rounded."""


def storage_of(
    checkpoint: torch.dtype, compute: torch.dtype, device: torch.device, wanted: FrozenDtype
) -> Storage:
    """How to store the frozen weights of a run that computes in ``compute`` (not float64). Layers are in bf16 where the
    products are and ``wanted`` asks for the checkpoint's dtype by name, else in that dtype itself.
    """
    if wanted == "float32":
        return Storage(torch.float32, torch.float32)
    # never wider than what trains
    checkpoint = checkpoint if checkpoint in NARROW else torch.float32
    # Products would be the same, but the model is saved from what is stored.
    rounds = wanted == "checkpoint" and compute == torch.bfloat16 != checkpoint
    measures = wanted == "auto" and device.type == "cpu" and compute == torch.float32
    layers, share = compute if rounds else checkpoint, HOST_SHARE if measures else None
    return Storage(layers, checkpoint, host_share=share, rounds=rounds)


def stored_dtypes(model: PreTrainedModel, storage: Storage) -> dict[str, torch.dtype]:
    """Name of a parameter -> its dtype, for those that are stored in another than float32."""
    tables = {id(module) for module in architecture.tables(model).values()}
    inside = {id(module) for module in architecture.layers(model).modules()}
    dtypes: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():
        if id(module) in tables and isinstance(module, nn.Embedding | nn.Linear):
            dtypes[f"{name}.weight"] = storage.tables
        elif id(module) in inside and type(module) is nn.Linear:
            dtypes[f"{name}.weight"] = storage.layers
        elif id(module) in inside and not (storage.widens_experts or _is_whole(name, storage)):
            keys = quantized_storage.stacked_experts(name, module)
            dtypes |= {f"{name}.{key}": storage.layers for key in keys}
    return {name: dtype for name, dtype in dtypes.items() if dtype != torch.float32}


def _is_whole(name: str, storage: Storage) -> bool:
    """Whether a module of this name trains whole, or is inside of one that does."""
    return any(f".{kept}." in f".{name}." for kept in storage.whole)


def stored_parameters(model: PreTrainedModel, storage: Storage) -> set[nn.Parameter]:
    """The parameters that are stored in another dtype than float32."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {parameters[name] for name in stored_dtypes(model, storage)}


@contextmanager
def reading(storage: Storage | None) -> Iterator[None]:
    """Let the library read each weight in the dtype in which it is stored: never are all in memory in float32."""
    if storage is None:
        yield
        return
    library: Any = PreTrainedModel
    plan_of = library._get_dtype_plan

    def plan(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
        own: dict[str, torch.dtype] = plan_of(model, dtype)
        dtypes = stored_dtypes(model, storage)
        if storage.quantize is not None:
            # older versions of the library would cast what is read to the bytes of rows
            dtypes |= dict.fromkeys(quantized_storage.names_of_rows(model), dtype)
        return own | {f"^{re.escape(name)}$": stored for name, stored in dtypes.items()}

    with replaced(library, _get_dtype_plan=plan):
        yield


def store(model: PreTrainedModel, storage: Storage, *, widens_rows: bool = True) -> None:
    """Store the weights of a model that was just read. Quantized ones stay as they are. ``widens_rows``: the rows of a
    narrow embedding are looked up in float32.
    """
    dtypes = stored_dtypes(model, storage)
    if stays_wide(model, storage):
        dtypes = dict.fromkeys(dtypes, torch.float32)
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            dtype = dtypes.get(f"{name}.{key}", torch.float32)
            if parameter is None or parameter.dtype not in (torch.float32, *NARROW):
                continue
            if parameter.dtype == dtype:
                continue
            if hasattr(parameter, "full_tensor"):  # a shard keeps its dtype for life
                trains = parameter.requires_grad
                module._parameters[key] = nn.Parameter(parameter.detach().to(dtype), trains)
            else:
                parameter.data = parameter.data.to(dtype)
        keys = quantized_storage.stacked_experts(name, module)
        if narrow := [key for key in keys if dtypes.get(f"{name}.{key}", torch.float32) in NARROW]:
            quantized_storage.widen_experts(module, narrow)
    table = architecture.embedding(model)
    if widens_rows and isinstance(table, nn.Embedding) and table.weight.dtype in NARROW:
        table.forward = MethodType(_look_up, table)  # type: ignore[method-assign]


def stays_wide(model: nn.Module, storage: Storage) -> bool:
    """Whether a machine without a GPU has room for all in float32, and nothing is quantized."""
    if any(quantized_storage.quantized_layers(model)):
        return False
    num_bytes = 4 * architecture.num_weights(model)
    return storage.host_share is not None and num_bytes <= storage.host_share * host_memory()


def described(model: PreTrainedModel, storage: Storage) -> tuple[str, str]:
    """The dtype of a model's frozen weights, and the reason."""
    dtypes = {str(d).removeprefix("torch.") for d in stored_dtypes(model, storage).values()}
    num_wide = 4 * architecture.num_weights(model)
    layers = [module for _, module in quantized_storage.quantized_layers(model)]
    if layers:
        dtypes |= {layers[0].format.kind}
    if not dtypes:
        return "float32", "that of the checkpoint"
    if stays_wide(model, storage):
        share = f"at most {storage.host_share:.0%} of this machine's memory"
        return "float32", f"{num_wide / 2**30:,.1f} GiB, {share}"
    stored = stored_bytes(model)
    size = f"{stored / 2**30:,.1f} GiB instead of {num_wide / 2**30:,.1f}"
    same = "" if layers else ", the same products"
    if storage.rounds and not layers:
        same += "; the saved model's layers are rounded to it"
    return " and ".join(sorted(dtypes)), f"nothing of the base trains: {size}{same}"


def stored_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters, on all ranks together."""
    return sum(parameter.nbytes for parameter in model.parameters())


def host_memory() -> int:
    """The memory of the machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _look_up(self: nn.Embedding, ids: Tensor) -> Tensor:
    """An embedding's forward on its rows in float32; what a family does to them (a scale) follows."""
    if self.weight.dtype == torch.float32:  # a copy that trains
        return type(self).forward(self, ids)
    rows_TD = nn.functional.embedding(ids.reshape(-1), self.weight).float()
    if type(self) is nn.Embedding:
        return rows_TD.view(*ids.shape, -1)
    rows = copy.copy(self)
    rows.__dict__["_parameters"] = {**self._parameters, "weight": rows_TD}
    rows.padding_idx = None  # of a table that does not train it says nothing
    at = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
    return type(self).forward(rows, at)


@contextmanager
def looking_wide(model: nn.Module, is_copied: Callable[[str], bool]) -> Iterator[None]:
    """Inside, narrow weights of linear layers have the dtype float32 and no contents: peft makes adapters in the dtype
    of the weight that it finds, and would round what they start at. ``is_copied``: whether peft copies the module of a
    name.
    """
    narrow = [
        (module, module.weight)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module.weight.dtype in NARROW and not is_copied(name)
    ]
    try:
        for module, weight in narrow:
            empty = torch.empty((), device=weight.device).expand(weight.shape)
            module.weight = nn.Parameter(empty, requires_grad=False)
        yield
    finally:
        for module, weight in narrow:  # which peft has frozen by the name
            module.weight = weight.requires_grad_(False)


def wide_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of ``model`` with all its numbers in float32; tied tensors stay one."""
    wide: dict[int, Tensor] = {}
    state = quantized_storage.wide_weights(model, dict(state))
    return {
        name: wide.setdefault(tensor.data_ptr(), tensor.float())
        if tensor.dtype in NARROW
        else tensor
        for name, tensor in state.items()
    }
