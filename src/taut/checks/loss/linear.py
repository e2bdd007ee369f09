"""A loss that is linear in log-probs tells its weights beforehand, and the head forms the gradient from them alone.
They must be the derivative of the loss that is reported.
"""

from __future__ import annotations

import torch

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.session import Session
from taut.data.packing import pack
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
    drawn = torch.rand(2, packed.num_targets, generator=generator, dtype=torch.float64)
    logp_N, divergence_N = (-drawn[0]).requires_grad_(), drawn[1].requires_grad_()
    given = [logp_N] if loss.wants.divergence is None else [logp_N, divergence_N]
    terms = loss(Scores(logp_N, divergence_N=divergence_N), packed).terms
    worst = 0.0
    for name, term in terms.items():
        grads = torch.autograd.grad(term, given, materialize_grads=True)
        derivative, weight = torch.stack(grads), weights[name].reshape(len(given), -1)
        difference = (derivative - weight).abs()
        worst = max(worst, float(difference.max() / derivative.abs().max()))
        if worst > EXACT:
            of, at = divmod(int(difference.argmax()), packed.num_targets)
            token = session.inputs.token(int(packed.target_N[at]))
            return failed(
                f"the weights of {name} differ from its derivative by {100 * worst:.3g}%",
                number=worst,
                unit="relative",
                evidence=[
                    f"{packed.sample_ids[int(packed.row_N[at])]}, target {token!r}: weight "
                    f"{float(weight[of, at]):.6g}, derivative {float(derivative[of, at]):.6g}"
                ],
                remedy="make the loss's linear_weights the derivative of its terms, or have it return None",
            )
    return passed(f"weights of {packed.num_targets} targets are the derivative", worst, "relative")
