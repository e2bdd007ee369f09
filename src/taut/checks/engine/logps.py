"""What the engine says of the tokens it drew, against the scorer on prompt and completion, token in, token out.

Compared is the mean over all tokens, which rounding hardly moves. A ratio of the two would otherwise be a part of every
gradient of a method that learns from its own completions; here it says that what is evaluated is what trains.
"""

from __future__ import annotations

import numpy as np

from taut.alarms import TOLERANCE
from taut.checks.engine.asking import asked
from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.session import Session
from taut.types import Completion, Prompt, Sample


def ask(session: Session) -> Finding:
    """Do engine and trainer agree on the log-probs of what is sampled?"""
    engine, obstacle, prompts, answers = session.once(asked)
    if engine is None:
        return skipped(obstacle)
    paths = [_path(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    scored = session.numbers(paths)
    gaps = {}
    for path, answer in zip(paths, answers, strict=True):
        assert answer.logp_N is not None
        ours = scored[path.id].double().numpy()
        gaps[path.id] = np.nan_to_num(np.abs(answer.logp_N - ours), nan=np.inf)
    every = np.concatenate(list(gaps.values()))
    mean, limit = float(every.mean()), TOLERANCE[session.dtype]
    if mean > limit:
        name = max(gaps, key=lambda one: float(gaps[one].max()))
        at = int(gaps[name].argmax())
        path = next(path for path in paths if path.id == name)
        token = session.language.tokenizer.decode([int(path.ids_T[path.target_at_N[at]])])
        return failed(
            f"the engine's log-probs are {mean:.3g} nats a token off those of the trainer (at most {limit:g} is "
            "rounding)",
            number=mean,
            unit="nats a token",
            evidence=[
                f"{name}: token {at} of the answer, {token!r}: engine and trainer differ by {gaps[name][at]:.3g}"
            ],
            remedy="evaluations would be of another model than the one that trains; set eval.answers.rewards=[] and "
            "stop.prompts=0, or engine=server elsewhere, and please report this",
        )
    return passed(f"{every.size} tokens drawn, the same when scored", mean, "nats a token")


def _path(prompt: Prompt, answer: Completion) -> Sample:
    """Prompt and completion as ids; the completion is to be predicted."""
    ids_T = np.concatenate([prompt.ids_T, answer.ids_N])
    at_N = np.arange(prompt.ids_T.size, ids_T.size)
    return Sample(prompt.id, ids_T, at_N, np.ones(at_N.size))
