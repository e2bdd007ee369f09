"""One sample with two different ends: the common beginning computed once, and each computed alone."""

from __future__ import annotations

from taut.checks.differ import changed, drift, first_word
from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.session import Session
from taut.data.packing import PackPolicy


def ask(session: Session) -> Finding:
    """Does a prefix computed once for two samples give what it gives computed twice?"""
    if not session.job.policy.share_prefixes:
        return skipped("prefixes are not shared in this run")
    sample = max(session.pair, key=lambda one: one.num_tokens)
    half = first_word(sample, max(1, sample.num_tokens // 2))
    changes = range(half, sample.num_tokens)
    other = changed(session, sample, changes, f"{sample.id} with another end")
    with session.quiet():  # once around all: autocast keeps its casts
        shared = session.numbers([sample, other], PackPolicy(min_saved_tokens=1))
        alone = {sample.id: session.alone[sample.id], **session.numbers([other])}
    gaps = {name: drift(shared[name], logp_N) for name, logp_N in alone.items()}
    name, moved = max(gaps.items(), key=lambda item: item[1])
    unit = f"{session.says.unit} a token"
    if moved > session.tolerance:
        return failed(
            f"with its first {half} tokens shared, the {session.says.many} of {name} are {moved:.3g} {unit} off",
            number=moved,
            unit=unit,
            evidence=[f"{sample_id}: {value:.3g}" for sample_id, value in gaps.items()],
            remedy="set batch.share_prefixes=false, and please report the model",
        )
    return passed(f"{half} shared tokens change nothing", moved, unit)
