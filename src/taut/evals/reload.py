"""Compares the trained, the merged and the reloaded model: a merge can silently lose tied tables and new tokens.

Log-probabilities of a few samples, every token a target (of a reward model: its number at every token), and of a run
of all new and stop tokens, so that the rows of the embedding and of the head that matter most take part:

    weights   each tensor of the reloaded model is the merged one, rounded to the saved dtype: bit for bit
    merge     the merged weights, not yet rounded, in the saved directory's own configuration, against training
    reload    the saved directory as users load it, against training
    adapter   the base model with the saved adapter, against training

All are computed in float32 (training in float64 stays there), one sample at a time. The largest difference counts, and
only rounding in float32 is let through. Where weights are saved in fewer bits, ``reload`` tells what that costs, as the
mean over tokens: rounding to b significant bits moves a weight by up to 2^-b of itself (bfloat16: b = 8, at most
0.4%), and such errors add up like noise over the layers: hundredths to tenths of a nat on average, more for tokens the
model finds unlikely. Its limit is wide; faults show in ``weights`` and ``merge``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from taut.models.load import is_reward_config, load_config, load_model, set_attention
from taut.models.lora import LoraConfig, apply_lora, is_adapted, plain_model
from taut.models.precision import compute_context
from taut.models.reward_model import NewHead, load_reward_model
from taut.models.scorer import Scorer
from taut.models.tokens import add_tokens
from taut.types import Media, Sample, Scores, Wants

SAMPLES = 4
"""Samples compared, in addition to the run of new and stop tokens."""
SAMPLE_TOKENS = 256
"""How much of each."""
EXTRA_TOKENS = 128
"""New and stop tokens that take part."""

TOLERANCE = 2e-3
"""Largest difference of a log-prob (nats) that is rounding in float32: that of the proofs at start-up."""
ROUNDED = {torch.bfloat16: 0.5, torch.float16: 0.06}
"""Largest mean difference where weights were rounded to a dtype."""
SPARE = 1.5
"""A GPU has room for a copy of the model if it has this much more free than the copy takes."""


@dataclass(frozen=True)
class Comparison:
    """One question and its answer."""

    name: str
    value: float
    """The largest difference found."""
    tolerance: float
    """The largest that is rounding."""
    detail: str
    """What was compared, and where the (first) largest difference is."""

    @property
    def is_sound(self) -> bool:
        return self.value <= self.tolerance


@dataclass(frozen=True, eq=False)
class Trained:
    """The model in memory and what it says, gathered by all ranks before one of them saves."""

    model: nn.Module
    state: Mapping[str, Tensor] | None
    """The whole weights where ``model`` holds shards."""
    samples: Sequence[Sample]
    logps: Sequence[Tensor]
    """What the model in memory says of the samples."""
    dtype: torch.dtype
    """What the weights are saved in."""


def samples_to_compare(data: Sequence[Sample], extra_ids: Sequence[int]) -> list[Sample]:
    """The first samples, cut but not within a picture, and one that has ``extra_ids`` (new tokens, stop tokens); every
    token is a target.
    """
    first = [data[index] for index in range(min(SAMPLES, len(data)))]
    samples = []
    for sample in first:
        stop = max(SAMPLE_TOKENS, *(m.stop for m in sample.media if m.start < SAMPLE_TOKENS), 0)
        media = tuple(one for one in sample.media if one.stop <= stop)
        samples.append(every_token(sample.id, sample.ids_T[:stop].tolist(), media))
    stop = min(8, *(one.start for one in first[0].media), 8)
    extra = [*first[0].ids_T[:stop].tolist(), *list(dict.fromkeys(extra_ids))[:EXTRA_TOKENS]]
    return [*samples, every_token("new and stop tokens", extra)]


def every_token(name: str, ids: Sequence[int], media: tuple[Media, ...] = ()) -> Sample:
    """A sample in which each token but the first is a target, and where a scalar head is read at the same."""
    at, ids_T = np.arange(1, len(ids)), np.asarray(ids, dtype=np.int64)
    return Sample(name, ids_T, at, np.ones(at.size), media, read_at_R=at)


@torch.no_grad()
def score(scorer: Scorer, samples: Sequence[Sample]) -> list[Tensor]:
    """logp_N of each sample (a reward model's number at each read) in full precision, on the CPU. A collective where
    the model is sharded.
    """
    is_scalar = not architecture.has_head(scorer.model)
    wants = Wants(logp=not is_scalar, scalar=is_scalar)
    with _in_full_precision(scorer) as dtype, compute_context(dtype, scorer.device):
        every: list[Scores] = [scorer(pack([one], ALONE), wants=wants) for one in samples]
    return [one.logp_N.cpu() if one.scalar_R is None else one.scalar_R.cpu() for one in every]


@contextmanager
def _in_full_precision(scorer: Scorer) -> Iterator[torch.dtype]:
    """No noise, and an attention that computes in the dtype of the weights."""
    model = architecture.unwrap(scorer.model)
    before = architecture.text_config(model)._attn_implementation
    is_double = next(scorer.parameters()).dtype == torch.float64
    dtype = torch.float64 if is_double else torch.float32
    set_attention(model, select("auto", scorer.device, dtype, model.config).implementation)
    try:
        with scorer.evaluating():
            yield dtype
    finally:
        set_attention(model, before)


def load_anew(
    directory: str,
    device: torch.device,
    trust_remote_code: bool = False,
    head: NewHead | None = None,
) -> Scorer:
    """A model directory for computing in float32. ``head``: the scalar head it is given, unless it has one."""
    config = load_config(directory, trust_remote_code)
    is_scalar = head is not None or is_reward_config(config)
    read = partial(load_reward_model, head=head) if is_scalar else load_model
    model = read(
        directory,
        dtype=torch.float32,
        device=device,
        attention=select("auto", device, torch.float32, config).implementation,
        trust_remote_code=trust_remote_code,
    )
    scorer = Scorer(model)
    return scorer.eval()


def load_adapted(
    base: str,
    adapter: Path,
    new_ids: list[int],
    device: torch.device,
    trust_remote_code: bool,
    head: NewHead | None = None,
) -> Scorer:
    """A base model with a saved adapter, unmerged, for computing in float32."""
    scorer = load_anew(base, device, trust_remote_code, head)
    model = architecture.unwrap(scorer.model)
    add_tokens(model, new_ids)
    return Scorer(apply_lora(model, LoraConfig(adapter=str(adapter)))).eval()


def room_for(model: nn.Module, device: torch.device) -> torch.device:
    """Where a second copy of ``model`` in float32 has room: its device, or the CPU."""
    if device.type != "cuda":
        return device
    num_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return device if free > SPARE * num_bytes else torch.device("cpu")


@torch.no_grad()
def compare_saved(trained: Trained, reloaded: Scorer) -> list[Comparison]:
    """Compare what was trained with what was saved. ``reloaded`` ends with the weights before rounding."""
    dtype = str(trained.dtype).removeprefix("torch.")
    said = score(reloaded, trained.samples)
    reload = compare("reload", f"trained, and reloaded from {dtype}", trained, said, trained.dtype)
    merged = plain_model(trained.model, trained.state).state_dict()
    weights = _compare_weights(merged, reloaded.model, trained.dtype)
    found = [weights, reload]
    if weights.is_sound and (is_adapted(trained.model) or trained.dtype in ROUNDED):
        reloaded.model.load_state_dict(merged)
        said = score(reloaded, trained.samples)
        found.insert(
            1, compare("merge", f"trained, and merged before rounding to {dtype}", trained, said)
        )
    return found


def compare_adapted(trained: Trained, adapted: Scorer) -> Comparison:
    """Compare what was trained with the base model that carries the saved adapter."""
    said = score(adapted, trained.samples)
    return compare("adapter", "trained, and the base model with the saved adapter", trained, said)


def compare(
    name: str,
    what: str,
    trained: Trained,
    said: Sequence[Tensor],
    saved: torch.dtype = torch.float32,
) -> Comparison:
    """Two models' log-probs of the same samples; ``saved``: the dtype the second one's weights were read from."""
    gaps = [
        (left.double() - right.double()).abs().nan_to_num(nan=torch.inf)
        for left, right in zip(trained.logps, said, strict=True)
    ]
    worst = max(range(len(gaps)), key=lambda index: float(gaps[index].max()))
    largest, sample = float(gaps[worst].max()), trained.samples[worst]
    position = int(sample.target_at_N[int(gaps[worst].argmax())])
    every = torch.cat(gaps)
    where = f"the largest ({largest:.2g}) at {PurePath(sample.id).name}, token {position}"
    kind = "log-probs" if architecture.has_head(trained.model) else "scores"
    what = f"{kind} of {every.numel()} tokens, {what}"
    if saved in ROUNDED:
        return Comparison(name, float(every.mean()), ROUNDED[saved], f"mean over {what}; {where}")
    return Comparison(name, largest, TOLERANCE, f"{what}; {where}")


def _compare_weights(
    merged: Mapping[str, Tensor], reloaded: nn.Module, dtype: torch.dtype
) -> Comparison:
    """Whether each tensor is the merged one, rounded."""
    worst, where = 0.0, ""
    for name, now in reloaded.state_dict().items():
        wanted = merged[name].to(dtype).to(now.dtype) if name in merged else None
        gap = torch.inf
        if wanted is not None and wanted.shape == now.shape:
            gap = float((wanted.to(now.device) - now).abs().max().nan_to_num(nan=torch.inf))
        if gap > 0 and not where:
            where = f"; the first to differ is {name}"
        worst = max(worst, gap)
    written = str(dtype).removeprefix("torch.")
    detail = f"{len(merged)} tensors, merged and reloaded, in {written}{where}"
    return Comparison("weights", worst, 0.0, detail)


def require_sound(found: Sequence[Comparison]) -> None:
    """Raise CheckFailed for the first comparison that failed."""
    for comparison in found:
        if not comparison.is_sound:
            raise CheckFailed(
                f"{comparison.name}: the model that was saved is not the one that was trained: found a difference of "
                f"{comparison.value:.3g} ({comparison.detail}); expected at most {comparison.tolerance:g}; "
                "nothing was put in place; please report the model"
            )
