"""What must be in force in a loaded model, whatever its head: float64 throughout where that was asked for, the
attention asked for in the config of every submodule, no cache, no router auxiliary loss, no dropout.

A vision tower has the library's own attention: pictures are not packed into the run of tokens, and one never sees
another. The library can pass over each of these without a word, so each is set or proved here. May import errors and
models.anatomy.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from taut.errors import ModelError
from taut.models import anatomy

TOWER_ATTENTION = "sdpa"
_NOISY = re.compile(r"^(?!classifier).*(dropout|pdrop|layerdrop|jitter_noise)")


class Loading(NamedTuple):
    """How a model is loaded; see ``load_model``."""

    dtype: torch.dtype
    attention: str
    trust_remote_code: bool = False
    is_narrow: bool = False


def put_in_force(model: PreTrainedModel, how: Loading) -> None:
    """What the library leaves to be done, and proofs of what it was asked for."""
    if how.dtype == torch.float64:
        model.double()  # buffers too: from_pretrained leaves RoPE's frequencies in float32
    _switch_off(model)
    require_attention(model, how.attention)
    _require_no_dropout(model)


def asked_for(config: PreTrainedConfig, attention: str) -> str | dict[str, str]:
    """What the library is told, so that the language model has ``attention`` and a vision tower its own."""
    if not anatomy.takes_pictures(config):
        return attention
    return {"text_config": attention, "vision_config": TOWER_ATTENTION}


def set_attention(model: PreTrainedModel, attention: str) -> None:
    """Put another attention in force in the language model."""
    asked: Any = asked_for(model.config, attention)
    model.set_attn_implementation(asked)


def require_attention(model: PreTrainedModel, attention: str) -> None:
    """Raise ModelError unless every submodule's config of the language model has ``attention`` in force."""
    for name, module in anatomy.language_model(model).named_modules():
        config = getattr(module, "config", None)
        found = getattr(config, "_attn_implementation", None)
        if isinstance(config, PreTrainedConfig) and found != attention and not _is_vision(name):
            raise ModelError(
                f"{name or type(module).__name__} has the attention {found} in force; expected "
                f"{attention}: the "
                "model does not use the library's attention interface"
            )


def _switch_off(model: PreTrainedModel) -> None:
    """No cache and no router auxiliary loss, in the config of every submodule."""
    configs = {
        id(module.config): module.config for module in model.modules() if hasattr(module, "config")
    }
    for config in configs.values():
        for name in ("use_cache", "output_router_logits"):
            if getattr(config, name, False):
                setattr(config, name, False)


def _require_no_dropout(model: PreTrainedModel) -> None:
    """Noise inside the model would depend on how samples are packed: none is let through."""
    parts = {"config": anatomy.text_config(model)}
    if anatomy.takes_pictures(model.config):
        parts["config.vision_config"] = model.config.vision_config
    found = [
        (f"{part}.{name}", value)
        for part, config in parts.items()
        for name, value in config.to_dict().items()
        if _NOISY.search(name)
    ]
    found += [(name, m.p) for name, m in model.named_modules() if isinstance(m, nn.Dropout)]
    for name, value in found:
        if isinstance(value, float) and value > 0:
            raise ModelError(
                f"{name} is {value}; expected 0: taut has no noise inside a model, since it would "
                "depend on how samples are packed; set it to 0 in the model's config.json"
            )


def _is_vision(name: str) -> bool:
    return any(part in name for part in ("visual", "vision", "image", "audio"))
