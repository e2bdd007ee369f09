"""Proofs at load: they pass on what is carried, name what is not, and FAIL on planted faults."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.helpers.tiny_models import CARRIED, EIGHT, FOLLOWING, STATEFUL, tiny_model
from tests.helpers.tiny_samples import sample
from torch import Tensor
from transformers import PreTrainedModel

from taut.attention.layout import Call, Layout
from taut.errors import AttentionError, ModelError
from taut.models import attention_backends, recurrent_layers
from taut.models.precision import compute_context
from taut.models.scorer import Scorer
from taut.models.self_test import SelfTestResult, library_logps, run_self_test

CPU = torch.device("cpu")


def load(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    model = tiny_model(name, dtype=dtype)
    model.set_attn_implementation(f"{attention_backends.PREFIX}reference")
    return model


def run(
    model: PreTrainedModel, dtype: torch.dtype = torch.float64, max_length: int = 64
) -> SelfTestResult:
    return run_self_test(Scorer(model), compute_context(dtype, CPU), dtype, max_length)


@pytest.mark.parametrize("name", CARRIED)
def test_what_is_carried_passes_and_packs(name: str) -> None:
    model = load(name)
    proof = run(model)
    assert proof.one_sample is None
    assert proof.num_attention_layers == model.config.num_hidden_layers
    assert max(proof.neighbor, proof.future, proof.head) < 1e-9
    assert model.training, "the mode is put back"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", EIGHT)
def test_rounding_is_not_mistaken_for_a_leak(name: str, dtype: torch.dtype) -> None:
    assert run(load(name, torch.float32), dtype).one_sample is None


def test_windows_are_seen() -> None:
    assert run(load("mistral")).windows == (5,)
    assert run(load("gemma2")).windows == (5,)
    assert run(load("llama")).windows == ()


@pytest.mark.parametrize("name", FOLLOWING)
def test_state_that_follows_the_layout_packs(name: str) -> None:
    model = load(name)
    recurrent_layers.install(model)
    proof = run(model)
    assert proof.one_sample is None
    assert max(proof.neighbor, proof.future, proof.head) < 1e-9


@pytest.mark.parametrize("name", STATEFUL)
def test_layers_with_state_are_named_and_run_one_sample_at_a_time(name: str) -> None:
    """Those whose state can follow the layout are loaded without ``recurrent_layers.install`` here."""
    proof = run(load(name, torch.float32), torch.float32)
    assert proof.one_sample is not None
    assert "layers with state across tokens (layers.0 (" in proof.one_sample
    assert proof.neighbor > 2e-3, "the probe sees the state leak too"


def test_chunked_attention_is_refused_by_name() -> None:
    with pytest.raises(AttentionError, match="llama4_text is neither causal nor its sliding"):
        run(load("llama4_text"))


def test_a_window_of_zero_in_a_layer_that_has_it_is_refused_by_name() -> None:
    """Of Qwen2-MoE it is in the configuration where no layer has a window: that is carried, above."""
    sliding = {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
    model = tiny_model("qwen2_moe", **sliding)
    model.set_attn_implementation(f"{attention_backends.PREFIX}reference")
    assert model.config.sliding_window == 0
    with pytest.raises(AttentionError, match="Qwen2MoeForCausalLM masks a sliding window of 0"):
        run(model)


def test_longrope_packs_within_the_first_regime_and_not_beyond() -> None:
    assert run(load("phi3_longrope"), max_length=32).one_sample is None
    beyond = run(load("phi3_longrope"), max_length=33).one_sample
    assert beyond is not None
    assert "longrope" in beyond
    assert "32" in beyond


def test_dynamic_rope_beyond_its_length_is_refused() -> None:
    model = load("llama")
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ModelError, match=r"dynamic RoPE .*data\.max_length=300 .*256"):
        run(model, max_length=300)


def test_planted_a_layer_that_bypasses_the_interface() -> None:
    model = load("llama")
    attention = model.model.layers[1].self_attn
    attention.config = copy.copy(attention.config)
    attention.config._attn_implementation_internal = "eager"
    with pytest.raises(AttentionError, match="1 of 2 attention layers of LlamaForCausalLM"):
        run(model)


def test_planted_attention_that_ignores_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    def flat_causal(q: Tensor, k: Tensor, v: Tensor, layout: Layout, call: Call) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=call.scale, enable_gqa=True
        )

    monkeypatch.setitem(attention_backends.BACKENDS, "reference", flat_causal)
    with pytest.raises(AttentionError, match="packed samples see each other in LlamaForCausalLM"):
        run(load("llama"))


def test_planted_attention_that_sees_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    def everything(q: Tensor, k: Tensor, v: Tensor, layout: Layout, call: Call) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, scale=call.scale, enable_gqa=True
        )

    monkeypatch.setitem(attention_backends.BACKENDS, "reference", everything)
    with pytest.raises(AttentionError, match="a later token changes an earlier logprob"):
        run(load("llama"))


def test_planted_a_dropped_window() -> None:
    """A layer that does not ask for the window the library masks with."""
    model = load("mistral")
    for layer in model.model.layers:
        layer.self_attn.config = copy.copy(layer.self_attn.config)
        layer.self_attn.config.sliding_window = None
    with pytest.raises(AttentionError, match="masks a sliding window of 5"):
        run(model)


def test_planted_a_head_with_an_extra_scale() -> None:
    model = load("llama")
    model.lm_head.register_forward_hook(lambda module, args, output: output * 1.5)
    with pytest.raises(ModelError, match="the head of LlamaForCausalLM is not understood"):
        run(model)


@pytest.mark.parametrize("name", EIGHT)
def test_the_librarys_own_path_gives_the_same_log_probs(name: str) -> None:
    """What the first step is compared with; the chosen attention is put back."""
    from taut.data.packing import ALONE, pack

    model, one = load(name), sample("a", list(range(3, 25)), 9)
    with torch.no_grad(), compute_context(torch.float64, CPU):
        expected = library_logps(model, one, CPU)
        found = Scorer(model)(pack([one], ALONE)).logp_N
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
