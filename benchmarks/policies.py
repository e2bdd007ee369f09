"""The losses of ``benchmarks/grpo.py``: what TRL and what taut is told, for the two to compute the same.

Every ``loss_type`` of TRL 1.16 that taut has too, with its divergences and its entropy. TRL's ``luspo`` and ``vespo``
are not in taut; taut's ``gmpo``, ``gspo_token`` and ``reinforce`` are not in TRL. Of one batch TRL's ``bnpo`` is
``dapo``.

Imported by ``benchmarks/grpo.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Policy:
    """A loss by TRL's settings (``GRPOConfig``) and by taut's (the section ``grpo``)."""

    trl: Mapping[str, Any]
    taut: Mapping[str, Any]
    is_fresh: bool = False
    """Whether the old policy is the policy itself."""
    has_value: bool = True
    """Whether the losses are equal too, and not their gradients alone."""
    temperature: float = field(default=1.0, kw_only=True)


CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}
DAPO = {"loss_type": "dapo", **CLIP}
K3 = {"kl_coef": 0.04, "kl_gradient": "k3"}
POLICIES = {
    "fresh": Policy(DAPO, {}, is_fresh=True),
    "dapo": Policy(DAPO, {}),
    "bnpo": Policy({"loss_type": "bnpo", **CLIP}, {}),
    "grpo": Policy({"loss_type": "grpo", **CLIP}, {"loss_aggregation": "sequence"}),
    "dr_grpo": Policy({"loss_type": "dr_grpo", **CLIP}, {"loss_aggregation": "constant"}),
    "delta": Policy({**DAPO, "delta": 1.3}, {"dual_clip": 1.3}),
    "gspo": Policy(
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 3e-4,
            "epsilon_high": 4e-4,
        },
        {"loss": "gspo"},
    ),
    "cispo": Policy({"loss_type": "cispo", "epsilon_high": 5.0}, {"loss": "cispo"}),
    "sapo": Policy({"loss_type": "sapo"}, {"loss": "sapo"}),
    "k3": Policy({**DAPO, "beta": 0.04, "use_bias_correction_kl": False}, K3),
    "k3, grpo": Policy(
        {"loss_type": "grpo", **CLIP, "beta": 0.04, "use_bias_correction_kl": False},
        {"loss_aggregation": "sequence", **K3},
    ),
    "corrected kl": Policy({**DAPO, "beta": 0.04}, {"kl_coef": 0.04}, has_value=False),
    "entropy": Policy({**DAPO, "entropy_coef": 0.01}, {"entropy_coef": 0.01}),
    "temperature": Policy({**DAPO, "temperature": 0.7}, {}, temperature=0.7),
}
"""A name -> what both are told."""
