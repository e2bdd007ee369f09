"""The comparison of what was trained with what was saved: of a model that is read whole, and of one read by layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.tiny_models import tiny_model
from tests.helpers.tiny_tokenizers import tiny_tokenizer

from taut.errors import ModelError
from taut.evals import round_trip
from taut.evals.round_trip import (
    Comparison,
    Room,
    Trained,
    compare_adapted,
    compare_saved,
    every_token,
    load_adapted,
    load_anew,
    room_for,
    score,
)
from taut.models.attention_backends import PREFIX
from taut.models.load import load_model, quiet_library
from taut.models.lora.adapters import apply_lora
from taut.models.lora.merge import save_adapter
from taut.models.save import saving
from taut.models.scorer import Scorer
from taut.models.settings import LoraConfig

CPU = torch.device("cpu")
SAMPLES = [
    every_token("a", list(range(3, 40))),
    every_token("b", [5, 9, 3, 3, 7, 80]),
]
EMBEDDING, HEAD, LAYER = (
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.layers.1.mlp.up_proj.weight",
)


def trained(name: str, place: Path, *, rank: int = 2) -> Trained:
    """A model, with adapters that are not at their start; its base is in ``place``/base."""
    with quiet_library():
        base = tiny_model(name, dtype=torch.bfloat16, vocab_size=len(tiny_tokenizer()))
        base.save_pretrained(place / "base")
    read = load_model(
        str(place / "base"), dtype=torch.float32, device=CPU, attention=PREFIX + "reference"
    )
    model = apply_lora(read, LoraConfig(rank=rank), seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01 * torch.ones_like(parameter))
    return Trained(model, None, SAMPLES, score(Scorer(model), SAMPLES), torch.bfloat16)


def saved(model: Trained, place: Path, fault: Callable[[Path], Any] | None = None) -> Path:
    kept = tiny_tokenizer()
    with saving(
        model.model, kept, place / "model", stop_ids=[2], template=None, dtype=model.dtype
    ) as directory:
        if fault is not None:
            fault(directory)
    return place / "model"


def compared(model: Trained, directory: Path, *, is_streamed: bool) -> dict[str, Comparison]:
    found = compare_saved(model, load_anew(str(directory), Room(CPU, is_streamed=is_streamed)))
    return {comparison.name: comparison for comparison in found}


def changing(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    """A fault in the tensors of the saved model."""

    def fault(directory: Path) -> None:
        file = directory / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        file.unlink()
        save_file(tensors, file, {"format": "pt"})

    return fault


def setting_ties(directory: Path, *, is_tied: bool) -> None:
    file = directory / "config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"tie_word_embeddings": is_tied}))


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
def test_layers_that_are_read_one_by_one_give_what_a_whole_model_gives(
    name: str, tmp_path: Path
) -> None:
    model = trained(name, tmp_path)
    directory = saved(model, tmp_path)
    before = (directory / "model.safetensors").read_bytes()
    whole = compared(model, directory, is_streamed=False)
    assert compared(model, directory, is_streamed=True) == whole
    assert list(whole) == ["weights", "merge", "reload"]
    assert all(comparison.is_sound for comparison in whole.values())
    assert whole["weights"].value == 0
    assert whole["merge"].value < 1e-4 < 1e-3 < whole["reload"].value
    assert (directory / "model.safetensors").read_bytes() == before


def _add_to(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors[name].view(-1)[7].add_(0.25)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("name", [LAYER, EMBEDDING, "model.norm.weight"])
def test_a_wrong_tensor_is_named(name: str, tmp_path: Path, *, is_streamed: bool) -> None:
    model = trained("llama", tmp_path)
    directory = saved(model, tmp_path, changing(_add_to(name)))
    found = compared(model, directory, is_streamed=is_streamed)
    assert not found["weights"].is_sound
    assert found["weights"].detail.endswith(f"the first to differ is {name}")


@pytest.mark.parametrize("name", [LAYER, HEAD])
def test_a_tensor_that_is_missing_is_named(name: str, tmp_path: Path) -> None:
    model = trained("llama", tmp_path)
    directory = saved(model, tmp_path, changing(lambda tensors: tensors.pop(name)))
    with pytest.raises(ModelError, match=name):
        compared(model, directory, is_streamed=True)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_tie_that_is_made_or_broken_is_found(
    name: str, tmp_path: Path, *, is_streamed: bool
) -> None:
    """llama has two tables, qwen2 one."""
    model = trained(name, tmp_path)

    def retie(tensors: dict[str, torch.Tensor]) -> None:
        if tensors.pop(HEAD, None) is None:
            tensors[HEAD] = tensors[EMBEDDING].clone()

    def fault(directory: Path) -> None:
        changing(retie)(directory)
        setting_ties(directory, is_tied=name == "llama")

    found = compared(model, saved(model, tmp_path, fault), is_streamed=is_streamed)
    assert not found["weights"].is_sound
    assert HEAD in found["weights"].detail


def test_an_adapter_is_compared_on_a_base_that_is_read_by_layers(tmp_path: Path) -> None:
    model = trained("qwen2", tmp_path)
    save_adapter(model.model, tmp_path / "adapter")
    arguments: Any = (str(tmp_path / "base"), tmp_path / "adapter", [])
    room = Room(CPU, is_streamed=True)
    comparison = compare_adapted(model, load_adapted(*arguments, room, trust_remote_code=False))
    assert comparison.is_sound
    assert comparison.value < 1e-4
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({n: 2 * t for n, t in load_file(file).items()}, file, {"format": "pt"})
    wrong = compare_adapted(model, load_adapted(*arguments, room, trust_remote_code=False))
    assert not wrong.is_sound


def test_a_small_model_is_loaded_whole_and_a_large_one_by_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama")
    assert room_for(model, CPU) == Room(CPU)
    monkeypatch.setattr(round_trip, "WHOLE", 1000)
    assert room_for(model, CPU) == Room(CPU, is_streamed=True)
