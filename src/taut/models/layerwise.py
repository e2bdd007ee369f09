"""A model whose decoder layers are in its files: each is read when it runs, and dropped after it.

For forwards without gradient of a model that is larger than memory. At any time there is what stands outside the layers
(embedding, head, a vision tower) and one layer. Tensors that have the file's dtype are views of the mapped file, whose
pages are no memory of the process.

Everything is read by the library's own ``from_pretrained``: first what is outside the layers, by a call that is shown
no others; then each layer, by the function that ``from_pretrained`` calls for all. So names, conversions (single
experts -> one tensor), dtypes, ties and quantization are those of a model that is read whole.

Between two runs a layer's parameters have their shapes, dtypes and device, and no contents: adapters can be made around
them. ``keep`` reads what a copy is to be made of.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    dot_natural_key,
    rename_source_key,
)

from taut.errors import ModelError
from taut.io.replaced import replaced
from taut.models import architecture


class _Place(NamedTuple):
    """Where a tensor of a layer belongs: a module's parameters or buffers, and its key there."""

    tensors: dict[str, Tensor | None]
    key: str


class StreamedLayers:
    """The layers of one model. Used once: as the context in which ``from_pretrained`` is called, then ``attach``."""

    def __init__(self, explaining: Callable[[], AbstractContextManager[None]]) -> None:
        """``explaining``: the context of each call of the library."""
        self._explaining = explaining
        self._shadow: PreTrainedModel | None = None
        """The library's model without contents, into which it reads a layer."""
        self._settings: Any = None
        self._slices: list[dict[str, Any]] = []
        """For each layer: a tensor's name in the files -> what reads it."""
        self._places: list[dict[str, _Place]] = []
        self._empty: list[dict[str, Tensor]] = []

    @contextmanager
    def reading_the_rest(self) -> Iterator[None]:
        """Inside, ``from_pretrained`` leaves the layers on the meta device. A checkpoint in another format than
        safetensors is read whole.
        """
        library: Any = PreTrainedModel  # as in load._sharded_before_reading
        read = library._load_pretrained_model

        def read_rest(
            model: PreTrainedModel,
            state_dict: Any,
            files: Sequence[str] | None,
            settings: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            if not files or not all(Path(file).suffix == ".safetensors" for file in files):
                return read(model, state_dict, files, settings, *args, **kwargs)
            # Of the library's tensors without contents; those that are read first have them, and are replaced.
            self._shadow, self._settings = copy.deepcopy(model), settings
            slices: dict[str, Any] = {}
            for path in files:
                file: Any = safe_open(path, framework="pt")
                slices |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            layers = _places(model)
            for place in (place for places in layers for place in places.values()):
                tensor: Any = place.tensors[place.key]
                tensor._is_hf_initialized = True  # so that the library leaves it alone
            names = [set(places) for places in layers]
            self._slices, rest = _by_layer(model, names, slices, settings)
            found, index = read(model, rest, None, settings, *args, **kwargs)
            found.missing_keys -= set().union(*names)  # until a layer is read
            return found, index

        with replaced(library, _load_pretrained_model=staticmethod(read_rest)):
            yield

    @torch.no_grad()
    def attach(self, model: PreTrainedModel, device: torch.device) -> None:
        """Let the layers of ``model``, which was read in the context above, be read to ``device`` when they run."""
        if self._shadow is None:
            return
        for index, (layer, places) in enumerate(
            zip(architecture.layers(model), _places(model), strict=True)
        ):
            empty: dict[str, Tensor] = {}
            for name, place in places.items():
                tensor = place.tensors[place.key]
                assert tensor is not None, name
                nothing = torch.empty((), dtype=tensor.dtype, device=device).expand(tensor.shape)
                empty[name] = nothing
                if isinstance(tensor, nn.Parameter):
                    empty[name] = nn.Parameter(nothing, tensor.requires_grad)
                place.tensors[place.key] = empty[name]
            self._places.append(places)
            self._empty.append(empty)
            layer.register_forward_pre_hook(partial(self._before, index))
            layer.register_forward_hook(partial(self._after, index), always_call=True)

    def keep(self, is_kept: Callable[[str], bool]) -> None:
        """Read the tensors whose names ``is_kept`` accepts, and keep them."""
        for index, places in enumerate(self._places):
            chosen = [name for name in places if is_kept(name)]
            if not chosen:
                continue
            tensors = self._read(index)
            for name in chosen:
                place, empty = places.pop(name), self._empty[index].pop(name)
                own = tensors[name].clone()  # without the file
                place.tensors[place.key] = nn.Parameter(own, empty.requires_grad)

    def _before(self, index: int, *_: Any) -> None:
        assert not torch.is_grad_enabled(), (
            "a layer is dropped before a backward pass would need it"
        )
        tensors = self._read(index)
        for name, place in self._places[index].items():
            place.tensors[place.key] = tensors[name]

    def _after(self, index: int, *_: Any) -> None:
        for name, place in self._places[index].items():
            place.tensors[place.key] = self._empty[index][name]

    @torch.no_grad()
    def _read(self, index: int) -> dict[str, Tensor]:
        """The tensors of a layer. They are no parameters, of which engines would keep copies."""
        shadow = self._shadow
        assert shadow is not None, "layers were attached"
        places = _places(shadow)[index]
        try:
            # the library reads the layer into its model without contents
            with self._explaining(), _one_after_another():
                found, _ = convert_and_load_state_dict_in_model(
                    shadow, self._slices[index], self._settings
                )
            wrong = (found.missing_keys & places.keys()) | {
                name for name, *_ in found.mismatched_keys
            }
            if wrong:
                raise ModelError(
                    f"model={self._settings.pretrained_model_name_or_path} lacks {len(wrong)} weight(s) of layer "
                    f"{index}, or has them in another shape, {min(wrong)} the first; expected a complete checkpoint; "
                    "copy the files again"
                )
            # copies on the device that computes
            tensors = {}
            for name, empty in self._empty[index].items():
                place = places[name]
                tensor = place.tensors[place.key]
                assert tensor is not None, name
                tensors[name] = tensor.detach().to(empty.device, empty.dtype)
            return tensors
        finally:
            # its contents are dropped again
            for place in places.values():
                tensor = place.tensors[place.key]
                assert tensor is not None, place.key
                nothing = torch.empty_like(tensor, device="meta")
                is_parameter = isinstance(tensor, nn.Parameter)
                place.tensors[place.key] = (
                    nn.Parameter(nothing, tensor.requires_grad) if is_parameter else nothing
                )


@contextmanager
def _one_after_another() -> Iterator[None]:
    """Inside, the library reads without threads, each of which would keep memory of its own for what it reads."""
    switch = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(switch)
    os.environ[switch] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[switch]
        else:
            os.environ[switch] = before


def _places(model: PreTrainedModel) -> list[dict[str, _Place]]:
    """For each layer: the name of each tensor that checkpoints have of it -> where it belongs."""
    names = {id(module): name for name, module in model.named_modules()}
    layers = []
    for layer in architecture.layers(model):
        saved = layer.state_dict().keys()
        places: dict[str, _Place] = {}
        for inner, module in layer.named_modules():
            tensors: Any
            for tensors in (module._parameters, module._buffers):
                for key, tensor in tensors.items():
                    own = f"{inner}.{key}" if inner else key
                    if tensor is not None and own in saved:
                        places[f"{names[id(layer)]}.{own}"] = _Place(tensors, key)
        layers.append(places)
    return layers


def _by_layer(
    model: PreTrainedModel,
    names: Sequence[set[str]],
    slices: Mapping[str, Any],
    settings: Any,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The tensors of the files by the layer that the library would put them in, and all others."""
    layer_of = {name: index for index, layer in enumerate(names) for name in layer}
    mapping = settings.weight_mapping or []
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    known, prefix = model.state_dict(), model.base_model_prefix
    layers: list[dict[str, Any]] = [{} for _ in names]
    rest: dict[str, Any] = {}
    for name in sorted(slices, key=dot_natural_key):  # the library's order, which some names need
        renamed, _ = rename_source_key(name, renamings, converters, prefix, known)
        if renamed not in known and name in known:
            renamed, _ = rename_source_key(name, [], [], prefix, known)
        index = layer_of.get(renamed)
        (rest if index is None else layers[index])[name] = slices[name]
    return layers, rest
