"""The gradient of the run's step (its attention, packing, shared prefixes, chunked head) against the sum over its
samples, each alone through the library's own attention, head and automatic differentiation: its numbers times the
derivative of the loss by them.
"""

from __future__ import annotations

from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.loss.alone import expected, library_numbers, obstacle
from taut.checks.loss.compare import ROUNDING, gradients, worst
from taut.checks.session import Session
from taut.models.self_test import library_attention
from taut.train import trainer
from taut.types import Sample


def ask(session: Session) -> Finding:
    """Is the gradient of packed samples the sum of theirs alone, by the library's own attention?"""
    job = session.job
    why_not = obstacle(session)
    if why_not is not None:
        return skipped(why_not)
    if job.noise is not None:
        return skipped("noise is on: samples alone would have other noise")
    if session.ranks.size > 1:
        return skipped("the library's own path runs on one rank")
    trees = session.trees
    samples = [sample for tree in trees for sample in tree.samples]
    ours = gradients(session, lambda: trainer.add_gradients(job, trees, 1))
    theirs = gradients(session, lambda: _alone(session, samples))
    name, error = worst(theirs, ours)
    library, limit = library_attention(session.model), ROUNDING[session.dtype]
    if not error <= limit:
        return failed(
            f"the gradient of {name} differs by {100 * error:.3g}% from the same samples alone (at most "
            f"{100 * limit:g}% is rounding)",
            number=error,
            unit="relative",
            evidence=[
                f"{len(samples)} samples, {sum(s.num_tokens for s in samples)} tokens, library's {library}"
            ],
            remedy="the backward of the packed forward is wrong; set attention=reference, and please report the model",
        )
    said = f"as {len(samples)} samples alone by the library's {library}; worst: {name}"
    return passed(said, error, "relative")


def _alone(session: Session, samples: list[Sample]) -> None:
    """In evaluation mode, where layers are not computed again in backward: by then another attention is in force."""
    job = session.job
    with session.quiet():
        numbers = {sample.id: library_numbers(session, sample) for sample in samples}
    slopes = expected(session, samples, numbers).slopes
    session.scorer.eval()
    for sample in samples:
        with job.compute():
            said = library_numbers(session, sample)
            loss = (slopes[sample.id].to(said) * said).sum()
        with job.compute_backward():
            loss.backward()  # type: ignore[no-untyped-call]
