"""Each verifier on cases a reader can check, and what holds for all of them."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError
from fractions import Fraction
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.all_rewards import ALL

from taut.config import describe
from taut.errors import ConfigError, DataError
from taut.rewards import RewardInput
from taut.rewards.numeric import Numeric, read_number
from taut.rewards.registry import REWARDS, verifier_of
from taut.rewards.reward_set import open_rewards
from taut.rewards.settings import Place
from taut.rewards.text_match import Contains, ExactMatch, normalize
from taut.rewards.verifier import Score, Verifier
from taut.rewards.worker import judged

RIGHT = ("exact_match", "contains", "numeric")


def value_of(verifier: Verifier, text: str, references: list[str]) -> float | None:
    return verifier(RewardInput(text=text, references=tuple(references)))


WORDS = st.text(alphabet="abcxyz0189 .,!?'-", max_size=30)


@pytest.mark.parametrize(
    ("said", "plain"),
    [
        (" The  Old Fox. ", "old fox"),
        ("an 'apple'!", "apple"),
        ("theatre", "theatre"),
        ("(A)", "a"),
        ("The", "the"),
        ("+", "+"),
        ("  ", ""),
        ("a an", "a an"),
    ],
)
def test_normalize_drops_case_punctuation_and_articles_but_never_everything(
    said: str, plain: str
) -> None:
    assert normalize(said) == plain


@given(WORDS)
def test_normalize_is_a_projection(text: str) -> None:
    assert normalize(normalize(text)) == normalize(text)


@pytest.mark.parametrize(
    ("said", "references", "value"),
    [
        ("the Fox.", ["a cat", "Fox"], 1.0),
        ("It was the fox", ["fox"], 0.0),
        ("B", ["A"], 0.0),
        ("a", ["A"], 1.0),
        ("", ["A"], 0.0),
        ("the", ["A"], 0.0),
        ("fox", [], None),
    ],
)
def test_exact_match_is_of_the_whole_answer_with_any_reference(
    said: str, references: list[str], value: float | None
) -> None:
    assert value_of(ExactMatch(), said, references) == value


@pytest.mark.parametrize(
    ("said", "references", "value"),
    [
        ("It was the fox!", ["fox"], 1.0),
        ("It was a foxhound", ["fox"], 0.0),
        ("an old, grey fox", ["old fox"], 0.0),
        ("an old, grey fox", ["fox old", "grey fox"], 1.0),
        ("", ["fox"], 0.0),
        ("fox", [], None),
    ],
)
def test_contains_looks_for_whole_words_side_by_side(
    said: str, references: list[str], value: float | None
) -> None:
    assert value_of(Contains(), said, references) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("the answer is 42.", 42),
        ("-7", -7),
        ("\u22123", -3),
        ("1,234,567", 1234567),
        ("1,234.50 dollars", 1234.5),
        (".5", 0.5),
        ("1e-3", 0.001),
        ("1.2 x 10^5", 120000),
        (r"1.2 \times 10^{-5}", 1.2e-5),
        ("3/4", 0.75),
        ("1 3/4", 1.75),
        (r"\frac{3}{4}", 0.75),
        (r"\boxed{\frac{3}{4}} in 12 steps", 0.75),
        ("3 + 4 = 7\n#### 7", 7),
        ("#### -1,000\nChecked 3 times", -1000),
        ("#### 1 #### 2 3", 2),
        ("$1,234$", 1234),
        ("-$5", -5),
        (r"\$3{,}000", 3000),
        ("5 m2", 5),
        ("3-5", 5),
        ("5 - 3", 3),
        ("(-3)", -3),
        ("16 - 3 = 13", 13),
        ("**42**", 42),
        ("1.2.3", 1.2),
        ("1,2345", 2345),
        ("H2O", None),
        ("1/0", None),
        ("1e9999", None),
        ("9" * 400, None),
        ("42 ####", None),
        ("12 " + r"\boxed{x}", None),
        ("none", None),
        ("", None),
    ],
)
def test_the_number_a_text_ends_in(text: str, value: float | None) -> None:
    found = read_number(text)
    assert (found and found.value) == (None if value is None else pytest.approx(value, rel=1e-12))


@pytest.mark.parametrize(
    ("said", "reference", "value"),
    [
        ("It is 42.", "She has 6 * 7 = 42 apples.\n#### 42", 1.0),
        ("42 apples, 3 pears", "42", 0.0),
        ("0.5", "1/2", 1.0),
        ("0.333", "1/3", 0.0),
        ("50%", "50", 1.0),
        ("50%", "0.5", 1.0),
        ("50 percent", "50%", 1.0),
        ("0.5%", "50%", 0.0),
        ("0.5%", "0.5", 1.0),
        ("1000000.5", "1000000", 1.0),
        ("1000002", "1000000", 0.0),
        ("-5", "5", 0.0),
        ("no idea", "5", 0.0),
        ("0", "0.0", 1.0),
        ("0.0000001", "0", 0.0),
    ],
)
def test_numeric(said: str, reference: str, value: float) -> None:
    assert value_of(Numeric(), said, [reference]) == value
    assert value_of(Numeric(), said, ["123456789", reference]) == value


def test_numeric_without_a_number_to_compare_with_is_an_error_and_without_a_reference_none() -> (
    None
):
    assert value_of(Numeric(), "5", []) is None
    with pytest.raises(DataError, match="the reference 'five' without a number"):
        value_of(Numeric(), "5", ["5", "five"])


@given(st.integers(-(10**12), 10**12), WORDS)
def test_an_integer_is_found_however_it_is_written(number: int, before: str) -> None:
    for form in (f"{number}", f"{number:,}", f"{number}.0", f"{number}."):
        assert value_of(Numeric(), f"{before} = {form}", [str(number)]) == 1.0


@given(st.floats(1e-20, 1e20), st.booleans())
def test_a_float_is_found_however_it_is_written(number: float, is_negative: bool) -> None:
    number = -number if is_negative else number
    for form in (f"{number!r}", f"{number:.12e}", f"{number:e}".replace("e", " x 10^")):
        assert value_of(Numeric(), f"so {form}.", [repr(number)]) == 1.0


@given(st.fractions(max_denominator=1000))
def test_a_fraction_is_its_quotient(number: Fraction) -> None:
    written = f"{number.numerator}/{number.denominator}"
    assert value_of(Numeric(), written, [repr(float(number))]) == 1.0


@pytest.mark.parametrize("name", RIGHT)
@given(text=WORDS, number=st.integers(0, 999))
def test_a_reference_is_right_by_its_own_measure_and_values_are_0_or_1(
    name: str, text: str, number: int
) -> None:
    reference, verifier = f"{text} is {number}", REWARDS[name]()
    assert value_of(verifier, reference, [reference]) == 1.0
    assert value_of(verifier, text, [reference]) in (0.0, 1.0)
    assert value_of(verifier, text, []) is None


def test_what_a_verifier_raises_is_an_error_of_one_answer() -> None:
    answers = [RewardInput(text="5", references=(reference,)) for reference in ("5", "five", "6")]
    scores = [judged("n", Numeric(), answered) for answered in answers]
    assert [score.value for score in scores] == [1.0, None, 0.0]
    assert str(scores[1].error).startswith("DataError: found the reference 'five' without a number")
    with open_rewards(list(RIGHT)) as reward_set:
        (reward_result,) = reward_set.grade(answers[:1])
    assert reward_result.parts == dict.fromkeys(RIGHT, Score(1.0))
    assert reward_result.total == 3.0


LEAST: dict[str, dict[str, Any]] = {
    "regex": {"pattern": "a"},
    "json_schema": {"column": "s"},
    "language": {"language": "en"},
    "length_target": {"target": 5},
    "length_overlong": {"max_tokens": 5, "buffer": 2},
    "length_cosine": {"max_tokens": 5, "judge": "exact_match"},
    "reward_model": {"model": "DIR"},
    "reward_server": {"url": "http://127.0.0.1:9"},
    "judge": {"url": "http://127.0.0.1:9", "model": "m"},
}
"""Options that a reward cannot do without."""
FORM = {"format", "regex", "json_schema", "language", "length_target", "length_overlong"}
FORM |= {"repetition", "stop"}
"""Rewards that say nothing about right and wrong."""
FULL_MARKS = {"exact_match", "contains", "numeric", "math", "code", "reasoning_gym"}
"""Rewards that give right answers 1."""


@pytest.mark.parametrize("name", ALL)
def test_every_reward_says_where_it_runs_travels_to_a_worker_and_keeps_its_options(
    name: str,
) -> None:
    verifier = verifier_of(name, LEAST.get(name, {}))
    assert verifier.runs in get_args(Place)
    assert verifier.judges == ("form" if name in FORM else "correctness"), "FORM in this file"
    assert verifier.full_marks == (1.0 if name in FULL_MARKS else None), "FULL_MARKS in this file"
    assert verifier.seconds > 0
    assert pickle.loads(pickle.dumps(verifier)) == verifier
    assert all(row.doc for row in describe(type(verifier)))
    with pytest.raises(FrozenInstanceError):
        verifier.other = 1  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=f"in the options of the reward {name}"):
        verifier_of(name, {**LEAST.get(name, {}), "no_such_option": 1})
