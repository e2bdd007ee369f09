"""A sample's score alone, beside others in either order, beside a longer one, and with what it begins with shared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from taut.checks.differ import gap
from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.reward.scored import some
from taut.checks.samples import text_at
from taut.checks.session import Session
from taut.data.packing import ALONE, PackPolicy
from taut.types import Sample


def ask(session: Session) -> Finding:
    """Is a score the same whatever else is in the batch?"""
    if not session.is_scalar:
        return skipped("the model gives no scores")
    if session.loaded.one_sample is not None:
        return skipped(f"nothing is packed: {session.loaded.one_sample}")
    samples = some(session)
    with session.quiet():  # once around all: autocast keeps its casts
        alone = {one.id: session.numbers([one])[one.id] for one in samples}
        worst, where, ways = 0.0, "", 0
        for how, batch, policy in _batches(session, samples):
            found = session.numbers(batch, policy)
            ways += 1
            for one in samples:
                moved = gap(found[one.id], alone[one.id])
                if moved > worst:
                    said = f"{float(alone[one.id][-1]):.4g} alone, {float(found[one.id][-1]):.4g} {how}"
                    worst, where = moved, f"{one.id}: {said}"
    if worst > session.tolerance:
        return failed(
            f"a score changes by {worst:.3g} with what is beside it",
            number=worst,
            unit="points",
            evidence=[where, f"at most {session.tolerance:g} is rounding in {session.dtype}"],
            remedy="scores are read at another sample's token; set batch.share_prefixes=false, and please report this",
        )
    return passed(f"alone as in {ways} other batches", worst, "points")


def _batches(
    session: Session, samples: list[Sample]
) -> Iterator[tuple[str, list[Sample], PackPolicy]]:
    """Ways to put the samples together."""
    yield "beside others", samples, ALONE
    yield "beside the same, turned round", samples[::-1], ALONE
    longest = max(samples, key=lambda one: one.num_tokens)
    ids_T = np.concatenate([longest.ids_T, longest.ids_T[text_at(longest)]])
    longer = replace(longest, id=f"{longest.id} twice", ids_T=ids_T, group=-1)
    yield "beside a longer one", [longer, *samples], ALONE
    if session.job.policy.share_prefixes:
        yield "with its beginning shared", [*samples, longer], PackPolicy(min_saved_tokens=1)
