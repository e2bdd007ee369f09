"""Quantized bases under adapters: the numbers of transformers and peft, and bytes that nothing changes."""

from __future__ import annotations

import hashlib
import json
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.refusals import ErrorCode, refused
from tests.helpers.tiny_models import plain_model, tiny_model
from tests.helpers.tiny_samples import nested_family
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from taut.config import from_mapping
from taut.data.packing import ALONE, PackPolicy, pack
from taut.errors import ConfigError, ModelError
from taut.io import extras
from taut.methods.method import RunConfig
from taut.models import architecture
from taut.models.attention_backends import PREFIX
from taut.models.load import load_config, load_model, quiet_library
from taut.models.lora.adapters import apply_lora, base_decisions, write_base
from taut.models.lora.merge import save_adapter
from taut.models.precision import compute_context
from taut.models.quantized import frozen_storage, quantized_storage
from taut.models.quantized.frozen_storage import Storage
from taut.models.quantized.quantized_layers import require_trainable
from taut.models.quantized.quantized_storage import Format, error_of, quantized_layers
from taut.models.recompute import recompute_activations
from taut.models.scorer import Scorer, evaluating
from taut.models.settings import ActivationCheckpointing, LoraConfig, Quantize
from taut.plan.models import Kernels, planned_model
from taut.run.setup import storage_for

pytest.importorskip("bitsandbytes")
CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}


def save(name: str, directory: Path, **changes: Any) -> str:
    with quiet_library():
        model = tiny_model(name, dtype=torch.bfloat16, **SIZES, **changes)
        model.save_pretrained(directory)
    return str(directory)


def load(path: str, how: Quantize | None, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    storage = Storage(torch.bfloat16, torch.bfloat16, how)
    return load_model(
        path, dtype=dtype, device=CPU, attention=PREFIX + "reference", storage=storage
    )


def digest(model: nn.Module) -> str:
    """Of all that is frozen."""
    found = hashlib.sha256()
    for name, p in sorted(model.named_parameters()):
        if not p.requires_grad:
            found.update(name.encode())
            found.update(p.detach().contiguous().view(torch.uint8).numpy().tobytes())
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


@pytest.mark.parametrize("is_nested", [True, False])
def test_four_bits_are_those_of_bitsandbytes(is_nested: bool) -> None:
    from bitsandbytes import functional

    weight = torch.randn(48, 100, generator=torch.Generator().manual_seed(1))
    layout = Format("nf4", (48, 100), is_nested)
    codes, state = functional.quantize_4bit(
        weight, blocksize=64, compress_statistics=is_nested, quant_type="nf4"
    )
    parts = {"absmax": state.absmax, "weight": codes}
    if is_nested:
        parts |= {"nested_offset": state.offset, "nested_absmax": state.state2.absmax}
    assert torch.equal(layout.quantize(weight), layout.pack(parts))


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_rows_that_are_quantized_apart_are_those_of_the_whole(kind: Any) -> None:
    weight = torch.randn(300, 192, generator=torch.Generator().manual_seed(1))
    layout = Format(kind, (300, 192))
    assert layout.has_blocks_in_rows
    apart = [layout.codes_of(part) for part in weight.split([101, 1, 198])]
    sizes = [tuple(part.nbytes for part in codes) for codes in apart]
    largest, codes = layout.bytes_of_a_row
    assert sizes == [(n * largest, n * codes) for n in (101, 1, 198)]
    together = layout.row_of(*(torch.cat(parts) for parts in zip(*apart, strict=True)))
    assert torch.equal(together, layout.quantize(weight))


def test_a_weight_of_another_width_is_not_quantized() -> None:
    with pytest.raises(ModelError, match=r"found a weight of \[192, 300\] to quantize; expected"):
        Format("nf4", (300, 192)).quantize(torch.zeros(192, 300))


@pytest.mark.parametrize("how", ["nf4", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_changes_the_stored_bytes(
    how: Quantize, dtype: torch.dtype, tmp_path: Path
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
def test_neighbors_have_no_part_in_a_sample(name: str, how: Quantize, tmp_path: Path) -> None:
    """Not so with LLM.int8's own products, which round activations."""
    scorer = Scorer(load(save(name, tmp_path / "base"), how)).eval()
    samples = nested_family(97)
    with torch.no_grad():
        together = scorer(pack(samples, ALONE)).logp_N
        alone = torch.cat([scorer(pack([s], ALONE)).logp_N for s in samples])
    assert torch.allclose(together, alone, atol=1e-4)


@pytest.mark.parametrize("how", ["nf4", "int8"])
def test_merged_weights_give_the_adapted_models_logprobs(how: Quantize, tmp_path: Path) -> None:
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


def test_what_is_quantized_and_counted(tmp_path: Path) -> None:
    path = save("qwen2", tmp_path / "base", tie_word_embeddings=True)
    wide, narrow = load(path, None), load(path, "nf4")
    inside = [m for m in architecture.layers(narrow).modules() if isinstance(m, nn.Linear)]
    assert {id(module) for _, module in quantized_layers(narrow)} == {id(m) for m in inside}
    assert narrow.model.embed_tokens.weight.dtype == torch.bfloat16
    assert architecture.num_weights(narrow) == architecture.num_weights(wide)
    wide.requires_grad_(False)
    narrow.requires_grad_(False)
    assert architecture.flops(narrow) == architecture.flops(wide)
    value, reason = frozen_storage.described(narrow, Storage(torch.bfloat16, torch.bfloat16, "nf4"))
    assert value == "bfloat16 and nf4" and "instead of" in reason


@pytest.mark.parametrize("how", ["nf4", "int8"])
def test_what_trains_whole_is_not_quantized(how: Quantize, tmp_path: Path) -> None:
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


def test_an_adapter_that_goes_on_keeps_what_it_trains_whole(tmp_path: Path) -> None:
    path, adapter = save("llama", tmp_path / "base"), tmp_path / "adapter"
    config = LoraConfig(rank=2, targets=["q_proj"], modules_to_save=["o_proj"])
    apply_lora(tiny_model("llama", **SIZES), config).save_pretrained(adapter)
    keys = {"lora.adapter": str(adapter), "quantize": "nf4", "data.train": "rows.jsonl"}
    run = from_mapping(RunConfig, {"model": path, **keys})
    storage = storage_for(run, load_config(path), torch.float32, CPU)
    assert storage is not None and storage.whole == ("o_proj",)


@pytest.mark.parametrize("key", ["quantize", "frozen_dtype"])
def test_a_dora_adapter_that_goes_on_reads_the_weights(key: str, tmp_path: Path) -> None:
    path, adapter = save("llama", tmp_path / "base"), tmp_path / "adapter"
    apply_lora(tiny_model("llama", **SIZES), LoraConfig(rank=2, dora=True)).save_pretrained(adapter)
    plain = {"model": path, "lora.adapter": str(adapter), "data.train": "rows.jsonl"}
    config, bf16 = load_config(path), torch.bfloat16
    assert storage_for(from_mapping(RunConfig, plain), config, bf16, CPU) is None
    value = {"quantize": "nf4", "frozen_dtype": "checkpoint"}[key]
    with pytest.raises(ConfigError, match=r"is a DoRA adapter, and .*: DoRA reads the weights"):
        storage_for(from_mapping(RunConfig, {**plain, key: value}), config, bf16, CPU)


def test_an_adapter_goes_on_with_what_it_trained_whole(tmp_path: Path) -> None:
    path = save("llama", tmp_path / "base")
    config = LoraConfig(rank=2, targets=["q_proj"], modules_to_save=["o_proj"])
    whole = Storage(torch.bfloat16, torch.bfloat16, "nf4", whole=("o_proj",))
    read = partial(load_model, dtype=torch.float32, device=CPU, attention=PREFIX + "reference")
    adapted = apply_lora(read(path, storage=whole), config)
    save_adapter(adapted, tmp_path / "adapter")
    write_base(tmp_path / "adapter", path, "nf4")
    again = LoraConfig(adapter=str(tmp_path / "adapter"))
    model = apply_lora(read(path, storage=whole), again)
    packed = pack(nested_family(97), ALONE)
    with torch.no_grad():
        assert torch.equal(Scorer(model)(packed).logp_N, Scorer(adapted)(packed).logp_N)
    assert not base_decisions(again, path, "nf4")
    (changed,) = base_decisions(again, path, None)
    assert changed.value == "on the base as it is" and "set quantize=nf4" in changed.reason
    (moved,) = base_decisions(again, "org/base", "nf4")
    assert moved.value == "on org/base" and path in moved.reason


def save_quantized(path: str, directory: Path, **settings: Any) -> Any:
    """The library's own model of the quantized weights that it saves."""
    make: Any = BitsAndBytesConfig
    with quiet_library():
        made = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, quantization_config=make(**settings)
        )
        made.save_pretrained(directory)
    return made


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


@pytest.mark.parametrize(
    "changes",
    [
        {"bnb_4bit_use_double_quant": False},
        {"bnb_4bit_quant_type": "fp4"},
        {"bnb_4bit_quant_storage": "bfloat16"},
        {"load_in_4bit": False, "load_in_8bit": True},
    ],
    ids=str,
)
def test_a_base_that_comes_quantized_has_its_numbers(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    made = save_quantized(save("llama", tmp_path / "base"), tmp_path / "there", **NF4 | changes)
    layers = list(quantized_layers(load(str(tmp_path / "there"), None)))
    assert len(layers) == 14
    for name, layer in layers:
        theirs = made.get_submodule(name)
        expected = dequantize_bnb_weight(theirs.weight, getattr(theirs, "state", None))  # type: ignore[no-untyped-call]
        found = layer.format.widen(layer.weight.detach(), expected.dtype)
        assert torch.allclose(found, expected, rtol=1e-6, atol=0), name


def test_a_base_that_comes_quantized_otherwise_than_it_says(tmp_path: Path) -> None:
    save_quantized(save("llama", tmp_path / "base"), tmp_path / "there", **NF4)
    settings = json.loads((tmp_path / "there" / "config.json").read_text())
    settings["quantization_config"]["bnb_4bit_use_double_quant"] = False
    (tmp_path / "there" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=r"nested=True, block=64, .*expected .*nested=False"):
        load(str(tmp_path / "there"), None)


def test_a_base_that_comes_quantized(tmp_path: Path) -> None:
    path = save("llama", tmp_path / "base")
    save_quantized(path, tmp_path / "nf4", **NF4)
    there = str(tmp_path / "nf4")
    assert require_trainable(there, load_config(there), None, adapts=True)
    model = load(there, None)
    packed = pack(nested_family(97), ALONE)
    with torch.no_grad():
        found = Scorer(model)(packed).logp_N
        expected = Scorer(load(path, "nf4"))(packed).logp_N
    assert torch.equal(found, expected)
    with pytest.raises(ModelError, match="expected adapters"):
        require_trainable(there, load_config(there), None, adapts=False)
    with pytest.raises(ConfigError, match="comes quantized already"):
        require_trainable(there, load_config(there), "nf4", adapts=True)


OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "gptq": ("llama", {"bits": 4, "group_size": 128, "desc_act": False}, "the model it was made"),
    "awq": ("qwen2", {"bits": 4, "zero_point": True, "version": "gemm"}, "the model it was made"),
    "fp8": ("qwen3_moe", {"weight_block_size": [128, 128]}, r"FineGrainedFP8Config\(dequantize"),
    "mxfp4": ("gpt_oss", {"modules_to_not_convert": ["lm_head"]}, r"Mxfp4Config\(dequantize"),
    "compressed-tensors": ("llama", {"format": "pack-quantized"}, "the model it was made from"),
    "torchao": ("llama", {"quant_type": {"default": "int8wo"}}, "the model it was made from"),
    "hqq": ("llama", {"quant_config": {"nbits": 4}}, "the model it was made from"),
}
"""A format -> a model that has it in config.json, and what to do."""


@pytest.mark.parametrize("adapts", [True, False])
@pytest.mark.parametrize("method", OTHERS)
def test_other_formats_are_refused_by_name(method: str, adapts: bool, tmp_path: Path) -> None:
    name, values, remedy = OTHERS[method]
    settings = tiny_model(name).config.to_dict()
    settings["quantization_config"] = {"quant_method": method, **values}
    settings["dtype"] = "bfloat16"
    (tmp_path / "config.json").write_text(json.dumps(settings, default=str))
    config = load_config(str(tmp_path), needs_weights=False)
    with pytest.raises(ModelError, match=f"comes quantized as {method}, .* expected .*{remedy}"):
        require_trainable("m", config, None, adapts=adapts)


def test_settings_that_are_no_table_are_refused(tmp_path: Path) -> None:
    settings = tiny_model("llama").config.to_dict() | {"quantization_config": "gptq"}
    (tmp_path / "config.json").write_text(json.dumps(settings, default=str))
    with pytest.raises(ModelError, match="found quantization_config=gptq; expected a table"):
        load_config(str(tmp_path), needs_weights=False)


@pytest.mark.parametrize("how", ["nf4", "int8"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_quantized_experts_compute_and_learn_as_their_numbers_do(
    name: str, how: Quantize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no number outlives the forward pass."""
    held: list[weakref.ref[Any]] = []
    widen = quantized_storage._adapted

    def seen(*given: Any) -> Tensor:
        wide = widen(*given)
        held.append(weakref.ref(wide))
        return wide

    model = load(save(name, tmp_path / "base"), how)
    wide = tiny_model(name, dtype=torch.float32, attention=PREFIX + "reference", **SIZES)
    wide.load_state_dict(plain_model(model).state_dict())
    router = model.model.layers[0].mlp.get_submodule("gate" if name == "qwen3_moe" else "router")
    assert router.weight.dtype == torch.float32
    monkeypatch.setattr(quantized_storage, "_adapted", seen)
    found = []
    ways: list[tuple[Any, ActivationCheckpointing]] = [(wide, False), (model, False), (model, True)]
    ways.append((model, "selective"))  # gpt_oss changes a product in place
    for base, recomputes in ways:
        adapted = apply_lora(base, LoraConfig(rank=2), seed=1)
        for key, parameter in adapted.named_parameters():
            if "lora_B" in key:
                nn.init.normal_(
                    parameter, 0, 0.01, torch.Generator().manual_seed(parameter.numel())
                )
        if recomputes:
            recompute_activations(adapted, recomputes)
        logp_N = Scorer(adapted)(pack(nested_family(97), ALONE)).logp_N
        assert not any(ref() is not None for ref in held)
        logp_N.sum().backward()
        gradients = [p.grad for p in adapted.parameters() if p.grad is not None]
        found.append((logp_N.detach(), torch.cat([g.flatten() for g in gradients])))
        base = architecture.unwrap(adapted)
        adapted.unload()
    assert held
    for logp_N, gradient in found[1:]:
        assert torch.allclose(logp_N, found[0][0], atol=1e-5)
        assert torch.allclose(gradient, found[0][1], rtol=1e-3, atol=1e-4)
    for logp_N, gradient in found[2:]:
        assert torch.equal(logp_N, found[1][0]) and torch.equal(gradient, found[1][1])


@pytest.mark.parametrize(("name", "tied"), [("qwen2", True), ("qwen2", False), ("gpt_oss", False)])
@pytest.mark.parametrize("how", ["nf4", "int8", None])
def test_a_plan_has_the_bytes_of_the_loaded_model(
    how: Quantize | None, name: str, tied: bool, tmp_path: Path
) -> None:
    path = save(name, tmp_path / "base", tie_word_embeddings=tied, vocab_size=301)
    config = load_config(path)
    keys = {"lora.rank": 2, "quantize": how, "frozen_dtype": "checkpoint"}
    run = from_mapping(RunConfig, {"model": path, "data.train": "rows.jsonl", **keys})
    planned = planned_model(run, config, Kernels(torch.float32, PREFIX + "reference"))
    loaded = apply_lora(load(path, how), run.lora)
    assert frozen_storage.stored_bytes(planned) == frozen_storage.stored_bytes(loaded)
    assert architecture.num_weights(planned) == architecture.num_weights(loaded)
    assert architecture.flops(planned) == architecture.flops(loaded)


def test_what_is_refused_before_anything_is_read() -> None:
    given = {"model": "m", "data.train": "rows.jsonl", "quantize": "nf4"}
    with refused(ErrorCode("quantize/lora.rank")):
        from_mapping(RunConfig, given)
    with refused(ErrorCode("quantize/lora.dora")):
        from_mapping(RunConfig, {**given, "lora.rank": 2, "lora.dora": True})
    with refused(ErrorCode("frozen_dtype/lora.rank")):
        from_mapping(RunConfig, {**given, "quantize": None, "frozen_dtype": "checkpoint"})


def test_without_the_package_one_line_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(extras.EXTRAS, "quant", ("no_such_package",))  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"quantize=nf4 needs no_such_package.*quant\]"):
        load(save("llama", tmp_path / "base"), "nf4")


@pytest.mark.parametrize("how", ["nf4", "int8"])
@pytest.mark.parametrize("hidden_size", [32, 64, 96])
def test_codes_stand_for_the_checkpoints_weights(
    hidden_size: int, how: Quantize, tmp_path: Path
) -> None:
    """bitsandbytes 0.50.2 on a CPU reads rows of 32 or 96 numbers wrongly; a product here does not."""
    changes = {**SIZES, "hidden_size": hidden_size}
    with quiet_library():
        whole = tiny_model("llama", dtype=torch.bfloat16, **changes)
        whole.save_pretrained(tmp_path / "base")
    model = load(str(tmp_path / "base"), how)
    source = whole.state_dict()
    for name, layer in quantized_layers(model):
        row, weight = layer.weight.detach(), source[f"{name}.weight"]
        assert error_of(layer.format, row, layer.in_checkpoint(weight)) <= 1
        wide = layer.format.widen(row, torch.float32)
        x = torch.randn(3, layer.in_features)
        assert torch.allclose(layer(x), nn.functional.linear(x, wide, layer.bias), atol=1e-5)
        parts = layer.format.unpack(row)
        shifted = parts | {"weight": parts["weight"].roll(7)}
        assert error_of(layer.format, layer.format.pack(shifted), layer.in_checkpoint(weight)) > 1
