"""Proofs on the loaded model, before it trains: a fraction of a second on a few dozen tokens.

- every attention layer calls the chosen function, once, and no mask of the library's says more
than the layers ask for; - a sample's log-probs do not change when its neighbour in the pack does
(a neighbour longer than the sample included),
  nor when a later token of its own does;
- the chunked head, or the scalar head, gives the model's own logits.

Of a model with a scalar head its numbers at each token stand for log-probs.

A model whose layers carry state across tokens fails the neighbour proof; it is then run one sample
at a time, which the caller records. Anything else that fails is an error that names the layer or
the number.
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
from taut.attention.select import Observation, observe
from taut.data.packing import ALONE, pack
from taut.errors import AttentionError, ModelError
from taut.models import architecture
from taut.models.heads import prove_scalar_head, scalar, scalar_head
from taut.models.load import set_attention
from taut.models.scorer import Scorer
from taut.types import Packed, Sample, Wants
from taut.vision import tower

LENGTHS = (24, 40)
"""Tokens of the two probe samples: the neighbour is the longer one. Fewer where all samples are shorter."""

TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3, torch.bfloat16: 0.5}
"""Largest difference of a log-prob (nats) that is rounding, by compute dtype."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What was measured."""

    num_attention_layers: int
    windows: tuple[int, ...]
    neighbour: float
    """Largest change of a log-prob when the neighbour changes."""
    future: float
    """Largest change of a log-prob when a later token changes."""
    head: float
    """Largest difference between the chunked head's log-probs and those from the model's own
    logits.
    """
    one_sample: str | None
    """Why this model must run one sample at a time; None: it packs."""


def prove(
    scorer: Scorer,
    compute: AbstractContextManager[Any],
    dtype: torch.dtype,
    max_length: int,
) -> Proof:
    """Run the proofs. Raises AttentionError or ModelError for what cannot be trained exactly."""
    reasons = [*one_sample_reasons(scorer.model, max_length)]
    was_training = scorer.training
    scorer.eval()
    with torch.no_grad(), compute:
        seen = _observe(scorer)
        neighbour, future = _perturb(scorer, max_length)
        head = _head_difference(scorer)
    scorer.train(was_training)
    limit = TOLERANCE[dtype]
    _require_calls(scorer.model, seen)
    if not head <= limit:
        raise ModelError(
            f"the head of {type(scorer.model).__name__} is not understood: its logits differ from "
            f"taut's by {head:.3g} "
            f"nats (at most {limit:g} is rounding); the architecture does more after the last "
            "layer than scale, bias and "
            "softcap; please report it"
        )
    if not future <= limit:
        raise AttentionError(
            f"a later token changes an earlier log-prob by {future:.3g} nats in "
            f"{type(scorer.model).__name__}; "
            "taut trains causal language models"
        )
    if not neighbour <= limit and not reasons:
        raise AttentionError(
            f"packed samples see each other in {type(scorer.model).__name__} ({neighbour:.3g} "
            "nats) and no layer with "
            "state across tokens was found to explain it; the model cannot be packed; please "
            "report it"
        )
    windows = tuple(sorted(window for window in seen.windows_called if window is not None))
    return Proof(len(seen.layers), windows, neighbour, future, head, "; ".join(reasons) or None)


def one_sample_reasons(model: nn.Module, max_length: int) -> list[str]:
    """What in this architecture forbids packing."""
    reasons = []
    stateful = architecture.stateful_layers(model)
    if stateful:
        reasons.append(f"layers with state across tokens ({', '.join(stateful[:3])})")
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


def _observe(scorer: Scorer) -> Observation:
    """One sample alone, seen by ``observe``."""
    with observe() as seen:
        _numbers(scorer, pack([_probe("a", LENGTHS[0], scorer, seed=1)], ALONE))
    return seen


def _require_calls(model: nn.Module, seen: Observation) -> None:
    expected = architecture.attention_layer_count(model)
    if len(seen.layers) != expected or len(set(seen.layers)) != expected:
        raise AttentionError(
            f"{len(set(seen.layers))} of {expected} attention layers of {type(model).__name__} "
            "called the chosen attention "
            f"({len(seen.layers)} calls); expected each of them once; the model does not use the "
            "library's attention "
            "interface throughout and cannot be trained exactly"
        )
    unasked = seen.windows_masked - seen.windows_called
    if expected and unasked - {None}:
        raise AttentionError(
            f"{type(model).__name__} masks a sliding window of {max(w for w in unasked if w is not None)} that "
            "no attention layer asks "
            "for by keyword; it would be dropped, so the model is refused"
        )


def _perturb(scorer: Scorer, max_length: int) -> tuple[float, float]:
    """How much the second sample's log-probs move when its neighbour, and when its own last token,
    changes.
    """
    shorter, longer = (max(3, min(length, max_length)) for length in LENGTHS)
    long, short = _probe("a", longer, scorer, seed=1), _probe("b", shorter, scorer, seed=2)
    other = _probe("a", longer, scorer, seed=3)
    changed = short.ids_T.copy()
    changed[-1] = (changed[-1] + 1) % architecture.text_config(scorer.model).vocab_size
    late = replace(short, ids_T=changed)
    with_long, with_other, with_late = (
        _numbers(scorer, pack(pair, ALONE))
        for pair in ((long, short), (other, short), (long, late))
    )
    alone = _numbers(scorer, pack([short], ALONE))
    neighbour = max(_gap(with_long, with_other), _gap(with_long, alone))
    return neighbour, _gap(with_long[:-1], with_late[:-1])


def _head_difference(scorer: Scorer) -> float:
    if not architecture.has_head(scorer.model):
        return prove_scalar_head(scorer.model)
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


def library_logps(model: nn.Module, sample: Sample, device: torch.device) -> Tensor:
    """logp_N of one sample alone, through the library's own attention and the model's own head; on the CPU."""
    with _library(model) as plain:
        logits = plain(
            **_inputs(plain, sample, device),
            logits_to_keep=torch.from_numpy(sample.target_at_N - 1).to(device),
        ).logits[0]
    every = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
    targets = torch.from_numpy(sample.ids_T[sample.target_at_N]).to(device)
    return every.gather(1, targets[:, None]).squeeze(1).cpu()


def library_scalars(model: nn.Module, sample: Sample, device: torch.device) -> Tensor:
    """The scalar head where one sample alone is read, through the library's own attention; on the CPU."""
    with _library(model) as plain:
        inputs = _inputs(plain, sample, device)
        hidden_TD = architecture.decoder(plain)(**inputs).last_hidden_state[0]
    at = [sample.num_tokens - 1] if sample.read_at_R is None else sample.read_at_R.tolist()
    return scalar(hidden_TD[at], scalar_head(model)).cpu()


def _inputs(plain: PreTrainedModel, sample: Sample, device: torch.device) -> dict[str, Any]:
    """What the library is given for one sample: its tower, positions and masks are its own too."""
    ids_T = torch.from_numpy(sample.ids_T).to(device)
    pictures = tower.library_arguments(architecture.decoder(plain), sample.media, ids_T)
    return {"input_ids": ids_T[None], "use_cache": False, **pictures}


@contextmanager
def _library(model: nn.Module) -> Iterator[PreTrainedModel]:
    """The model with the library's own attention."""
    plain = architecture.unwrap(model)
    ours = architecture.text_config(model)._attn_implementation
    set_attention(plain, library_attention(plain))
    try:
        yield plain
    finally:
        set_attention(plain, ours)


def library_attention(model: PreTrainedModel) -> str:
    """The library's implementation that honours everything this model asks of attention."""
    text = architecture.text_config(model)
    is_plain = model._supports_sdpa and not getattr(text, "attn_logit_softcapping", None)
    return "sdpa" if is_plain else "eager"


def _numbers(scorer: Scorer, packed: Packed) -> Tensor:
    """What the model says of the last sample: log-probs of its targets, or its scalar head at each token before one."""
    has_head = architecture.has_head(scorer.model)
    scores = scorer(packed, wants=Wants(logp=has_head, scalar=not has_head))
    every, row = (scores.logp_N, packed.row_N) if has_head else (scores.scalar_R, packed.row_R)
    last: Tensor = every[row.to(every.device) == packed.num_samples - 1]
    return last


def _gap(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max())


def _probe(name: str, length: int, scorer: Scorer, seed: int) -> Sample:
    """Random tokens, all targets; a scalar head is read where they are predicted."""
    vocabulary = architecture.text_config(scorer.model).vocab_size
    ids_T = np.random.default_rng(seed).integers(0, vocabulary, length)
    at = np.arange(1, length)
    return Sample(name, ids_T, at, np.ones(length - 1), read_at_R=at - 1)
