"""The same prompts again, and half of them apart from the others: a completion's randomness is its own.

In other company a token may change where its draw lies within rounding of a boundary; that is rare, and one completion
may differ so. In bfloat16 it is not rare, and only the same call is made again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from taut.checks.engine.asking import asked, sampling
from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.session import Session
from taut.inference.vllm import ServerEngine
from taut.types import Completion


def ask(session: Session) -> Finding:
    """Does the same seed give the same completions, whatever is generated beside them?"""
    engine, obstacle, prompts, answers = session.once(asked)
    if engine is None:
        return skipped(obstacle)
    if isinstance(engine, ServerEngine):
        return skipped("a server may answer otherwise when it is asked again")
    again = engine.generate(prompts, sampling(session))
    if changed := _changed(answers, again):
        return _failed(changed, len(answers), "asked the same again")
    if session.dtype == torch.bfloat16:
        return passed("the same when asked again", len(answers), "completions")
    apart = range(1, len(prompts), 2)
    few = engine.generate([prompts[at] for at in apart], sampling(session))
    names = {prompts[at].id for at in apart}
    changed = _changed([one for one in answers if one.prompt_id in names], few)
    if len(changed) > 1:
        return _failed(changed, len(few), "asked beside fewer others")
    return passed("the same when asked again, and beside fewer others", len(answers), "completions")


def _changed(left: Sequence[Completion], right: Sequence[Completion]) -> list[str]:
    return [
        f"{one.prompt_id}: {one.ids_N.tolist()[:6]}, then {other.ids_N.tolist()[:6]}"
        for one, other in zip(left, right, strict=True)
        if one.ids_N.tolist() != other.ids_N.tolist()
    ]


def _failed(changed: list[str], number: int, how: str) -> Finding:
    return failed(
        f"{len(changed)} of {number} completions are others when {how}",
        number=len(changed),
        unit=f"of {number} completions",
        evidence=changed[:3],
        remedy="an evaluation could not be had twice; please report this",
    )
