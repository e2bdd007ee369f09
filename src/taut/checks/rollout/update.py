"""All that trains is moved far, as no step would, and the engine is told: from then on it has to draw from that.

What it draws after the move is scored twice: by the moved weights, which it has to agree with, and by those put back.
An engine with weights of its own, or adapters that it never hears of, agrees with the latter. How far is raised until
the two can be told from each other.
"""

from __future__ import annotations

import numpy as np
import torch

from taut.checks.engine.asking import asked, limit, sampling, scored
from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.fit.weights import local, put_back, restore
from taut.checks.loss.step import scatter, trained
from taut.checks.rollout.opened import NONE_GENERATED
from taut.checks.session import Session
from taut.inference.local import LocalEngine
from taut.inference.vllm import ServerEngine

MOVES = (0.1, 0.5, 2.0)
"""Standard deviations of the move, in those of a tensor; of one that is all alike (a new adapter's), in SPREAD."""
SPREAD = 0.1
SEEN = 10.0
"""Differences of so many times what rounding makes are seen."""


def ask(session: Session) -> Finding:
    """After an update, does the engine draw from the new weights?"""
    if not session.is_generated:
        return skipped(NONE_GENERATED)
    engine = session.once(asked).engine
    if engine is None:
        return skipped(session.once(asked).obstacle)
    most = limit(session, engine)
    try:
        for move in MOVES:
            new, old = _apart(session, engine, move)
            if max(new, old) > SEEN * most:
                break
    finally:
        engine.update(0)  # the weights are back
    if new > most:
        return failed(
            f"after an update the engine is {new:.3g} nats a token off the new weights, {old:.3g} off the old",
            number=new,
            unit="nats a token",
            evidence=[f"at most {most:g} is rounding; weights moved by {move:g} of their spread"],
            remedy="roll-outs would be of weights that never change; set rollout.engine=local, or look at what the "
            "server was sent, and please report this",
        )
    if old <= SEEN * most:
        return skipped("no update makes a difference that is more than rounding")
    said = f"off the new weights; {old:.3g} off the old"
    return passed(said, new, "nats a token", ["weights put back"])


def _apart(
    session: Session, engine: LocalEngine | ServerEngine, move: float
) -> tuple[float, float]:
    """How far the engine's words are from the trainer's with the moved weights, and with those it had."""
    prompts = session.once(asked).prompts
    with put_back(session) as copies:
        _moved(session, move)
        engine.update(1)
        answers = engine.generate(prompts, sampling(session))
        new = scored(session, prompts, answers)
        restore(session, copies)
    old = scored(session, prompts, answers)
    said_N = np.concatenate([one.logp_N for one in answers if one.logp_N is not None])
    gaps = [np.abs(said_N - np.concatenate([logp_N for _, logp_N in one])) for one in (new, old)]
    new_gap, old_gap = (float(np.nan_to_num(gap, nan=np.inf).mean()) for gap in gaps)
    return new_gap, old_gap


@torch.no_grad()
def _moved(session: Session, move: float) -> None:
    scatter(session)
    generator = torch.Generator().manual_seed(session.run.seed)
    for parameter in trained(session).values():
        own = local(parameter)
        spread = float(own.float().std()) if own.numel() > 1 else 0.0
        noise = torch.randn(own.shape, generator=generator) * move * (spread or SPREAD)
        own.add_(noise.to(own.device, own.dtype))
