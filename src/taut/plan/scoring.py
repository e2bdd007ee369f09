"""What scoring a rollout takes of a rank, before it is trained on: the most that one forward makes of a model that
judges completions or teaches them. These run one after another, without gradients, while no activations are kept.

A reward model takes ``tokens_per_batch`` tokens at a time, or what a rollout has; a teacher, and another model as the
reference, a micro-batch. Traced as a step is (tracing.py); of layers alike a few, since nothing of a layer is kept. The
forwards of policy and critic are left out: a step is more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig

from taut.inference.open import inference_context
from taut.methods.method import RunConfig
from taut.methods.online import OnlineMethod
from taut.models import architecture
from taut.models.precision import compute_context
from taut.models.scorer import Scorer, traced_for
from taut.plan.models import (
    REWARDS,
    Kernels,
    frozen_model,
    judge_dtype,
    judge_model,
    judges_of,
    model_config,
    with_layers,
)
from taut.plan.steps import Supply
from taut.plan.tracing import CPU, Shapes, depths_of, known_parts, on_fakes, readable
from taut.types import Packed, Wants


class _Forward(NamedTuple):
    """A model, and what it is given at a time."""

    config: PreTrainedConfig
    make: Callable[[PreTrainedConfig], nn.Module]
    tokens: int
    wants: Wants
    context: Callable[[], AbstractContextManager[Any]]


def scoring_of(run: RunConfig, kernels: Kernels, supply: Supply, num_ranks: int) -> int:
    """Bytes beside what training holds; 0 where a run has no such model."""
    if not isinstance(run, OnlineMethod):
        return 0
    kernels = kernels._replace(is_sharded=num_ranks > 1 or run.parallel.cpu_offload)
    samples = [sample.num_tokens for tree in supply.trees for sample in tree.samples]
    rows = -(-run.batch.samples_per_step * run.rollout.minibatches // num_ranks)
    most = rows * run.rollout.n * max(samples)
    return max(
        (_bytes(run, one, kernels, supply, most) for one in _forwards(run, kernels)), default=0
    )


def _forwards(run: RunConfig, kernels: Kernels) -> Iterator[_Forward]:
    for judge in judges_of(run, kernels):
        dtype = judge_dtype(judge, kernels)
        yield _Forward(
            model_config(judge.model, judge.trust_remote_code),
            partial(judge_model, judge, kernels),
            judge.tokens_per_batch,
            Wants(logp=False, scalar=True),
            partial(inference_context, dtype),
        )
    reference, teachers = run.models().reference, run.models().completions
    paths = [] if teachers is None else [path for _, _, path in teachers.directories]
    if reference is not None and reference.model is not None:
        paths.append(reference.model)
    for path in paths:
        yield _Forward(
            model_config(path, run.trust_remote_code),
            partial(frozen_model, run, path, kernels),
            run.batch.tokens_per_microbatch,
            Wants(),
            partial(compute_context, kernels.dtype, CPU, by_weights=kernels.by_weights),
        )


def _bytes(run: RunConfig, one: _Forward, kernels: Kernels, supply: Supply, most: int) -> int:
    """The most that a forward makes beside the model's weights."""
    depth = depths_of(run, REWARDS, one.make(one.config))[0]
    scorer = Scorer(one.make(with_layers(one.config, depth))).eval()
    packed: Packed = readable(supply.filled(min(one.tokens, most)))
    vocabulary = architecture.head(scorer.model).weight.shape[0] if one.wants.logp else None

    def act(mode: FakeTensorMode) -> dict[str, int]:
        ledger = Shapes(known_parts(scorer), vocabulary, None)
        with torch.no_grad(), ledger, one.context(), traced_for(kernels.gpu_memory):
            scorer(packed, wants=one.wants)
        return ledger.history().peak()

    parts: dict[str, int] = on_fakes(run, scorer, act)
    return sum(parts[name] for name in ("casts", "activations", "logits", "temporary"))
