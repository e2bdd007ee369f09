"""Reward models in this process as rewards of a panel: ``open_panel(..., open_rater=open_rater)``.

An answer is rendered as a reward model's training renders one: prompt, answer, and the token that ends it, where the
number is read. So a cut answer is read as if it had ended; the reward ``stop`` tells them apart. Answers to one prompt
share its computation. An answer that cannot be rendered, or is longer than the model was made for, is an error of that
answer; a number that is not finite ends the run, for then the model is broken.

May import what rollout may. Evals, commands and methods import it.
"""

from __future__ import annotations

from collections.abc import Sequence

from taut.config import from_mapping, to_dict
from taut.data.formats import Completion, read_conversation
from taut.data.preferences import AnyRow
from taut.errors import DataError
from taut.rewards import Answered, Score, Verifier
from taut.rewards.panel import Rater
from taut.rewards.verifier import reason
from taut.rollout.judge import Judge, JudgeUse, open_judge
from taut.types import Sample


def open_rater(verifier: Verifier) -> Rater:
    """The model that a ``reward_model`` names, loaded and proved."""
    return rater(open_judge(from_mapping(JudgeUse, to_dict(verifier))))


def rater(judge: Judge) -> Rater:
    """The scores of a model that is ready."""

    def rate(answers: Sequence[Answered]) -> list[Score]:
        found = [_sample(judge, answered, number) for number, answered in enumerate(answers)]
        samples = [it for it in found if isinstance(it, Sample)]
        numbers = iter(judge.scores(samples) if samples else ())
        return [Score(float(next(numbers)[-1])) if isinstance(it, Sample) else it for it in found]

    return rate


def _sample(judge: Judge, answered: Answered, number: int) -> Sample | Score:
    """An answer as the model reads it, or why it cannot."""
    try:
        ((sample,),) = judge.render([_row(answered, f"answer {number}")])
    except DataError as error:
        return Score(error=reason(error))
    return sample


def _row(answered: Answered, place: str) -> AnyRow:
    prompt = answered.prompt
    if isinstance(prompt, str):
        return Completion(place, prompt, answered.text)
    turns = answered.messages or ({"role": "assistant", "content": answered.text},)
    return read_conversation(
        [dict(message) for message in (*prompt, *turns)],
        place,
        first_learned=len(prompt),
        column="prompt+completion",
    )
