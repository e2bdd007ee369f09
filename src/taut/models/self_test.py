"""Self-test of the loaded model before it trains: a fraction of a second on a few dozen tokens.

- Every attention layer calls the chosen function, once, and no mask of the library's demands more than the layers ask
  for.
- A sample's logprobs do not change when its neighbor in the pack does (a neighbor longer than the sample included),
  nor when a later token of its own does.
- The chunked head, or the scalar head, gives the model's own logits.

For a model with a scalar head, its number at each token takes the place of logprobs.

A model with layers whose state does not follow the layout fails the neighbor test; it then runs one sample at a time,
which the caller records. Any other failure is an error that names the layer or the number.

``library_logps`` and ``library_scalars`` compute the same numbers through the library's own attention, for comparisons
elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from taut.attention.layout import Layout
from taut.data.packing import ALONE, pack
from taut.errors import AttentionError, ModelError
from taut.models import architecture
from taut.models.attention_backends import observe
from taut.models.heads import check_head, scalar, scalar_head
from taut.models.load import set_attention
from taut.models.scorer import Scorer, evaluating
from taut.types import Packed, Sample, Wants
from taut.vision import tower

LENGTHS = (24, 40)
"""Tokens of the two probe samples; the neighbor is the longer one. Fewer where all samples are shorter."""
TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3, torch.bfloat16: 0.5}
"""Largest difference of a logprob (nats) that is rounding, by compute dtype."""


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    """Measurements of the self-test."""

    num_attention_layers: int
    windows: tuple[int, ...]
    neighbor: float
    """Largest change of a logprob when the neighbor changes."""
    future: float
    """Largest change of a logprob when a later token changes."""
    head: float
    """Largest difference between the chunked head's logprobs and the logprobs by the model's own logits."""
    one_sample: str | None
    """Reason to run this model one sample at a time; None where it packs."""


def run_self_test(
    scorer: Scorer, compute: AbstractContextManager[Any], dtype: torch.dtype, max_length: int
) -> SelfTestResult:
    """Run the self-test. Raises AttentionError or ModelError for what cannot be trained exactly."""
    name = type(scorer.model).__name__
    reasons = one_sample_reasons(scorer.model, max_length)
    with evaluating(scorer), torch.no_grad(), compute:
        with observe() as seen:
            _outputs(scorer, pack([_probe("a", LENGTHS[0], scorer, seed=1)], ALONE))
        neighbor, future = _perturb(scorer, max_length)
        head = _head_difference(scorer)
    # every layer called the chosen attention, and asked for its window
    expected, limit = architecture.attention_layer_count(scorer.model), TOLERANCE[dtype]
    unasked = {w for w in seen.windows_masked - seen.windows_called if w is not None}
    problem = ""
    if len(seen.layers) != expected or len(set(seen.layers)) != expected:
        problem = (
            f"{len(set(seen.layers))} of {expected} attention layers of {name} called the chosen attention "
            f"({len(seen.layers)} calls); expected each of them once, by the library's attention interface; take "
            "another model"
        )
    elif expected and unasked:
        problem = (
            f"{name} masks a sliding window of {max(unasked)} that no attention layer asks for by keyword; it would "
            "be dropped, so the model is refused"
        )
    # the head's logits, causality, and neighbors in a pack
    elif not head <= limit:
        raise ModelError(
            f"the head of {name} is not understood: its logits differ from taut's by {head:.3g} nats (at most "
            f"{limit:g} is rounding); expected no more than scale, bias and softcap after it; please report it"
        )
    elif not future <= limit:
        problem = (
            f"a later token changes an earlier logprob by {future:.3g} nats in {name}; taut trains causal language "
            "models"
        )
    elif not neighbor <= limit and not reasons:
        problem = (
            f"packed samples see each other in {name} ({neighbor:.3g} nats) and no layer with state across tokens "
            "was found to explain it; the model cannot be packed; please report it"
        )
    if problem:
        raise AttentionError(problem)
    windows = tuple(sorted(window for window in seen.windows_called if window is not None))
    return SelfTestResult(
        len(seen.layers), windows, neighbor, future, head, "; ".join(reasons) or None
    )


def one_sample_reasons(model: nn.Module, max_length: int) -> list[str]:
    """List the reasons why this architecture cannot be packed."""
    reasons = []
    leaking = architecture.leaking_layers(model)
    if leaking:
        reasons.append(f"layers with state across tokens ({', '.join(leaking[:3])})")
    rope = architecture.length_dependent_rope(model)
    if rope is not None and max_length > rope[1]:
        kind, original = rope
        if kind != "longrope":
            raise ModelError(
                f"{kind} RoPE depends on the longest position seen so far, and "
                f"data.max_length={max_length} exceeds "
                f"the model's original {original}; set data.max_length={original} or less"
            )
        reasons.append(f"longrope depends on the longest position (beyond {original})")
    return reasons


def _perturb(scorer: Scorer, max_length: int) -> tuple[float, float]:
    """The largest change of a sample's logprobs when its neighbor changes, and when its own last token does."""
    shorter, longer = (max(3, min(length, max_length)) for length in LENGTHS)
    long, short = _probe("a", longer, scorer, seed=1), _probe("b", shorter, scorer, seed=2)
    other = _probe("a", longer, scorer, seed=3)
    changed = short.ids_T.copy()
    changed[-1] = (changed[-1] + 1) % architecture.text_config(scorer.model).vocab_size
    late = replace(short, ids_T=changed)
    with_long, with_other, with_late = (
        _outputs(scorer, pack(pair, ALONE))
        for pair in ((long, short), (other, short), (long, late))
    )
    alone = _outputs(scorer, pack([short], ALONE))
    neighbor = max(_gap(with_long, with_other), _gap(with_long, alone))
    return neighbor, _gap(with_long[:-1], with_late[:-1])


def _head_difference(scorer: Scorer) -> float:
    """The largest difference between the head's logprobs (or scalars) and the model's own."""
    if not architecture.has_head(scorer.model):
        return check_head(scorer.model)
    packed = pack([_probe("a", LENGTHS[0], scorer, seed=4)], ALONE)
    ours = scorer(packed).logp_N
    layout = Layout(packed.reach_T.numpy(), device=scorer.device)
    on_device = packed.to(scorer.device)
    logits = scorer.model(
        input_ids=on_device.ids_T[None],
        position_ids=on_device.position_ids[None],
        use_cache=False,
        taut_layout=layout,
    ).logits[0]
    every = torch.log_softmax(logits.to(ours.dtype), dim=-1)[on_device.predictor_N]
    return _gap(ours, every.gather(1, on_device.target_N[:, None]).squeeze(1))


def _outputs(scorer: Scorer, packed: Packed) -> Tensor:
    """The model's output for the last sample: logprobs of its targets, or its scalar head at their predictors."""
    has_head = architecture.has_head(scorer.model)
    scores = scorer(packed, wants=Wants(logp=has_head, scalar=not has_head))
    outputs, row = (scores.logp_N, packed.row_N) if has_head else (scores.scalar_R, packed.row_R)
    last: Tensor = outputs[row.to(outputs.device) == packed.num_samples - 1]
    return last


def _gap(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max())


def _probe(name: str, length: int, scorer: Scorer, seed: int) -> Sample:
    """Random tokens, all of them targets, and reads at their predictors."""
    vocabulary = architecture.text_config(scorer.model).vocab_size
    ids_T = np.random.default_rng(seed).integers(0, vocabulary, length)
    at = np.arange(1, length)
    return Sample(name, ids_T, at, np.ones(length - 1), read_at_R=at - 1)


def library_logps(model: nn.Module, sample: Sample, device: torch.device) -> Tensor:
    """logp_N of one sample alone, through the library's own attention and the model's own head; on the CPU."""
    with _with_library_attention(model) as plain:
        logits = plain(
            **_inputs(plain, sample, device),
            logits_to_keep=torch.from_numpy(sample.target_at_N - 1).to(device),
        ).logits[0]
    every = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
    targets = torch.from_numpy(sample.ids_T[sample.target_at_N]).to(device)
    return every.gather(1, targets[:, None]).squeeze(1).cpu()


def library_scalars(model: nn.Module, sample: Sample, device: torch.device) -> Tensor:
    """The scalar head at the reads of one sample alone, through the library's own attention; on the CPU."""
    with _with_library_attention(model) as plain:
        inputs = _inputs(plain, sample, device)
        hidden_TD = architecture.decoder(plain)(**inputs).last_hidden_state[0]
    at = [sample.num_tokens - 1] if sample.read_at_R is None else sample.read_at_R.tolist()
    return scalar(hidden_TD[at], scalar_head(model)).cpu()


@contextmanager
def _with_library_attention(model: nn.Module) -> Iterator[PreTrainedModel]:
    """The model, unwrapped, with the library's own attention inside the block. The library's forward, which nothing
    trains on, may have operations without a deterministic algorithm (deterministic=true).
    """
    plain = architecture.unwrap(model)
    attention = architecture.text_config(model)._attn_implementation
    set_attention(plain, library_attention(plain))
    is_strict = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(mode=False)
    try:
        yield plain
    finally:
        torch.use_deterministic_algorithms(is_strict, warn_only=warns)
        set_attention(plain, attention)


def library_attention(model: PreTrainedModel) -> str:
    """The library's implementation that supports everything this model needs of attention."""
    text = architecture.text_config(model)
    is_plain = model._supports_sdpa and not getattr(text, "attn_logit_softcapping", None)
    return "sdpa" if is_plain else "eager"


def _inputs(plain: PreTrainedModel, sample: Sample, device: torch.device) -> dict[str, Any]:
    """The library's arguments for one sample: tower, positions and masks are its own too."""
    ids_T = torch.from_numpy(sample.ids_T).to(device)
    pictures = tower.library_arguments(architecture.decoder(plain), sample.media, ids_T)
    return {"input_ids": ids_T[None], "use_cache": False, **pictures}
