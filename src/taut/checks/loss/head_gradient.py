"""The gradient that the chunked head gives, both ways through it, against automatic differentiation of log_softmax of
all logits, with respect to hidden states, weight, bias and rows that train by themselves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.loss.step import head_of, step
from taut.checks.session import Session
from taut.models.architecture import HeadSpec
from taut.models.scorer import score_hidden

TARGETS = 48
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest relative difference of a gradient that is rounding, by compute dtype."""
WAYS = {"gradient formed in the forward": True, "computed again in backward": False}


def ask(session: Session) -> Finding:
    """Does the chunked head give the gradient of the plain one?"""
    if session.is_scalar:
        return skipped("a reward model has no output head")
    if session.ranks.size > 1:
        return skipped("a sharded head is whole only inside the model; asked on one rank")
    seen = session.once(step).heads[0]
    hidden_ND = seen.hidden_ND[:TARGETS].detach()
    target_N = seen.packed.target_N[:TARGETS].to(hidden_ND.device)
    generator = torch.Generator().manual_seed(0)
    share_N = (0.5 + torch.rand(len(target_N), generator=generator)).to(hidden_ND)
    plain = _gradients(session, hidden_ND, target_N, share_N, None)
    worst, where = 0.0, ""
    for way, is_linear in WAYS.items():
        ours = _gradients(session, hidden_ND, target_N, share_N, is_linear)
        for name, expected in plain.items():
            error = float((ours[name] - expected).norm() / expected.norm().clamp_min(1e-300))
            if not error <= worst:
                worst, where = error, f"with respect to the {name} ({way})"
    if not worst <= ROUNDING[session.dtype]:
        return failed(
            f"the head's gradient differs by {100 * worst:.3g}% from that of log_softmax",
            number=worst,
            unit="relative",
            evidence=[where],
            remedy="the head's own backward does not know all that its forward does (a scale, a softcap, a bias); "
            "please report the model",
        )
    return passed(f"both ways through the head; {len(target_N)} targets", worst, "relative")


def _gradients(
    session: Session, hidden_ND: Tensor, target_N: Tensor, share_N: Tensor, is_linear: bool | None
) -> dict[str, Tensor]:
    """Of the sum of share * logp. ``is_linear``: which way through the chunked head; None: plainly."""
    spec, leaves = _leaves(head_of(session))
    hidden_ND = leaves["hidden states"] = hidden_ND.clone().requires_grad_(True)
    total: Tensor | None
    with session.job.compute():
        if is_linear is None:
            every = torch.log_softmax(spec.logits(hidden_ND), -1)
            total = (share_N * every.gather(1, target_N[:, None]).squeeze(1)).sum()
        elif is_linear:
            total = score_hidden(hidden_ND, target_N, spec, share_N).linear_sum
        else:
            total = (share_N * score_hidden(hidden_ND, target_N, spec).logp_N).sum()
    assert total is not None
    with session.job.compute_backward():
        found = torch.autograd.grad(total, list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


def _leaves(spec: HeadSpec) -> tuple[HeadSpec, dict[str, Tensor]]:
    """The head on tensors of its own that share the weights' memory, those that train requiring a gradient."""
    leaves: dict[str, Tensor] = {}

    def leaf(name: str, parameter: nn.Parameter) -> Any:
        own = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        if own.requires_grad:
            leaves[name] = own
        return own

    rows = spec.rows
    spec = replace(
        spec,
        weight=leaf("weight", spec.weight),
        bias=None if spec.bias is None else leaf("bias", spec.bias),
        rows=None if rows is None else rows._replace(weight_RD=leaf("rows", rows.weight_RD)),
    )
    return spec, leaves
