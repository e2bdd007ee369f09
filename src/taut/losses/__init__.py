"""The losses: frozen dataclasses of pure maths. A new loss is 25 lines in one file and a line in ``LOSSES``.

``loss.py`` defines what a loss is. Losses import types, errors and torch only.
"""

from __future__ import annotations

from taut.losses.loss import Loss, Unit, count, count_silent
from taut.losses.policy import SURROGATES, Bounds, Correction, Critic, Kl, PolicyGradient
from taut.losses.preference import VARIANTS, Orpo, Preference, Unpaired, cpo, simpo
from taut.losses.reward import BradleyTerry, Process, Regression
from taut.losses.supervised import CrossEntropy

__all__ = ["LOSSES", "Loss", "Unit", "count", "count_silent"]

_SMOOTHED = {"robust": 0.1, "exo": 1e-3, "aot": 0.1}

LOSSES: dict[str, Loss] = {
    "cross_entropy": CrossEntropy(),
    **{
        f"dpo_{name}": Preference(terms=((name, 1.0),), label_smoothing=_SMOOTHED.get(name, 0.0))
        for name in VARIANTS
    },
    "dpo_conservative": Preference(label_smoothing=0.1),
    "dpo_forward_kl": Preference(divergence="forward_kl"),
    "dpo_js": Preference(divergence="js"),
    "dpo_alpha": Preference(divergence="alpha", alpha=0.5),
    "dpo_length_normalised": Preference(length_normalised=True, beta=2.0),
    "dpo_margin": Preference(margin=1.0),
    "dpo_reference_free": Preference(reference_free=True),
    "dpo_mpo": Preference(terms=(("sigmoid", 0.8), ("bco", 0.2)), sft_weight=1.0, entropy=True),
    "kto": Unpaired(undesirable_weight=1.3),
    "bco_unpaired": Unpaired("bco"),
    "apo_zero_unpaired": Unpaired("apo_zero"),
    "orpo": Orpo(),
    "simpo": simpo(beta=2.0, gamma=1.0),
    "alphapo": simpo(beta=2.0, gamma=0.5, alpha=0.25),
    "cpo_sigmoid": cpo(beta=0.1),
    "cpo_hinge": cpo(beta=0.1, variant="hinge"),
    "cpo_ipo": cpo(beta=0.1, variant="ipo"),
    "bradley_terry": BradleyTerry(margin=1.0, centring=0.01),
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
