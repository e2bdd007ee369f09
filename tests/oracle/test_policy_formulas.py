"""The formulas TRL 1.16 publishes for GRPO, written down again on padded tensors [B, L], against ours: values and
gradients.

Where the two differ on purpose they are compared in the setting in which they must agree, and that is said:

- its epsilon_high of cispo is 1 + our clip_high, and there is no lower bound: clip_low is 1
- its ``delta`` is the dual clip, where it is above 1 + clip_high
- its dr_grpo divides by max_completion_length: our constant_length
- its use_bias_correction_kl gives r k3, whose gradient is that of our k2 (losses/policy.py): compared as gradients
- its weights of engine against trainer multiply the policy term alone, as ours
- its entropy is a mean over tokens, whatever the loss's average, as ours
- its ratio is not held beyond e^30

GSPO and GMPO with a correction are compared with verl (its core_algos of January 2026; TRL has no correction of
tokens for them):

- its gspo writes the ratio of each token as sg(s) r / sg(r), so a token's weight is that of its own gradient
- its gmpo multiplies a sample by the geometric mean of the weights of its tokens: our level geometric, compared where
  no bound acts, since it takes the bounds before the mean and we take them after. Its 1e-10 inside the logarithm is
  left out

GSPO-token is not in TRL: it is compared with GSPO's gradient where advantages are one number a sample (eq. 13 of its
paper says so), and by hand where they are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.preference_rows import packs, scales
from torch import Tensor

from taut.losses.loss import Loss
from taut.losses.policy import Bounds, Correction, Critic, Kl, PolicyGradient
from taut.types import Packed, Sample, Scores

LIMIT = 1e-9
LENGTHS = (7, 1, 4, 12, 3, 9)
LONGEST = 16


@dataclass(frozen=True)
class Padded:
    """What TRL's loss is given: [B, L], and advantages [B, 1]."""

    logps: Tensor
    old_logps: Tensor
    ref_logps: Tensor
    sampling_logps: Tensor
    advantages: Tensor
    mask: Tensor
    entropies: Tensor


def drawn(scale: float, *, seed: int = 0) -> tuple[Packed, Padded, Tensor]:
    """Six completions; what is padding is filled with noise. The leaf is logp_N, of the listed tokens."""
    random = np.random.default_rng(seed)
    names = ("old_logp_N", "ref_logp_N", "engine_logp_N")
    samples = []
    for row, length in enumerate(LENGTHS):
        base_N = -random.gamma(2.0, 1.0, length)
        streams = {name: base_N + scale * random.normal(size=length) for name in names}
        streams["advantage_N"] = np.full(length, random.normal())
        streams["logp_N"] = base_N + scale * random.normal(size=length)
        ids_T = random.integers(0, 90, length + 3)
        samples.append(
            Sample(f"{row}", ids_T, np.arange(3, length + 3), np.ones(length), streams=streams)
        )
    packed = packs([samples])
    logp_N = packed.streams["logp_N"].clone().requires_grad_()
    at = torch.cat([torch.arange(length) for length in LENGTHS])

    def pad(value_N: Tensor) -> Tensor:
        noise = torch.full((len(LENGTHS), LONGEST), -0.7, dtype=torch.float64)
        return noise.index_put((packed.row_N, at), value_N)

    mask = torch.zeros(len(LENGTHS), LONGEST, dtype=torch.float64)
    mask[packed.row_N, at] = 1.0
    others = (pad(packed.streams[name]) for name in names)
    advantages = pad(packed.streams["advantage_N"])[:, :1]
    return packed, Padded(pad(logp_N), *others, advantages, mask, pad(-logp_N.detach())), logp_N


Weights = Callable[[Padded], Tensor]


def log_weights(t: Padded, old: Tensor, level: str) -> Tensor:
    log_ratio = t.logps - old
    if level == "token":
        return log_ratio
    return ((log_ratio * t.mask).sum(-1) / t.mask.sum(-1)).unsqueeze(-1)


def clipped(
    t: Padded,
    old: Tensor,
    *,
    level: str = "token",
    low: float = 0.2,
    high: float = 0.28,
    delta: float | None = None,
) -> Tensor:
    coef_1 = torch.exp(log_weights(t, old, level))
    coef_2 = torch.clamp(coef_1, 1 - low, 1 + high)
    if delta is not None:
        coef_1 = torch.clamp(coef_1, max=delta)
    return -torch.min(coef_1 * t.advantages, coef_2 * t.advantages)


def cispo(t: Padded, old: Tensor, *, epsilon_high: float) -> Tensor:
    ratios = torch.clamp(torch.exp(log_weights(t, old, "token")), max=epsilon_high).detach()
    return -ratios * t.advantages * t.logps


def sapo(t: Padded, old: Tensor) -> Tensor:
    warm = torch.full_like(t.advantages, 1.05).masked_fill(t.advantages > 0, 1.0)
    ratio = torch.exp(log_weights(t, old, "token"))
    return -torch.sigmoid(warm * (ratio - 1)) * 4 / warm * t.advantages


def gmpo(t: Padded, old: Tensor) -> Tensor:
    log_ratio = t.logps - old
    held = torch.clamp(log_ratio, min=-0.4, max=0.4)
    smaller, larger = torch.minimum(log_ratio, held), torch.maximum(log_ratio, held)
    chosen = torch.where(t.advantages > 0, smaller, larger)
    mean = (chosen * t.mask).sum(-1) / t.mask.sum(-1)
    return -mean.exp().unsqueeze(-1) * t.advantages * torch.ones_like(t.mask)


def per_sequence(loss: Tensor, t: Padded) -> Tensor:
    return ((loss * t.mask).sum(-1) / t.mask.sum(-1)).mean()


def per_token(loss: Tensor, t: Padded) -> Tensor:
    return (loss * t.mask).sum() / t.mask.sum()


def per_constant(loss: Tensor, t: Padded) -> Tensor:
    return (loss * t.mask).sum() / (loss.size(0) * LONGEST)


def ours(name: str, average: str, *bounds: float, **fields: Any) -> PolicyGradient:
    length = LONGEST if average == "constant" else None
    return PolicyGradient(
        name, Bounds(*bounds or (0.2, 0.28)), average, length, is_fresh=False, **fields
    )  # type: ignore[arg-type]


Theirs = Callable[[Padded, Tensor], Tensor]
ROWS: dict[str, tuple[PolicyGradient, Theirs]] = {
    "grpo": (ours("clip", "sequence"), lambda t, old: per_sequence(clipped(t, old), t)),
    "dapo": (ours("clip", "token"), lambda t, old: per_token(clipped(t, old), t)),
    "dr_grpo": (ours("clip", "constant"), lambda t, old: per_constant(clipped(t, old), t)),
    "delta": (
        ours("clip", "token", 0.2, 0.28, 3.0),
        lambda t, old: per_token(clipped(t, old, delta=3.0), t),
    ),
    "gspo": (
        ours("gspo", "sequence", 3e-4, 4e-4),
        lambda t, old: per_sequence(clipped(t, old, level="sequence", low=3e-4, high=4e-4), t),
    ),
    "gspo, wide": (
        ours("gspo", "sequence"),
        lambda t, old: per_sequence(clipped(t, old, level="sequence"), t),
    ),
    "cispo": (
        ours("cispo", "token", 1.0, 4.0),
        lambda t, old: per_token(cispo(t, old, epsilon_high=5.0), t),
    ),
    "sapo": (ours("sapo", "sequence"), lambda t, old: per_sequence(sapo(t, old), t)),
    "gmpo": (ours("gmpo", "sequence", 0.4, 0.4), lambda t, old: per_sequence(gmpo(t, old), t)),
}


def of_step(loss: Loss, packed: Packed, scores: Scores) -> Tensor:
    by = scales(loss, [packed])
    return torch.stack(
        [by[name] * value for name, value in loss(scores, packed).terms.items()]
    ).sum()


def require_equal(
    found: Tensor, expected: Tensor, leaf: Tensor, *, values: bool = True, limit: float = LIMIT
) -> None:
    if values:
        torch.testing.assert_close(found, expected, rtol=limit, atol=1e-12)
    grads = [torch.autograd.grad(x, leaf, retain_graph=True)[0] for x in (found, expected)]
    assert torch.isfinite(grads[1]).all()
    assert grads[1].any()
    torch.testing.assert_close(*grads, rtol=limit, atol=1e-12)


@pytest.mark.parametrize("scale", [0.02, 0.5, 3.0])
@pytest.mark.parametrize("name", ROWS)
def test_after_the_first_update(name: str, scale: float) -> None:
    loss, theirs = ROWS[name]
    packed, t, logp_N = drawn(scale)
    require_equal(of_step(loss, packed, Scores(logp_N)), theirs(t, t.old_logps), logp_N)


@pytest.mark.parametrize("name", ROWS)
def test_at_the_first_update(name: str) -> None:
    """TRL takes the policy's own logprobs, detached, for the old ones."""
    loss, theirs = ROWS[name]
    packed, t, logp_N = drawn(0.5)
    found = of_step(replace(loss, is_fresh=True), packed, Scores(logp_N))
    require_equal(found, theirs(t, t.logps.detach()), logp_N)


def k3(t: Padded) -> Tensor:
    return torch.exp(t.ref_logps - t.logps) - (t.ref_logps - t.logps) - 1


@pytest.mark.parametrize("average", ["token", "sequence", "constant"])
def test_divergence_in_the_loss(average: str) -> None:
    """beta 0.04: added to each token's loss before the average."""
    packed, t, logp_N = drawn(0.5)
    taken = {"token": per_token, "sequence": per_sequence, "constant": per_constant}[average]
    found = of_step(ours("clip", average, kl=Kl(0.04, "k3")), packed, Scores(logp_N))
    require_equal(found, taken(clipped(t, t.old_logps) + 0.04 * k3(t), t), logp_N)


@pytest.mark.parametrize("is_fresh", [True, False])
def test_divergence_of_an_older_policys_tokens(is_fresh: bool) -> None:
    """use_bias_correction_kl."""
    packed, t, logp_N = drawn(0.5)
    old = t.logps.detach() if is_fresh else t.old_logps
    loss = replace(ours("clip", "token", kl=Kl(0.04, "k2")), is_fresh=is_fresh)
    theirs = per_token(clipped(t, old) + 0.04 * k3(t) * torch.exp(t.logps - old), t)
    require_equal(of_step(loss, packed, Scores(logp_N)), theirs, logp_N, values=False)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["truncated", "masked"])
@pytest.mark.parametrize("is_fresh", [True, False])
def test_engine_against_trainer(kind: Any, level: Any, is_fresh: bool) -> None:
    """Its four modes, with clip_max 1.5 and clip_min 0.6; a token the engine says nothing of has no difference."""
    packed, t, logp_N = drawn(0.5)
    packed.streams["engine_logp_N"][5] = float("nan")
    t.sampling_logps[0, 5] = float("nan")
    old = t.logps.detach() if is_fresh else t.old_logps
    gap = torch.nan_to_num((old - t.sampling_logps) * t.mask, nan=0.0)
    ratio = (gap.sum(-1, keepdim=True) if level == "sequence" else gap).exp()
    if kind == "truncated":
        ratio = ratio.clamp(min=0.6, max=1.5)
    else:
        ratio = ratio.masked_fill((ratio < 0.6) | (ratio > 1.5), 0.0)
    assert ((ratio == 1.5) | (ratio == 0)).any()
    how = Correction(kind, level, cap=1.5, floor=0.6)
    loss = ours("clip", "token", has_engine_logp=True, correction=how, kl=Kl(0.04, "k3"))
    theirs = per_token(clipped(t, old) * ratio + 0.04 * k3(t), t)
    found = of_step(replace(loss, is_fresh=is_fresh), packed, Scores(logp_N))
    require_equal(found, theirs, logp_N)


@pytest.mark.parametrize("kind", ["truncated", "masked"])
@pytest.mark.parametrize("is_fresh", [True, False])
@pytest.mark.parametrize("scale", [0.02, 0.3])
def test_gspo_with_weights_of_tokens(kind: Any, is_fresh: bool, scale: float) -> None:
    """verl: compute_policy_loss_gspo with rollout_is_weights."""
    packed, t, logp_N = drawn(scale)
    old = t.logps.detach() if is_fresh else t.old_logps
    ratio = ((old - t.sampling_logps) * t.mask).exp()
    is_out = (ratio < 1 - scale) | (ratio > 1 + scale)
    assert is_out.any() and not (is_out | ~t.mask.bool()).all()
    if kind == "truncated":
        weights = ratio.clamp(min=1 - scale, max=1 + scale)
    else:
        weights = ratio.masked_fill(is_out, 0.0)
    mean = ((t.logps - old) * t.mask).sum(-1, keepdim=True) / t.mask.sum(-1, keepdim=True)
    own = torch.exp(t.logps - t.logps.detach() + mean.detach())
    cost = torch.maximum(-own * t.advantages, -own.clamp(0.8, 1.28) * t.advantages)
    theirs = per_sequence(cost * weights.detach(), t)
    how = Correction(kind, "token", cap=1 + scale, floor=1 - scale)
    loss = replace(
        ours("gspo", "sequence", has_engine_logp=True, correction=how), is_fresh=is_fresh
    )
    found = of_step(loss, packed, Scores(logp_N))
    require_equal(found, theirs, logp_N, limit=1e-12)


@pytest.mark.parametrize("is_fresh", [True, False])
def test_gmpo_with_the_geometric_mean_of_weights(is_fresh: bool) -> None:
    """verl: compute_policy_loss_geo_mean with rollout_is_weights."""
    packed, t, logp_N = drawn(0.5)
    old = t.logps.detach() if is_fresh else t.old_logps
    weights = ((old - t.sampling_logps) * t.mask).exp().detach()
    of_sample = torch.exp((weights.log() * t.mask).sum(-1) / t.mask.sum(-1))
    theirs = per_sequence(gmpo(t, old) * of_sample.unsqueeze(-1), t)
    how = Correction("truncated", "geometric", cap=1e3, floor=0.0)
    loss = ours("gmpo", "sequence", 0.4, 0.4, has_engine_logp=True, correction=how)
    found = of_step(replace(loss, is_fresh=is_fresh), packed, Scores(logp_N))
    require_equal(found, theirs, logp_N, limit=1e-12)


def test_entropy() -> None:
    """entropy_coef 0.01 beside the sequence average."""
    packed, t, logp_N = drawn(0.5)
    found = of_step(
        ours("clip", "sequence", entropy_coef=0.01), packed, Scores(logp_N, -logp_N.detach())
    )
    theirs = per_sequence(clipped(t, t.old_logps), t) - 0.01 * per_token(t.entropies, t)
    require_equal(found, theirs, logp_N)


def test_gspo_token() -> None:
    """Of one advantage a sample GSPO's gradient; of several, each token's: -s A_t / |y|, where it is not clipped."""
    packed, _, logp_N = drawn(0.1)
    token, sequence = (ours(name, "sequence") for name in ("gspo_token", "gspo"))
    require_equal(*(of_step(loss, packed, Scores(logp_N)) for loss in (token, sequence)), logp_N)
    advantage_N = torch.randn(
        packed.num_targets, generator=torch.Generator().manual_seed(0)
    ).double()
    packed = replace(packed, streams={**packed.streams, "advantage_N": advantage_N})
    (found,) = torch.autograd.grad(of_step(token, packed, Scores(logp_N)), logp_N)
    length_S = packed.by_sample(torch.ones_like(logp_N))
    gap_N = logp_N.detach() - packed.streams["old_logp_N"]
    ratio_N = (packed.by_sample(gap_N) / length_S).exp()[packed.row_N]
    is_free_N = torch.where(advantage_N > 0, ratio_N <= 1.28, ratio_N >= 0.8)
    share_N = 1 / (length_S[packed.row_N] * packed.num_samples)
    torch.testing.assert_close(
        found, -ratio_N * advantage_N * is_free_N * share_N, rtol=1e-12, atol=1e-15
    )


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_critics_term(clip: float | None) -> None:
    """As TRL's PPO has it: vf_coef * 0.5 * mean(max((V - R)^2, (clip(V) - R)^2))."""
    packed, _, logp_N = drawn(0.1)
    random = torch.Generator().manual_seed(0)
    value_R, old_R, return_R = torch.randn(3, packed.num_reads, generator=random).double()
    value_R.requires_grad_()
    packed = replace(packed, read_values={"return": return_R, "value": old_R})
    loss = ours("clip", "token", critic=Critic(0.1, clip))
    terms = loss(Scores(logp_N, scalar_R=value_R), packed).terms
    theirs = (value_R - return_R) ** 2
    if clip is not None:
        held = torch.clamp(value_R, old_R - clip, old_R + clip)
        theirs = torch.max(theirs, (held - return_R) ** 2)
    require_equal(terms["value"] / packed.num_reads, 0.1 * 0.5 * theirs.mean(), value_R)
