"""What the engine says of the tokens it drew, against the scorer on prompt and completion, token in, token out.

Compared is the mean over all tokens, which rounding hardly moves. A ratio of the two is a part of every gradient of a
method that learns from its own completions; for others it says that what is evaluated is what trains.
"""

from __future__ import annotations

import numpy as np

from taut.checks.engine.asking import asked, limit, scored
from taut.checks.finding import Finding, failed, passed, skipped
from taut.checks.session import Session

IN_TRAINING = (
    "the ratio of the two would be a part of every gradient; set rollout.engine=local, or start the server with the "
    "model that trains, in its precision, and please report this"
)
IN_EVALUATION = (
    "evaluations would be of another model than the one that trains; set eval.answers.rewards=[] and stop.prompts=0, "
    "or engine=server elsewhere, and please report this"
)


def ask(session: Session) -> Finding:
    """Do engine and trainer agree on the log-probs of what is sampled?"""
    engine, obstacle, prompts, answers = session.once(asked)
    if engine is None:
        return skipped(obstacle)
    refused = [one for one in answers if one.logp_N is None or not one.ids_N.size]
    if refused:
        return failed(
            f"the engine fails on {len(refused)} of {len(answers)} completions",
            evidence=[f"{one.prompt_id}: {one.error or 'no log-probs'}" for one in refused[:3]],
            remedy="see what the engine, or the server's log, says of it",
        )
    paths, gaps = [], {}
    for (path, ours_N), answer in zip(scored(session, prompts, answers), answers, strict=True):
        assert answer.logp_N is not None
        paths.append(path)
        gaps[path.id] = np.nan_to_num(np.abs(answer.logp_N - ours_N), nan=np.inf)
    every = np.concatenate(list(gaps.values()))
    mean, most = float(every.mean()), limit(session, engine)
    if mean > most:
        name = max(gaps, key=lambda one: float(gaps[one].max()))
        at = int(gaps[name].argmax())
        path = next(path for path in paths if path.id == name)
        token = session.language.tokenizer.decode([int(path.ids_T[path.target_at_N[at]])])
        return failed(
            f"the engine's log-probs are {mean:.3g} nats a token off those of the trainer (at most {most:g} is "
            "rounding)",
            number=mean,
            unit="nats a token",
            evidence=[
                f"{name}: token {at} of the answer, {token!r}: engine and trainer differ by {gaps[name][at]:.3g}"
            ],
            remedy=IN_TRAINING if session.is_generated else IN_EVALUATION,
        )
    return passed(f"{every.size} tokens drawn, the same when scored", mean, "nats a token")
