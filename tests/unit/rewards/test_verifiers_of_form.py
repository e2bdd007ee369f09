"""Verifiers of form: tags, length, repetition, stop; and what of an answer a reward is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.refusals import ErrorCode, refused

from taut.config import from_mapping
from taut.errors import ConfigError
from taut.rewards import RewardInput
from taut.rewards.format import Repetition, Tags
from taut.rewards.length import LengthCosine, LengthOverlong, LengthTarget, Stop
from taut.rewards.registry import files_of, read_parts
from taut.rewards.reward_set import open_rewards
from taut.rewards.settings import RewardSpec
from taut_tools.sandbox.code import Code

WHOLE = "<think>2 + 2</think>\n<answer>4</answer>\n"


def sampled(num_tokens: int, **known: Any) -> RewardInput:
    return RewardInput(text="", num_tokens=num_tokens, **known)


@pytest.mark.parametrize(
    ("text", "whole", "partial"),
    [
        (WHOLE, 1.0, 1.0),
        ("<think></think><answer></answer>", 1.0, 1.0),
        (f"So: {WHOLE}", 0.0, 0.5),
        (f"{WHOLE} That is all.", 0.0, 0.5),
        ("<think>2 + 2</think> 4", 0.0, 0.25),
        ("<think>2 + 2", 0.0, 0.125),
        ("<answer>4</answer><think>2 + 2</think>", 0.0, 0.25),
        ("<think>a<think>b</think><answer>4</answer>", 0.0, 0.375),
        (WHOLE * 2, 0.0, 0.0),
        ("4", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_tags_stand_once_in_order_and_alone(text: str, whole: float, partial: float) -> None:
    assert Tags()(RewardInput(text=text)) == whole
    assert Tags(partial=True)(RewardInput(text=text)) == partial


def test_the_first_tag_may_be_opened_by_the_prompt() -> None:
    rest = WHOLE.removeprefix("<think>")
    assert Tags()(RewardInput(text=rest)) == 0.0
    assert Tags(is_opened=True)(RewardInput(text=rest)) == 1.0
    assert Tags(is_opened=True)(RewardInput(text=WHOLE)) == 0.0
    assert Tags()(RewardInput(text=rest, opened="<think>")) == 1.0
    assert Tags(is_opened=True)(RewardInput(text=rest, opened="<think>")) == 1.0
    assert Tags(partial=True)(RewardInput(text="no end", opened="<think>")) == 0.125
    assert Tags()(RewardInput(text=WHOLE, opened="<answer>")) == 1.0  # not the first tag
    assert Tags()(RewardInput(text=WHOLE, opened="<think>")) == 0.0  # twice


@given(st.text("<think>/answer 4", max_size=60))
def test_a_part_of_the_form_is_worth_half_at_most(text: str) -> None:
    whole, partial = (Tags(partial=it)(RewardInput(text=text)) for it in (False, True))
    assert partial == 1.0 if whole else partial <= 0.5


@pytest.mark.parametrize(
    ("num_tokens", "value"), [(100, 1.0), (75, 0.5), (125, 0.5), (50, 0.0), (150, 0.0), (1000, 0.0)]
)
def test_length_near_a_target(num_tokens: int, value: float) -> None:
    assert LengthTarget(target=100, width=50)(sampled(num_tokens)) == value
    row = {"wanted": 100}
    assert LengthTarget(column="wanted", width=50)(sampled(num_tokens, row=row)) == value


@pytest.mark.parametrize(
    ("num_tokens", "value"),
    [(0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (500, -1.0)],
)
def test_soft_overlong_punishment(num_tokens: int, value: float) -> None:
    assert LengthOverlong(max_tokens=100, buffer=20)(sampled(num_tokens)) == value


def test_length_cosine_has_time_needs_and_file_of_the_reward_that_judges() -> None:
    made = {name: LengthCosine(max_tokens=9, judge=name) for name in ("code", "math")}
    assert made["code"].seconds == Code().seconds
    assert [it.needs_reference for it in made.values()] == [False, True]
    spec = RewardSpec(name="length_cosine", options={"max_tokens": 9, "judge": "own.py:right"})
    assert files_of([spec]) == [Path("own.py")]


def test_length_is_asked_of_sampled_answers_only() -> None:
    assert LengthTarget(target=5)(RewardInput(text="a b c")) is None
    assert LengthOverlong(max_tokens=5, buffer=5)(RewardInput(text="a b c")) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("one two three four five", 0.0),
        ("one two", 0.0),
        ("", 0.0),
        ("a a a a a", -0.75),
        ("A b\na B a b", -0.6),
    ],
)
def test_repetition_is_the_share_of_pairs_there_were_before(text: str, value: float) -> None:
    assert Repetition(n=2)(RewardInput(text=text)) == pytest.approx(value)


def test_repetition_of_characters() -> None:
    assert (
        Repetition(n=1, units="characters")(RewardInput(text="\u54c8\u54c8\u54c8\u54c8")) == -0.75
    )


def test_stop() -> None:
    ends = [RewardInput(text="", finish_reason=reason) for reason in ("stop", "length")]  # type: ignore[arg-type]
    assert [Stop()(it) for it in ends] == [1.0, 0.0]
    assert [Stop(ended=0, otherwise=-1)(it) for it in ends] == [0.0, -1.0]


@pytest.mark.parametrize(
    ("text", "inside", "after"),
    [
        ("<think>5</think> <answer> 4 </answer>", 1.0, 0.0),
        ("<answer>5</answer><answer>4</answer> so", 1.0, 0.0),
        ("<answer>4", 0.0, 0.0),
        ("4", 0.0, 0.0),
        ("5</think>4", 0.0, 1.0),
        ("5</think></think> 4\n", 0.0, 1.0),
    ],
)
def test_a_reward_may_be_shown_a_part_of_an_answer(text: str, inside: float, after: float) -> None:
    specs: list[str | RewardSpec] = [
        RewardSpec(name="exact_match", label="inside", inside="answer"),
        RewardSpec(name="exact_match", label="after", after="</think>"),
    ]
    with open_rewards(specs) as reward_set:
        (reward_result,) = reward_set.grade([RewardInput(text=text, references=("4",))])
        (bare,) = reward_set.grade([RewardInput(text="4", references=("4",))], extract=False)
    assert [score.value for score in reward_result.parts.values()] == [inside, after]
    assert bare.total == 2.0


@pytest.mark.parametrize("mark", [{"inside": "answer"}, {"after": "</think>"}])
def test_the_conversation_is_cut_as_the_answer_is(mark: dict[str, Any]) -> None:
    """Who judges a conversation is shown no more of its end than who judges a text."""
    text = "<think>5</think><answer>4</answer>"
    turns = [{"role": "assistant", "content": it} for it in ("So?", text)]
    turns.insert(1, {"role": "user", "content": "Yes"})
    (part,) = read_parts([RewardSpec(name="exact_match", **mark)])
    read = part.read(RewardInput(text=text, messages=tuple(turns)), extract=True)
    assert read.text == ("4" if "inside" in mark else "<answer>4</answer>")
    assert read.messages == (*turns[:2], {"role": "assistant", "content": read.text})
    assert part.read(RewardInput(text=text), extract=True).messages == ()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "format", "options": {"tags": ["a", "a"]}}, ErrorCode("format.tags")),
        ({"name": "length_target"}, ErrorCode("length_target.target/length_target.column")),
        (
            {"name": "length_overlong", "options": {"max_tokens": 5, "buffer": 6}},
            ErrorCode("length_overlong.buffer/length_overlong.max_tokens"),
        ),
        ({"name": "length_overlong", "options": {"max_tokens": 5}}, "buffer"),
        ({"name": "stop", "timeout": 1e7}, "timeout"),
    ],
)
def test_options_that_cannot_be(spec: dict[str, Any], message: str) -> None:
    with refused(message):
        open_rewards([from_mapping(RewardSpec, spec)])


def test_one_part_of_an_answer_is_shown() -> None:
    with pytest.raises(ConfigError, match=r"inside=a with after=b: .*; expected one of the two"):
        from_mapping(RewardSpec, {"name": "math", "inside": "a", "after": "b"})
