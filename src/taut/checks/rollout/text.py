"""The text that rewards read against the ids that were sampled: decoded here from the ids alone, up to what ended them.

text = the sampled ids of the last turn, without the token of the stop set that ended them, up to a stop text
"""

from __future__ import annotations

import numpy as np

from taut.checks.finding import Finding, failed, passed
from taut.checks.rollout.opened import groups, obstacle, roller
from taut.checks.session import Session
from taut.rl.sampler import Episode

SHOWN = 3


def ask(session: Session) -> Finding:
    """Do rewards read what was sampled, all of it and nothing else?"""
    why_not = obstacle(session)
    if why_not is not None:
        return why_not
    every = [one for group in session.once(groups) for one in group.episodes if one.error is None]
    other = [one for one in every if one.text != _text(session, one)]
    if other:
        return failed(
            f"the text of {len(other)} of {len(every)} completions is not that of their tokens",
            number=len(other),
            unit=f"of {len(every)} completions",
            evidence=[
                f"{one.row.id}#{one.index}: rewards read {one.text!r:.60}, sampled was {_text(session, one)!r:.60}"
                for one in other[:SHOWN]
            ],
            remedy="rewards would judge what was not said; please report this",
        )
    return passed("texts are those of the sampled tokens", len(every), "completions")


def _text(session: Session, episode: Episode) -> str:
    """The last turn, from its ids."""
    at_N = episode.sampled_at_N
    breaks = np.flatnonzero(np.diff(at_N) > 1)
    last = at_N[breaks[-1] + 1 :] if breaks.size else at_N
    ids = episode.ids_T[last].tolist()
    if ids and ids[-1] in session.stops.ids:
        ids = ids[:-1]
    text = str(session.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    for stop in session.once(roller).config.stop:
        text = text.partition(stop)[0]
    return text
