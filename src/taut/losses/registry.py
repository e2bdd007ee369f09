"""Every loss, by name, for the invariants. A new loss is 25 lines in one file and a line in ``LOSSES``."""

from __future__ import annotations

from taut.losses.loss import Loss
from taut.losses.policy import SURROGATES, Bounds, Correction, Critic, Kl, PolicyGradient
from taut.losses.preference import VARIANTS, CpoLoss, DpoLoss, KtoLoss, OrpoLoss, SimpoLoss
from taut.losses.reward import BradleyTerry, Process, Regression
from taut.losses.supervised import CrossEntropy

_SMOOTHED = {"robust": 0.1, "exo": 1e-3, "aot": 0.1}

LOSSES: dict[str, Loss] = {
    "cross_entropy": CrossEntropy(),
    **{
        f"dpo_{name}": DpoLoss(loss=name, label_smoothing=_SMOOTHED.get(name, 0.0))
        for name in VARIANTS
    },
    "dpo_conservative": DpoLoss(label_smoothing=0.1),
    "dpo_forward_kl": DpoLoss(divergence="forward_kl"),
    "dpo_js": DpoLoss(divergence="js"),
    "dpo_alpha": DpoLoss(divergence="alpha", alpha=0.5),
    "dpo_length_normalized": DpoLoss(length_normalized=True, beta=2.0),
    "dpo_margin": DpoLoss(margin=1.0),
    "dpo_reference_free": DpoLoss(reference_free=True),
    "dpo_mpo": DpoLoss(
        loss=["sigmoid", "bco"], loss_weights=[0.8, 0.2], sft_weight=1.0, log_entropy=True
    ),
    "kto": KtoLoss(undesirable_weight=1.3),
    "bco_unpaired": KtoLoss(loss="bco"),
    "apo_zero_unpaired": KtoLoss(loss="apo_zero"),
    "orpo": OrpoLoss(),
    "simpo": SimpoLoss(beta=2.0, gamma=1.0),
    "alphapo": SimpoLoss(beta=2.0, gamma=0.5, alpha=0.25),
    "cpo_sigmoid": CpoLoss(beta=0.1),
    "cpo_hinge": CpoLoss(beta=0.1, loss="hinge"),
    "cpo_ipo": CpoLoss(beta=0.1, loss="ipo"),
    "bradley_terry": BradleyTerry(margin=1.0, centering_coef=0.01),
    "regression": Regression(),
    "process": Process(),
    **{
        f"policy_{name}": PolicyGradient(name, Bounds(0.3, 0.4), "sequence", is_fresh=False)
        for name in SURROGATES
    },
    "policy_fresh": PolicyGradient(),
    "policy_gspo_fresh": PolicyGradient("gspo"),
    "policy_dual": PolicyGradient(bounds=Bounds(0.2, 0.28, 3.0), is_fresh=False),
    "policy_constant": PolicyGradient(average="constant", constant_length=64),
    "policy_kl": PolicyGradient(kl=Kl(0.1), is_fresh=False),
    "policy_kl_k3": PolicyGradient(kl=Kl(0.1, "k3", "k1")),
    "policy_entropy": PolicyGradient(entropy_coef=0.01, temperature=0.7),
    "policy_entropy_target": PolicyGradient(adapts_entropy=True, is_fresh=False),
    "policy_truncated": PolicyGradient(
        has_engine_logp=True, correction=Correction("truncated", floor=0.5), is_fresh=False
    ),
    "policy_masked": PolicyGradient(
        has_engine_logp=True, correction=Correction("masked", "sequence", cap=1e3)
    ),
    "policy_geometric": PolicyGradient(
        has_engine_logp=True, correction=Correction("truncated", "geometric", 1.1, 0.9)
    ),
    "policy_veto": PolicyGradient(
        has_engine_logp=True, correction=Correction("truncated", veto=0.5), is_fresh=False
    ),
    "policy_bypassed": PolicyGradient(has_engine_logp=True, is_bypassed=True, is_fresh=False),
    "policy_gspo_truncated": PolicyGradient(
        "gspo",
        Bounds(0.3, 0.4),
        "sequence",
        has_engine_logp=True,
        correction=Correction("truncated", floor=0.5),
        is_fresh=False,
    ),
    "policy_critic": PolicyGradient(critic=Critic(clip=0.2), is_fresh=False),
}
"""name -> an instance. Every entry is held to tests/invariants."""
