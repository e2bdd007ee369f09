"""Tiny models with random weights, one for each architecture whose maths differs, for every test.

Weights are large enough, and the query and key projections enlarged on top, for each token's
logits to depend on the very keys it sees: with the library's own initialization a leak between
samples hardly shows. Norms, biases, sinks and scales are random too, so that forgetting one
changes the numbers.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from tests.helpers.tiny_tokenizers import save_tokenizer
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.models.attention_backends import PREFIX
from taut.models.cpu import faster_layers
from taut.models.load import quiet_library
from taut.models.lora.merge import Whole, plain_groups, plain_skeleton

EIGHT = (
    "qwen2",
    "qwen3",
    "llama",
    "mistral",
    "gemma2",
    "gemma3",
    "qwen3_moe",
    "gpt_oss",
)
"""Every proof of taut must hold for these; refusing one is not an answer."""
CARRIED = (*EIGHT, "olmo2", "granite", "cohere2", "phi3", "qwen2_moe", "gemma4_text")
"""These too are carried exactly."""
_TAKES_KEYWORDS = "kwargs" in inspect.signature(inspect.unwrap(Lfm2ShortConv.forward)).parameters
FOLLOWING = ("qwen3_next", "qwen3_5_text", "olmo_hybrid", *(["lfm2"] * _TAKES_KEYWORDS))
"""Some layers carry state from token to token, and it follows the layout; of LFM2 in newer versions of the library."""
LEAKING = ("bamba", *(["lfm2"] * (not _TAKES_KEYWORDS)))
"""Some layers carry state from token to token and never see the layout."""
STATEFUL = (*FOLLOWING, *LEAKING)
REFUSED = ("llama4_text", "phi3_longrope")
"""Chunked attention; RoPE that depends on the longest sample of the batch."""

_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 2,
}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 32,
}

_SPECIAL: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "llama": {},
    "mistral": {"head_dim": 8, "sliding_window": 5},
    "gemma2": {
        **_MIXED,
        "head_dim": 16,
        "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 5.0,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        **_MIXED,
        "head_dim": 16,
        "query_pre_attn_scalar": 12,
        "tie_word_embeddings": True,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3_moe": {**_EXPERTS, "head_dim": 16, "norm_topk_prob": True},
    "gpt_oss": {
        **_MIXED,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "olmo2": {},
    "granite": {
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.7,
        "embedding_multiplier": 1.5,
        "logits_scaling": 1.7,
    },
    "cohere2": {
        **_MIXED,
        "head_dim": 16,
        "logit_scale": 0.3,
        "tie_word_embeddings": True,
    },
    "phi3": {"sliding_window": 6},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 24, "sliding_window": 0},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 5,
        "num_kv_shared_layers": 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 8,
        "final_logit_softcapping": 5.0,
        "tie_word_embeddings": True,
    },
    "llama4_text": {
        "head_dim": 16,
        "intermediate_size_mlp": 48,
        "num_local_experts": 2,
        "attention_chunk_size": 8,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
        "moe_layers": [1],
    },
    "phi3_longrope": {
        "original_max_position_embeddings": 32,
        "rope_parameters": _LONGROPE,
    },
    "qwen3_next": {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_5_text": _LINEAR,
    "olmo_hybrid": {key: value for key, value in _LINEAR.items() if key != "head_dim"},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "bamba": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
}


def tiny_config(name: str, *, vocab_size: int = 97, **changes: Any) -> PreTrainedConfig:
    """The configuration of ``tiny_model(name)``, with fields changed where asked."""
    special = _SPECIAL["gemma3_text" if name == "gemma3" else name]
    fields = _COMMON | {"vocab_size": vocab_size} | special | changes
    if name == "gemma4_text":
        fields["vocab_size_per_layer_input"] = fields["vocab_size"]
    model_type = {"gemma3": "gemma3_text", "phi3_longrope": "phi3"}.get(name, name)
    return AutoConfig.for_model(model_type, **fields)


def tiny_model(
    name: str,
    *,
    vocab_size: int = 97,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    sharpen: bool = True,
    attention: str = "eager",
    **changes: Any,
) -> PreTrainedModel:
    """A random model of an architecture of ``_SPECIAL``, in train mode, with ``attention`` in
    force.

    ``changes`` go to the model's config. The same seed gives the same weights whatever the dtype.
    """
    config = tiny_config(name, vocab_size=vocab_size, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config,
            attn_implementation=attention,
            experts_implementation="eager",
            dtype=torch.float32,
        )
        if sharpen:
            _sharpen(model)
    model.config.use_cache = False
    model.config.dtype = dtype
    model = model.to(dtype)
    if attention.startswith(PREFIX):  # as ``load_model`` returns it
        faster_layers.install(model)
    return model.train()


@torch.no_grad()
def _sharpen(model: PreTrainedModel) -> None:
    """Larger queries and keys; norms, biases and sinks that are neither 0 nor 1."""
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight")):
            parameter.mul_(1.5)
        if "qkv_proj" in name:
            parameter[: -parameter.shape[0] // 4].mul_(1.5)
        if name.endswith("sinks"):
            parameter.normal_()
        elif name.endswith("bias") or parameter.ndim == 1:
            parameter.add_(0.2 * torch.randn_like(parameter))


def save_tiny(
    name: str,
    directory: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **options: Any,
) -> Path:
    """Write ``tiny_model(name, **options)`` as a model directory; with a tokenizer, room for its
    ids.
    """
    if tokenizer is not None:
        options.setdefault("vocab_size", len(tokenizer) + 7)
    with quiet_library():
        tiny_model(name, **({"dtype": torch.float32} | options)).save_pretrained(directory)
    if tokenizer is not None:
        save_tokenizer(tokenizer, directory)
    return directory


def logits_of(model: nn.Module, num_tokens: int = 12, seed: int = 0) -> torch.Tensor:
    """The model's own logits [T, V] on random ids, through the library's forward."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 90, (1, num_tokens), generator=generator)
    return model(input_ids=ids, use_cache=False).logits[0]


def with_weights_of(loaded: nn.Module, name: str, **options: Any) -> PreTrainedModel:
    """``tiny_model(name)`` with a loaded model's weights: RoPE's frequencies, which are not saved,
    are the same.
    """
    model = tiny_model(name, **options)
    model.load_state_dict(loaded.state_dict())
    return model


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every parameter, by name."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def plain_model(model: nn.Module, whole: Whole | None = None) -> PreTrainedModel:
    """The library's model without adapters, with all the tensors of ``plain_groups`` in memory. It has no buffers that
    are not saved, so it does not run.
    """
    plain = plain_skeleton(model)
    for group in plain_groups(model, whole):  # and keeps all of them
        plain.load_state_dict(group, strict=False, assign=True)
    plain.tie_weights()
    return plain
