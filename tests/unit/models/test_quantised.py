"""Quantised bases under adapters: the numbers of transformers and peft, and bytes that nothing changes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_models import tiny_model
from tests.tiny_samples import nested_family
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from taut import extras
from taut.config import from_mapping
from taut.data.packing import ALONE, PackPolicy, pack
from taut.errors import ConfigError, ModelError
from taut.methods.method import RunConfig
from taut.models import architecture, frozen, quantised
from taut.models.attention_backends import PREFIX
from taut.models.frozen import Storage
from taut.models.load import load_config, load_model, quiet_library
from taut.models.lora import LoraConfig, apply_lora, plain_model
from taut.models.precision import compute_context
from taut.models.quantised import Quantise, quantised_layers
from taut.models.scorer import Scorer, evaluating
from taut.plan.tracing import Kernels, planned_model

pytest.importorskip("bitsandbytes")
CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}


def save(name: str, directory: Path, **changes: Any) -> str:
    with quiet_library():
        model = tiny_model(name, dtype=torch.bfloat16, **SIZES, **changes)
        model.save_pretrained(directory)
    return str(directory)


def load(path: str, how: Quantise | None, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    storage = Storage(torch.bfloat16, torch.bfloat16, how)
    return load_model(
        path, dtype=dtype, device=CPU, attention=PREFIX + "reference", storage=storage
    )


def digest(model: nn.Module) -> str:
    """Of all that is frozen, what stands next to quantised weights included."""
    found = hashlib.sha256()
    for name, p in sorted(model.named_parameters()):
        if not p.requires_grad:
            found.update(name.encode())
            found.update(p.detach().contiguous().view(torch.uint8).numpy().tobytes())
    for _, layer in quantised_layers(model):
        for tensor in quantised.constants_of(layer):
            found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def two_steps(model: nn.Module, loss_of: Any, kind: Any = torch.optim.AdamW) -> list[float]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = kind(trained, lr=0.01 if kind is torch.optim.AdamW else 1e-4)
    losses = []
    for _ in range(2):
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft's own call
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_two_steps_of_nf4_are_those_of_transformers_and_peft(kind: Any, tmp_path: Path) -> None:
    """AdamW's first step is the gradient's sign, which may be rounding: weights are compared after SGD's."""
    import peft

    path = save("llama", tmp_path / "base")
    samples = nested_family(97)
    ours = apply_lora(load(path, "nf4"), LoraConfig(rank=4), seed=3)
    scorer = Scorer(ours)
    packed = pack(samples, PackPolicy(share_prefixes=True, min_saved_tokens=1))

    def our_loss() -> Tensor:
        return -scorer(packed).logp_N.sum()

    settings: Any = BitsAndBytesConfig
    with quiet_library():
        base = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            quantization_config=settings(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.float32,
            ),
        )
    torch.manual_seed(3)
    theirs = peft.get_peft_model(
        base,
        peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    ).train()

    def their_loss() -> Tensor:
        total = torch.zeros(())
        for sample in samples:
            logits = theirs(input_ids=torch.from_numpy(sample.ids_T)[None]).logits[0]
            every = logits.log_softmax(-1)
            at = torch.from_numpy(sample.target_at_N)
            total = total - every[at - 1, torch.from_numpy(sample.ids_T)[at]].sum()
        return total

    expected = two_steps(theirs, their_loss, kind)
    assert two_steps(ours, our_loss, kind) == pytest.approx(expected, rel=1e-6)
    trained = {n: p for n, p in theirs.named_parameters() if p.requires_grad}
    found = {n: p for n, p in ours.named_parameters() if p.requires_grad}
    assert trained.keys() == found.keys()
    for name, parameter in found.items() if kind is torch.optim.SGD else ():
        assert torch.allclose(parameter, trained[name], rtol=0, atol=1e-6), name


@pytest.mark.parametrize("how", ["nf4", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_changes_the_stored_bytes(
    how: Quantise, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = apply_lora(load(save("qwen2", tmp_path / "base"), how, dtype), LoraConfig(rank=2))
    scorer, before = Scorer(model), digest(model)
    packed = pack(nested_family(97), ALONE)
    with evaluating(scorer), torch.no_grad(), compute_context(dtype, CPU):
        first = scorer(packed).logp_N
    assert digest(model) == before

    def loss() -> Tensor:
        with compute_context(dtype, CPU):
            return -scorer(packed).logp_N.mean()

    two_steps(model, loss)
    assert digest(model) == before
    model.state_dict()
    with evaluating(scorer), torch.no_grad(), compute_context(dtype, CPU):
        assert not torch.equal(scorer(packed).logp_N, first)
    assert digest(model) == before


@pytest.mark.parametrize("how", ["nf4", "int8"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "phi3"])
def test_neighbours_have_no_part_in_a_sample(name: str, how: Quantise, tmp_path: Path) -> None:
    """Not so with LLM.int8's own products, which round activations."""
    scorer = Scorer(load(save(name, tmp_path / "base"), how)).eval()
    samples = nested_family(97)
    with torch.no_grad():
        together = scorer(pack(samples, ALONE)).logp_N
        alone = torch.cat([scorer(pack([s], ALONE)).logp_N for s in samples])
    assert torch.allclose(together, alone, atol=1e-4)


@pytest.mark.parametrize("how", ["nf4", "int8"])
def test_merged_weights_give_the_adapted_models_logprobs(how: Quantise, tmp_path: Path) -> None:
    model = apply_lora(load(save("llama", tmp_path / "base"), how), LoraConfig(rank=2), seed=1)
    scorer, packed = Scorer(model), pack(nested_family(97), ALONE)
    two_steps(model, lambda: -scorer(packed).logp_N.mean())
    plain = plain_model(model)
    assert not hasattr(plain.config, "quantization_config")
    assert {p.dtype for p in plain.parameters()} == {torch.float32}
    whole = tiny_model("llama", dtype=torch.float32, attention=PREFIX + "reference", **SIZES)
    whole.load_state_dict(plain.state_dict())
    with torch.no_grad():
        merged, trained = Scorer(whole)(packed).logp_N, scorer(packed).logp_N
    assert torch.allclose(merged, trained, atol=1e-4)


def test_what_is_quantised_and_counted(tmp_path: Path) -> None:
    path = save("qwen2", tmp_path / "base", tie_word_embeddings=True)
    wide, narrow = load(path, None), load(path, "nf4")
    inside = [m for m in architecture.layers(narrow).modules() if isinstance(m, nn.Linear)]
    assert {id(module) for _, module in quantised_layers(narrow)} == {id(m) for m in inside}
    assert narrow.model.embed_tokens.weight.dtype == torch.bfloat16
    assert architecture.num_weights(narrow) == architecture.num_weights(wide)
    wide.requires_grad_(False)
    narrow.requires_grad_(False)
    assert architecture.flops(narrow) == architecture.flops(wide)
    value, reason = frozen.described(narrow, Storage(torch.bfloat16, torch.bfloat16, "nf4"))
    assert value == "bfloat16 and nf4" and "instead of" in reason


@pytest.mark.parametrize("how", ["nf4", "int8"])
def test_what_trains_whole_is_not_quantised(how: Quantise, tmp_path: Path) -> None:
    path = save("llama", tmp_path / "base")
    storage = Storage(torch.bfloat16, torch.bfloat16, how, whole=("o_proj", "embed_tokens"))
    model = load_model(
        path, dtype=torch.float32, device=CPU, attention=PREFIX + "reference", storage=storage
    )
    config = LoraConfig(rank=2, targets=["q_proj"], modules_to_save=["o_proj", "embed_tokens"])
    adapted = apply_lora(model, config)
    scorer, packed = Scorer(adapted), pack(nested_family(97), ALONE)
    two_steps(adapted, lambda: -scorer(packed).logp_N.mean())
    trained = [n for n, p in adapted.named_parameters() if p.requires_grad and p.grad is None]
    assert any("o_proj" in name for name in trained)


def test_a_base_that_comes_quantised(tmp_path: Path) -> None:
    settings: Any = BitsAndBytesConfig
    path = save("llama", tmp_path / "base")
    with quiet_library():
        made = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.bfloat16,
            quantization_config=settings(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
            ),
        )
        made.save_pretrained(tmp_path / "nf4")
    there = str(tmp_path / "nf4")
    assert quantised.require_trainable(there, load_config(there), None, adapts=True)
    model = load(there, None)
    packed = pack(nested_family(97), ALONE)
    with torch.no_grad():
        found = Scorer(model)(packed).logp_N
        expected = Scorer(load(path, "nf4"))(packed).logp_N
    assert torch.equal(found, expected)
    with pytest.raises(ModelError, match="expected adapters"):
        quantised.require_trainable(there, load_config(there), None, adapts=False)
    with pytest.raises(ConfigError, match="comes quantised already"):
        quantised.require_trainable(there, load_config(there), "nf4", adapts=True)


def test_other_formats_are_refused_by_name(tmp_path: Path) -> None:
    config = load_config(save("llama", tmp_path / "base"))
    for method in ("gptq", "awq", "fp8", "compressed-tensors", "mxfp4"):
        config.quantization_config = {"quant_method": method, "bits": 4}
        with pytest.raises(ModelError, match=f"comes quantised as {method}; expected"):
            quantised.require_trainable("m", config, None, adapts=True)


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="mixture of experts"):
        load(save("qwen3_moe", tmp_path / "base"), "nf4")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("how", ["nf4", "int8", None])
def test_a_plan_has_the_bytes_of_the_loaded_model(
    how: Quantise | None, tied: bool, tmp_path: Path
) -> None:
    path = save("qwen2", tmp_path / "base", tie_word_embeddings=tied, vocab_size=301)
    config = load_config(path)
    keys = {"lora.rank": 2, "quantise": how, "frozen_dtype": "checkpoint"}
    run = from_mapping(RunConfig, {"model": path, "data.train": "rows.jsonl", **keys})
    planned = planned_model(run, config, Kernels(torch.float32, PREFIX + "reference"))
    loaded = apply_lora(load(path, how), run.lora)
    assert frozen.stored_bytes(planned) == frozen.stored_bytes(loaded)
    assert architecture.num_weights(planned) == architecture.num_weights(loaded)
    assert architecture.flops(planned) == architecture.flops(loaded)


def test_what_is_refused_before_anything_is_read() -> None:
    given = {"model": "m", "data.train": "rows.jsonl", "quantise": "nf4"}
    with pytest.raises(ConfigError, match="without adapters: rounded weights cannot be updated"):
        from_mapping(RunConfig, given)
    with pytest.raises(ConfigError, match="DoRA reads the weights"):
        from_mapping(RunConfig, {**given, "lora.rank": 2, "lora.dora": True})
    with pytest.raises(ConfigError, match="frozen_dtype=checkpoint is for the weights next to"):
        from_mapping(RunConfig, {**given, "quantise": None, "frozen_dtype": "checkpoint"})


def test_without_the_package_one_line_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(extras.EXTRAS, "quant", ("no_such_package",))  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"quantise=nf4 needs no_such_package.*quant\]"):
        load(save("llama", tmp_path / "base"), "nf4")


@pytest.mark.parametrize("how", ["nf4", "int8"])
@pytest.mark.parametrize("hidden_size", [32, 64, 96])
def test_codes_stand_for_the_checkpoints_weights(
    hidden_size: int, how: Quantise, tmp_path: Path
) -> None:
    """bitsandbytes 0.50.2 on a CPU reads rows of 32 or 96 numbers wrongly; a product here does not."""
    changes = {**SIZES, "hidden_size": hidden_size}
    with quiet_library():
        whole = tiny_model("llama", dtype=torch.bfloat16, **changes)
        whole.save_pretrained(tmp_path / "base")
    model = load(str(tmp_path / "base"), how)
    source = whole.state_dict()
    for name, layer in quantised_layers(model):
        assert quantised.error_of(layer, source[f"{name}.weight"]) <= 1
        wide = layer.widen(layer.weight, torch.float32)
        x = torch.randn(3, layer.in_features)
        assert torch.allclose(layer(x), nn.functional.linear(x, wide, layer.bias), atol=1e-5)
        codes = layer.weight.data
        layer.weight.data = codes.flatten().roll(7).view_as(codes)
        assert quantised.error_of(layer, source[f"{name}.weight"]) > 1
