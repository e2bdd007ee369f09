"""Trace one micro-batch, forward and backward, on fake tensors: its memory is counted, not estimated.

The trace runs the code of a real run: the library's model, adapters, freezing, noise, activation checkpointing,
autocast, the chunked head, the selected attention, a teacher, a critic and a vision tower, on torch's fake tensors,
which have a shape, a dtype and a storage size but no memory. ``Allocations`` counts the bytes. There is no formula per
architecture, and nothing is fitted.

For a GPU that this machine lacks the fake tensors are on the CPU, and attention is that of ``varlen`` (q, k, v, out and
log-sum-exp are saved), also with softcap or sinks: flex saves the same.

A deep model is traced with two small numbers of layers: every part grows by the same amount per period of layers, so
the peak of each phase is extrapolated linearly; where several models run, in the layers of each. Where the layers do
not repeat, all are traced. A vision tower is traced whole.

References, reward models and teachers that score completions add their own bytes only: they run before the first
backward, when no activations are kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, PreTrainedConfig, masking_utils

from taut.attention import varlen
from taut.attention.layout import Call, Layout
from taut.errors import ModelError
from taut.io.replaced import replaced
from taut.methods.method import RunConfig
from taut.models import architecture
from taut.models.heads import OwnCritic
from taut.models.noise import install_noise
from taut.models.precision import backward_context, compute_context
from taut.models.scorer import Scorer, traced_for
from taut.models.teacher import ModelTeacher
from taut.plan.allocations import PARTS, Allocations, History, Parts, Shares, fullest
from taut.plan.fake_values import FakeValues
from taut.plan.models import (
    CRITIC,
    FUSED,
    POLICY,
    TEACHER,
    Configs,
    Kernels,
    ModelFootprint,
    configs_of,
    deep,
    gather,
    held,
    period,
    planned_scorer,
    with_layers,
)
from taut.plan.trace_cache import kept
from taut.types import IntArray, Media, Packed, Picture

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Traced:
    """The memory of a micro-batch on one device with the whole models."""

    histories: tuple[History, ...]
    """The first with few layers of every model that is deep; each of the others with more layers of one."""
    steps: tuple[float, ...]
    """For each of the others, how often its difference from the first is to be added for all layers."""
    models: tuple[ModelFootprint, ...]
    """The models of the run; the policy first."""
    num_tokens: int
    passes: int
    """Additional forwards of a step: of a reference, and for statistics."""
    head_passes: int
    """Additional forwards that compute the head."""
    is_linear: bool
    """Whether the head's gradient is computed in the forward; else its logits are computed twice."""

    @property
    def policy(self) -> ModelFootprint:
        """The model that trains."""
        return self.models[0]

    @property
    def flops(self) -> architecture.Flops:
        """Operations of the policy's products."""
        assert self.policy.flops is not None
        return self.policy.flops

    @property
    def head_flops(self) -> float:
        """Operations of the head per target: the three products that ``flops`` counts, and the additional ones."""
        return self.flops.per_target * (1 + (self.head_passes + (not self.is_linear)) / 3)

    @property
    def operators(self) -> int:
        """Number of operators of forward and backward, each at least one kernel."""
        return self._extrapolated([history.operators for history in self.histories])

    @property
    def offloaded(self) -> int:
        """Bytes of activations in the host's memory."""
        return self._extrapolated([history.host for history in self.histories])

    def _extrapolated(self, counts: Sequence[int]) -> int:
        """Extrapolate a count of each history to the whole models, linear in the number of layers."""
        first, *others = counts
        return round(first + sum(n * (m - first) for n, m in zip(self.steps, others, strict=True)))

    def parts(self, shares: Shares = MappingProxyType({})) -> Parts:
        """Full sizes of the parts at the peak; ``shares`` decide which moment is the peak."""
        first, *others = (history.peaks(shares) for history in self.histories)
        assert all(len(peaks) == len(first) for peaks in others), "the same phases"
        moments = []
        for number, low in enumerate(first):
            highs = [peaks[number] for peaks in others]
            moments.append(
                {p: self._extrapolated([low[p], *(high[p] for high in highs)]) for p in PARTS}
            )
        parts = fullest(moments, shares)
        for model in self.models:
            if model.is_apart:
                parts[model.part] += model.weights.all
        return parts


@kept
def trace(
    run: RunConfig, config: PreTrainedConfig, kernels: Kernels, packed: Packed, *, is_first: bool
) -> Traced:
    """The memory of one micro-batch. ``is_first``: no gradients exist before it."""
    packed = readable(packed)
    configs = configs_of(run, config)
    scorer = planned_scorer(run, configs, kernels)
    # a few layers of every deep model, and then more of each in turn
    depths = {part: depths_of(run, part, model) for part, model in deep(scorer).items()}
    few = {part: with_layers(configs[part], depth[0]) for part, depth in depths.items()}
    has_tower = any(architecture.has_parts(model) for model in deep(scorer).values())
    idle = _idle(run, few, kernels) if has_tower else []
    for name, parameter in scorer.named_parameters():
        if name in idle:
            parameter.requires_grad_(False)
    chosen, steps = [few], []
    for part, depth in depths.items():
        if len(depth) > 1:
            chosen.append({**few, part: with_layers(configs[part], depth[1])})
            count = len(architecture.layers(deep(scorer)[part]))
            steps.append((count - depth[0]) / (depth[1] - depth[0]))
    return Traced(
        histories=tuple(
            _history(run, some, kernels, packed, idle, is_first=is_first).thinned()
            for some in chosen
        ),
        steps=tuple(steps),
        models=held(run, scorer, kernels),
        num_tokens=packed.num_tokens,
        passes=run.extra_forwards(),
        head_passes=run.extra_head_passes(),
        is_linear=run.loss().linear_weights(packed) is not None,
    )


def depths_of(run: RunConfig, part: str, model: nn.Module) -> tuple[int, ...]:
    """The numbers of layers to trace: all, or two smaller ones."""
    count, every = len(architecture.layers(model)), period(model)
    names_layers = run.freeze or run.lora.adapter or run.lora.targets != "all-linear"
    is_named = part == POLICY and names_layers
    # In the middle of a backward two offloaded inputs are on the device, at its end one: half of it must have both.
    few = 4 if run.activation_checkpointing == "offload" else 3
    is_short = count <= (few + 2) * every
    return (count,) if is_named or is_short else (few * every, (few + 1) * every)


def _history(
    run: RunConfig,
    configs: Configs,
    kernels: Kernels,
    packed: Packed,
    idle: Sequence[str],
    *,
    is_first: bool,
) -> History:
    """The history of a forward and a backward on fake tensors."""
    scorer = planned_scorer(run, configs, kernels)
    gather(run, scorer, kernels)
    by_weights = kernels.by_weights

    def act(mode: FakeTensorMode) -> History:
        # prepare the scorer as a step finds it
        noise = install_noise(scorer.model, run.noise, run.seed)
        if noise is not None:
            noise.set(1, packed)
        parameters = dict(scorer.named_parameters())
        for name, parameter in parameters.items():
            if name in idle:
                parameter.requires_grad_(False)
            if parameter.requires_grad and not is_first:
                parameter.grad = torch.empty_like(parameter)
        # record the allocations of a forward and a backward
        has_head = architecture.has_head(scorer.model)
        vocabulary = architecture.head(scorer.model).weight.shape[0] if has_head else None
        values = FakeValues(mode) if architecture.has_parts(scorer.model) else None
        allocations = Shapes(known_parts(scorer), vocabulary, values)
        handles = [
            *allocations.watch_gradients(parameters.values()),
            *_mark_phases(scorer, allocations),
        ]
        with allocations:
            with (
                compute_context(kernels.dtype, CPU, by_weights=by_weights),
                traced_for(kernels.gpu_memory),
            ):
                total = _proxy_loss(run, scorer, packed, allocations)
            allocations.end_forward()
            with backward_context(kernels.dtype), traced_for(kernels.gpu_memory):
                total.backward()
        for handle in handles:
            handle.remove()
        return allocations.history()

    found: History = on_fakes(run, scorer, act)
    return found


def known_parts(scorer: Scorer) -> dict[str, list[Tensor]]:
    """Part -> the tensors of a scorer that exist before a micro-batch."""
    critic, teacher = scorer.critic, scorer.teacher
    own = [] if critic is None else [*critic.parameters(), *critic.buffers()]
    theirs: list[Tensor] = []
    if isinstance(teacher, ModelTeacher):
        theirs = [*teacher.scorer.parameters(), *teacher.scorer.buffers()]
    gradients = [p.grad for p in scorer.parameters() if p.grad is not None]
    return {
        CRITIC: own,
        TEACHER: theirs,
        POLICY: [*scorer.model.parameters(), *scorer.model.buffers()],
        "gradients": gradients,
    }


def _mark_phases(scorer: Scorer, allocations: Allocations) -> list[Any]:
    """Mark where one model's work ends and another's begins; the handles that remove the hooks."""
    handles: list[Any] = []
    if isinstance(scorer.teacher, ModelTeacher):
        root = scorer.teacher.scorer.model
        handles.append(root.register_forward_hook(lambda *_: allocations.mark("teacher")))
    for part, model in deep(scorer).items():
        if part == TEACHER:
            continue

        def mark(_: Any, inputs: Any, keywords: Any, name: str = part) -> None:
            hidden = inputs[0] if inputs else keywords["hidden_states"]
            allocations.mark(f"{name} begins its layers")
            if hidden.requires_grad:
                hidden.register_hook(
                    lambda _: allocations.mark(f"{name} went back through its layers")
                )

        first = architecture.layers(model)[0]
        handles.append(first.register_forward_pre_hook(mark, with_kwargs=True))
    return handles


def _idle(run: RunConfig, configs: Configs, kernels: Kernels) -> list[str]:
    """The parameters of vision towers that no feature depends on, by name; the run freezes them."""
    scorer = planned_scorer(run, configs, kernels)
    models = {"model": scorer.model}
    if isinstance(scorer.critic, OwnCritic):
        models["critic.model"] = scorer.critic.model
    found: list[str] = []

    def act(mode: FakeTensorMode) -> list[str]:
        with Shapes({}, None, FakeValues(mode)):
            for prefix, model in models.items():
                found.extend(f"{prefix}.{name}" for name in architecture.freeze_unused(model))
        return found

    on_fakes(run, scorer, act)
    return found


def on_fakes(run: RunConfig, scorer: Scorer, act: Callable[[FakeTensorMode], Any]) -> Any:
    """The result of ``act`` on a scorer whose tensors are fake. Raises ModelError where the model cannot be so run."""
    try:
        with (
            FakeTensorMode(allow_non_fake_inputs=True) as mode,
            warnings.catch_warnings(),
            # the library leaves out a mask that hides nothing, as where tensors have contents
            replaced(masking_utils, is_tracing=lambda _: False),
        ):
            warnings.simplefilter("ignore")
            _to_empty(scorer)
            if isinstance(scorer.teacher, ModelTeacher):
                _to_empty(scorer.teacher.scorer)
            return act(mode)
    except (RuntimeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"model={run.model} cannot be run on tensors without contents: {reason}; expected shapes that do not "
            "depend on its numbers; measure a short run instead"
        ) from error


def _proxy_loss(run: RunConfig, scorer: Scorer, packed: Packed, allocations: Allocations) -> Any:
    """A scalar that depends on all scores that the loss uses, through the same path of the head; the memory of the loss
    itself is negligible.
    """
    loss = run.loss()
    wants = loss.wants._replace(routers=scorer.routers is not None)
    # the path through the head that the loss takes
    linear = loss.linear_weights(packed)
    if linear is not None:
        scores = scorer(packed, torch.stack([*linear.values()]).sum(0), wants)
        used = [scores.linear_sum]
    else:
        scores = scorer(packed, wants=wants)
        used = [scores.logp_N] if loss.wants.logp else []
    if scores.router_prob_LE is not None:
        used.append(scores.router_prob_LE)
    if "entropy" in loss.units:
        used.append(scores.entropy_N)
    if scores.scalar_R is not None:
        scores.scalar_R.register_hook(lambda _: allocations.mark("the critic begins to go back"))
        used.append(scores.scalar_R)
    return torch.stack([value.sum() for value in used]).sum()


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


class Shapes(Allocations):  # type: ignore[no-untyped-call]  # torch: no types
    """Allocations of fake tensors. Items that are not known are 1; grouped_mm has no fake implementation in float32."""

    def __init__(
        self,
        known: Mapping[str, Sequence[Tensor]],
        vocabulary: int | None,
        values: FakeValues | None,
    ) -> None:
        """``values``: the numbers behind fake tensors; None if nothing depends on them, as without pictures."""
        self.values = values
        super().__init__(known, vocabulary)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            left, right, *rest = args
            offs = rest[0] if rest else kwargs.get("offs")
            batch = left.shape[:-2]  # one matrix per group of rows
            if left.ndim == right.ndim == 2 and offs is not None:
                batch = (offs.shape[0],)  # the matrices' gradient: groups are along the summed axis
            return left.new_empty((*batch, left.shape[-2], right.shape[-1]))
        if self.values is not None:
            return self.values.call(func, args, kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **kwargs)

    def freed(self, storage: int) -> None:
        if self.values is not None:
            self.values.forget(storage)


# -- what is read on the host


def readable(packed: Packed) -> Packed:
    """The micro-batch with its layout and its pictures ready to be read where tensors have no contents."""
    known: dict[str, Any] = {
        name: _Known(value)
        for name in ("reach_T", "last_T", "predictor_N", "read_R")
        if (value := getattr(packed, name)) is not None
    }
    media = tuple(replace(medium, picture=_Read.of(medium)) for medium in packed.media)
    return replace(packed, host=replace(packed, **known), media=media)


@dataclass(frozen=True)
class _Read:
    """A picture whose tensors are read."""

    digest: str
    source: str
    content: str
    num_pictures: int
    read: Mapping[str, Tensor]

    @staticmethod
    def of(medium: Media) -> Picture:
        picture = medium.picture
        if isinstance(picture, _Read):
            return picture
        facts = picture.digest, picture.source, picture.content, picture.num_pictures
        return _Read(*facts, picture.tensors())

    def expect(self) -> None:
        """Nothing to read."""

    def tensors(self) -> Mapping[str, Tensor]:
        return self.read


class _Known(Tensor):
    """A tensor that is read on the host inside a mode without tensor contents."""

    _read: IntArray

    def __new__(cls, tensor: Tensor) -> _Known:
        made = Tensor._make_subclass(cls, torch.empty(0))
        made._read = tensor.numpy()
        return made

    def numpy(self, *, force: bool = False) -> Any:
        return self._read


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
    if taut_layout.kept is not None:
        taut_layout.kept[module] = (key, value)
    out = varlen.attend(query, key, value, taut_layout, Call(1.0))
    return out.transpose(1, 2).contiguous(), None


_register: Callable[..., None] = AttentionInterface.register
_register(FUSED, _fused)
