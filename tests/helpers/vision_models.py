"""Tiny vision-language models with random weights, one of every family, saved as complete directories: config, weights,
generation_config, a tokenizer with the family's words and chat template, and what describes its pictures.

As in ``tests.helpers.tiny_models``, weights are large enough for each token's logits to depend on the very keys, and
pictures, it sees. Pictures of different sizes have different numbers of tokens wherever the family knows sizes; a tile
is 4 to 9 tokens. Two seeds differ in the weights alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from tests.helpers import vision_templates as templates
from tests.helpers.tiny_tokenizers import save_tokenizer, tiny_tokenizer
from tests.helpers.vision_processors import image_tokens, named_tokens, save_processor
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from taut.models.load import quiet_library

FAMILIES = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "internvl",
    "idefics3",
    "smolvlm",
    "llava_onevision",
    "gemma3",
    "gemma4",
)

"""One of each."""
EVERY = (*FAMILIES, "qwen3_vl_moe", "qwen3_5")

HIDDEN = 16
_TEXT: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
}
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_QWEN_TOWER = {"depth": 2, "num_heads": 2, "patch_size": 4, "initializer_range": 0.2}
_TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
    "initializer_range": 0.2,
}
_SIGLIP = {**_TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
_QWEN_WORDS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}


class Family(NamedTuple):
    """What differs between them."""

    template: str
    eos: str
    config: dict[str, Any]
    words: dict[str, str] = {}  # noqa: RUF012 (never changed)
    """Field of the config -> the word whose id it holds."""
    bos: str | None = None

    def with_text(self, **changes: Any) -> Family:
        """The same with another language model."""
        text = {**self.config["text_config"], **changes}
        return self._replace(config={**self.config, "text_config": text})


def _idefics(template: str, start: str) -> Family:
    text = {**_TEXT, "model_type": "llama", "tie_word_embeddings": False}
    config = {"text_config": text, "vision_config": {**_TOWER, "image_size": 16}, "scale_factor": 2}
    words = {"image_token_id": "<image>"}
    return Family(template, "<end_of_utterance>", config, words, bos=start)


_FAMILIES = {
    "qwen2_vl": Family(
        templates.QWEN2_VL,
        "<|im_end|>",
        {
            "text_config": {**_TEXT, "rope_parameters": _SECTIONS, "tie_word_embeddings": False},
            "vision_config": {
                **_QWEN_TOWER,
                "embed_dim": 16,
                "hidden_size": HIDDEN,
                "mlp_ratio": 2,
            },
            "tie_word_embeddings": False,
        },
        _QWEN_WORDS,
    ),
    "qwen2_5_vl": Family(
        templates.QWEN2_VL,
        "<|im_end|>",
        {
            "text_config": {**_TEXT, "rope_parameters": _SECTIONS, "tie_word_embeddings": True},
            "vision_config": {
                **_QWEN_TOWER,
                "hidden_size": 16,
                "out_hidden_size": HIDDEN,
                "intermediate_size": 24,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
            "tie_word_embeddings": True,
        },
        _QWEN_WORDS,
    ),
    "qwen3_vl": Family(
        templates.QWEN3_VL,
        "<|im_end|>",
        {
            "text_config": {
                **_TEXT,
                "num_hidden_layers": 3,  # one more than deepstack reaches
                "head_dim": 8,
                "rope_parameters": {**_SECTIONS, "mrope_interleaved": True},
                "tie_word_embeddings": True,
            },
            "vision_config": {
                **_QWEN_TOWER,
                "hidden_size": 16,
                "out_hidden_size": HIDDEN,
                "intermediate_size": 24,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0, 1],
            },
            "tie_word_embeddings": True,
        },
        _QWEN_WORDS,
    ),
    "internvl": Family(
        templates.INTERNVL,
        "<|im_end|>",
        {
            "text_config": {**_TEXT, "model_type": "qwen2", "tie_word_embeddings": False},
            "vision_config": {
                **_TOWER,
                "image_size": [16, 16],
                "patch_size": [4, 4],
                "attention_bias": True,
                "use_qk_norm": False,
            },
            "image_seq_length": 4,
            "downsample_ratio": 0.5,
            "tie_word_embeddings": False,
        },
        {"image_token_id": "<IMG_CONTEXT>"},
    ),
    "idefics3": _idefics(templates.IDEFICS3, "<|begin_of_text|>"),
    "smolvlm": _idefics(templates.SMOLVLM, "<|im_start|>"),
    "llava_onevision": Family(
        templates.LLAVA_ONEVISION,
        "<|im_end|>",
        {
            "text_config": {**_TEXT, "model_type": "qwen2", "tie_word_embeddings": True},
            "vision_config": {**_SIGLIP, "image_size": 8},
            "image_grid_pinpoints": [[8, 8], [8, 16], [16, 8], [16, 16], [8, 24]],
            "tie_word_embeddings": True,
        },
        {"image_token_index": "<image>", "video_token_index": "<video>"},
    ),
    "gemma3": Family(
        templates.GEMMA3,
        "<end_of_turn>",
        {
            "text_config": {
                **_TEXT,
                "model_type": "gemma3_text",
                "head_dim": 8,
                "query_pre_attn_scalar": 6,
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention"],
                "tie_word_embeddings": True,
            },
            "vision_config": {**_SIGLIP, "image_size": 24},
            "mm_tokens_per_image": 9,
            "initializer_range": 0.2,
            "tie_word_embeddings": True,
        },
        {
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
            "image_token_index": "<image_soft_token>",
        },
        bos="<bos>",
    ),
}
_FAMILIES["gemma4"] = Family(
    templates.GEMMA4,
    "<turn|>",
    {
        "text_config": {
            **_TEXT,
            "model_type": "gemma4_text",
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 40,
            "num_kv_shared_layers": 2,
            "head_dim": 8,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 4,
            "tie_word_embeddings": True,
        },
        "vision_config": {
            **_TOWER,
            "model_type": "gemma4_vision",
            "num_key_value_heads": 2,
            "head_dim": 8,
            "pooling_kernel_size": 2,
            "position_embedding_size": 160,
        },
        "audio_config": None,
        "tie_word_embeddings": True,
    },
    {
        "boi_token_id": "<|image>",
        "eoi_token_id": "<image|>",
        "image_token_id": "<|image|>",
        "video_token_id": "<|video|>",
        "audio_token_id": "<|audio|>",
    },
    bos="<bos>",
)
_FAMILIES["qwen3_vl_moe"] = _FAMILIES["qwen3_vl"].with_text(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12
)
_FAMILIES["qwen3_5"] = _FAMILIES["qwen3_vl"].with_text(
    num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
)
"""Between them: windows, untied heads, deepstack, tiles, an own row at a line's end, blocks that see both ways."""


def tiny_vlm(kind: str, directory: Path, seed: int = 0, **text: int) -> Path:
    """Write a model of a family to ``directory``, complete, in float32. ``text``: keys of its language model."""
    tokenizer = vision_tokenizer(kind)
    with quiet_library():
        model = vision_model(kind, seed=seed, dtype=torch.float32, **text)
        model.save_pretrained(directory)
        save_tokenizer(tokenizer, directory)
        eos = tokenizer.eos_token_id
        GenerationConfig(eos_token_id=eos).save_pretrained(directory)
    save_processor(pictures_of(kind), directory)
    return directory


def vision_model(
    kind: str, *, seed: int = 0, dtype: torch.dtype = torch.float64, **text: int
) -> PreTrainedModel:
    """The model by itself, in train mode, with the library's own attention."""
    with torch.random.fork_rng(devices=[]), quiet_library():
        torch.manual_seed(seed)
        build: Any = AutoModelForImageTextToText.from_config
        model: PreTrainedModel = build(
            vision_config(kind, **text), dtype=torch.float32, experts_implementation="eager"
        )
        _sharpen(model)
    return model.to(dtype).train()


def vision_config(kind: str, **text: int) -> PreTrainedConfig:
    """The configuration, the ids of the tokenizer's words in it. ``text``: keys of its language model."""
    family, tokenizer = _FAMILIES[kind], vision_tokenizer(kind)
    language_model = {
        **family.config["text_config"],
        "vocab_size": len(tokenizer) + 5,
        "eos_token_id": tokenizer.eos_token_id,
        **text,
    }
    if kind == "gemma4":
        language_model["vocab_size_per_layer_input"] = language_model["vocab_size"]
        language_model["pad_token_id"] = tokenizer.pad_token_id
    ids = {name: tokenizer.convert_tokens_to_ids(word) for name, word in family.words.items()}
    return AutoConfig.for_model(kind, **{**family.config, "text_config": language_model, **ids})


def vision_tokenizer(kind: str) -> PreTrainedTokenizerBase:
    """The tokenizer with the family's words and its chat template."""
    family = _FAMILIES[kind]
    base = tiny_tokenizer(None)
    words = [*image_tokens(pictures_of(kind)), family.eos]
    base.add_special_tokens({"additional_special_tokens": list(dict.fromkeys(words))})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=base.backend_tokenizer,
        bos_token=family.bos,
        eos_token=family.eos,
        pad_token="<|endoftext|>",
        model_specific_special_tokens=named_tokens(pictures_of(kind)),
    )
    tokenizer.chat_template = family.template
    return tokenizer


def pictures_of(kind: str) -> str:
    """The family whose pictures it has."""
    return {"qwen3_vl_moe": "qwen3_vl", "qwen3_5": "qwen3_vl"}.get(kind, kind)


@torch.no_grad()
def _sharpen(model: nn.Module) -> None:
    """Nothing is zero or one that could be forgotten: every parameter has noise of the size of the weights."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 or "projection_weight" in name or "position" in name:
            parameter.add_(0.2 * torch.randn_like(parameter))
        if name.endswith(("q_proj.weight", "k_proj.weight", "qkv.weight")):
            parameter.mul_(1.5)
