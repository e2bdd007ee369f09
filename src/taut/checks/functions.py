"""Rewards and environments as functions: the same for the same answer, of more than its length, on a usable scale.

The user's own rewards are asked again: taut's are functions by their tests, and a judge's answer has its price.
"""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from typing import Any

import numpy as np

from taut.checks.chat_template import quoted, short_place
from taut.checks.registry import MAX_EXAMPLES, Finding, check, passed, skip_if, skipped, warned
from taut.checks.rollouts import GradedRewards, graded_rewards, rollout_worker
from taut.checks.session import Session
from taut.data.rows.prompts import PromptSet
from taut.evals.answers import to_reward_input
from taut.rewards.custom import UserReward
from taut.rewards.verifier import RewardInput
from taut.rl.environment import Outcome, Step

NO_OWN = "no reward is a function of your own"
LARGE = 1e4
"""A reward above which squares and sums lose digits."""
NARROW = 0.01
"""A spread of rewards, as a part of their size, below which dividing by it makes large updates of little."""


def _own(asked: GradedRewards) -> list[str]:
    """Labels of the user's own rewards."""
    return [part.label for part in asked.reward_set.parts if isinstance(part.verifier, UserReward)]


def _answers(session: Session, asked: GradedRewards) -> list[tuple[str, RewardInput]]:
    """Place and answers of some rows: right ones and wrong ones; nonsense where no row has a reference."""
    if not asked.graded and not asked.key:
        assert isinstance(session.train, PromptSet)
        rows = session.train.prompt_rows[:4]
        return [(row.place, it) for row in rows for it in _nonsense(to_reward_input(row, ""))]
    graded = asked.graded if session.part == "full" else asked.graded[:4]
    return [(of_row.asked.row.place, answer) for of_row in graded for answer in of_row.asked.all]


@check("rewards.steady", after=["rewards.gold"])
def rewards_are_functions_of_the_answer(session: Session) -> Finding:
    """Does the same answer get the same reward again: in another order, and later?

    All answers of some rows, backwards; in the full part a second later.
    """
    sets = [asked for asked in graded_rewards(session) if _own(asked)]
    skip_if(not sets, NO_OWN)
    lines, number = list[str](), 0
    for asked in sets:
        answers = _answers(session, asked)
        inputs, own = [answer for _, answer in answers], _own(asked)
        before = asked.reward_set.grade(inputs, own, extract=False)
        if session.part == "full":
            time.sleep(1.1)
        after = asked.reward_set.grade(inputs[::-1], own, extract=False)[::-1]
        number += len(answers)
        for (place, answer), first, second in zip(answers, before, after, strict=True):
            for label, score in second.parts.items():
                values = first.parts[label].value, score.value
                if values[0] != values[1]:
                    shown = f"{quoted(answer.text, 40)} gets {values[0]}, then {values[1]}"
                    lines.append(f"{short_place(place)}: {label}: {shown}")
    if lines:
        return warned(
            f"{len(lines)} of {number} answers get another reward when they are judged again",
            measured=(len(lines), f"of {number} answers"),
            evidence=lines[:MAX_EXAMPLES],
            remedy="let it depend on the answer and its row alone: not on chance, time, the order of calls or what was "
            "judged before; a run could not be repeated, and the difference is learned from as if it were merit",
        )
    return passed("the same in another order and later", number, "answers")


@check("rewards.scale", after=["rewards.gold"])
def rewards_measure_more_than_length(session: Session) -> Finding:
    """Do rewards of correctness depend on more than length, and do totals have a scale to learn from?

    Length is told by nonsense of 2 to 64 words beside right answers and wrong ones: one order of all by length and by
    reward.
    """
    sets = [asked for asked in graded_rewards(session) if asked.graded]
    skip_if(not sets, "no row has a reference answer, or no rewards are set")
    notes = []
    for asked in sets:
        results = [
            it for of_row in asked.graded for it in (*of_row.right, *of_row.others, of_row.empty)
        ]
        totals = [result.total for result in results if result.total is not None]
        largest, spread = (
            max(map(abs, totals), default=0.0),
            max(totals, default=0) - min(totals, default=0),
        )
        if largest > LARGE:
            return warned(
                f"rewards are as large as {largest:.3g}",
                measured=(largest, "the largest"),
                remedy="divide them, or give them a smaller weight: a value network, clipping and logs are made for "
                "numbers around 1",
            )
        if not asked.key and session.is_policy_gradient and 0 < spread < NARROW * largest:
            return warned(
                f"rewards of right and wrong answers differ by {spread:.3g}, at a size of {largest:.3g}",
                measured=(spread, f"of {largest:.3g}"),
                remedy="advantages are divided by that spread, so that noise makes updates of full size; let right and "
                "wrong answers be further apart",
            )
        notes.append(f"totals from {min(totals, default=0):.3g} to {max(totals, default=0):.3g}")
        inputs = [answer for of_row in asked.graded for answer in of_row.asked.all]
        nonsense = _nonsense(inputs[0])
        labels = [label for label in _own(asked) if asked.reward_set.judges[label] == "correctness"]
        more = asked.reward_set.grade(nonsense, labels, extract=False) if labels else []
        for label in labels:
            pairs = [
                (len(answer.text), result.parts[label].value)
                for answer, result in zip([*inputs, *nonsense], [*results, *more], strict=True)
                if result.parts[label].value is not None
            ]
            length_S, value_S = (
                np.unique(column, return_inverse=True)[1] for column in zip(*pairs, strict=True)
            )
            if min(length_S.max(), value_S.max()) < 6:
                continue
            together = float(np.corrcoef(length_S, value_S)[0, 1])
            if abs(together) > 0.95:
                kind = "longer" if together > 0 else "shorter"
                return warned(
                    f"{label} goes by length alone: the {kind} the answer, the more, nonsense included",
                    measured=(together, "correlation of ranks"),
                    remedy=f'mend {label}; or, if length is what it judges, set judges = "form" (in rewards, or as an '
                    "attribute of the function)",
                )
    return passed("more than length, on a scale to learn from", len(sets), "sets of rewards", notes)


def _nonsense(like: RewardInput) -> list[RewardInput]:
    """Answers to the same row that say nothing, of 2 to 64 words."""
    words = ["lorem", "ipsum", "dolor", "sit", "amet", "elit", "sed", "magna"] * 8
    return [
        replace(like, text=" ".join(words[:number]), num_tokens=2 * number + 1)
        for number in (2, 3, 5, 8, 12, 16, 24, 32, 48, 64)
    ]


@check("rollout.reset", after=["rollout.turns"])
def environments_begin_anew(session: Session) -> Finding:
    """Does each environment begin anew for each trajectory, and answer the turn that it was given?

    The first row is played several times, with the row's right answer and with another one: the same turns have to lead
    to the same, and a turn's outcome must not be that of the turn before.
    """
    environments, train = rollout_worker(session).environments, session.train
    if environments is None:
        return skipped("no environment answers: a path has one turn")
    assert isinstance(train, PromptSet)
    row = train.prompt_rows[0]
    kind = environments.kind_of(row)
    skip_if(kind.is_agent, "an agent asks by itself")

    def play(*texts: str) -> list[str]:
        """What reset and the steps return, in words."""

        def act() -> list[str]:
            environment, outcomes = kind.make(), []
            if (reset := getattr(environment, "reset", None)) is not None:
                outcomes.append(repr(reset(copy.deepcopy(dict(row.columns)))))
            for text in texts:
                step: Any = environment.step(text, [])
                outcomes.append(repr(step))
                if isinstance(step, Step) and step.done:
                    break
            return outcomes

        outcome: Outcome = environments.each({0: act})[0]
        return [str(outcome.error)] if outcome.error else outcome.value

    right = row.references[0] if row.references else "yes"
    wrong = "no idea"
    first, again = play(right, wrong), play(right, wrong)
    if first != again:
        before, after = next(
            pair for pair in zip([*first, ""], [*again, ""], strict=False) if pair[0] != pair[1]
        )
        return warned(
            "an environment goes another way when the same turns are played again",
            evidence=[
                f"{short_place(row.place)}: {quoted(before, 120)}",
                f"again: {quoted(after, 120)}",
            ],
            remedy="keep its state in the instance (self), and set it in reset; if it draws, draw by the row (random "
            "of a seed made of it): answers to one prompt are compared with each other",
        )
    other, both = play(wrong, right), play(right, right)
    is_late = first[:-1] == other[:-1] == both[:-1] and first[-1] == both[-1] != other[-1]
    if is_late and min(map(len, (first, other, both))) > 1:
        return warned(
            "an environment answers the turn before: its second step goes by the first turn alone",
            evidence=[
                f"{short_place(row.place)}: {quoted(first[-1], 120)} for {right!r}, then {wrong!r}"
            ],
            remedy="let step answer the text that it is given, and reward it",
        )
    return passed("the same turns lead to the same", len(first), "outcomes")
