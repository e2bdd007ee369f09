"""What load_model puts in force, and the one line for every directory it cannot use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models import logits_of, save_tiny, tiny_model
from tests.tokenizers import tiny_tokenizer
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from taut.attention.select import PREFIX
from taut.errors import ModelError
from taut.models import load

CPU = torch.device("cpu")


def load_tiny(path: Path, dtype: torch.dtype = torch.float32, attention: str = "eager"):
    return load.load_model(str(path), dtype=dtype, device=CPU, attention=attention)


@pytest.mark.parametrize(
    ("dtype", "held"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ],
)
def test_parameters_are_full_precision_masters(
    tmp_path: Path, dtype: torch.dtype, held: torch.dtype
) -> None:
    model = load_tiny(save_tiny("gemma3", tmp_path), dtype)
    assert {p.dtype for p in model.parameters()} == {held}
    assert {b.dtype for b in model.buffers() if b.is_floating_point()} == {held}
    assert model.training
    assert model.config.use_cache is False
    same = torch.allclose(logits_of(model), logits_of(tiny_model("gemma3", dtype=held)), atol=1e-5)
    assert same


def test_attention_is_in_force_everywhere(tmp_path: Path) -> None:
    model = load_tiny(save_tiny("qwen2", tmp_path), attention=PREFIX + "reference")
    configs = [m.config for m in model.modules() if hasattr(m, "config")]
    assert {config._attn_implementation for config in configs} == {PREFIX + "reference"}
    model.model.config = tiny_model("qwen2").config
    with pytest.raises(ModelError, match="uses the attention eager; expected taut_"):
        load.require_attention(model, PREFIX + "reference")


def test_experts_are_eager_in_float64_and_the_router_loss_is_off(tmp_path: Path) -> None:
    path = save_tiny("qwen3_moe", tmp_path, output_router_logits=True)
    model = load_tiny(path, torch.float64)
    assert model.config._experts_implementation == "eager"
    assert model.config.output_router_logits is False
    assert torch.isfinite(logits_of(model)).all()


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("phi3", "resid_pdrop"),
        ("qwen2", "attention_dropout"),
        ("llama4_text", "router_jitter_noise"),
    ],
)
def test_noise_inside_a_model_is_refused(name: str, field: str, tmp_path: Path) -> None:
    path = save_tiny(name, tmp_path, **{field: 0.1})
    with pytest.raises(ModelError, match=rf"config\.{field} is 0\.1; expected 0"):
        load_tiny(path)


def test_dropout_that_no_config_names_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = LlamaMLP.__init__

    def with_dropout(self: LlamaMLP, config: LlamaConfig) -> None:
        own(self, config)
        self.noise = torch.nn.Dropout(0.2)

    monkeypatch.setattr(LlamaMLP, "__init__", with_dropout)
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp\.noise is 0\.2"):
        load_tiny(save_tiny("llama", tmp_path))


def edit_config(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def test_directories_that_cannot_be_used(tmp_path: Path) -> None:
    path = save_tiny("llama", tmp_path / "model")
    cases: list[tuple[str, str]] = [
        (str(tmp_path / "missing"), "does not exist; expected a model directory"),
        (str(path / "config.json"), "is a file; expected a model directory"),
        (str(tmp_path), r"has no config.json; .* did you mean .*/model\?"),
    ]
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    cases.append((str(adapter), r"is an adapter.*lora\.adapter"))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    cases.append((str(broken), "config.json is not JSON"))
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text((path / "config.json").read_text())
    cases.append((str(empty), "has no weights; expected model.safetensors"))
    unknown = save_tiny("llama", tmp_path / "unknown")
    edit_config(unknown, model_type="no_such_architecture")
    cases.append((str(unknown), "cannot be loaded as a configuration"))
    for directory, message in cases:
        with pytest.raises(ModelError, match=message) as caught:
            load_tiny(Path(directory))
        assert "\n" not in str(caught.value)


def test_an_incomplete_checkpoint_is_refused(tmp_path: Path) -> None:
    path = save_tiny("llama", tmp_path)
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weight\(s\), model\.layers\.1\.mlp\.up_proj"):
        load_tiny(path)
    (path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match="cannot be loaded as a causal language model"):
        load_tiny(path)


def with_more(path: Path, **more: torch.Tensor) -> None:
    weights = load_file(path / "model.safetensors")
    save_file({**weights, **more}, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma2"])
def test_a_config_that_drops_layers_is_refused(name: str, tmp_path: Path) -> None:
    path = save_tiny(name, tmp_path)
    kinds = json.loads((path / "config.json").read_text()).get("layer_types")
    edit_config(path, num_hidden_layers=1, **({"layer_types": kinds[:1]} if kinds else {}))
    says = r"weight\(s\) that its config\.json leaves out, model\.layers\.1\."
    with pytest.raises(ModelError, match=says):
        load_tiny(path)


def test_a_config_that_drops_a_bias_is_refused(tmp_path: Path) -> None:
    path = save_tiny("llama", tmp_path)
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}
    with_more(path, **bias)
    with pytest.raises(
        ModelError, match=r"1 weight\(s\) that its config\.json leaves out, .*q_proj\.bias"
    ):
        load_tiny(path)


def test_weights_of_what_the_model_is_not_made_of_are_let_be(tmp_path: Path) -> None:
    path = save_tiny("llama", tmp_path)
    further = {
        "v_head.summary.weight": torch.zeros(1, 32),
        "mtp.layers.0.norm.weight": torch.zeros(32),
    }
    with_more(path, **further, **{"model.layers.2.input_layernorm.weight": torch.zeros(32)})
    edit_config(path, num_nextn_predict_layers=1)
    load_tiny(path)


def test_a_wrong_shape_is_refused(tmp_path: Path) -> None:
    path = save_tiny("llama", tmp_path)
    edit_config(path, intermediate_size=56)
    with pytest.raises(ModelError):
        load_tiny(path)


def test_tokenizer_and_template(tmp_path: Path) -> None:
    path = save_tiny("qwen2", tmp_path / "with", tiny_tokenizer())
    tokenizer = load.load_tokenizer(str(path))
    assert tokenizer.chat_template == tiny_tokenizer().chat_template
    bare = save_tiny("qwen2", tmp_path / "without")
    with pytest.raises(ModelError, match="has no tokenizer; expected"):
        load.load_tokenizer(str(bare))


def test_the_checkpoints_dtype_and_context_are_read_from_its_config(tmp_path: Path) -> None:
    path = save_tiny("llama", tmp_path, dtype=torch.bfloat16)
    config = load.load_config(str(path))
    assert load.checkpoint_dtype(config) == torch.bfloat16
    assert load.context_length(config) == 256


def test_freezing_by_pattern() -> None:
    model = tiny_model("llama")
    frozen = load.freeze(model, ["model.embed_tokens.*", r"/layers\.0\..*proj/"])
    assert len(frozen) == 8
    assert all(p.requires_grad == (n not in frozen) for n, p in model.named_parameters())
    with pytest.raises(ModelError, match=r"'mlp' matches no parameter; did you mean '\*mlp\*'"):
        load.freeze(model, ["mlp"])
    with pytest.raises(ModelError, match="leaves no parameter to train"):
        load.freeze(model, ["*"])
