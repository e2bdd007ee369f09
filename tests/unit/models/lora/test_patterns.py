"""Regular expressions of a downloaded adapter: peft gets none that runs for ever."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.helpers.tiny_models import tiny_model
from torch import nn

from taut.checks.run import adapter_targets
from taut.errors import ModelError
from taut.io import limited_call
from taut.models.lora.adapters import apply_lora
from taut.models.lora.merge import save_adapter
from taut.models.lora.patterns import require_bounded_patterns
from taut.models.settings import LoraConfig

NAMES = ["model.layers.0.self_attn." + "a" * 40 + "!", "model.layers.1.mlp.up_proj"]
SLOW = "(.+)+#"
HOSTILE: dict[str, Any] = {
    "target_modules": SLOW,
    "exclude_modules": SLOW,
    "modules_to_save": [SLOW],
    "layers_pattern": SLOW,
    "rank_pattern": {SLOW: 4},
    "alpha_pattern": {"up_proj": 8, SLOW: 4},
}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    call = limited_call.call
    monkeypatch.setattr(limited_call, "call", lambda *given: call(*given, seconds=0.5))


@pytest.mark.parametrize("setting", HOSTILE)
def test_a_pattern_that_runs_for_ever_is_an_error(setting: str) -> None:
    started = time.monotonic()
    with pytest.raises(ModelError, match=rf"lora\.adapter=x: .*{setting}.* more than 0\.5 s"):
        require_bounded_patterns("lora.adapter=x", {setting: HOSTILE[setting]}, NAMES)
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", SLOW], "exclude_modules": None},  # names, not patterns
        {"target_modules": r".*\.(q|v)_proj", "rank_pattern": {"up_proj": 4, r"^model\..*": 2}},
        {"layers_pattern": ["layers"], "modules_to_save": None, "alpha_pattern": {}},
    ],
)
def test_ordinary_patterns_pass(settings: dict[str, Any]) -> None:
    require_bounded_patterns("lora.adapter=x", settings, NAMES)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": SLOW}, "target_modules .* more than 0\\.5 s"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern '\\(': it is no regular expression"),
    ],
)
def test_an_adapter_with_one_is_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    save_adapter(apply_lora(tiny_model("llama"), LoraConfig(rank=2)), tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    with pytest.raises(ModelError, match=message):
        apply_lora(tiny_model("llama"), LoraConfig(adapter=str(tmp_path)))


def test_the_check_of_adapters_takes_the_names_of_a_list_as_they_are() -> None:
    """``/.../`` is a pattern where the user writes it, and a name like any other in an adapter's own settings."""
    modules = {name: nn.Linear(1, 1) for name in (*NAMES, "model.q_proj", "model./(a+)+b/")}
    session: Any = SimpleNamespace(
        model=SimpleNamespace(get_output_embeddings=lambda: None),
        run=SimpleNamespace(lora=LoraConfig(adapter="x")),
    )
    started = time.monotonic()
    found = adapter_targets(
        session, modules, {}, {"targets": ["q_proj", "/(a+)+b/", "/(.+)+#/", "*"]}
    )
    assert found == {"model.q_proj", "model./(a+)+b/"}
    assert time.monotonic() - started < 60
