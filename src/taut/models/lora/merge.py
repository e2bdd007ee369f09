"""Models without their adapters, and adapters in peft's format: what is saved, exported and sent to servers.

``plain_groups`` gives the tensors of the library's model with the adapter merged, a layer at a time. ``save_adapter``
writes the adapter alone.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from taut.models import architecture
from taut.models.lora import adapter_start
from taut.models.lora.adapters import is_adapted
from taut.models.quantized.frozen_storage import wide_state

Whole = Callable[[Collection[str]], Iterable[tuple[str, Tensor]]]
"""Gives the tensors of these names whole, one after another, in the order of the model's state dict."""
_BLOCK = re.compile(r".*?\.\d+(?=\.|$)")
"""A numbered block: a decoder layer, a layer of a vision tower."""


def plain_skeleton(model: nn.Module) -> PreTrainedModel:
    """The library's model without adapters, whose tensors ``plain_groups`` gives: on the meta device, for saving."""
    base = architecture.unwrap(model)
    plain = _made_again(model)
    plain.tie_weights()
    if hasattr(base, "generation_config"):  # reward models have none
        plain.generation_config = copy.deepcopy(base.generation_config)
    for name in ("_weight_conversions", "_auto_class"):
        if hasattr(base, name):
            setattr(plain, name, getattr(base, name))
    return plain


def _made_again(model: nn.Module) -> PreTrainedModel:
    """The library's model without adapters and contents."""
    base = architecture.unwrap(model)
    kind = next(kind for kind in type(base).__mro__ if not kind.__name__.startswith("FSDP"))
    config = copy.deepcopy(base.config)
    config._attn_implementation = None
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are what the quantized ones stand for
    if architecture.has_head(model):
        config.tie_word_embeddings = architecture.is_tied(model)  # an adapter can separate the two
    make: Any = kind
    with torch.device("meta"):
        plain = make(config)
    assert isinstance(plain, PreTrainedModel)
    return plain


@torch.no_grad()
def plain_groups(model: nn.Module, whole: Whole | None = None) -> Iterator[dict[str, Tensor]]:
    """The tensors of a model without adapters: those merged, quantized weights as the numbers that they stand for,
    nothing narrower than float32; a tied tensor under its first name. A group is a numbered block, such as a decoder
    layer, or one module outside of these. No two are in memory where the caller empties each.

    ``whole``: gives the tensors of ``model``, where it holds shards. The tensors may share storage with those of
    ``model``, which stay as they are.
    """
    # the library's model, and the same with adapters, both without contents
    skeleton = plain_skeleton(model)
    wrapped: Any = skeleton
    if is_adapted(model):
        from peft import get_peft_model

        wrapper: Any = model
        settings = copy.deepcopy(wrapper.peft_config[wrapper.active_adapter])
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            if adapter_start.is_installed(model):
                settings = _twice_the_rank(settings)
            wrapped = get_peft_model(
                _made_again(model), settings, adapter_name=wrapper.active_adapter
            )
    # which tensors are needed, and for which group each waits
    prefix = "base_model.model." if is_adapted(model) else ""
    tied = {name for name, first in architecture.first_names(skeleton).items() if name != first}
    kept = skeleton.state_dict().keys() - tied
    modules = {name for name, _ in wrapped.named_modules()}
    adapted = {name for name, module in wrapped.named_modules() if _is_adapter(module)}
    places = {name: _place(name, modules, adapted) for name in model.state_dict()}
    needed = {
        place
        for place in {*places.values()}
        if any(name.startswith(f"{place.removeprefix(prefix)}.") for name in kept)
    }
    first = architecture.first_names(model)
    names: dict[str, list[str]] = {}  # a tensor's first name -> those under which it is needed
    left: dict[str, int] = {}  # group -> number of tensors that it waits for
    for name, place in places.items():
        if place in needed:
            names.setdefault(first.get(name, name), []).append(name)
            left[_group(place)] = left.get(_group(place), 0) + 1
    # merge a group as soon as it has all of its tensors
    waiting: dict[str, dict[str, Tensor]] = {group: {} for group in left}
    if whole is None:  # the model has its tensors whole
        arriving: Iterable[tuple[str, Tensor]] = (
            (name, tensor) for name, tensor in model.state_dict().items() if name in names
        )
    else:
        arriving = whole(names)
    for arrived, tensor in arriving:
        for name in names.get(arrived, ()):
            group = _group(places[name])
            waiting[group][name] = tensor.detach()
            left[group] -= 1
        del tensor
        for group in [group for group in waiting if not left[group]]:
            found = _merged(wrapped, wide_state(model, waiting.pop(group)), places, adapted)
            found = {name.removeprefix(prefix): found.pop(name) for name in [*found]}
            yield {name: found.pop(name) for name in [*found] if name in kept}
    assert not waiting, f"weights missing: {next(iter(waiting))}"


def _is_adapter(module: nn.Module) -> bool:
    """Whether peft merges this module."""
    return hasattr(module, "unload_and_optionally_merge_module") or hasattr(module, "base_layer")


def _place(name: str, modules: Collection[str], adapted: Collection[str]) -> str:
    """The module that a tensor belongs to: the outermost one with an adapter, or the innermost one."""
    parts = name.split(".")
    parents = [".".join(parts[:stop]) for stop in range(1, len(parts))]
    inside = [parent for parent in parents if parent in modules]
    return next((parent for parent in inside if parent in adapted), inside[-1])


def _group(place: str) -> str:
    """The group that a module belongs to."""
    block = _BLOCK.match(place)
    return place if block is None else block[0]


def _merged(
    wrapped: nn.Module,
    tensors: dict[str, Tensor],
    places: Mapping[str, str],
    adapted: Collection[str],
) -> dict[str, Tensor]:
    """The tensors of some modules, adapters merged as peft merges them. ``tensors`` is emptied."""
    plain: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    for name in [*tensors]:
        if (place := places[name]) in adapted:
            parts.setdefault(place, {})[name.removeprefix(f"{place}.")] = tensors.pop(name)
        else:
            plain[name] = tensors.pop(name)
    for place in [*parts]:
        weights = parts.pop(place)
        module: Any = wrapped.get_submodule(place)
        weights = adapter_start.with_starts_joined(weights)
        missing, unexpected = module.load_state_dict(weights, strict=False, assign=True)
        assert not missing, f"{place}: weights missing: {missing[:3]}"
        assert not unexpected, f"{place}: weights unexpected: {unexpected[:3]}"
        if hasattr(module, "unload_and_optionally_merge_module"):
            result = module.unload_and_optionally_merge_module(
                merge=True, safe_merge=True, adapter_names=None
            )
        else:
            module.merge(safe_merge=True)
            result = module.get_base_layer()
        plain |= {f"{place}.{name}": tensor for name, tensor in result.state_dict().items()}
        module.to("meta")  # what it was merged from goes
    return plain


def save_adapter(model: nn.Module, directory: Path, whole: Whole | None = None) -> None:
    """Write the adapter (and modules_to_save) in peft's format, safetensors. ``whole``: see ``plain_groups``."""
    inner: Any = model
    commit = getattr(inner.config, "_commit_hash", None)  # of a base from the hub
    for config in inner.peft_config.values():
        config.revision = commit or config.revision
        if isinstance(config.target_modules, set):  # its order differs between processes
            config.target_modules = sorted(config.target_modules)
        if config.modules_to_save:  # peft itself names the head again
            config.modules_to_save = list(dict.fromkeys(config.modules_to_save))
    state_dict = None
    if whole is not None:
        # of the base: no adapters around adapters
        of_base = re.compile(r"\.(base_layer|original_module)\.(?!.*lora_)")
        first = architecture.first_names(model)
        modules = dict(model.named_modules())
        adapted = {name for name, module in modules.items() if _is_adapter(module)}
        names = {
            name: first.get(name, name)
            for name in model.state_dict()
            if _place(name, modules, adapted) in adapted and not of_base.search(name)
        }
        found = dict(whole({*names.values()}))
        state_dict = {name: found[source] for name, source in names.items()}
    trained = dict(inner.peft_config)
    if adapter_start.is_installed(model):
        state_dict = adapter_start.with_starts_joined(state_dict or model.state_dict())
        inner.peft_config = {name: _twice_the_rank(config) for name, config in trained.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # embeddings are saved only where they were trained
            inner.save_pretrained(
                str(directory), state_dict=state_dict, save_embedding_layers=False
            )
    finally:
        inner.peft_config = trained


def _twice_the_rank(settings: Any) -> Any:
    """peft's settings of an adapter with twice the rank and the same scale."""
    twice = copy.deepcopy(settings)
    twice.r *= 2
    twice.lora_alpha *= math.sqrt(2) if settings.use_rslora else 2
    return twice
