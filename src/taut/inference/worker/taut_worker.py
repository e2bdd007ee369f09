"""taut's extension of vLLM's worker: loads weights from a folder, and reports checksums of the weights it has.

    VLLM_SERVER_DEV_MODE=1 PYTHONPATH=(this folder) vllm serve DIR --worker-extension-cls taut_worker.TautWorker

vLLM mixes the class into its worker, and POST /collective_rpc calls its methods. The file runs in vLLM's environment:
it imports the standard library and torch, and inside functions safetensors. The folder on the PYTHONPATH holds nothing
else, so that no package of taut's environment takes the place of one of vLLM's.

The checksum of a tensor is the sum of a 64-bit mix of each element's bits, modulo 2**64. It is exact, does not depend
on order or shape, and adds up: that of a fused matrix (q, k and v in one) is the sum of its parts', that of a sharded
one the sum of its shards', and zeros that fill a vocabulary up add nothing. Where two weights are exchanged it stays
the same; what the model says of a probe does not.

On a CPU, vLLM's kernels keep weights in a layout of their own, mostly with nothing left to read. Some columns are then
read through the kernel: it is given rows of zeros with a single 1, which give back columns without rounding. A head
tied to the embedding has such a copy too, which vLLM 0.32 forgets when it loads weights again: it is made again here.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

START = uuid.uuid4().hex
"""Identifies this process: another value after a restart."""
NUM_COLUMNS = 16
"""Columns of a weight that are read through its kernel."""
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = {"cpu": 2**15, "cuda": 2**22}
_ONE, _TWO = -7046029254386353131, -4658895280553007687


class TautWorker:
    """Mixed into vLLM's worker, whose ``model_runner`` and ``reload_weights`` it uses."""

    taut_version = -1
    """Version of the weights loaded last; -1: those the server started with."""
    taut_folder = ""
    """Their folder. Its name is random, which distinguishes pushes of the same version."""

    def taut_held(self) -> dict[str, Any]:
        """The process and its weights."""
        runner = _worker(self).model_runner
        dtype = str(runner.model_config.dtype).removeprefix("torch.")
        held = {"start": START, "version": self.taut_version, "folder": self.taut_folder}
        device = next(runner.get_model().parameters()).device
        is_alone = device.type == "cpu" and runner.lora_config is not None
        gpu = f"{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else None
        return {**held, "dtype": dtype, "is_probed_alone": is_alone, "gpu": gpu}

    def taut_load(self, folder: str, version: int) -> dict[str, Any]:
        """Replace the model's weights by those of a folder's files, named as in the checkpoint."""
        try:
            list(Path(folder).iterdir())  # raises where glob finds nothing
            files = _files(folder)
            for file in files:
                file.open("rb").close()
        except OSError as error:
            return {"error": f"cannot read {error.filename}: {error.strerror}"}
        if not files:
            return {"error": f"sees no file in {folder}"}
        self.taut_version, self.taut_folder = (
            version,
            folder,
        )  # reported even if loading fails half-way
        _worker(self).reload_weights(weights_iterator=_tensors(files))
        pack_again(_worker(self).model_runner.get_model())
        return {}

    def taut_checksums(self, names: list[str]) -> list[dict[str, Any]]:
        """For every parameter: its name, those of the pushed tensors ``names`` it is made of, and the checksum of the
        readable part.
        """
        runner = _worker(self).model_runner
        model, dtype = runner.get_model(), runner.model_config.dtype
        parts = _parts(model, names)
        reports = []
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                at, read = None, parameter
                if not parameter.numel():
                    at, read = _through(model.get_submodule(name.rpartition(".")[0]), dtype)
                reports.append(_report(name, parts.get(_plain(name), []), at, read.to(dtype)))
            own = {parameter: name for name, parameter in model.named_parameters()}
            for name, layer in _copied(model):
                at, read = _through(layer, dtype)
                reports.append(
                    _report(f"{name}'s copy", parts.get(_plain(own[layer.weight]), []), at, read)
                )
        return reports


def checksum(tensor: Tensor) -> int:
    """The sum over elements of a mix of their bits, modulo 2**64."""
    bits = tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in torch.split(bits, _CHUNK.get(tensor.device.type, 2**20)):
        mixed = chunk.to(torch.int64, copy=True)
        mixed.mul_(_ONE)
        mixed.bitwise_xor_(mixed >> 32)
        mixed.mul_(_TWO)
        mixed.bitwise_xor_(mixed >> 29)
        total += mixed.sum()
    return int(total) % 2**64


def pack_again(model: Any) -> None:
    """Make the copies anew that kernels for CPUs keep of weights, which vLLM forgets when it loads weights again."""
    for _, layer in _copied(model):
        layer.quant_method.process_weights_after_loading(layer)


def columns(width: int) -> list[int]:
    """Which columns of a weight are read through its kernel."""
    count = min(NUM_COLUMNS, width)
    return [at * width // count for at in range(count)]


def _worker(extension: object) -> Any:
    """The worker this class is mixed into, whose type cannot be imported here."""
    return extension


def _report(name: str, parts: list[str], at: list[int] | None, read: Tensor) -> dict[str, Any]:
    total = f"{checksum(read):016x}" if read.numel() else None
    return {"name": _plain(name), "parts": parts, "columns": at, "checksum": total}


def _plain(name: str) -> str:
    """A parameter's name on a server that can load adapters, as it is on one that cannot."""
    return name.replace(".base_layer.", ".")


def _files(folder: str) -> list[Path]:
    return sorted(Path(folder).glob("*.safetensors"))


def _tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for file in files:
        with safe_open(str(file), "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (it is no mapping)
                yield name, weights.get_tensor(name)


def _parts(model: Any, names: list[str]) -> dict[str, list[str]]:
    """The checkpoint's tensors that each of the model's parameters is made of, by vLLM's own tables."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    fused = {
        part: whole
        for whole, parts in getattr(model, "packed_modules_mapping", {}).items()
        for part in parts
        if part != whole
    }
    own = {_plain(name) for name, _ in model.named_parameters()}
    found: dict[str, list[str]] = {}
    for name in names:
        mapped = name if mapper is None else (mapper.map_name(name) or name)
        if mapped not in own:
            mapped = ".".join(fused.get(word, word) for word in mapped.split("."))
        if mapped in own:
            found.setdefault(mapped, []).append(name)
    return found


def _copied(model: Any) -> list[tuple[str, Any]]:
    """Layers that keep their weight and, in addition, a copy of it for their kernel."""
    return [
        (name, layer)
        for name, layer in model.named_modules()
        if hasattr(layer, "cpu_linear") and layer.weight.numel()
    ]


def _through(layer: Any, dtype: torch.dtype) -> tuple[list[int] | None, Tensor]:
    """Some columns of a weight, and which, as its kernel has them; nothing where the layer's input is sharded."""
    width = getattr(layer, "input_size", None) or layer.embedding_dim
    if width != getattr(layer, "input_size_per_partition", width):
        return None, torch.empty(0)
    at = columns(width)
    rows = torch.zeros(len(at), width, dtype=dtype)
    rows[range(len(at)), at] = 1
    return at, layer.quant_method.apply(layer, rows, None)
