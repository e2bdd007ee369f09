"""Compares the trained, the merged and the reloaded model: a merge can silently lose tied tables and new tokens.

Compared are the logprobs of a few samples, every token a target (of a reward model: its score at every token), and of a
sequence of all new and stop tokens, so that the rows of embedding and head that matter most take part:

    weights   each tensor of the reloaded model is the merged one, rounded to the saved dtype: bit for bit
    merge     the merged weights, not yet rounded, in the saved directory's own configuration, against training
    reload    the saved directory as users load it, against training
    adapter   the base model with the saved adapter, against training

All are computed in float32 (float64 after training in float64), the samples side by side (one at a time where layers
keep a state). The largest difference counts, and only float32 rounding passes. Where weights are saved in fewer bits,
``reload`` reports the cost as the mean over tokens: rounding to b significant bits moves a weight by up to 2^-b of
itself (bfloat16: b = 8, at most 0.4%), and such errors add up like noise over the layers: hundredths to tenths of a nat
on average, more for tokens the model finds unlikely. Its limit is wide; faults show in ``weights`` and ``merge``.

A model that is loaded for this takes at most ``WHOLE`` bytes of the host, or what a GPU has free, if it is whole. A
larger one is read a layer at a time, by each forward again (``models/layerwise.py``): then there are in float32 what
stands outside the layers, and two or three layers: of a 70B model some 20 GB in place of 280. ``weights`` and ``merge``
are found in one forward, in which each layer is compared with the trained one, merged at that time
(``lora.plain_groups``), and then computes with that one's numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from taut.data.packing import ALONE, pack
from taut.errors import CheckFailed
from taut.io.allocator import return_freed_memory
from taut.models import architecture
from taut.models.attention_backends import select_for_proof
from taut.models.layerwise import StreamedLayers
from taut.models.load import (
    explain_load_errors,
    is_reward_config,
    load_config,
    load_model,
    set_attention,
)
from taut.models.lora.adapters import adapter_settings, apply_lora, is_adapted
from taut.models.lora.merge import Whole, plain_groups
from taut.models.precision import compute_context
from taut.models.quantized.frozen_storage import Storage
from taut.models.reward_model import load_reward_model
from taut.models.scorer import Scorer, evaluating
from taut.models.settings import LoraConfig, NewHead
from taut.models.tokens import add_tokens
from taut.train import distributed
from taut.types import Media, Sample, Scores, Wants

SAMPLES = 4
"""Samples compared, in addition to the sequence of new and stop tokens."""
SAMPLE_TOKENS = 256
"""Tokens of each sample."""
EXTRA_TOKENS = 128
"""Largest number of new and stop tokens."""

TOLERANCE = 2e-3
"""Largest difference of a logprob (nats) that is float32 rounding: the limit of the self-test."""
ROUNDED = {torch.bfloat16: 0.5, torch.float16: 0.06}
"""Largest mean difference where weights were rounded to a dtype."""
SPARE = 1.5
"""A GPU has room for a copy of the model if it has this much more free than the copy takes."""
WHOLE = 2 * 2**30
"""Bytes of a model in float32 that the host holds whole; layers of a larger one are read when they run."""


@dataclass(frozen=True)
class Room:
    """Where a model is loaded to be compared."""

    device: torch.device
    is_streamed: bool = False
    """Its layers are read when they run, and dropped after it."""


@dataclass(frozen=True)
class Comparison:
    """The result of one comparison."""

    name: str
    value: float
    """The largest difference."""
    tolerance: float
    """Largest difference that is rounding."""
    detail: str
    """Models that were compared, and place of the (first) largest difference."""

    @property
    def is_sound(self) -> bool:
        return self.value <= self.tolerance


@dataclass(frozen=True, eq=False)
class Trained:
    """The model in memory and its scores, gathered by all ranks before one of them saves."""

    model: nn.Module
    whole: Whole | None
    """Gives the weights where ``model`` holds shards."""
    samples: Sequence[Sample]
    logps: Sequence[Tensor]
    """Its scores of the samples: see ``score``."""
    dtype: torch.dtype
    """The dtype of the saved weights."""


def samples_to_compare(data: Sequence[Sample], extra_ids: Sequence[int]) -> list[Sample]:
    """The first samples, cut to SAMPLE_TOKENS but never inside a picture, and one sample with ``extra_ids`` (new
    tokens, stop tokens). Every token is a target.
    """
    samples = []
    for sample in (data[index] for index in range(min(SAMPLES, len(data)))):
        stop = max(SAMPLE_TOKENS, *(m.stop for m in sample.media if m.start < SAMPLE_TOKENS), 0)
        media = tuple(medium for medium in sample.media if medium.stop <= stop)
        samples.append(every_token(sample.id, sample.ids_T[:stop].tolist(), media))
    stop = min(8, *(medium.start for medium in data[0].media), 8)
    extra = [*data[0].ids_T[:stop].tolist(), *list(dict.fromkeys(extra_ids))[:EXTRA_TOKENS]]
    return [*samples, every_token("new and stop tokens", extra)]


def every_token(name: str, ids: Sequence[int], media: tuple[Media, ...] = ()) -> Sample:
    """A sample in which each token but the first is a target, and where a scalar head is read at the same."""
    at, ids_T = np.arange(1, len(ids)), np.asarray(ids, dtype=np.int64)
    return Sample(name, ids_T, at, np.ones(at.size), media, read_at_R=at)


@torch.no_grad()
def score(scorer: Scorer, samples: Sequence[Sample]) -> list[Tensor]:
    """logp_N of each sample (a reward model's score at each read), on the CPU; without noise, in float32, or float64 if
    the weights are. A collective where the model is sharded.
    """
    is_scalar = not architecture.has_head(scorer.model)
    wants = Wants(logp=not is_scalar, scalar=is_scalar)
    is_double = next(scorer.parameters()).dtype == torch.float64
    dtype = torch.float64 if is_double else torch.float32
    model = architecture.unwrap(scorer.model)
    trained_with = architecture.text_config(model)._attn_implementation
    is_alone = bool(architecture.leaking_layers(model))
    parts = [[sample] for sample in samples] if is_alone else [samples]
    scores: list[Tensor] = []
    set_attention(model, select_for_proof(scorer.device, dtype, model.config))
    try:
        with (
            evaluating(scorer),
            distributed.gathered_in(scorer, dtype),
            compute_context(dtype, scorer.device),
        ):
            for packed in (pack(part, ALONE) for part in parts):
                found: Scores = scorer(packed, wants=wants)
                values, rows = found.logp_N, packed.row_N
                if found.scalar_R is not None:
                    values, rows = found.scalar_R, packed.row_R
                scores += torch.split(values.cpu(), torch.bincount(rows).tolist())
    finally:
        set_attention(model, trained_with)
    return scores


def load_anew(
    directory: str,
    room: Room,
    trust_remote_code: bool = False,
    head: NewHead | None = None,
    storage: Storage | None = None,
    kept: Sequence[str] = (),
) -> Scorer:
    """Load a model directory in float32. ``head``: the scalar head to add, unless the model has one; ``storage``: of
    weights that do not train; ``kept``: the ends of names of modules that are to be copied.
    """
    config = load_config(directory, trust_remote_code)
    is_scalar = head is not None or is_reward_config(config)
    read: Any = partial(load_reward_model, head=head) if is_scalar else load_model
    streamed = None
    if room.is_streamed:
        streamed = StreamedLayers(partial(explain_load_errors, directory, "the model to compare"))
    model = read(
        directory,
        dtype=torch.float32,
        device=room.device,
        attention=select_for_proof(room.device, torch.float32, config),
        trust_remote_code=trust_remote_code,
        storage=storage,
        streamed=streamed,
    )
    if streamed is not None and kept:
        streamed.keep(lambda name: any(f".{module}." in f".{name}" for module in kept))
    return Scorer(model).eval()


def load_adapted(
    base: str,
    adapter: Path,
    new_ids: list[int],
    room: Room,
    trust_remote_code: bool,
    head: NewHead | None = None,
    storage: Storage | None = None,
) -> Scorer:
    """Load a base model in float32, its weights stored as in training, with a saved adapter, unmerged."""
    copied = adapter_settings(adapter).get("modules_to_save") or ()
    scorer = load_anew(base, room, trust_remote_code, head, storage, tuple(copied))
    model = architecture.unwrap(scorer.model)
    add_tokens(model, new_ids)
    return Scorer(apply_lora(model, LoraConfig(adapter=str(adapter)))).eval()


def room_for(model: nn.Module, device: torch.device) -> Room:
    """The room for a second copy of ``model`` in float32: ``device`` if it has as much free, the CPU where the copy is
    small; else a layer at a time, on ``device`` if it has room for that.
    """
    # a GPU with room takes all of it, or a layer at a time
    whole = 4 * architecture.num_weights(model)
    layers = [4 * architecture.num_weights(layer) for layer in architecture.layers(model)]
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        if free > SPARE * whole:
            return Room(device)
        if whole > WHOLE and free > SPARE * (whole - sum(layers) + 3 * max(layers)):
            return Room(device, is_streamed=True)
    return Room(torch.device("cpu"), is_streamed=whole > WHOLE)


@torch.no_grad()
def compare_saved(trained: Trained, reloaded: Scorer) -> list[Comparison]:
    """Compare the trained with the saved model. Afterwards ``reloaded`` has the weights before rounding, but for layers
    that are read when they run.
    """
    dtype = str(trained.dtype).removeprefix("torch.")
    scores = score(reloaded, trained.samples)
    reload = compare(
        "reload", f"trained, and reloaded from {dtype}", trained, scores, trained.dtype
    )
    # the reloaded model computes with the merged weights, each compared when it is taken
    merging = _Merging(trained, reloaded)
    with return_freed_memory(), merging.in_forwards():
        scores = score(reloaded, trained.samples)
    weights = merging.compared()
    if not weights.is_sound or not (is_adapted(trained.model) or trained.dtype in ROUNDED):
        return [weights, reload]
    merge = compare("merge", f"trained, and merged before rounding to {dtype}", trained, scores)
    return [weights, merge, reload]


class _Merging:
    """Compares each tensor of the reloaded model with the merged one while the model runs, and then lets it compute
    with that one. A layer is looked at when it begins; the rest before the first layer, or with the last.
    """

    def __init__(self, trained: Trained, reloaded: Scorer) -> None:
        self.trained, self.reloaded = trained, reloaded
        model = self.model = reloaded.model
        # tied tensors count once
        first = architecture.first_names(model)
        names = [name for name in model.state_dict() if first.get(name, name) == name]
        self.gaps = dict.fromkeys(names, torch.inf)
        """Name of a tensor -> the largest difference."""
        self.num_tensors = 0
        modules = {id(module): name for name, module in model.named_modules()}
        self._layers = {layer: f"{modules[id(layer)]}." for layer in architecture.layers(model)}
        self._prefixes = tuple(self._layers.values())
        self._groups: Iterator[dict[str, Tensor]] = iter(())
        self._next: dict[str, Tensor] = {}
        """The tensors of the layer that comes next, where they have been merged."""
        self._is_again = False

    @contextmanager
    def in_forwards(self) -> Iterator[None]:
        """Let every forward of the reloaded model compute with the merged weights."""
        with ExitStack() as hooks:
            hooks.enter_context(self.reloaded.register_forward_pre_hook(self._begin))
            for layer in self._layers:  # after it was read
                hooks.enter_context(layer.register_forward_pre_hook(self._begin_layer))
            yield

    def compared(self) -> Comparison:
        """The result, once a forward has run."""
        gaps = self.gaps.items()
        where = next((f"; the first to differ is {name}" for name, gap in gaps if gap > 0), "")
        dtype = str(self.trained.dtype).removeprefix("torch.")
        detail = f"{self.num_tensors} tensors, merged and reloaded, in {dtype}{where}"
        return Comparison("weights", max(self.gaps.values()), 0.0, detail)

    def _begin(self, *_: Any) -> None:
        self._is_again = self.num_tensors > 0
        self._groups = plain_groups(self.trained.model, self.trained.whole)
        self._next = self._take_rest()

    def _begin_layer(self, layer: nn.Module, *_: Any) -> None:
        prefix = self._layers[layer]
        self._next = self._next or self._take_rest()
        if any(name.startswith(prefix) for name in self._next):
            self._take(self._next)
        if prefix == self._prefixes[-1]:
            self._next = self._take_rest()

    def _take_rest(self) -> dict[str, Tensor]:
        """Take the tensors outside the layers, up to the next layer, whose tensors are returned."""
        for group in self._groups:
            if any(name.startswith(self._prefixes) for name in group):
                return group
            self._take(group)
        return {}

    def _take(self, group: dict[str, Tensor]) -> None:
        """Compare some tensors and compute with them. ``group`` is emptied."""
        while group:
            name, merged = group.popitem()
            self.num_tensors += not self._is_again
            place, _, key = name.rpartition(".")
            module = self.model.get_submodule(place)
            tensors: Any = module._parameters if key in module._parameters else module._buffers
            tensor = tensors.get(key)
            if tensor is None or tensor.shape != merged.shape:
                continue
            if not self._is_again:  # then it would be the merged one
                rounded = merged.to(self.trained.dtype, copy=True)
                gap = rounded.to(tensor.device, tensor.dtype)
                del rounded
                gap = gap.sub_(tensor).abs_().max()  # in place: it may be the largest tensor
                self.gaps[name] = float(gap.nan_to_num(nan=torch.inf))
                del gap
            if isinstance(tensor, nn.Parameter):
                tensor.copy_(merged)
            else:  # of a layer that is dropped after it has run, or a buffer; often a view of the file
                tensors[key] = merged.to(tensor.device, tensor.dtype)
            del tensor, merged


def compare_adapted(trained: Trained, adapted: Scorer) -> Comparison:
    """Compare the trained model with the base model that has the saved adapter."""
    scores = score(adapted, trained.samples)
    return compare("adapter", "trained, and the base model with the saved adapter", trained, scores)


def compare(
    name: str,
    what: str,
    trained: Trained,
    scores: Sequence[Tensor],
    saved: torch.dtype = torch.float32,
) -> Comparison:
    """Compare two models' scores of the same samples. ``saved``: the dtype of the second model's weights on disk."""
    # the sample and the token that differ most
    gaps = [
        (left.double() - right.double()).abs().nan_to_num(nan=torch.inf)
        for left, right in zip(trained.logps, scores, strict=True)
    ]
    worst = max(range(len(gaps)), key=lambda index: float(gaps[index].max()))
    largest, sample = float(gaps[worst].max()), trained.samples[worst]
    position = int(sample.target_at_N[int(gaps[worst].argmax())])
    every = torch.cat(gaps)
    where = f"the largest ({largest:.2g}) at {PurePath(sample.id).name}, token {position}"
    kind = "logprobs" if architecture.has_head(trained.model) else "scores"
    what = f"{kind} of {every.numel()} tokens, {what}"
    if saved in ROUNDED:
        return Comparison(name, float(every.mean()), ROUNDED[saved], f"mean over {what}; {where}")
    return Comparison(name, largest, TOLERANCE, f"{what}; {where}")


def require_sound(found: Sequence[Comparison]) -> None:
    """Raise CheckFailed for the first comparison that failed."""
    for comparison in found:
        if not comparison.is_sound:
            raise CheckFailed(
                f"{comparison.name}: the saved model is not the trained one: found a difference of "
                f"{comparison.value:.3g} ({comparison.detail}); expected at most {comparison.tolerance:g}; nothing was "
                "put in place; please report the model"
            )
