"""What is in force is found so, in every way of training: no false alarm of ``run.in_force`` or ``run.steps``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.checks.planting import Place
from tests.helpers.chat_runs import sft

from taut.checks.examine import examine

ASKED = {"run.in_force", "run.steps"}

WAYS: dict[str, dict[str, Any]] = {
    "a scale without end": {"lora__rank": 3, "lora__rslora": True, "lora__targets": ["q_proj"]},
    "rows that train": {"lora__rank": 2, "lora__train_token_rows": "always", "lora__alpha": 3.0},
    "new tokens": {"lora__rank": 2, "tokens__add": ["<tool>"], "lora__dora": True},
    "tables": {"lora__rank": 2, "lora__modules_to_save": ["embed_tokens", "lm_head"]},
    "a part of the adapters": {"lora__rank": 2, "freeze": ["/layers\\.0\\./"]},
    "fewer steps than an epoch": {"batch__samples_per_step": 5, "steps": None, "epochs": 0.5},
    "steps of tokens": {
        "batch__tokens_per_step": 60,
        "batch__samples_per_step": 32,
        "steps": None,
        "epochs": 1.5,
    },
    "documents": {"batch__group_prefixes": True, "batch__group_min_tokens": 4},
    "muon": {"optim__name": "muon", "optim__state": "int8", "optim__weight_decay": 0.1},
    "no clipping": {"optim__clip_grad_norm": None, "batch__share_prefixes": False},
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_in_force_is_found_so(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path, monkeypatch)
    found = examine(place.session(place.model("llama"), **WAYS[way]), only=ASKED)
    assert {one.name: one.finding.outcome for one in found.results} == dict.fromkeys(
        ASKED, "passed"
    ), found


def test_a_step_of_more_samples_than_rows_is_in_force_and_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path, monkeypatch)
    keys: dict[str, Any] = {"batch__samples_per_step": 50, "steps": None, "epochs": 0.5}
    found = examine(place.session(place.model("llama"), **keys), only=ASKED)
    outcomes = {one.name: one.finding.outcome for one in found.results}
    assert outcomes == {"run.in_force": "passed", "run.steps": "warning"}, found


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_adapters_of_experts(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path, monkeypatch)
    session = place.session(place.model(architecture), lora__rank=2, lora__alpha=3.0)
    found = examine(session, only=ASKED)
    assert not found.failures, found.failures


def test_an_adapter_that_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(tmp_path, monkeypatch)
    model, data = place.model("llama"), place.data()
    keys = {"lora__rank": 3, "lora__rslora": True, "lora__targets": ["q_proj", "mlp.up_proj"]}
    sft(model, data, tmp_path / "out", steps=1, check="off", **keys)
    session = place.session(model, data, lora__adapter=str(tmp_path / "out" / "adapter"))
    found = examine(session, only=ASKED)
    assert not found.failures, found.failures


@pytest.mark.parametrize("settings", [{"optim__name": "muon"}, {"optim__state": "int8"}])
def test_one_update_of_another_optimizer_is_downhill(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path, monkeypatch)
    session = place.session(place.model("llama"), **settings)
    found = examine(session, part="full", only=["fit.update"])
    assert [one.finding.outcome for one in found.results] == ["passed"], found
