"""The head, in chunks and without keeping logits, both ways through it, against log_softmax of all logits. The hidden
states are those of the first batch. That these logits are the model's own was proven when it was loaded.

A scalar head has no chunks: that one number is the model's own is proven here again, on the model that trains.
"""

from __future__ import annotations

from taut.checks.differ import gap
from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.loss.step import step
from taut.checks.session import Session
from taut.models.heads import prove_scalar_head


def ask(session: Session) -> Finding:
    """Does the chunked head give the log-probs of the plain one?"""
    if session.is_scalar:
        return _scalar(session)
    worst, where, number = 0.0, "", 0
    for seen in session.once(step).heads:
        number += len(seen.plain_N)
        ways = {"computed again in backward": seen.recomputed_N}
        if seen.logp_N is not None:
            is_linear = session.job.method.loss.linear_weights(seen.packed) is not None
            way = "gradient formed in the forward" if is_linear else "as the run takes it"
            ways[way] = seen.logp_N
        for way, logp_N in ways.items():
            difference = (logp_N - seen.plain_N).abs().nan_to_num(nan=float("inf"))
            if float(difference.max()) > worst:
                at, worst = int(difference.argmax()), gap(logp_N, seen.plain_N)
                token = session.inputs.token(int(seen.packed.target_N[at]))
                name = seen.packed.sample_ids[int(seen.packed.row_N[at])]
                plainly = float(seen.plain_N[at])
                where = f"{name}, target {token!r}: {float(logp_N[at]):.6g}, plainly {plainly:.6g} ({way})"
    if worst > session.limit:
        return failed(
            f"a log-prob of the chunked head differs by {worst:.3g} nats from log_softmax of all logits",
            number=worst,
            unit="nats",
            evidence=[where],
            remedy="the head does more, or less, than taut computes; train another model, and please report this one",
        )
    return passed(f"both ways through the head, {number} targets", worst, "nats")


def _scalar(session: Session) -> Finding:
    """The scalar head instead. Raises ModelError where it is not the model's own."""
    if session.ranks.size > 1:
        return skipped("a sharded head is whole only inside the model; asked on one rank")
    with session.quiet():
        found = prove_scalar_head(session.scorer.model)
    return passed("the scalar head is the model's own", found, "points")
