"""Each capability of src/taut/io/capabilities.py is taken away in turn: what needs it is refused by name, or
done another way with the reason said.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.tiny_models import tiny_model
from tests.helpers.vision_models import tiny_vlm

from taut.errors import ModelError
from taut.io import capabilities
from taut.io.capabilities import CAPABILITIES, lack, require
from taut.models.attention_backends import PREFIX
from taut.models.load import load_config, load_model, load_tokenizer
from taut.models.lora.adapters import apply_lora
from taut.models.quantized.frozen_storage import Storage
from taut.models.reward_model import load_reward_model
from taut.models.settings import LoraConfig, NewHead
from taut.models.tensor_parallel import divide_layers
from taut.vision.image_store import open_image_store
from taut.vision.settings import ImagesConfig
from taut_tools.demo import fetch

Patch = pytest.MonkeyPatch
BEFORE = {
    "5.18": "5.17.0",
    "5.19": "5.18.2",
    "5.21": "5.20.0",
    "5.23": "5.22.1",
    "0.21": "0.20.0",
    "2.12": "2.11.0+cpu",
}
"""A version -> one before it."""


def _pictures(place: Path, patch: Patch) -> str:
    path = str(tiny_vlm("qwen2_vl", place / "model"))
    tokenizer = load_tokenizer(path)
    with pytest.raises(ModelError) as caught:
        open_image_store(path, load_config(path), tokenizer, ImagesConfig(), place / "cache")
    return str(caught.value)


def _scalar_head(place: Path, patch: Patch) -> str:
    path = str(tiny_vlm("qwen2_vl", place / "model"))
    options: dict[str, Any] = {"dtype": torch.float64, "device": torch.device("cpu")}
    with pytest.raises(ModelError) as caught:
        load_reward_model(path, NewHead(), **options, attention=PREFIX + "reference")
    return str(caught.value)


def _gguf(place: Path, patch: Patch) -> str:
    with pytest.raises(ModelError) as caught:
        fetch._convert(place / "no.whl", place)
    return str(caught.value)


def _comes_quantized(place: Path, patch: Patch) -> str:
    tiny_model("llama").save_pretrained(place / "model")
    path = place / "model" / "config.json"
    quantized = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantized}))
    options: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    storage = Storage(torch.bfloat16, torch.bfloat16)
    with pytest.raises(ModelError) as caught:
        load_model(str(path.parent), **options, attention=PREFIX + "reference", storage=storage)
    return str(caught.value)


def _quantized_experts(place: Path, patch: Patch) -> str:
    pytest.importorskip("bitsandbytes")
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16, hidden_size=64, moe_intermediate_size=32)
    model.save_pretrained(place / "model")
    options: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    storage = Storage(torch.bfloat16, torch.bfloat16, "nf4")
    path = str(place / "model")
    base = load_model(path, **options, attention=PREFIX + "reference", storage=storage)
    with pytest.raises(ModelError) as caught:
        apply_lora(base, LoraConfig(rank=2), seed=1)
    return str(caught.value)


def _tensor_parallel(place: Path, patch: Patch) -> str:
    model, mesh = tiny_model("llama"), None
    with pytest.raises(ModelError) as caught:
        divide_layers(model, mesh)  # type: ignore[arg-type]  # nothing is asked of it
    return str(caught.value)


USES: dict[str, Callable[[Path, Patch], str]] = {
    "a model with pictures": _pictures,
    "a scalar head on a model with pictures": _scalar_head,
    "a base that comes quantized": _comes_quantized,
    "an adapter of quantized experts": _quantized_experts,
    "tensor parallelism": _tensor_parallel,
    "a model read from GGUF": _gguf,
}
"""Capability -> what needs it; returns the words that the user reads."""


@pytest.mark.parametrize("name", CAPABILITIES)
def test_what_an_older_version_lacks_is_said_by_name(
    name: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    library, since, _ = CAPABILITIES[name]
    real = capabilities.installed
    monkeypatch.setattr(
        capabilities, "installed", lambda of: BEFORE[since] if of == library else real(of)
    )
    said = USES[name](tmp_path, monkeypatch)
    assert f"{name} needs {library} {since} or newer" in said
    assert f"found {library} {BEFORE[since]}" in said


@pytest.mark.parametrize("name", CAPABILITIES)
def test_from_its_first_version_on_it_is_there(name: str, monkeypatch: Patch) -> None:
    library, since, _ = CAPABILITIES[name]
    for found in (since, f"{since}.1", f"{since}.0+cu130", "99.0"):
        monkeypatch.setattr(capabilities, "installed", {library: found}.__getitem__)
        assert lack(name) is None
        require(name, "model=DIR")
    monkeypatch.setattr(capabilities, "installed", {library: BEFORE[since]}.__getitem__)
    with pytest.raises(ModelError, match=rf"^model=DIR: .*pip install '{library}>={since}'$"):
        require(name, "model=DIR")
