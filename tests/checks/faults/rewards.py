"""Faults of rewards: functions that fail, or do not know a right answer."""

from __future__ import annotations

from pathlib import Path

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
