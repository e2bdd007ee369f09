"""A model whose layers are read when they run has the numbers of one that is read whole, and no layer between runs."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_models import EIGHT, STATEFUL, tiny_model
from tests.helpers.tiny_samples import nested_family
from torch import Tensor

from taut.data.packing import ALONE, pack
from taut.errors import ModelError
from taut.models import architecture
from taut.models.attention_backends import PREFIX
from taut.models.layerwise import StreamedLayers
from taut.models.load import load_model, quiet_library
from taut.models.lora.adapters import apply_lora
from taut.models.lora.merge import save_adapter
from taut.models.quantized.frozen_storage import Storage
from taut.models.scorer import Scorer
from taut.models.settings import LoraConfig

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
KINDS = (*EIGHT, *STATEFUL[:2])


def save(name: str, directory: Path, **changes: Any) -> Path:
    with quiet_library():
        made = tiny_model(name, dtype=torch.bfloat16, **(SIZES | changes))
        made.save_pretrained(directory)
    return directory


def load(path: Path, *, is_streamed: bool, storage: Storage | None = None) -> Any:
    streamed = StreamedLayers(nullcontext) if is_streamed else None
    model = load_model(
        str(path),
        dtype=torch.float32,
        device=torch.device("cpu"),
        attention=PREFIX + "reference",
        storage=storage,
        streamed=streamed,
    )
    return model, streamed


@torch.no_grad()
def logp(model: Any) -> Tensor:
    scorer = Scorer(model).eval()
    return torch.cat([scorer(pack([s], ALONE)).logp_N for s in nested_family(97)[:2]])


def contents(model: Any) -> int:
    """The bytes that the layers' parameters have."""
    layers = architecture.layers(model)
    return sum(p.untyped_storage().nbytes() for p in layers.parameters() if p.dim() > 0)


@pytest.mark.parametrize("name", slow_except(("qwen2", "qwen3_moe"), KINDS))
def test_the_numbers_are_those_of_a_model_that_is_read_whole(name: str, tmp_path: Path) -> None:
    path = save(name, tmp_path / "model", **({} if name in EIGHT else {"head_dim": 16}))
    whole, _ = load(path, is_streamed=False)
    model, _ = load(path, is_streamed=True)
    expected = logp(whole)
    for _ in range(2):
        assert torch.equal(logp(model), expected)
        assert contents(model) <= 8 * sum(1 for _ in architecture.layers(model).parameters())
    assert architecture.is_tied(model) == architecture.is_tied(whole)
    assert architecture.num_weights(model) == architecture.num_weights(whole)


@pytest.mark.parametrize("name", slow_except(("llama",), ("llama", "qwen3_moe")))
def test_quantized_layers_under_a_saved_adapter(name: str, tmp_path: Path) -> None:
    """With a module that the adapter trained whole: it is copied, so it must have contents."""
    pytest.importorskip("bitsandbytes")
    path = save(name, tmp_path / "model")
    kept = "self_attn.o_proj"
    storage = Storage(torch.bfloat16, torch.bfloat16, "nf4", (kept,))
    saved = ["q_proj", "v_proj"]
    whole, _ = load(path, is_streamed=False, storage=storage)
    config = LoraConfig(rank=2, modules_to_save=[kept], targets=saved)
    trained = apply_lora(whole, config, seed=1)
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05)
    save_adapter(trained, tmp_path / "adapter")
    model, streamed = load(path, is_streamed=True, storage=storage)
    streamed.keep(lambda name: f".{kept}." in name)
    adapted = apply_lora(model, LoraConfig(adapter=str(tmp_path / "adapter")))
    assert torch.equal(logp(adapted), logp(trained))


def test_a_layer_that_lacks_a_tensor_is_named_when_it_runs(tmp_path: Path) -> None:
    path = save("llama", tmp_path / "model")
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    model, _ = load(path, is_streamed=True)
    with pytest.raises(ModelError, match=rf"lacks 1 weight\(s\) of layer 1.*{name}"):
        logp(model)


def test_a_tensor_outside_the_layers_is_missed_at_once(tmp_path: Path) -> None:
    path = save("llama", tmp_path / "model")
    file = path / "model.safetensors"
    tensors = load_file(file)
    save_file(
        {n: t for n, t in tensors.items() if n != "model.norm.weight"}, file, {"format": "pt"}
    )
    with pytest.raises(ModelError, match=r"lacks 1 weight\(s\), model.norm.weight the first"):
        load(path, is_streamed=True)


def test_a_layer_too_many_is_found(tmp_path: Path) -> None:
    path = save("llama", tmp_path / "model", num_hidden_layers=3)
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 2}))
    with pytest.raises(ModelError, match=r"that its config.json leaves out, model.layers.2"):
        load(path, is_streamed=True)


def test_a_layer_is_for_forwards_without_gradient(tmp_path: Path) -> None:
    model, _ = load(save("llama", tmp_path / "model"), is_streamed=True)
    with pytest.raises(AssertionError, match="before a backward pass"):
        Scorer(model)(pack(nested_family(97)[:1], ALONE))
