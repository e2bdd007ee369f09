"""The losses of ``benchmarks/dpo.py``: what TRL and what taut is told, for the two to compute the same.

Every ``loss_type`` of TRL 1.16 but one: its ``bco_pair`` leaves out the shift of BCO's paper (arXiv 2404.04656), which
taut's ``bco`` has. TRL divides by the length after a divergence, taut before it: the two are not combined here. taut's
smoothed ``sigmoid`` (cDPO) is not to be had in TRL, where ``sigmoid`` takes no smoothing.

Imported by ``benchmarks/dpo.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Objective:
    """A loss by TRL's settings (``DPOConfig``) and by taut's (the section ``dpo``)."""

    trl: Mapping[str, Any]
    taut: Mapping[str, Any]
    has_plain_rewards: bool = True
    """Whether taut's rewards are log-ratios, as TRL's metrics always are."""


def _objective(
    trl: str | list[str], taut: Mapping[str, Any], *, has_plain_rewards: bool = True, **more: Any
) -> Objective:
    names = [trl] if isinstance(trl, str) else trl
    return Objective({"loss_type": names, **more}, taut, has_plain_rewards)


def _diverging(trl: str, taut: str, **more: Any) -> Objective:
    return _objective(
        "sigmoid",
        {"loss": "sigmoid", "divergence": taut, **more},
        has_plain_rewards=False,
        f_divergence_type=trl,
    )


SIGMOID = _objective("sigmoid", {"loss": "sigmoid"})
OBJECTIVES = {
    "sigmoid": SIGMOID,
    "hinge": _objective("hinge", {"loss": "hinge"}),
    "ipo": _objective("ipo", {"loss": "ipo"}),
    "robust": _objective("robust", {"loss": "robust", "label_smoothing": 0.1}, label_smoothing=0.1),
    "exo": _objective("exo_pair", {"loss": "exo", "label_smoothing": 1e-3}, label_smoothing=1e-3),
    "nca": _objective("nca_pair", {"loss": "nca"}),
    "sppo": _objective("sppo_hard", {"loss": "sppo"}),
    "apo_zero": _objective("apo_zero", {"loss": "apo_zero"}),
    "apo_down": _objective("apo_down", {"loss": "apo_down"}),
    "discopop": _objective("discopop", {"loss": "discopop"}),
    "aot": _objective("aot", {"loss": "aot", "label_smoothing": 0.1}, label_smoothing=0.1),
    "aot_unpaired": _objective("aot_unpaired", {"loss": "aot_unpaired"}),
    "per token": _objective(
        "sigmoid_norm", {"loss": "sigmoid", "length_normalized": True}, has_plain_rewards=False
    ),
    "with sft": _objective(
        ["sigmoid", "sft"], {"loss": "sigmoid", "sft_weight": 0.5}, loss_weights=[1.0, 0.5]
    ),
    "mixed": _objective(
        ["sigmoid", "nca_pair", "sft"],
        {"loss": ["sigmoid", "nca"], "loss_weights": [0.8, 0.2], "sft_weight": 1.0},
        loss_weights=[0.8, 0.2, 1.0],
    ),
    "forward_kl": _diverging("forward_kl", "forward_kl"),
    "js": _diverging("js_divergence", "js"),
    "alpha": _diverging("alpha_divergence", "alpha", alpha=0.5),
}
"""A name -> what both are told."""
