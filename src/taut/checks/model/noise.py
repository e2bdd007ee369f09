"""Two forwards of one sample in training mode. Noise that was asked for (noise.*, lora.dropout) is off without a
gradient, so what is left comes from the model itself: dropout its config does not name, layers skipped at random.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from taut.checks.differ import gap
from taut.checks.finding import Finding, failed, passed
from taut.checks.session import Session
from taut.data.packing import ALONE, pack


def ask(session: Session) -> Finding:
    """Does the model give the same numbers twice when it trains?"""
    with torch.no_grad(), session.job.compute():  # once around both: autocast keeps its casts
        moved = gap(_forward(session)[0], _forward(session)[0])
    says = session.says
    if moved > session.exact:
        outputs, others = (_forward(session, is_told=True)[1] for _ in range(2))
        where = next((n for n, t in outputs.items() if gap(t, others[n]) > 0), "the model itself")
        return failed(
            f"the same sample's {says.many} differ by {moved:.3g} {says.unit} from one forward to the next",
            number=moved,
            unit=says.unit,
            evidence=[f"first in {where}"],
            remedy="a layer draws random numbers in training that taut cannot key to samples; set its dropout or its "
            "like to 0 in the model's code or config, and please report the model",
        )
    return passed("two forwards in training mode agree", moved, says.unit)


def _forward(session: Session, *, is_told: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """What is said of a sample in training mode; where asked, the sums of what every module gave, innermost first."""
    scorer, sums = session.scorer, dict[str, Tensor]()
    names = {module: name for name, module in scorer.model.named_modules()}

    def keep(module: nn.Module, _: Any, output: Any) -> None:
        value = output[0] if isinstance(output, tuple) else output
        if isinstance(value, Tensor) and value.is_floating_point():
            sums[f"{names[module]} ({type(module).__name__})"] = value.double().sum()

    hooks = [module.register_forward_hook(keep) for module in names if is_told]
    was_training = scorer.training
    try:
        with torch.no_grad(), session.job.compute():
            scorer.train()
            return session.said(pack([session.short], ALONE)), sums
    finally:
        scorer.train(was_training)
        for hook in hooks:
            hook.remove()
