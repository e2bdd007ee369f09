"""A reward model in this process as a reward: the library's numbers, in the answers' order, beside other rewards."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.commands.test_score import chat, messages, save_reward, theirs

from taut.config import fields_of
from taut.inference.reward_model import JudgeUse, open_rater
from taut.models.reward_model import NewHead
from taut.rewards import Answered, RewardSpec, open_panel
from taut.rewards.judge import RewardModel


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward(tmp_path_factory.mktemp("sequence"), NewHead(seed=3))


def test_answers_get_the_library_s_numbers_and_those_that_cannot_be_read_are_errors(
    model: Path,
) -> None:
    question = tuple(messages("Who sat?", "")[:1])
    spec = RewardSpec(
        name="reward_model", weight=2.0, options={"model": str(model), "dtype": "float64"}
    )
    answers = [
        Answered(text="the cat", prompt=question, references=("the cat",)),
        Answered(text="a dog " * 1000, prompt=question, references=("the cat",)),
        Answered(text="a dog", prompt=question, references=("the cat",)),
        Answered(text="", prompt=question, messages=({"role": "assistant", "content": "a dog"},)),
    ]
    with open_panel([spec, "exact_match"], open_rater=open_rater) as panel:
        verdicts = panel.grade(answers)
        assert panel.grade([]) == []
    scores = [verdict.parts["reward_model"] for verdict in verdicts]
    cat, dog = theirs(model, [chat("Who sat?", "the cat"), chat("Who sat?", "a dog")])
    assert [scores[k].value for k in (0, 2, 3)] == pytest.approx(
        [float(cat), float(dog), float(dog)], abs=1e-9
    )
    assert "expected at most" in str(scores[1].error)
    assert verdicts[0].total == pytest.approx(2 * float(cat) + 1)
    assert verdicts[1].total is None


def test_its_options_are_those_of_a_model_that_scores() -> None:
    mine, theirs = fields_of(RewardModel), fields_of(JudgeUse)
    assert list(mine) == list(theirs)
    for name in mine:
        assert (mine[name].annotation, mine[name].default) == (
            theirs[name].annotation,
            theirs[name].default,
        )
