"""A run of ``taut reward`` as the core sees it: what it has no use for is refused or said, what it needs trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.chat_runs import save_model
from tests.helpers.judged_runs import keys_of, make, train

from taut.errors import ConfigError, ModelError


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("reward")
    save_model(place / "model", dtype=torch.float64)
    return place


def keys(place: Path, **more: Any) -> dict[str, Any]:
    return keys_of("reward", place / "model", place / "run", **more)


@pytest.mark.parametrize(
    "more", [{"tokens__add": ["<|new|>"]}, {"lora__train_token_rows": "always"}], ids=str
)
def test_rows_train_beside_adapters(more: dict[str, Any], place: Path) -> None:
    built = make(keys(place, lora__rank=2, **more))
    trained = [name for name, p in built.scorer.named_parameters() if p.requires_grad]
    assert [name for name in trained if "embed_tokens" in name]
    assert [it.value for it in built.decisions if it.name == "lora.train_token_rows"] == [
        "1 of model.embed_tokens"
    ]


def test_a_row_that_could_not_train_is_refused(place: Path) -> None:
    with pytest.raises(ModelError, match=r"<\|new\|>: added by tokens\.add; its row is frozen"):
        make(keys(place, lora__rank=2, lora__train_token_rows="never", tokens__add=["<|new|>"]))


def test_it_cannot_be_asked_to_stop(place: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^stop_check\.required=true .*: a reward model writes no"
    ):
        train(keys(place, stop_check__required=True))


def test_the_best_is_no_model_that_will_answer(place: Path) -> None:
    result = train(keys(place, steps=2, eval__every=1, eval__best="accuracy"))
    for name in ("best", "model"):
        contract = json.loads((result.out / name / "contract.json").read_text(encoding="utf-8"))
        assert contract["note"] == "a reward model writes nothing"
