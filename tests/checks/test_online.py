"""Runs that learn from what they generate: no false alarm for any method, and nothing asked of answers not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.checks.faults.rollout import sums
from tests.checks.planting import Place
from tests.checks.test_judged import answers
from tests.checks.test_planted import told

from taut.checks.examine import examine
from taut.checks.rollout.opened import close

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {"grpo__kl_coef": 0.1, "lora__rank": 2, "rollout__temperature": 0.7}),
    "grpo, a penalty": ("grpo", {"grpo__kl_coef": 0.1, "grpo__kl_in": "reward"}),
    "grpo in bfloat16": ("grpo", {"dtype": "bfloat16", "grpo__advantage": "maxrl"}),
    "ppo": ("ppo", {"rollout__minibatches": 2}),
    "online dpo": ("online_dpo", {}),
    "best of n": ("best_of_n", {"best_of_n__at_least": 2.0}),
    "gkd": ("gkd", {}),
}
FULL = {"grpo in bfloat16", "ppo", "online dpo"}
NOT_ASKED = ("template.targets", "data.targets", "stop.targets", "template.parts")


@pytest.mark.parametrize("name", RUNS)
def test_no_method_raises_a_false_alarm(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, keys = RUNS[name]
    place = Place(tmp_path, monkeypatch)
    if method == "gkd":
        keys = {**keys, "distill__teacher": str(place.model("llama"))}
    else:
        keys = {**keys, "rewards": "exact_match"}
    keys |= {"batch__samples_per_step": 3, "rollout__max_new_tokens": 12}
    session = place.session(data=place.data(sums()), method=method, **keys)
    examination = examine(session, "full" if name in FULL else "quick")
    close(session)
    assert not examination.failures, told(examination)
    found = answers(examination)
    assert {found[one].outcome for one in NOT_ASKED} == {"skipped"}
    for one in ("data.packing", "loss.gradient", "rollout.opens", "rollout.groups", "rollout.text"):
        assert found[one].outcome == "passed", found[one]
    assert found["rewards.gold"].outcome == ("skipped" if method == "gkd" else "passed")
    has_reference = "grpo__kl_coef" in keys or method == "online_dpo"
    assert found["reference.start"].outcome == ("passed" if has_reference else "skipped")
    if name in FULL:
        assert found["rollout.update"].outcome == found["engine.logps"].outcome == "passed"


def test_prompts_may_be_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(tmp_path, monkeypatch)
    rows = [{"text": f"the cat and {at} birds", "answer": str(at)} for at in range(12)]
    session = place.session(data=place.data(rows), method="grpo", rewards="exact_match")
    examination = examine(session)
    close(session)
    assert not examination.failures, told(examination)
    found = answers(examination)
    assert found["data.columns"].says == "text; rewards read the other columns"
    assert found["rewards.gold"].outcome == found["rollout.groups"].outcome == "passed"


def test_answers_that_the_context_cuts_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path, monkeypatch)
    keys = {"method": "grpo", "rewards": "exact_match", "rollout__max_new_tokens": 240}
    session = place.session(data=place.data(sums()), **keys)
    (note,) = answers(examine(session, only=["rollout.room"]))["rollout.room"].notes
    assert note == "after 12 prompts the context of 256 cuts answers earlier"
