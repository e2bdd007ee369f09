"""A model's weights -> safetensors files, a few tensors at a time, in any order.

The safetensors library writes a file from all of its tensors at once. The format is: the length of a header, the
header (JSON: dtype, shape and place of each tensor), the bytes. Dtypes and shapes are known before any tensor is, so
the header is written first, and each tensor to its place when it comes. The files are those that the library would
write.

The library says which file holds which tensor, under which name (``save_pretrained``), and writes all that describes
the model. Conversions of names and shapes on the way (fused experts -> those of a checkpoint) are the
library's too, and are made group by group.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, modeling_utils
from transformers.core_model_loading import revert_weight_conversion

from taut.errors import OutputError
from taut.io.replaced import replaced

NAMES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's names of dtypes, in the order in which their tensors lie in a file: each at a multiple of its size."""
ALIGNMENT = 8
"""The bytes of tensors begin at a multiple of it."""


class WeightFile:
    """A file with the tensors of ``described``, of which only dtypes and shapes count. ``put`` each of them."""

    def __init__(
        self, path: Path, described: Mapping[str, Tensor], metadata: Mapping[str, str]
    ) -> None:
        order = list(NAMES)
        self.missing = dict(
            sorted(described.items(), key=lambda item: (order.index(item[1].dtype), item[0]))
        )
        """The tensors that were not put yet."""
        self.path, self.num_tensors = path, len(self.missing)
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        offset = 0
        self._offsets = {}
        for name, tensor in self.missing.items():
            self._offsets[name] = offset
            header[name] = {
                "dtype": NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, offset := offset + tensor.nbytes],
            }
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        self._start = 8 + len(text)
        self._file = path.open("xb")
        try:
            self._file.write(len(text).to_bytes(8, "little") + text)
            self._file.truncate(self._start + offset)
        except OSError:
            with suppress(OSError):  # what is in its buffer cannot be written either
                self._file.close()
            raise

    def put(self, name: str, tensor: Tensor) -> None:
        """Write one of the tensors."""
        expected = self.missing.pop(name)
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape), (
            f"{name}: found {tensor.dtype} {list(tensor.shape)}; expected {expected.dtype} {list(expected.shape)}"
        )
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        self._file.seek(self._start + self._offsets[name])
        self._file.write(content.numpy().data)

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()


def save(skeleton: PreTrainedModel, groups: Iterable[dict[str, Tensor]], directory: Path) -> None:
    """Write a model as the library's ``save_pretrained`` does. ``skeleton``: the model on the meta device, in the dtype
    to be saved; ``groups``: its tensors, each once, of which the library converts those of one group together. Each
    group is emptied while it is written.
    """
    described: dict[str, tuple[dict[str, Tensor], dict[str, str]]] = {}
    with _describing(described):
        skeleton.save_pretrained(directory)
    narrow = _narrowed(groups, skeleton.dtype)
    with ExitStack() as stack:
        files: dict[str, WeightFile] = {}
        for file, (tensors, metadata) in described.items():
            written = stack.enter_context(WeightFile(directory / file, tensors, metadata))
            files |= dict.fromkeys(tensors, written)
        for name, tensor in converted(skeleton, narrow):
            if name not in files:
                raise OutputError(
                    f"{directory.name}: the library saves no tensor {name} of {type(skeleton).__name__}; expected one "
                    "of those that it lists; please report the model"
                )
            files[name].put(name, tensor)
            del tensor
        if missing := [name for file in set(files.values()) for name in file.missing]:
            raise OutputError(
                f"{directory.name}: {len(missing)} tensors were not written, {min(missing)} the first; expected all of "
                f"{type(skeleton).__name__}; please report the model"
            )


def converted(
    skeleton: PreTrainedModel, groups: Iterable[dict[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model under their names in a checkpoint. Each group is emptied."""
    for group in groups:
        tensors = revert_weight_conversion(skeleton, {**group})
        group.clear()
        while tensors:
            yield tensors.popitem()


def _narrowed(
    groups: Iterable[dict[str, Tensor]], dtype: torch.dtype
) -> Iterator[dict[str, Tensor]]:
    for group in groups:
        narrow = {}
        while group:
            name, tensor = group.popitem()
            narrow[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
            del tensor
        yield narrow


@contextmanager
def _describing(
    described: dict[str, tuple[dict[str, Tensor], dict[str, str]]],
) -> Iterator[None]:
    """Keep the library from writing inside the block: ``described`` gets the tensors of each file, and its metadata."""
    library: Any = modeling_utils
    revert = library.revert_weight_conversion

    def describe(tensors: dict[str, Tensor], path: str, metadata: dict[str, str]) -> None:
        described[Path(path).name] = (tensors, metadata)

    def revert_apart(model: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Each tensor with a size of its own: the library would count a part of a tensor as the whole of it."""
        return {name: torch.empty_like(tensor) for name, tensor in revert(model, state).items()}

    with replaced(library, safe_save_file=describe, revert_weight_conversion=revert_apart):
        yield
