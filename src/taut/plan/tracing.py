"""One micro-batch, forward and backward, on tensors without contents: what it would hold, counted and not guessed.

The run's own code is what is run: the library's model, adapters, freezing, noise, checkpointing, autocast, the
chunked head, and the attention that would be in force; each on torch's fake tensors, which have a shape, a dtype and a
storage of the right size and no memory. ``Ledger`` keeps the book. So there is no formula per architecture, and nothing
is fitted.

For a GPU that is not here the fake tensors are on the CPU, and attention is that of ``varlen`` (q, k, v, out and
log-sum-exp are kept) whatever softcap or sinks there are: what flex keeps is the same.

A deep model is run with few layers, twice: from one number of layers to the next every part grows by the same (its
layers are alike, or come round alike; where they do not all are run), so that the fullest moments of the forward, of
the backward's beginning and of its end lie on straight lines.

A reference is held besides, and has its turn before the first backward, when nothing is kept for one: it adds what it
holds, and no more.

Left out: rows that train by themselves, added tokens, buffers that are made while loading.

Imports build and below. The package and its tests import it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from taut.attention import varlen
from taut.attention.layout import Call, Layout
from taut.attention.select import PREFIX
from taut.errors import ModelError
from taut.losses import Loss
from taut.methods.method import RunConfig
from taut.models import architecture
from taut.models.load import freeze, load_skeleton, quiet_library
from taut.models.lora import apply_lora
from taut.models.noise import install_noise
from taut.models.precision import backward_context, compute_context
from taut.models.reward_model import reward_skeleton
from taut.models.scorer import Scorer
from taut.plan.footprint import PARTS, History, Ledger, Parts, Shares, fullest
from taut.types import IntArray, Packed

FUSED = PREFIX + "estimate"
"""The attention of a GPU that is not here, as the library knows it."""
CPU = torch.device("cpu")


class Kernels(NamedTuple):
    """What computes."""

    dtype: torch.dtype
    attention: str
    """The name it is registered under with the library."""


class Sizes(NamedTuple):
    """Bytes of parameters: all of them, those of the largest layer, and those outside the layers."""

    all: int
    layer: int
    rest: int


@dataclass(frozen=True)
class Traced:
    """What a micro-batch holds on one device that has the whole model."""

    histories: tuple[History, ...]
    """Of the whole model, or of it with two smaller numbers of layers. Without the optimizer's state."""
    depths: tuple[int, ...]
    """How many layers they have."""
    num_layers: int
    weights: Sizes
    trained: Sizes
    optimizer: int
    reference: int
    """Bytes of what the policy is measured against: a copy of what trains, or another model."""
    passes: int
    """Forwards of a step beside the one that is trained through: of a reference, and for statistics."""
    is_linear: bool
    """Whether the head's gradient is formed in the forward; else its logits are computed twice."""
    num_parameters: int
    num_trained: int
    flops: architecture.Flops

    @property
    def head_flops(self) -> float:
        """Operations of the head on a target: of the three products that ``flops`` counts, and of those beside."""
        return self.flops.per_target * (1 + (self.passes + (not self.is_linear)) / 3)

    @property
    def operators(self) -> int:
        """How many operators run forward and backward, each a kernel at least. Every layer adds as many."""
        counts = [history.operators for history in self.histories]
        if len(counts) == 1:
            return counts[0]
        (few, many), (less, more) = self.depths, counts
        return round(less + (self.num_layers - few) / (many - few) * (more - less))

    def parts(self, shares: Shares = MappingProxyType({})) -> Parts:
        """Bytes at the fullest moment, in full; ``shares`` say which moment that is."""
        peaks = [history.peaks(shares) for history in self.histories]
        if len(peaks) == 1:
            return fullest(peaks[0], shares)
        (few, many), (less, more) = self.depths, peaks
        steps = (self.num_layers - few) / (many - few)
        found = [
            {part: round(low[part] + steps * (high[part] - low[part])) for part in PARTS}
            for low, high in zip(less, more, strict=True)
        ]
        return fullest(found, shares)


def skeleton(run: RunConfig, config: PreTrainedConfig) -> PreTrainedModel:
    """The model a run starts from, on the meta device: with its language model's head, or a scalar one."""
    head, config = run.new_head(), copy.deepcopy(config)
    if head is None:
        return load_skeleton(run.model, config, run.trust_remote_code)
    return reward_skeleton(run.model, config, head, run.trust_remote_code)


def planned_model(run: RunConfig, config: PreTrainedConfig, kernels: Kernels) -> nn.Module:
    """The model a run trains, on the meta device: adapters on, what is frozen frozen."""
    base = skeleton(run, config)
    base.double() if kernels.dtype == torch.float64 else base.float()  # type: ignore[no-untyped-call]
    with quiet_library():
        base.set_attn_implementation(kernels.attention)
    return adapted(run, base)


def adapted(run: RunConfig, base: PreTrainedModel) -> nn.Module:
    """A model with the run's adapters, without what is frozen, in train mode."""
    model = apply_lora(base, run.lora, run.seed)
    if run.freeze:
        freeze(model, run.freeze)
    if run.activation_checkpointing:
        architecture.unwrap(model).activation_checkpointing_enable({"use_reentrant": False})
    return model.train()


def require_foretold(run: RunConfig, config: PreTrainedConfig) -> None:
    """Raise ModelError for a run with something whose bytes are not known here."""
    if (name := run.unpredicted_memory) is not None:
        raise ModelError(
            f"found a run of {run.command()}: what a {name} takes is not foretold; expected one "
            f"without a {name}; measure it with a short run instead"
        )
    if architecture.takes_pictures(config):
        raise ModelError(
            f"model={run.model} takes pictures: what a vision tower takes is not foretold; expected a model of text; "
            "measure it with a short run instead"
        )


def trace(
    run: RunConfig, config: PreTrainedConfig, kernels: Kernels, packed: Packed, *, is_first: bool
) -> Traced:
    """What one micro-batch holds. ``is_first``: no gradient is there before it."""
    require_foretold(run, config)
    model = planned_model(run, config, kernels)
    trained = [p for p in model.parameters() if p.requires_grad]
    packed = replace(packed, reach_T=_Known(packed.reach_T.numpy()))
    last_T = packed.last_T
    packed = packed if last_T is None else replace(packed, last_T=_Known(last_T.numpy()))
    depths = _depths(run, model)
    histories = []
    for depth in depths:
        shallow = planned_model(run, with_layers(config, depth), kernels)
        histories.append(_history(run, shallow, kernels.dtype, packed, is_first=is_first))
    return Traced(
        histories=tuple(histories),
        depths=depths,
        num_layers=len(architecture.layers(model)),
        weights=_sizes(model, model.parameters()),
        trained=_sizes(model, trained),
        optimizer=2 * sum(p.nbytes for p in trained),
        reference=run.reference_bytes(trained),
        passes=run.extra_forwards(),
        is_linear=run.loss().linear_weights(packed) is not None,
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_trained=sum(p.numel() for p in trained),
        flops=architecture.flops(model),
    )


def with_layers(config: PreTrainedConfig, depth: int) -> PreTrainedConfig:
    """The configuration of a model of the first ``depth`` layers."""
    shallow = copy.deepcopy(config)
    text: Any = shallow.get_text_config()
    before = text.num_hidden_layers
    for name, value in text.to_dict().items():
        if isinstance(value, list) and len(value) == before:
            setattr(text, name, value[:depth])
    text.num_hidden_layers = depth
    return shallow


def period(model: nn.Module) -> int:
    """After how many layers they come round alike; all of them where they do not."""
    kinds = architecture.layer_types(model)
    alike = [
        (kind, [(name, tuple(p.shape)) for name, p in layer.named_parameters()])
        for kind, layer in zip(kinds, architecture.layers(model), strict=True)
    ]
    count = len(alike)
    return next(n for n in range(1, count + 1) if alike[n:] == alike[: count - n])


def _depths(run: RunConfig, model: nn.Module) -> tuple[int, ...]:
    """How many layers are run: all, or two smaller numbers."""
    count, every = len(architecture.layers(model)), period(model)
    names_layers = run.freeze or run.lora.adapter or run.lora.targets != "all-linear"
    return (count,) if names_layers or count <= 5 * every else (2 * every, 3 * every)


def _history(
    run: RunConfig, model: nn.Module, dtype: torch.dtype, packed: Packed, *, is_first: bool
) -> History:
    """What happens in a forward and a backward on fake tensors."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with fake, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _run(run, model, dtype, packed, is_first=is_first).history()
    except (RuntimeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"model={run.model} cannot be run on tensors without contents: {reason}; expected a model whose shapes do "
            "not depend on what it computes; measure it with a short run instead"
        ) from error


def _run(
    run: RunConfig, model: nn.Module, dtype: torch.dtype, packed: Packed, *, is_first: bool
) -> Ledger:
    """Forward and backward inside a fake mode; the book of it."""
    _to_empty(model)
    noise = install_noise(model, run.noise, run.seed)
    if noise is not None:
        noise.set(1, packed)
    scorer = Scorer(model)
    parameters = list(scorer.parameters())
    held: list[Tensor] = []
    if not is_first:
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
                held.append(parameter.grad)
    vocabulary = architecture.head(model).weight.shape[0] if architecture.has_head(model) else None
    known = {"weights": [*parameters, *scorer.buffers()], "gradients": held}
    held = []
    ledger = _Shapes(known, vocabulary)
    del known
    ledger.watch_gradients(parameters)
    loss = run.loss()
    linear = loss.linear_weights(packed)
    with ledger:
        with compute_context(dtype, CPU):
            total = say(scorer, packed, loss, linear)
        ledger.end_forward()
        with backward_context(dtype):
            total.backward()
    return ledger


def say(scorer: Scorer, packed: Packed, loss: Loss, linear: Mapping[str, Tensor] | None) -> Any:
    """A number that depends on all that a loss is told, by the way through the head that it takes; what the loss makes
    of it is next to nothing.
    """
    wants = loss.wants
    if linear is not None:
        return scorer(packed, torch.stack([*linear.values()]).sum(0), wants).linear_sum
    scores = scorer(packed, wants=wants)
    if "entropy" in loss.units:
        return (scores.logp_N + scores.entropy_N).sum()
    return (scores.logp_N if wants.logp else scores.scalar_R).sum()


def _to_empty(model: nn.Module) -> None:
    """Off the meta device; what is one table stays one."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device=CPU)
    for (first, key), *others in places.values():
        for module, name in others:
            setattr(module, name, getattr(first, key))


class _Shapes(Ledger):  # type: ignore[no-untyped-call]  # torch: no types
    """The book of fake tensors. A number asked of one is 1; experts' product has no fake of its own in float32."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        if func is torch.ops.aten._grouped_mm.default:
            return _grouped(*args, **kwargs)
        return func(*args, **kwargs)


def _grouped(left: Tensor, right: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """The shape of ``torch.nn.functional.grouped_mm``: each group of rows with a matrix of its own."""
    is_gradient = (
        left.ndim == right.ndim == 2
    )  # of the matrices: the groups lie along what is summed
    groups = (offs.shape[0],) if is_gradient and offs is not None else ()
    batch = groups or left.shape[:-2]
    return left.new_empty((*batch, left.shape[-2], right.shape[-1]))


class _Known(Tensor):
    """An array that ``Scorer`` reads on the host, inside a mode in which torch would have no contents for it."""

    _array: IntArray

    def __new__(cls, array: IntArray) -> _Known:
        made = Tensor._make_subclass(cls, torch.empty(0))
        made._array = array
        return made

    def numpy(self, *, force: bool = False) -> Any:
        return self._array

    def to(self, *_: Any, **__: Any) -> Any:
        return self


def _sizes(model: nn.Module, parameters: Iterable[Tensor]) -> Sizes:
    sizes = {id(p): p.nbytes for p in parameters}
    layers = [
        sum(sizes.get(id(p), 0) for p in layer.parameters()) for layer in architecture.layers(model)
    ]
    total = sum(sizes.values())
    return Sizes(total, max(layers), total - sum(layers))


def _fused(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    taut_layout: Layout,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Attention of which only the shapes are wanted. q [1, H, T, K] -> ([1, T, H, K], None)."""
    if torch.is_autocast_enabled("cpu"):
        narrow = torch.get_autocast_dtype("cpu")
        query, key, value = (x.to(narrow) for x in (query, key, value))
    out = varlen.attend(query, key, value, taut_layout, Call(1.0))
    return out.transpose(1, 2).contiguous(), None


def _no_mask(**_: Any) -> None:
    """Visibility is the layout's."""


_register: Callable[..., None] = AttentionInterface.register
_register(FUSED, _fused)
AttentionMaskInterface.register(FUSED, _no_mask)
