"""Verifiers that stand on a library, each through a reward set: in one worker process, with its time limit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.helpers.refusals import ErrorCode, refused

from taut.config import from_mapping
from taut.errors import ConfigError
from taut.rewards import RewardInput, Score
from taut.rewards.format import _NO_LANGUAGE, JsonSchema, Language
from taut.rewards.reward_set import RewardSet, open_rewards
from taut.rewards.settings import GradingConfig, RewardSpec
from taut_tools.reasoning_gym.reward import rows

ENGLISH = "We add the two numbers first, and then we divide what we have found by three."
GERMAN = "Wir addieren zuerst die beiden Zahlen und teilen dann das Ergebnis durch drei."
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def reward_set() -> Iterator[RewardSet]:
    specs: list[str | RewardSpec] = [
        "math",
        RewardSpec(name="math", label="hasty", timeout=0.5),
        RewardSpec(name="math", label="boxed", options={"boxed": True}),
        RewardSpec(name="reasoning_gym", inside="answer"),
        RewardSpec(name="json_schema", options={"schema": SCHEMA}),
        RewardSpec(name="json_schema", label="fenced", options={"column": "s", "is_fenced": True}),
        RewardSpec(name="language", options={"language": "en"}),
        RewardSpec(name="language", label="de", options={"language": "de", "among": ["en"]}),
        RewardSpec(
            name="length_cosine", options={"max_tokens": 100, "judge": "math", "wrong": [-1, 0]}
        ),
    ]
    with open_rewards(specs, GradingConfig(workers=1)) as opened:
        yield opened


def said(reward_set: RewardSet, label: str, text: str, **known: Any) -> Score:
    (reward_result,) = reward_set.grade([RewardInput(text=text, **known)], [label])
    return reward_result.parts[label]


@pytest.mark.parametrize(
    ("text", "reference", "value"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        ("The answer is 1/2.", r"\frac12", 1.0),
        (r"$(x-1)(x+1)$", "$x^2-1$", 1.0),
        (r"$x = 3$", "3", 1.0),
        ("$2$", r"2\sqrt{3}", 0.0),
        (r"$\sqrt{12}$", r"2\sqrt{3}", 1.0),
        ("$[2, 5)$", "[2,5)", 1.0),
        (r"$\{2, 1\}$", r"$\{1, 2\}$", 1.0),
        (r"\boxed{7} after 12 steps", "7", 1.0),
        (r"$\frac{1}{3}$", "0.33", 0.0),
        ("no idea", "5", 0.0),
        ("", "5", 0.0),
        (r"\boxed{\frac{}", "5", 0.0),
    ],
)
def test_math(reward_set: RewardSet, text: str, reference: str, value: float) -> None:
    score = said(reward_set, "math", text, references=(reference,))
    assert score.value == value and (score.reply is None) == (value == 1)
    assert said(reward_set, "math", text, references=("12345", reference)).value == value


def test_math_without_a_reference_does_not_apply_and_one_that_is_none_is_an_error(
    reward_set: RewardSet,
) -> None:
    assert said(reward_set, "math", "5") == Score()
    error = said(reward_set, "math", "5", references=("no idea",)).error
    assert error is not None
    assert error.startswith("DataError: found the reference 'no idea', which is no mathematics")


def test_only_what_is_boxed_may_be_asked_for(reward_set: RewardSet) -> None:
    assert said(reward_set, "boxed", r"\boxed{5}", references=("5",)) == Score(1.0)
    assert said(reward_set, "boxed", "it is 5", references=("5",)).value == 0.0
    for reference in ("5", "$x^2$", r"\boxed{5}", "[2,5)"):
        bare = RewardInput(text=reference, references=(reference,))
        (reward_result,) = reward_set.grade([bare], ["math", "boxed"], extract=False)
        assert reward_result.parts["boxed"] == Score(1.0)


def test_math_works_in_any_thread_and_ends_in_time_where_sympy_does_not(
    reward_set: RewardSet,
) -> None:
    found: list[Score] = []

    def ask() -> None:
        tower = r"\boxed{9^{9^{9^{9}}}}"
        found.extend(
            said(reward_set, "hasty", text, references=("4",)) for text in (tower, r"$2^2$")
        )

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(30)
    late = Score(0.0, unjudged="hasty took longer than 0.5 s and was killed")
    assert found == [late, Score(1.0)]


@pytest.mark.parametrize("task", ["chain_sum", "spell_backward", "countdown", "basic_arithmetic"])
def test_a_task_of_reasoning_gym_knows_its_answer_and_no_other(
    reward_set: RewardSet, task: str
) -> None:
    first, second = rows(task, 2, seed=7)
    assert first["prompt"] == [{"role": "user", "content": first["question"]}]
    assert first["id"] != second["id"]
    right = f"<think>hm</think><answer>{first['answer']}</answer>"
    assert said(reward_set, "reasoning_gym", right, row=first) == Score(1.0)
    for text in (first["answer"], "<answer>nothing</answer>", ""):
        value = said(reward_set, "reasoning_gym", text, row=first).value
        assert value is not None
        assert value < 0.5
    assert list(rows(task, 2, seed=7)) == [first, second]


def test_a_row_of_something_else_is_left_out_and_a_task_that_is_not_there_an_error(
    reward_set: RewardSet,
) -> None:
    assert said(reward_set, "reasoning_gym", "5", row={"answer": "5"}) == Score()
    strange = {"question": "", "answer": "", "metadata": {"source_dataset": "chain_sums"}}
    assert "found the task 'chain_sums'" in str(
        said(reward_set, "reasoning_gym", "5", row=strange).error
    )
    with pytest.raises(ConfigError, match="the task 'chain_sums' cannot be made"):
        list(rows("chain_sums", 1, seed=0))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"n": 3}', 1.0),
        (' {"n": 3}\n', 1.0),
        ('{"n": -3}', 0.0),
        ('{"n": NaN}', 0.0),
        ('{"n": 3, "m": 3}', 0.0),
        ('so {"n": 3}', 0.0),
        ("[" * 100_000, 0.0),
        ("", 0.0),
    ],
)
def test_json_that_a_schema_allows(reward_set: RewardSet, text: str, value: float) -> None:
    score = said(reward_set, "json_schema", text)
    assert score.value == value and (score.reply is None) == (value == 1)


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ('{"n": -3}', "$.n: -3 is less than the minimum"),
        ("", "no JSON: Expecting value"),
        ('{"n": NaN}', "no JSON: NaN is not JSON"),
    ],
)
def test_what_is_wrong_with_json_is_told(reward_set: RewardSet, text: str, reply: str) -> None:
    assert str(said(reward_set, "json_schema", text).reply).startswith(reply)


def test_a_number_too_large_for_the_schema_is_no_error() -> None:
    assert JsonSchema(schema={"multipleOf": 0.01})(RewardInput(text="1e400")) == 0.0
    assert JsonSchema(schema={"multipleOf": 0.01})(RewardInput(text="0.02")) == 1.0


def test_a_schema_of_the_row_and_json_in_a_block_of_code(reward_set: RewardSet) -> None:
    text = 'Here:\n```json\n{"n": 3}\n```\nDone.'
    assert said(reward_set, "fenced", text, row={"s": SCHEMA}) == Score(1.0)
    assert said(reward_set, "fenced", text, row={"s": '{"type": "array"}'}).value == 0.0
    assert said(reward_set, "fenced", '{"n": 3}', row={"s": SCHEMA}).value == 0.0
    assert said(reward_set, "fenced", text, row={}) == Score()
    error = said(reward_set, "fenced", text, row={"s": {"type": "number?"}}).error
    assert str(error).startswith("DataError: found a schema that is none")


def test_the_share_of_an_answer_in_a_language(reward_set: RewardSet) -> None:
    assert said(reward_set, "language", ENGLISH) == Score(1.0)
    assert said(reward_set, "language", GERMAN) == Score(0.0)
    mixed = said(reward_set, "language", f"{ENGLISH}\n{GERMAN}\n$x = {GERMAN}$\n```\n{GERMAN}\n```")
    assert mixed.value == pytest.approx(0.5, abs=0.05)
    assert said(reward_set, "de", f"{ENGLISH}\n{GERMAN}\n{GERMAN}").value == pytest.approx(
        2 / 3, abs=0.05
    )
    assert said(reward_set, "language", "$x^2$ = 49") == Score()


def test_a_formula_that_nothing_closes_is_not_looked_for_to_the_end() -> None:
    for opening, closing in ((r"\(", r"\)"), (r"\[", r"\]")):
        near, far = (f"{opening}{'x ' * length}{closing}" for length in (400, 40_000))
        assert _NO_LANGUAGE.sub("", near) == ""
        assert _NO_LANGUAGE.sub("", far) == far


def test_a_language_that_nobody_knows_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="found the language 'tlh'; expected codes of ace, af, am"
    ):
        Language(language="tlh").prepare()


@pytest.mark.parametrize(
    ("text", "num_tokens", "value"),
    [
        ("5", 0, 2.0),
        ("5", 50, 1.5),
        ("5", 99, 1.0),
        ("6", 0, -1.0),
        ("6", 50, -0.5),
        ("6", 99, 0.0),
        ("5", 100, -10.0),
        ("6", 101, -10.0),
    ],
)
def test_right_answers_had_better_be_short_and_wrong_ones_long(
    reward_set: RewardSet, text: str, num_tokens: int, value: float
) -> None:
    score = said(reward_set, "length_cosine", text, references=("5",), num_tokens=num_tokens)
    assert score.value == pytest.approx(value, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("regex", {"pattern": "("}, "is no regular expression"),
        ("json_schema", {}, ErrorCode("json_schema.schema/json_schema.column")),
        ("length_cosine", {"max_tokens": 9, "judge": "stop"}, "found judge=stop"),
        ("json_schema", {"schema": {"type": "number?"}}, "found a schema that is none"),
    ],
)
def test_options_that_cannot_be(name: str, options: dict[str, Any], message: str) -> None:
    spec = from_mapping(RewardSpec, {"name": name, "options": options})
    with refused(message):
        open_rewards([spec], GradingConfig(workers=1))
