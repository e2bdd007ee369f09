"""Metrics and hooks given as Python objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.chat_runs import PLAIN, chats, events, sft, write_rows

import taut


def test_a_run_with_hooks_and_metrics_is_resumed_with_the_same(
    model: Path, train: Path, tmp_path: Path
) -> None:
    held = write_rows(tmp_path / "h.jsonl", chats(5, seed=5))
    factor = 2.0

    def right(samples: Any) -> float:
        return factor * float(sum((s.predicted == s.targets).sum() for s in samples))

    class Hook:
        def __init__(self, most: int) -> None:
            self.most, self.seen = most, list[str]()

        def __call__(self, event: dict[str, Any]) -> str | None:
            self.seen.append(event["kind"])
            return "enough" if self.seen.count("step") == self.most else None

        def state_dict(self) -> list[str]:
            return self.seen

        def load_state_dict(self, state: list[str]) -> None:
            self.seen = state

    hook = Hook(2)
    keys: dict[str, Any] = {
        **PLAIN,
        "steps": 5,
        "data__eval": str(held),
        "eval__every": 1,
        "checkpoint__every": 1,
    }
    keys |= {
        "eval__metrics": [right, lambda samples: 1.0],
        "hooks": [hook, print],
        "eval__best": "right",
    }
    result = sft(model, train, tmp_path / "out", **keys)
    assert result.steps == 2
    assert "step" in hook.seen
    assert all("right" in event for event in events(result.out, "eval"))
    assert (
        sft(
            model, train, tmp_path / "out", **{**keys, "hooks": [Hook(2), print], "resume": True}
        ).notice
        is not None
    )
    more = {**keys, "hooks": [Hook(4)], "resume": True}
    assert sft(model, train, tmp_path / "out", **more).steps == 5
    factor = 3.0
    with pytest.raises(taut.ConfigError, match="right on other data or in another way"):
        sft(
            model,
            train,
            tmp_path / "out",
            **{**keys, "hooks": [Hook(9)], "steps": 7, "resume": True},
        )
