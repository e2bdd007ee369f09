"""Trace one micro-batch, forward and backward, on fake tensors: its memory is counted, not estimated.

The trace runs the code of a real run: the library's model, adapters, freezing, noise, activation checkpointing,
autocast, the chunked head, and the selected attention, on torch's fake tensors, which have a shape, a dtype and a
storage size but no memory. ``Ledger`` counts the bytes. There is no formula per architecture, and nothing is fitted.

For a GPU that this machine lacks the fake tensors are on the CPU, and attention is that of ``varlen`` (q, k, v, out and
log-sum-exp are saved), also with softcap or sinks: flex saves the same.

A deep model is traced with two small numbers of layers: every part grows by the same amount per period of layers, so
the peaks of the forward and of the backward's two halves are extrapolated linearly. Where the layers do not repeat, all
are traced.

A reference adds its own bytes only: it runs before the first backward, when no activations are kept.

Not included: separately trained rows, added tokens, buffers created while loading.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from taut.attention import varlen
from taut.attention.layout import Call, Layout
from taut.errors import ModelError
from taut.methods.method import RunConfig
from taut.models import architecture
from taut.models.attention_backends import PREFIX
from taut.models.frozen import store
from taut.models.load import freeze, load_skeleton, quiet_library
from taut.models.lora import apply_lora
from taut.models.noise import install_noise
from taut.models.precision import backward_context, compute_context
from taut.models.quantised import constants_of, pretend, quantised_layers, require_dense
from taut.models.reward_model import reward_skeleton
from taut.models.scorer import Scorer, traced_for
from taut.plan.ledger import PARTS, History, Ledger, Parts, Shares, fullest
from taut.run.setup import storage_for
from taut.types import IntArray, Packed

FUSED = PREFIX + "estimate"
"""The attention of a GPU that this machine lacks, by its name in the library."""
CPU = torch.device("cpu")


class Kernels(NamedTuple):
    """What the memory of the computation depends on."""

    dtype: torch.dtype
    attention: str
    """Its name in the library's registry."""
    gpu_memory: int | None = None
    """Of the GPU, in bytes: the head's chunks are a part of it. None: a CPU."""


class Sizes(NamedTuple):
    """Bytes of parameters: all of them, those of the largest layer, and those outside the layers."""

    all: int
    layer: int
    rest: int


@dataclass(frozen=True)
class Traced:
    """The memory of a micro-batch on one device with the whole model."""

    histories: tuple[History, ...]
    """The histories of the whole model, or with two smaller numbers of layers. Without the optimizer's state."""
    depths: tuple[int, ...]
    """The number of layers of each history."""
    num_layers: int
    weights: Sizes
    trained: Sizes
    optimizer: int
    reference: int
    """Bytes of the reference: a copy of the trained parameters, or another model."""
    passes: int
    """Additional forwards of a step: of a reference, and for statistics."""
    is_linear: bool
    """Whether the head's gradient is computed in the forward; else its logits are computed twice."""
    adapters: int
    """Bytes of the trained parameters in the layers that no rank divides with others: those of LoRA."""
    num_parameters: int
    num_trained: int
    flops: architecture.Flops

    @property
    def head_flops(self) -> float:
        """Operations of the head per target: the three products that ``flops`` counts, and the additional ones."""
        return self.flops.per_target * (1 + (self.passes + (not self.is_linear)) / 3)

    @property
    def operators(self) -> int:
        """Number of operators of forward and backward, each at least one kernel; linear in the number of layers."""
        counts = [history.operators for history in self.histories]
        if len(counts) == 1:
            return counts[0]
        (few, many), (less, more) = self.depths, counts
        return round(less + (self.num_layers - few) / (many - few) * (more - less))

    def parts(self, shares: Shares = MappingProxyType({})) -> Parts:
        """Full sizes of the parts at the peak; ``shares`` decide which moment is the peak."""
        peaks = [history.peaks(shares) for history in self.histories]
        if len(peaks) == 1:
            return fullest(peaks[0], shares)
        (few, many), (less, more) = self.depths, peaks
        steps = (self.num_layers - few) / (many - few)
        extrapolated = [
            {part: round(low[part] + steps * (high[part] - low[part])) for part in PARTS}
            for low, high in zip(less, more, strict=True)
        ]
        return fullest(extrapolated, shares)


def skeleton(run: RunConfig, config: PreTrainedConfig) -> PreTrainedModel:
    """The initial model on the meta device, with the language model's head or a scalar one."""
    head, config = run.new_head(), copy.deepcopy(config)
    if head is None:
        return load_skeleton(run.model, config, run.trust_remote_code)
    return reward_skeleton(run.model, config, head, run.trust_remote_code)


def planned_model(run: RunConfig, config: PreTrainedConfig, kernels: Kernels) -> nn.Module:
    """The trained model on the meta device, with adapters and freezing."""
    base = skeleton(run, config)
    base.double() if kernels.dtype == torch.float64 else base.float()  # type: ignore[no-untyped-call]
    device = torch.device("cuda" if kernels.attention == FUSED else "cpu")
    storage = storage_for(run, config, kernels.dtype, device)
    if storage is not None:
        if storage.quantise is not None:
            require_dense(run.model, config, storage.quantise)
            pretend(base, storage.quantise, storage.whole)
        store(base, storage)
    with quiet_library():
        base.set_attn_implementation(kernels.attention)
    return adapted(run, base)


def adapted(run: RunConfig, base: PreTrainedModel) -> nn.Module:
    """The model with the run's adapters and freezing, in train mode."""
    model = apply_lora(base, run.lora, run.seed)
    if run.freeze:
        freeze(model, run.freeze)
    if run.activation_checkpointing:
        architecture.recompute_activations(model)
    return model.train()


def require_predictable(run: RunConfig, config: PreTrainedConfig) -> None:
    """Raise ModelError for a run with parts whose memory is not modelled here."""
    if (name := run.models().unpredicted) is not None:
        raise ModelError(
            f"found a run of {run.command()}: what a {name} takes is not predicted; expected one "
            f"without a {name}; measure it with a short run instead"
        )
    if architecture.takes_pictures(config):
        raise ModelError(
            f"model={run.model} takes pictures: what a vision tower takes is not predicted; expected a model of text; "
            "measure it with a short run instead"
        )


def trace(
    run: RunConfig, config: PreTrainedConfig, kernels: Kernels, packed: Packed, *, is_first: bool
) -> Traced:
    """The memory of one micro-batch. ``is_first``: no gradients exist before it."""
    require_predictable(run, config)
    model = planned_model(run, config, kernels)
    trained = [p for p in model.parameters() if p.requires_grad]
    known: dict[str, Any] = {
        name: _Known(value)
        for name in ("reach_T", "last_T", "predictor_N", "read_R")
        if (value := getattr(packed, name)) is not None
    }
    packed = replace(packed, host=replace(packed, **known))
    depths = _depths(run, model)
    histories = []
    for depth in depths:
        shallow = planned_model(run, with_layers(config, depth), kernels)
        histories.append(_history(run, shallow, kernels, packed, is_first=is_first))
    of_trained = _sizes(model, trained)
    return Traced(
        histories=tuple(histories),
        depths=depths,
        num_layers=len(architecture.layers(model)),
        weights=_sizes(model, _stored(model)),
        trained=of_trained,
        optimizer=2 * sum(p.nbytes for p in trained),
        reference=run.models().reference_bytes(run, trained),
        passes=run.extra_forwards(),
        is_linear=run.loss().linear_weights(packed) is not None,
        adapters=(of_trained.all - of_trained.rest) if run.lora.is_on else 0,
        num_parameters=architecture.num_weights(model),
        num_trained=sum(p.numel() for p in trained),
        flops=architecture.flops(model),
    )


def with_layers(config: PreTrainedConfig, depth: int) -> PreTrainedConfig:
    """The configuration with only the first ``depth`` layers."""
    shallow = copy.deepcopy(config)
    text: Any = shallow.get_text_config()
    before = text.num_hidden_layers
    for name, value in text.to_dict().items():
        if isinstance(value, list) and len(value) == before:
            setattr(text, name, value[:depth])
    text.num_hidden_layers = depth
    return shallow


def period(model: nn.Module) -> int:
    """The period after which layers repeat; the number of layers where they do not."""
    kinds = architecture.layer_types(model)
    alike = [
        (kind, [(name, tuple(p.shape)) for name, p in layer.named_parameters()])
        for kind, layer in zip(kinds, architecture.layers(model), strict=True)
    ]
    count = len(alike)
    return next(n for n in range(1, count + 1) if alike[n:] == alike[: count - n])


def _depths(run: RunConfig, model: nn.Module) -> tuple[int, ...]:
    """The numbers of layers to trace: all, or two smaller ones."""
    count, every = len(architecture.layers(model)), period(model)
    names_layers = run.freeze or run.lora.adapter or run.lora.targets != "all-linear"
    return (count,) if names_layers or count <= 5 * every else (3 * every, 4 * every)


def _history(
    run: RunConfig, model: nn.Module, kernels: Kernels, packed: Packed, *, is_first: bool
) -> History:
    """The history of a forward and a backward on fake tensors."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _to_empty(model)
            noise = install_noise(model, run.noise, run.seed)
            if noise is not None:
                noise.set(1, packed)
            scorer = Scorer(model)
            parameters = list(scorer.parameters())
            for parameter in parameters:
                if parameter.requires_grad and not is_first:
                    parameter.grad = torch.empty_like(parameter)
            has_head = architecture.has_head(model)
            ledger = _Shapes(
                {
                    "weights": [*parameters, *scorer.buffers()],
                    "gradients": [p.grad for p in parameters if p.grad is not None],
                },
                architecture.head(model).weight.shape[0] if has_head else None,
            )
            ledger.watch_gradients(parameters)
            with ledger:
                with compute_context(kernels.dtype, CPU), traced_for(kernels.gpu_memory):
                    total = _proxy_loss(run, scorer, packed)
                ledger.end_forward()
                with backward_context(kernels.dtype), traced_for(kernels.gpu_memory):
                    total.backward()
            return ledger.history()
    except (RuntimeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"model={run.model} cannot be run on tensors without contents: {reason}; expected a model whose shapes do "
            "not depend on what it computes; measure it with a short run instead"
        ) from error


def _proxy_loss(run: RunConfig, scorer: Scorer, packed: Packed) -> Any:
    """A scalar that depends on all scores that the loss uses, through the same path of the head; the memory of the loss
    itself is negligible.
    """
    loss = run.loss()
    linear = loss.linear_weights(packed)
    if linear is not None:
        return scorer(packed, torch.stack([*linear.values()]).sum(0), loss.wants).linear_sum
    scores = scorer(packed, wants=loss.wants)
    if "entropy" in loss.units:
        return (scores.logp_N + scores.entropy_N).sum()
    return (scores.logp_N if loss.wants.logp else scores.scalar_R).sum()


def _to_empty(model: nn.Module) -> None:
    """Move a model off the meta device; tied parameters stay tied."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device=CPU)
    for (first, key), *others in places.values():
        for module, name in others:
            setattr(module, name, getattr(first, key))


class _Shapes(Ledger):  # type: ignore[no-untyped-call]  # torch: no types
    """A ledger for fake tensors. Their items are 1; grouped_mm has no fake implementation in float32."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        if func is torch.ops.aten._grouped_mm.default:
            left, right, *rest = args
            offs = rest[0] if rest else kwargs.get("offs")
            batch = left.shape[:-2]  # one matrix per group of rows
            if left.ndim == right.ndim == 2 and offs is not None:
                batch = (offs.shape[0],)  # the matrices' gradient: groups are along the summed axis
            return left.new_empty((*batch, left.shape[-2], right.shape[-1]))
        return func(*args, **kwargs)


class _Known(Tensor):
    """A tensor that is read on the host inside a mode without tensor contents."""

    _read: IntArray

    def __new__(cls, tensor: Tensor) -> _Known:
        made = Tensor._make_subclass(cls, torch.empty(0))
        made._read = tensor.numpy()
        return made

    def numpy(self, *, force: bool = False) -> Any:
        return self._read


def _sizes(model: nn.Module, parameters: Iterable[Tensor]) -> Sizes:
    sizes = {id(p): p.nbytes for p in parameters}
    layers = [
        sum(sizes.get(id(p), 0) for p in _stored(layer)) for layer in architecture.layers(model)
    ]
    total = sum(sizes.values())
    return Sizes(total, max(layers), total - sum(layers))


def _stored(module: nn.Module) -> list[Tensor]:
    """Parameters, and what quantised ones need next to them."""
    constants = (tensor for _, layer in quantised_layers(module) for tensor in constants_of(layer))
    return [*module.parameters(), *constants]


def _fused(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    taut_layout: Layout,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Attention for its shapes only. q [1, H, T, K] -> ([1, T, H, K], None)."""
    if torch.is_autocast_enabled("cpu"):
        narrow = torch.get_autocast_dtype("cpu")
        query, key, value = (x.to(narrow) for x in (query, key, value))
    out = varlen.attend(query, key, value, taut_layout, Call(1.0))
    return out.transpose(1, 2).contiguous(), None


_register: Callable[..., None] = AttentionInterface.register
_register(FUSED, _fused)
