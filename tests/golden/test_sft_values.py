"""Values that are known without running anything, and a curve at full precision.

By hand, for a head of zeros: every logit is 0, so p = 1/V for every token, and

    loss     = ln V                                 whatever the samples and weights
    dL/dW    = sum_n w_n (1/V - onehot(y_n)) h_n^T / sum_n w_n        so each column sums to 0 over V
    AdamW    moves a weight by lr * g / (|g| + eps) at step 1: by lr, against the sign of g
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.chat_runs import chats, column, save_model, sft, write_rows
from tests.helpers.tiny_samples import nested_family
from tests.helpers.tiny_trainers import Fixed, make
from torch import Tensor

from taut.train.trainer import train_step
from taut.types import Tree

CURVE = Path(__file__).with_name("sft_curve.json")


def test_a_head_of_zeros_by_hand(tmp_path: Path) -> None:
    built, _ = make(
        tmp_path,
        "llama",
        optim__clip_grad_norm=None,
        optim__learning_rate=1e-3,
        optim__warmup_steps=0,
    )
    trainer, head = built.trainer, built.scorer.model.lm_head.weight  # type: ignore[union-attr]
    assert isinstance(head, Tensor)
    vocabulary = head.shape[0]
    with torch.no_grad():
        head.zero_()
    trainer.source, seen = Fixed([Tree((s,)) for s in nested_family(97)]), {}

    def keep(report: Any, trainer: Any) -> None:
        seen["grad"] = head.grad.clone()

    trainer.monitors = (keep,)
    report = train_step(trainer, 1)
    assert report.loss == pytest.approx(math.log(vocabulary), rel=1e-12)
    grad = seen["grad"]
    torch.testing.assert_close(grad.sum(0), torch.zeros_like(grad[0]), rtol=0, atol=1e-12)
    never = grad[300:]  # ids that are no target: sum_n w_n h_n / (V sum_n w_n), the same for all
    torch.testing.assert_close(never, never[:1].expand_as(never), rtol=0, atol=1e-12)
    large = grad.abs() > 1e-3
    moved = head.detach()[large]
    torch.testing.assert_close(moved, -1e-3 * grad[large].sign(), rtol=2e-5, atol=0)


def test_the_curve_of_a_tiny_run(tmp_path: Path) -> None:
    """float64 losses, gradient norms and rates of six steps; other machines draw the weights with other last bits."""
    model = save_model(tmp_path / "model", "qwen2", dtype=torch.float64)
    train = write_rows(tmp_path / "train.jsonl", chats(10))
    out = sft(model, train, tmp_path / "out", steps=6, optim__schedule="cosine").out
    found = {name: column(out, name) for name in ("loss", "grad_norm", "learning_rate")}
    found["num_targets"] = column(out, "num_targets")
    if not CURVE.exists():
        CURVE.write_text(json.dumps(found, indent=1) + "\n")
        pytest.fail(f"{CURVE.name} was not there and has been written; look at it and commit it")
    expected = json.loads(CURVE.read_text())
    assert found["num_targets"] == expected["num_targets"]
    for name in ("loss", "grad_norm", "learning_rate"):
        assert found[name] == pytest.approx(expected[name], rel=1e-6), name
