"""Steps of an answer: where they lie, what they are worth together, and what each is charged with."""

from __future__ import annotations

import math

import pytest

from taut.errors import ConfigError
from taut.rewards.process_rewards import (
    Stepped,
    aggregate,
    marked,
    probability,
    split_steps,
    spread_over_steps,
)
from taut.rewards.registry import charges_steps, read_parts
from taut.rewards.settings import Aggregation, RewardSpec, StepsConfig


def test_steps_are_the_parts_with_text_without_the_white_space_around_them() -> None:
    text = " one\n\n\n\n two two \n\nthree\n\n"
    spans = split_steps(text, "\n\n")
    assert [text[start:stop] for start, stop in spans] == ["one", "two two", "three"]
    assert split_steps("  \n\n ", "\n\n") == []
    assert split_steps("", ";") == []


@pytest.mark.parametrize(
    ("how", "value", "charges"),
    [
        ("min", 0.5, [0.9, -0.4, 0.0]),
        ("product", 0.36, [0.9, -0.45, -0.09]),
        ("last", 0.8, [0.9, -0.4, 0.3]),
        ("mean", 2.2 / 3, [0.3, 0.5 / 3, 0.8 / 3]),
        ("sum", 2.2, [0.9, 0.5, 0.8]),
    ],
)
def test_the_charges_add_up_to_the_reward(
    how: Aggregation, value: float, charges: list[float]
) -> None:
    """By hand, of steps that are right with probability 0.9, 0.5 and 0.8."""
    values = [0.9, 0.5, 0.8]
    assert aggregate(values, how) == pytest.approx(value, abs=1e-12)
    assert spread_over_steps(values, how) == pytest.approx(charges, abs=1e-12)
    assert math.fsum(spread_over_steps(values, how)) == pytest.approx(value, abs=1e-12)
    assert aggregate([], how) == 0.0


def test_a_step_is_right_with_the_sigmoid_of_its_number() -> None:
    assert probability(0.0) == 0.5
    assert probability(math.log(3)) == pytest.approx(0.75, abs=1e-12)
    assert (probability(-1e4), probability(1e4)) == (0.0, 1.0)


def test_an_answer_s_steps_are_charged_where_they_end() -> None:
    config = StepsConfig(separator=";", charge=True)
    found = Stepped.of("ab; cd ;", [0.75, 0.5], config)
    assert (float(found), found.reply) == (0.5, "steps 0.750 0.500")
    assert found.steps == ((2, 0.75), (6, -0.25))
    assert Stepped.of("ab; cd ;", [0.75, 0.5], StepsConfig(separator=";")).steps == ()
    nothing = Stepped.of(" ; ", [], config)
    assert (float(nothing), nothing.reply, nothing.steps) == (0.0, "no step", ())


def test_what_charges_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"charge=true: .*; expected separator; set it"):
        StepsConfig(charge=True)
    options = {"model": "prm", "steps": {"separator": ";", "charge": True}}
    with pytest.raises(ConfigError, match=r"prm has steps\.charge=true and judges a part"):
        read_parts([RewardSpec(name="reward_model", label="prm", inside="answer", options=options)])
    assert charges_steps([RewardSpec(name="reward_model", options=options)])
    assert not charges_steps(["math", RewardSpec(name="reward_model", options={"model": "prm"})])


def test_marks_stand_after_each_step_and_in_place_of_a_separator_that_they_end_with() -> None:
    assert marked("a\n\nbc\n", "\n", " ki") == ("a ki\nbc ki", [(0, 4), (5, 10)])
    assert marked("a\n\nbc\n", "\n", "\n") == ("a\nbc\n", [(0, 2), (2, 5)])
