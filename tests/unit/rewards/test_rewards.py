"""Each verifier on cases a reader can check, and what holds for all of them."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taut.errors import ConfigError, DataError
from taut.rewards import REWARDS, Reward, Score, files_of, load_rewards
from taut.rewards.contains import contains
from taut.rewards.exact_match import exact_match
from taut.rewards.normal import normalise
from taut.rewards.numeric import numeric, read_number

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
def test_normalise_drops_case_punctuation_and_articles_but_never_everything(
    said: str, plain: str
) -> None:
    assert normalise(said) == plain


@given(WORDS)
def test_normalise_is_a_projection(text: str) -> None:
    assert normalise(normalise(text)) == normalise(text)


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
    assert exact_match(said, references, {}) == value


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
    assert contains(said, references, {}) == value


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
    assert numeric(said, [reference], {}) == value
    assert numeric(said, ["123456789", reference], {}) == value


def test_numeric_without_a_number_to_compare_with_is_an_error_and_without_a_reference_none() -> (
    None
):
    assert numeric("5", [], {}) is None
    with pytest.raises(DataError, match="the reference 'five' without a number"):
        numeric("5", ["5", "five"], {})


@given(st.integers(-(10**12), 10**12), WORDS)
def test_an_integer_is_found_however_it_is_written(number: int, before: str) -> None:
    for form in (f"{number}", f"{number:,}", f"{number}.0", f"{number}."):
        assert numeric(f"{before} = {form}", [str(number)], {}) == 1.0


@given(st.floats(1e-20, 1e20), st.booleans())
def test_a_float_is_found_however_it_is_written(number: float, is_negative: bool) -> None:
    number = -number if is_negative else number
    for form in (f"{number!r}", f"{number:.12e}", f"{number:e}".replace("e", " x 10^")):
        assert numeric(f"so {form}.", [repr(number)], {}) == 1.0


@given(st.fractions(max_denominator=1000))
def test_a_fraction_is_its_quotient(number: Fraction) -> None:
    written = f"{number.numerator}/{number.denominator}"
    assert numeric(written, [repr(float(number))], {}) == 1.0


@pytest.mark.parametrize("name", REWARDS)
@given(text=WORDS, number=st.integers(0, 999))
def test_a_reference_is_right_by_its_own_measure_and_values_are_0_or_1(
    name: str, text: str, number: int
) -> None:
    reference = f"{text} is {number}"
    (reward,) = load_rewards([name])
    assert reward.score(reference, [reference], {}) == Score(1.0)
    assert reward.score(text, [reference], {}).value in (0.0, 1.0)
    assert reward.score(text, [], {}) == Score()


def written(place: Path, code: str) -> Path:
    path = place / "own.py"
    path.write_text(code)
    return path


OWN = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Scale:
    by: float

def brevity(text, references, row):
    return Scale(row.get("by", 1.0)).by / (1 + len(text))

def broken(text, references, row):
    raise KeyError("nothing\\nhere")

def nothing(text, references, row):
    return None

def word(text, references, row):
    return text or float("nan")
"""


def own(place: Path, name: str) -> Reward:
    (reward,) = load_rewards([f"{written(place, OWN)}:{name}"])
    return reward


def test_a_function_of_the_users(tmp_path: Path) -> None:
    assert own(tmp_path, "brevity").name == "brevity"
    assert own(tmp_path, "brevity").score("abc", [], {"by": 2}) == Score(0.5)
    assert own(tmp_path, "nothing").score("abc", ["x"], {}) == Score()


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("broken", "a", "KeyError: 'nothing\\nhere'"),
        ("word", "a", "word returned 'a'; expected a finite number or None"),
        ("word", "", "word returned nan; expected a finite number or None"),
    ],
)
def test_what_a_function_raises_or_mistakes_is_an_error_never_0(
    name: str, text: str, reason: str, tmp_path: Path
) -> None:
    assert own(tmp_path, name).score(text, [], {}) == Score(error=reason)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("exactmatch", "expected one of exact_match, contains, numeric, or FILE.py:function"),
        ("missing.py:f", "there is no file missing.py"),
        ("{own}:absent", "found no function 'absent' in .*brevity"),
        ("{own}:", "found no function ''"),
    ],
)
def test_a_reward_that_is_not_there(spec: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_rewards([spec.format(own=written(tmp_path, OWN))])


def test_a_file_that_cannot_be_run(tmp_path: Path) -> None:
    path = written(tmp_path, "import absent_package")
    with pytest.raises(ConfigError, match=r"cannot be run: ModuleNotFoundError: .*absent_package"):
        load_rewards([f"{path}:f"])


@pytest.mark.parametrize("reserved", [(), ("loss",)])
def test_names_of_metrics_are_unique(reserved: tuple[str, ...], tmp_path: Path) -> None:
    path = written(tmp_path, "def loss(text, references, row):\n    return 1")
    twice: list[Any] = [f"{path}:loss"] * (1 if reserved else 2)
    with pytest.raises(ConfigError, match="there is another metric 'loss'"):
        load_rewards(twice, reserved)


def test_values_of_a_reward_are_floats() -> None:
    assert Reward("yes", lambda *_: True).score("", [], {}) == Score(1.0)
    assert math.isfinite(REWARDS["exact_match"]("a", ["a"], {}) or 0)


def test_one_name_need_not_be_a_list() -> None:
    assert load_rewards("exact_match") == load_rewards(["exact_match"])
    assert files_of("own.py:f") == files_of(["exact_match", "own.py:f"]) == [Path("own.py")]
    assert files_of("exact_match") == []
