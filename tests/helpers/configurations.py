"""The sizes of four models that people train, as configurations without weights: what a plan needs of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from taut.models.load import quiet_library

_SHAPES: dict[str, tuple[str, int, int, int, int, int, int, bool]] = {
    "0.5B": ("qwen2", 896, 4864, 24, 14, 2, 151936, True),
    "8B": ("llama", 4096, 14336, 32, 32, 8, 128256, False),
    "32B": ("qwen2", 5120, 27648, 64, 40, 8, 152064, False),
    "70B": ("llama", 8192, 28672, 80, 64, 8, 128256, False),
}
"""name -> model_type, hidden and inner size, layers, heads, heads of keys, vocabulary, whether tables are tied."""


def save_configuration(name: str, place: Path, **changes: Any) -> Path:
    """A directory with the config.json of a model: Qwen 2.5's (0.5B, 32B), Llama 3's (8B, 70B)."""
    kind, hidden, inner, layers, heads, kv_heads, vocabulary, is_tied = _SHAPES[name]
    fields = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": is_tied,
        "max_position_embeddings": 32768,
        "dtype": "bfloat16",
    }
    with quiet_library():
        config = AutoConfig.for_model(kind, **(fields | changes))
        config.architectures = ["Qwen2ForCausalLM" if kind == "qwen2" else "LlamaForCausalLM"]
        config.save_pretrained(place / name)
    return place / name
