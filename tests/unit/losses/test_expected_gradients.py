"""Gradients against exact values, on a policy whose every answer can be listed.

Three tokens, the last of which ends an answer; answers have at most three tokens, so there are 15. The policy is a
table of logits for each of the 7 prefixes. An expectation over answers drawn from q is a sum over all of them in which
the targets of an answer y have the weight q(y).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from tests.helpers.preference_rows import packs
from torch import Tensor

from taut.losses.advantages import gae
from taut.losses.policy import SURROGATES, Correction, Kl, PolicyGradient, estimate, penalty
from taut.types import Packed, Sample, Scores

STOP, LONGEST = 2, 3
OPEN = [prefix for size in range(LONGEST) for prefix in product(range(STOP), repeat=size)]
ENDED = [(*prefix, STOP) for prefix in OPEN]
ANSWERS = ENDED + list(product(range(STOP), repeat=LONGEST))
EXACT = {"rtol": 1e-10, "atol": 1e-13}


def table(seed: int, scale: float = 1.0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return scale * torch.randn(len(OPEN), STOP + 1, generator=random, dtype=torch.float64)


POLICY = table(0).requires_grad_()
OLD = POLICY.detach() + table(1, 0.1)
REFERENCE = table(2)
REWARD_S = torch.randn(len(ANSWERS), generator=torch.Generator().manual_seed(3)).double()


def every_answer() -> Packed:
    samples = [
        Sample(
            f"{row}", np.array([5, *answer]), np.arange(1, len(answer) + 1), np.ones(len(answer))
        )
        for row, answer in enumerate(ANSWERS)
    ]
    return packs([samples])


PACKED = every_answer()
AT_N = torch.tensor([OPEN.index(answer[:t]) for answer in ANSWERS for t in range(len(answer))])


def logp(logits: Tensor) -> Tensor:
    """Of every token of every answer, [N]."""
    return logits.log_softmax(-1)[AT_N, PACKED.target_N]


def probability(logits: Tensor) -> Tensor:
    """Of every answer, [S]."""
    return PACKED.by_sample(logp(logits)).exp()


def drawn_from(logits: Tensor, **streams: Tensor) -> Packed:
    """All answers, each counting for its probability."""
    weight_N = probability(logits).detach()[PACKED.row_N]
    return replace(
        PACKED, weight_N=weight_N, streams={name: x.detach() for name, x in streams.items()}
    )


def slope(value: Tensor) -> Tensor:
    return torch.autograd.grad(value, POLICY, retain_graph=True)[0]


def expected(loss: PolicyGradient, packed: Packed, term: str = "policy") -> Tensor:
    """The gradient of the term's expectation over answers."""
    return slope(loss(Scores(logp(POLICY)), packed).terms[term])


def gradient_of_reward(reward_S: Tensor = REWARD_S) -> Tensor:
    return slope((probability(POLICY) * reward_S).sum())


def reached(logits: Tensor) -> Tensor:
    """How often each prefix is, [7]."""
    counts = torch.zeros(len(OPEN), dtype=torch.float64)
    return counts.index_add(0, AT_N, probability(logits).detach()[PACKED.row_N])


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of what follows each prefix, [7]."""
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def test_the_answers_are_all_there_are() -> None:
    assert len(ANSWERS) == 15
    assert probability(POLICY).sum().item() == pytest.approx(1.0, abs=1e-14)


@pytest.mark.parametrize("name", SURROGATES)
def test_every_surrogate_begins_with_the_policy_gradient(name: str) -> None:
    """A rollout's first update: the exact gradient of the expected reward."""
    packed = drawn_from(POLICY, advantage_N=REWARD_S[PACKED.row_N])
    found = expected(PolicyGradient(name), packed)
    torch.testing.assert_close(found, -gradient_of_reward(), **EXACT)


@pytest.mark.parametrize("name", SURROGATES)
def test_a_baseline_changes_nothing_but_the_noise(name: str) -> None:
    packed = drawn_from(POLICY, advantage_N=REWARD_S[PACKED.row_N] - 7.0)
    found = expected(PolicyGradient(name), packed)
    torch.testing.assert_close(found, -gradient_of_reward(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_gae_has_the_gradient_of_the_reward(lam: float) -> None:
    """Of exact values with any lambda; of a critic that is wrong with lambda = 1 only."""
    weight_N = drawn_from(POLICY).weight_N
    earned = torch.zeros(len(OPEN)).double().index_add(0, AT_N, weight_N * REWARD_S[PACKED.row_N])
    exact = earned / reached(POLICY)
    for value, is_exact in ((exact, True), (exact + table(4)[:, 0], lam == 1.0)):
        paths = []
        for row, reward in enumerate(REWARD_S):
            value_N = value[AT_N[PACKED.row_N == row]]
            reward_N = torch.zeros_like(value_N)
            reward_N[-1] = reward
            paths.append(gae(reward_N, value_N, 0.0, 1.0, lam)[0])
        found = expected(PolicyGradient(), drawn_from(POLICY, advantage_N=torch.cat(paths)))
        off = float((found + gradient_of_reward()).norm())
        assert (off < 1e-12) if is_exact else (off > 1e-2)


@pytest.mark.parametrize("is_fresh", [True, False])
def test_an_engine_that_differs_is_corrected_exactly(is_fresh: bool) -> None:
    """Answers of the engine, weighted as wholes without a cap: the trainer's gradient. Unweighted it is another, and
    with a weight of each token for itself too: what comes before and after the token is the engine's.
    """
    streams = {
        "advantage_N": REWARD_S[PACKED.row_N],
        "old_logp_N": logp(POLICY),
        "engine_logp_N": logp(OLD),
    }
    packed = drawn_from(OLD, **streams)
    how = Correction("truncated", "sequence", cap=1e6)
    plain = PolicyGradient(is_fresh=is_fresh, has_engine_logp=True)
    corrected = replace(plain, correction=how)
    torch.testing.assert_close(expected(corrected, packed), -gradient_of_reward(), **EXACT)
    by_token = replace(plain, correction=how._replace(level="token"))
    for other in (plain, by_token):
        assert float((expected(other, packed) + gradient_of_reward()).norm()) > 1e-3


def test_values_of_the_divergence() -> None:
    """k1 and k3 have the divergence of whole answers for their mean, k2 only nearly."""
    p_S = probability(POLICY).detach()
    gap_N = (logp(POLICY) - logp(REFERENCE)).detach()
    exact = float((p_S * PACKED.by_sample(gap_N)).sum())
    assert exact > 0.5
    k1, k2, k3 = (
        float((p_S * PACKED.by_sample(estimate(gap_N, kind))).sum()) for kind in ("k1", "k2", "k3")
    )
    assert k1 == pytest.approx(exact, rel=1e-12)
    assert k3 == pytest.approx(exact, rel=1e-12)
    assert abs(k2 - exact) > 0.01
    near_N = gap_N * 0 + 1e-3 * torch.randn(gap_N.shape, generator=torch.Generator().manual_seed(0))
    ratio = estimate(near_N, "k2").sum() / estimate(near_N, "k3").sum()
    assert ratio.item() == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("is_fresh", [True, False])
def test_k2_has_the_gradient_of_the_divergence(is_fresh: bool) -> None:
    """Token by token, the prefixes being what they are; of an older policy's answers too."""
    by = POLICY if is_fresh else OLD
    streams = {"advantage_N": torch.zeros_like(AT_N), "ref_logp_N": logp(REFERENCE)}
    packed = drawn_from(by, **streams, old_logp_N=logp(OLD))
    loss = PolicyGradient(is_fresh=is_fresh, kl=Kl(0.3, "k2"))
    exact = slope((reached(by) * divergence(POLICY, REFERENCE)).sum())
    torch.testing.assert_close(expected(loss, packed, "kl"), 0.3 * exact, **EXACT)


def test_k3_has_the_gradient_of_the_other_divergence() -> None:
    """As a term of the loss: that of KL(ref || pi), which is not the one whose value it estimates."""
    streams = {"advantage_N": torch.zeros_like(AT_N), "ref_logp_N": logp(REFERENCE)}
    found = expected(PolicyGradient(kl=Kl(1.0, "k3")), drawn_from(POLICY, **streams), "kl")
    other = slope((reached(POLICY) * divergence(REFERENCE, POLICY)).sum())
    wanted = slope((reached(POLICY) * divergence(POLICY, REFERENCE)).sum())
    torch.testing.assert_close(found, other, **EXACT)
    assert float((found - wanted).norm()) > 0.1 * float(wanted.norm())


def test_k1_in_the_loss_has_no_gradient() -> None:
    """Why kl_gradient=k1 is not to be had."""
    weight_N = drawn_from(POLICY).weight_N
    found = slope((weight_N * estimate(logp(POLICY) - logp(REFERENCE), "k1")).sum())
    torch.testing.assert_close(found, torch.zeros_like(found), rtol=0, atol=1e-14)


@pytest.mark.parametrize("to_go", [False, True])
def test_in_the_reward_it_is_the_divergence_of_whole_answers(to_go: bool) -> None:
    """A token answers for the divergence of those after it: charged with all of its answer's, or what is to come."""
    lost_N = penalty(logp(POLICY), logp(REFERENCE), 0.3).detach()
    lost_S = PACKED.by_sample(lost_N)
    charged_N = lost_S[PACKED.row_N]
    if to_go:
        each = [lost_N[PACKED.row_N == row] for row in range(len(ANSWERS))]
        charged_N = charged_N - torch.cat([one.cumsum(0) - one for one in each])
    found = expected(PolicyGradient(), drawn_from(POLICY, advantage_N=charged_N))
    gap_S = PACKED.by_sample(logp(POLICY) - logp(REFERENCE))
    exact = slope((probability(POLICY) * gap_S).sum())
    torch.testing.assert_close(found, 0.3 * exact, **EXACT)
    alone = slope((reached(POLICY) * divergence(POLICY, REFERENCE)).sum())
    assert float((exact - alone).norm()) > 0.1 * float(exact.norm())


def test_the_entropy_term() -> None:
    """-coef * entropy of what follows each prefix, as often as it is reached."""
    log_p = POLICY.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    packed = drawn_from(POLICY, advantage_N=torch.zeros_like(AT_N))
    loss = PolicyGradient(entropy_coef=0.2)
    found = slope(loss(Scores(logp(POLICY), entropy[AT_N]), packed).terms["entropy"])
    exact = slope((reached(POLICY) * entropy).sum())
    torch.testing.assert_close(found, -0.2 * exact, **EXACT)
