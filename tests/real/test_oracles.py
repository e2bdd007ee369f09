"""taut beside the official renderers with loss masks: what it alone refuses, and whose ids and targets are right."""

from __future__ import annotations

import re

import pytest
from tests.real import oracles
from tests.real.conversations import CASES
from tests.real.oracles import Pair, Turn

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("official_renderers")]

QUICK = "renderers:(qwen3|gpt-oss|glm-4.5|nemotron-3)$|tinker:(qwen3_5|llama3)$|harmony"


def compared(pairs: list[Pair]) -> list[Turn]:
    return [turn for turns in oracles.compare(pairs, CASES) for turn in turns]


def hold(turns: list[Turn], most_refused: float) -> None:
    found = oracles.summary(turns)
    print(found)
    assert not [turn for turn in turns if turn.outcome == "no oracle"]
    # Qwen 3.8's template writes an empty thought before one in the content; taut puts it into the prompt's
    known = {
        ("qwen3.8", "thought inside the content"),
        ("qwen3_8_xhigh_reasoning", "thought inside the content"),
    }
    odd = [turn for turn in turns if turn.template not in ("", "right")]
    wrong = [turn for turn in odd if (turn.pair.partition(":")[2], turn.case) not in known]
    assert not wrong, wrong[:5]
    refused = [turn for turn in turns if turn.outcome == "refused"]
    assert all(turn.reason for turn in refused)
    assert found["refused share"] <= most_refused, (found, refused[:5])


def test_one_renderer_of_each_shape() -> None:
    pairs = [p for p in oracles.PAIRS if re.search(QUICK, f"{p.oracle}:{p.renderer}")]
    hold(compared(pairs), 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("oracle", ["renderers|tinker", "mistral", "harmony"])
def test_taut_alone_refuses_one_turn_in_twenty_at_most(oracle: str) -> None:
    hold(compared([p for p in oracles.PAIRS if re.fullmatch(oracle, p.oracle)]), 0.05)
