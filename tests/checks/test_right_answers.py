"""What rewards say of right answers, of wrong ones and of none, before a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.checks.faults.judged import compared
from tests.checks.planting import Place

from taut.checks.registry import Finding
from taut.checks.rollouts import (
    answers_to_judge,
    grade_all,
    judge_rewards,
    rewards_know_right_answers,
)
from taut.data.rows.prompts import PromptRow
from taut.rewards.reward_set import RewardSet, open_rewards
from taut.rewards.settings import GradingConfig, RewardSpec

OWN = """
def right(text, references):
    return float(text in references)

def wrong(text, references):
    return float(text not in references)

def brief(text):
    return 1 / (1 + len(text))

def constant():
    return 1.0

def failing(row):
    return row["absent"]

def never():
    return None

def short(text):
    return 1 / (1 + len(text))

def counted(num_tokens):
    return float(num_tokens < 3)

def silent():
    return None

def broken(row):
    return row["absent"]

for function in (short, silent, broken):
    function.judges = "form"
"""


@pytest.fixture(scope="module")
def reward_set(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardSet]:
    """Every function, as rewards to choose from."""
    path = tmp_path_factory.mktemp("gold") / "own.py"
    path.write_text(OWN)
    names = ["right", "wrong", "brief", "constant", "failing", "never"]
    names += ["short", "counted", "silent", "broken"]
    own: list[str | RewardSpec] = [f"{path}:{name}" for name in names]
    form = RewardSpec(name="format", weight=0.1)
    marked = RewardSpec(name="exact_match", label="marked", inside="answer")
    declared = RewardSpec(name=f"{path}:brief", label="declared", judges="form")
    matched = RewardSpec(
        name="regex", label="matched", judges="correctness", options={"pattern": "x"}
    )
    each = [*own, "numeric", form, marked, declared, matched]
    with open_rewards(each, GradingConfig(workers=1)) as opened:
        yield opened


def rows(*references: str, **columns: Any) -> list[PromptRow]:
    return [
        PromptRow(f"q:{k}", f"q:{k}", np.array([1]), "?", (reference,), "answer", columns)
        for k, reference in enumerate(references)
    ]


def found(reward_set: RewardSet, labels: list[str], key: str, asked: list[PromptRow]) -> Finding:
    """As a reward set of these rewards only."""
    parts = [part for part in reward_set.parts if part.label in labels]

    class Some(RewardSet):
        def __init__(self) -> None:
            self.parts = tuple(parts)
            self.judges = reward_set.judges

        def grade(self, answers: Any, labels: Any = None, *, extract: bool = True) -> Any:
            return reward_set.grade(answers, self.names, extract=extract)

    graded = grade_all(Some(), answers_to_judge(asked, len))
    return judge_rewards(Some(), graded, 0.0, key)


@pytest.mark.parametrize("key", ["", "eval.answers"])
@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (["right"], "right answers are known as right by"),
        (["numeric", "format", "marked"], "right answers are known as right by numeric, marked"),
        (["wrong"], "less than other rows' answers"),
        (["right", "failing"], "failing fails on 3 of 3 right answers"),
        (["matched"], "the same as any other answer"),
        (["counted"], "less than other rows' answers"),
        (["broken"], "broken fails on 3 of 3 right answers"),
        (["silent"], "silent applies to none of 3 rows"),
    ],
)
def test_what_is_said_of_rewards_on_right_answers(
    reward_set: RewardSet, labels: list[str], says: str, key: str
) -> None:
    finding = found(reward_set, labels, key, rows("1", "22", "333"))
    assert says in finding.says
    assert (finding.outcome == "passed") == ("known as right" in says)


@pytest.mark.parametrize("key", ["", "eval.answers"])
@pytest.mark.parametrize("labels", [["format"], ["short", "format"], ["declared"]])
def test_rewards_of_form_are_asked_only_whether_they_can_be_computed(
    reward_set: RewardSet, labels: list[str], key: str
) -> None:
    """They may like an empty answer best; the function says it judges form, or the configuration does."""
    finding = found(reward_set, labels, key, rows("1", "22", "333"))
    assert (finding.outcome, finding.number) == ("passed", 3)
    assert finding.says == f"{', '.join(labels)} can be computed; no reward judges correctness"


@pytest.mark.parametrize(
    ("labels", "alone", "added"),
    [
        (["numeric", "short"], "passed", "passed"),
        (["numeric", "silent"], "failed", "failed"),
        (["numeric", "counted"], "failed", "passed"),
        (["brief"], "failed", "failed"),
        (["numeric", "brief"], "failed", "passed"),
        (["constant"], "passed", "failed"),
        (["numeric", "constant"], "passed", "passed"),
        (["never"], "failed", "failed"),
        (["numeric", "never"], "failed", "passed"),
        (["right", "wrong"], "failed", "failed"),
    ],
)
def test_each_metric_stands_alone_and_in_training_the_total_counts(
    reward_set: RewardSet, labels: list[str], alone: str, added: str
) -> None:
    asked = rows("1", "22", "333")
    assert found(reward_set, labels, "eval.answers", asked).outcome == alone
    assert found(reward_set, labels, "", asked).outcome == added


def test_a_reward_of_taut_s_own_that_does_not_know_its_reference(reward_set: RewardSet) -> None:
    """The references are sentences, of which the number is not the last."""
    finding = found(reward_set, ["numeric"], "", rows("5", "none", "no"))
    assert finding.outcome == "failed"
    assert "numeric fails on 2 of 3" in finding.says


def test_rows_without_right_answers_are_not_asked_about(reward_set: RewardSet) -> None:
    row = rows("1")[0]
    bare = PromptRow(row.place, row.id, row.ids_T, row.prompt, (), None, {})
    assert found(reward_set, ["numeric"], "", [bare] * 20 + rows("5", "6")).outcome == "passed"
    finding = found(reward_set, ["numeric"], "", [bare])
    assert (finding.outcome, finding.says) == ("skipped", "no row has a reference answer")


def test_held_out_comparisons_are_asked_as_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a prompt of their own, which only comparisons have none of."""
    rows = [
        {side: [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
         for side in ("chosen", "rejected")} | {"answer": row["chosen"]}
        for row in compared()
    ]  # fmt: skip
    place = Place(tmp_path, monkeypatch)
    answers = {"eval__answers__rewards": "exact_match", "eval__answers__reference": "answer"}
    held = str(place.data(rows, "eval.jsonl"))
    session = place.session(data=place.data(rows), method="dpo", data__eval=held, **answers)
    assert rewards_know_right_answers(session).outcome == "passed"
