"""Compares the trained, the merged and the reloaded model: a merge can silently lose tied tables and new tokens.

Compared are the logprobs of a few samples, every token a target (of a reward model: its score at every token), and of a
sequence of all new and stop tokens, so that the rows of embedding and head that matter most take part:

    weights   each tensor of the reloaded model is the merged one, rounded to the saved dtype: bit for bit
    merge     the merged weights, not yet rounded, in the saved directory's own configuration, against training
    reload    the saved directory as users load it, against training
    adapter   the base model with the saved adapter, against training

All are computed in float32 (float64 after training in float64), one sample at a time. The largest difference counts,
and only float32 rounding passes. Where weights are saved in fewer bits, ``reload`` reports the cost as the mean over
tokens: rounding to b significant bits moves a weight by up to 2^-b of itself (bfloat16: b = 8, at most 0.4%), and such
errors add up like noise over the layers: hundredths to tenths of a nat on average, more for tokens the model finds
unlikely. Its limit is wide; faults show in ``weights`` and ``merge``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath

import numpy as np
import torch
from torch import Tensor, nn

from taut.data.packing import ALONE, pack
from taut.errors import CheckFailed
from taut.models import architecture
from taut.models.attention_backends import select
from taut.models.frozen import Storage
from taut.models.load import is_reward_config, load_config, load_model, set_attention
from taut.models.lora import LoraConfig, Whole, apply_lora, is_adapted, plain_groups
from taut.models.precision import compute_context
from taut.models.reward_model import NewHead, load_reward_model
from taut.models.scorer import Scorer, evaluating
from taut.models.tokens import add_tokens
from taut.train import distributed
from taut.types import Media, Sample, Scores, Wants

SAMPLES = 4
"""Samples compared, in addition to the sequence of new and stop tokens."""
SAMPLE_TOKENS = 256
"""Tokens of each."""
EXTRA_TOKENS = 128
"""Largest number of new and stop tokens."""

TOLERANCE = 2e-3
"""Largest difference of a logprob (nats) that is float32 rounding: the limit of the self-test."""
ROUNDED = {torch.bfloat16: 0.5, torch.float16: 0.06}
"""Largest mean difference where weights were rounded to a dtype."""
SPARE = 1.5
"""A GPU has room for a copy of the model if it has this much more free than the copy takes."""


@dataclass(frozen=True)
class Comparison:
    """The result of one comparison."""

    name: str
    value: float
    """The largest difference."""
    tolerance: float
    """The largest that is rounding."""
    detail: str
    """What was compared, and where the (first) largest difference is."""

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
    """The first samples, cut but not within a picture, and one that has ``extra_ids`` (new tokens, stop tokens); every
    token is a target.
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
    set_attention(model, select("auto", scorer.device, dtype, model.config).implementation)
    try:
        with (
            evaluating(scorer),
            distributed.gathered_in(scorer, dtype),
            compute_context(dtype, scorer.device),
        ):
            outputs: list[Scores] = [scorer(pack([s], ALONE), wants=wants) for s in samples]
    finally:
        set_attention(model, trained_with)
    return [(o.logp_N if o.scalar_R is None else o.scalar_R).cpu() for o in outputs]


def load_anew(
    directory: str,
    device: torch.device,
    trust_remote_code: bool = False,
    head: NewHead | None = None,
    storage: Storage | None = None,
) -> Scorer:
    """Load a model directory in float32. ``head``: the scalar head to add, unless the model has one; ``storage``: of
    weights that do not train.
    """
    config = load_config(directory, trust_remote_code)
    is_scalar = head is not None or is_reward_config(config)
    read = partial(load_reward_model, head=head) if is_scalar else load_model
    model = read(
        directory,
        dtype=torch.float32,
        device=device,
        attention=select("auto", device, torch.float32, config).implementation,
        trust_remote_code=trust_remote_code,
        storage=storage,
    )
    return Scorer(model).eval()


def load_adapted(
    base: str,
    adapter: Path,
    new_ids: list[int],
    device: torch.device,
    trust_remote_code: bool,
    head: NewHead | None = None,
    storage: Storage | None = None,
) -> Scorer:
    """Load a base model in float32, its weights stored as in training, with a saved adapter, unmerged."""
    scorer = load_anew(base, device, trust_remote_code, head, storage)
    model = architecture.unwrap(scorer.model)
    add_tokens(model, new_ids)
    return Scorer(apply_lora(model, LoraConfig(adapter=str(adapter)))).eval()


def room_for(model: nn.Module, device: torch.device) -> torch.device:
    """The device with room for a second copy of ``model`` in float32: ``device``, or the CPU."""
    if device.type != "cuda":
        return device
    num_bytes = 4 * architecture.num_weights(model)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return device if free > SPARE * num_bytes else torch.device("cpu")


@torch.no_grad()
def compare_saved(trained: Trained, reloaded: Scorer) -> list[Comparison]:
    """Compare the trained with the saved model. Afterwards ``reloaded`` has the weights before rounding."""
    dtype = str(trained.dtype).removeprefix("torch.")
    scores = score(reloaded, trained.samples)
    reload = compare(
        "reload", f"trained, and reloaded from {dtype}", trained, scores, trained.dtype
    )
    first = architecture.first_names(reloaded.model)
    found = {
        name: tensor
        for name, tensor in reloaded.model.state_dict().items()
        if first.get(name, name) == name
    }
    num_tensors, gaps = 0, dict.fromkeys(found, torch.inf)
    for group in plain_groups(trained.model, trained.whole):
        while group:
            name, merged = group.popitem()
            num_tensors += 1
            tensor = found.get(name)
            if tensor is None or tensor.shape != merged.shape:
                continue
            expected = merged.to(trained.dtype).to(tensor.device, tensor.dtype)
            gaps[name] = float((expected - tensor).abs().max().nan_to_num(nan=torch.inf))
            tensor.copy_(merged)
            del merged, expected
    where = next((f"; the first to differ is {name}" for name, gap in gaps.items() if gap > 0), "")
    detail = f"{num_tensors} tensors, merged and reloaded, in {dtype}{where}"
    weights = Comparison("weights", max(gaps.values()), 0.0, detail)
    if not weights.is_sound or not (is_adapted(trained.model) or trained.dtype in ROUNDED):
        return [weights, reload]
    scores = score(reloaded, trained.samples)
    merge = compare("merge", f"trained, and merged before rounding to {dtype}", trained, scores)
    return [weights, merge, reload]


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
                f"{comparison.name}: the model that was saved is not the one that was trained: found a difference of "
                f"{comparison.value:.3g} ({comparison.detail}); expected at most {comparison.tolerance:g}; "
                "nothing was put in place; please report the model"
            )
