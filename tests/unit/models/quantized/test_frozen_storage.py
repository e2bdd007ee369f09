"""Frozen weights stored in the checkpoint's dtype: the same numbers as in float32, to the bit; nothing changes them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_models import CARRIED, plain_model, tiny_model
from tests.helpers.tiny_samples import nested_family
from torch import Tensor, nn
from transformers import PreTrainedModel

from taut.data.packing import PackPolicy, pack
from taut.models import architecture
from taut.models.attention_backends import PREFIX
from taut.models.load import (
    checkpoint_dtype,
    load_config,
    load_model,
    quiet_library,
    set_attention,
)
from taut.models.lora.adapters import apply_lora, choose_rows
from taut.models.precision import compute_context
from taut.models.quantized import frozen_storage
from taut.models.quantized.frozen_storage import Storage
from taut.models.scorer import Scorer
from taut.models.settings import LoraConfig

CPU = torch.device("cpu")
NARROW = Storage(torch.bfloat16, torch.bfloat16)
EXPERTS = ("qwen3_moe", "gpt_oss")
FEW = ("qwen2", "gemma3", "qwen3_moe", "gpt_oss")


def save(name: str, directory: Path, **changes: Any) -> str:
    with quiet_library():
        tiny_model(name, dtype=torch.bfloat16, **changes).save_pretrained(directory)
    return str(directory)


def load(path: str, storage: Storage | None, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return load_model(
        path, dtype=dtype, device=CPU, attention=PREFIX + "reference", storage=storage
    )


def digest(model: nn.Module) -> str:
    """Of everything that does not train."""
    found = hashlib.sha256()
    for name, p in sorted(model.named_parameters()):
        if not p.requires_grad:
            found.update(
                name.encode() + p.detach().contiguous().view(torch.uint8).numpy().tobytes()
            )
    return found.hexdigest()


def two_steps(model: nn.Module, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses, and what trains after two steps."""
    scorer, losses = Scorer(model), []
    packed = pack(nested_family(97), PackPolicy(share_prefixes=True, min_saved_tokens=1))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    for _ in range(2):
        with compute_context(dtype, CPU):
            loss = -scorer(packed).logp_N.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    "dtype", slow_except([torch.bfloat16], [torch.float32, torch.bfloat16]), ids=str
)
@pytest.mark.parametrize("name", CARRIED)
def test_training_has_the_same_bits_as_with_weights_in_float32(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = save(name, tmp_path / "base")
    results = []
    for storage in (None, NARROW):
        model = apply_lora(load(path, storage, dtype), LoraConfig(rank=2), seed=1)
        before = digest(model)
        results.append(two_steps(model, dtype))
        assert digest(model) == before
    (losses, weights), (narrow_losses, narrow_weights) = results
    assert all(map(torch.equal, losses, narrow_losses))
    assert weights.keys() == narrow_weights.keys()
    assert all(torch.equal(weights[key], narrow_weights[key]) for key in weights)


@pytest.mark.parametrize("name", FEW)
def test_what_is_stored_in_which_dtype(name: str, tmp_path: Path) -> None:
    model = load(save(name, tmp_path / "base"), NARROW)
    narrow = {n for n, p in model.named_parameters() if p.dtype == torch.bfloat16}
    assert narrow and narrow <= frozen_storage.stored_dtypes(model, NARROW).keys()
    tables = {f"{name}.weight" for name in architecture.table_names(model)}
    assert tables <= narrow
    assert not any(word in n for n in narrow for word in ("norm", "bias", "router", "sinks"))
    inside = [m for m in architecture.layers(model).modules() if type(m) is nn.Linear]
    assert all(m.weight.dtype == torch.bfloat16 for m in inside)
    stacked = [p for n, p in model.named_parameters() if p.ndim == 3 and "experts" in n]
    assert all(p.dtype == torch.bfloat16 for p in stacked)
    assert len(stacked) == (2 * len(architecture.layers(model)) if name in EXPERTS else 0)


def test_merged_weights_are_those_of_float32(tmp_path: Path) -> None:
    path = save("qwen2", tmp_path / "base", tie_word_embeddings=True)
    states = []
    for storage in (None, NARROW):
        model = apply_lora(load(path, storage), LoraConfig(rank=2), seed=1)
        two_steps(model, torch.float32)
        states.append(plain_model(model).state_dict())
    wide, narrow = states
    assert wide.keys() == narrow.keys()
    assert all(torch.equal(wide[name], narrow[name]) for name in wide)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_fresh_adapter_under_bfloat16_merges_into_the_checkpoint_itself(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """Whatever its dtype: nothing of what is saved is rounded to the compute dtype."""
    with quiet_library():
        tiny_model("llama", dtype=dtype).save_pretrained(tmp_path)
    found = checkpoint_dtype(load_config(str(tmp_path)))
    storage = frozen_storage.storage_of(found, torch.bfloat16, CPU, "auto")
    model = apply_lora(load(str(tmp_path), storage, torch.bfloat16), LoraConfig(rank=2))
    merged, expected = plain_model(model).state_dict(), load(str(tmp_path), None).state_dict()
    for name, weight in expected.items():
        torch.testing.assert_close(merged[name].float(), weight, rtol=0, atol=0, msg=name)
    two_steps(model, torch.bfloat16)


@pytest.mark.parametrize("saved", ["embed_tokens", "o_proj", "mlp"])
def test_modules_trained_whole_are_in_float32_with_the_contents_of_the_base(
    saved: str, tmp_path: Path
) -> None:
    path = save("gemma3", tmp_path / "base", tie_word_embeddings=True)
    config = LoraConfig(rank=2, targets=["q_proj"], modules_to_save=[saved])
    results = []
    for storage in (None, NARROW):
        model = apply_lora(load(path, storage), config, seed=1)
        assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
        results.append(two_steps(model, torch.float32))
    (losses, weights), (narrow_losses, narrow_weights) = results
    assert all(map(torch.equal, losses, narrow_losses))
    assert all(torch.equal(weights[key], narrow_weights[key]) for key in weights)


@pytest.mark.parametrize("saved", ["embed_tokens", "lm_head", "o_proj"])
def test_a_module_trained_whole_goes_on_with_the_numbers_it_was_saved_with(
    saved: str, tmp_path: Path
) -> None:
    base = load(save("llama", tmp_path / "base"), NARROW)
    model = apply_lora(base, LoraConfig(rank=2, modules_to_save=[saved]))
    expected = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for p in expected.values():
            p += 0.01 * torch.rand_like(p)
    model.save_pretrained(tmp_path / "adapter")
    again = load(str(tmp_path / "base"), NARROW)
    model = apply_lora(again, LoraConfig(adapter=str(tmp_path / "adapter")))
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert found.keys() == expected.keys()
    for name, p in found.items():
        torch.testing.assert_close(p, expected[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("is_tied", [True, False])
def test_rows_that_train_begin_as_the_base_has_them(is_tied: bool, tmp_path: Path) -> None:
    path = save("llama", tmp_path / "base", tie_word_embeddings=is_tied)
    config, ids = LoraConfig(rank=2), torch.arange(5)[None]
    results, logits = [], []
    for storage in (None, NARROW):
        base = load(path, storage)
        rows = choose_rows(base, config, [3, 7], {})
        model = apply_lora(base, config, seed=1, rows=rows)
        results.append(two_steps(model, torch.float32))
        with torch.no_grad():
            logits.append(library_logits(model, ids))
    (losses, weights), (narrow_losses, narrow_weights) = results
    assert sum("trainable_tokens" in name for name in weights) == (1 if is_tied else 2)
    assert all(map(torch.equal, losses, narrow_losses))
    assert all(torch.equal(weights[key], narrow_weights[key]) for key in weights)
    assert torch.equal(*logits)


def library_logits(model: nn.Module, ids: Tensor) -> Tensor:
    """By the library's own path, the head's adapter included."""
    plain = architecture.unwrap(model)
    set_attention(plain, "sdpa")
    found: Tensor = plain(input_ids=ids).logits
    return found


def test_the_library_reads_each_weight_in_its_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a model would be read in float32, and narrowed only afterwards."""
    monkeypatch.setattr(frozen_storage, "store", lambda *_, **__: None)
    monkeypatch.setattr("taut.models.load.store", lambda *_, **__: None)
    model = load(save("llama", tmp_path / "base"), NARROW)
    wanted = frozen_storage.stored_dtypes(model, NARROW)
    assert {n: p.dtype for n, p in model.named_parameters() if n in wanted} == wanted


def test_on_a_cpu_float32_stays_while_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save("llama", tmp_path / "base")
    auto = frozen_storage.storage_of(torch.bfloat16, torch.float32, CPU, "auto")
    model = load(path, auto)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert frozen_storage.described(model, auto)[0] == "float32"
    monkeypatch.setattr(frozen_storage, "host_memory", lambda: 1000)
    model = load(path, auto)
    value, reason = frozen_storage.described(model, auto)
    assert value == "bfloat16" and "nothing of the base trains" in reason
    assert model.lm_head.weight.dtype == torch.bfloat16


def test_storage_by_compute_dtype_and_checkpoint() -> None:
    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    cuda = torch.device("cuda")
    assert frozen_storage.storage_of(bf16, bf16, cuda, "auto") == Storage(bf16, bf16)
    assert frozen_storage.storage_of(f32, bf16, cuda, "auto") == Storage(f32, f32)
    assert frozen_storage.storage_of(f16, bf16, cuda, "auto") == Storage(f16, f16)
    assert frozen_storage.storage_of(f32, bf16, cuda, "checkpoint") == Storage(
        bf16, f32, rounds=True
    )
    assert frozen_storage.storage_of(bf16, bf16, cuda, "checkpoint") == Storage(bf16, bf16)
    assert frozen_storage.storage_of(f16, f32, cuda, "auto") == Storage(f16, f16)
    assert frozen_storage.storage_of(bf16, f32, CPU, "checkpoint") == Storage(bf16, bf16)
    assert frozen_storage.storage_of(torch.float64, f32, CPU, "checkpoint") == Storage(f32, f32)
    assert frozen_storage.storage_of(bf16, bf16, CPU, "auto") == Storage(bf16, bf16)


def test_the_config_names_the_checkpoints_dtype(tmp_path: Path) -> None:
    assert load_config(save("llama", tmp_path / "base")).dtype == torch.bfloat16


def test_the_check_of_dtypes_takes_frozen_weights_as_they_are_stored(tmp_path: Path) -> None:
    model = load(save("llama", tmp_path / "base", tie_word_embeddings=True), NARROW)
    stored = frozen_storage.stored_parameters(model, NARROW)
    assert model.lm_head.weight in stored
    assert model.model.norm.weight not in stored
