"""docs/rewards.md: its options are the code's, its names all there are, and its examples run."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.checks.faults.rollout import sums
from tests.checks.planting import Place
from tests.docs.pages import REWARDS_PAGE, rewards_page
from tests.helpers.all_rewards import ALL

from taut.checks.rollouts import close, rewards_know_right_answers
from taut.config import describe, from_mapping
from taut.rewards.registry import read_parts
from taut.rewards.settings import RewardSpec

TEXT = REWARDS_PAGE.read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```toml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
PROGRAMS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def test_its_options_are_current() -> None:
    assert rewards_page() == TEXT, "run make docs"


def test_every_reward_is_in_its_table_with_the_place_it_runs_at() -> None:
    table = dict(re.findall(r"^\| `(\w+)` \| .* \| (\w+) \|$", TEXT, re.MULTILINE))
    assert {name: cls.runs for name, cls in ALL.items()}.items() <= table.items()


def test_the_keys_of_a_reward_are_all_told() -> None:
    for row in describe(RewardSpec):
        assert f"| `{row.key}` | {row.type.split(' |')[0]}" in TEXT


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_can_be_had(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("own.py", "rewards/own.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(PROGRAMS[0])
    rewards: Any = tomllib.loads(example)["rewards"]
    listed = [rewards] if isinstance(rewards, str) else rewards
    specs = [it if isinstance(it, str) else from_mapping(RewardSpec, it) for it in listed]
    assert len(read_parts(specs)) == len(listed)


def test_the_program_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(PROGRAMS[-1], {})
    assert capsys.readouterr().out == "1.004 1.0\n"


def test_the_function_passes_the_check_of_right_answers_because_it_says_that_it_judges_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path, monkeypatch)
    data = place.data([{**row, "budget": 20} for row in sums()])
    own = tmp_path / "own.py"
    keys = {"rollout__n": 2, "grading__workers": 1}

    def outcome(code: str) -> str:
        own.write_text(code)
        rewards = [{"name": f"{own}:brevity", "options": {"by": 2.0}}]
        session = place.session(data=data, method="grpo", rewards=rewards, **keys)
        try:
            return rewards_know_right_answers(session).outcome
        finally:
            close(session)

    assert outcome(PROGRAMS[0]) == "passed"
    assert outcome(PROGRAMS[0].partition("brevity.judges")[0]) == "failed"
