"""Steps of an answer as turns: where each of them ends among the sampled tokens.

A reward says where steps end in the text of an answer (``RewardResult.steps``). The tokens spell that text, so a step
ends with the token that holds its last character, and its reward is given to a turn that ends there. The last step ends
with the answer's last token, which ends the turn. The separator of two steps belongs to the later one, as far as no
token holds both.
"""

from __future__ import annotations

import bisect
import codecs
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from taut.rewards.reward_set import RewardResult
from taut.rl.sampler import Trajectory


def assign_step_rewards(
    reward_result: RewardResult, trajectory: Trajectory, pieces: Sequence[bytes]
) -> RewardResult:
    """Return the result with its steps by sampled token. ``pieces``: the bytes of each id, none of a special token.

    Where the tokens of the last turn do not spell its text, the rewards that charge steps are errors.
    """
    if not reward_result.steps or reward_result.total is None:
        return reward_result
    at_N = trajectory.sampled_at_N
    gaps = np.flatnonzero(np.diff(at_N) > 1)
    first = int(gaps[-1]) + 1 if gaps.size else 0
    decoder, text, ends = codecs.getincrementaldecoder("utf-8")("replace"), "", list[int]()
    for token in trajectory.ids_T[at_N[first:]].tolist():
        text += decoder.decode(pieces[token])
        ends.append(len(text))
    start = text.find(trajectory.text)
    if start < 0:
        found = f"the tokens {text!r:.60} do not spell the answer {trajectory.text!r:.60}"
        error = f"{found}; expected its text; take steps.charge out"
        parts = {
            name: score._replace(value=None, error=error) if score.steps else score
            for name, score in reward_result.parts.items()
        }
        return RewardResult(parts, None)
    start -= len(trajectory.row.beginning)  # which the rewards read too
    last, rewards = max(end for end, _ in reward_result.steps), dict[int, float]()
    for end, reward in reward_result.steps:
        number = len(ends) - 1 if end == last else bisect.bisect_left(ends, start + end)
        rewards[first + number] = rewards.get(first + number, 0.0) + reward
    return replace(reward_result, turn_rewards=tuple(sorted(rewards.items())))
