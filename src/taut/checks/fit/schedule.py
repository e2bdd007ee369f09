"""The learning rate of every step, as the loop will ask for it."""

from __future__ import annotations

import math

from taut.checks.finding import Finding, failed, passed, warned
from taut.checks.session import Session
from taut.train import optim

MOST = 20_000
"""Steps that are looked at; evenly spread where a run has more."""


def ask(session: Session) -> Finding:
    """Does the learning rate rise to what was asked for, and is it never zero?"""
    job, peak = session.job, optim.highest(session.run.optim_in_force)
    stride = math.ceil(job.num_steps / MOST)
    rates = {step: job.learning_rate(step) for step in range(1, job.num_steps + 1, stride)}
    wrong = [step for step, rate in rates.items() if not 0.0 < rate <= peak * (1 + 1e-9)]
    if wrong:
        return failed(
            f"the learning rate of {len(wrong)} of {len(rates)} steps is not above 0 and at most {peak:g}",
            number=len(wrong),
            unit=f"of {len(rates)} steps",
            evidence=[f"step {step}: {rates[step]:g}" for step in wrong[:3]],
            remedy="those steps would teach nothing, or too much; set another optim.schedule, and please report this",
        )
    at, highest = max(rates.items(), key=lambda item: item[1])
    said = f"{rates[1]:.3g} first, highest at step {at}, {rates[max(rates)]:.3g} last"
    if highest < 0.999 * peak and stride == 1:
        return warned(
            f"the highest learning rate is {highest:.3g} of {peak:g}: the warm-up is as long as the run",
            number=highest,
            unit="highest",
            remedy="set a lower optim.warmup_ratio or optim.warmup_steps, or more steps",
            notes=[said],
        )
    return passed(said, highest, "highest")
