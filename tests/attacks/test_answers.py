"""No answer makes a reward an error: it gets a number, in the answer's time."""

from __future__ import annotations

import math
import time

import pytest
from tests.attacks.answers import ANSWERS, SETUPS
from tests.helpers.all_rewards import ALL

from taut.rewards import RewardInput, Score
from taut.rewards.reward_set import open_rewards
from taut.rewards.settings import GradingConfig, RewardSpec
from taut.rewards.worker import _memory

pytestmark = pytest.mark.attack

SECONDS = 1.0
"""An answer's time."""
AGAIN = 20.0
"""Seconds in which a new process starts, loads the reward's library and judges the trivial answer."""
REFERENCE = "12345.678"


def test_every_reward_is_attacked() -> None:
    assert set(SETUPS) == {
        name for name, reward in ALL.items() if reward.runs in ("here", "process")
    }


QUICK = {"math": 4}
"""The rewards that are slow to judge all answers, because many take too long and a new process starts, and how many
answers they judge in ``make test``.
"""
CASES = [
    *((name, QUICK.get(name)) for name in SETUPS),
    *(pytest.param(name, None, marks=pytest.mark.slow) for name in QUICK),
]


@pytest.mark.parametrize(("name", "num_answers"), CASES)
def test_an_answer_gets_a_number_in_its_time(name: str, num_answers: int | None) -> None:
    setup = SETUPS[name]
    seconds = 20.0 if name == "code" else SECONDS  # of the program's start
    spec = RewardSpec(name=name, options=setup.options, timeout=seconds)
    known = {"references": (REFERENCE,), "row": setup.row, "num_tokens": 50}
    with open_rewards([spec], GradingConfig(workers=1)) as reward_set:
        for what, text in list(ANSWERS.items())[:num_answers]:
            begun = time.monotonic()
            (reward_result,) = reward_set.grade([RewardInput(text=text, **known)])
            took = time.monotonic() - begun
            (score,) = reward_result.parts.values()
            assert score.error is None, what
            does_not_apply = name == "language" and score.value is None  # too few letters
            assert does_not_apply or math.isfinite(score.value or 0.0), what
            assert not setup.is_wrong or score.value == 0, what
            assert took < seconds + AGAIN, what


def test_the_reason_is_kept_and_what_a_wrong_answer_gets_is_the_reward_s_own() -> None:
    options = {"max_tokens": 100, "judge": "math", "wrong": [-1, -1]}
    rewards = [
        RewardSpec(name="regex", timeout=SECONDS, options={"pattern": "^(a+)+$"}),
        RewardSpec(name="length_cosine", timeout=SECONDS, options=options),
    ]
    with open_rewards(rewards, GradingConfig(workers=1)) as reward_set:
        (late,) = reward_set.grade([RewardInput(text="a" * 40 + "!")], ["regex"])
        tower = RewardInput(text=ANSWERS["a power tower"], references=("5",), num_tokens=50)
        (wrong,) = reward_set.grade([tower], ["length_cosine"])
    assert late.parts["regex"] == Score(0.0, unjudged="regex took longer than 1 s and was killed")
    assert wrong.parts["length_cosine"].value == -1


def test_what_the_row_or_the_configuration_causes_stays_an_error() -> None:
    """The trivial answer meets it as well."""
    rewards = [
        RewardSpec(name="math", timeout=SECONDS),
        RewardSpec(name="json_schema", options={"column": "schema"}),
    ]
    asked = RewardInput(
        text=r"\boxed{5}", references=("$9^{9^{9^9}}$",), row={"schema": {"type": "nothing"}}
    )
    with open_rewards(rewards, GradingConfig(workers=1)) as reward_set:
        (reward_result,) = reward_set.grade([asked])
    assert reward_result.parts["math"] == Score(error="math took longer than 1 s and was killed")
    assert reward_result.parts["json_schema"].is_ours
    assert reward_result.total is None


def test_an_answer_is_limited_in_memory() -> None:
    with _memory(2**26), pytest.raises(MemoryError):
        bytearray(2**28)
    assert len(bytearray(2**28)) == 2**28, "afterwards as before"
