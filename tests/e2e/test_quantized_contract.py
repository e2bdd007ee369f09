"""What another tool has quantized is asked the contract of the model it was made from."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize
from tests.helpers.chat_runs import save_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from taut.commands.settings import Verify
from taut.commands.verify import Finding, limits_of, verify
from taut.config import replace
from taut.errors import ConfigError, ModelError, TautError
from taut.models.load import quiet_library
from taut_tools.export.export import run as export
from taut_tools.export.gguf import bits_of, open_gguf
from taut_tools.export.settings import Export

BESIDE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
ASKED = {"template", "tokenizer", "stop set", "continuations", "logprobs", "stops"}


def replay(model: Path, contract: Path, **keys: Any) -> dict[str, Finding]:
    config = Verify(model=str(model), contract=str(contract), device="cpu", **keys)
    found = {finding.name: finding for finding in verify(config)}
    assert set(found) >= ASKED
    return found


def failed(model: Path, contract: Path, **keys: Any) -> set[str]:
    found = replay(model, contract, **keys).values()
    return {finding.name for finding in found if finding.outcome == "failed"}


def by_bitsandbytes(source: Path, out: Path, **settings: Any) -> Path:
    make: Any = BitsAndBytesConfig
    with quiet_library():
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, quantization_config=make(**settings)
        )
        model.save_pretrained(out)
    for name in BESIDE:
        if (source / name).is_file():
            shutil.copy(source / name, out / name)
    return out


def by_compressed_tensors(source: Path, out: Path, bits: int) -> Path:
    """As llm-compressor saves weights that are rounded to the nearest."""
    quantization: Any = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    by_group = {"strategy": "group", "group_size": 16} if bits == 4 else {"strategy": "channel"}
    args = quantization.QuantizationArgs(num_bits=bits, type="int", symmetric=True, **by_group)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    config = quantization.QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"])
    with quiet_library():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    quantization.apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            groups = module.weight.data.reshape(
                module.weight.shape[0], -1, 16 if bits == 4 else module.weight.shape[1]
            )
            scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
            module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(out)
    for name in BESIDE:
        if (source / name).is_file():
            shutil.copy(source / name, out / name)
    return out


def rewritten(
    source: Path,
    out: Path,
    kind: GGMLQuantizationType,
    change: Callable[[dict[str, Any]], None] = lambda keys: None,
    touch: Callable[[str, Any], Any] = lambda name, numbers: numbers,
) -> Path:
    """A GGUF file with its matrices in another format, as llama.cpp's quantizer writes it."""
    reader = GGUFReader(source)
    keys: dict[str, Any] = {
        name: (field.types, field.contents())
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.") and name != "general.architecture"
    }
    change(keys)
    writer = GGUFWriter(out, str(reader.fields["general.architecture"].contents()))
    for name, (types, value) in keys.items():
        if types[0] == GGUFValueType.ARRAY:
            writer.add_array(name, value)
        else:
            writer.add_key_value(name, value, types[0])
    for tensor in reader.tensors:
        numbers = touch(tensor.name, dequantize(tensor.data, tensor.tensor_type))
        has_blocks = numbers.ndim > 1 and numbers.shape[-1] % 32 == 0
        stored = kind if has_blocks else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quantize(numbers, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.fixture(scope="module")
def file(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gguf") / "exact.gguf"
    assert export(Export(model=str(finished), out=str(out), dtype="f32")) == 0
    return out


@pytest.mark.parametrize(
    "settings",
    [
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        {"load_in_8bit": True},
    ],
    ids=["nf4", "int8"],
)
def test_bitsandbytes(settings: dict[str, Any], finished: Path, tmp_path: Path) -> None:
    made = by_bitsandbytes(finished, tmp_path / "made", **settings)
    assert failed(made, finished) == set()
    found = replay(made, finished)
    bits = 4 if "load_in_4bit" in settings else 8
    assert found["dtype"].detail == f"{bits} bits by bitsandbytes, were float32"
    base = save_model(tmp_path / "base")  # the adapter forgotten: the base quantized in its place
    for name in BESIDE:
        if (finished / name).is_file():
            shutil.copy(finished / name, base / name)
    untrained = by_bitsandbytes(base, tmp_path / "untrained", **settings)
    assert failed(untrained, finished) >= {"continuations", "logprobs", "stops"}
    generation = made / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": 0}))
    assert "stop set" in failed(made, finished)


@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_tensors(bits: int, finished: Path, tmp_path: Path) -> None:
    made = by_compressed_tensors(finished, tmp_path / "made", bits)
    assert failed(made, finished) == set()
    assert replay(made, finished)["dtype"].detail.startswith(f"{bits} bits by compressed-tensors")


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0", "Q4_1"])
def test_gguf(kind: str, finished: Path, file: Path, tmp_path: Path) -> None:
    made = rewritten(file, tmp_path / "made.gguf", GGMLQuantizationType[kind])
    assert failed(made, finished) == set()
    bits = {"F32": 32, "Q8_0": 8, "Q4_0": 4, "Q4_1": 4}[kind]
    assert bits_of(open_gguf(made)) == bits
    difference = replay(made, finished)["logprobs"].detail
    assert difference.startswith("mean difference ")
    assert kind in replay(made, finished)["dtype"].detail


def without_template(keys: dict[str, Any]) -> None:
    del keys["tokenizer.chat_template"]


def another_end(keys: dict[str, Any]) -> None:
    types, value = keys["tokenizer.ggml.eos_token_id"]
    keys["tokenizer.ggml.eos_token_id"] = types, value - 1
    types, tokens = keys["tokenizer.ggml.tokens"]
    keys["tokenizer.ggml.tokens"] = (
        types,
        [text.replace("<|im_end|>", "<|im_END|>") for text in tokens],
    )


def other_merges(keys: dict[str, Any]) -> None:
    types, merges = keys["tokenizer.ggml.merges"]
    keys["tokenizer.ggml.merges"] = types, merges[1:]


def another_base(keys: dict[str, Any]) -> None:
    types, value = keys["qwen2.rope.freq_base"]
    keys["qwen2.rope.freq_base"] = types, 2 * value


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (without_template, {"template"}),
        (another_end, {"stop set", "tokenizer"}),
        (other_merges, {"tokenizer"}),
        (another_base, {"architecture"}),
    ],
)
def test_keys_of_a_gguf_file_that_llama_cpp_goes_by(
    change: Callable[[dict[str, Any]], None],
    names: set[str],
    finished: Path,
    file: Path,
    tmp_path: Path,
) -> None:
    made = rewritten(file, tmp_path / "made.gguf", GGMLQuantizationType.F32, change)
    assert failed(made, finished) == names


def test_numbers_of_a_gguf_file_that_are_not_the_models(
    finished: Path, file: Path, tmp_path: Path
) -> None:
    def shuffle(name: str, numbers: Any) -> Any:
        return numbers[::-1].copy() if name == "blk.0.attn_q.weight" else numbers

    made = rewritten(file, tmp_path / "made.gguf", GGMLQuantizationType.F32, touch=shuffle)
    assert "logprobs" in failed(made, finished)


def test_numbers_that_the_model_cannot_compute_with_are_refused_or_differ(
    finished: Path, file: Path, tmp_path: Path
) -> None:
    def huge(name: str, numbers: Any) -> Any:
        return numbers * 0 + 3e38 if name == "blk.0.attn_q.weight" else numbers

    made = rewritten(file, tmp_path / "made.gguf", GGMLQuantizationType.F32, touch=huge)
    try:
        found = " ".join(failed(made, finished))
    except TautError as error:
        found = str(error)
    assert re.search("logprobs|not finite", found)


def test_what_cannot_be_read_is_refused(finished: Path, file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no contract; expected .*set contract=DIR"):
        verify(Verify(model=str(file), device="cpu"))
    with pytest.raises(
        ConfigError, match="dtype=bfloat16: a GGUF file is read by itself; leave dtype out"
    ):
        verify(Verify(model=str(file), contract=str(finished), device="cpu", dtype="bfloat16"))
    other = tmp_path / "other.gguf"
    other.write_bytes(b"no GGUF")
    with pytest.raises(ModelError, match="cannot be read as GGUF"):
        verify(Verify(model=str(other), contract=str(finished), device="cpu"))
    few = Verify(model="few.gguf", contract=str(finished))
    with pytest.raises(
        ConfigError, match=r"weights of 3 bits.*expected at least 4 bits.*set tolerance"
    ):
        limits_of(3, few)
    assert limits_of(3, replace(few, {"tolerance": 4.0})).difference == 4.0
    awq = shutil.copytree(finished, tmp_path / "awq")
    config = json.loads((awq / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "version": "gemm"}
    (awq / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="awq"):
        verify(Verify(model=str(awq), contract=str(finished), device="cpu"))
