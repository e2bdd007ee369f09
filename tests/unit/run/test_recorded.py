"""Why rollouts teach nothing: the commonest reasons first, each with an example."""

from __future__ import annotations

from typing import Any

import pytest

from taut.run.recorded import frequent_reasons


def row(number: int, text: str, reward: float | None = 0.0, **fields: Any) -> dict[str, Any]:
    """One of two answers to a prompt whose right answer is 42."""
    parts = [{"name": "r", "value": reward, "error": None, "reason": None, "reply": None}]
    known = {"step": 1, "group": number // 2, "prompt_id": f"q{number // 2}", "index": number % 2}
    said = {"text": text, "messages": "[]", "references": ["42"], "finish_reason": "stop"}
    return {**known, **said, "error": None, "reward": reward, "rewards": parts, **fields}


WORDS = ["red", "a cat", "7", "no idea"]
BROKEN = {"name": "r", "value": None, "error": "server: HTTP 500", "reason": None, "reply": None}


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (
            [row(0, "The answer is 42."), row(1, "42!"), row(2, "it is 42"), row(3, "it is 24")],
            "a reward is too strict, 3 of 4 answers (q0#0: 'The answer is 42.' holds the right answer '42' and gets 0)",
        ),
        (
            [row(n, f"on and {word}", finish_reason="length") for n, word in enumerate(WORDS)],
            "answers are cut (rollout.max_new_tokens), 4 of 4 answers (...'on and red')",
        ),
        (
            [row(n, "so", 1.0) for n in range(4)],
            "all answers to a prompt are the same, 4 of 4 answers ('so')",
        ),
        (
            [row(n, word, 0.5) for n, word in enumerate(WORDS)],
            "rewards of different answers are the same, 4 of 4 answers ('red' and 'a cat')",
        ),
        (
            [row(n, word, None, error="step raised ValueError") for n, word in enumerate(WORDS)],
            "an environment or a reward fails, 4 of 4 answers (q0#0: 'red': step raised ValueError)",
        ),
        (
            [row(n, word, None, rewards=[BROKEN]) for n, word in enumerate(WORDS)],
            "an environment or a reward fails, 4 of 4 answers (q0#0: 'red': server: HTTP 500)",
        ),
        (
            [row(n, word, None) for n, word in enumerate(WORDS)],
            "no reward applies, 4 of 4 answers (q0#0: 'red')",
        ),
    ],
)
def test_the_commonest_reason_comes_first(rows: list[dict[str, Any]], says: str) -> None:
    assert frequent_reasons(rows)[0] == says


@pytest.mark.parametrize("text", ["it is 142", "4 2", "forty-two", ""])
def test_a_right_answer_inside_of_another_word_is_none(text: str) -> None:
    assert "strict" not in " ".join(frequent_reasons([row(0, text), row(1, "7")]))


def test_three_reasons_are_given_and_the_plain_one_is_the_last() -> None:
    rows = [row(n, word) for n, word in enumerate(WORDS)]
    rows += [row(4, "42", finish_reason="length"), row(5, "42")]
    rows += [row(6, "a", None, error="gone"), row(7, "b", None, error="gone")]
    reasons = [reason.partition(",")[0] for reason in frequent_reasons(rows)]
    assert len(reasons) == 3 and "rewards of different answers are the same" not in reasons
    assert frequent_reasons([]) == []
