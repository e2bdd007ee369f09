"""Every kind of adapter that peft makes is continued exactly, or refused by name, with what to do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checks.planting import Place
from tests.helpers.chat_runs import chats, events, save_model, sft, write_rows
from tests.helpers.peft_adapters import KINDS, Kind, dtype_of, loaded, logits_on, make, with_adapter
from tests.helpers.slow_cases import slow_except

from taut.commands.merge import merge
from taut.commands.settings import Merge
from taut.errors import ModelError
from taut.models.lora.adapters import adapter_settings
from taut.types import Sample

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
CONTINUED = [name for name, kind in KINDS.items() if not kind.says]
REFUSED = [name for name, kind in KINDS.items() if kind.says]


def loss_of(model: Any, samples: list[Sample]) -> float:
    """The mean nll of the targets, by the model's own logits."""
    total, number = 0.0, 0
    for sample in samples:
        logp_TV = logits_on(model, sample.ids_T).log_softmax(-1)
        at_N = torch.as_tensor(sample.target_at_N).long()
        ids_N = torch.as_tensor(sample.ids_T).long()[at_N]
        total -= float(logp_TV[at_N - 1].gather(1, ids_N[:, None]).sum())
        number += len(at_N)
    return total / number


def base_of(kind: Kind, tmp_path: Path) -> Path:
    return save_model(tmp_path / "base", kind.base, dtype=dtype_of(kind))


@pytest.mark.parametrize("name", slow_except(["rank_pattern", "exclude_modules"], CONTINUED))
def test_it_is_continued_exactly(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, adapter, out = KINDS[name], tmp_path / "adapter", tmp_path / "out"
    base, dtype = base_of(kind, tmp_path), dtype_of(kind)
    data = write_rows(tmp_path / "rows.jsonl", chats(6))
    theirs = make(kind, base, adapter)
    keys: dict[str, Any] = {"steps": 2, "optim__learning_rate": 1e-2, "contract__prompts": 0}
    if dtype == torch.float32:
        keys["dtype"] = "float32"
    sft(base, data, out, lora__adapter=str(adapter), **keys)
    session = Place(tmp_path, monkeypatch).session(base, data)
    samples = [session.train[index] for index in range(len(session.train))]
    rounding = 1e-6 if dtype == torch.float64 else 2e-5  # the library's norms are in float32
    first = events(out, "step")[0]["loss"]
    if not kind.settings.get("lora_dropout"):
        assert first == pytest.approx(loss_of(theirs, samples), abs=rounding)
    saved = with_adapter(base, out / "adapter", dtype)
    assert loss_of(saved, samples) < first - 1e-4, "it was trained"
    ids_T = samples[0].ids_T
    difference = logits_on(saved, ids_T) - logits_on(loaded(out / "model", dtype), ids_T)
    assert difference.abs().max() < 50 * rounding


@pytest.mark.parametrize("name", slow_except(["aLoRA", "LoHa", "bias=all", "Arrow"], REFUSED))
def test_it_is_refused_by_name(name: str, tmp_path: Path) -> None:
    kind, adapter = KINDS[name], tmp_path / "adapter"
    base = base_of(kind, tmp_path)
    make(kind, base, adapter)
    data = write_rows(tmp_path / "rows.jsonl", chats(6))
    with pytest.raises(ModelError, match=kind.says) as raised:
        sft(base, data, tmp_path / "out", lora__adapter=str(adapter), dtype="float32", steps=1)
    says = str(raised.value)
    assert "\n" not in says
    assert re.search("expected .*;", says)
    assert not (tmp_path / "out").exists()


def test_a_merged_head_is_the_remedy_and_trains(tmp_path: Path) -> None:
    """What the refusal says to do."""
    kind = KINDS["adapter of the head"]
    base = base_of(kind, tmp_path)
    theirs: Any = make(kind, base, tmp_path / "adapter")
    ids_T = list(range(3, 20))
    expected = logits_on(theirs, ids_T)
    theirs.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert (
        logits_on(loaded(tmp_path / "merged", torch.float64), ids_T) - expected
    ).abs().max() < 1e-9


def test_biases_of_the_base_are_merged_and_train(tmp_path: Path) -> None:
    """What the refusal of bias=all says to do."""
    kind, merged = KINDS["bias=all"], tmp_path / "merged"
    base = base_of(kind, tmp_path)
    expected = logits_on(make(kind, base, tmp_path / "adapter"), list(range(3, 20)))
    merge(Merge(model=str(base), adapter=str(tmp_path / "adapter"), out=str(merged), device="cpu"))
    found = logits_on(loaded(merged, torch.float64), list(range(3, 20)))
    assert (found - expected).abs().max() < 1e-4, "merged in float32"


def test_settings_that_say_nothing_are_no_reason(tmp_path: Path) -> None:
    kind = KINDS["one that is off"]
    make(kind, base_of(kind, tmp_path), tmp_path / "adapter")
    assert adapter_settings(tmp_path / "adapter", "lora.adapter")["r"] == 4
