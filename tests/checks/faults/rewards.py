"""Faults of rewards: functions that fail, or do not know a right answer."""

from __future__ import annotations

from pathlib import Path

from tests.checks.faults.rollout import sums
from tests.checks.planting import Place, fault
from tests.helpers.chat_runs import chats, write_rows

from taut.checks.session import Session

SOUND = """\
def judged(text, references, row):
    return float(text.strip() in references)
"""
PROGRAM = """\
```python
def add_{number}(x):
    return x + {number}
```"""


def _judging(place: Place, code: str | None) -> Session:
    """A run that is evaluated with a function: a sound one where ``code`` is None."""
    path: Path = place.directory / "judged.py"
    path.write_text(SOUND if code is None else code)
    questions = write_rows(place.directory / "eval.jsonl", chats(8, seed=5))
    return place.session(
        eval__answers__rewards=f"{path}:judged", eval__answers__data=str(questions)
    )


@fault("rewards.gold", says="KeyError: 'answer'", part="quick")
def a_function_that_wants_another_column(place: Place, is_faulty: bool) -> Session:
    """The reward reads a column that no row has, and fails on all of them."""
    code = "def judged(text, references, row):\n    return float(text == row['answer'])\n"
    return _judging(place, code if is_faulty else None)


@fault("rewards.gold", says="the same as any other answer", part="quick")
def a_function_that_swallows_its_own_errors(place: Place, is_faulty: bool) -> Session:
    """What the reward cannot do, it calls 0: every answer is as good as none."""
    code = (
        "def judged(text, references, row):\n"
        "    try:\n"
        "        return float(text == row['solution'])\n"
        "    except KeyError:\n"
        "        return 0.0\n"
    )
    return _judging(place, code if is_faulty else None)


@fault("rewards.gold", says="less than other rows' answers")
def a_function_that_rewards_the_wrong_way(place: Place, is_faulty: bool) -> Session:
    """A distance is given where a likeness is wanted."""
    code = "def judged(text, references, row):\n    return float(text not in references)\n"
    return _judging(place, code if is_faulty else None)


@fault("rewards.gold", says="applies to none", part="quick")
def a_function_that_never_applies(place: Place, is_faulty: bool) -> Session:
    """The reward returns nothing for every row, so nothing is measured."""
    code = "def judged(text, references, row):\n    return None\n"
    return _judging(place, code if is_faulty else None)


@fault("rewards.gold", says="applies to none", part="quick")
def a_function_of_form_that_never_applies(place: Place, is_faulty: bool) -> Session:
    """A reward of form need not know right answers, but it has to say something of one."""
    value = "None" if is_faulty else "1 / (1 + len(text))"
    code = f"def judged(text):\n    return {value}\n\njudged.judges = 'form'\n"
    return _judging(place, code)


@fault("rewards.gold", says="asserts nothing", part="quick")
def tests_that_compare_and_assert_nothing(place: Place, is_faulty: bool) -> Session:
    """The tests of some rows execute no assertion: any program would pass them."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"write add_{number}(x), which adds {number} to x"},
                {"role": "assistant", "content": PROGRAM.format(number=number)},
            ],
            "test": f"def test_it():\n    {test} add_{number}(1) == {number + 1}\n",
        }
        for number, test in enumerate(["assert"] * 6 + ["found =" if is_faulty else "assert"] * 2)
    ]
    questions = write_rows(place.directory / "eval.jsonl", rows)
    return place.session(eval__answers__rewards="code", eval__answers__data=str(questions))


STEADY = """\
import os, random, time

CALLS = []

def by_chance(text, references):
    return float(text in references) + random.SystemRandom().random() / 10

def by_order(text, references):
    CALLS.append(text)
    return float(text in references) + len(CALLS) / 100

def by_clock(text, references):
    return float(text in references) + time.time() % 1000 / 1e4

def by_length(text):
    return len(text) / 100

def in_millions(text, references):
    return 1e30 * (text in references)

def narrow(text, references):
    return 0.5 + 0.001 * (text in references)

def tiny(text, references):
    return 1e-6 * (text in references)

def sound(text, references):
    return float(text in references) - 0.0001 * len(text)
"""


def _named(place: Place, name: str, is_faulty: bool) -> Session:
    """A run of PPO with a reward of STEADY."""
    path: Path = place.directory / "steady.py"
    path.write_text(STEADY)
    rows = sums()
    for number, row in enumerate(rows):
        row["answer"] = " ".join(["cat", "dog", "bird"][: number % 3 + 1]) + f" {number}"
    reward = f"{path}:{name if is_faulty else 'sound'}"
    keys = {"method": "ppo", "rewards": reward, "rollout__max_new_tokens": 12}
    return place.session(data=place.data(rows), **keys)


@fault("rewards.steady", says="not on chance", part="quick", outcome="warning")
def a_reward_that_a_coin_decides(place: Place, is_faulty: bool) -> Session:
    """Some noise was added, so that no two answers are equal."""
    return _named(place, "by_chance", is_faulty)


@fault(
    "rewards.steady",
    says="another reward when they are judged again",
    part="quick",
    outcome="warning",
)
def a_reward_that_counts_its_calls(place: Place, is_faulty: bool) -> Session:
    """Later answers are worth more: a list that is kept between calls."""
    return _named(place, "by_order", is_faulty)


@fault("rewards.steady", says="by_clock", outcome="warning")
def a_reward_that_looks_at_the_clock(place: Place, is_faulty: bool) -> Session:
    """The time is a part of it."""
    return _named(place, "by_clock", is_faulty)


@fault("rewards.steady", says="the longer the answer", part="quick", outcome="warning")
def a_reward_of_length_alone(place: Place, is_faulty: bool) -> Session:
    """Longer answers were better in the sample that somebody looked at."""
    return _named(place, "by_length", is_faulty)


@fault("rewards.steady", says="1e+30", part="quick", outcome="warning")
def a_reward_of_another_size(place: Place, is_faulty: bool) -> Session:
    """A division was forgotten."""
    return _named(place, "in_millions", is_faulty)


@fault("rewards.steady", says="0.001 apart", part="quick", outcome="warning")
def a_reward_that_hardly_differs(place: Place, is_faulty: bool) -> Session:
    """Half of it is given for nothing, and right is hardly more."""
    return _named(place, "narrow", is_faulty)


@fault("rewards.steady", says="1e-06 apart", part="quick", outcome="warning")
def a_reward_in_millionths(place: Place, is_faulty: bool) -> Session:
    """It was divided by the number of tokens of all answers."""
    return _named(place, "tiny", is_faulty)
