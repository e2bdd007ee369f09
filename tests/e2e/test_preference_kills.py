"""Killed (SIGKILL) and resumed where answers are judged: references, statistics of the step and heads, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.chat_runs import events
from tests.helpers.judged_runs import keys_of
from tests.helpers.kill_points import Operation, point
from tests.helpers.killed_runs import kill, resume, whole
from tests.helpers.run_directories import Left, left, require_equal
from tests.helpers.slow_cases import slow_except

STEPS = {
    "steps": 5,
    "checkpoint.every": 2,
    "checkpoint.keep": 2,
    "batch.samples_per_step": 5,
    "batch.tokens_per_microbatch": 120,
    "optim.schedule": "cosine",
    "contract.prompts": 1,
    "contract.max_new_tokens": 4,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo": (
        "dpo",
        {"eval.every": 4, "eval.best": "rewards/accuracy", "dpo.loss": ["sigmoid", "aot"]},
    ),
    "replaced": ("dpo", {"reference.update_every": 2, "dtype": "bfloat16"}),
    "followed": ("dpo", {"reference.update_every": 1, "reference.update_mix": 0.4, "lora.rank": 4}),
    "kto": ("kto", {"lora.rank": 4, "dtype": "float32"}),
    "reward": ("reward", {"dtype": "float32", "lora.rank": 4}),
}


@pytest.mark.parametrize(
    ("kind", "operation", "within", "share"),
    slow_except(
        [("kto", "forward", "", 0.8)],
        [
            ("dpo", "best", "", 0.6),
            ("replaced", "checkpoint", "step-000004", 0.6),
            ("followed", "update", "", 0.9),
            ("kto", "forward", "", 0.8),
            ("reward", "export", "", 0.5),
        ],
    ),
)
def test_killed_and_resumed_equals_uninterrupted(
    kind: str, operation: str, within: str, share: float, model: Path, tmp_path: Path
) -> None:
    method, given = KINDS[kind]
    keys = keys_of(method, model, tmp_path / "data", **{**STEPS, **given})
    operations: list[Operation] = whole(tmp_path / "whole", keys)
    wanted: Left = left(tmp_path / "whole")
    out = tmp_path / "out"
    kill(out, keys, point(operations, operation, share, within))
    resume(out, keys)
    require_equal(out, wanted)
    assert events(out, "resume")[-1]["from_step"] > 0
    held = [name for name in wanted.tensors if "reference.tensor" in name]
    assert bool(held) == ("reference.update_every" in given)
