"""Gradients that do not arrive (class 30), and averages of averages (class 5), as people met them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.chat_runs import (
    PLAIN,
    chats,
    column,
    largest_difference,
    save_model,
    sft,
    weights,
    write_rows,
)

from taut.errors import CheckFailed
from taut.models import architecture
from taut.train import trainer
from taut.types import Packed

LORA: dict[str, Any] = {
    "steps": 1,
    "lora__rank": 4,
    "lora__train_token_rows": "never",
    "activation_checkpointing": True,
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpointing_under_adapters_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the library's checkpointing runs reentrant, and the inputs of the layers need no gradient."""
    model = save_model(tmp_path / "model")
    train = write_rows(tmp_path / "train.jsonl", chats(8))
    sft(model, train, tmp_path / "sound", **LORA)

    def reentrant(model: Any, *_: Any, **__: Any) -> None:
        architecture.unwrap(model).activation_checkpointing_enable({"use_reentrant": True})

    monkeypatch.setattr("taut.run.setup.recompute_activations", reentrant)
    with pytest.raises(CheckFailed, match=r"run.in_force: activation_checkpointing is not applied"):
        sft(model, train, tmp_path / "planted", **LORA)
    assert not (tmp_path / "planted").exists()


def test_eight_steps_of_one_are_one_step_of_eight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples of very different lengths, one a micro-batch or all in one. Planted: the mean of their means."""
    model = save_model(tmp_path / "model")
    train = write_rows(tmp_path / "train.jsonl", chats(16, words=40))
    keys: dict[str, Any] = {
        **PLAIN,
        "steps": 3,
        "batch__samples_per_step": 8,
        "batch__share_prefixes": False,
    }
    runs = {"8x1": 8192, "1x8": 1}
    for name, tokens in runs.items():
        sft(model, train, tmp_path / name, **keys, batch__tokens_per_microbatch=tokens)
    ours = [column(tmp_path / name, "loss") for name in runs]
    assert ours[0] == pytest.approx(ours[1], rel=1e-9)
    found = [weights(tmp_path / name / "model") for name in runs]
    assert largest_difference(*found) < 1e-6

    count = trainer.denominators

    def of_means(loss: Any, microbatches: list[Packed], *rest: Any) -> dict[str, float]:
        first = count(loss, microbatches[:1], *rest)
        return {term: value * len(microbatches) for term, value in first.items()}

    monkeypatch.setattr(trainer, "denominators", of_means)
    planted = tmp_path / "planted"
    sft(model, train, planted, **keys, batch__tokens_per_microbatch=1)
    assert column(planted, "loss") != pytest.approx(ours[0], rel=1e-2)
