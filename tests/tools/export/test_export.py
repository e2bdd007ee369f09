"""``taut export``: what is read from the file by the library is the model; what cannot be carried is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter, TokenType
from tests.helpers.tiny_models import logits_of, save_tiny, tiny_config, tiny_model
from tests.helpers.tiny_tokenizers import tiny_tokenizer
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from taut.cli import main
from taut.config import from_mapping
from taut.errors import CheckFailed, ModelError, OutputError
from taut.models.load import quiet_library
from taut_tools.export import gguf
from taut_tools.export.export import run
from taut_tools.export.gguf import PRE_TOKENIZERS, pre_tokenizer_name, vocabulary
from taut_tools.export.settings import Export

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TEXTS = (
    "Hello, how are you today?  It's 1234 o'clock\n\n\tI'M fine. ",
    "<|im_start|>user\nParis<|im_end|>\n<think>naïve 東京 🚀</think>",
    "",
)


def export(model: Path, out: Path, **keys: Any) -> GGUFReader:
    assert run(from_mapping(Export, {"model": model, "out": out, **keys})) == 0
    return GGUFReader(out)


def value(reader: GGUFReader, key: str) -> Any:
    return reader.fields[key].contents()


def load(out: Path, **options: Any) -> Any:
    """The file as the library's own loader understands it."""
    with quiet_library():
        return AutoModelForCausalLM.from_pretrained(
            out.parent,
            gguf_file=out.name,
            dtype=torch.float32,
            attn_implementation="eager",
            quantization_config=GgufConfig(dequantize=True),
            **options,
        ).eval()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_the_library_reads_back_the_same_logits_and_ids(
    name: str, tied: bool, tmp_path: Path
) -> None:
    model = save_tiny(name, tmp_path / "m", tiny_tokenizer(), tie_word_embeddings=tied)
    reader = export(model, tmp_path / "m.gguf")
    assert ("output.weight" in {tensor.name for tensor in reader.tensors}) != tied
    own = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()
    options = {"config": own.config} if name == "qwen3" else {}  # it does not read key_length
    torch.testing.assert_close(logits_of(load(tmp_path / "m.gguf", **options)), logits_of(own))
    tokenizer = AutoTokenizer.from_pretrained(model)
    reread = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in TEXTS:
        assert reread.encode(text) == tokenizer.encode(text)
    assert reread.chat_template == tokenizer.chat_template
    assert (reread.eos_token, reread.pad_token) == ("<|im_end|>", "<|endoftext|>")


@pytest.mark.parametrize(("dtype", "kind"), [("f16", "F16"), ("bf16", "BF16"), ("q8_0", "Q8_0")])
def test_a_narrower_dtype(
    dtype: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"hidden_size": 64, "intermediate_size": 96}
    model = save_tiny("llama", tmp_path / "m", tiny_tokenizer(), **changes)
    reader = export(model, tmp_path / "m.gguf", dtype=dtype)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert {name for name, found in kinds.items() if found == "F32"} == {
        name for name in kinds if "norm" in name
    }
    assert set(kinds.values()) == {"F32", kind}
    own = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()
    wanted = logits_of(own).detach()
    near = (logits_of(load(tmp_path / "m.gguf")).detach() - wanted).abs().max()
    assert 0 < float(near) < 0.1 * float(wanted.abs().max())
    printed = capsys.readouterr().out
    assert f"{len(kinds)} tensors, {dtype}" in printed
    assert "stops   <|im_end|>" in printed
    assert "other ids where it is not" in printed


def test_the_models_own_dtype_is_the_default_and_exact(tmp_path: Path) -> None:
    model = save_tiny("qwen2", tmp_path / "m", tiny_tokenizer(), dtype=torch.bfloat16)
    reader = export(model, tmp_path / "m.gguf")
    assert value(reader, "general.file_type") == 32
    own = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).float().state_dict()
    for name, found in load(tmp_path / "m.gguf").state_dict().items():
        torch.testing.assert_close(found, own[name], rtol=0, atol=0)


def test_the_keys_say_what_the_model_is(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer("llama3", adds_bos=True)
    scaled = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
    model = save_tiny("qwen3", tmp_path / "m", tokenizer, rope_parameters=scaled)
    settings = json.loads((model / "config.json").read_text())
    ends = tokenizer.convert_tokens_to_ids(["<|eot_id|>", "<|im_end|>", "</think>"])
    generation = {"eos_token_id": ends}
    (model / "generation_config.json").write_text(json.dumps(generation))
    reader = export(model, tmp_path / "m.gguf")
    found = {key: value(reader, f"qwen3.{key}") for key in _expected(settings)}
    assert found == _expected(settings)
    assert value(reader, "tokenizer.ggml.eos_token_id") == ends[0]
    assert value(reader, "tokenizer.ggml.eot_token_id") == ends[2]
    assert "tokenizer.ggml.eom_token_id" not in reader.fields
    assert value(reader, "tokenizer.ggml.add_bos_token") is True
    tokens = value(reader, "tokenizer.ggml.tokens")
    types = dict(zip(tokens, value(reader, "tokenizer.ggml.token_type"), strict=True))
    assert len(tokens) == settings["vocab_size"] == len(tokenizer) + 7
    assert tokens[-1] == f"[PAD{len(tokens) - 1}]"
    assert [types[text] for text in ("<|eot_id|>", "<think>", "a", tokens[-1])] == [
        TokenType.CONTROL,
        TokenType.USER_DEFINED,
        TokenType.NORMAL,
        TokenType.UNUSED,
    ]


def _expected(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": settings["vocab_size"],
        "context_length": 256,
        "embedding_length": 32,
        "block_count": 2,
        "feed_forward_length": 48,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": float(np.float32(1e-6)),
        "rope.dimension_count": 16,
        "rope.freq_base": 500.0,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 2.0,
    }


def test_llama3_scaling_is_a_tensor(tmp_path: Path) -> None:
    changes = {"rope_parameters": LLAMA3, "head_dim": 32}
    model = save_tiny("llama", tmp_path / "m", tiny_tokenizer(), **changes)
    reader = export(model, tmp_path / "m.gguf")
    (factors,) = [tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight"]
    config = tiny_config("llama", **changes)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 10_000.0 ** (-torch.arange(0, 32, 2) / 32)
    torch.testing.assert_close(torch.tensor(factors), plain / scaled)
    assert len({*factors.tolist()}) > 3


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("gemma3", {}, "model_type is gemma3_text"),
        ("qwen3_moe", {}, "model_type is qwen3_moe"),
        ("mistral", {}, "sliding window of 5"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is gelu"),
        ("llama", {"rope_parameters": {**LLAMA3, "rope_type": "yarn"}}, "scaled by yarn"),
        ("qwen3", {"attention_bias": True}, "q_proj.bias has no place"),
    ],
)
def test_what_the_graph_has_not_is_refused(
    name: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    model = save_tiny(name, tmp_path / "m", tiny_tokenizer(), **changes)
    with pytest.raises(ModelError, match=said):
        export(model, tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ""] == []


def test_mistral_without_a_window_is_llama_with_its_biases_and_rows(tmp_path: Path) -> None:
    model = save_tiny("mistral", tmp_path / "m", tiny_tokenizer(), sliding_window=None)
    export(model, tmp_path / "m.gguf")
    biased = save_tiny("llama", tmp_path / "b", tiny_tokenizer(), attention_bias=True)
    reader = export(biased, tmp_path / "b.gguf")
    own = tiny_model("llama", vocab_size=len(tiny_tokenizer()) + 7, attention_bias=True)
    bias = own.get_parameter("model.layers.0.self_attn.q_proj.bias").detach().float()
    (found,) = [tensor.data for tensor in reader.tensors if tensor.name == "blk.0.attn_q.bias"]
    head = bias[:8]
    assert found[:8].tolist() == torch.stack([head[:4], head[4:]], dim=1).flatten().tolist()


def test_q8_0_wants_whole_blocks(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "m", tiny_tokenizer())
    with pytest.raises(ModelError, match=r"rows of 48 numbers; expected a multiple of 32"):
        export(model, tmp_path / "m.gguf", dtype="q8_0")


def test_a_file_that_exists_is_kept_unless_told(tmp_path: Path) -> None:
    model = save_tiny("qwen2", tmp_path / "m", tiny_tokenizer())
    out = tmp_path / "new" / "m.gguf"
    export(model, out)
    with pytest.raises(OutputError, match="exists"):
        export(model, out)
    with pytest.raises(OutputError, match=r"ends in \.gguf"):
        export(model, tmp_path / "m.bin")
    assert len(export(model, out, overwrite=True).tensors) > 0
    assert [path.name for path in out.parent.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize("fault", ["weight", "key"])
def test_a_file_that_reads_back_otherwise_is_not_kept(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt_weight(numbers: Any, kind: Any) -> Any:
        return honest_weight(numbers, kind) + np.float32(1e-7)

    def spoilt_key(writer: Any, key: str, given: Any, *kind: Any, **options: Any) -> None:
        honest_key(writer, key, 7.0 if key.endswith("freq_base") else given, *kind, **options)

    honest_weight, honest_key = gguf.quantize, GGUFWriter.add_key_value
    if fault == "weight":
        monkeypatch.setattr(gguf, "quantize", spoilt_weight)
    else:
        monkeypatch.setattr(GGUFWriter, "add_key_value", spoilt_key)
    model = save_tiny("llama", tmp_path / "m", tiny_tokenizer())
    with pytest.raises(CheckFailed, match="reads back with"):
        export(model, tmp_path / "m.gguf")
    assert list(tmp_path.glob("*.gguf*")) + list(tmp_path.glob(".*")) == []


@pytest.mark.parametrize(("steps", "ignore_merges"), PRE_TOKENIZERS)
def test_every_cut_of_the_table_is_recognized(steps: tuple[str, ...], ignore_merges: bool) -> None:
    parts = {
        "digits": lambda: pre_tokenizers.Digits(individual_digits=True),
        "words": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
        "bytes": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    }
    made = [
        parts[step]() if step in parts else pre_tokenizers.Split(Regex(step), "isolated")
        for step in steps
    ]
    backend = _backend(pre_tokenizers.Sequence(made), ignore_merges)
    assert pre_tokenizer_name(backend) == PRE_TOKENIZERS[steps, ignore_merges]
    if len(made) == 1:
        alone = _backend(made[0], ignore_merges)
        assert pre_tokenizer_name(alone) == PRE_TOKENIZERS[steps, ignore_merges]


def _backend(cut: Any, ignore_merges: bool) -> dict[str, Any]:
    backend = Tokenizer.from_str(tiny_tokenizer().backend_tokenizer.to_str())
    backend.pre_tokenizer = cut
    made: dict[str, Any] = json.loads(backend.to_str())
    made["model"]["ignore_merges"] = ignore_merges
    return made


def test_other_tokenizers_are_refused_by_what_they_do() -> None:
    spaced = _backend(pre_tokenizers.ByteLevel(add_prefix_space=True), False)
    with pytest.raises(ModelError, match="add_prefix_space"):
        pre_tokenizer_name(spaced)
    pieces = _backend(pre_tokenizers.Metaspace(), False)
    pieces["model"]["byte_fallback"] = True
    with pytest.raises(ModelError, match=r"sentencepiece-like BPE .*convert_hf_to_gguf"):
        pre_tokenizer_name(pieces)


def test_more_ends_than_llama_cpp_has_keys_for() -> None:
    tokenizer = tiny_tokenizer()
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "[INST]", "<bos>", "<s>", "<|eot_id|>"])
    with pytest.raises(ModelError, match=r"has \[INST\], <bos>, <s> beside"):
        vocabulary(tokenizer, tiny_config("llama"), ends, 600)
    with pytest.raises(ModelError, match=r"embedding 97 rows; expected a row for each"):
        vocabulary(tokenizer, tiny_config("llama"), ends[:1], 97)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny("qwen2", tmp_path / "m", tiny_tokenizer())
    assert main(["export", str(model), f"out={tmp_path / 'm.gguf'}"]) == 0
    assert "written" in capsys.readouterr().out
    assert main(["export", str(model), f"out={tmp_path / 'm.gguf'}"]) == 2
