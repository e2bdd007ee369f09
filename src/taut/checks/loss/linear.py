"""A loss that is linear in log-probs tells its weights beforehand, and the head forms the gradient from them alone.
They must be the derivative of the loss that is reported.
"""

from __future__ import annotations

import torch

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.session import Session
from taut.data.pack import pack
from taut.types import Scores

EXACT = 1e-9


def ask(session: Session) -> Finding:
    """Is the gradient that is formed in the forward that of the reported loss?"""
    loss = session.job.method.loss
    packed = pack([sample for tree in session.trees for sample in tree.samples])
    weights = loss.linear_weights(packed)
    if weights is None:
        return skipped("the loss needs more than weights known beforehand")
    generator = torch.Generator().manual_seed(0)
    logp_N = -torch.rand(packed.num_targets, generator=generator, dtype=torch.float64)
    terms = loss(Scores(logp_N.requires_grad_(True)), packed).terms
    worst = 0.0
    for name, term in terms.items():
        (derivative_N,) = torch.autograd.grad(term, logp_N)
        difference = (derivative_N - weights[name]).abs()
        worst = max(worst, float(difference.max() / derivative_N.abs().max()))
        if worst > EXACT:
            at = int(difference.argmax())
            token = session.inputs.token(int(packed.target_N[at]))
            return failed(
                f"the weights of {name} differ from its derivative by {100 * worst:.3g}%",
                number=worst,
                unit="relative",
                evidence=[
                    f"{packed.sample_ids[int(packed.row_N[at])]}, target {token!r}: weight "
                    f"{float(weights[name][at]):.6g}, derivative {float(derivative_N[at]):.6g}"
                ],
                remedy="make the loss's linear_weights the derivative of its terms, or have it return None",
            )
    return passed(f"weights of {packed.num_targets} targets are the derivative", worst, "relative")
