"""The same batch as the run would cut it, one sample at a time, and in halves with prefixes shared or not: the loop's
own functions, loss and every gradient compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.loss.compare import ROUNDING, gradients, worst
from taut.checks.session import Session
from taut.data.packing import PackPolicy
from taut.train import trainer
from taut.train.trainer import Job

LOSS = 0.25
"""Part of the limit of gradients that the loss may differ by, relatively,"""
SMALL = 0.1
"""or to this, where it is less: advantages add up to 0, and a policy's loss begins there."""


def ask(session: Session) -> Finding:
    """Do loss and gradient not depend on how a step is cut into micro-batches?"""
    trees = session.trees
    if len(trees) < 2:
        return skipped("the first step has one tree of samples")
    ours, loss = _taken(session, session.job)
    limit, most, most_name = ROUNDING[session.dtype], 0.0, ""
    cuts = dict(_cuts(session))
    for how, job in cuts.items():
        theirs, other = _taken(session, job)
        name, error = worst(ours, theirs)
        apart = abs(other - loss) / max(abs(loss), SMALL)
        if not (error <= limit and apart <= LOSS * limit):
            what = f"the gradient of {name} by {100 * error:.3g}%" if error > limit else "the loss"
            return failed(
                f"{how}, {what} differs: the loss is {other:.6g}, as the run cuts the step {loss:.6g}",
                number=max(error, apart),
                unit="relative",
                evidence=[
                    f"{len(trees)} {'rows' if trees[0].is_atom else 'samples'}; at most {100 * limit:g}% is rounding"
                ],
                remedy="a step would depend on batch.tokens_per_microbatch and on the number of ranks: a mean is taken "
                "over micro-batches, or a layer looks at the whole of one; please report this",
            )
        if error >= most:
            most, most_name = error, name
    return passed(f"cut in {1 + len(cuts)} ways; worst: {most_name}", most, "relative")


def _cuts(session: Session) -> Iterator[tuple[str, Job]]:
    """Other ways to cut the batch."""
    job = session.job
    tokens = sum(sample.num_tokens for sample in session.batch)
    if session.trees[0].is_atom:
        yield "one row at a time", replace(job, budget=job.budget._replace(tokens_per_microbatch=1))
    else:
        yield "one sample at a time", replace(job, budget=job.budget._replace(one_sample=True))
    if session.loaded.one_sample is not None:
        return
    halves = job.budget._replace(tokens_per_microbatch=max(1, tokens // 2))
    is_shared = not job.policy.share_prefixes and job.noise is None
    policy = PackPolicy(is_shared, 1 if is_shared else job.policy.min_saved_tokens)
    yield (
        f"in halves with prefixes {'shared' if is_shared else 'repeated'}",
        replace(job, budget=halves, policy=policy),
    )


def _taken(session: Session, job: Job) -> tuple[dict[str, Tensor], float]:
    losses: list[float] = []
    found = gradients(
        session, lambda: losses.append(trainer.add_gradients(job, session.trees, 1).loss)
    )
    return found, losses[0]
